"""A document, checked in full before anything is started (W1.4): what the engine begins with."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from encoders.json_text import dumps
from relay.engines.base import Problem
from relay.engines.embedded import reading, wording
from relay.engines.embedded.checking import Checker, unknown_input
from relay.engines.embedded.document import Workflow, WorkflowDocument
from relay.engines.embedded.problems import Problems
from relay.engines.embedded.templates import Cache

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_REMEMBERED: Final = 64
_REMEMBERED_SIZE_MAX: Final = 16 * 1024  # of a document's text


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A document that can be run.

    Attributes:
        workflow: with its templates, expressions and schemas compiled.
        inputs: the document's defaults with those of the request over them.
        task_count: tasks written in it.
    """

    workflow: Workflow
    inputs: Mapping[str, Any]
    task_count: int


def load(
    document: str | bytes | Mapping[str, Any],
    inputs: Mapping[str, Any],
    *,
    agents: Collection[str],
) -> Loaded:
    """Check a document and the inputs of a run. A function of its arguments alone.

    Args:
        document: YAML or JSON text (UTF-8), or an object. inputs: over the document's defaults.
        agents: the ids of all agents that there are.

    Raises:
        DocumentError: all that is wrong, in the document's order, the inputs last.
    """
    given_document = _document(document, agents)
    return _with_inputs(given_document, inputs)


@dataclass(frozen=True, slots=True)
class _Document:
    """A document without a run's inputs. `problems`: those of its own, to which inputs add."""

    value: Any
    problems: Problems
    typed: WorkflowDocument | None
    task_count: int


class Loader:
    """Loads documents, and remembers those that it has seen lately: one that is run again and
    again, or checked and then run, is compiled once.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[str | bytes, tuple[str, ...]], _Document] = OrderedDict()

    def knows(self, document: str | Mapping[str, Any], agents: Collection[str]) -> bool:
        """Whether loading it takes no time."""
        return self._key(document, agents) in self._seen

    def load(
        self,
        document: str | Mapping[str, Any],
        inputs: Mapping[str, Any],
        *,
        agents: Collection[str],
    ) -> Loaded:
        """As `load`; may be called from several threads."""
        key = self._key(document, agents)
        known = self._seen.get(key) if key is not None else None
        if known is None:
            known = _document(document, agents)
            if key is not None and known.typed is not None and known.problems.none:
                self._seen[key] = known
                while len(self._seen) > _REMEMBERED:
                    self._seen.popitem(last=False)
        return _with_inputs(known, inputs)

    def _key(
        self, document: str | Mapping[str, Any], agents: Collection[str]
    ) -> tuple[str | bytes, tuple[str, ...]] | None:
        try:
            text = document if isinstance(document, str) else dumps(document)
        except (TypeError, ValueError):
            return None  # whatever it is, loading it tells
        return (text, tuple(agents)) if len(text) <= _REMEMBERED_SIZE_MAX else None


def _document(document: str | bytes | Mapping[str, Any], agents: Collection[str]) -> _Document:
    read = reading.read(document)
    problems = Problems(read)
    typed: WorkflowDocument | None = None
    cache = Cache()
    try:
        typed = WorkflowDocument.model_validate(read.value, context=cache)
    except ValidationError as error:
        wording.tell(error, read.value, problems)
    checker = Checker(read.value, agents, problems, cache)
    checker.check()
    return _Document(read.value, problems, typed, checker.count)


def _with_inputs(document: _Document, inputs: Mapping[str, Any]) -> Loaded:
    given, wrong = _inputs(inputs, document.value)
    document.problems.check(wrong)
    typed = document.typed
    assert typed is not None  # else there was a problem
    return Loaded(
        workflow=typed.workflow,
        inputs={**typed.workflow.inputs, **given},
        task_count=document.task_count,
    )


def _inputs(inputs: Mapping[str, Any], value: Any) -> tuple[dict[str, Any], list[Problem]]:
    """The inputs of a run, and what is wrong with them."""
    given, wrong = reading.plain(inputs, "inputs")
    try:
        known = list(value["workflow"].get("inputs") or {})
    except (TypeError, KeyError, AttributeError):
        return given, wrong  # the document itself is wrong: the inputs cannot be told
    for name in given:
        if name not in known:
            wrong.append(Problem(message=unknown_input(name, known), path=f"inputs.{name[:64]}"))
    return given, wrong
