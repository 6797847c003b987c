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

from server.errors import ApiError
from server.http import Admission, Boundary, Envelope, IdempotencyMiddleware
from server.process.lifecycle import ServerLifecycle
from server.routes import ROUTERS


def create_app(life: ServerLifecycle) -> FastAPI:
    """The ASGI application of one server; it serves what `life` holds, in every phase of it."""
    cors = Middleware(
        Cors,
        allow_origins=list(life.config.cors_origin),
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["*"],
    )
    app = FastAPI(
        title="Antiphon",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        # Outermost first.
        middleware=[
            Middleware(Envelope, life=life),
            *([cors] if life.config.cors_origin else []),
            Middleware(Boundary, life=life),
            Middleware(Admission, life=life),
            Middleware(IdempotencyMiddleware, life=life),
        ],
        exception_handlers={HTTPException: _to_the_boundary},
    )
    app.state.life = life
    for router in ROUTERS:
        app.include_router(router)
    return app


class Cors(CORSMiddleware):
    """Starlette's, with refusals in the official shape."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """The answer to a preflight: 200, or 400 `cors_refused`."""
        answer = super().preflight_response(request_headers)
        if answer.status_code < 400:
            return answer
        message = f"{bytes(answer.body).decode()}. See the setting cors_origin."
        kept = {name: value for name, value in answer.headers.items() if not name.startswith("content-")}
        return ApiError(answer.status_code, message, code="cors_refused", headers=kept).response()


async def _to_the_boundary(request: Request, exc: Exception) -> Response:
    raise exc
