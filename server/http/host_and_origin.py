"""Refuses requests that name a foreign host, come from a foreign web page, or lack TLS where it is required.

A browser sends what any web page tells it to send, even to servers that only its own machine can reach, and a
server without keys would obey. The `Host` header must name this server (beyond loopback only if
`allowed_host` is set), because a page whose author points its name at 127.0.0.1 has the server's own origin
in the browser's eyes and only the name gives it away. A request that a browser marks with `Origin` or
`Sec-Fetch-Site` must come from the server's own origin or a listed one; other clients send neither header and
pass. A foreign host gets 421 Misdirected Request (RFC 9110, 15.5.20), and a foreign origin or missing TLS
gets 403.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import ApiError
from server.http.authentication import ADMIN_PATHS, presented_key
from server.http.proxies import ThisMachine
from server.http.refusal import tell

if TYPE_CHECKING:
    from server.config import Config
    from server.http.state import ServerState

PROBES = frozenset({"/health", "/ping", "/ready"})
"""What asks these may know the server by its address only, as a kubelet does, or by no name at all."""

_HOST = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(:\d*)?")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_OF_SOCKETS = {"ws": "http", "wss": "https"}
MAX_SHOWN = 100
"""Characters of a header that a message repeats."""


class HostAndOrigin:
    """ASGI: lets a request or a WebSocket pass if its name, its origin and its transport are in order."""

    def __init__(self, app: ASGIApp, life: ServerState) -> None:
        config = life.config
        self._app = app
        self._admin_token = life.admin_token.encode()
        self._here = ThisMachine(config.trusted_proxy)
        self._names = OwnNames(config)
        self._origins = frozenset(config.cors_origin)
        self._tls_only = config.require_tls
        self._loopback = config.loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer: 421 `host_not_allowed`, 403 `origin_not_allowed`, 403 `tls_required`."""
        if scope["type"] != "lifespan":
            headers = Headers(scope=scope)
            error = (
                self._host(scope, headers) or self._transport(scope, headers) or self._origin(scope, headers)
            )
            if error is not None:
                await tell(error, scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _host(self, scope: Scope, headers: Headers) -> ApiError | None:
        host = headers.get("host", "")
        name = name_of(host)
        if name in self._names or (scope["path"] in PROBES and (not host or _address(name))):
            return None
        message = (
            f"This server does not answer under the name {host[:MAX_SHOWN]!r}. If the name is the server's "
            "own, list it in the setting allowed_host."
            if host
            else "The request says no name of the server: the header Host is missing."
        )
        return ApiError(421, message, code="host_not_allowed", param="Host")

    def _transport(self, scope: Scope, headers: Headers) -> ApiError | None:
        if not self._tls_only or scope["scheme"] in ("https", "wss"):
            return None
        if self._loopback and self._here.has_client(scope):  # nothing of it was on any network
            return None
        # An operator's commands find the server by a file on its own machine, and do not leave the machine.
        if scope["path"] in PROBES or scope["path"].startswith(ADMIN_PATHS):
            return None
        if hmac.compare_digest((presented_key(headers) or "").encode(), self._admin_token):
            return None
        message = "This server is for HTTPS only."
        if presented_key(headers):
            message += " The key was sent in the clear just now: replace it."
        return ApiError(403, message, code="tls_required")

    def _origin(self, scope: Scope, headers: Headers) -> ApiError | None:
        if "*" in self._origins:
            return None
        origin = ", ".join(headers.getlist("origin"))
        site = headers.get("sec-fetch-site", "")
        if origin in self._origins or _is_own(origin, site, scope, headers):
            return None
        page = f"of the origin {origin[:MAX_SHOWN]!r}" if origin else "of another site"
        message = (
            f"A page {page} may not call this server. If it should, list its origin in the setting "
            "cors_origin."
        )
        return ApiError(403, message, code="origin_not_allowed", param="Origin")


class OwnNames:
    """The names under which a server answers.

    On loopback: those of this machine, and those that are listed. Elsewhere all are, unless some are listed:
    keys are needed there, and a foreign page has none. Once some are, addresses still are: no DNS can turn
    one elsewhere, and probes and scrapers know no other name.
    """

    def __init__(self, config: Config) -> None:
        listed = config.allowed_host
        self._any = "*" in listed or not (listed or config.loopback)
        self._any_address = not config.loopback
        self._names = {_spelled(name) for name in (config.host, *listed)} | {"localhost"}
        # Names under .localhost are this machine's by definition (RFC 6761, 6.3).
        self._endings = (".localhost", *(name[1:] for name in listed if name.startswith("*.")))

    def __contains__(self, name: str) -> bool:
        """Whether a name, as `name_of` gives it, is one of the server's own."""
        if self._any or (name and (name in self._names or name.endswith(self._endings))):
            return True
        address = _address(name)
        return address is not None and (self._any_address or address.is_loopback)


def name_of(host: str) -> str:
    """The name or address in a Host header, without port, in one spelling; empty where there is none."""
    found = _HOST.fullmatch(host)
    return _spelled(found[1]) if found else ""


def _spelled(name: str) -> str:
    address = _address(name.strip("[]"))
    return name.lower().removesuffix(".") if address is None else str(address)


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _is_own(origin: str, site: str, scope: Scope, headers: Headers) -> bool:
    """Whether a request comes from a page of this server, or from no page.

    origin, site: the headers Origin and Sec-Fetch-Site, empty where they are missing. A browser writes the
    second itself and no page can change it; it knows the scheme that the page was fetched by, which a server
    behind a proxy may not. Older browsers send the first alone.
    """
    if not origin:
        return site in ("", "none", "same-origin")  # none: typed, or chosen from the bookmarks
    if origin == "null" or site not in ("", "none", "same-origin"):
        return False
    if site == "same-origin":
        return True
    scheme = _OF_SOCKETS.get(scope["scheme"], scope["scheme"])
    return _place(origin.lower()) == _place(f"{scheme}://{headers.get('host', '').lower()}")


def _place(origin: str) -> str:
    """An origin in one spelling: without the port that its scheme has anyway."""
    return origin.removesuffix(_DEFAULT_PORTS.get(origin.partition(":")[0], " "))
