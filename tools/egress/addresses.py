"""Which addresses are special: the ranges of IANA's registries of them, and what is not unicast.

`ipaddress.is_global` does not serve: it follows the Python version, and some call the metadata address
192.0.0.192 of a cloud public.
"""

from __future__ import annotations

import ipaddress
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_SPECIAL = tuple(
    (ipaddress.ip_network(network), kind)
    for network, kind in (
        # https://www.iana.org/assignments/iana-ipv4-special-registry. Ranges that it marks as reachable
        # stand here too: they hold relays and sinks, and no service that a model could want.
        ("0.0.0.0/8", "an address of this host"),
        ("10.0.0.0/8", "a private address"),
        ("100.64.0.0/10", "an address shared by a carrier"),
        ("127.0.0.0/8", "a loopback address"),
        ("169.254.0.0/16", "a link-local address"),
        ("172.16.0.0/12", "a private address"),
        ("192.0.0.0/24", "an address of protocol assignments"),
        ("192.0.2.0/24", "a documentation address"),
        ("192.31.196.0/24", "an AS112 address"),
        ("192.52.193.0/24", "an AMT address"),
        ("192.88.99.0/24", "a 6to4 relay"),
        ("192.168.0.0/16", "a private address"),
        ("192.175.48.0/24", "an AS112 address"),
        ("198.18.0.0/15", "a benchmarking address"),
        ("198.51.100.0/24", "a documentation address"),
        ("203.0.113.0/24", "a documentation address"),
        ("224.0.0.0/4", "a multicast address"),
        ("240.0.0.0/4", "a reserved address"),
        # Metadata and control services that two clouds keep at addresses of public ranges.
        ("100.100.100.200/32", "a metadata address"),
        ("168.63.129.16/32", "a metadata address"),
        # https://www.iana.org/assignments/iana-ipv6-special-registry
        ("::/128", "an address of this host"),
        ("::1/128", "a loopback address"),
        ("64:ff9b:1::/48", "a private address"),  # NAT64 of local use: leads into a private network
        ("100::/64", "a discard-only address"),
        ("100:0:0:1::/64", "a dummy address"),
        ("2001::/32", "a Teredo address"),  # tunnels to an IPv4 address that is written in it
        ("2001::/23", "an address of protocol assignments"),
        ("2001:db8::/32", "a documentation address"),
        ("2002::/16", "a 6to4 address"),  # tunnels to an IPv4 address that is written in it
        ("2620:4f:8000::/48", "an AS112 address"),
        ("3fff::/20", "a documentation address"),
        ("5f00::/16", "an address of segment routing"),
        ("fc00::/7", "a private address"),
        ("fe80::/10", "a link-local address"),
        ("fec0::/10", "a private address"),
        ("ff00::/8", "a multicast address"),
    )
)
"""The first range that holds an address says what the address is; inner ranges stand before outer ones."""

_UNICAST = ipaddress.IPv6Network("2000::/3")
"""All that IANA has given out as global unicast; other addresses of IPv6 reach nothing, or should not."""

_MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def meant(address: Address) -> Address:
    """The IPv4 address that a packet to an IPv4-mapped or NAT64 address arrives at; any other as it is."""
    if isinstance(address, IPv6Address) and (address in _MAPPED or address in _NAT64):
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def special_range(address: Address) -> str | None:
    """What an address that is not public is, such as "a loopback address"; None for a public one.

    An address that leads to another, IPv4-mapped or by NAT64, is what the other one is. Those that tunnel,
    6to4 and Teredo, are special whatever is written in them.
    """
    address = meant(address)
    for network, kind in _SPECIAL:
        if address.version == network.version and address in network:
            return kind
    if isinstance(address, IPv6Address) and address not in _UNICAST:
        return "no global unicast address"
    return None
