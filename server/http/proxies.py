"""Adapts the server to a proxy: prepares the trusted networks for uvicorn, tells who is on this machine, and
strips the path prefix."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send


def trusted_hosts(networks: Iterable[str]) -> list[str]:
    """Networks in the form that uvicorn's ProxyHeadersMiddleware takes.

    A socket that listens on IPv6 and IPv4 sees an IPv4 client by its mapped address, so each network of IPv4
    stands there mapped, too.
    """
    found = []
    for each in networks:
        network = ipaddress.ip_network(each)
        found.append(str(network))
        if network.version == 4:
            found.append(f"::ffff:{network.network_address}/{96 + network.prefixlen}")
    return found


class ThisMachine:
    """Tells whether a request's client is on this machine, as far as is believed: by the address that a
    trusted proxy gave, else by the connection's own.

    A connection from the address of a trusted proxy that does not say whom it speaks for may be anybody's, so
    its client is taken to be elsewhere.
    """

    def __init__(self, trusted: Iterable[str]) -> None:
        """trusted: networks of proxies."""
        self._trusted = tuple(map(ipaddress.ip_network, trusted))

    def has_client(self, scope: Scope) -> bool:
        """Whether the client of a request is here; `scope` as ProxyHeadersMiddleware left it."""
        client = scope.get("client")
        if client is None:  # the connection has no address, so it is none of a network
            return True
        try:
            read = ipaddress.ip_address(client[0])
        except ValueError:
            return False
        address = getattr(read, "ipv4_mapped", None) or read
        if not address.is_loopback:
            return False
        named = any(value.strip() for value in Headers(scope=scope).getlist("x-forwarded-for"))
        return named or not any(address in network for network in self._trusted)


class RootPath:
    """ASGI: takes a path off the front of each request's, if it is there.

    A proxy that takes it off itself needs nothing here; probes that do not come through the proxy leave it
    out as well. Pages name what belongs to them by relative paths, and the OpenAPI document says the path
    itself, so nobody has to put it back. The one exception is the console: a browser that asks for the bare
    prefix is led to the prefix with a slash, because it would look for its parts one level too high.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        """root_path: begins with a slash and does not end with one."""
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "lifespan" and f"{scope['path']}/".startswith(f"{self._root_path}/"):
            if scope["path"] == self._root_path and scope.get("method") in ("GET", "HEAD"):
                await RedirectResponse(f"{self._root_path}/")(scope, receive, send)
                return
            scope = {**scope, "path": scope["path"][len(self._root_path) :] or "/"}
        await self._app(scope, receive, send)
