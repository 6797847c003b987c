"""POST /v1/moderations: what a classifier that the operator names thinks of texts, in the official shape."""

from __future__ import annotations

import secrets

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.access import require_use
from server.errors import ApiError
from server.http import context, json_reply, limited, principal, read_as, while_connected
from server.moderation import parse_moderation_request
from server.pooling import check_length_of_all
from server.routes.documented import documented
from server.vector_stores import Payer

router = APIRouter(tags=["Moderations"])


@router.post("/v1/moderations", **documented("Moderations", "embeddings.write", body="CreateModeration"))
async def create_moderation(request: Request) -> Response:
    """A verdict on each input."""
    asked = await read_as(request, parse_moderation_request)
    here, who = context(request), principal(request)
    moderator = here.runs.moderator
    if moderator is None:
        message = "This server has no model for moderation: the operator names one by moderation_model."
        raise ApiError(400, message, code="unsupported_model", param="model")
    if asked.model is not None:
        moderator.require(asked.model, "model")
    require_use(who, moderator.model)
    check_length_of_all(asked.inputs, lambda _: "input")
    visit = await here.limiter.enter(limited(request, moderator.model), moderator.model)
    try:
        payer = Payer(who.owner, who.subjects, who.key_id, who.service.weight)
        judging = moderator.moderate(asked.inputs, payer=payer, param="input")
        verdicts = await while_connected(request, judging)
    finally:
        visit.leave()
    members = ("flagged", "categories", "category_scores", "category_applied_input_types")
    results = [{name: verdict[name] for name in members} for verdict in verdicts]
    found = {"id": f"modr-{secrets.token_hex(12)}", "model": moderator.model, "results": results}
    return json_reply(orjson.dumps(found))
