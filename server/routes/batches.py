"""The routes under /v1/batches."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.batches import batch_json
from server.clock import now_us
from server.errors import ApiError
from server.http import context, json_reply, life, owner, page_args, page_json, principal, read_body
from server.routes.documented import PAGE, documented
from server.schema import check_metadata, missing, refuse
from server.shapes import name_others
from storage import NewBatch, NotFound

router = APIRouter(prefix="/v1/batches", tags=["Batches"])

EMBEDDINGS = "/v1/embeddings"
ENDPOINTS = ("/v1/responses", "/v1/chat/completions", "/v1/completions", EMBEDDINGS)
"""Those that a batch may be for, where the server has a model for them."""

WINDOW_S = 24 * 3600
MAX_GOING = 100
"""Batches of one owner that have not ended."""
MAX_INPUT_BYTES = 200_000_000
MIN_LIFE_S, MAX_LIFE_S = 3600, 2_592_000
"""Bounds of the seconds that a client may have the files of a batch live."""


@router.post("", **documented("Batch", "batches.write", body="CreateBatch"))
async def create_batch(request: Request) -> Response:
    """Begin a batch over a file of requests."""
    body = await read_body(request)
    name_others(body, ("input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after"))
    for name in ("input_file_id", "endpoint", "completion_window"):
        if name not in body:
            missing(name)
    here, who, now = context(request), principal(request), now_us()
    if body["endpoint"] not in ENDPOINTS:
        refuse("endpoint", f"'endpoint' must be one of {', '.join(ENDPOINTS)}.", "invalid_value")
    if body["endpoint"] == EMBEDDINGS:
        here.models.require("embedding")
    if body["completion_window"] != "24h":
        refuse("completion_window", "'completion_window' must be '24h'.", "invalid_value")
    metadata = orjson.dumps(check_metadata({} if body.get("metadata") is None else body["metadata"]))
    lifetime = _lifetime(body.get("output_expires_after"))
    file_id = body["input_file_id"]
    if not isinstance(file_id, str):
        refuse("input_file_id", "'input_file_id' must be the id of a file.", "invalid_type")
    try:
        file = await here.storage.files.get(who.owner, file_id, now)
    except NotFound:
        raise _no_such_file(file_id) from None
    if file.purpose != "batch":
        message = f"A file for batches has the purpose 'batch'; this one has '{file.purpose}'."
        refuse("input_file_id", message, "invalid_file_purpose")
    if file.num_bytes > MAX_INPUT_BYTES:
        refuse("input_file_id", f"A file for batches has at most {MAX_INPUT_BYTES} bytes.", "file_too_large")
    blobs = here.storage.blobs
    if not await blobs.touch(file.digest):  # it must not go with its file before the batch names it
        raise _no_such_file(file_id)
    async with blobs.committing(file.digest):
        made = await here.storage.batches.create(
            NewBatch(
                id=f"batch_{secrets.token_hex(16)}",
                owner=who.owner,
                key_id=who.key_id,
                endpoint=body["endpoint"],
                input_file_id=file.id,
                digest=file.digest,
                metadata=metadata,
                created_at=now,
                expires_at=now + WINDOW_S * 1_000_000,
                output_lifetime=lifetime,
            ),
            MAX_GOING,
        )
    life(request).batches_stirred()
    return json_reply(batch_json(made))


def _no_such_file(file_id: str) -> ApiError:
    return ApiError(404, f"File with id '{file_id}' not found.", code="not_found", param="input_file_id")


def _lifetime(asked: Any) -> int | None:
    """How long the files of a batch are to live, in microseconds. Raises ApiError 400."""
    if asked is None:
        return None
    if not isinstance(asked, Mapping) or asked.get("anchor") != "created_at":
        message = "'output_expires_after' must have the anchor 'created_at', and seconds."
        refuse("output_expires_after.anchor", message, "invalid_value")
    seconds = asked.get("seconds")
    if not isinstance(seconds, int) or isinstance(seconds, bool) or not MIN_LIFE_S <= seconds <= MAX_LIFE_S:
        message = f"'seconds' must be a whole number from {MIN_LIFE_S} to {MAX_LIFE_S}."
        refuse("output_expires_after.seconds", message, "invalid_value")
    return seconds * 1_000_000


@router.get("", **documented("Batches", "batches.read", query=PAGE))
async def list_batches(request: Request) -> Response:
    """One page of batches, newest first unless `order=asc`."""
    page = await context(request).storage.batches.list(owner(request), **page_args(request.query_params))
    bodies = [batch_json(batch) for batch in page.data]
    return json_reply(page_json(bodies, [batch.id for batch in page.data], has_more=page.has_more))


@router.get("/{batch_id}", **documented("Batch", "batches.read"))
async def get_batch(request: Request, batch_id: str) -> Response:
    """The batch as it stands."""
    return json_reply(batch_json(await context(request).storage.batches.get(owner(request), batch_id)))


@router.post("/{batch_id}/cancel", **documented("Batch", "batches.write"))
async def cancel_batch(request: Request, batch_id: str) -> Response:
    """Begin no more requests; what is done is in the files of the batch."""
    stored = await context(request).storage.batches.cancel(owner(request), batch_id, now_us())
    life(request).batches_stirred()
    return json_reply(batch_json(stored))
