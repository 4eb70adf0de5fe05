"""M2.7: calls that a template rendered into the text, cut out of it however it is cut itself."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoders.inline_calls import InlineCalls
from encoders.inline_markup import Cut
from encoders.tool_schema import ToolSchema


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS: Final = [
    tool(
        "write",
        path={"type": "string"},
        content={"type": "string"},
        n={"type": "integer"},
        ratio={"type": "number"},
        deep={"type": "boolean"},
        tags={"type": "array"},
        meta={"type": "object"},
        maybe={"anyOf": [{"type": "integer"}, {"type": "null"}]},
        either={"type": ["string", "integer"]},
    ),
    tool("bare"),
]


class Reader:
    """Feeds a text in pieces and puts together what comes out."""

    def __init__(self, withheld_max: int = 1 << 20) -> None:
        ids = (f"call_{number}" for number in itertools.count())
        self.target = InlineCalls(lambda: next(ids), ToolSchema(TOOLS), withheld_max)
        self.text = ""
        self.calls: dict[str, list[str]] = {}

    def feed(self, *pieces: str) -> Reader:
        for piece in pieces:
            cut = Cut()
            self.target.feed(piece, cut)
            self._add(cut)
        return self

    def end(self) -> Reader:
        cut = Cut()
        self.target.end(cut)
        self._add(cut)
        return self

    @property
    def parsed(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(text)) for name, text in self.calls.values()]

    def _add(self, cut: Cut) -> None:
        self.text += cut.text
        for delta in cut.calls:
            function = delta["function"]
            if "name" in function:
                assert delta["id"] not in self.calls
                self.calls[delta["id"]] = [function["name"], ""]
            self.calls[delta["id"]][1] += function["arguments"]


def read(text: str, size: int = 0, **options: Any) -> Reader:
    size = size or max(1, len(text))
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    return Reader(**options).feed(*pieces).end()


def xml(name: str, *parameters: tuple[str, str], newline: str = "\n") -> str:
    told = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in parameters)
    text = f"<tool_call>\n<function={name}>\n{told}</function>\n</tool_call>"
    return text.replace("\n", newline)


HERMES: Final = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "x"]}}\n</tool_call>'
F: Final = ("f", {"a": [1, "x"]})

# name → the text that a provider sent, the text that is left, the calls.
TEXTS: Final[dict[str, tuple[str, str, list[tuple[str, Any]]]]] = {
    "no call": ("a <b> \n <tool> c < d ", "a <b> \n <tool> c < d ", []),
    "only a call": (HERMES, "", [F]),
    "text before": (f"Let me see.\n\n{HERMES}", "Let me see.", [F]),
    "text around": (f"a {HERMES}\n b", "a\n b", [F]),
    "white space around": (f"\n {HERMES}\n\n", "", [F]),
    "several": (f"{HERMES}\n{HERMES} then {HERMES}", " then", [F, F, F]),
    "joined": (f"{HERMES}{HERMES}", "", [F, F]),
    "a list of calls": (
        '<tool_call>[{"name":"f"},{"name":"g"}]</tool_call>', "", [("f", {}), ("g", {})],
    ),
    "no arguments": ('<tool_call>{"name":"f"}</tool_call>', "", [("f", {})]),
    "null arguments": ('<tool_call>{"name":"f","arguments":null}</tool_call>', "", [("f", {})]),
    "arguments as text": (
        '<tool_call>{"name":"f","arguments":"{\\"a\\":1}"}</tool_call>', "", [("f", {"a": 1})],
    ),
    "parameters": (
        '<tool_call>{"name":"f","parameters":{"a":1}}</tool_call>', "", [("f", {"a": 1})],
    ),
    "markers in a string": (
        '<tool_call>{"name":"f","arguments":'
        '{"a":"\\"</tool_call>\\\\","b":"<tool_call>"}}</tool_call>',
        "", [("f", {"a": '"</tool_call>\\', "b": "<tool_call>"})],
    ),
    "a line break in a string": (
        '<tool_call>{"name":"f","arguments":{"a":"x\ny"}}</tool_call>', "", [("f", {"a": "x\ny"})],
    ),
    "xml": (xml("write", ("path", "a.py"), ("content", 'print("x")\n')), "",
            [("write", {"path": "a.py", "content": 'print("x")\n'})]),
    "xml, CRLF": (xml("write", ("path", "a"), ("content", "x\ny"), newline="\r\n"), "",
                  [("write", {"path": "a", "content": "x\r\ny"})]),
    "xml on one line": (
        "<tool_call><function=write><parameter=path>a b</parameter></function></tool_call>",
        "", [("write", {"path": "a b"})],
    ),
    "xml with name attributes": (
        '<tool_call><function name="write"><parameter name="path">a</parameter>'
        "</function></tool_call>",
        "", [("write", {"path": "a"})],
    ),
    "xml without parameters": (xml("write"), "", [("write", {})]),
    "xml of an unknown tool": (xml("other", ("n", "5")), "", [("other", {"n": "5"})]),
    "xml, empty value": (xml("write", ("path", "")), "", [("write", {"path": ""})]),
    "xml, value of newlines": (xml("write", ("path", "\n\n")), "", [("write", {"path": "\n\n"})]),
    "xml, value with markup": (
        xml("write", ("content", "<a></b></param></parameter </function><tool_call>\\ \"")), "",
        [("write", {"content": "<a></b></param></parameter </function><tool_call>\\ \""})],
    ),
    "xml, several": (f"a\n{xml('write', ('path', 'a'))}\n{xml('bare')}\n{HERMES} z", "a z",
                     [("write", {"path": "a"}), ("bare", {}), F]),
    "two functions in one call": (
        "<tool_call><function=write></function>\n<function=bare></function></tool_call>", "",
        [("write", {}), ("bare", {})],
    ),
    "xml without </function>": (
        "<tool_call><function=write><parameter=path>a</parameter></tool_call>x", "x",
        [("write", {"path": "a"})],
    ),
    "typed": (
        xml("write", ("n", "5"), ("ratio", "1.50"), ("deep", "True"), ("tags", '["a", 1]'),
            ("meta", '{"k": null}'), ("maybe", "None"), ("either", "7"), ("path", "9")), "",
        [("write", {"n": 5, "ratio": 1.5, "deep": True, "tags": ["a", 1], "meta": {"k": None},
                    "maybe": None, "either": "7", "path": "9"})],
    ),
    "typed, but it is not": (
        xml("write", ("n", "five"), ("ratio", "NaN"), ("deep", "1"), ("tags", "{}")), "",
        [("write", {"n": "five", "ratio": "NaN", "deep": "1", "tags": "{}"})],
    ),
    "bare": ("x\n<function=bare>\n</function>\n</tool_call>\ny", "x\ny", [("bare", {})]),
    "bare, nothing behind": ("<function=bare></function>", "", [("bare", {})]),
    "bare of no tool": ("<function=other></function>", "<function=other></function>", []),
    "a marker in prose": (f"The <tool_call> tag. {HERMES}", "The <tool_call> tag.", [F]),
    "a marker twice": (f"<tool_call>\n{HERMES}", "<tool_call>", [F]),
    "nothing in it": ("<tool_call></tool_call>", "<tool_call></tool_call>", []),
    "no JSON": ("a <tool_call>{no}</tool_call> b", "a <tool_call>{no}</tool_call> b", []),
    "no call in it": ('<tool_call>{"a":1}</tool_call>', '<tool_call>{"a":1}</tool_call>', []),
    "arguments that are none": (
        '<tool_call>{"name":"f","arguments":[1]}</tool_call>',
        '<tool_call>{"name":"f","arguments":[1]}</tool_call>', [],
    ),
    "unclosed JSON": (f"a {HERMES[:-9]}", f"a {HERMES[:-9]}", []),
    "unclosed string": (
        '<tool_call>{"name":"f</tool_call> b', '<tool_call>{"name":"f</tool_call> b', [],
    ),
    "unclosed marker": ("a <tool_ca", "a <tool_ca", []),
    "unclosed head": ("a <tool_call>\n<function=wri", "a <tool_call>\n<function=wri", []),
    "another tag": ("<tool_call><functions></tool_call>", "<tool_call><functions></tool_call>", []),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_calls_are_cut_out_however_the_text_is_cut(name: str) -> None:
    sent, left, calls = TEXTS[name]
    for size in (0, 1, 2, 3, 5, 7, 11, 64):
        reader = read(sent, size)
        assert (reader.text, reader.parsed) == (left, calls), size
        assert (reader.target.closed, reader.target.broken) == (len(calls), 0)


# --- calls that are never closed ----------------------------------------------------------------

OPEN_XML: Final = xml("write", ("content", 'a "b"\n'), ("n", "12"), ("path", "p"))
CLOSED_AT: Final = len(OPEN_XML)


@pytest.mark.parametrize("cut", range(CLOSED_AT))
def test_a_call_that_was_cut_anywhere_is_never_dispatchable(cut: int) -> None:
    """Its arguments are no JSON before its closing marker is whole."""
    for size in (0, 3):
        reader = read(OPEN_XML[:cut], size)
        assert reader.target.closed == 0
        for _, arguments in reader.calls.values():
            with pytest.raises(json.JSONDecodeError):
                json.loads(arguments)
        if not reader.calls:  # it is given back
            assert reader.text == OPEN_XML[:cut]


def test_what_follows_broken_markup_is_text() -> None:
    sent = "<tool_call><function=write><parameter=path>a</parameter>oops</function></tool_call> b"
    for size in (0, 1, 4):
        reader = read(sent, size)
        assert reader.text == "oops</function></tool_call> b"
        assert list(reader.calls.values()) == [["write", '{"path":"a"']]
        assert (reader.target.closed, reader.target.broken) == (0, 1)


def test_text_behind_a_function_that_has_no_end_marker() -> None:
    reader = read("<tool_call><function=write></function> b")
    assert (reader.text, list(reader.calls.values())) == ("b", [["write", "{"]])


# --- when things are told -----------------------------------------------------------------------


def test_a_content_parameter_flows_tail_by_tail() -> None:
    """M2.7: from its opening tag; what may be its closing marker waits."""
    reader = Reader().feed("<tool_call>\n<function=write>\n<parameter=content>\n")

    def arguments() -> str:
        return reader.calls["call_0"][1]

    assert arguments() == '{"content":"'
    expected = arguments()
    for piece, told in [
        ("def f", "def f"), ("():\n", "():"), ("  x", "\\n  x"), ("</para", ""),
        ("graph>", "</paragraph>"), ("\n", ""), ("</parameter", ""), (">", '"'),
        ("\n</function>\n", ""), ("</tool_call", ""), (">", "}"),
    ]:  # fmt: skip
        reader.feed(piece)
        expected += told
        assert arguments() == expected, piece
    assert json.loads(arguments()) == {"content": "def f():\n  x</paragraph>"}


def test_text_is_told_at_once_but_for_what_may_be_a_marker() -> None:
    reader = Reader()
    for piece, told in [
        ("Hello", "Hello"),
        (" world", " world"),
        (" ", ""),
        ("a <", " a"),
        ("b", " <b"),
    ]:
        before = reader.text
        reader.feed(piece)
        assert reader.text == before + told
    assert reader.feed(" x<tool_").end().text == "Hello world a <b x<tool_"


def test_what_is_withheld_has_a_bound() -> None:
    body = '{"name":"f","arguments":{"a":"' + "x" * 300
    reader = Reader(withheld_max=200)
    for at in range(0, len(body), 7):
        reader.feed(("<tool_call>" + body)[at : at + 7])
    assert reader.text.startswith("<tool_call>{")
    assert reader.calls == {}
    sent = "<tool_call>" + body + '"}}</tool_call> ' + HERMES
    for size in (1, 7):  # cut fine enough for the bound to be seen in time
        assert read(sent, size, withheld_max=200).parsed == [F]


def test_a_typed_value_over_the_bound_flows_as_text() -> None:
    long = xml("write", ("tags", "[" + "1," * 200 + "1]"))
    for size in (0, 7):
        reader = read(long, size, withheld_max=100)
        assert reader.parsed == [("write", {"tags": "[" + "1," * 200 + "1]"})]


# --- an independent reading ---------------------------------------------------------------------

values = st.text(alphabet='ab<>/"\\\n {}é\U0001f600', max_size=12).filter(
    lambda text: "</parameter>" not in text and not text.startswith(("\n", "\r"))
)
prose = st.text(alphabet="xyz .<", max_size=10)
names = st.sampled_from(["write", "bare", "other"])


@st.composite
def parts(draw: st.DrawFn) -> tuple[str, tuple[str, dict[str, Any]] | None]:
    """A piece of an answer: its text, and the call that it is."""
    kind = draw(st.sampled_from(["prose", "json", "xml"]))
    if kind == "prose":
        return draw(prose), None
    name = draw(names)
    keys = st.sampled_from(["path", "content", "k"])
    arguments = draw(st.dictionaries(keys, values, max_size=3))
    if kind == "json":
        body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=draw(st.booleans()))
        return f"<tool_call>\n{body}\n</tool_call>", (name, arguments)
    return xml(name, *arguments.items()), (name, arguments)


@given(st.lists(parts(), max_size=6), st.data())
def test_any_chunking_of_any_answer_gives_the_same_calls_and_text(
    answer: list[tuple[str, tuple[str, dict[str, Any]] | None]], data: st.DataObject
) -> None:
    sent = "".join(text for text, _ in answer)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=30)))
    reader = Reader().feed(*(sent[a:b] for a, b in itertools.pairwise([0, *cuts, len(sent)]))).end()
    assert reader.parsed == [call for _, call in answer if call is not None]
    # White space at the borders of calls is theirs; all other characters are the answer's.
    expected = "".join(text for text, call in answer if call is None)
    assert re.sub(r"\s", "", reader.text) == re.sub(r"\s", "", expected)
    whole = Reader().feed(sent).end()
    assert (whole.text, whole.calls) == (reader.text, reader.calls)


tokens = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<function=write>", "<function=other>", "</function>",
        "<parameter=content>", "<parameter=n>", "</parameter>", '{"name":"f"}', "{", "}", '"',
        "\\", "\n", "\r", " ", "x", "5", "<", ">", "<function", " name=", "\u2028",
    ]
)  # fmt: skip


@given(st.lists(tokens, max_size=24).map("".join), st.data())
def test_any_text_survives_in_any_chunking(sent: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=10)))
    reader = Reader().feed(*(sent[a:b] for a, b in itertools.pairwise([0, *cuts, len(sent)]))).end()
    whole = Reader().feed(sent).end()
    assert (whole.text, whole.calls) == (reader.text, reader.calls)
    for state in (whole.target, reader.target):
        assert (state.closed, state.broken) == (whole.target.closed, whole.target.broken)
        assert state.closed + state.broken == len(whole.calls)
    complete = 0
    for _, arguments in whole.calls.values():
        try:
            json.loads(arguments)
        except json.JSONDecodeError:
            continue
        complete += 1
    assert complete == whole.target.closed
    if not whole.calls:
        assert whole.text == sent


# --- linear -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["xml", "json", "text"])
def test_the_buffer_never_holds_more_than_a_cut_marker(form: str) -> None:
    """A 400 KB artifact in 3-byte pieces: each piece is looked at once."""
    source = '<div class="a">\n  </div></para\n</tool_cal' * 10_000
    if form == "xml":
        sent = xml("write", ("content", source))
    elif form == "json":
        body = json.dumps({"name": "write", "arguments": {"content": source}})
        sent = f"<tool_call>{body}</tool_call>"
    else:
        sent = source
    assert len(source) > 400_000
    reader = Reader(withheld_max=1 << 24)
    held = 0
    for at in range(0, len(sent), 3):
        reader.target.feed(sent[at : at + 3], Cut())
        held = max(held, len(reader.target._buffer) - reader.target._at)
    assert held < len("<parameter=content>")
    assert reader.target.closed == (0 if form == "text" else 1)
