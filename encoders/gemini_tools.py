"""Tools and the choice among them in Gemini's form. [pure] Rule M5."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from encoders.gemini_schema import gemini_schema
from encoders.shape import Untranslatable

if TYPE_CHECKING:
    from collections.abc import Mapping

_MODES: Final = {"none": "NONE", "auto": "AUTO", "required": "ANY"}


def tools_of(body: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Return `tools` and the `functionCallingConfig`, None where nothing is to be said.

    Raises:
        Untranslatable: a tool or a choice that Gemini has no word for.
    """
    declared: list[dict[str, Any]] = []
    native: list[dict[str, Any]] = []
    for number, tool in enumerate(_list(body, "tools")):
        path = f"tools.{number}"
        if not isinstance(tool, dict):
            raise Untranslatable("a tool must be an object", param=path)
        if "function" in tool:
            declared.append(_declaration(tool["function"], f"{path}.function"))
        elif "type" not in tool:  # one of Gemini's own, as {"googleSearch": {}}
            native.append(tool)
        else:
            raise Untranslatable(f"Gemini has no tool of type {tool['type']!r}", param=path)
    for number, function in enumerate(_list(body, "functions")):
        declared.append(_declaration(function, f"functions.{number}"))
    if body.get("web_search_options") is not None:
        native.append({"googleSearch": {}})
    tools = [{"functionDeclarations": declared}] if declared else []
    # A choice among no functions is refused.
    return tools + native, _choice(body) if declared else None


def _list(body: Mapping[str, Any], key: str) -> list[Any]:
    value = body.get(key)
    if value is not None and not isinstance(value, list):
        raise Untranslatable(f"{key} must be a list", param=key)
    return value or []


def _declaration(function: Any, path: str) -> dict[str, Any]:
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise Untranslatable("a function must have a name", param=f"{path}.name")
    out: dict[str, Any] = {"name": name}
    if function.get("description") is not None:
        out["description"] = function["description"]
    if function.get("parameters") is not None:
        out["parametersJsonSchema"] = gemini_schema(function["parameters"])
    return out


def _choice(body: Mapping[str, Any]) -> dict[str, Any] | None:
    key = "tool_choice" if body.get("tool_choice") is not None else "function_call"
    choice = body.get(key)
    if choice is None:
        return None
    if isinstance(choice, str) and choice in _MODES:
        return {"mode": _MODES[choice]}
    if isinstance(choice, dict):
        if choice.get("type") == "allowed_tools":
            return _allowed(choice.get("allowed_tools", choice), key)
        name = _name(choice)
        if name is not None:
            return {"mode": "ANY", "allowedFunctionNames": [name]}
    raise Untranslatable(f"Gemini has no word for this {key}", param=key)


def _allowed(allowed: Any, key: str) -> dict[str, Any]:
    """Some of the tools; VALIDATED is Gemini's word for AUTO among named functions."""
    tools = allowed.get("tools") if isinstance(allowed, dict) else None
    names = [_name(tool) for tool in tools] if isinstance(tools, list) else [None]
    if None in names:
        raise Untranslatable("allowed_tools must name functions", param=key)
    mode = "ANY" if allowed.get("mode") == "required" else "VALIDATED"
    return {"mode": mode, "allowedFunctionNames": names}


def _name(choice: Any) -> str | None:
    """The name in `{"type": "function", "function": {"name"}}`, or `{"name"}` as of old."""
    if not isinstance(choice, dict):
        return None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else choice.get("name")
    return name if isinstance(name, str) and name else None
