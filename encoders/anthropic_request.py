"""A chat completion request as one of the Messages API. [pure]

Rule M5; the table of all fields is in docs/spec/models.md. A field is translated, dropped because
it is known to have no words there, or unknown and passed (M1.1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from encoders import anthropic_models as models
from encoders.anthropic_content import Block, content_of
from encoders.anthropic_messages import Conversation
from encoders.anthropic_schema import output_schema
from encoders.anthropic_thinking import budget_beyond, think, wish_of
from encoders.anthropic_tools import FORCED, choice_of, tools_of
from encoders.json_text import dumps
from encoders.shape import Untranslatable

if TYPE_CHECKING:
    from collections.abc import Mapping

# The API demands a limit. This is also the default of `billing.hold_output_tokens`, which a request
# without a limit is held at (M4.2).
DEFAULT_MAX_TOKENS: Final = 4096

_TRANSLATED: Final = frozenset(
    {
        *("model", "messages", "stream", "n", "max_tokens", "max_completion_tokens"),
        *("stop", "stop_sequences", "temperature", "top_p", "user", "metadata", "service_tier"),
        *("safety_identifier", "system", "response_format"),
        *("tools", "functions", "tool_choice", "function_call", "parallel_tool_calls"),
        *("reasoning_effort", "reasoning", "include_reasoning"),
    }
)
# OpenAI's and OpenRouter's own, without words in this API, which refuses what it does not know.
DROPPED: Final = frozenset(
    {
        *("stream_options", "logprobs", "top_logprobs", "logit_bias", "seed", "store"),
        *("frequency_penalty", "presence_penalty", "prediction", "modalities", "audio"),
        *("verbosity", "web_search_options", "prompt_cache_key", "prompt_cache_retention"),
        *("prompt_cache_options", "moderation"),
        *("models", "provider", "route", "transforms", "plugins", "usage"),
    }
)
_SERVICE_TIERS: Final = {
    "auto": "auto",
    "default": "standard_only",
    "flex": "standard_only",
    "scale": "auto",
    "priority": "auto",
    "fast": "auto",
    "standard_only": "standard_only",
}
_JSON_ONLY: Final = "Respond with one valid JSON object and nothing else: no prose, no code fence."


def messages_request(body: Mapping[str, Any], *, model: str, stream: bool) -> dict[str, Any]:
    """Return the request.

    Args:
        body: a chat completion request; never changed. model: the provider's name of the model.

    Raises:
        Untranslatable: it cannot be said in this API.
    """
    if body.get("n") not in (None, 1):
        raise Untranslatable("this provider gives one choice: `n` must be 1", param="n")
    messages = body.get("messages")
    conversation = Conversation(messages if isinstance(messages, list) else [])
    out: dict[str, Any] = {
        "model": model,
        "max_tokens": _max_tokens(body, model),
        "messages": conversation.messages(),
    }
    if stream:
        out["stream"] = True
    out |= {k: v for k, v in body.items() if k not in _TRANSLATED and k not in DROPPED}
    _sampling(body, out)
    tools, choice = _tools(body, model)
    if tools:
        out["tools"] = tools
    if choice is not None:
        out["tool_choice"] = choice
    instruction = _format(body, out, model)
    system = [*_own_system(body), *conversation.system]
    if instruction is not None:
        system.append({"type": "text", "text": instruction})
    if system:
        out["system"] = content_of(system)
    _account(body, out)
    forced = choice is not None and choice.get("type") in FORCED
    think(out, wish_of(body), model=model, forced=forced, bare=conversation.lacks_thinking)
    return out


def _max_tokens(body: Mapping[str, Any], model: str) -> Any:
    for name in ("max_completion_tokens", "max_tokens"):
        limit = body.get(name)
        if limit is not None:
            return int(limit) if isinstance(limit, float) and limit.is_integer() else limit
    return DEFAULT_MAX_TOKENS + budget_beyond(body, model)


def _sampling(body: Mapping[str, Any], out: dict[str, Any]) -> None:
    temperature, top_p = body.get("temperature"), body.get("top_p")
    if temperature is not None:
        # OpenAI's scale ends at 2, this one at 1, and both mean the model's own spread by 1.
        above = isinstance(temperature, int | float) and temperature > 1
        out["temperature"] = 1 if above else temperature
    # Some models refuse both; a top_p of 1 says nothing.
    if top_p is not None and not (top_p == 1 and temperature is not None):
        out["top_p"] = top_p
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else stop
    own = body.get("stop_sequences")
    if isinstance(own, list):
        stops = [*own, *(stops if isinstance(stops, list) else [])]
    if isinstance(stops, list):
        # The API refuses those of nothing but spaces.
        stops = [text for text in stops if not isinstance(text, str) or text.strip()]
        if stops:
            out["stop_sequences"] = stops
    elif stops is not None:
        raise Untranslatable("`stop` must be a text or a list of texts", param="stop")


def _tools(
    body: Mapping[str, Any], model: str
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    tools = tools_of(body, strict=models.takes_structured(model))
    choice, tools = choice_of(body, tools)
    return tools, choice


def _format(body: Mapping[str, Any], out: dict[str, Any], model: str) -> str | None:
    """Say `response_format`; return it as an instruction where the API has no words for it."""
    wanted = body.get("response_format")
    if wanted is None:
        return None
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return _JSON_ONLY
    if kind == "json_schema":
        named = wanted.get("json_schema")
        schema = named.get("schema") if isinstance(named, dict) else None
        if not isinstance(schema, dict):
            param = "response_format.json_schema.schema"
            raise Untranslatable(f"`{param}` is missing", param=param)
        if not models.takes_structured(model):
            return f"{_JSON_ONLY} It must match this JSON schema:\n{dumps(schema).decode()}"
        told = out.get("output_config")
        asked = {"type": "json_schema", "schema": output_schema(schema)}
        out["output_config"] = {"format": asked} | (told if isinstance(told, dict) else {})
        return None
    raise Untranslatable(
        "`response_format.type` must be text, json_object or json_schema",
        param="response_format.type",
    )


def _own_system(body: Mapping[str, Any]) -> list[Block]:
    """Return a `system` in the API's own words, which precedes all others."""
    system = body.get("system")
    if isinstance(system, str):
        return [{"type": "text", "text": system}] if system.strip() else []
    return [b for b in system if isinstance(b, dict)] if isinstance(system, list) else []


def _account(body: Mapping[str, Any], out: dict[str, Any]) -> None:
    """Say who asks, and how soon it is wanted."""
    metadata = body.get("metadata")
    named = metadata.get("user_id") if isinstance(metadata, dict) else None
    user = named or body.get("user") or body.get("safety_identifier")
    if isinstance(user, str) and user:
        out["metadata"] = {"user_id": user}
    tier = body.get("service_tier")
    if tier is not None:
        out["service_tier"] = _SERVICE_TIERS.get(tier, tier) if isinstance(tier, str) else tier
