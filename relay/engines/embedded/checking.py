"""What no single field of a document can tell: ids, depth, agents, references (cnl.md). [pure]

It looks at the plain value, so that a document with other problems is checked too; whatever has
the wrong type is passed over, `wording` tells it.

A task may refer to tasks that have surely ended, or been skipped, when it starts:

- those before it in the lists that it stands in, and all within them;
- not itself, what it stands in, what comes later, its siblings in a `parallel`, the other branch;
- not a task inside a `batch` from outside: there are many of it, their outputs are the batch's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from relay.engines.embedded import limits
from relay.engines.embedded.document import KINDS
from relay.engines.embedded.problems import TASK_LISTS, Problems, named
from relay.engines.embedded.syntax import References, hint
from relay.engines.embedded.templates import Expression, Template, TemplateFaults

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from relay.engines.embedded.building import Place
    from relay.engines.embedded.templates import Cache

_TEMPLATE: Final = "prompt"
_EXPRESSIONS: Final = ("when", "if", "items")
_RESERVED: Final = frozenset(
    {"inputs", "tasks", "true", "false", "none", "True", "False", "None", "and", "or", "not", "in",
     "is", "if", "else", "elif", "for", "loop", "self", "recursive"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Scope:
    """What can be referred to at a place."""

    tasks: frozenset[str] = frozenset()
    variables: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Found:
    """A task of the document."""

    place: Place
    batches: tuple[str, ...]  # ids of those around it


class Checker:
    """Checks one document; what it finds goes to `problems`.

    Attributes:
        count: tasks in it.
    """

    def __init__(
        self, value: Any, agents: Collection[str], problems: Problems, cache: Cache
    ) -> None:
        self.count = 0
        self._workflow = _mapping(_mapping(value).get("workflow"))
        self._agents = agents
        self._problems = problems
        self._cache = cache
        self._tasks: dict[str, _Found] = {}
        inputs = self._workflow.get("inputs")
        self._inputs = list(inputs) if isinstance(inputs, dict) else []

    def check(self) -> None:
        """Look at everything."""
        tasks = self._workflow.get("tasks")
        place: Place = ("workflow", "tasks")
        self._index(tasks, place, 1, ())
        if self.count > limits.TASKS:
            bound = f"at most {limits.TASKS} are allowed"
            self._problems.add(place, f"there are {self.count:,} tasks; {bound}")
            return
        self._list(tasks, place, _Scope())
        self._output()

    # -- ids

    def _index(self, tasks: Any, place: Place, depth: int, batches: tuple[str, ...]) -> None:
        for index, task in enumerate(tasks if isinstance(tasks, list) else []):
            if isinstance(task, dict):
                self._index_task(task, (*place, index), depth, batches)

    def _index_task(
        self, task: dict[str, Any], place: Place, depth: int, batches: tuple[str, ...]
    ) -> None:
        self.count += 1
        if depth > limits.TASK_DEPTH:
            bound = f"tasks are nested at most {limits.TASK_DEPTH} deep"
            self._problems.add(place, f"stands too deep: {bound}")
            return
        identifier = task.get("id")
        if isinstance(identifier, str):
            first = self._tasks.setdefault(identifier, _Found(place, batches))
            if first.place != place:
                line = self._problems.line_of(first.place)
                where = f" in line {line}" if line else ""
                self._problems.add(
                    (*place, "id"), f"the id `{identifier[:64]}` is taken by another task{where}"
                )
        for name, inner in _children(task):
            if isinstance(inner, list):
                self._index(inner, (*place, name), depth + 1, batches)
            else:
                within = (*batches, identifier) if isinstance(identifier, str) else batches
                self._index_task(inner, (*place, name), depth + 1, within)

    # -- references

    def _list(self, tasks: Any, place: Place, scope: _Scope, *, at_once: bool = False) -> set[str]:
        """Check the tasks of a list; returns the ids that can be referred to after it."""
        done: set[str] = set()
        for index, task in enumerate(tasks if isinstance(tasks, list) else []):
            if isinstance(task, dict):
                seen = scope if at_once else _Scope(scope.tasks | done, scope.variables)
                done |= self._task(task, (*place, index), seen)
        return done

    def _task(self, task: dict[str, Any], place: Place, scope: _Scope) -> set[str]:
        kind = task.get("type")
        model = KINDS.get(kind) if isinstance(kind, str) else None
        done = {task["id"]} if isinstance(task.get("id"), str) else set()
        if model is None or len(place) > 2 * (limits.TASK_DEPTH + 1):
            return done
        for name in model.agents_in:
            self._check_agents(task.get(name), (*place, name))
        keys = {field.alias or name for name, field in model.model_fields.items()}
        for name in (_TEMPLATE, *_EXPRESSIONS):
            if name in keys and isinstance(task.get(name), str):
                self._template(task[name], (*place, name), scope)
        for name, inner in _children(task):
            if isinstance(inner, dict):
                variable = task.get("as", "item")
                if isinstance(variable, str):
                    self._variable(variable, (*place, "as"))
                    scope = _Scope(scope.tasks, (*scope.variables, variable))
                self._task(inner, (*place, name), scope)
            else:
                done |= self._list(inner, (*place, name), scope, at_once=kind == "parallel")
        return done

    def _variable(self, name: str, place: Place) -> None:
        if name in _RESERVED:
            self._problems.add(place, f"`{name}` has a meaning of its own in templates")

    def _template(self, text: str, place: Place, scope: _Scope) -> None:
        try:
            if place[-1] == _TEMPLATE:
                references = Template.parse(text, self._cache).references
            else:
                references = Expression.parse(text, self._cache).references
        except TemplateFaults:
            return
        for line, message in self._wrong(references, place, scope):
            self._problems.add(place, message, line=line)

    def _wrong(
        self, references: References, place: Place, scope: _Scope
    ) -> Iterator[tuple[int, Callable[[], str]]]:
        for name, line in references.names:
            if name != "inputs" and name not in scope.variables:
                yield line, partial(self._unknown_name, name, scope)
        for name, line in references.inputs:
            if name not in self._inputs:
                yield line, partial(unknown_input, name, self._inputs)
        for name, line in references.tasks:
            if name not in scope.tasks:
                yield line, partial(self._not_in_reach, name, place, scope)

    def _unknown_name(self, name: str, scope: _Scope) -> str:
        known = ["inputs", "tasks", *dict.fromkeys(scope.variables)]
        meant = hint(name, known)
        if name in self._inputs:
            meant = f" (did you mean `inputs.{name}`?)"
        elif name in scope.tasks:
            meant = f" (did you mean `tasks.{name}.output`?)"
        return f"unknown name `{name[:64]}`{meant}; there are {named(known)}"

    def _not_in_reach(self, name: str, place: Place, scope: _Scope) -> str:
        written = f"`tasks.{name[:64]}`"
        found = self._tasks.get(name)
        if found is None:
            dashed = [known for known in self._tasks if known.startswith(f"{name}-")]
            if dashed:
                return f'{written}: no such task; an id with `-` is written `tasks["{dashed[0]}"]`'
            if not self._tasks:
                return f"{written}: no such task"
            known = [each for each in self._tasks if each in scope.tasks] or list(self._tasks)
            return f"{written}: no such task{hint(name, known)}; there are {named(known)}"
        if place[:-1] == found.place:
            return f"{written}: a task cannot refer to itself"
        if place[: len(found.place)] == found.place:
            return f"{written}: this task stands in it, so it has not ended"
        outside = [b for b in found.batches if self._tasks[b].place != place[: self._length(b)]]
        if outside:
            return (
                f"{written}: it runs many times, in the batch `{outside[0]}`; the list of outputs"
                f" is `tasks.{outside[0]}.output`"
            )
        return f"{written}: it does not surely end before this task; refer to tasks before it"

    def _length(self, identifier: str) -> int:
        return len(self._tasks[identifier].place)

    def _output(self) -> None:
        name = self._workflow.get("output")
        if not isinstance(name, str):
            return
        place = ("workflow", "output")
        found = self._tasks.get(name)
        if found is None:
            known = f"; there are {named(list(self._tasks))}" if self._tasks else ""
            near = hint(name, self._tasks)
            self._problems.add(place, f"no task has the id `{name[:64]}`{near}{known}")
        elif found.batches:
            self._problems.add(
                place, f"`{name}` runs many times; name the batch `{found.batches[0]}`"
            )

    # -- agents

    def _check_agents(self, value: Any, place: Place) -> None:
        if isinstance(value, list):
            for index, name in enumerate(value):
                self._check_agents(name, (*place, index))
        elif isinstance(value, str) and value and value not in self._agents:
            self._problems.add(place, partial(_unknown_agent, value, self._agents))


def _unknown_agent(name: str, agents: Collection[str]) -> str:
    known = sorted(agents)
    there = f"there are {named(known)}" if known else "none is configured"
    return f"unknown agent `{name[:64]}`{hint(name, known)}; {there}"


def unknown_input(name: str, known: list[str]) -> str:
    """What is said of an input that the workflow does not have."""
    there = f"there are {named(known)}" if known else "the workflow has none"
    return f"unknown input `{name[:64]}`{hint(name, known)}; {there}"


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _children(task: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The lists of tasks and the one task in it, by key, as its kind has them."""
    kind = task.get("type")
    model = KINDS.get(kind) if isinstance(kind, str) else None
    if model is None:
        return
    keys = {field.alias or name for name, field in model.model_fields.items()}
    for name in TASK_LISTS:
        if name in keys and isinstance(task.get(name), list):
            yield name, task[name]
    if "task" in keys and isinstance(task.get("task"), dict):
        yield "task", task["task"]
