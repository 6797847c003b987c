"""What may be reached, judged by URLs as they are written and by the addresses of their hosts."""

from __future__ import annotations

import ipaddress

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools import Egress, EgressError, read_rule
from tools.egress import special_range

PUBLIC = Egress("public")

# https://www.iana.org/assignments/iana-ipv4-special-registry and -ipv6-special-registry, every row, and the
# ranges of multicast, which have registries of their own.
REGISTRIES = [
    *("0.0.0.0/8", "0.0.0.0/32", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16"),
    *("172.16.0.0/12", "192.0.0.0/24", "192.0.0.0/29", "192.0.0.8/32", "192.0.0.9/32", "192.0.0.10/32"),
    *("192.0.0.170/32", "192.0.0.171/32", "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24"),
    *("192.88.99.0/24", "192.88.99.2/32", "192.168.0.0/16", "192.175.48.0/24", "198.18.0.0/15"),
    *("198.51.100.0/24", "203.0.113.0/24", "240.0.0.0/4", "255.255.255.255/32", "224.0.0.0/4"),
    *("::1/128", "::/128", "64:ff9b:1::/48", "100::/64", "100:0:0:1::/64", "2001::/23", "2001::/32"),
    *("2001:1::1/128", "2001:1::2/128", "2001:1::3/128", "2001:2::/48", "2001:3::/32", "2001:4:112::/48"),
    *("2001:10::/28", "2001:20::/28", "2001:30::/28", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48"),
    *("3fff::/20", "5f00::/16", "fc00::/7", "fe80::/10", "ff00::/8"),
]
# ::ffff:0:0/96 and 64:ff9b::/96 stand in the registry, too; they are what the address inside is (below).

SPECIAL_V4 = [network for network in map(ipaddress.ip_network, REGISTRIES) if network.version == 4]
PUBLIC_ADDRESSES = [
    "1.1.1.1",
    "8.8.8.8",
    "93.184.215.14",
    "223.255.255.255",
    "2606:4700::1111",
    "2a00:1450::1",
]


@pytest.mark.parametrize("network", REGISTRIES)
def test_every_registered_range_is_special_from_its_first_address_to_its_last(network: str) -> None:
    range_ = ipaddress.ip_network(network)
    for address in (range_[0], range_[-1], range_[range_.num_addresses // 2]):
        assert special_range(address) is not None, address
        with pytest.raises(EgressError):
            PUBLIC.judge("name.example", 443, [str(address)])


@pytest.mark.parametrize("address", PUBLIC_ADDRESSES)
def test_public_addresses_are_public(address: str) -> None:
    assert special_range(ipaddress.ip_address(address)) is None
    PUBLIC.judge("name.example", 443, [address])


@given(st.ip_addresses(v=4))
def test_an_address_inside_another_is_judged_like_itself(inner: ipaddress.IPv4Address) -> None:
    for prefix in ("::ffff:0:0", "64:ff9b::"):
        outer = ipaddress.IPv6Address(int(ipaddress.IPv6Address(prefix)) | int(inner))
        assert special_range(outer) == special_range(inner)


@given(st.ip_addresses(v=4))
def test_tunnels_are_special_whatever_is_written_in_them(inner: ipaddress.IPv4Address) -> None:
    to4 = ipaddress.IPv6Address((0x2002 << 112) | int(inner) << 80 | 1)
    teredo = ipaddress.IPv6Address((0x20010000 << 96) | (int(inner) ^ 0xFFFFFFFF))
    assert special_range(to4) == "a 6to4 address"
    assert special_range(teredo) == "a Teredo address"


@given(st.ip_addresses(v=6))
def test_of_ipv6_only_global_unicast_is_public(address: ipaddress.IPv6Address) -> None:
    embedded = any(address in ipaddress.IPv6Network(network) for network in ("::ffff:0:0/96", "64:ff9b::/96"))
    if special_range(address) is None and not embedded:
        assert address in ipaddress.IPv6Network("2000::/3")


@given(st.ip_addresses(v=4))
def test_of_ipv4_nothing_is_public_that_a_registry_names(address: ipaddress.IPv4Address) -> None:
    if special_range(address) is None:
        assert not any(address in network for network in SPECIAL_V4)
        assert not address.is_private and not address.is_loopback and not address.is_link_local


HOSTILE = [
    "http://127.0.0.1/",
    "http://127.1/",
    "http://2130706433/",
    "http://0x7f000001/",
    "http://0x7f.0.0.1/",
    "http://0177.0.0.1/",
    "http://017700000001/",
    "http://0/",
    "http://0.0.0.0/",
    "http://10.0.0.1/",
    "http://169.254.169.254/latest/meta-data/",
    "http://169.254.169.254./",
    "http://192.0.0.192/",
    "http://100.100.100.200/",
    "http://168.63.129.16/",
    "http://[fd00:ec2::254]/",
    "http://[::]/",
    "http://[::1]/",
    "http://[::127.0.0.1]/",
    "http://[::ffff:127.0.0.1]/",
    "http://[::ffff:7f00:1]/",
    "http://[64:ff9b::7f00:1]/",
    "http://[64:ff9b:1::7f00:1]/",
    "http://[2002:7f00:1::]/",
    "http://[2001:0:7f00:1::]/",
    "http://[fe80::1%25eth0]/",
    "http://[fec0::1]/",
    "http://①②⑦.⓪.⓪.①/",
    "http://127。0。0。1/",
    "http://%31%32%37.0.0.1/",
    "http://127.0.0.1%00.example.com/",
    "http://user@example.com/",
    "http://user:password@example.com/",
    "http://example.com\\@127.0.0.1/",
    "http://127.0.0.1\\@example.com/",
    "http://example.com@127.0.0.1/",
    "http://example.com:22/",
    "http://example.com:0/",
    "http://example.com:99999/",
    "http://exam ple.com/",
    "http://exam\tple.com/",
    f"http://{'a' * 300}.com/",
    "http://",
    "http:///path",
    "http://./",
    "//example.com/",
    "example.com",
    "",
    "file:///etc/passwd",
    "ftp://example.com/",
    "gopher://example.com/",
    "builtin:",
]


@pytest.mark.parametrize("url", HOSTILE)
def test_hostile_urls_are_refused_as_they_are_written(url: str) -> None:
    with pytest.raises(EgressError) as refused:
        PUBLIC.check(url)
    assert refused.value.kind == "refused"
    assert str(refused.value).endswith((".", ")")) and len(str(refused.value)) < 500


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/a?b=c",
        "HTTP://EXAMPLE.COM:80/",
        "https://example.com.:443/",
        "http://bücher.example/",
        "http://8.8.8.8/",
        "http://[2606:4700::1111]/",
        "http://example.com#@127.0.0.1/",
    ],
)
def test_ordinary_urls_pass(url: str) -> None:
    PUBLIC.check(url)


PIECES = st.one_of(
    st.sampled_from(
        ["http://", "https://", "@", ":", "[", "]", "%", "\\", "/", ".", "0x7f", "127", "::1", "①", "。"]
    ),
    st.characters(),
    st.integers(0, 1 << 33).map(str),
)


@given(st.lists(PIECES, max_size=12).map("".join), st.booleans())
def test_any_text_is_refused_or_a_url_of_a_host_that_may_be_reached(text: str, with_scheme: bool) -> None:
    text = f"http://{text}" if with_scheme else text
    try:
        PUBLIC.check(text)
    except EgressError:
        return
    host = httpx2.URL(text).host.rstrip(".")
    try:
        assert special_range(ipaddress.ip_address(host)) is None
    except ValueError:
        assert not host.rpartition(".")[2].isdecimal(), "resolvers may read it as an address"


@given(st.text(max_size=40))
def test_any_text_is_a_rule_or_a_value_error(text: str) -> None:
    try:
        read_rule(text)
    except ValueError:
        return
    assert text.strip()


def test_one_bad_address_among_good_ones_is_enough() -> None:
    with pytest.raises(EgressError, match=r"name\.example resolves to a private address"):
        PUBLIC.judge("name.example", 443, ["8.8.8.8", "192.168.0.7"])


def test_off_is_nothing_and_any_is_everything_that_is_a_url() -> None:
    for url in ("https://example.com/", "http://8.8.8.8/", "http://127.0.0.1/"):
        with pytest.raises(EgressError, match="--egress"):
            Egress().check(url)
    Egress("any").check("http://127.0.0.1:9999/")
    Egress("any").judge("localhost", 22, ["127.0.0.1"])
    for url in ("http://a:b@localhost/", "file:///etc/passwd"):
        with pytest.raises(EgressError):
            Egress("any").check(url)


@pytest.mark.parametrize(
    ("rule", "allowed", "refused"),
    [
        (
            "10.0.0.0/8",
            ["http://10.1.2.3/", "https://10.1.2.3/"],
            ["http://10.1.2.3:8080/", "http://11.0.0.1/"],
        ),
        ("10.1.2.3:8080", ["http://10.1.2.3:8080/"], ["http://10.1.2.3/", "http://10.1.2.4:8080/"]),
        ("127.0.0.1", ["http://[::ffff:127.0.0.1]/"], ["http://127.0.0.2/"]),
        ("fd00::/8", ["http://[fd00::1]/"], ["http://[fd00::1]:8080/", "http://[fe80::1]/"]),
        ("[fd00::/8]:8080", ["http://[fd00::1]:8080/"], ["http://[fd00::1]/"]),
        ("::1", ["http://[::1]/"], ["http://127.0.0.1/"]),
        (
            "Search.Example",
            ["http://search.example/", "http://SEARCH.example./"],
            ["http://a.search.example/"],
        ),
        ("*.example", ["http://search.example/"], ["http://example/", "http://badexample/"]),
        ("search.example:*", ["http://search.example:1/"], ["http://other.example/"]),
    ],
)
def test_rules(rule: str, allowed: list[str], refused: list[str]) -> None:
    egress = Egress("off", (read_rule(rule),))
    for url in allowed:
        egress.check(url)
    for url in refused:
        with pytest.raises(EgressError):
            egress.check(url)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "http://x/",
        "10.0.0.1/8",
        "10.0.0.256",
        "a b",
        "x:0",
        "x:70000",
        "x:",
        "*",
        "a.*",
        "[x]",
        "::1/200",
    ],
)
def test_rules_that_are_none(text: str) -> None:
    with pytest.raises(ValueError):
        read_rule(text)


def test_a_network_allows_names_by_their_addresses_only() -> None:
    egress = Egress("off", (read_rule("10.0.0.0/8"),))
    egress.check("http://wiki.corp/")
    egress.judge("wiki.corp", 80, ["10.9.9.9"])
    for addresses in (["8.8.8.8"], ["10.9.9.9", "8.8.8.8"]):
        with pytest.raises(EgressError):
            egress.judge("wiki.corp", 80, addresses)


def test_a_server_of_the_operator_is_allowed_at_its_port_alone() -> None:
    for url, others in (
        ("http://127.0.0.1:9000/tool", ["http://127.0.0.1:9001/", "http://127.0.0.1/"]),
        ("https://tools.corp/x", ["http://tools.corp/", "https://tools.corp:8443/"]),
    ):
        egress = Egress().allowing(url)
        egress.check(url)
        for other in others:
            with pytest.raises(EgressError):
                egress.check(other)
    egress.judge("tools.corp", 443, ["10.0.0.1"])
