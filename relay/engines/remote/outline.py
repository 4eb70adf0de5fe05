"""What the gateway looks at in a document that a remote engine runs. [pure] Rules W1.4, W3.2.

The engine decides what a document may hold; here it has to be YAML text, or an object, of a size.
YAML is read as events, never as values: aliases and merge keys cost nothing so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import yaml

from encoders.json_text import dumps
from relay.engines.base import DocumentError, Problem

DOCUMENT_BYTES_MAX: Final = 256 * 1024
_NAME_MAX: Final = 64
_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def outline(document: str | Mapping[str, Any]) -> tuple[str, int]:
    """Return a document's `workflow.name` and the number of its top-level tasks, as far as they
    can be told: "" and 0 if not.

    Raises:
        DocumentError: it is too large, or not YAML.
    """
    if isinstance(document, str):
        _check_size(len(document.encode("utf-8", "replace")))
        return _of_text(document)
    try:
        _check_size(len(dumps(document)))
    except ValueError:
        raise DocumentError([Problem(message="the document is nested too deeply")]) from None
    workflow = document.get("workflow")
    workflow = workflow if isinstance(workflow, Mapping) else {}
    name, tasks = workflow.get("name"), workflow.get("tasks")
    return (
        name[:_NAME_MAX] if isinstance(name, str) else "",
        len(tasks) if isinstance(tasks, list) else 0,
    )


def _check_size(size: int) -> None:
    if size > DOCUMENT_BYTES_MAX:
        raise DocumentError(
            [Problem(message=f"the document has {size} bytes; {DOCUMENT_BYTES_MAX} is the most")]
        )


class _Level:
    """A collection that is open: where the walk is in it.

    Attributes:
        path: of the keys that lead to it. key: the one whose value comes next, None at a key.
    """

    __slots__ = ("is_map", "key", "path")

    def __init__(self, path: tuple[str, ...], *, is_map: bool) -> None:
        self.path = path
        self.is_map = is_map
        self.key: str | None = None


class _Walk:
    """Follows the events of a text to the two places that are looked for."""

    def __init__(self) -> None:
        self.name = ""
        self.tasks = 0
        self.empty = True
        self._levels: list[_Level] = []

    def take(self, event: yaml.Event) -> None:
        """Take the next event."""
        if isinstance(event, yaml.CollectionEndEvent):
            self._levels.pop()
        elif isinstance(event, yaml.NodeEvent):
            self.empty = False
            path = self._place(event)
            if path == ("workflow", "name") and isinstance(event, yaml.ScalarEvent):
                self.name = event.value[:_NAME_MAX]
            elif path == ("workflow", "tasks", "[]"):
                self.tasks += 1
            if isinstance(event, yaml.CollectionStartEvent):
                is_map = isinstance(event, yaml.MappingStartEvent)
                # Deeper than what is looked for, paths need not be told apart.
                self._levels.append(_Level(path[:4], is_map=is_map))

    def _place(self, event: yaml.NodeEvent) -> tuple[str, ...]:
        """Where this node stands; a key stands nowhere."""
        if not self._levels:
            return ()
        level = self._levels[-1]
        if not level.is_map:
            return (*level.path, "[]")
        if level.key is None:
            level.key = event.value if isinstance(event, yaml.ScalarEvent) else ""
            return ("", "", "", "")
        key, level.key = level.key, None
        return (*level.path, key)


def _of_text(text: str) -> tuple[str, int]:
    walk = _Walk()
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            walk.take(event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise DocumentError(
            [
                Problem(
                    message=f"not YAML: {error.problem or error.context or 'unreadable'}",
                    line=None if mark is None else mark.line + 1,
                    column=None if mark is None else mark.column + 1,
                )
            ]
        ) from None
    except (yaml.YAMLError, ValueError):  # characters that no YAML may hold
        problem = Problem(message="not YAML: it holds a character that YAML cannot")
        raise DocumentError([problem]) from None
    if walk.empty:
        raise DocumentError([Problem(message="the document is empty")])
    return walk.name, walk.tasks
