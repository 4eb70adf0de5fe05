"""How an agent's run is written to a client that speaks the OpenAI wire (A1.2, A1.4). [pure]"""

from __future__ import annotations

from typing import Any

from encoders.agent import AgentChunks, error_event
from encoders.workflow import data_of
from relay.runs.groups import FrameItem, Item, TokenItem


class AgentWire:
    """A `Wire` of one client; it learns from the frames that pass what the chunks say.

    Args:
        agent: whose run it is; its task has the same id.
    """

    def __init__(self, agent: str, chunks: AgentChunks) -> None:
        self._agent = agent
        self._chunks = chunks

    def encode(self, item: Item) -> bytes:
        if isinstance(item, TokenItem):
            if item.stream.task_id != self._agent:
                return b""
            return self._chunks.text(item.raw, first=item.offset == 0)
        return self._frame(item)

    def _frame(self, item: FrameItem) -> bytes:
        """Engine events are told by what they change only."""
        match item.name:
            case "streaming_started":
                self._chunks.served(str(self._data(item).get("model")))
            case "streaming_completed":
                self._chunks.finish = self._data(item).get("finish_reason")
            case "task_completed":
                data = self._data(item)
                if data.get("task_id") == self._agent:
                    self._chunks.usage = data.get("usage")
            case "workflow_completed":
                return self._chunks.end()
            case "workflow_error":
                error = self._data(item).get("error")
                message = error.get("message") if isinstance(error, dict) else None
                return error_event(str(message or "the run failed"))
            case _:
                pass
        return b""

    def _data(self, item: FrameItem) -> dict[str, Any]:
        return data_of(item.frame)

    def reset(self, execution_id: str, after: int) -> bytes:
        return error_event("the client took nothing for too long; the run goes on")
