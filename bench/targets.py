"""What is measured: the gateway with everything on, the plain pass-through, nginx, LiteLLM.

Each is a process of its own, one worker, plain HTTP on 127.0.0.1, before the same upstream.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import yaml

from bench.ports import free_port
from bench.process import ROOT, started, started_program, wait_until_it_serves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

KEY: Final = "ozk_bench_0123456789abcdef"
MODEL: Final = "bench/model"
OURS: Final = "sluicegate"
PASS_THROUGH: Final = "pass-through"
NGINX: Final = "nginx"
LITELLM: Final = "LiteLLM"

PEERS: Final = ROOT / ".venv-peers"
_LITELLM_REQUIREMENT: Final = "litellm[proxy]==1.108.7"
_LITELLM_START_S: Final = 120.0


@dataclass(frozen=True)
class Target:
    """A running server.

    Attributes:
        slow: it gets a small part of the load, and figures are scaled.
    """

    name: str
    port: int
    pid: int
    slow: bool = False


class LeftOut(Exception):
    """A target cannot be run here; the text says why."""


@contextmanager
def gateway(upstream_port: int) -> Iterator[Target]:
    """The gateway as in production: keys, balance, prices, ledger in SQLite, log as JSON."""
    port = free_port()
    base_url = f"http://127.0.0.1:{upstream_port}/v1"
    price = {"prompt_usd_per_mtok": 0.15, "completion_usd_per_mtok": 0.6}
    candidate = {"provider": "bench", "model": "bench"}
    with tempfile.TemporaryDirectory(prefix="sluicegate-bench-") as name:
        folder = Path(name)
        config = {
            "server": {"host": "127.0.0.1"},
            "store": {"url": f"sqlite:///{folder}/bench.db"},
            "keys": [{"key": KEY, "org": "bench", "balance_usd": 1_000_000}],
            "providers": {"bench": {"shape": "openai", "base_url": base_url, "api_key": "sk-b"}},
            "models": {MODEL: {"candidates": [candidate], "price": price}},
            "telemetry": {"log": "json"},
        }
        file = folder / "sluicegate.yaml"
        file.write_text(yaml.safe_dump(config))
        serve = ("-m", "planes.cli", "serve", "--config", str(file), "--port", str(port))
        out, err = _output(folder)
        with started(*serve, stdout=out, stderr=err) as process:
            wait_until_it_serves(port)
            yield Target(OURS, port, process.pid)


@contextmanager
def passthrough(upstream_port: int) -> Iterator[Target]:
    """The plain pass-through."""
    port = free_port()
    arguments = ("-m", "bench.passthrough", "--upstream", str(upstream_port), "--port", str(port))
    with started(*arguments) as process:
        wait_until_it_serves(port)
        yield Target(PASS_THROUGH, port, process.pid)


_NGINX_CONF: Final = """\
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log stderr error;
{user}
events {{ worker_connections 8192; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    upstream bench {{ server 127.0.0.1:{upstream}; keepalive 1024; }}
    server {{
        listen 127.0.0.1:{port} backlog=4096;
        keepalive_requests 1000000;
        location / {{
            proxy_pass http://bench;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_read_timeout 1h;
        }}
    }}
}}
"""


@contextmanager
def nginx(upstream_port: int) -> Iterator[Target]:
    """nginx that does not buffer: the limit, not a peer.

    Raises:
        LeftOut: it is not installed.
    """
    program = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
    if program is None:
        raise LeftOut("not installed (on Debian: apt-get install nginx-light)")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="sluicegate-bench-") as name:
        folder = Path(name)
        # Of an nginx that root starts, the worker would not be let into the folder.
        user = "user root;" if os.geteuid() == 0 else ""
        file = folder / "nginx.conf"
        file.write_text(
            _NGINX_CONF.format(folder=folder, upstream=upstream_port, port=port, user=user)
        )
        command = (program, "-e", "stderr", "-p", name, "-c", str(file))
        out, err = _output(folder)
        with started_program(*command, stdout=out, stderr=err) as process:
            wait_until_it_serves(port)
            yield Target(NGINX, port, process.pid)


@contextmanager
def litellm(upstream_port: int) -> Iterator[Target]:
    """LiteLLM's proxy, without a database.

    Raises:
        LeftOut: it is not installed in `.venv-peers`.
    """
    program = PEERS / "bin" / "litellm"
    if not program.exists():
        raise LeftOut("no .venv-peers (`python -m bench --peers` makes it: about 756 MB)")
    port = free_port()
    parameters = {
        "model": "openai/bench",
        "api_base": f"http://127.0.0.1:{upstream_port}/v1",
        "api_key": "sk-b",
    }
    config = {
        "model_list": [{"model_name": MODEL, "litellm_params": parameters}],
        "litellm_settings": {"telemetry": False},
    }
    with tempfile.TemporaryDirectory(prefix="sluicegate-bench-") as name:
        folder = Path(name)
        file = folder / "litellm.yaml"
        file.write_text(yaml.safe_dump(config))
        command = (str(program), "--config", str(file), "--host", "127.0.0.1", "--port", str(port))
        env = {
            "LITELLM_MASTER_KEY": KEY,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # or it asks the network at its start
            "LITELLM_LOG": "ERROR",
            "PYTHONPATH": "",
            "PATH": f"{PEERS}/bin:{os.environ.get('PATH', '')}",
        }
        out, err = _output(folder)
        with started_program(*command, env=env, stdout=out, stderr=err) as process:
            try:
                wait_until_it_serves(port, _LITELLM_START_S)
            except OSError as error:
                said = err.read_text()[-500:]
                raise LeftOut(f"it did not start: {error}\n{said}") from None
            yield Target(LITELLM, port, process.pid, slow=True)


ALL: Final[dict[str, Callable[[int], AbstractContextManager[Target]]]] = {
    OURS: gateway,
    PASS_THROUGH: passthrough,
    NGINX: nginx,
    LITELLM: litellm,
}


def make_peers() -> None:
    """Make `.venv-peers` with LiteLLM in it, unless it is there.

    Raises:
        subprocess.CalledProcessError: that failed.
    """
    if (PEERS / "bin" / "litellm").exists():
        return
    print(f"making {PEERS.name} with {_LITELLM_REQUIREMENT}", file=sys.stderr)
    python = str(PEERS / "bin" / "python")
    if uv := shutil.which("uv"):
        subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(PEERS)], check=True)
        install = [uv, "pip", "install", "--quiet", "--python", python]
    else:
        subprocess.run([sys.executable, "-m", "venv", str(PEERS)], check=True)
        install = [python, "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, _LITELLM_REQUIREMENT], check=True)


def _output(folder: Path) -> tuple[Path, Path]:
    """Where a target's standard output and error go."""
    return folder / "stdout", folder / "stderr"
