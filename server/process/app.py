"""Builds the ASGI application: its routes and its middlewares, in their order.

Routes read bodies and queries themselves, so FastAPI's validation, and with it its 422, is never reached.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from server.errors import ApiError
from server.http import (
    Admission,
    Boundary,
    Envelope,
    HostAndOrigin,
    IdempotencyMiddleware,
    NameIgnored,
    RootPath,
    trusted_hosts,
)
from server.http.contents import EndsIntake
from server.process.lifecycle import ServerLifecycle
from server.routes import CONSOLE, REFERENCE, ROUTERS


def create_app(life: ServerLifecycle) -> FastAPI:
    """The ASGI application of one server; it serves what `life` holds, in every phase of it."""
    config = life.config
    cors = Middleware(
        Cors,
        allow_origins=list(config.cors_origin),
        allow_methods=[method.upper() for method in config.cors_method],
        allow_headers=list(config.cors_header),
        allow_private_network=True,  # who may reach this network from outside of it is in the list, too
        expose_headers=["*"],
    )
    proxies = Middleware(ProxyHeadersMiddleware, trusted_hosts=trusted_hosts(config.trusted_proxy))
    routers = (*ROUTERS, *([REFERENCE] if config.docs else []), *([CONSOLE] if config.console else []))
    routes = [route for router in routers for route in router.routes]
    app = FastAPI(
        title="Antiphon",
        # As they were made, and not included router by router: each app would make all of them anew for its
        # first request, which would wait some 40 ms for that.
        routes=routes,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        # Outermost first.
        middleware=[
            *([proxies] if config.trusted_proxy else []),
            *([Middleware(RootPath, root_path=config.root_path)] if config.root_path else []),
            Middleware(Envelope, life=life),
            Middleware(HostAndOrigin, life=life),
            *([cors] if config.cors_origin else []),
            Middleware(Boundary, life=life),
            Middleware(Admission, life=life, routes=routes),
            Middleware(EndsIntake),
            Middleware(IdempotencyMiddleware, life=life),
            Middleware(NameIgnored),
        ],
        exception_handlers={HTTPException: _to_the_boundary},
    )
    app.state.life = life
    app.state.paths = frozenset(getattr(route, "path", "") for route in routes)
    life.serve_inside(app)
    app.router.default = _no_such_route
    return app


class Cors(CORSMiddleware):
    """Starlette's, with refusals in the official shape."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """The answer to a preflight: 200, or 403 `origin_not_allowed`."""
        answer = super().preflight_response(request_headers)
        if answer.status_code < 400:
            return answer
        message = f"{bytes(answer.body).decode()}. See the settings cors_origin, cors_method and cors_header."
        kept = {name: value for name, value in answer.headers.items() if not name.startswith("content-")}
        return ApiError(403, message, code="origin_not_allowed", param="Origin", headers=kept).response()


async def _to_the_boundary(request: Request, exc: Exception) -> Response:
    try:
        raise exc
    finally:
        del exc  # which holds this frame


async def _no_such_route(scope: Scope, receive: Receive, send: Send) -> None:
    """For WebSockets too, which the router itself would close without a word."""
    raise HTTPException(404)
