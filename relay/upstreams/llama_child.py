"""The child program that serves the local model: llama.cpp in a process of its own (O1.1).

    python -m relay.upstreams.llama_child --parent PID --weights F --alias smollm2-135m

Not a thread of the gateway, because `xllamacpp.Server` holds the GIL for the whole load, its
destructor (the only way to stop it) freezes the process for up to a second, and it costs some
300 MB. Here none of that matters: the kernel ends the process, and ends it too when the gateway
dies in whatever way. `relay.upstreams.local` starts and supervises it.

Standard output is one JSON line, {"address": "http://127.0.0.1:PORT"}, once it serves; everything
else goes to standard error. SIGTERM ends it at once. This module imports nothing of ours, so that
it can be run by its path, whatever the working directory holds.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

CHAT_TEMPLATE: Final = Path(__file__).with_name("chatml_tools.jinja")

_PR_SET_PDEATHSIG: Final = 1  # <sys/prctl.h>
_NICE: Final = 10  # the gateway's event loop goes first
_ORPHAN_CHECK_S: Final = 1.0


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, and exit now if it has died already.

    Linux ties this to the *thread* that started us: the parent must start us from a thread that
    lives as long as it does.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died between its fork and our prctl; then nobody would ever tell us.
    if os.getppid() != parent:
        raise SystemExit(f"the parent process {parent} is gone")


def serve(options: argparse.Namespace) -> Any:
    """Load the model and return the running server; its threads serve from here on.

    Raises:
        RuntimeError: llama.cpp refused the parameters or the file.
        ImportError: xllamacpp is not installed.
    """
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(options.weights)
    # Without an alias llama.cpp names the model by its file's path in every answer.
    params.model_alias = {options.alias}
    params.hostnames = ["127.0.0.1"]
    params.port = options.port
    params.n_ctx = options.n_ctx
    params.n_parallel = options.n_parallel
    params.cpuparams.n_threads = options.threads
    params.cpuparams_batch.n_threads = options.threads
    # The weights' own template has no tools: `tools` would vanish without an error.
    params.chat_template = options.template.read_text("utf-8")
    params.verbosity = 0
    params.ui = False
    # The rest shuts what would be open to every user and every web page of this machine, and the
    # prompt cache, which may grow to 8 GiB by default.
    params.endpoint_slots = False
    params.cors_origins = ""
    params.cors_credentials = False
    params.cache_ram_mib = 0
    return xllamacpp.Server(params)


def usable_cores() -> int:
    """Return how many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="llama_child", description="Serve the local model.")
    parser.add_argument("--parent", type=int, required=True, help="process id of who starts it")
    parser.add_argument("--weights", type=Path, required=True, help="the .gguf file")
    parser.add_argument("--alias", required=True, help="the model's name in answers")
    parser.add_argument("--template", type=Path, default=CHAT_TEMPLATE)
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--n-ctx", type=int, default=8192, help="context, shared by the slots")
    parser.add_argument("--n-parallel", type=int, default=4, help="slots: streams at one time")
    parser.add_argument("--threads", type=int, default=max(1, usable_cores() - 1))
    return parser.parse_args(arguments)


def main() -> int:
    """Serve until killed."""
    options = parse_options()
    die_with_parent(options.parent)
    os.nice(_NICE)
    # Our line must be the only thing on standard output, and native code may print there.
    report = os.dup(1)
    os.dup2(2, 1)
    server = serve(options)
    line = json.dumps({"address": str(server.listening_address).rstrip("/")}) + "\n"
    os.write(report, line.encode())
    os.close(report)
    while os.getppid() == options.parent:  # for systems without PR_SET_PDEATHSIG
        time.sleep(_ORPHAN_CHECK_S)
    # Not by returning: the server's destructor may wait for a stream that nobody reads.
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
