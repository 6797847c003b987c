"""What may be reached: a mode, the operator's exceptions from it, and the caps on one exchange.

A URL is judged twice: as it is written, and again when its host's addresses are known.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tools.egress.addresses import Address, Network, meant, special_range
from tools.spec import ToolError

if TYPE_CHECKING:
    from httpx2 import URL

Mode = Literal["off", "public", "any"]

_PORTS = {"http": 80, "https": 443}

_HOST = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*", re.IGNORECASE)
_LONGEST_HOST = 253  # characters, by the rules of DNS
_RULE = re.compile(r"(?:\[(?P<bracketed>[^\]]+)\]|(?P<plain>[^:]+))(?::(?P<port>\d{1,5}|\*))?")
_NUMBER = re.compile(r"\d+|0x[0-9a-f]*", re.IGNORECASE)


class EgressError(ToolError):
    """Something is not reached, or not to its end; the message is fit for a model and for a client.

    kind: `refused` by the rules, `unreachable`: there was no connection, so nothing was sent; `too_large` or
    `too_slow` by the caps, or `broken`: the connection broke, or the other side does not keep to HTTP.
    allowable: the operator could allow what was refused; no setting allows a URL that is none, or that no
    server may be given, such as one with a password. extensions: of the request that failed, empty where
    there was none: by them its caller tells it from others.
    """

    def __init__(
        self,
        message: str,
        kind: Literal["refused", "unreachable", "too_large", "too_slow", "broken"],
        *,
        allowable: bool = False,
    ) -> None:
        # In the other cases a request was sent, or may have been.
        super().__init__(message, uncertain=kind not in ("refused", "unreachable"))
        self.kind = kind
        self.allowable = allowable
        self.extensions: Mapping[str, Any] = {}


GATEWAY_STATUSES = (502, 504)
"""By which a gateway says that the server behind it did not answer: it may have done what it was asked."""


@dataclass(frozen=True, slots=True)
class Caps:
    """What one exchange may take.

    max_bytes: of a reply's body, both as it arrives and unpacked. total_s: seconds from the request to the
    last byte of its reply, redirects included; None: no limit. connect_s: seconds for finding
    a name's addresses, and for a connection to one of them. max_values: brackets, commas and quotes of a
    body that is parsed on the event loop, which does nothing else meanwhile; None: no limit. per_event:
    max_bytes and max_values are for each event of a stream of events, which may last. values_per_s: how fast
    the replies of one client are read, all together, once they have had max_values; None: as they come.
    There, 50 bytes count as a value besides, and a line of a stream of events as 50 values.
    """

    max_bytes: int = 5 << 20
    total_s: float | None = 15.0
    connect_s: float = 5.0
    max_values: int | None = None
    per_event: bool = False
    values_per_s: int | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """An exception: a name or a network that may be reached, whatever the mode, at some ports.

    host: in lower case; `*.NAME` stands for every name under NAME. Empty where `network` is given. ports:
    None for every port.
    """

    host: str = ""
    network: Network | None = None
    ports: frozenset[int] | None = frozenset(_PORTS.values())

    def allows_port(self, port: int) -> bool:
        """Whether it speaks of a port."""
        return self.ports is None or port in self.ports

    def names(self, host: str) -> bool:
        """Whether it speaks of a host by its name."""
        if self.host.startswith("*."):
            return host.endswith(self.host[1:])
        return bool(self.host) and host == self.host

    def holds(self, address: Address) -> bool:
        """Whether an address, or the one that it leads to, lies in its network."""
        return self.network is not None and (address in self.network or meant(address) in self.network)


def read_rule(text: str) -> Rule:
    """A rule as it is configured: NAME, *.NAME, ADDRESS or NETWORK, and :PORT or :* behind it.

    Without a port it speaks of 80 and 443. An IPv6 address or network with a port stands in brackets. Raises
    ValueError.
    """
    text = text.strip()
    bare = text if text.count(":") > 1 and "[" not in text else None
    if (parts := _RULE.fullmatch(f"[{bare}]" if bare else text)) is None:
        raise ValueError(f"{text!r} is no host, address or network, with or without :PORT")
    place = parts["bracketed"] or parts["plain"]
    ports: frozenset[int] | None = frozenset(_PORTS.values())
    if parts["port"] == "*":
        ports = None
    elif parts["port"]:
        ports = frozenset({int(parts["port"])})
        if not 0 < int(parts["port"]) < 65536:
            raise ValueError(f"{parts['port']} is no port")
    if parts["bracketed"] or "/" in place or _numeric(place):
        try:
            return Rule(network=ipaddress.ip_network(place), ports=ports)
        except ValueError as error:
            raise ValueError(f"{place!r} is no address and no network ({error})") from None
    if not _HOST.fullmatch(place.removeprefix("*.")):
        raise ValueError(f"{place!r} is no host name")
    return Rule(host=place.lower(), ports=ports)


@dataclass(frozen=True, slots=True)
class Egress:
    """What may be reached.

    mode: `off` nothing, `public` every public address at the ports 80 and 443, `any` every address at every
    port. allow: what may be reached besides.
    """

    mode: Mode = "off"
    allow: tuple[Rule, ...] = ()

    def allowing(self, url: str) -> Egress:
        """The same, and besides the host of a URL at its port: for servers that the operator has named."""
        parsed = parse_url(url)
        host, port = host_of(parsed), port_of(parsed)
        address = _address(host)
        network = None if address is None else ipaddress.ip_network(address)
        rule = Rule(host="" if network else host, network=network, ports=frozenset({port}))
        return dataclasses.replace(self, allow=(*self.allow, rule))

    def check(self, url: str | URL) -> None:
        """Judge a URL as it is written, without asking for its host's addresses; raises EgressError."""
        parsed = parse_url(url) if isinstance(url, str) else url
        host, port = host_of(parsed), port_of(parsed)
        if parsed.userinfo:
            raise _refused("A URL may not hold a user name or a password.")
        if not 0 < port < 65536:
            raise _refused(f"{port} is no port.")
        if (address := _address(host)) is not None:
            self.judge(host, port, [str(address)])
        elif _numeric(host) or not _HOST.fullmatch(host) or len(host) > _LONGEST_HOST:
            raise _refused(f"{host[:_LONGEST_HOST]!r} is no host name and no address in its usual form.")
        elif self.mode != "any" and not self._may_be_allowed(host, port):
            raise self._refusal(host, port)

    def judge(self, host: str, port: int, addresses: Sequence[str]) -> None:
        """Judge what a host has resolved to: all of the addresses must be allowed. Raises EgressError."""
        if self.mode == "any" or any(rule.allows_port(port) and rule.names(host) for rule in self.allow):
            return
        for address in map(ipaddress.ip_address, addresses):
            if any(rule.allows_port(port) and rule.holds(address) for rule in self.allow):
                continue
            if self.mode == "off" or port not in _PORTS.values():
                raise self._refusal(host, port)
            if (kind := special_range(address)) is not None:
                verb = "is" if _address(host) is not None else "resolves to"
                why = f"{host} {verb} {kind}, and this server connects to public addresses only."
                raise EgressError(why, "refused", allowable=True)

    def _may_be_allowed(self, host: str, port: int) -> bool:
        """Whether a name can be allowed, by itself or by addresses that it may have."""
        if self.mode == "public" and port in _PORTS.values():
            return True
        return any(rule.allows_port(port) and (rule.network or rule.names(host)) for rule in self.allow)

    def _refusal(self, host: str, port: int) -> EgressError:
        if self.mode == "public" and port not in _PORTS.values():
            why = f"{host} is not reached at port {port}: only the ports 80 and 443 are."
        else:
            why = f"{host} is not reached: this server makes no connections to it (--egress)."
        return EgressError(why, "refused", allowable=True)


def parse_url(text: str) -> URL:
    """A URL by httpx2's rules, by which it is requested too; EgressError for what is none."""
    from httpx2 import URL, InvalidURL

    try:
        return URL(text)
    except InvalidURL as error:
        raise _refused(f"The URL is not valid ({str(error)[:200]}).") from None


def host_of(url: URL) -> str:
    """The host in lower case without a trailing dot, of a URL with a scheme that is spoken; EgressError."""
    if url.scheme not in _PORTS:
        raise _refused("A URL begins with http:// or https://.")
    host = url.raw_host.decode("ascii").lower().rstrip(".")
    if not host:
        raise _refused("The URL has no host.")
    return host


def port_of(url: URL) -> int:
    """The port, given or by the scheme."""
    return url.port if url.port is not None else _PORTS[url.scheme]


def _address(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _numeric(host: str) -> bool:
    """Whether resolvers may read a host as an IPv4 address: its last label is a number, also 0x7f or 017."""
    return _NUMBER.fullmatch(host.rpartition(".")[2]) is not None


def _refused(message: str) -> EgressError:
    return EgressError(message, "refused")
