"""M5: chat completion requests as the Gemini API takes them."""

from __future__ import annotations

import base64
import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoders.gemini_request import gemini_request
from encoders.gemini_schema import gemini_schema
from encoders.gemini_shape import GeminiShape
from encoders.gemini_thinking import has_levels
from encoders.shape import Untranslatable

MODEL = "gemini-2.5-flash"
MODEL_3 = "gemini-3-flash-preview"
HELLO = {"role": "user", "content": "Hello"}
PIXEL = base64.b64encode(b"\x89PNG pixel").decode()
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}


def translated(*messages: dict[str, Any], model: str = MODEL, **fields: Any) -> dict[str, Any]:
    """The request; what was given is found unchanged."""
    body = {"model": "test/model", "messages": list(messages or [HELLO]), **fields}
    before = copy.deepcopy(body)
    out = gemini_request(body, model=model)
    assert body == before
    return out


def contents(*messages: dict[str, Any], model: str = MODEL) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = translated(*messages, model=model)["contents"]
    return turns


def parts(content: Any) -> list[dict[str, Any]]:
    (turn,) = contents({"role": "user", "content": content})
    found: list[dict[str, Any]] = turn["parts"]
    return found


def config(model: str = MODEL, **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = translated(model=model, **fields).get("generationConfig", {})
    return found


def call(call_id: str, name: str, arguments: str, **more: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function, **more}


# --- URL and key --------------------------------------------------------------------------------

HOST = "https://generativelanguage.googleapis.com"


@pytest.mark.parametrize(
    ("base", "model", "path"),
    [
        (HOST, "gemini-2.5-flash", f"{HOST}/v1beta/models/gemini-2.5-flash"),
        (f"{HOST}/v1beta", "gemini-2.5-flash", f"{HOST}/v1beta/models/gemini-2.5-flash"),
        (f"{HOST}/v1", "models/x", f"{HOST}/v1/models/x"),
        (f"{HOST}/v1alpha", "x", f"{HOST}/v1alpha/models/x"),
        (f"{HOST}/v1beta/models", "x", f"{HOST}/v1beta/models/x"),
        ("http://proxy/gemini", "x", "http://proxy/gemini/v1beta/models/x"),
        ("http://proxy/v1/gemini", "x", "http://proxy/v1/gemini/v1beta/models/x"),
        (
            "https://h/v1/projects/p/locations/l/publishers/google",
            "x",
            "https://h/v1/projects/p/locations/l/publishers/google/models/x",
        ),
        (HOST, "tunedModels/my-tune", f"{HOST}/v1beta/tunedModels/my-tune"),
        (HOST, "openai/odd name?#%é", f"{HOST}/v1beta/models/openai%2Fodd%20name%3F%23%25%C3%A9"),
        (HOST, "../../v1/files", f"{HOST}/v1beta/models/..%2F..%2Fv1%2Ffiles"),
    ],
)
def test_the_url(base: str, model: str, path: str) -> None:
    shape = GeminiShape()
    assert shape.url(base, model, stream=True) == path + ":streamGenerateContent?alt=sse"
    assert shape.url(base, model, stream=False) == path + ":generateContent"


def test_the_key_is_a_header() -> None:
    assert GeminiShape().auth("AIza-key") == {"x-goog-api-key": "AIza-key"}
    assert GeminiShape().auth("") == {}


# --- messages -----------------------------------------------------------------------------------


def test_a_plain_request() -> None:
    assert translated() == {"contents": [{"role": "user", "parts": [{"text": "Hello"}]}]}


def test_system_and_developer_messages_become_the_system_instruction() -> None:
    out = translated(
        {"role": "system", "content": "Be brief."},
        HELLO,
        {"role": "developer", "content": [{"type": "text", "text": "Be kind."}]},
    )
    assert out["systemInstruction"] == {"parts": [{"text": "Be brief."}, {"text": "Be kind."}]}
    assert out["contents"] == [{"role": "user", "parts": [{"text": "Hello"}]}]


def test_a_request_of_system_messages_alone_has_a_turn_all_the_same() -> None:
    """The API refuses a request without one."""
    out = translated({"role": "system", "content": "Say hello."})
    assert out == {"contents": [{"role": "user", "parts": [{"text": "Say hello."}]}]}
    assert translated({"role": "user", "content": ""})["contents"] == [
        {"role": "user", "parts": [{"text": ""}]}
    ]


def test_roles_alternate() -> None:
    """Messages of one role in a row are one turn; empty ones none."""
    assert contents(
        HELLO,
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": [{"type": "text", "text": "there"}]},
        {"role": "user", "content": "bye", "name": "ann"},
    ) == [
        {"role": "user", "parts": [{"text": "Hello"}, {"text": "again"}]},
        {"role": "model", "parts": [{"text": "Hi"}, {"text": "there"}]},
        {"role": "user", "parts": [{"text": "bye"}]},
    ]


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "text", "text": "é"}, {"text": "é"}),
        (
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
            {"inlineData": {"mimeType": "image/png", "data": PIXEL}},
        ),
        (
            {"type": "image_url", "image_url": f"DATA:Image/WebP;charset=x;Base64,{PIXEL}"},
            {"inlineData": {"mimeType": "image/webp", "data": PIXEL}},
        ),
        (
            {"type": "image_url", "image_url": {"url": "data:image/svg+xml,%3Csvg/%3E"}},
            {"inlineData": {"mimeType": "image/svg+xml", "data": "PHN2Zy8+"}},
        ),
        (
            {"type": "image_url", "image_url": {"url": f"data:;base64,{PIXEL}", "detail": "low"}},
            {"inlineData": {"mimeType": "image/jpeg", "data": PIXEL}},
        ),
        (
            {"type": "image_url", "image_url": {"url": "https://h/a/b.PNG?x=y.gif#z"}},
            {"fileData": {"mimeType": "image/png", "fileUri": "https://h/a/b.PNG?x=y.gif#z"}},
        ),
        (
            {"type": "image_url", "image_url": {"url": "https://h/picture"}},
            {"fileData": {"mimeType": "image/jpeg", "fileUri": "https://h/picture"}},
        ),
        (
            {"type": "video_url", "video_url": {"url": "gs://bucket/film.webm"}},
            {"fileData": {"mimeType": "video/webm", "fileUri": "gs://bucket/film.webm"}},
        ),
        (
            {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
            {"inlineData": {"mimeType": "audio/wav", "data": "UklGRg=="}},
        ),
        (
            {"type": "file", "file": {"filename": "a.txt", "file_data": "aGk="}},
            {"inlineData": {"mimeType": "text/plain", "data": "aGk="}},
        ),
        (
            {"type": "file", "file": {"file_data": "data:application/pdf;base64,JVBERg=="}},
            {"inlineData": {"mimeType": "application/pdf", "data": "JVBERg=="}},
        ),
        (
            {"type": "file", "file": {"file_id": f"{HOST}/v1beta/files/abc"}},
            {"fileData": {"mimeType": "application/pdf", "fileUri": f"{HOST}/v1beta/files/abc"}},
        ),
    ],
)
def test_a_content_part(part: dict[str, Any], expected: dict[str, Any]) -> None:
    assert parts([{"type": "text", "text": ""}, part]) == [expected]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": [{"type": "hologram"}]}, "messages.0.content.0"),
        ({"role": "user", "content": [{"text": "x"}]}, "messages.0.content.0"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages.0.content.0"),
        ({"role": "user", "content": 7}, "messages.0.content"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "messages.0.content.0.image_url.url",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": "data:nothing"}]},
            "messages.0.content.0.image_url.url",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": "data:;base64,a"}]},
            "messages.0.content.0.image_url.url",
        ),
        (
            {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "x"}}]},
            "messages.0.content.0.input_audio",
        ),
        (
            {"role": "user", "content": [{"type": "file", "file": {"file_id": "file-abc"}}]},
            "messages.0.content.0.file.file_id",
        ),
        ({"role": "critic", "content": "x"}, "messages.0.role"),
        ({"role": "tool", "tool_call_id": "c9", "content": "x"}, "messages.0.tool_call_id"),
        (
            {"role": "assistant", "tool_calls": [{"id": "c", "type": "custom", "custom": {}}]},
            "messages.0.tool_calls.0",
        ),
    ],
)
def test_what_cannot_be_said_names_its_place(message: dict[str, Any], param: str) -> None:
    with pytest.raises(Untranslatable) as caught:
        translated(message)
    assert caught.value.param == param


# --- calls and results --------------------------------------------------------------------------

CALLS = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "The user wants two cities.",
    "tool_calls": [call("c1", "weather", '{"city":"Paris"}'), call("c2", "time", "")],
}


def test_calls_and_their_results() -> None:
    """Results of parallel calls are one turn, in front of what the user says next (B38)."""
    assert contents(
        HELLO,
        CALLS,
        {"role": "tool", "tool_call_id": "c2", "content": "noon"},
        {"role": "tool", "tool_call_id": "c1", "content": '{"degrees": 7, "é": [1.5]}'},
        {"role": "user", "content": "And now?"},
    )[1:] == [
        {
            "role": "model",
            "parts": [
                {"functionCall": {"id": "c1", "name": "weather", "args": {"city": "Paris"}}},
                {"functionCall": {"id": "c2", "name": "time", "args": {}}},
            ],
        },
        {
            "role": "user",
            "parts": [
                {"functionResponse": {"id": "c2", "name": "time", "response": {"result": "noon"}}},
                {
                    "functionResponse": {
                        "id": "c1",
                        "name": "weather",
                        "response": {"degrees": 7, "é": [1.5]},
                    }
                },
            ],
        },
        {"role": "user", "parts": [{"text": "And now?"}]},
    ]


@pytest.mark.parametrize(
    ("arguments", "args"),
    [
        ("", {}),
        (" ", {}),
        (None, {}),
        ('{"a": 1.50}', {"a": 1.5}),
        ({"a": 1}, {"a": 1}),
        ('{"a": ', {"arguments": '{"a": '}),
        ("[1]", {"arguments": "[1]"}),
    ],
)
def test_arguments_are_an_object(arguments: Any, args: dict[str, Any]) -> None:
    """B42; a call that was cut off does not end the conversation."""
    (turn,) = contents({"role": "assistant", "tool_calls": [call("c", "f", arguments)]})
    assert turn["parts"][0]["functionCall"]["args"] == args


@pytest.mark.parametrize(
    ("content", "response"),
    [
        ("[1,2]", {"result": "[1,2]"}),
        ("{broken", {"result": "{broken"}),
        ("", {"result": ""}),
        (None, {"result": ""}),
        ([{"type": "text", "text": '{"a"'}, {"type": "text", "text": ":1}"}], {"a": 1}),
    ],
)
def test_a_result_is_an_object(content: Any, response: dict[str, Any]) -> None:
    turns = contents(CALLS, {"role": "tool", "tool_call_id": "c1", "content": content})
    assert turns[1]["parts"][0]["functionResponse"]["response"] == response


def test_a_picture_in_a_result() -> None:
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    content = [{"type": "text", "text": "seen"}, picture]
    turns = contents(CALLS, {"role": "tool", "tool_call_id": "c1", "content": content})
    result = turns[1]["parts"][0]["functionResponse"]
    assert result["response"] == {"result": "seen"}
    assert result["parts"] == [{"inlineData": {"mimeType": "image/png", "data": PIXEL}}]


def test_legacy_function_calls() -> None:
    assert contents(
        HELLO,
        {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "7"},
    )[1:] == [
        {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {}}}]},
        {
            "role": "user",
            "parts": [{"functionResponse": {"name": "f", "response": {"result": "7"}}}],
        },
    ]


def test_signatures_go_back_with_what_they_came_with() -> None:
    """M2.6, M5: in Google's form, and in OpenRouter's."""
    signed = call("c1", "f", "{}", extra_content={"google": {"thought_signature": "SIG-1"}})

    def detail(data: str, **more: Any) -> dict[str, Any]:
        entry = {"type": "reasoning.encrypted", "data": data, "format": "google-gemini-v1"}
        return entry | more

    message = {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [signed, call("c2", "g", "{}"), call("c3", "h", "{}")],
        "reasoning_details": [
            detail("SIG-TEXT", index=0),
            detail("SIG-2", id="c2"),
            detail("OTHER", format="anthropic-claude-v1"),
            {"type": "reasoning.text", "text": "hm", "format": "google-gemini-v1"},
            "odd",
        ],
    }
    (turn,) = contents(message)
    assert [part.get("thoughtSignature") for part in turn["parts"]] == [
        "SIG-TEXT",
        "SIG-1",
        "SIG-2",
        None,
    ]


def test_a_signature_without_a_text() -> None:
    detail = {"type": "reasoning.encrypted", "data": "S", "format": "google-gemini-v1"}
    (turn,) = contents({"role": "assistant", "content": None, "reasoning_details": [detail]})
    assert turn["parts"] == [{"text": "", "thoughtSignature": "S"}]


@pytest.mark.parametrize("model", [MODEL, MODEL_3])
def test_calls_that_another_model_made(model: str) -> None:
    """A Gemini 3 refuses a call without a signature; Google has a word for those."""
    (turn,) = contents(CALLS, model=model)
    signatures = [part.get("thoughtSignature") for part in turn["parts"]]
    expected = "skip_thought_signature_validator" if model == MODEL_3 else None
    assert signatures == [expected, None]


def test_parts_that_only_gemini_knows_go_back() -> None:
    code = {"executableCode": {"language": "PYTHON", "code": "print(1)"}}
    message = {"role": "assistant", "content": "1", "google_parts": [code, "odd"]}
    (turn,) = contents(message)
    assert turn["parts"] == [code, {"text": "1"}]


# --- tools --------------------------------------------------------------------------------------


def test_tools_are_declarations_with_plain_json_schema() -> None:
    described = {"name": "now", "description": "The time", "strict": True}
    out = translated(tools=[TOOL, {"type": "function", "function": described}])
    assert out["tools"] == [
        {
            "functionDeclarations": [
                {"name": "weather", "parametersJsonSchema": WEATHER},
                {"name": "now", "description": "The time"},
            ]
        }
    ]
    assert "toolConfig" not in out


def test_legacy_functions() -> None:
    out = translated(functions=[TOOL["function"]], function_call={"name": "weather"})
    assert out["tools"][0]["functionDeclarations"][0]["name"] == "weather"
    assert out["toolConfig"]["functionCallingConfig"]["allowedFunctionNames"] == ["weather"]


def test_geminis_own_tools_pass_as_they_are() -> None:
    own: dict[str, Any] = {"google_search": {}}
    out = translated(tools=[own, TOOL], web_search_options={"search_context_size": "low"})
    assert out["tools"][1:] == [own, {"googleSearch": {}}]


ALLOWED = {"tools": [{"type": "function", "function": {"name": "weather"}}]}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("none", {"mode": "NONE"}),
        ("auto", {"mode": "AUTO"}),
        ("required", {"mode": "ANY"}),
        (
            {"type": "function", "function": {"name": "weather"}},
            {"mode": "ANY", "allowedFunctionNames": ["weather"]},
        ),
        (
            {"type": "allowed_tools", "allowed_tools": ALLOWED | {"mode": "required"}},
            {"mode": "ANY", "allowedFunctionNames": ["weather"]},
        ),
        (
            {"type": "allowed_tools", "allowed_tools": ALLOWED | {"mode": "auto"}},
            {"mode": "VALIDATED", "allowedFunctionNames": ["weather"]},
        ),
    ],
)
def test_tool_choice(choice: Any, expected: dict[str, Any]) -> None:
    out = translated(tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
    assert out["toolConfig"] == {"functionCallingConfig": expected}
    assert "parallel_tool_calls" not in out
    assert "toolConfig" not in translated(tool_choice=choice)  # refused without functions


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
        ({"tools": ["f"]}, "tools.0"),
        ({"tools": {}}, "tools"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "custom"}}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
            "tool_choice",
        ),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
    ],
)
def test_fields_that_cannot_be_said(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Untranslatable) as caught:
        translated(**fields)
    assert caught.value.param == param


# --- schemas ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (WEATHER, WEATHER),
        (
            {"type": ["string", "null"], "additionalProperties": False, "$schema": "x"},
            {"type": ["string", "null"], "additionalProperties": False},
        ),
        ({"const": "a"}, {"enum": ["a"]}),
        ({"const": "a", "enum": ["b"]}, {"const": "a", "enum": ["b"]}),
        ({"$ref": "#/definitions/A", "title": "t"}, {"$ref": "#/$defs/A"}),
        (
            {"properties": {"p": {"allOf": [{"$ref": "#/$defs/A"}], "description": "d"}}},
            {"properties": {"p": {"$ref": "#/$defs/A"}}},
        ),
        ({"allOf": [{"type": "string"}], "title": "t"}, {"type": "string", "title": "t"}),
        (
            {"definitions": {"const": {"const": 1}}, "anyOf": [{"const": 2}], "items": [True]},
            {"$defs": {"const": {"enum": [1]}}, "anyOf": [{"enum": [2]}], "items": [True]},
        ),
        (
            {"properties": {"$ref": {"type": "string"}, "const": {}}, "default": {"const": 1}},
            {"properties": {"$ref": {"type": "string"}, "const": {}}, "default": {"const": 1}},
        ),
        (True, True),
    ],
)
def test_a_schema(schema: Any, expected: Any) -> None:
    before = copy.deepcopy(schema)
    assert gemini_schema(schema) == expected
    assert schema == before


def test_response_formats() -> None:
    assert config(response_format={"type": "text"}) == {}
    assert config(response_format={"type": "json_object"}) == {
        "responseMimeType": "application/json"
    }
    named = {"name": "w", "strict": True, "schema": WEATHER}
    assert config(response_format={"type": "json_schema", "json_schema": named}) == {
        "responseMimeType": "application/json",
        "responseJsonSchema": WEATHER,
    }


# --- settings -----------------------------------------------------------------------------------


def test_sampling_and_limits() -> None:
    assert config(
        temperature=0,
        top_p=0.5,
        top_k=40,
        seed=7,
        presence_penalty=0.1,
        frequency_penalty=-0.1,
        max_tokens=5,
        n=2,
        stop="END",
        logprobs=True,
        top_logprobs=3,
        modalities=["text", "image"],
    ) == {
        "temperature": 0,
        "topP": 0.5,
        "topK": 40,
        "seed": 7,
        "presencePenalty": 0.1,
        "frequencyPenalty": -0.1,
        "maxOutputTokens": 5,
        "candidateCount": 2,
        "stopSequences": ["END"],
        "responseLogprobs": True,
        "logprobs": 3,
        "responseModalities": ["TEXT", "IMAGE"],
    }
    assert config(max_tokens=5, max_completion_tokens=6) == {"maxOutputTokens": 6}
    assert config(stop=["a", "b"]) == {"stopSequences": ["a", "b"]}
    empty: dict[str, Any] = {
        "n": 1,
        "stop": [],
        "temperature": None,
        "logprobs": False,
        "modalities": ["text"],
    }
    assert config(**empty) == {}
    assert translated(service_tier="flex")["serviceTier"] == "flex"


def thinking(model: str = MODEL, **fields: Any) -> Any:
    return config(model, **fields).get("thinkingConfig")


@pytest.mark.parametrize(
    ("effort", "flash", "pro", "flash_3", "pro_3"),
    [
        ("none", 0, 128, "minimal", "low"),
        ("minimal", 1024, 1024, "minimal", "low"),
        ("low", 1024, 1024, "low", "low"),
        ("medium", 8192, 8192, "medium", "medium"),
        ("high", 24576, 24576, "high", "high"),
        ("xhigh", 24576, 24576, "high", "high"),
    ],
)
def test_reasoning_effort(effort: str, flash: int, pro: int, flash_3: str, pro_3: str) -> None:
    """A budget of tokens up to 2.5, a level from 3 on, never both."""
    show = effort != "none"
    for model, budget in ((MODEL, flash), ("models/gemini-2.5-pro", pro)):
        expected = {"thinkingBudget": budget, "includeThoughts": show}
        assert thinking(model, reasoning_effort=effort) == expected
    for model, level in ((MODEL_3, flash_3), ("gemini-3.1-pro-preview", pro_3)):
        expected_3 = {"thinkingLevel": level, "includeThoughts": show}
        assert thinking(model, reasoning={"effort": effort}) == expected_3


@pytest.mark.parametrize(
    ("model", "levels"),
    [
        ("gemini-3-pro-preview", True),
        ("models/gemini-3.1-flash-lite", True),
        ("google/gemini-12-ultra", True),
        ("gemini-flash-latest", True),
        ("gemini-1.5-flash-latest", False),
        ("gemini-2.5-pro", False),
        ("gemma-3-27b-it", False),
        ("not-gemini-3", False),
        ("gpt-latest", False),
    ],
)
def test_models_with_levels(model: str, levels: bool) -> None:
    assert has_levels(model) is levels


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"reasoning": {}}, None),
        ({"reasoning": {"enabled": True}}, {"includeThoughts": True}),
        ({"reasoning": {"enabled": False}}, {"thinkingBudget": 0, "includeThoughts": False}),
        (
            {"reasoning": {"max_tokens": 2000, "exclude": True}},
            {"thinkingBudget": 2000, "includeThoughts": False},
        ),
        (
            {"reasoning": {"effort": "high", "max_tokens": 2000}},
            {"thinkingBudget": 2000, "includeThoughts": True},
        ),
        ({"include_reasoning": True}, {"includeThoughts": True}),
        ({"include_reasoning": False}, {"includeThoughts": False}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 512}},
            {"thinkingBudget": 512, "includeThoughts": True},
        ),
        ({"thinking": {"type": "disabled"}}, {"thinkingBudget": 0, "includeThoughts": False}),
        ({"enable_thinking": False}, {"thinkingBudget": 0, "includeThoughts": False}),
        ({"enable_thinking": True}, {"includeThoughts": True}),
    ],
)
def test_reasoning_in_the_words_of_others(fields: dict[str, Any], expected: Any) -> None:
    assert thinking(**fields) == expected


# --- what has no word, and what is Gemini's own ---------------------------------------------------

WITHOUT_A_WORD: dict[str, Any] = {
    "stream": True,
    "stream_options": {"include_usage": True},
    "parallel_tool_calls": True,
    "user": "u",
    "metadata": {"a": "b"},
    "logit_bias": {"1": 2},
    "prediction": {},
    "audio": {"voice": "x"},
    "verbosity": "low",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {},
    "moderation": {},
    "provider": {"order": []},
    "models": ["x"],
    "route": "fallback",
    "transforms": [],
    "plugins": [],
    "usage": {"include": True},
    "min_p": 0.1,
    "top_a": 0.1,
    "repetition_penalty": 1,
    "session_id": "s",
    "trace": {},
}


def test_what_has_no_word_is_dropped() -> None:
    """Gemini refuses names that it does not know."""
    assert translated(**WITHOUT_A_WORD) == translated()


def test_geminis_own_fields_and_unknown_ones_pass() -> None:
    """M1.1: as they are; in generationConfig and toolConfig they join ours and win."""
    safety = [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "OFF"}]
    out = translated(
        max_tokens=5,
        temperature=1,
        tools=[TOOL],
        tool_choice="auto",
        generation_config={"max_output_tokens": 9, "mediaResolution": "MEDIA_RESOLUTION_LOW"},
        toolConfig={"retrievalConfig": {"languageCode": "de"}},
        safety_settings=safety,
        cachedContent="cachedContents/x",
        labels={"a": "b"},
        brand_new={"x_y": 1},
    )
    assert out["generationConfig"] == {
        "maxOutputTokens": 9,
        "temperature": 1,
        "mediaResolution": "MEDIA_RESOLUTION_LOW",
    }
    assert out["toolConfig"] == {
        "functionCallingConfig": {"mode": "AUTO"},
        "retrievalConfig": {"languageCode": "de"},
    }
    assert out["safetySettings"] == safety
    assert out["cachedContent"] == "cachedContents/x"
    assert out["labels"] == {"a": "b"}
    assert out["brand_new"] == {"x_y": 1}


def test_googles_extra_body() -> None:
    """In the form of Google's own OpenAI compatibility layer."""
    own = {"thinking_config": {"thinking_budget": 3}, "cached_content": "cachedContents/y"}
    out = translated(extra_body={"google": own}, reasoning_effort="low", max_tokens=7)
    assert out["cachedContent"] == "cachedContents/y"
    assert out["generationConfig"] == {
        "maxOutputTokens": 7,
        "thinkingConfig": {"thinking_budget": 3},
    }
    assert "extra_body" not in out


ODD: list[Any] = [
    None, True, 0, -1, 1.5, "", "x", "data:", "data:,", "https://[", [], ["x"], [None], [[]], [{}],
    {}, {"x": 1}, {"url": 7}, {"url": "data:;base64,*"}, {"type": "function"}, {"type": []},
    {"name": ""}, {"function": {"name": "f", "arguments": 7}}, [{"function": {"name": "f"}}],
    {"google": []}, {"google": {"thought_signature": 7}}, [{"type": "reasoning.encrypted"}],
    {"type": "json_schema", "json_schema": {"schema": {"$ref": 1, "allOf": [1]}}},
    {"type": "allowed_tools"}, {"effort": []}, {"max_tokens": "x"}, {"data": "x", "format": "y"},
]  # fmt: skip
JSON = st.sampled_from(ODD)
KNOWN = st.sampled_from(
    [
        "tools", "tool_choice", "functions", "function_call", "stop", "n", "response_format",
        "modalities", "reasoning", "reasoning_effort", "thinking", "service_tier", "extra_body",
        "generationConfig", "toolConfig", "logprobs", "web_search_options", "max_tokens",
    ]
)  # fmt: skip
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "function"])},
    optional={
        "content": JSON
        | st.lists(
            st.fixed_dictionaries(
                {"type": st.sampled_from(["text", "image_url", "file", "input_audio", "refusal"])},
                optional={key: JSON for key in ("text", "image_url", "file", "input_audio")},
            ),
            max_size=2,
        ),
        "tool_calls": JSON | st.lists(st.fixed_dictionaries({"function": JSON}), max_size=2),
        "reasoning_details": JSON,
        "extra_content": JSON,
        "google_parts": JSON,
        "images": JSON,
        "name": JSON,
        "tool_call_id": JSON,
    },
)


@given(
    messages=st.lists(MESSAGE, min_size=1, max_size=4),
    fields=st.dictionaries(KNOWN, JSON, max_size=4),
    model=st.sampled_from([MODEL, MODEL_3]),
)
def test_any_request_is_translated_or_refused(
    messages: list[dict[str, Any]], fields: dict[str, Any], model: str
) -> None:
    """No request, however odd, is a fault of ours; none is changed."""
    refused: Untranslatable | None = None
    try:
        out = translated(*messages, model=model, **fields)
    except Untranslatable as error:
        refused = error
        out = {"contents": []}
    assert bool(out["contents"]) is (refused is None)
    assert refused is None or refused.param
    assert all(turn["parts"] and turn["role"] in ("user", "model") for turn in out["contents"])
