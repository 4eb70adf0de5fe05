"""Tools and the choice among them in the words of the Messages API. [pure]

Rule M5. A tool that is no function of OpenAI's is taken for one of the API's own (web search, a
tool with an `input_schema`) and passes as it is (M1.1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from encoders.shape import Untranslatable

if TYPE_CHECKING:
    from collections.abc import Mapping

# Kinds of choice that the API has itself.
_NATIVE_CHOICES: Final = ("auto", "any", "tool", "none")
_CHOICES: Final = {"auto": "auto", "required": "any", "any": "any", "none": "none"}
FORCED: Final = ("any", "tool")


def tools_of(body: Mapping[str, Any], *, strict: bool) -> list[dict[str, Any]]:
    """Return the tools of a request, the legacy `functions` among them.

    Args:
        strict: whether the model takes strict tools; `strict` is left out if not.

    Raises:
        Untranslatable: one cannot be said.
    """
    out = []
    for field, wrap in (("tools", False), ("functions", True)):
        tools = body.get(field)
        if tools is None:
            continue
        if not isinstance(tools, list):
            raise Untranslatable(f"`{field}` must be a list", param=field)
        for number, tool in enumerate(tools):
            where = f"{field}.{number}"
            whole = {"type": "function", "function": tool} if wrap else tool
            out.append(_tool(whole, where, strict=strict))
    return out


def _tool(tool: Any, where: str, *, strict: bool) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise Untranslatable(f"`{where}` must be an object", param=where)
    if tool.get("type") == "custom" and "custom" in tool:
        raise Untranslatable(f"`{where}`: this provider's tools take JSON only", param=where)
    function = tool.get("function")
    if function is None and tool.get("type") != "function":
        return tool
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Untranslatable(f"`{where}.function.name` is missing", param=f"{where}.function.name")
    schema = function.get("parameters")
    if schema is None:
        schema = {"properties": {}}
    if not isinstance(schema, dict):
        param = f"{where}.function.parameters"
        raise Untranslatable(f"`{param}` must be a JSON schema", param=param)
    out: dict[str, Any] = {"name": function["name"], "input_schema": {"type": "object", **schema}}
    if function.get("description"):
        out["description"] = function["description"]
    if strict and function.get("strict"):
        out["strict"] = True
    # What the API knows beside them (cache_control, defer_loading, …) stands on either level.
    known = {"name", "description", "parameters", "strict", "type", "function"}
    for level in (function, tool):
        out |= {k: v for k, v in level.items() if k not in known and v is not None}
    return out


def choice_of(
    body: Mapping[str, Any], tools: list[dict[str, Any]]
) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """Return `tool_choice` and the tools among which it chooses; no choice without tools, for the
    API refuses one.

    Raises:
        Untranslatable: it is none that OpenAI or the API has.
    """
    asked = body.get("tool_choice")
    if asked is None:
        asked = body.get("function_call")
        if isinstance(asked, dict):
            asked = {"type": "function", "function": asked}
    if not tools:
        return None, tools
    choice, tools = _choice(asked, tools)
    if body.get("parallel_tool_calls") is False and (choice or {}).get("type") != "none":
        choice = {**(choice or {"type": "auto"}), "disable_parallel_tool_use": True}
    return choice, tools


def _choice(
    asked: Any, tools: list[dict[str, Any]]
) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    if asked is None:
        return None, tools
    if isinstance(asked, str) and asked in _CHOICES:
        return {"type": _CHOICES[asked]}, tools
    if isinstance(asked, dict):
        kind = asked.get("type")
        if kind in _NATIVE_CHOICES:
            return asked, tools
        if kind == "function" and (name := _name(asked)):
            return {"type": "tool", "name": name}, tools
        if kind == "allowed_tools":
            allowed = asked.get("allowed_tools", asked)
            listed = allowed.get("tools") if isinstance(allowed, dict) else None
            mode = allowed.get("mode", "auto") if isinstance(allowed, dict) else None
            if isinstance(listed, list) and isinstance(mode, str) and mode in _CHOICES:
                names = {_name(tool) for tool in listed}
                kept = [tool for tool in tools if tool.get("name") in names]
                if kept:
                    return {"type": _CHOICES[mode]}, kept
    raise Untranslatable(
        "`tool_choice` must be none, auto, required, a named function or allowed_tools",
        param="tool_choice",
    )


def _name(tool: Any) -> str | None:
    """Return the name in `{"type": "function", "function": {"name"}}`, also without its middle."""
    if not isinstance(tool, dict):
        return None
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) and name else None
