"""JSON in the texts of models: a reply that should be JSON, a planner's proposal. [pure]

Small models put JSON between fences or into prose; what they mean is taken if it is unambiguous.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final, NoReturn

from relay.engines.embedded.document import ID_PATTERN

JSON_CHARS: Final = 4 * 1024 * 1024
PLAN_CHARS: Final = 256 * 1024
_PLAN_OBJECTS: Final = 64  # looked at in one text
_FENCED: Final = re.compile(r"```[A-Za-z0-9_-]*[ \t]*\r?\n(.*?)```", re.DOTALL)
_ID: Final = re.compile(ID_PATTERN)


class Unreadable(ValueError):
    """The text is not what was asked for; the message says why, and names the bound if any."""


class _NoNumber(ValueError):
    """A number that JSON has no word for, or no double holds."""


def _no_constant(name: str) -> NoReturn:
    raise _NoNumber(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):  # it would be stored as null
        raise _NoNumber(f"{text[:32]} is more than a double holds")
    return value


_DECODER: Final = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)


def _decoded(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (json.JSONDecodeError, _NoNumber):
        raise
    except ValueError:  # Python's own bound, and its own words for it
        raise ValueError("a whole number has more than 4,300 digits") from None


def json_value(text: str) -> Any:
    """The JSON value that a reply is, or that its only fenced block holds.

    Raises:
        Unreadable: it is too long, or no JSON.
    """
    if len(text) > JSON_CHARS:
        raise Unreadable(f"the reply has {len(text):,} characters; JSON has at most {JSON_CHARS:,}")
    fenced = _FENCED.findall(text)
    try:
        return _decoded(fenced[0] if len(fenced) == 1 else text)
    except ValueError as error:
        if len(fenced) != 1:
            raise Unreadable(f"the reply is no JSON: {error}") from None
    try:
        return _decoded(text)  # the fence may stand in a string
    except ValueError as error:
        raise Unreadable(f"the reply is no JSON: {error}") from None


def plan(text: str, *, agents: tuple[str, ...], max_tasks: int) -> list[dict[str, str]]:
    """The tasks that a planner proposes: `{"tasks": [{id, agent, prompt}]}`; unknown keys are left.

    Args:
        agents: that the tasks may be for. max_tasks: how many there may be.

    Raises:
        Unreadable: it is no such object, there are several, or one of the bounds is not kept.
    """
    if len(text) > PLAN_CHARS:
        raise Unreadable(f"the plan has {len(text):,} characters; it may have {PLAN_CHARS:,}")
    proposals = _proposals(text)
    if len(proposals) != 1:
        count = "no" if not proposals else "more than one"
        raise Unreadable(f'the planner\'s reply holds {count} JSON object {{"tasks": […]}}')
    tasks = proposals[0]["tasks"]
    if not isinstance(tasks, list) or not tasks:
        raise Unreadable("`tasks` of the plan must be a list with at least one task")
    if len(tasks) > max_tasks:
        raise Unreadable(f"the plan has {len(tasks)} tasks; max_tasks is {max_tasks}")
    planned = [_task(task, index, agents) for index, task in enumerate(tasks)]
    ids = [task["id"] for task in planned]
    twice = sorted({task_id for task_id in ids if ids.count(task_id) > 1})
    if twice:
        raise Unreadable(f"the plan names {', '.join(twice)} more than once")
    return planned


def _task(task: Any, index: int, agents: tuple[str, ...]) -> dict[str, str]:
    where = f"tasks[{index}] of the plan"
    if not isinstance(task, dict):
        raise Unreadable(f"{where} is no object")
    task_id, agent, prompt = (task.get(key) for key in ("id", "agent", "prompt"))
    if not isinstance(task_id, str) or not _ID.fullmatch(task_id):
        raise Unreadable(f"{where}: `id` must be 1 to 64 of A-Z a-z 0-9 _ -")
    if agent not in agents:
        raise Unreadable(f"{where}: `agent` must be one of {', '.join(agents)}")
    if not isinstance(prompt, str) or not prompt:
        raise Unreadable(f"{where}: `prompt` must be text that is not empty")
    return {"id": task_id, "agent": agent, "prompt": prompt}


def _proposals(text: str) -> list[dict[str, Any]]:
    """The outermost JSON objects in a text that have `tasks`; those in prose and fences too."""
    found: list[dict[str, Any]] = []
    at = text.find("{")
    for _ in range(_PLAN_OBJECTS):
        if at < 0:
            break
        try:
            value, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            end = at + 1
        else:
            if isinstance(value, dict) and "tasks" in value:
                found.append(value)
        at = text.find("{", end)
    return found
