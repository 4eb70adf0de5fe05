"""The local model as a provider: one llama.cpp child process, watched, and spoken to over HTTP.

    LlamaProcess   owns the child: starts it, restarts it when it dies, ends it
    LocalUpstream  the `Upstream` made of it and of an openai-shape HTTP upstream

    start() ─▶ weights (cache, or fetched by a process) ─▶ child ─▶ address line ─▶ up
                                          ▲                                         │ it dies
                                          └─── back-off 0.5 s, 1, 2 … 30 s ◀────────┘

Why a child process: `relay.upstreams.llama_child`. Start this on the main thread: Linux kills the
child when the *thread* that started it ends. Source: O1.1.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from relay.errors import UpstreamRefused, UpstreamUnavailable, UpstreamUnreachable
from relay.upstreams import llama_child, weights
from relay.upstreams.child import STDERR_TAIL_BYTES, Child

if TYPE_CHECKING:
    from collections.abc import Callable

    from relay.upstreams.base import Upstream, UpstreamReply, UpstreamRequest

DEFAULT_MODEL: Final = "smollm2-135m"

_RETRY_AFTER_S: Final = 1  # a restart takes about a second
_START_TIMEOUT_S: Final = 60.0
_TERMINATE_WAIT_S: Final = 2.0
_BACKOFF_MIN_S: Final = 0.5
_BACKOFF_MAX_S: Final = 30.0

_log = logging.getLogger(__name__)


class LlamaProcess:
    """The child process that serves the local model, restarted whenever it dies.

    Args:
        model: the model's name in requests and answers.
        weights_path: a .gguf of your own; default: SmolLM2-135M-Instruct, fetched once (O1.1).
        start_timeout_s: how long a start may take until the address is known.
        command: the child program; for tests.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        weights_path: Path | None = None,
        start_timeout_s: float = _START_TIMEOUT_S,
        command: tuple[str, ...] | None = None,
    ) -> None:
        self.model = model
        self._weights_path = weights_path
        self._start_timeout_s = start_timeout_s
        self._command = command
        self._child: Child | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._started = False
        self._closed = False

    @property
    def address(self) -> str:
        """Where llama.cpp serves now, `http://127.0.0.1:PORT`; another port after a restart.

        Raises:
            UpstreamUnreachable: it is not up (`retry_after_s` is set).
        """
        child = self._child
        if child is None or child.address is None or child.exited.done():
            raise UpstreamUnreachable(
                f"the local model {self.model} is starting; try again in a moment",
                retry_after_s=_RETRY_AFTER_S,
            )
        return child.address

    @property
    def base_url(self) -> str:
        """The base of its OpenAI-compatible API: `address` and `/v1`. Raises as `address`."""
        return self.address + "/v1"

    @property
    def pid(self) -> int | None:
        """Process id of the child, None while there is none."""
        return self._child.pid if self._child is not None else None

    async def start(self) -> None:
        """Start the child, return when it serves. A second call does nothing.

        Raises:
            UpstreamUnavailable: xllamacpp or the weights are missing, or the child failed; the
                message says what to do. Nothing is left running, and it may be called again.
        """
        if self._closed:
            raise self._was_closed()
        if self._started:
            return
        self._started = True
        try:
            if self._command is None:
                self._command = await self._default_command()
            await self._spawn(self._command)
        except BaseException:
            self._started = False
            raise
        self._supervisor = asyncio.create_task(
            self._supervise(self._command), name=f"supervise local model {self.model}"
        )

    async def close(self) -> None:
        """End the child and the supervision: SIGTERM, two seconds, SIGKILL. Idempotent.

        If it is cancelled, the child is killed at once.
        """
        self._closed = True
        supervisor, self._supervisor = self._supervisor, None
        child, self._child = self._child, None
        try:
            if supervisor is not None:
                supervisor.cancel()
                await asyncio.wait([supervisor])
            if child is not None:
                await child.terminate(_TERMINATE_WAIT_S)
        finally:
            if child is not None:
                child.kill()

    def _was_closed(self) -> UpstreamUnavailable:
        return UpstreamUnavailable(f"the local model {self.model} was closed")

    async def _default_command(self) -> tuple[str, ...]:
        if importlib.util.find_spec("xllamacpp") is None:
            raise UpstreamUnavailable(
                "the local model needs llama.cpp, and the package xllamacpp is not installed: "
                "run `scripts/serve` from a clone, or `pip install xllamacpp`"
            )
        weights_path = self._weights_path or weights.cached_weights() or await _fetch_weights()
        # By its path and with -P: nothing in the working directory can shadow a module.
        program = (sys.executable, "-P", llama_child.__file__)
        return (*program, "--weights", str(weights_path), "--alias", self.model)

    async def _spawn(self, command: tuple[str, ...]) -> None:
        """Start one child and wait until it serves.

        Raises:
            UpstreamUnavailable: it ended, or did not serve in time; the message has its last words.
        """
        child = await Child.start((*command, "--parent", str(os.getpid())))
        self._child = child  # from here on `close` finds it
        try:
            await child.serving(self._start_timeout_s)
        finally:
            if child.address is None or self._closed:
                self._child = None
                await child.terminate(0)
        if self._closed:
            raise self._was_closed()

    async def _supervise(self, command: tuple[str, ...]) -> None:
        """Restart the child when it dies, later each time it does so again soon."""
        loop = asyncio.get_running_loop()
        delay_s = _BACKOFF_MIN_S
        while True:
            child, since = self._child, loop.time()
            if child is not None:
                await child.over()
                self._child = None
                child.kill()  # it has ended; this frees the pipes
                _log.warning(
                    "local model %s ended with status %s%s",
                    *(self.model, child.returncode, child.last_words()),
                )
                if loop.time() - since >= _BACKOFF_MAX_S:
                    delay_s = _BACKOFF_MIN_S
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _BACKOFF_MAX_S)
            try:
                await self._spawn(command)
            except (UpstreamUnavailable, OSError) as error:
                _log.warning("local model %s did not restart: %s", self.model, error)
            else:
                _log.info("local model %s serves again", self.model)


class LocalUpstream:
    """The local model as an `Upstream`; owns its process.

    Args:
        name: canonical id of the provider (M2.2).
        process: started by `start`, ended by `close`.
        make_http: makes the openai-shape upstream of a base URL that is asked for on each dial,
            because a restarted child has another port.
    """

    def __init__(
        self,
        name: str,
        process: LlamaProcess,
        make_http: Callable[[Callable[[], str]], Upstream],
    ) -> None:
        self._name = name
        self._process = process
        self._http = make_http(lambda: process.base_url)

    @property
    def name(self) -> str:
        """Canonical id of the provider."""
        return self._name

    async def start(self) -> None:
        """Start the child and the HTTP upstream; see `LlamaProcess.start` for what it raises."""
        await self._process.start()
        try:
            await self._http.start()
        except BaseException:
            await self._process.close()
            raise

    async def open(self, request: UpstreamRequest) -> UpstreamReply:
        """Send the request to the child.

        Raises:
            UpstreamRefused: 404, another model was named; llama.cpp would answer under any name.
            UpstreamUnreachable: it is down; retry in 1 s.
        """
        if request.body.get("model") != self._process.model:
            raise UpstreamRefused(
                f"the local model is {self._process.model}; there is no other", status=404
            )
        _ = self._process.base_url  # raises before a connection is tried in vain
        return await self._http.open(request)

    async def close(self) -> None:
        """Close the HTTP upstream, then end the child. Idempotent."""
        try:
            await self._http.close()
        finally:
            await self._process.close()


async def _fetch_weights() -> Path:
    """Fetch the weights in a process of its own, for that can be stopped and a thread cannot.

    Raises:
        UpstreamUnavailable: they cannot be had; the message is that of WeightsError.
    """
    _log.info("fetching the local model's weights (93 MB, once)")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", weights.__file__),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = await process.communicate()
    except BaseException:
        with suppress(ProcessLookupError):
            process.terminate()  # it stops pip and tidies up after itself
        await process.wait()
        raise
    if process.returncode:
        message = err.decode("utf-8", "replace").strip()[-STDERR_TAIL_BYTES:]
        raise UpstreamUnavailable(f"the local model cannot be had: {message}")
    return Path(os.fsdecode(out.rstrip(b"\n")))
