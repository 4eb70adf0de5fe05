"""Which addresses a tool may be fetched from. [pure]

Whoever can choose what a name resolves to could reach what only this machine can: itself, its
network, the metadata service of its cloud. So the address is judged that is connected to, never
the name, and all that is not plainly public is refused unless the operator allows it.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

_GLOBAL_UNICAST: Final = ipaddress.IPv6Network("2000::/3")  # RFC 4291 §2.4
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")  # RFC 6052 §2.1
_RELAYS: Final = ipaddress.IPv4Network("192.88.99.0/24")  # RFC 7526


def is_public(address: Address) -> bool:
    """Whether an address is one of the internet, for everybody the same."""
    if isinstance(address, ipaddress.IPv4Address):
        return address.is_global and not address.is_multicast and address not in _RELAYS
    if address.sixtofour is not None or address.teredo is not None:
        return False  # tunnels, into anywhere
    return address in _GLOBAL_UNICAST and address.is_global


class AddressRule:
    """Public addresses, and those that the operator allows.

    Args:
        networks: allowed although they are not public.
    """

    def __init__(self, networks: Iterable[Network] = ()) -> None:
        self._networks = tuple(networks)

    def allows(self, text: str) -> bool:
        """Whether an address may be connected to; no for what is none.

        Args:
            text: as the resolver and the kernel spell it.
        """
        try:
            address = _meant(ipaddress.ip_address(text))
        except ValueError:
            return False
        return is_public(address) or any(address in network for network in self._networks)


def _meant(address: Address) -> Address:
    """The IPv4 address that an IPv6 one leads to, if it does."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return address
