"""How an agent's run is written to a client that speaks the OpenAI wire (A1.2, A1.4). [pure]"""

from __future__ import annotations

from encoders.agent import AgentChunks, error_event
from encoders.workflow import data_of
from relay.runs.groups import FrameItem, Item, TokenItem


class AgentWire:
    """A `Wire` of one client; it learns from the frames that pass what the chunks say.

    What it knows hangs on positions, so that a follower that fell behind and encodes the same
    items again, out of the journal, gets the same bytes.

    Args:
        agent: whose run it is; its task has the same id.
    """

    def __init__(self, agent: str, chunks: AgentChunks) -> None:
        self._agent = agent
        self._chunks = chunks
        self._start = 0  # where the text began
        self._told = False  # whether there was any
        self._end: int | None = None  # the frame that nothing follows

    def encode(self, item: Item) -> bytes:
        if isinstance(item, TokenItem):
            return self._token(item)
        if self._end is not None and item.position > self._end:
            return b""
        return self._frame(item)

    def ends(self, position: int) -> bool:
        return self._end is not None and position >= self._end

    def reset(self, execution_id: str, after: int) -> bytes:
        return self.cut("the client took nothing for too long")

    def cut(self, message: str) -> bytes:
        return error_event(message)

    def _token(self, item: TokenItem) -> bytes:
        stream = item.stream
        if stream.task_id != self._agent or self.ends(stream.start):
            return b""
        self._told = True
        return self._chunks.text(item.raw, first=item.offset == 0)

    def _frame(self, item: FrameItem) -> bytes:
        """Engine events are told by what they change only."""
        match item.name:
            case "streaming_started":
                return self._started(item)
            case "streaming_completed":
                self._chunks.finish = data_of(item.frame).get("finish_reason")
            case "task_completed":
                data = data_of(item.frame)
                if data.get("task_id") == self._agent:
                    self._chunks.usage = data.get("usage")
            case "workflow_completed":
                self._end = item.position
                return self._chunks.end()
            case "workflow_error":
                self._end = item.position
                error = data_of(item.frame).get("error")
                message = error.get("message") if isinstance(error, dict) else None
                return error_event(str(message or "the run failed"))
            case _:
                pass
        return b""

    def _started(self, item: FrameItem) -> bytes:
        if not self._told:
            self._start = item.position
            self._chunks.served(str(data_of(item.frame)["model"]))
        elif item.position > self._start:
            # A new owner of the run begins the text again; what was sent cannot be taken back.
            self._end = item.position
            return error_event(
                "the process that ran this stopped, and another has begun it again; the result "
                "will be that one's"
            )
        return b""
