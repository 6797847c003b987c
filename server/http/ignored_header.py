"""The header that names what was ignored of a request, on every reply that a route gives."""

from __future__ import annotations

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

        async def naming(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] < 400:
                query = scope["query_string"].decode("latin-1")
                named = [(name.encode(), value.encode()) for name, value in found.headers(query).items()]
                message = {**message, "headers": [*message["headers"], *named]}
            await send(message)

        with ignored.collecting() as found:
            await self._app(scope, receive, naming)
