"""`reasoning_details`: reasoning that a later turn must bring back unchanged. [pure]

OpenRouter's form, which its clients keep and send back: a list of entries, told apart by `index`
and `type`, that arrive in pieces. Rule M2.6.
"""

from __future__ import annotations

from typing import Any, Final

FIELD: Final = "reasoning_details"
# Pieces of these follow each other; of everything else the last counts.
_GROWING: Final = frozenset({"text", "summary", "data"})


class ReasoningDetails:
    """Joins the pieces of entries; linear in what it takes."""

    def __init__(self) -> None:
        self._entries: list[dict[str, Any]] = []
        self._pieces: list[dict[str, list[str]]] = []
        self._open: dict[tuple[int, object], int] = {}

    def add(self, pieces: object) -> None:
        """Take the value of one `reasoning_details`; what is not a list of objects is ignored."""
        for piece in pieces if isinstance(pieces, list) else ():
            if isinstance(piece, dict):
                self._add(piece)

    def _add(self, piece: dict[str, Any]) -> None:
        index = piece.get("index")
        at: int | None = None
        if isinstance(index, int):  # one without an index is whole
            key = (index, str(piece.get("type")))
            at = self._open.get(key)
            if at is None:
                self._open[key] = len(self._entries)
        if at is None:
            at = len(self._entries)
            self._entries.append({})
            self._pieces.append({})
        entry, texts = self._entries[at], self._pieces[at]
        for name, value in piece.items():
            if name in _GROWING and isinstance(value, str):
                texts.setdefault(name, []).append(value)
                entry.setdefault(name, "")  # keeps its place
            elif value is not None or name not in entry:
                entry[name] = value

    def result(self) -> list[dict[str, Any]]:
        """Return the entries, whole, in the order in which they began."""
        return [
            entry | {name: "".join(texts) for name, texts in pieces.items()}
            for entry, pieces in zip(self._entries, self._pieces, strict=True)
        ]
