"""Runs against a model of them in memory: any sequence of calls, from two gateways."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from relay.stores.base import StoreError
from relay.stores.runs import ENDED, Batch, JournalEvent, StoredEvent, TextPiece
from tests.contract.backends import BACKENDS, Backend
from tests.contract.values import NOW, event, new_run, run_end

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from relay.stores.runs import RunRow, RunStore

RUNS = ("e1", "e2", "e3")
WORKERS = ("worker_1", "worker_2")
TASKS = ("t1", "t2")
STALE_S = 300.0
STARTED = "streaming_started"
ENDS = (STARTED, "streaming_completed", "task_completed", "task_error")

gateway = st.integers(0, 1)
some_run = st.sampled_from(RUNS)
some_worker = st.sampled_from(WORKERS)
some_event = st.builds(
    event,
    st.sampled_from([f"id_{n}" for n in range(8)]),
    st.sampled_from((*ENDS, STARTED, "heartbeat", "task_dispatched")),
    st.sampled_from((*TASKS, "")),
)
some_events = st.lists(some_event, max_size=4)
a_value = st.none() | st.integers() | st.text(max_size=3)
some_values = st.dictionaries(st.sampled_from(("k1", "k2")), a_value, max_size=2)
# How much of the newest text of which task is said, from how far before its end.
some_text = st.none() | st.tuples(st.sampled_from(TASKS), st.integers(0, 2), st.integers(0, 3))


@dataclass
class Run:
    """What a run is."""

    owner: str
    updated_at: float
    state: str = "running"
    generation: int = 1
    attempts: int = 1
    cancel: bool = False
    retired: bool = False
    waits_for: str = ""
    finished_at: float | None = None
    answers: dict[str, Any] = field(default_factory=dict)
    events: list[JournalEvent] = field(default_factory=list)
    texts: dict[int, bytes] = field(default_factory=dict)  # by the position of their start
    steps: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)

    def position(self, event_id: str) -> int | None:
        ids = [e.event_id for e in self.events]
        return ids.index(event_id) + 1 if event_id in ids else None

    def stream(self, task: str) -> int | None:
        """Where the newest text of a task begins."""
        starts = [
            n for n, e in enumerate(self.events, 1) if e.name == STARTED and e.task_id == task
        ]
        return max(starts, default=None)

    def write(self, batch: Batch) -> int:
        first = None
        for said in batch.events:
            at = self.position(said.event_id)
            if at is None:
                self.events.append(said)
                at = len(self.events)
            first = first or at
        for key, value in batch.steps.items():
            self.steps.setdefault(key, value)
        self.outputs |= batch.outputs
        for piece in batch.texts:
            place = self.position(piece.event_id)
            assert place is not None
            text = self.texts.get(place, b"")
            if piece.offset + piece.chars > len(text):
                self.texts[place] = text + piece.raw
        return first or len(self.events)

    def open_at(self, at: int) -> list[tuple[int, str, bytes]]:
        found: dict[str, int] = {}
        for position, said in enumerate(self.events[:at], 1):
            if said.task_id and said.name in ENDS:
                found.pop(said.task_id, None)
                if said.name == STARTED:
                    found[said.task_id] = position
        texts = ((position, task, self.texts.get(position)) for task, position in found.items())
        return sorted((position, task, raw) for position, task, raw in texts if raw)


class RunMachine(RuleBasedStateMachine):
    """The calls; beside each, what it means in plain values."""

    kind: type[Backend]

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.folder = tempfile.TemporaryDirectory()
        backend = self.kind(Path(self.folder.name))
        self.stores = [backend.store(), backend.store()]
        for store in self.stores:
            self.run(store.open())
        self.now = NOW
        self.runs: dict[str, Run] = {}
        self.leases: dict[str, float] = {}

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(call)

    def teardown(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self.folder.cleanup)
            stack.callback(self.runner.close)
            for store in self.stores:
                stack.callback(self.run, store.close())

    def batch(
        self,
        name: str,
        events: list[JournalEvent],
        values: dict[str, Any],
        text: tuple[str, int, int] | None,
    ) -> Batch:
        """With a piece of the newest text of a task, if it has one that is not retired."""
        known = self.runs.get(name)
        texts = list[TextPiece]()
        if text is not None and known is not None:
            task, back, more = text
            place = known.stream(task)
            if place is not None:
                stored = known.texts.get(place, b"")
                offset = max(0, len(stored) - back)
                if offset < len(stored):  # said again: no longer than what is there
                    raw = stored[offset:]
                else:
                    raw = b"".join(b"%d" % ((offset + n) % 10) for n in range(more))
                texts.append(
                    TextPiece(
                        event_id=known.events[place - 1].event_id,
                        task_id=task,
                        offset=offset,
                        raw=raw,
                        chars=len(raw),
                    )
                )
        return Batch(events=events, texts=texts, steps=values, outputs=values)

    # -- the calls ------------------------------------------------------------------------------

    @rule(gateway=gateway, name=some_run, owner=some_worker, events=some_events)
    def create(self, gateway: int, name: str, owner: str, events: list[JournalEvent]) -> None:
        run = new_run(name, owner=owner, created_at=self.now)
        call = self.stores[gateway].runs.create_run(run, Batch(events=events))
        if name in self.runs:
            with pytest.raises(StoreError):
                self.run(call)
            return
        self.run(call)
        self.runs[name] = Run(owner=owner, updated_at=self.now)
        self.runs[name].write(Batch(events=events))

    @rule(
        gateway=gateway,
        name=some_run,
        older=st.sampled_from((0, 0, 0, 1, -1)),
        events=some_events,
        values=some_values,
        text=some_text,
    )
    def append(
        self,
        gateway: int,
        name: str,
        older: int,
        events: list[JournalEvent],
        values: dict[str, Any],
        text: tuple[str, int, int] | None,
    ) -> None:
        known = self.runs.get(name)
        generation = (known.generation if known else 1) - older
        said = self.batch(name, events, values, text)
        first = self.run(self.stores[gateway].runs.append(name, generation, said))
        if known is None or known.state != "running" or older:
            assert first is None
        else:
            assert first == known.write(said)

    @rule(
        gateway=gateway,
        name=some_run,
        older=st.sampled_from((0, 0, 1, None)),
        state=st.sampled_from(("completed", "failed", "cancelled", "yielded", "yielded")),
        events=some_events,
        text=some_text,
    )
    def finish(
        self,
        gateway: int,
        name: str,
        older: int | None,
        state: str,
        events: list[JournalEvent],
        text: tuple[str, int, int] | None,
    ) -> None:
        known = self.runs.get(name)
        generation = None if older is None else (known.generation if known else 1) - older
        said = self.batch(name, events, {}, text)
        end = run_end(state, at=self.now, waits_for={"task_id": f"ask_{len(events)}"})
        first = self.run(self.stores[gateway].runs.finish(name, generation, said, end))
        # Whoever comes without a generation may end a run that waits, too.
        states = ("running", "yielded") if older is None else ("running",)
        if known is None or older == 1 or known.state not in states:
            assert first is None
            return
        assert first == known.write(said)
        known.state, known.owner, known.finished_at = state, "", self.now
        known.updated_at = self.now
        known.waits_for = f"ask_{len(events)}" if state == "yielded" else ""

    @rule(gateway=gateway, name=some_run, owner=some_worker, answer=a_value, both=st.booleans())
    def resume(self, gateway: int, name: str, owner: str, answer: Any, both: bool) -> None:
        async def resumes() -> list[RunRow | None]:
            stores = self.stores if both else [self.stores[gateway]]
            calls = (
                s.runs.resume_run(name, owner=owner, answer=answer, now=self.now) for s in stores
            )
            return await asyncio.gather(*calls)

        known = self.runs.get(name)
        rows = [row for row in self.run(resumes()) if row is not None]
        if known is None or known.state != "yielded":
            assert rows == []
            return
        assert len(rows) == 1
        known.state, known.owner, known.updated_at = "running", owner, self.now
        known.generation += 1
        known.answers[known.waits_for] = answer

    @rule(gateway=gateway, owner=some_worker, limit=st.integers(1, 3), both=st.booleans())
    def claim(self, gateway: int, owner: str, limit: int, both: bool) -> None:
        async def claims() -> list[RunRow]:
            stores = self.stores if both else [self.stores[gateway]]
            stale = self.now - STALE_S
            found = await asyncio.gather(
                *(
                    s.runs.claim_runs(owner, now=self.now, stale_before=stale, limit=limit)
                    for s in stores
                )
            )
            return [row for rows in found for row in rows]

        def lost(run: Run) -> bool:
            if run.state != "running":
                return False
            no_lease = run.owner != owner and self.leases.get(run.owner, 0) <= self.now
            return not run.owner or no_lease or run.updated_at < self.now - STALE_S

        wanted = {name for name, run in self.runs.items() if lost(run)}
        rows = self.run(claims())
        names = [row.execution_id for row in rows]
        assert len(names) == len(set(names)) == min(len(wanted), limit * (1 + both))
        assert set(names) <= wanted
        for row in rows:
            run = self.runs[row.execution_id]
            run.owner, run.updated_at = owner, self.now
            run.generation += 1
            run.attempts += 1

    @rule(gateway=gateway, worker=some_worker, lasts=st.integers(1, 600))
    def renew_lease(self, gateway: int, worker: str, lasts: int) -> None:
        self.leases[worker] = self.now + lasts
        self.run(self.stores[gateway].renew_lease(worker, self.now + lasts))

    @rule(gateway=gateway, owner=some_worker)
    def touch(self, gateway: int, owner: str) -> None:
        self.run(self.stores[gateway].runs.touch_runs(owner, self.now))
        for run in self.runs.values():
            if run.state == "running" and run.owner == owner:
                run.updated_at = self.now

    @rule(gateway=gateway, owner=some_worker)
    def release(self, gateway: int, owner: str) -> None:
        self.run(self.stores[gateway].runs.release_runs(owner))
        for run in self.runs.values():
            if run.state == "running" and run.owner == owner:
                run.owner = ""

    @rule(gateway=gateway, name=some_run)
    def cancel(self, gateway: int, name: str) -> None:
        self.run(self.stores[gateway].runs.request_cancel(name, self.now))
        run = self.runs.get(name)
        if run is not None and run.state not in ENDED:
            run.cancel = True

    @rule(gateway=gateway, age=st.sampled_from((0, 100)))
    def retire(self, gateway: int, age: int) -> None:
        before = self.now - age
        old = [
            run
            for run in self.runs.values()
            if run.state in ENDED and not run.retired and (run.finished_at or 0) < before
        ]
        assert self.run(self.stores[gateway].runs.retire_runs(before, 10)) == len(old)
        for run in old:
            run.retired = True
            run.texts, run.steps, run.outputs = {}, {}, {}

    @rule(seconds=st.sampled_from((1, 10, 200, 400)))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    # -- what must be true between any two ------------------------------------------------------

    @invariant()
    def both_gateways_see_what_the_model_says(self) -> None:
        for store in self.stores:
            self.run(self._compare(store.runs))

    async def _compare(self, runs: RunStore) -> None:
        for name in RUNS:
            known, row = self.runs.get(name), await runs.get_run(name)
            if known is None:
                assert row is None
                continue
            assert row is not None
            head = len(known.events)
            assert (row.state, row.owner, row.generation, row.attempts, row.head) == (
                *(known.state, known.owner, known.generation, known.attempts, head),
            )
            assert (row.updated_at, row.finished_at, row.cancel_requested, row.answers) == (
                *(known.updated_at, known.finished_at, known.cancel, known.answers),
            )
            await self._compare_journal(runs, name, known)
        for worker in WORKERS:
            asked = {n for n, r in self.runs.items() if r.state == "running" and r.cancel}
            owned = {n for n in asked if self.runs[n].owner == worker}
            assert set(await runs.cancels_of(worker)) == owned

    async def _compare_journal(self, runs: RunStore, name: str, known: Run) -> None:
        head = len(known.events)
        kept = [
            StoredEvent(position=n, name=e.name, task_id=e.task_id, frame=e.frame)
            for n, e in enumerate(known.events, 1)
            if not known.retired
        ]
        assert await runs.outline(name) == kept
        page = await runs.read(name, after=head // 2, limit=3)
        assert page is not None
        assert page.events == kept[head // 2 : head // 2 + 3]
        oldest = head + 1 if known.retired else 1
        assert (page.head, page.oldest, page.state) == (head, oldest, known.state)
        assert await runs.steps(name) == known.steps
        assert await runs.outputs(name) == known.outputs
        for task, value in known.outputs.items():
            assert await runs.output(name, task) == (value,)
        found = await runs.texts(name, first=1, last=head)
        assert {t.position: t.raw for t in found} == {p: r for p, r in known.texts.items() if r}
        for at in {head // 2, head - 1, head}:
            opened = await runs.open_texts(name, at=at)
            expected = [] if known.retired else known.open_at(at)
            assert [(t.position, t.task_id, t.raw) for t in opened] == expected
            assert all(t.chars == len(t.raw) for t in opened)


@pytest.mark.parametrize("kind", BACKENDS)
def test_runs_are_their_model(kind: type[Backend]) -> None:
    """Rows, owners, journals, texts and values, after every call."""
    machine = type("Machine", (RunMachine,), {"kind": kind})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=50,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
