"""Rows of runs and workflows as values, and back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from encoders.json_text import dumps
from relay.stores.runs import RunRow, StoredWorkflow
from relay.stores.sqlite_rows import Columns, text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relay.stores.runs import NewRun, RunEnd
    from relay.stores.sqlite_rows import Row

NEW_RUN: Final = Columns(
    (
        *("execution_id", "workflow_id", "org", "key_id", "trial", "plane", "name", "source"),
        *("owner", "created_at", "updated_at"),
    )
)
END: Final = Columns(
    (
        *("state", "owner", "updated_at", "finished_at", "final_task_id", "error", "summary"),
        *("usage", "waits_for", "kept_since"),
    )
)
RUN: Final = Columns(
    (
        *("execution_id", "workflow_id", "org", "key_id", "trial", "plane", "name", "source"),
        *("document", "inputs", "state", "owner", "generation", "attempts", "cancel_requested_at"),
        *("created_at", "updated_at", "finished_at", "head", "final_task_id", "error", "summary"),
        *("usage", "answers", "waits_for"),
    )
)
WORKFLOW: Final = Columns(("id", "org", "name", "document", "created_at", "updated_at"))
_JSON: Final = ("document", "inputs", "error", "summary", "usage", "answers", "waits_for")


def json_text(value: Any) -> str:
    """Raises: ValueError, TypeError: it is no JSON value."""
    return dumps(value).decode()


def json_value(stored: str) -> Any:
    """Not by orjson: that makes floats of whole numbers that need more than 64 bits."""
    return json.loads(stored)


def _json_or_none(value: Any) -> str | None:
    return None if value is None else json_text(value)


def row_of_new_run(run: NewRun) -> Row:
    return (
        *(text(run.execution_id), text(run.workflow_id), text(run.org), text(run.key_id)),
        *(run.trial, text(run.plane), text(run.name), text(run.source), text(run.owner)),
        *(run.created_at, run.created_at),
    )


def row_of_end(end: RunEnd) -> Row:
    waits = end.state == "yielded"
    return (
        *(end.state, "", end.at, end.at),
        None if end.final_task_id is None else text(end.final_task_id),
        *(_json_or_none(end.error), _json_or_none(end.summary), _json_or_none(end.usage)),
        _json_or_none(end.waits_for) if waits else None,
        None if waits else end.at,
    )


def run_of(row: Sequence[Any]) -> RunRow:
    fields = dict(zip(RUN, row, strict=True))
    fields["trial"] = bool(fields["trial"])
    fields["cancel_requested"] = fields.pop("cancel_requested_at") is not None
    for name in _JSON:
        if fields[name] is not None:
            fields[name] = json_value(fields[name])
    return RunRow(**fields)


def workflow_of(row: Sequence[Any]) -> StoredWorkflow:
    fields = dict(zip(WORKFLOW, row, strict=True))
    if fields["document"] is not None:
        fields["document"] = json_value(fields["document"])
    return StoredWorkflow(**fields)
