"""A chat completion request as a `GenerateContentRequest`. [pure]

Rule M5; `docs/spec/models.md` says of each field what becomes of it. Fields of Gemini's own and
fields that nobody knows are passed on as they are (M1.1) and win over ours.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from encoders.gemini_messages import Messages
from encoders.gemini_schema import gemini_schema
from encoders.gemini_thinking import has_levels, thinking_config
from encoders.gemini_tools import tools_of
from encoders.shape import Untranslatable

if TYPE_CHECKING:
    from collections.abc import Mapping

# Fields that become one field of generationConfig, as they are.
_SETTINGS: Final = {
    "temperature": "temperature",
    "top_p": "topP",
    "top_k": "topK",
    "seed": "seed",
    "presence_penalty": "presencePenalty",
    "frequency_penalty": "frequencyPenalty",
}
_TIERS: Final = {"flex": "flex", "priority": "priority", "default": "standard"}

# Fields that are translated below, under other names than `_SETTINGS`.
_TRANSLATED: Final = frozenset(
    {
        "messages", "tools", "tool_choice", "functions", "function_call", "web_search_options",
        "max_tokens", "max_completion_tokens", "n", "stop", "logprobs", "top_logprobs",
        "response_format", "modalities", "service_tier", "extra_body",
        "reasoning_effort", "reasoning", "include_reasoning", "thinking", "enable_thinking",
    }
)  # fmt: skip

# Words of OpenAI and OpenRouter that Gemini, which refuses unknown names, has no word for.
_DROPPED: Final = frozenset(
    {
        "model", "stream", "stream_options", "parallel_tool_calls", "user", "metadata",
        "logit_bias", "prediction", "audio", "verbosity", "safety_identifier",
        "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "moderation",
        "provider", "models", "route", "transforms", "plugins", "usage", "min_p", "top_a",
        "repetition_penalty", "session_id", "trace",
    }
)  # fmt: skip

# Gemini's own fields, which it takes in either spelling but not in both.
_OWN: Final = {
    "generation_config": "generationConfig",
    "tool_config": "toolConfig",
    "safety_settings": "safetySettings",
    "system_instruction": "systemInstruction",
    "cached_content": "cachedContent",
}
_MERGED: Final = frozenset({"generationConfig", "toolConfig"})
_SNAKE: Final = re.compile(r"_([a-z])")


def gemini_request(body: Mapping[str, Any], *, model: str) -> dict[str, Any]:
    """Return the body of the request; the model stands in its URL.

    Raises:
        Untranslatable: it holds what Gemini has no word for.
    """
    given = {key: value for key, value in body.items() if value is not None}
    messages = Messages(given.get("messages", ()), signed=has_levels(model))
    out: dict[str, Any] = {"contents": messages.contents}
    if messages.system:
        out["systemInstruction"] = {"parts": messages.system}
    tools, calling = tools_of(given)
    if tools:
        out["tools"] = tools
    if calling is not None:
        out["toolConfig"] = {"functionCallingConfig": calling}
    if config := _generation_config(given, model):
        out["generationConfig"] = config
    if tier := _TIERS.get(str(given.get("service_tier"))):
        out["serviceTier"] = tier
    _add_own_fields(out, _of_extra_body(given.get("extra_body")))
    known = _TRANSLATED | _DROPPED | _SETTINGS.keys()
    _add_own_fields(out, {key: value for key, value in given.items() if key not in known})
    return out


def _generation_config(given: Mapping[str, Any], model: str) -> dict[str, Any]:
    config = {ours: given[theirs] for theirs, ours in _SETTINGS.items() if theirs in given}
    limit = given.get("max_completion_tokens", given.get("max_tokens"))
    if limit is not None:
        config["maxOutputTokens"] = limit
    if given.get("n", 1) != 1:
        config["candidateCount"] = given["n"]
    stop = given.get("stop")
    if stop := [stop] if isinstance(stop, str) else stop:
        config["stopSequences"] = stop
    if given.get("logprobs"):
        config["responseLogprobs"] = True
        if "top_logprobs" in given:
            config["logprobs"] = given["top_logprobs"]
    config |= _response_format(given.get("response_format"))
    config |= _modalities(given.get("modalities"))
    if (thinking := thinking_config(given, model)) is not None:
        config["thinkingConfig"] = thinking
    return config


def _response_format(response_format: Any) -> dict[str, Any]:
    kind = response_format.get("type") if isinstance(response_format, dict) else response_format
    match kind:
        case None | "text":
            return {}
        case "json_object":
            return {"responseMimeType": "application/json"}
        case "json_schema":
            named = response_format.get("json_schema")
            schema = named.get("schema") if isinstance(named, dict) else None
            out = {"responseMimeType": "application/json"}
            return out if schema is None else out | {"responseJsonSchema": gemini_schema(schema)}
        case _:
            raise Untranslatable("Gemini has no word for this format", param="response_format")


def _modalities(modalities: Any) -> dict[str, Any]:
    if modalities is None or modalities == ["text"]:
        return {}
    if not isinstance(modalities, list) or not {"text", "image"}.issuperset(map(str, modalities)):
        raise Untranslatable("only text and images can be asked for", param="modalities")
    return {"responseModalities": [modality.upper() for modality in modalities]}


def _of_extra_body(extra_body: Any) -> dict[str, Any]:
    """The fields that Google's OpenAI compatibility layer takes in `extra_body.google`."""
    google = extra_body.get("google") if isinstance(extra_body, dict) else None
    own = dict(google) if isinstance(google, dict) else {}
    thinking = own.pop("thinking_config", None)
    if thinking is not None:
        own["generationConfig"] = {"thinkingConfig": thinking}
    return own


def _add_own_fields(out: dict[str, Any], own: Mapping[str, Any]) -> None:
    """Add fields in Gemini's own words, and those that nobody knows."""
    for key, value in own.items():
        name = _OWN.get(key, key)
        if name in _MERGED and isinstance(value, dict):
            out[name] = {**out.get(name, {}), **{_camel(k): v for k, v in value.items()}}
        else:
            out[name] = value


def _camel(name: str) -> str:
    return _SNAKE.sub(lambda match: match[1].upper(), name)
