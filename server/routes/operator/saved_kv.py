"""/admin/kv: how it stands with the KV that engines save on disk, for `antiphon doctor`."""

from __future__ import annotations

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.access import OPERATOR_ONLY
from server.http import context, json_reply
from server.routes.documented import needs

router = APIRouter(tags=["Organization"])


@router.get("/admin/kv", **needs(OPERATOR_ONLY), include_in_schema=False)
async def list_saved_kv(request: Request) -> Response:
    """Of each model that is computed here and is loaded: whether its KV is saved, and why not; and in which
    folder, and how much at most."""
    config = context(request).config
    served = {id(model.engine): model for model in context(request).models if model.adapter is None}
    found = [
        {"model": model.root, "state": stats.tier.state, "why": stats.tier.why or None}
        for model in served.values()
        if (stats := model.engine.stats()).kv_blocks
    ]
    kept = {"folder": str(config.kv_disk_folder), "bytes_limit": config.kv_disk_bytes}
    return json_reply(orjson.dumps({"object": "list", "data": found, **kept}))
