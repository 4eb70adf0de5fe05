"""The messages of a chat request as those of the Messages API. [pure]

Rule M5. System and developer messages leave the conversation for `system`, tool results are said by
the user, turns of one role become one, and thinking that came as `reasoning_details` goes back
before the text and the calls that it led to.
"""

from __future__ import annotations

import re
from typing import Any, Final

from encoders.anthropic_content import Block, blocks_of, content_of, with_cache_control
from encoders.json_text import loads
from encoders.reasoning_details import FIELD, ReasoningDetails
from encoders.shape import Untranslatable

# Whose signatures this API can check; an entry that names no format may be one of these.
CLAUDE_FORMAT: Final = "anthropic-claude-v1"
_THINKING: Final = frozenset({"thinking", "redacted_thinking"})  # blocks
_NOT_IN_AN_ID: Final = re.compile(r"[^a-zA-Z0-9_-]")


class Conversation:
    """A conversation in the words of the Messages API.

    Attributes:
        system: blocks of the system prompt.
        turns: messages, each with a list of blocks; no two of one role follow each other.
    """

    def __init__(self, messages: list[Any]) -> None:
        """Translate.

        Args:
            messages: of a chat completion request.

        Raises:
            Untranslatable: one of them cannot be said.
        """
        self.system: list[Block] = []
        self.turns: list[dict[str, Any]] = []
        self._legacy_id = "call_0"  # of the last function_call: it has none of its own
        for number, message in enumerate(messages):
            where = f"messages.{number}"
            if not isinstance(message, dict):
                raise Untranslatable(f"`{where}` must be an object", param=where)
            self._add(message, where, number)
        if not self.turns and self.system:
            # The API answers a user; instructions alone are what the user says.
            self.turns.append({"role": "user", "content": self.system})
            self.system = []
        for turn in self.turns:
            if turn["role"] == "user":  # results must precede all else
                turn["content"].sort(key=lambda block: block.get("type") != "tool_result")
        self._trim_prefill()

    @property
    def lacks_thinking(self) -> bool:
        """Whether the answer that is to go on has no thinking before its text or calls: the API
        refuses to think with a budget then.
        """
        *before, last = self.turns or [{"role": "user", "content": []}]
        if last["role"] == "user":
            if not before or not _kinds(last) & {"tool_result"}:
                return False
            last = before[-1]
        return not _kinds(last) & _THINKING

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages as they are sent."""
        return [turn | {"content": content_of(turn["content"])} for turn in self.turns]

    def _add(self, message: dict[str, Any], where: str, number: int) -> None:
        role = message.get("role")
        content = f"{where}.content"
        match role:
            case "system" | "developer":
                blocks = with_cache_control(blocks_of(message.get("content"), content), message)
                for at, block in enumerate(blocks):
                    if block.get("type") != "text":
                        raise Untranslatable(
                            "a system message takes text only", param=f"{content}.{at}"
                        )
                self.system += blocks
            case "user":
                blocks = blocks_of(message.get("content"), content)
                self._say("user", with_cache_control(blocks, message))
            case "assistant":
                blocks = self._assistant(message, where, number)
                self._say("assistant", with_cache_control(blocks, message))
            case "tool" | "function":
                self._say("user", with_cache_control([self._result(message, where)], message))
            case _:
                raise Untranslatable(
                    f"`{where}.role` must be system, developer, user, assistant or tool",
                    param=f"{where}.role",
                )

    def _say(self, role: str, blocks: list[Block]) -> None:
        if not blocks:
            return
        if self.turns and self.turns[-1]["role"] == role:
            self.turns[-1]["content"] += blocks
        else:
            self.turns.append({"role": role, "content": list(blocks)})

    def _assistant(self, message: dict[str, Any], where: str, number: int) -> list[Block]:
        said = blocks_of(message.get("content"), f"{where}.content")
        if not said and isinstance(message.get("refusal"), str):
            said = blocks_of(message["refusal"], f"{where}.refusal")
        thinking: list[Block] = []
        if not any(str(block.get("type")) in _THINKING for block in said):
            thinking = _thinking(message)
        calls = message.get("tool_calls")
        if calls is not None and not isinstance(calls, list):
            param = f"{where}.tool_calls"
            raise Untranslatable(f"`{param}` must be a list", param=param)
        uses = [_use(call, f"{where}.tool_calls.{at}") for at, call in enumerate(calls or [])]
        legacy = message.get("function_call")
        if isinstance(legacy, dict):
            self._legacy_id = f"call_{number}"
            call = {"id": self._legacy_id, "function": legacy}
            uses.append(_use(call, f"{where}.function_call"))
        return [*thinking, *said, *uses]

    def _result(self, message: dict[str, Any], where: str) -> Block:
        call_id = message.get("tool_call_id")
        if message.get("role") == "function":
            call_id = self._legacy_id
        if not isinstance(call_id, str) or not call_id:
            param = f"{where}.tool_call_id"
            raise Untranslatable(f"`{param}` is missing", param=param)
        block: Block = {"type": "tool_result", "tool_use_id": _id(call_id)}
        blocks = blocks_of(message.get("content"), f"{where}.content")
        if blocks:
            block["content"] = content_of(blocks)
        if message.get("is_error"):
            block["is_error"] = True
        return block

    def _trim_prefill(self) -> None:
        """What the model shall go on from may not end in spaces."""
        if self.turns and self.turns[-1]["role"] == "assistant":
            blocks = self.turns[-1]["content"]
            if blocks[-1].get("type") == "text":
                blocks[-1] = blocks[-1] | {"text": str(blocks[-1].get("text")).rstrip()}


def _kinds(turn: dict[str, Any]) -> set[str]:
    return {str(block.get("type")) for block in turn["content"]}


def _thinking(message: dict[str, Any]) -> list[Block]:
    """Return the thinking of an earlier answer, to the byte; what nobody signed is left out."""
    blocks = message.get("thinking_blocks")  # in LiteLLM's words: the API's own
    if isinstance(blocks, list) and blocks:
        return [b for b in blocks if isinstance(b, dict) and (b.get("signature") or b.get("data"))]
    details = ReasoningDetails()
    details.add(message.get(FIELD))
    out: list[Block] = []
    for entry in details.result():
        if entry.get("format") not in (None, CLAUDE_FORMAT):
            continue
        text, signature, data = (entry.get(key) for key in ("text", "signature", "data"))
        if entry.get("type") == "reasoning.text" and isinstance(signature, str) and signature:
            out.append({"type": "thinking", "thinking": text or "", "signature": signature})
        elif entry.get("type") == "reasoning.encrypted" and isinstance(data, str) and data:
            out.append({"type": "redacted_thinking", "data": data})
    return out


def _use(call: Any, where: str) -> Block:
    """Return a call of a tool."""
    if not isinstance(call, dict):
        raise Untranslatable(f"`{where}` must be an object", param=where)
    function = call.get("function")
    custom = call.get("custom")
    if isinstance(custom, dict):
        function = {"name": custom.get("name"), "arguments": custom.get("input")}
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Untranslatable(f"`{where}` names no function", param=where)
    call_id = call.get("id")
    if not isinstance(call_id, str) or not call_id:
        raise Untranslatable(f"`{where}.id` is missing", param=f"{where}.id")
    arguments = _arguments(function.get("arguments"))
    block = {"type": "tool_use", "id": _id(call_id), "name": function["name"], "input": arguments}
    if call.get("cache_control") is not None:
        block["cache_control"] = call["cache_control"]
    return block


def _arguments(arguments: Any) -> dict[str, Any]:
    """Return arguments as the object that the API wants.

    A text that is no JSON object (a call that was cut off) is part of what happened and must not
    make the conversation impossible: it is kept under one key.
    """
    if isinstance(arguments, dict):
        return arguments
    text = arguments if isinstance(arguments, str) else ""
    if not text.strip():
        return {}
    try:
        parsed = loads(text)
    except ValueError:
        parsed = None
    return parsed if isinstance(parsed, dict) else {"arguments": text}


def _id(call_id: str) -> str:
    """Return an id in the letters that the API takes; other providers' have others."""
    return _NOT_IN_AN_ID.sub("_", call_id)
