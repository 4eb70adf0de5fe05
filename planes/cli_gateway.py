"""What the commands share that are clients of a gateway: its address, the key, refusals (O2)."""

import argparse
import os
import ssl
import sys
from typing import TYPE_CHECKING, NoReturn

from planes.cli_common import USAGE, WHERE, load_settings

if TYPE_CHECKING:
    from planes.settings import Settings

KEY_VARIABLE = "SLUICEGATE_KEY"
HOW = f"""\
FILE may be `-` for standard input. The gateway is that of --server, else the one that the
configuration describes; the key is that of --key, else ${KEY_VARIABLE}, else the configuration's
first.

{WHERE}"""


def add_gateway(command: argparse.ArgumentParser) -> None:
    """Add `--server` and `--key`."""
    command.add_argument(
        "--server", "--url", metavar="URL", help="the gateway, as http://127.0.0.1:8080"
    )
    command.add_argument("--key", metavar="K", help="the API key")


def gateway_of(options: argparse.Namespace) -> tuple[str, str]:
    """Return the address, without a slash at its end, and the key; exits with 2 without one.

    The base that SDKs have, with `/v1` at its end, is taken too. An option that is given empty, as
    by a variable that is not set, is wrong: another gateway or key would be used unnoticed.

    Raises:
        ConfigError: the configuration cannot be used. It is not read if nothing is asked of it.
    """
    others = {"server": "the configuration's", "key": f"${KEY_VARIABLE} or the configuration's"}
    for name, other in others.items():
        given = getattr(options, name)
        if given is not None and not given.strip():
            wrong(options, f"--{name} is empty; leave it out to use {other}")
    url: str | None = options.server
    key: str | None = options.key or os.environ.get(KEY_VARIABLE) or None
    if url is None or key is None or options.config is not None:
        settings, _ = load_settings(options.config)
        url, key = url or _url(settings), key or _first_key(settings)
    url = url.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        wrong(options, "--server must begin with http:// or https://")
    if key is None:
        wrong(options, f"there is no key: give --key or ${KEY_VARIABLE}")
    return url, key


def wrong(options: argparse.Namespace, message: str) -> NoReturn:
    """Tell what is wrong with the command line; exits with 2."""
    options.parser.error(message)
    raise SystemExit(USAGE)  # as `error` has done already


def unreadable(path: str, error: OSError) -> NoReturn:
    """Tell that a file cannot be read; exits with 2."""
    print(f"{path}: cannot be read: {error.strerror}", file=sys.stderr)
    raise SystemExit(USAGE)


def no_connection(error: BaseException) -> str:
    """Why a gateway could not be asked, without the words of the library that tried."""
    cause: BaseException | None = getattr(error, "os_error", error)
    if isinstance(cause, ConnectionRefusedError):
        return "connection refused: does a gateway run there?"
    if isinstance(cause, ssl.SSLError) and cause.reason == "WRONG_VERSION_NUMBER":
        return "there is no TLS: does it begin with http://?"
    number = getattr(cause, "errno", None)
    if isinstance(number, int) and number > 0 and not isinstance(cause, ssl.SSLError):
        return os.strerror(number)
    return getattr(cause, "strerror", None) or str(error) or type(error).__name__


def _url(settings: "Settings") -> str:
    host = settings.server.host
    if host in ("0.0.0.0", "::"):  # every address is none to call
        host = "127.0.0.1"
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.server.port}"


def _first_key(settings: "Settings") -> str | None:
    active = (key for key in settings.keys if key.status == "active")
    return next((key.key.get_secret_value() for key in active), None)
