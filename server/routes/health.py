"""Alive, ready, version, metrics: what operators and their probes ask."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server import __version__
from server.access import LOAD, OPEN
from server.http import context, flag, life
from server.routes.documented import documented, needs
from server.telemetry import CONTENT_TYPE

router = APIRouter(tags=["Server"])


@router.head("/health", **needs(OPEN), include_in_schema=False)
@router.get("/health", **documented("Status", OPEN))
async def health(request: Request) -> Response:
    """200 while the process can do its work, loading and draining included; 503 once it is about to end."""
    here = life(request)
    if here.phase == "dead":
        raise here.refusal()
    return JSONResponse({"status": here.phase})


@router.head("/ping", **needs(OPEN), include_in_schema=False)
@router.get("/ping", **documented("Status", OPEN))
async def ping(request: Request) -> Response:
    """The same as `/health`, for platforms that ask for it by this name."""
    return await health(request)


@router.head("/ready", **needs(OPEN), include_in_schema=False)
@router.get("/ready", **documented("Ready", OPEN, query=("probe",)))
async def ready(request: Request) -> Response:
    """200 when a new request would be served: an engine can be asked and the database answers. With `probe`
    the model has also just generated two tokens; 503 `probe_failed` where it could not. `models` are those
    that can be asked at once."""
    here = life(request)
    if here.phase != "ready" or here.context is None:
        raise here.refusal()
    await here.context.storage.ready()
    up = here.context.models.up()
    if flag(request.query_params, "probe"):
        await here.probe()
    return JSONResponse({"status": "ready", "models": up})


@router.get("/load", **documented("Load", LOAD))
async def load(request: Request) -> Response:
    """How much there is to do: for balancers that send a request to the server with the least."""
    found = context(request).models.at_work()
    return JSONResponse(
        {
            "server_load": found.running + found.waiting,
            "running": found.running,
            "waiting": found.waiting,
            "kv_cache_usage": found.kv_cache_usage,
        }
    )


@router.get("/version", **documented("Version", OPEN))
async def version(request: Request) -> Response:
    """The version of the server, and what runs code or why nothing does."""
    sandbox = life(request).sandbox
    return JSONResponse({"version": __version__, **({} if sandbox is None else {"sandbox": sandbox})})


@router.get("/metrics", **documented("", "metrics.read", texts=("text/plain",)))
async def metrics(request: Request) -> Response:
    """Prometheus text."""
    return Response(await life(request).metrics(), media_type=CONTENT_TYPE)
