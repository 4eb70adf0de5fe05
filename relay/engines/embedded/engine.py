"""The embedded engine: runs a workflow document in this process (W3.1).

    run ─▶ takeover: what was open is told ─▶ the tasks, in order ─▶ Completed | Failed | Yielded
     └──▶ heartbeats while nothing else is said (W2.4)

All that a run knows is in its envelope and its memory: an engine holds no state of runs.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any, Final

from relay.engines.base import Checked, Completed, DocumentError, Failed, Yielded
from relay.engines.embedded.children import run_task
from relay.engines.embedded.context import Run
from relay.engines.embedded.failures import Paused, TaskFailed, stopped_by
from relay.engines.embedded.group import Guard
from relay.engines.embedded.kinds import job_of
from relay.engines.embedded.loading import Loader
from relay.engines.embedded.places import Places
from relay.engines.embedded.scope import Scope
from relay.engines.embedded.takeover import end_open
from relay.errors import GatewayShutdown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from relay.agents.base import AgentCaller
    from relay.engines.base import Ending, Envelope, Outlet
    from relay.engines.embedded.document import Task, Workflow
    from relay.engines.embedded.lives import Job, OnError
    from relay.engines.embedded.loading import Loaded


class EmbeddedEngine:
    """Runs documents over an agent caller. Times are those of the running loop.

    Args:
        heartbeat_s: seconds of silence before each heartbeat.
        jitter: gives numbers from 0 to 1, for the pauses before retries.
    """

    def __init__(
        self,
        caller: AgentCaller,
        *,
        heartbeat_s: float = 15.0,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._caller = caller
        self._heartbeat_s = heartbeat_s
        self._jitter = jitter
        self._loader = Loader()

    def check(self, document: str | Mapping[str, Any], inputs: Mapping[str, Any]) -> Checked:
        """Look at a document before anything is started.

        Raises:
            DocumentError: it cannot be run.
        """
        loaded = self._loader.load(document, inputs, agents=self._caller.agents())
        return Checked(
            name=loaded.workflow.name, task_count=loaded.task_count, inputs=loaded.inputs
        )

    async def run(self, envelope: Envelope, outlet: Outlet) -> Ending:
        """Work on a document until it is done, or waits for an answer.

        Raises:
            GatewayShutdown: of an agent's call; nothing is said of it.
            Exception: a bug; all tasks that were open have been ended.
        """
        try:
            loaded = await self._loaded(envelope.document, envelope.inputs)
        except DocumentError as error:  # it was checked, but the agents of today are others
            return Failed(code="invalid_workflow", message=str(error))
        default: OnError = loaded.workflow.on_error

        def job(task: Task, scope: Scope, on_error: OnError | None) -> Job:
            return job_of(task, scope, on_error or default)

        return await self.work(envelope, outlet, loaded, job)

    async def _loaded(self, document: str | Mapping[str, Any], inputs: Mapping[str, Any]) -> Loaded:
        agents = self._caller.agents()
        if self._loader.knows(document, agents):
            return self._loader.load(document, inputs, agents=agents)
        return await asyncio.to_thread(self._loader.load, document, inputs, agents=agents)

    async def work(
        self,
        envelope: Envelope,
        outlet: Outlet,
        loaded: Loaded,
        job: Callable[[Task, Scope, OnError | None], Job],
    ) -> Ending:
        """Work on a document that was loaded.

        Args:
            job: makes the job of one of its tasks.
        """
        run = Run(
            envelope,
            outlet,
            self._caller,
            places=Places(loaded.workflow),
            job=job,
            jitter=self._jitter,
        )
        try:
            with run.beating(self._heartbeat_s):
                ending = await _work(run, loaded)
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise asyncio.CancelledError  # whatever failed in that moment
        except BaseException:
            unsaid = run.unsaid()
            outlet.came_to(run.memory.summary(), run.memory.usage + unsaid, unsaid=unsaid)
            raise
        return ending

    async def cancelled(self, execution_id: str) -> None:
        """Nothing is left to do: the run's calls ended with its task."""

    async def close(self) -> None:
        """Nothing to free."""


async def _work(run: Run, loaded: Loaded) -> Ending:
    workflow = loaded.workflow
    message = f"the run took longer than its timeout_s ({workflow.timeout_s} s)"
    late = TaskFailed("timeout", message, task_id="")
    _begin(run, loaded)
    limit = asyncio.timeout(workflow.timeout_s)
    try:
        async with limit:
            guard = Guard(None, reason=late, timeout=limit)
            return await _tasks(run, workflow, Scope(loaded.inputs), guard)
    except TimeoutError:
        if limit.expired():
            end_open(run, late)
            return _failed(run, "timeout", late.message, None)
        end_open(run, _BUG)
        raise
    except TaskFailed as error:
        end_open(run, stopped_by(error))
        message = f"task {error.task_id} failed: {error.code}: {error.message}"
        return _failed(run, "task_failed", message, error.task_id)
    except GatewayShutdown:
        raise
    except Exception:
        end_open(run, _BUG)
        raise


_BUG: Final = TaskFailed("engine_error", "the engine failed", task_id="")


async def _tasks(run: Run, workflow: Workflow, scope: Scope, guard: Guard) -> Ending:
    last: str | None = None
    for task in workflow.tasks:
        result = await run_task(run, task, scope, parent=None, guard=guard)
        if isinstance(result, Paused):
            return _yielded(run, result)
        if result.status == "completed":
            last = task.id
    if workflow.output is not None:
        done = run.memory.status(workflow.output) == "completed"
        last = workflow.output if done else None
    return Completed(final_task_id=last, summary=run.memory.summary(), usage=run.memory.usage)


def _begin(run: Run, loaded: Loaded) -> None:
    run.once("request_received", {"source": run.envelope.source})
    name, count = loaded.workflow.name, loaded.task_count
    run.once("workflow_loaded", {"name": name, "task_count": count})
    run.once("workflow_started", {"inputs": loaded.inputs})


def _failed(run: Run, code: str, message: str, task_id: str | None) -> Failed:
    memory = run.memory
    return Failed(
        code=code,
        message=message,
        task_id=task_id,
        summary=memory.summary(),
        usage=memory.usage,
    )


def _yielded(run: Run, wait: Paused) -> Yielded:
    url = f"/v1/workflows/executions/{run.envelope.execution_id}/resume"
    data: dict[str, Any] = {"task_id": wait.task_id, "prompt": wait.prompt}
    if wait.schema is not None:
        data["schema"] = wait.schema
    run.once("workflow_yielded", {**data, "resume_url": url})
    return Yielded(
        task_id=wait.task_id,
        prompt=wait.prompt,
        schema=wait.schema,
        summary=run.memory.summary(),
        usage=run.memory.usage,
    )
