"""A document, checked in full before anything is started (W1.4): what the engine begins with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from relay.engines.base import Problem
from relay.engines.embedded import reading, wording
from relay.engines.embedded.checking import Checker, unknown_input
from relay.engines.embedded.document import Workflow, WorkflowDocument
from relay.engines.embedded.problems import Problems
from relay.engines.embedded.templates import Cache

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


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
    given, wrong = _inputs(inputs, read.value)
    problems.check(wrong)
    assert typed is not None  # else there was a problem
    return Loaded(
        workflow=typed.workflow,
        inputs={**typed.workflow.inputs, **given},
        task_count=checker.count,
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
