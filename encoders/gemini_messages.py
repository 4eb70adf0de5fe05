"""The messages of a chat completion request as Gemini's `contents`. [pure]

Rule M5. Two things that the API insists on: the results of parallel calls stand in one turn right
behind the turn of the calls, and a Gemini 3 gets back the signature of its thoughts with the call
that it came with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from encoders.gemini_parts import parts_of
from encoders.json_text import loads
from encoders.reasoning_details import FIELD as REASONING_DETAILS
from encoders.shape import Untranslatable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# What `reasoning_details` call our signatures, in OpenRouter's words.
SIGNATURE_TYPE: Final = "reasoning.encrypted"
SIGNATURE_FORMAT: Final = "google-gemini-v1"
# Parts that the OpenAI wire has no word for, kept in a message under this name (M2.6).
OTHER_PARTS: Final = "google_parts"
# Google's word for a call that another model made: there is no signature to check.
_NO_SIGNATURE: Final = "skip_thought_signature_validator"


class Messages:
    """The translated messages.

    Args:
        messages: of the request.
        signed: whether the model refuses calls without a signature.

    Attributes:
        system: the parts of the system instruction.
        contents: the turns.

    Raises:
        Untranslatable: a message has no translation.
    """

    def __init__(self, messages: Sequence[Any], *, signed: bool) -> None:
        self.system: list[dict[str, Any]] = []
        self.contents: list[dict[str, Any]] = []
        self._signed = signed
        self._names: dict[str, str] = {}  # functions by the ids of their calls
        self._kind = ""  # of the last turn
        for number, message in enumerate(messages):
            self._add(message, f"messages.{number}")
        if not self.contents:  # the API wants at least one turn
            self.contents = [{"role": "user", "parts": self.system or [{"text": ""}]}]
            self.system = []

    def _add(self, message: dict[str, Any], path: str) -> None:
        role = message.get("role")
        match role:
            case "system" | "developer":
                self.system += parts_of(message.get("content"), f"{path}.content")
            case "user":
                self._turn("user", "user", parts_of(message.get("content"), f"{path}.content"))
            case "assistant":
                self._turn("model", "model", self._said(message, path))
            case "tool" | "function":
                self._turn("results", "user", [self._result(message, path)])
            case _:
                raise Untranslatable(f"Gemini has no role {role!r}", param=f"{path}.role")

    def _turn(self, kind: str, role: str, parts: list[dict[str, Any]]) -> None:
        """Add to the last turn if it is of that kind, else begin one.

        Results have a turn of their own: what a user says next is not one of them.
        """
        if not parts:
            return
        if kind == self._kind:
            self.contents[-1]["parts"] += parts
        else:
            self.contents.append({"role": role, "parts": parts})
            self._kind = kind

    def _said(self, message: dict[str, Any], path: str) -> list[dict[str, Any]]:
        """The parts of an assistant's message; what it thought is not sent back."""
        parts = [part for part in _list(message.get(OTHER_PARTS)) if isinstance(part, dict)]
        texts = parts_of(message.get("content"), f"{path}.content")
        texts += parts_of(message.get("refusal"), f"{path}.refusal")
        parts += parts_of(message.get("images"), f"{path}.images")
        by_call, signature = _signatures(message)
        if signature:
            if not texts:
                texts = [{"text": ""}]
            texts[-1]["thoughtSignature"] = signature
        return parts + texts + self._calls(message, by_call, path)

    def _calls(
        self, message: dict[str, Any], by_call: dict[str, str], path: str
    ) -> list[dict[str, Any]]:
        parts = [
            self._call(call, by_call, f"{path}.tool_calls.{number}")
            for number, call in enumerate(_list(message.get("tool_calls")))
        ]
        if message.get("function_call") is not None:
            named = {"function": message["function_call"]}
            parts.append(self._call(named, by_call, f"{path}.function_call"))
        # Only the first of parallel calls bears a signature.
        if self._signed and parts and "thoughtSignature" not in parts[0]:
            parts[0]["thoughtSignature"] = _NO_SIGNATURE
        return parts

    def _call(self, call: Any, by_call: dict[str, str], path: str) -> dict[str, Any]:
        function = call.get("function") if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str):
            raise Untranslatable("Gemini knows only calls of functions", param=path)
        said: dict[str, Any] = {"name": name, "args": _arguments(function.get("arguments"))}
        call_id = call.get("id")
        if isinstance(call_id, str) and call_id:
            self._names[call_id] = name
            said = {"id": call_id, **said}
        part: dict[str, Any] = {"functionCall": said}
        signature = _google(call) or by_call.get(call_id or "")
        if signature:
            part["thoughtSignature"] = signature
        return part

    def _result(self, message: dict[str, Any], path: str) -> dict[str, Any]:
        call_id = message.get("tool_call_id")
        name = self._names.get(call_id) if isinstance(call_id, str) else None
        name = name or message.get("name")
        if not isinstance(name, str) or not name:
            raise Untranslatable(
                "a result must answer a call of an earlier message", param=f"{path}.tool_call_id"
            )
        parts = parts_of(message.get("content"), f"{path}.content")
        text = "".join(part["text"] for part in parts if "text" in part)
        result: dict[str, Any] = {"name": name, "response": _response(text)}
        if isinstance(call_id, str) and call_id:
            result = {"id": call_id, **result}
        if media := [part for part in parts if "text" not in part]:
            result["parts"] = media
        return {"functionResponse": result}


def _arguments(arguments: object) -> dict[str, Any]:
    """The object in the text of a call's arguments; none is an empty one.

    Models make calls that are no JSON object, or are cut off in it: those are kept as they are
    under a name, for the conversation has to go on.
    """
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    try:
        value = loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def _response(text: str) -> dict[str, Any]:
    """A result as an object: as it is if it is one, else under the name that Google's SDK uses."""
    if text.lstrip()[:1] == "{":
        try:
            value = loads(text)
        except ValueError:
            value = None
        if isinstance(value, dict):
            return value
    return {"result": text}


def _signatures(message: dict[str, Any]) -> tuple[dict[str, str], str | None]:
    """Return the signatures of calls by their ids, and that of the text."""
    by_call: dict[str, str] = {}
    of_text = _google(message)
    for detail in _details(message.get(REASONING_DETAILS)):
        data, call_id = detail.get("data"), detail.get("id")
        if not isinstance(data, str) or detail.get("format") != SIGNATURE_FORMAT:
            continue
        if isinstance(call_id, str) and call_id:
            by_call[call_id] = data
        else:
            of_text = data
    return by_call, of_text


def _details(details: object) -> Iterable[dict[str, Any]]:
    for detail in _list(details):
        if isinstance(detail, dict) and detail.get("type") == SIGNATURE_TYPE:
            yield detail


def _google(holder: dict[str, Any]) -> str | None:
    """The signature in `extra_content.google`, where Google's compatibility layer keeps it."""
    extra = holder.get("extra_content")
    google = extra.get("google") if isinstance(extra, dict) else None
    signature = google.get("thought_signature") if isinstance(google, dict) else None
    return signature if isinstance(signature, str) and signature else None


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
