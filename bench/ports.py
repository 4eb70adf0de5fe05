"""Ports that are free and stay so until they are used, whatever else runs on the machine.

A port that the system chose is the next one's as soon as it is let go: then a gateway cannot bind
it, and its clients talk to a stranger. So ours are none that the system gives away, and each
process that asks for one has a block of its own.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import random
import socket
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

# Linux gives away 32768 to 60999 (net.ipv4.ip_local_port_range).
_FIRST: Final = 10_000
_END: Final = 32_000
_BLOCK: Final = 500


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on; so also one that refuses connections.

    Raises:
        RuntimeError: all are taken.
    """
    for port in itertools.islice(_own_ports(), _BLOCK):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("all ports of this process are taken")


@functools.cache
def _own_ports() -> Iterator[int]:
    """The ports of a block that no other process has, round and round."""
    starts = list(range(_FIRST, _END, _BLOCK))
    random.shuffle(starts)
    for start in starts:
        # An abstract name (Linux): it is free again when the process ends, however that is.
        mark = socket.socket(socket.AF_UNIX)
        try:
            mark.bind(f"\0sluicegate-ports-{start}")
        except OSError:
            mark.close()
            continue
        atexit.register(mark.close)
        return itertools.cycle(range(start, start + _BLOCK))
    raise RuntimeError("all blocks of ports are taken")
