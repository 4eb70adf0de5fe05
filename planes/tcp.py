"""What waits for a client, here and in the kernel."""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio

_UNSENT_BYTES_MAX: Final = 32 * 1024

_TCP_INFO: Final[int | None] = getattr(socket, "TCP_INFO", None)
# Where tcpi_unacked (segments), tcpi_bytes_acked and tcpi_notsent_bytes stand in Linux's tcp_info.
_UNACKED_AT, _ACKED_AT, _NOTSENT_AT = 24, 120, 144


def taken_and_waiting(transport: asyncio.Transport) -> tuple[int, bool]:
    """How many bytes the client's kernel has taken, and whether ours still holds any.

    It tells of a client that reads a little, long before this process can send more. 0 and False
    where the system does not tell.
    """
    sock = transport.get_extra_info("socket")
    if _TCP_INFO is None or not _is_tcp(sock):
        return 0, False
    info = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _NOTSENT_AT + 4)
    if len(info) < _NOTSENT_AT + 4:
        return 0, False
    (unacked,) = struct.unpack_from("=I", info, _UNACKED_AT)
    (acked,) = struct.unpack_from("=Q", info, _ACKED_AT)
    (unsent,) = struct.unpack_from("=I", info, _NOTSENT_AT)
    return acked, bool(unacked or unsent)


def bound_buffers(transport: asyncio.WriteTransport, high: int) -> None:
    """Bound what may wait for a client: in the process, and unsent in the kernel (M3.5).

    Args:
        high: bytes in the process at which its protocol is told to stop writing.
    """
    transport.set_write_buffer_limits(high=high)
    sock = transport.get_extra_info("socket")
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if option is not None and _is_tcp(sock):
        sock.setsockopt(socket.IPPROTO_TCP, option, _UNSENT_BYTES_MAX)


def _is_tcp(sock: socket.socket | None) -> bool:
    return sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6)
