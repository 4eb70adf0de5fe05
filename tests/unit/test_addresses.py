"""Which addresses a tool may have (W3.4)."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.agents.addresses import AddressRule

PRIVATE = [
    "127.0.0.1", "127.9.9.9", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254",
    "100.64.0.1", "0.0.0.0", "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1",
    "198.18.0.1", "192.88.99.1", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1",
    "fec0::1", "ff02::1", "2001:db8::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::7f00:1",
    "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "2002:7f00:1::",
    "2002:808:808::1", "2001:0:7f00:1::1", "5f00::1",
]  # fmt: skip
PUBLIC = ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]


@pytest.mark.parametrize("address", PRIVATE)
def test_what_is_not_public_is_refused(address: str) -> None:
    assert not AddressRule().allows(address)


@pytest.mark.parametrize("address", PUBLIC)
def test_what_is_public_is_allowed(address: str) -> None:
    assert AddressRule().allows(address)


@pytest.mark.parametrize("text", ["", "localhost", "127.1", "2130706433", "0x7f.1", "8.8.8.8 "])
def test_what_is_no_address_is_refused(text: str) -> None:
    assert not AddressRule([ipaddress.ip_network("0.0.0.0/0")]).allows(text)


def test_the_operator_may_allow_networks() -> None:
    rule = AddressRule(map(ipaddress.ip_network, ["10.1.0.0/16", "::1/128"]))
    allowed = ["10.1.2.3", "::ffff:10.1.2.3", "64:ff9b::a01:203", "::1", "8.8.8.8"]
    assert [address for address in allowed if not rule.allows(address)] == []
    assert not any(map(rule.allows, ["10.2.0.1", "127.0.0.1", "::2", "fe80::1"]))


@given(st.ip_addresses(v=4, network="127.0.0.0/8"))
def test_no_spelling_of_loopback_passes(address: ipaddress.IPv4Address) -> None:
    rule = AddressRule()
    number = int(address)
    for text in (
        str(address),
        f"::ffff:{address}",
        str(ipaddress.IPv6Address((0x64FF9B << 96) | number)),
        str(ipaddress.IPv6Address((0x2002 << 112) | (number << 80))),
        str(ipaddress.IPv6Address(number)),
    ):
        assert not rule.allows(text), text
