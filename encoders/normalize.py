"""Corrects the streams of providers whose descriptor says that they need it. [pure]

Rule M2.7: `cumulative_deltas` and `inline_tool_calls`. A `Normalizer` stands between the parsing
of a chunk and its healing (M2.6), so what it makes of a chunk is healed, numbered and emitted as if
the provider had sent it. The characters of a stream are counted here, between the two corrections:
each text once, and as the provider sent it, markers included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from encoders.cumulative import CumulativeText, SurrogateJoiner
from encoders.inline_calls import InlineCalls
from encoders.inline_markup import Cut
from encoders.openai_healing import choice_index, made_choice
from encoders.tool_schema import ToolSchema
from encoders.tool_slots import made_call_id
from encoders.translator import CALLS_MAX, CHOICES_MAX, ReplyTooLarge

if TYPE_CHECKING:
    from collections.abc import Iterator

    from encoders.text_counter import TextCounter
    from encoders.translator import StreamWants

_FIELDS: Final = ("content", "reasoning_content", "reasoning", "refusal")
_MIRRORED: Final = ("reasoning_content", "reasoning")  # two names of one text (B90)


def normalizer(wants: StreamWants, seed: str) -> Normalizer | None:
    """Return the normaliser that a provider's flags ask for, None if they ask for none.

    Args:
        seed: from which the ids of calls are made.
    """
    if not (wants.cumulative_deltas or wants.inline_tool_calls):
        return None
    return Normalizer(wants, seed)


class _Field:
    """One text of a choice."""

    def __init__(self, calls: InlineCalls | None) -> None:
        self.cumulative = CumulativeText()
        self.joiner = SurrogateJoiner()
        self.calls = calls


class _Choice:
    """What is known of one choice."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.begun = False
        self.mirrored = False
        self.made = 0  # ids of calls
        self.fields: dict[str, _Field] = {}
        self.arguments: dict[object, CumulativeText] = {}

    @property
    def has_calls(self) -> bool:
        """Whether calls were cut out, all of them whole."""
        cut = [field.calls for field in self.fields.values() if field.calls is not None]
        return any(calls.closed for calls in cut) and not any(calls.broken for calls in cut)


class Normalizer:
    """Corrects the choices of one stream, chunk by chunk.

    Args:
        wants: the flags, the tools of the request and the bound of what is withheld.
        seed: see `normalizer`.
    """

    def __init__(self, wants: StreamWants, seed: str) -> None:
        self._cumulative = wants.cumulative_deltas
        self._inline = wants.inline_tool_calls
        self._schema = ToolSchema(wants.tools)
        self._withheld_max = wants.withheld_max
        self._seed = seed
        self._asked = wants.choices
        self._choices: dict[int, _Choice] = {}

    def take(self, choices: list[Any], counter: TextCounter) -> bool:
        """Correct the choices of one chunk in place, and count what the provider sent.

        Returns:
            Whether anything is left to tell; not if all was repeated or is withheld.
        """
        known = [choice for choice in choices if isinstance(choice, dict)]
        if self._cumulative:
            for choice in known:
                self._cut_repeated(self._of(choice), choice.get("delta"))
        counter.add_choices(choices)
        said = [self._correct(choice) for choice in known]
        return any(said) or not said

    def flush(self) -> Iterator[dict[str, Any]]:
        """Give back what is withheld, as choices of ours."""
        for index, state in self._choices.items():
            delta: dict[str, Any] = {}
            self._end(state, delta)
            if delta:
                yield made_choice(index, delta)

    def _of(self, choice: dict[str, Any]) -> _Choice:
        index = choice_index(choice)
        state = self._choices.get(index)
        if state is None:
            if len(self._choices) >= max(CHOICES_MAX, self._asked):
                raise ReplyTooLarge(f"more than {len(self._choices)} choices")
            state = self._choices[index] = _Choice(index)
        return state

    def _field(self, state: _Choice, name: str) -> _Field:
        field = state.fields.get(name)
        if field is None:
            calls = None
            if self._inline and name != "refusal":
                calls = InlineCalls(lambda: self._new_id(state), self._schema, self._withheld_max)
            field = state.fields[name] = _Field(calls)
        return field

    def _new_id(self, state: _Choice) -> str:
        state.made += 1
        return made_call_id(f"{self._seed}/inline/{state.index}", state.made)

    # --- cumulative_deltas ----------------------------------------------------------------------

    def _cut_repeated(self, state: _Choice, delta: Any) -> None:
        """Leave of each text, and of each call's arguments, only what is new."""
        if not isinstance(delta, dict):
            return
        for name in _FIELDS:
            text = delta.get(name)
            if isinstance(text, str):
                delta[name] = self._field(state, name).cumulative.tail(text)
        calls = delta.get("tool_calls")
        for position, call in enumerate(calls if isinstance(calls, list) else ()):
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
                continue
            key = call.get("index")
            key = position if key is None else key
            if len(state.arguments) >= CALLS_MAX:
                raise ReplyTooLarge(f"more than {CALLS_MAX} tool calls")
            seen = state.arguments.setdefault(str(key), CumulativeText())
            function["arguments"] = seen.tail(function["arguments"])

    # --- inline_tool_calls, and the end of a choice ---------------------------------------------

    def _correct(self, choice: dict[str, Any]) -> bool:
        """Correct one choice; return whether it says anything."""
        state = self._of(choice)
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            delta = choice["delta"] = {}
        meant = bool(delta)
        cuts: dict[str, Cut] = {}
        for name in self._texts(state, delta):
            field = self._field(state, name)
            cuts[name] = Cut()
            self._feed(field, field.joiner.join(delta[name]), cuts[name])
        self._put(state, delta, cuts)
        if choice.get("finish_reason"):
            self._end(state, delta)
            if choice["finish_reason"] == "stop" and state.has_calls:
                choice["finish_reason"] = "tool_calls"
        said = any(value for key, value in delta.items() if key != "role" or not state.begun)
        said = said or any(v for k, v in choice.items() if k not in ("index", "delta"))
        state.begun = state.begun or said
        return said or not meant

    def _texts(self, state: _Choice, delta: dict[str, Any]) -> list[str]:
        """The texts of a delta; of mirrored ones only the first, until `_put`."""
        first, second = _MIRRORED
        if delta.get(first) and delta.get(first) == delta.get(second):
            state.mirrored = True
        if state.mirrored:
            delta.pop(second, None)
        return [name for name in _FIELDS if isinstance(delta.get(name), str) and delta[name]]

    def _feed(self, field: _Field, text: str, cut: Cut) -> None:
        if field.calls is not None:
            field.calls.feed(text, cut)
        else:
            cut.say(text)

    def _put(self, state: _Choice, delta: dict[str, Any], cuts: dict[str, Cut]) -> None:
        """Put what the texts came to into the delta."""
        for name, cut in cuts.items():
            text = cut.text
            if text:
                delta[name] = text
            else:
                delta.pop(name, None)
            if cut_out := cut.calls:
                calls = delta.get("tool_calls")
                delta["tool_calls"] = [*(calls if isinstance(calls, list) else ()), *cut_out]
        first, second = _MIRRORED
        if state.mirrored and first in delta:
            delta[second] = delta[first]

    def _end(self, state: _Choice, delta: dict[str, Any]) -> None:
        """The choice is over: add what its texts withhold to `delta`."""
        cuts: dict[str, Cut] = {}
        for name, field in state.fields.items():
            cut = cuts[name] = Cut()
            if isinstance(delta.get(name), str):
                cut.say(delta[name])
            waiting = field.joiner.join(field.cumulative.flush()) + field.joiner.flush()
            if waiting:
                self._feed(field, waiting, cut)
            if field.calls is not None:
                field.calls.end(cut)
        self._put(state, delta, cuts)
