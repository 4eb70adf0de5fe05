"""M5: a chat completion request in the words of the Messages API."""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoders.anthropic_request import DEFAULT_MAX_TOKENS, DROPPED
from encoders.json_text import dumps
from encoders.shape import Untranslatable
from encoders.shapes import SHAPES
from planes.settings import Settings
from relay.money import max_output_tokens

SHAPE = SHAPES["anthropic"]
HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
OLD, BOTH, NEW = "claude-sonnet-4-5-20250929", "claude-opus-4-6", "claude-opus-4-8"
PIXEL = "iVBORw0KGgo="
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}


def asked(model: str = "m", *, stream: bool = False, **body: Any) -> dict[str, Any]:
    """The provider's request; the client's must not be touched."""
    body = {"model": "slug", "messages": HI} | body
    before = copy.deepcopy(body)
    out = SHAPE.request(body, model=model, stream=stream, stream_options=True)
    assert body == before
    dumps(out)
    return out


def messages(*said: dict[str, Any], **body: Any) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = asked(messages=list(said), **body)["messages"]
    return turns


def refused(**body: Any) -> str:
    """The field that cannot be said."""
    with pytest.raises(Untranslatable) as caught:
        asked(**body)
    assert str(caught.value)
    return caught.value.param


# --- the route ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base_url", "url"),
    [
        ("https://api.anthropic.com", "https://api.anthropic.com/v1/messages"),
        ("https://api.anthropic.com/v1", "https://api.anthropic.com/v1/messages"),
        ("https://h/anthropic", "https://h/anthropic/v1/messages"),
        ("https://h/x/v2beta", "https://h/x/v2beta/messages"),
        ("https://v1", "https://v1/v1/messages"),
    ],
)
def test_the_version_may_stand_in_the_base_url(base_url: str, url: str) -> None:
    """O3 writes it without."""
    assert SHAPE.url(base_url, "m", stream=True) == url


def test_the_key_has_a_header_of_its_own() -> None:
    assert SHAPE.auth("sk") == {"x-api-key": "sk", "anthropic-version": "2023-06-01"}
    assert SHAPE.auth("") == {"anthropic-version": "2023-06-01"}


# --- fields ---------------------------------------------------------------------------------------


def test_a_plain_request() -> None:
    assert asked(stream=True) == {
        "model": "m",
        "max_tokens": DEFAULT_MAX_TOKENS,
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
    }
    assert "stream" not in asked(stream=False)


def test_the_default_limit_is_what_a_hold_assumes() -> None:
    """M4.2: a request without a limit is held at `hold_output_tokens`."""
    assert Settings().billing.hold_output_tokens == DEFAULT_MAX_TOKENS
    bodies: list[dict[str, Any]] = [
        {},
        {"max_tokens": 7},
        {"reasoning": {"max_tokens": 5000}},
    ]
    for body in bodies:
        assert asked(**body)["max_tokens"] == max_output_tokens(body, DEFAULT_MAX_TOKENS)


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 9, "max_tokens": 7}, 9),
        ({"max_completion_tokens": None, "max_tokens": 7.0}, 7),
        ({"max_tokens": "x"}, "x"),
    ],
)
def test_limits(body: dict[str, Any], limit: object) -> None:
    out = asked(**body)
    assert out["max_tokens"] == limit
    assert "max_completion_tokens" not in out


def test_what_the_api_would_refuse_is_dropped_and_the_unknown_passes() -> None:
    """M1.1, M5."""
    native: dict[str, Any] = {
        "top_k": 5,
        "container": None,
        "mcp_servers": [{"type": "url"}],
        "cache_control": {"type": "ephemeral"},
        "betas": ["x"],
        "inference_geo": "eu",
    }
    dropped: dict[str, Any] = dict.fromkeys(DROPPED, 1)
    out = asked(**dropped, **native)
    assert out.keys() - native.keys() == {"model", "max_tokens", "messages"}
    assert {key: out[key] for key in native} == native


@pytest.mark.parametrize(
    ("body", "sampling"),
    [
        ({"temperature": 0}, {"temperature": 0}),
        ({"temperature": 1.7}, {"temperature": 1}),
        ({"temperature": None, "top_p": None}, {}),
        ({"temperature": 0.3, "top_p": 1}, {"temperature": 0.3}),
        ({"top_p": 1}, {"top_p": 1}),
        ({"temperature": 0.3, "top_p": 0.5}, {"temperature": 0.3, "top_p": 0.5}),
    ],
)
def test_sampling(body: dict[str, Any], sampling: dict[str, Any]) -> None:
    """OpenAI's scale of temperature is twice as long."""
    out = asked(**body)
    assert {key: out[key] for key in ("temperature", "top_p") if key in out} == sampling
    assert asked(model=NEW, **body, top_k=3).keys() == {"model", "max_tokens", "messages"}


@pytest.mark.parametrize(
    ("stop", "sequences"),
    [
        ("END", ["END"]),
        (["a", "b"], ["a", "b"]),
        (["\n", " ", "", "\n\nHuman:"], ["\n\nHuman:"]),
        ("\n", None),
        ([], None),
        (None, None),
    ],
)
def test_stop(stop: object, sequences: object) -> None:
    """The API refuses a stop sequence of nothing but spaces."""
    assert asked(stop=stop).get("stop_sequences") == sequences


def test_stop_in_both_words() -> None:
    assert asked(stop="a", stop_sequences=["b"])["stop_sequences"] == ["b", "a"]
    assert refused(stop=7) == "stop"


@pytest.mark.parametrize(
    ("body", "user"),
    [
        ({"user": "u"}, "u"),
        ({"safety_identifier": "s"}, "s"),
        ({"user": "u", "metadata": {"user_id": "m", "x": "y"}}, "m"),
        ({"metadata": {"x": "y"}}, None),
        ({"user": None, "metadata": None}, None),
    ],
)
def test_the_user(body: dict[str, Any], user: str | None) -> None:
    """The API takes no other metadata."""
    assert asked(**body).get("metadata") == ({"user_id": user} if user else None)


@pytest.mark.parametrize(
    ("tier", "said"),
    [("auto", "auto"), ("default", "standard_only"), ("priority", "auto"), ("new", "new")],
)
def test_the_service_tier(tier: str, said: str) -> None:
    assert asked(service_tier=tier)["service_tier"] == said


def test_one_choice_only() -> None:
    assert "n" not in asked(n=1)
    assert refused(n=2) == "n"


# --- messages -------------------------------------------------------------------------------------


def test_system_and_developer_messages_leave_the_conversation() -> None:
    """Also those in its middle; marks for the cache stay."""
    mark = {"type": "ephemeral"}
    said = [
        {"role": "system", "content": "one"},
        {"role": "user", "content": "a"},
        {"role": "developer", "content": [{"type": "text", "text": "two", "cache_control": mark}]},
        {"role": "user", "content": "b"},
        {"role": "system", "content": "three", "cache_control": mark},
        {"role": "system", "content": " "},
    ]
    out = asked(messages=said, system="zero")
    assert out["system"] == [
        {"type": "text", "text": "zero"},
        {"type": "text", "text": "one"},
        {"type": "text", "text": "two", "cache_control": mark},
        {"type": "text", "text": "three", "cache_control": mark},
    ]
    texts = [{"type": "text", "text": text} for text in "ab"]
    assert out["messages"] == [{"role": "user", "content": texts}]
    assert asked(messages=[said[0], said[1]])["system"] == "one"


def test_instructions_alone_are_what_the_user_says() -> None:
    """The API wants a user's turn; OpenAI does not."""
    out = asked(messages=[{"role": "system", "content": "Say hi."}])
    assert out["messages"] == [{"role": "user", "content": "Say hi."}]
    assert "system" not in out


def test_turns_of_one_role_become_one_and_empty_ones_none() -> None:
    turns = messages(
        {"role": "user", "content": "a", "name": "Ann"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": ""}]},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "user", "content": None},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "Never."}]},
        {"role": "user", "content": "c"},
    )
    assert [turn["role"] for turn in turns] == ["user", "assistant", "user"]
    assert [block["text"] for block in turns[0]["content"]] == ["a", "b"]
    assert [block["text"] for block in turns[1]["content"]] == ["No.", "Never."]
    assert turns[2]["content"] == "c"


def test_a_prefill_passes_without_spaces_at_its_end() -> None:
    """The API refuses those."""
    turns = messages(*HI, {"role": "assistant", "content": "The answer is \n"})
    assert turns[-1] == {"role": "assistant", "content": "The answer is"}
    turns = messages(*HI, {"role": "assistant", "content": "Yes. "}, *HI)
    assert turns[1]["content"] == "Yes. "


IMAGE = {"type": "base64", "media_type": "image/png", "data": PIXEL}
PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}


@pytest.mark.parametrize(
    ("part", "block"),
    [
        (
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
            {"type": "image", "source": IMAGE},
        ),
        (
            {"type": "image_url", "image_url": f"DATA:image/JPG;base64,{PIXEL}"},
            {"type": "image", "source": IMAGE | {"media_type": "image/jpeg"}},
        ),
        (
            {"type": "image_url", "image_url": {"url": "https://h/a.png", "detail": "high"}},
            {"type": "image", "source": {"type": "url", "url": "https://h/a.png"}},
        ),
        (
            {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;"
                                      "base64,JVBERi0="}},
            {"type": "document", "source": PDF, "title": "a.pdf"},
        ),
        (
            {"type": "file", "file": {"file_data": "JVBERi0="}},
            {"type": "document", "source": PDF},
        ),
        (
            {"type": "file", "file": {"file_data": "https://h/a.pdf"}},
            {"type": "document", "source": {"type": "url", "url": "https://h/a.pdf"}},
        ),
        (
            {"type": "file", "file": {"file_id": "file_1"}, "citations": {"enabled": True}},
            {
                "type": "document",
                "source": {"type": "file", "file_id": "file_1"},
                "citations": {"enabled": True},
            },
        ),
        (
            {"type": "file", "file": {"file_data": "data:text/plain,h%C3%A9"}},
            {
                "type": "document",
                "source": {"type": "text", "media_type": "text/plain", "data": "hé"},
            },
        ),
        (
            {"type": "file", "file": {"file_data": f"data:image/png;base64,{PIXEL}"}},
            {"type": "image", "source": IMAGE},
        ),
        ({"type": "image", "source": IMAGE}, {"type": "image", "source": IMAGE}),
        ({"type": "search_result", "x": 1}, {"type": "search_result", "x": 1}),
    ],
)  # fmt: skip
def test_images_and_files(part: dict[str, Any], block: dict[str, Any]) -> None:
    """Also those in the API's own words."""
    mark = {"cache_control": {"type": "ephemeral"}}
    text = {"type": "text", "text": "What is this?"}
    (turn,) = messages({"role": "user", "content": [text, part, part | mark]})
    assert turn["content"] == [text, block, block | mark]
    (_, turn) = messages(
        {"role": "assistant", "tool_calls": [call("a", "look", "{}")]},
        {"role": "tool", "tool_call_id": "a", "content": [part]},
    )
    assert turn["content"][0]["content"] == [block]


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([{"type": "input_audio", "input_audio": {}}], "content.0"),
        ([{"type": "image_url", "image_url": {"url": "ftp://h"}}], "content.0.image_url.url"),
        ([{"type": "image_url"}], "content.0.image_url.url"),
        ([{"type": "image_url", "image_url": "data:image/png"}], "content.0.image_url.url"),
        ([{"type": "image_url", "image_url": "data:video/mp4,x"}], "content.0.image_url.url"),
        ([{"type": "text", "text": "a"}, {"type": "text"}], "content.1"),
        ([{"type": "file", "file": {}}], "content.0.file"),
        ([{"type": "file"}], "content.0.file"),
        (
            [{"type": "file", "file": {"file_data": "data:text/plain;base64,/w=="}}],
            "content.0.file.file_data",
        ),
        ([7], "content.0"),
        (7, "content"),
    ],
)
def test_what_the_api_has_no_words_for(content: Any, param: str) -> None:
    """M5: a clear 400 that names the field; another candidate may have them."""
    said = [*HI, {"role": "user", "content": content}]
    assert refused(messages=said) == f"messages.1.{param}"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "robot", "content": "a"}, "role"),
        ({"content": "a"}, "role"),
        ({"role": "system", "content": [{"type": "image_url", "image_url": "http://h"}]},
         "content.0"),
        ({"role": "tool", "content": "a"}, "tool_call_id"),
        ({"role": "assistant", "tool_calls": 7}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [7]}, "tool_calls.0"),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, "tool_calls.0"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, "tool_calls.0.id"),
    ],
)  # fmt: skip
def test_messages_that_are_none(message: dict[str, Any], param: str) -> None:
    assert refused(messages=[*HI, message]) == f"messages.1.{param}"


# --- tools ----------------------------------------------------------------------------------------


def call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def test_tools() -> None:
    mark = {"type": "ephemeral"}
    strict = {"type": "function", "function": {"name": "s", "strict": True, "parameters": {}}}
    native = {"type": "web_search_20250305", "name": "web_search", "max_uses": 2}
    out = asked(tools=[WEATHER, NOW | {"cache_control": mark}, strict, native])
    assert out["tools"] == [
        {
            "name": "get_weather",
            "input_schema": WEATHER["function"]["parameters"],
            "description": "Weather",
        },
        {
            "name": "now",
            "input_schema": {"type": "object", "properties": {}},
            "cache_control": mark,
        },
        {"name": "s", "input_schema": {"type": "object"}, "strict": True},
        native,
    ]
    assert "tool_choice" not in out
    (tool,) = asked(model="claude-3-7-sonnet-20250219", tools=[strict])["tools"]
    assert "strict" not in tool


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        (7, "tools.0"),
        ({"type": "function"}, "tools.0.function.name"),
        ({"type": "function", "function": {"name": "f", "parameters": 7}},
         "tools.0.function.parameters"),
        ({"type": "custom", "custom": {"name": "c"}}, "tools.0"),
    ],
)  # fmt: skip
def test_tools_that_are_none(tool: Any, param: str) -> None:
    assert refused(tools=[tool]) == param
    assert refused(tools=7) == "tools"


ALLOWED = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("none", {"type": "none"}),
        ("auto", {"type": "auto"}),
        ("required", {"type": "any"}),
        ({"type": "function", "function": {"name": "now"}}, {"type": "tool", "name": "now"}),
        ({"type": "function", "name": "now"}, {"type": "tool", "name": "now"}),
        ({"type": "allowed_tools", "allowed_tools": ALLOWED}, {"type": "any"}),
        ({"type": "tool", "name": "x"}, {"type": "tool", "name": "x"}),
        (None, None),
    ],
)
def test_the_choice_of_a_tool(choice: Any, said: Any) -> None:
    out = asked(tools=[WEATHER, NOW], tool_choice=choice)
    assert out.get("tool_choice") == said
    allowed = isinstance(choice, dict) and choice["type"] == "allowed_tools"
    assert [t["name"] for t in out["tools"]] == (["now"] if allowed else ["get_weather", "now"])
    single = asked(tools=[WEATHER, NOW], tool_choice=choice, parallel_tool_calls=False)
    expected = {"disable_parallel_tool_use": True} if choice != "none" else {}
    assert single["tool_choice"] == (said or {"type": "auto"}) | expected
    assert asked(tools=[WEATHER, NOW], tool_choice=choice, parallel_tool_calls=True) == out


@pytest.mark.parametrize(
    "choice",
    ["any tool", 7, {}, {"type": "function"}, {"type": []}, {"type": "allowed_tools"},
     {"type": "allowed_tools", "allowed_tools": {"mode": [], "tools": []}}],
)  # fmt: skip
def test_choices_that_are_none(choice: Any) -> None:
    assert refused(tools=[NOW], tool_choice=choice) == "tool_choice"


def test_no_choice_without_tools() -> None:
    """The API refuses one."""
    out = asked(tool_choice="auto", parallel_tool_calls=False, tools=[])
    assert out.keys() == {"model", "max_tokens", "messages"}


def test_legacy_functions() -> None:
    said = [
        *HI,
        {"role": "assistant", "content": None, "function_call": {"name": "now", "arguments": "{}"}},
        {"role": "function", "name": "now", "content": "noon"},
    ]
    out = asked(messages=said, functions=[NOW["function"]], function_call={"name": "now"})
    assert out["tools"] == [{"name": "now", "input_schema": {"type": "object", "properties": {}}}]
    assert out["tool_choice"] == {"type": "tool", "name": "now"}
    use, result = (turn["content"][0] for turn in out["messages"][1:])
    assert (use["name"], use["input"]) == ("now", {})
    assert (result["tool_use_id"], result["content"]) == (use["id"], "noon")


def test_calls_and_results() -> None:
    """Results in a row are one turn of the user, before what else it says."""
    turns = messages(
        *HI,
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [call("a:1", "w", '{"city": "Å"}'), call("b", "now", "")],
        },
        {"role": "tool", "tool_call_id": "a:1", "content": "9 C"},
        {"role": "user", "content": "quick"},
        {"role": "tool", "tool_call_id": "b", "content": "", "is_error": True},
    )
    assert turns[1]["content"] == [
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "a_1", "name": "w", "input": {"city": "Å"}},
        {"type": "tool_use", "id": "b", "name": "now", "input": {}},
    ]
    assert turns[2]["content"] == [
        {"type": "tool_result", "tool_use_id": "a_1", "content": "9 C"},
        {"type": "tool_result", "tool_use_id": "b", "is_error": True},
        {"type": "text", "text": "quick"},
    ]


@pytest.mark.parametrize("arguments", ['{"city": "Pa', "[1]", "7", "null"])
def test_arguments_that_are_no_object_are_kept_under_one_key(arguments: str) -> None:
    """A call that was cut off must not make the conversation impossible."""
    turns = messages(*HI, {"role": "assistant", "tool_calls": [call("a", "f", arguments)]})
    assert turns[1]["content"][0]["input"] == {"arguments": arguments}


# --- what comes out -------------------------------------------------------------------------------


def test_a_schema_for_the_answer() -> None:
    schema = {
        "type": "object",
        "properties": {
            "n": {"type": "integer", "minimum": 1, "description": "How many"},
            "l": {"type": "array", "minItems": 2, "items": {"type": "object", "properties": {}}},
            "u": {"oneOf": [{"$ref": "#/$defs/x"}, {"type": "null"}]},
        },
        "$defs": {"x": {"type": "object", "additionalProperties": True}},
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": schema}}
    out = asked(response_format=wanted, output_config={"effort": "low"})
    assert out["output_config"]["effort"] == "low"
    assert out["output_config"]["format"] == {
        "type": "json_schema",
        "schema": {
            "type": "object",
            "properties": {
                "n": {"type": "integer", "description": "How many (minimum: 1)"},
                "l": {
                    "type": "array",
                    "items": {"type": "object", "properties": {}, "additionalProperties": False},
                    "description": "(minItems: 2)",
                },
                "u": {"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}]},
            },
            "$defs": {"x": {"type": "object", "additionalProperties": False}},
            "additionalProperties": False,
        },
    }
    out = asked(model="claude-3-5-haiku-20241022", response_format=wanted)
    assert "output_config" not in out
    assert json.dumps(schema, separators=(",", ":")) in out["system"]


def test_json_without_a_schema_is_an_instruction() -> None:
    """The API has no words for it."""
    said = [{"role": "system", "content": "Be brief."}, *HI]
    out = asked(messages=said, response_format={"type": "json_object"})
    assert out["system"][0]["text"] == "Be brief."
    assert "JSON object" in out["system"][1]["text"]
    assert "system" not in asked(response_format={"type": "text"})
    assert refused(response_format={"type": "xml"}) == "response_format.type"
    missing = {"type": "json_schema", "json_schema": {}}
    assert refused(response_format=missing) == "response_format.json_schema.schema"


# --- robustness -----------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "text", "role", "content", "function", "name", "url", "file", "tools",
                 "mode", "schema", "json_schema", "effort", "max_tokens", "enabled", "format"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)  # fmt: skip
fields = st.sampled_from(
    ["n", "max_tokens", "stop", "temperature", "top_p", "tools", "functions", "tool_choice",
     "function_call", "parallel_tool_calls", "response_format", "reasoning", "reasoning_effort",
     "thinking", "output_config", "metadata", "user", "service_tier", "system", "stop_sequences"]
)  # fmt: skip
parts = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image_url", "file", "refusal", "thinking"]) | json_values},
    optional={key: json_values for key in ("text", "image_url", "file", "refusal", "source")},
)
turns = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "function"]) | json_values},
    optional={
        "content": json_values | st.lists(parts, max_size=3),
        "tool_calls": json_values,
        "tool_call_id": st.just("a") | json_values,
        "reasoning_details": json_values,
        "thinking_blocks": json_values,
        "refusal": json_values,
    },
)


@given(
    said=st.lists(turns, max_size=4),
    body=st.dictionaries(fields, json_values, max_size=6),
    model=st.sampled_from(["m", OLD, BOTH, NEW]),
)
def test_whatever_is_asked_is_said_or_refused(
    said: list[dict[str, Any]], body: dict[str, Any], model: str
) -> None:
    """M5: never another error than `Untranslatable`, and the client's request is not touched."""
    with suppress(Untranslatable):
        asked(model=model, **{"messages": said, **body})
