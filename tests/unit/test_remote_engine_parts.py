"""The engine `http`: documents, frames, texts and sub-streams without a network."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoders.sse import SseDecoder, SseEvent
from relay.engines.base import Completed, DocumentError, Usage
from relay.engines.http import HttpEngine
from relay.engines.remote.frames import FrameReader, ending_of, frame_data
from relay.engines.remote.outline import DOCUMENT_BYTES_MAX, outline
from relay.engines.remote.substream import text_reader
from relay.engines.remote.texts import Texts
from relay.ordering import EngineFrame, Say
from relay.redact import Redactor
from tests.support.remote_engine import said

WORKFLOW = """
# how it is run
version: 2
other: {name: no, tasks: [1, 2, 3]}
workflow:
  {inputs: &i {name: wrong, tasks: [x]}, name: triage, tasks: [
    {id: a, name: wrong, tasks: [{}, {}]}, *i, [1, 2], "text"]}
"""


# --- documents ------------------------------------------------------------------------------------


def test_w3_2_name_and_tasks_of_a_document_as_far_as_they_can_be_told() -> None:
    assert outline(WORKFLOW) == ("triage", 4)
    parsed = {"workflow": {"name": "triage", "tasks": [{}, {}]}}
    assert outline(parsed) == ("triage", 2)
    assert outline(json.dumps(parsed)) == ("triage", 2)
    for strange in ("just a text", "- a\n- b", "workflow: 5", "{? [a, b] : c, ? {x: y} : z}"):
        assert outline(strange) == ("", 0)
    assert outline({"workflow": {"name": 5, "tasks": {}}}) == ("", 0)


def test_w1_4_what_is_not_yaml_is_refused_with_its_place() -> None:
    with pytest.raises(DocumentError) as refused:
        outline("workflow:\n  name: [a, b\n  tasks: {")
    [problem] = refused.value.problems
    assert problem.line is not None
    assert problem.line >= 2
    assert problem.column is not None
    for text in ("", "# only a comment\n", "a: \x07", "a: *unknown\n  b: c"):
        with pytest.raises(DocumentError):
            outline(text)


def test_w3_2_the_size_is_bounded_and_bombs_cost_nothing() -> None:
    big = "a" * (DOCUMENT_BYTES_MAX - 5)
    assert outline(f"x: {big}") == ("", 0)
    for document in (f"x: {big}abc", {"x": big}):
        with pytest.raises(DocumentError, match="262144 is the most"):
            outline(document)
    merges = "a0: &a0 {x: 1}\n" + "".join(
        f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 40)
    )
    assert outline(merges) == ("", 0)
    deep = outline("[" * 900 + "]" * 900)
    assert deep == ("", 0)
    nested: dict[str, Any] = {}
    for _ in range(100_000):
        nested = {"a": nested}
    with pytest.raises(DocumentError):
        outline(nested)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_w1_4_any_text_is_a_document_or_a_problem(text: str) -> None:
    try:
        found = outline(text)
    except DocumentError as error:
        found = error.problems[0].message, 0
    assert isinstance(found[0], str)


def test_w3_2_check_leaves_the_inputs_to_the_engine() -> None:
    engine = HttpEngine("http://h")
    checked = engine.check(WORKFLOW, {"ticket": 1})
    assert (checked.name, checked.task_count, checked.inputs) == ("triage", 4, {"ticket": 1})


@pytest.mark.parametrize(
    ("document", "inputs", "path"),
    [
        (WORKFLOW, {"a": [1, float("inf")]}, "inputs.a[1]"),
        ({"workflow": {"tasks": [{"x": float("-inf")}]}}, {}, "workflow.tasks[0].x"),
    ],
)
def test_w1_4_a_number_that_the_engine_would_not_get_is_refused(
    document: Any, inputs: dict[str, Any], path: str
) -> None:
    with pytest.raises(DocumentError) as raised:
        HttpEngine("http://h").check(document, inputs)
    assert [problem.path for problem in raised.value.problems] == [path]


# --- frames ---------------------------------------------------------------------------------------

NAMES = st.binary(max_size=12).map(lambda n: n.replace(b"\r", b"").replace(b"\n", b""))
DATA = st.binary(min_size=1, max_size=30).map(lambda d: d.replace(b"\r", b"\n"))


@given(name=NAMES, data=DATA)
def test_w2_1_b16_any_frame_is_read_back_as_it_was_or_dropped(name: bytes, data: bytes) -> None:
    reader = FrameReader("http://h", (), Redactor())
    found = reader.read(SseEvent(data, name))
    if b"\0" in name:
        assert found is None
        return
    if name == b"token":
        return
    assert isinstance(found, EngineFrame)
    [event] = SseDecoder().feed(found.frame)
    assert (event.event, event.data) == (name, data)
    assert frame_data(found.frame) == data


@pytest.mark.parametrize(
    ("url", "dialled"),
    [
        ("http://h:80/s", "http://h/s"),
        ("http://h/%7Es?q=a%2Fb&c=%3D%20#f", "http://h/%7Es?q=a%2Fb&c=%3D%20"),
        ("HTTP://H/s", "http://H/s"),
        ("/s", "http://h/s"),
        ("s", "http://h/engine/s"),
        ("http://h:8080/s", None),
        ("https://h/s", None),
        ("http://h.evil/s", None),
        ("http://h@evil/s", None),
        ("http://evil/@h/s", None),
        ("http://evil\\@h/s", None),
        ("http://user:pw@h/s", None),
        ("http://h\n/s", None),
        ("http://h\u00e9/s", None),
        ("http://h:x/s", None),
        ("ftp://h/s", None),
        ("http://[::1/s", None),
        ("http://h/" + "s" * 9000, None),
        (5, None),
        ([], None),
        ({"href": "http://h/s"}, None),
    ],
)
def test_w3_2_which_stream_urls_may_be_dialled(url: object, dialled: str | None) -> None:
    reader = FrameReader("http://h/engine/v1", (), Redactor())
    data = json.dumps({"data": {"task_id": "a", "stream_url": url}}).encode()
    found = reader.read(SseEvent(data, b"streaming_started"))
    assert isinstance(found, EngineFrame)
    assert (found.offer.url if found.offer else None) == dialled
    assert len(reader.complaints) == (dialled is None)


def test_w3_2_origins_that_are_allowed_never_get_the_key() -> None:
    allowed = ("http://s:81/ignored", "https://t")
    reader = FrameReader("http://h", allowed, Redactor())
    for url, ours in (("http://s:81/x", False), ("https://t:443/x", False), ("http://h/x", True)):
        data = json.dumps({"data": {"task_id": "a", "stream_url": url}}).encode()
        found = reader.read(SseEvent(data, b"streaming_started"))
        assert isinstance(found, EngineFrame)
        assert found.offer is not None
        assert found.offer.ours is ours


@given(st.recursive(st.none() | st.integers() | st.text(max_size=3), st.lists, max_leaves=4))
def test_any_data_of_a_frame_is_taken(value: object) -> None:
    reader = FrameReader("http://h", (), Redactor())
    for payload in (value, {"data": value}, {"data": {"task_id": value, "stream_url": value}}):
        for name in (b"streaming_started", b"task_completed", b"workflow_completed", b"token"):
            reader.read(SseEvent(json.dumps(payload).encode(), name))


# --- texts ----------------------------------------------------------------------------------------


def frame(name: str, task: str | None, **data: object) -> Say:
    return Say(name, said(name, task_id=task, **data), task)


def test_w2_2_the_stored_output_is_the_text_since_the_last_start() -> None:
    texts = Texts()
    texts.said(frame("streaming_started", "a"))
    texts.token("a", b"old")
    assert texts.said(frame("task_error", "a")) is None
    texts.said(frame("streaming_started", "a"))
    texts.token("a", b"\\ud83d")
    texts.token("a", b"\\ude00\\ud83d")
    whole = {"task/a": {"output": "\U0001f600\ufffd"}}
    assert texts.said(frame("streaming_completed", "a")) == whole
    assert texts.said(frame("heartbeat", None)) is None
    assert texts.said(frame("task_completed", "a", output="another")) == whole
    assert texts.said(frame("task_completed", "a")) is None
    assert texts.said(frame("task_completed", "b", output=[1])) == {"task/b": {"output": [1]}}


def test_texts_are_bounded() -> None:
    texts = Texts(10, 15)
    texts.token("a", b"x" * 9)
    assert texts.room("a")
    texts.token("a", b"x")
    assert not texts.room("a")
    assert texts.room("b")
    texts.token("b", b"x" * 5)
    assert not texts.room("c")
    texts.said(frame("task_completed", "a"))
    assert texts.room("c")


# --- sub-streams ----------------------------------------------------------------------------------


@given(cuts=st.lists(st.integers(0, 200), max_size=6))
def test_w3_2_token_frames_however_they_are_cut(cuts: list[int]) -> None:
    body = (
        b'event: token\r\ndata: {"delta":"a\\"b"}\r\n\r\n: c\n\n'
        b'event: other\ndata: {"delta":"no"}\n\n'
        b'event: token\ndata: {"delta":5}\n\nevent: token\ndata: [\n\ndata: {"delta":"no"}\n\n'
        b'event: token\ndata: {"delta":"\xc3\xa9","task_id":"x"}\n\ndata: [DONE]\n\n'
        b'event: token\ndata: {"delta":"behind"}\n\n'
    )
    reader = text_reader("token", Redactor())
    places = sorted({0, *(at for at in cuts if at < len(body)), len(body)})
    text = b"".join(reader.feed(body[a:b]) for a, b in pairwise(places))
    assert text == b'a\\"b\xc3\xa9'
    assert reader.ended
    assert reader.problem == ""


def test_w3_2_token_frames_end_with_their_body() -> None:
    reader = text_reader("token", Redactor())
    assert reader.feed(b'event: token\ndata: {"delta":"a"}') == b""
    assert not reader.ended
    assert reader.eof() == b"a"
    assert reader.ended


@pytest.mark.parametrize("odd", [None, "x", True, -1, [], {}, 10**400, float("nan"), "\ud800"])
def test_w3_2_counts_of_an_engine_are_numbers_whatever_it_says(odd: Any) -> None:
    counts = dict.fromkeys(("tasks", "completed", "failed", "skipped", "duration_ms", "more"), odd)
    usages = ({"usage": odd}, {"usage": {"prompt_tokens": odd}})
    for summary in (odd, counts, *usages):
        frame = said("workflow_completed", execution_summary=summary, final_task_id=odd)
        [event] = SseDecoder().feed(frame)
        read = FrameReader("http://e", (), Redactor()).read(event)
        assert isinstance(read, EngineFrame)
        ending = ending_of([Say(read.name, read.frame)])
        assert isinstance(ending, Completed)
        assert ending.summary == dict.fromkeys(("tasks", "completed", "failed", "skipped"), 0)
        assert ending.usage == Usage()
