"""Clients that follow a run, without sockets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from encoders.json_text import loads
from relay.runs.follower import Follower
from relay.runs.groups import PLACED, VERBATIM
from tests.support.running import ListSink, beginning

if TYPE_CHECKING:
    from relay.runs.groups import Wire
    from relay.runs.hub import Hub
    from relay.runs.run import Run
    from relay.runs.service import Beginning, RunService


async def begun(
    service: RunService,
    sink: ListSink,
    wire: Wire = VERBATIM,
    *,
    start: Beginning | None = None,
    lag_s: float = 0.2,
    **more: Any,
) -> tuple[Run, Follower]:
    """Begin a run and follow it from its beginning.

    Args:
        more: of the follower.
    """
    start = start or beginning()
    followers: list[Follower] = []

    def on_hub(hub: Hub) -> None:
        follower = Follower(
            service.store,
            start.execution_id,
            lambda: service.hub(start.execution_id),
            sink,
            wire,
            one_leg=True,
            lag_s=lag_s,
            **more,
        )
        follower.join(hub)
        followers.append(follower)

    return await service.begin(start, on_hub), followers[0]


def attach(
    service: RunService, execution_id: str, sink: ListSink, *, after: int = 0, **more: Any
) -> Follower:
    """Follow a run on the re-attach route."""
    return Follower(
        service.store,
        execution_id,
        lambda: service.hub(execution_id),
        sink,
        PLACED,
        after=after,
        **more,
    )


def text_of(sink: ListSink, task_id: str = "t1") -> str:
    """The text since the last `streaming_started`; offsets, where they are, must be right."""
    text = ""
    for event in sink.events:
        data = loads(event.data)
        if event.event == b"streaming_started" and data["data"]["task_id"] == task_id:
            text = ""
        elif event.event == b"token" and data["task_id"] == task_id:
            if "offset" in data:
                assert data["offset"] <= len(text)
                text = text[: data["offset"]]
            text += data["delta"]
    return text
