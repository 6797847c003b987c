"""The header that names what was ignored of a request, on every reply that a route gives."""

from __future__ import annotations

from urllib.parse import parse_qsl

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server import ignored


class NameIgnored:
    """ASGI, next to the routes, so that a reply kept for repeats is kept with its header."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Collect while the route reads its request, and name what was ignored unless the reply is an
        error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] < 400:
                query = scope["query_string"].decode("latin-1")
                found.add_unread(name for name, _ in parse_qsl(query, keep_blank_values=True))
                if value := found.header():
                    headers = [*message["headers"], (ignored.HEADER.encode(), value.encode())]
                    message = {**message, "headers": headers}
            await send(message)

        with ignored.collecting() as found:
            await self._app(scope, receive, named)
