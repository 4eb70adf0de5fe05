"""M1.1, M1.3, M2.1 to M2.3: what a client of the models plane sees on the wire, to the byte."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import pytest

from tests.support.fake_upstream import (
    DONE,
    Eof,
    Head,
    Send,
    Wait,
    chunk,
    json_answer,
    openai_stream,
    sse,
)
from tests.support.gateway import MODEL
from tests.support.stack import API_V1, V1, Stack, served

pytestmark = pytest.mark.asyncio(loop_scope="session")

A: Final = chunk("a", role="assistant")
B: Final = chunk("b")
END: Final = chunk(None, finish_reason="stop")

# --- headers and moments --------------------------------------------------------------------------


@pytest.mark.parametrize("base", [V1, API_V1])
async def test_headers_of_a_stream(stack: Stack, base: str) -> None:
    """M1.3, B77, B80: exact, sent once, with no length; never compressed, whatever is accepted."""
    accepted = ("accept-encoding", "gzip, deflate, br, zstd")
    answer = await stack.ask(*openai_stream(["Hi"]), base=base, headers=[accepted])
    assert answer.header("content-type") == "text/event-stream"
    assert answer.header("cache-control") == "no-cache, no-transform"
    assert answer.header("x-accel-buffering") == "no"
    assert (answer.header("x-request-id") or "").startswith("req_")
    assert answer.header("transfer-encoding") == "chunked"
    for name in ("content-length", "content-encoding", "connection", "set-cookie"):
        assert answer.header(name) is None


async def test_headers_leave_once_the_status_is_known(stack: Stack) -> None:
    """M1.3: before any byte of the body."""
    gate = asyncio.Event()
    async with stack.client(Head(), Wait(gate), *openai_stream(["Hi"])) as client:
        await client.read_head()
        assert client.status == 200
        assert not client.body
        gate.set()
        await client.read_all()
        assert client.complete


async def test_each_event_leaves_when_it_comes(stack: Stack) -> None:
    """M2.1: none is held back for the next, the finish and the usage included."""
    sends = openai_stream(["a", "b"], usage=False)
    gates = [asyncio.Event() for _ in sends]
    steps = [step for pair in zip(sends, gates, strict=True) for step in (pair[0], Wait(pair[1]))]
    async with stack.client(*steps) as client:
        for count, gate in enumerate(gates, 1):
            while len(client.events) < count:
                assert await client.read_some()
            assert len(client.events) == count
            gate.set()
        await client.read_all()
        assert client.complete


@pytest.mark.parametrize(
    "after",
    [DONE, sse(B), sse(b'{"error":{"message":"late"}}'), b": late\n\n", b"data: half", b"garbage"],
)
@pytest.mark.parametrize("joined", [True, False], ids=["same read", "later"])
async def test_nothing_follows_done(stack: Stack, after: bytes, joined: bool) -> None:
    """M2.1, B49: whatever the upstream still says after its own `[DONE]`."""
    body = sse(A) + sse(END) + DONE
    answer = await stack.ask(*([Send(body + after)] if joined else [Send(body), Send(after)]))
    assert answer.data == [served(A), served(END), b"[DONE]"]
    assert answer.body.endswith(DONE)


# --- chunks, byte for byte ------------------------------------------------------------------------

OURS: Final = '"model":"test/model","provider":"fake"'
# How a chunk may be spelled: `@` stands for its choices and `~` for a string that changes.
SPELLINGS: Final[dict[str, str]] = {
    "usual": '{"id":"i","created":1,"model":"up","choices":[@]}',
    "choices first": '{"choices":[@],"id":"i","model":"up"}',
    "model first": '{"model":"up","id":"i","choices":[@]}',
    "model last": '{"id":"i","choices":[@],"model":"up"}',
    "unknown fields": '{"x":{"model":"no","choices":[]},"model":"up","choices":[@],"y":[{}]}',
    "numbers": '{"a":1.0,"b":1E5,"c":-0.0,"d":12345678901234567890123,"model":"up","choices":[@]}',
    "unicode": '{"sig":"ü\\u00fc\\/😀\\ud83d\\ude00\u2028","model":"up","choices":[@]}',
    "like members": '{"s":"\\"model\\":\\"no\\",\\"choices\\":[","model":"up","choices":[@]}',
    "tier": '{"model":"up","service_tier":"auto","system_fingerprint":null,"choices":[@]}',
    "obfuscation": '{"model":"up","choices":[@],"obfuscation":"~"}',
    "obfuscation first": '{"obfuscation":"~","model":"up","choices":[@]}',
    "null error": '{"model":"up","choices":[@],"error":null}',
    "groq": '{"x_groq":{"id":"req_1"},"model":"up","choices":[@]}',
}
# Spellings that `"model":"up"` does not stand in, and what must become of them.
ODD_SPELLINGS: Final[dict[str, tuple[str, str]]] = {
    "json.dumps": (
        '{"id": "i", "model": "up", "choices": [@], "z": 1}',
        '{"id": "i", "model": "test/model","provider":"fake", "choices": [@], "z": 1}',
    ),
    "padded": (
        ' { "model" : "up" ,\t"choices" : [ @ ] , "z" : { } } ',
        ' { "model" : "test/model","provider":"fake" ,\t"choices" : [ @ ] , "z" : { } } ',
    ),
    "no model": ('{"id":"i","choices":[@],"z":1}', '{"id":"i","choices":[@],"z":1,' + OURS + "}"),
    "null model": ('{"model":null,"choices":[@]}', "{" + OURS + ',"choices":[@]}'),
    "its own provider": (
        '{"provider":"Azure","model":"up","choices":[@]}',
        '{"provider":"fake","model":"test/model","choices":[@]}',
    ),
    "provider last, spaced": (
        '{"model": "up", "choices": [@], "provider": "Azure"}',
        '{"model": "test/model", "choices": [@], "provider": "fake"}',
    ),
    "provider object": (
        '{"model":"up","choices":[@],"provider":{"name":["x"]}}',
        '{"model":"test/model","choices":[@],"provider":"fake"}',
    ),
    "escaped key": (
        '{"mod\\u0065l":"up","choices":[@]}',
        '{"mod\\u0065l":"test/model","provider":"fake","choices":[@]}',
    ),
    "two models": (
        '{"model":"up","choices":[@],"model":"up2"}',
        '{"model":"test/model","choices":[@],"model":"test/model","provider":"fake"}',
    ),
}
PAIRS: Final = {k: (v, v.replace('"model":"up"', OURS)) for k, v in SPELLINGS.items()} | (
    ODD_SPELLINGS
)

# What may stand in a choice, and must come as it is.
CHOICES: Final[list[str]] = [
    '{"index":0,"delta":{"content":"plain"},"finish_reason":null}',
    '{"index": 0, "delta": {"content": "spaced"}, "logprobs": null, "finish_reason": null}',
    '{"delta":{"content":"a","reasoning_content":"b","x":[1,{"y":null}]},"index":0}',
    '{"index":0,"delta":{"content":"ü \\u00fc \\ud83d \\/ \\n \u2028 😀"}}',
    '{"index":0,"delta":{"content":"\\"role\\": \\"usage\\":{} ]} \\"finish_reason\\":\\"a\\""}}',
    '{"index":0,"delta":{"content":"x"},"logprobs":{"content":[{"token":"x","logprob":-1.0e-05}]}}',
    '{"index":0,"delta":{"reasoning":"r"},"n":1e400,"m":-0.0,"k":123456789012345678901234567890}',
    '{"index":0,"delta":{}}',
    '{"index":0,"delta":{"content":""}},{"index":0,"delta":{"content":"two in one"}}',
]
FIRST: Final = '{"index":0,"delta":{"role":"assistant","content":""}}'
LAST: Final = '{"index":0,"delta":{},"finish_reason":"length"}'


@pytest.mark.parametrize(("sent", "expected"), PAIRS.values(), ids=PAIRS.keys())
async def test_all_but_model_and_provider_is_byte_identical(
    stack: Stack, sent: str, expected: str
) -> None:
    """M2.2: in the first chunk, in those that follow and in the last, however they are spelled."""
    pairs = []
    for number, choices in enumerate([FIRST, *CHOICES, *CHOICES, LAST]):
        values = (choices, "Qz7" * (number % 5))
        pairs.append([t.replace("@", values[0]).replace("~", values[1]) for t in (sent, expected)])
    answer = await stack.ask(*(Send(sse(first)) for first, _ in pairs), Send(DONE))
    assert answer.data == [*(second.encode() for _, second in pairs), b"[DONE]"]
    assert b"upstream" not in answer.body


async def test_a_frame_that_changes_in_mid_stream(stack: Stack) -> None:
    """M2.2: another key order, another id, more members: each chunk for itself."""
    chosen = [first for first, _ in PAIRS.values()]
    expected = [second for _, second in PAIRS.values()]
    fill = CHOICES[0]
    sent = [sse(t.replace("@", FIRST if n == 0 else fill)) for n, t in enumerate(chosen * 2)]
    answer = await stack.ask(Send(b"".join(sent)), Send(sse(chosen[0].replace("@", LAST))))
    got = [data.decode() for data in answer.data[:-2]]
    assert got == [t.replace("@", FIRST if n == 0 else fill) for n, t in enumerate(expected * 2)]


@pytest.mark.parametrize(
    ("slug", "provider"),
    [
        (MODEL, "fake"),
        ("fake/any/thing:free", "fake"),
        ("failover/model", "fake"),
        ("plain/x", "plain"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_model_is_the_served_slug(
    stack: Stack, slug: str, provider: str, stream: bool
) -> None:
    """M2.2: the `models:` key, else `provider/model`; after a failover too; on errors too."""
    whole = {"id": "x", "model": "up", "choices": [{"index": 0, "message": {"content": "Hi"}}]}
    steps = [*openai_stream(["Hi"])[:-2], Eof()] if stream else json_answer(whole)
    answer = await stack.ask(*steps, model=slug, stream=stream)
    for document in answer.chunks if stream else [answer.json]:
        assert (document["model"], document["provider"]) == (slug, provider)
    if stream:
        answer = await stack.ask(
            Send(sse(A)), Send(sse(chunk("", error={"message": "x"}))), model=slug
        )
        assert {(c["model"], c["provider"]) for c in answer.chunks} == {(slug, provider)}


# --- roles ----------------------------------------------------------------------------------------


# name → n, the chunks sent, the choices that must come. A choice is its index, then `R` for a role,
# `-` for a null one, `_` for an empty one, then its text.
ROLES: Final[dict[str, tuple[int, str, str]]] = {
    "as sent": (1, "0R, 0a", "0R 0a"),
    "role with content": (1, "0Ra", "0Ra"),
    "none (B86)": (1, "0a, 0b", "0R 0a 0b"),
    "null": (1, "0-a", "0R 0a"),
    "empty": (1, "0_a", "0R 0a"),
    "late": (1, "0a, 0Rb", "0R 0a 0b"),
    "repeated (B85)": (1, "0Ra, 0Rb, 0R, 0Rc", "0Ra 0b 0 0c"),
    "n=2": (2, "0R, 1R, 0a, 1b", "0R 1R 0a 1b"),
    "n=2 none": (2, "1b, 0a, 1c", "1R 1b 0R 0a 1c"),
    "n=2 in one chunk": (2, "0a 1b, 0c 1d", "0R 1R 0a 1b 0c 1d"),
    "n=2 second starts late": (2, "0R, 0a, 0b, 1c, 0d", "0R 0a 0b 1R 1c 0d"),
    "n=2 repeated": (2, "0Ra, 1Rb, 0Rc, 1Rd, 0Re 1Rf", "0Ra 1Rb 0c 1d 0e 1f"),
}
ROLE_MARKS: Final = {"R": "assistant", "-": None, "_": ""}


def choice_of(text: str) -> dict[str, Any]:
    delta: dict[str, Any] = {"content": text.lstrip("0123456789R-_")}
    if text[1:2] in ROLE_MARKS:
        delta["role"] = ROLE_MARKS[text[1]]
    return {"index": int(text[0]), "delta": delta, "finish_reason": None}


def text_of(choice: dict[str, Any]) -> str:
    role = "R" if choice["delta"].get("role") else ""
    return f"{choice['index']}{role}{choice['delta']['content']}"


@pytest.mark.parametrize(("n", "sent", "expected"), ROLES.values(), ids=ROLES.keys())
async def test_one_role_for_each_choice(stack: Stack, n: int, sent: str, expected: str) -> None:
    """M2.3, M2.6: in the first chunk of a choice, from the upstream or made, and in no other."""
    chunks = [[choice_of(text) for text in part.split()] for part in sent.split(",")]
    sends = [Send(sse(chunk(None, choices=choices))) for choices in chunks]
    answer = await stack.ask(*sends, Send(DONE), n=n)
    choices = [choice for chunk in answer.chunks for choice in chunk["choices"]]
    assert " ".join(map(text_of, choices)) == expected
    assert {chunk["id"] for chunk in answer.chunks} == {"chatcmpl-fake"}


async def test_an_empty_first_chunk_is_no_choice(stack: Stack) -> None:
    """M2.6: what Azure's first chunk tells comes with the next, so each chunk has a choice."""
    azure = chunk(None, choices=[], prompt_filter_results=[{"prompt_index": 0}], id="", created=0)
    answer = await stack.ask(Send(sse(azure)), Send(sse(A) + sse(END)))
    told = b',"provider":"fake"'
    with_results = served(A).replace(told, told + b',"prompt_filter_results":[{"prompt_index":0}]')
    assert answer.data == [with_results, served(END), b"[DONE]"]
