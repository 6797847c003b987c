"""The routes under /v1/prompts (extension): prompt templates, which requests name in `prompt`.

The versions of a prompt never change. A request that names none gets the default one.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.clock import now_us
from server.config import Config
from server.errors import to_api_error
from server.http import (
    context,
    json_reply,
    kept,
    owner,
    page_args,
    page_json,
    prompt_json,
    prompt_version_json,
    read_as,
    require_stored_bytes,
)
from server.routes.documented import PAGE, documented
from server.routes.responses import new_id
from server.schema import PromptBody, parse_new_prompt, parse_prompt_change, refuse, version_number
from storage import NotFound, PromptChange, StoredPrompt

router = APIRouter(prefix="/v1/prompts", tags=["Prompts"])


@router.post("", **documented("Prompt", "prompts.write", body="CreatePrompt"))
async def create_prompt(request: Request) -> Response:
    """Store a prompt template as version 1 of a new prompt."""
    body = await read_as(request, _reader(request, parse_new_prompt))
    assert body.template is not None
    metadata = body.metadata or b"{}"
    await require_stored_bytes(request, len(metadata) + len(body.template))
    id = f"pmpt_{secrets.token_hex(24)}"
    new = StoredPrompt(id, owner(request), now_us(), body.name or None, metadata)
    keeping = kept(request, prompt_json, id)
    stored = await context(request).storage.prompts.create(new, body.template, kept=keeping)
    return json_reply(prompt_json(stored))


@router.get("", **documented("Prompts", "prompts.read", query=PAGE))
async def list_prompts(request: Request) -> Response:
    """One page of prompts, newest first unless `order=asc`."""
    page = await context(request).storage.prompts.list(owner(request), **page_args(request.query_params))
    ids = [stored.id for stored in page.data]
    return json_reply(page_json([*map(prompt_json, page.data)], ids, has_more=page.has_more))


@router.get("/{prompt_id}", **documented("Prompt", "prompts.read"))
async def get_prompt(request: Request, prompt_id: str) -> Response:
    """The prompt, without its versions."""
    return json_reply(prompt_json(await context(request).storage.prompts.get(owner(request), prompt_id)))


@router.post("/{prompt_id}", **documented("Prompt", "prompts.write", body="UpdatePrompt"))
async def update_prompt(request: Request, prompt_id: str) -> Response:
    """Add a version, choose the default one, or replace the name or the metadata."""
    body = await read_as(request, _reader(request, parse_prompt_change))
    await require_stored_bytes(request, len(body.metadata or b"") + len(body.template or b""))
    change = PromptChange(body.name, body.metadata, body.template, body.default_version)
    try:
        stored = await context(request).storage.prompts.change(
            owner(request), prompt_id, change, now_us(), kept=kept(request, prompt_json, prompt_id)
        )
    except NotFound as unknown:
        if unknown.kind == "prompt":
            raise
        raise to_api_error(unknown, param="default_version") from None
    return json_reply(prompt_json(stored))


@router.delete("/{prompt_id}", **documented("Deleted", "prompts.write"))
async def delete_prompt(request: Request, prompt_id: str) -> Response:
    """Remove a prompt with all of its versions; responses that were made with it stay as they are."""
    await context(request).storage.prompts.delete(owner(request), prompt_id)
    return json_reply(orjson.dumps({"id": prompt_id, "object": "prompt.deleted", "deleted": True}))


@router.get("/{prompt_id}/versions", **documented("PromptVersions", "prompts.read", query=PAGE))
async def list_versions(request: Request, prompt_id: str) -> Response:
    """One page of a prompt's versions, newest first unless `order=asc`."""
    args = page_args(request.query_params)
    page = await context(request).storage.prompts.versions(
        owner(request),
        prompt_id,
        limit=args["limit"],
        order=args["order"],
        after=None if args["after"] is None else version_number(args["after"], "after"),
    )
    ids = [str(stored.version) for stored in page.data]
    return json_reply(page_json([*map(prompt_version_json, page.data)], ids, has_more=page.has_more))


@router.get("/{prompt_id}/versions/{version}", **documented("PromptVersion", "prompts.read"))
async def get_version(request: Request, prompt_id: str, version: str) -> Response:
    """One version of a prompt, with its template."""
    number = version_number(version, "version")
    _, stored = await context(request).storage.prompts.version(owner(request), prompt_id, number)
    return json_reply(prompt_version_json(stored))


@router.delete("/{prompt_id}/versions/{version}", **documented("Deleted", "prompts.write"))
async def delete_version(request: Request, prompt_id: str, version: str) -> Response:
    """Remove one version, which must not be the default one."""
    number = version_number(version, "version")
    await context(request).storage.prompts.delete_version(owner(request), prompt_id, number)
    return json_reply(orjson.dumps({"id": version, "object": "prompt.version.deleted", "deleted": True}))


# ------------------------------------------------------------------------------------------------------------


def _reader(request: Request, parse: Callable[..., PromptBody]) -> Callable[[Mapping[str, Any]], PromptBody]:
    """What reads a body as this server is configured to."""
    return partial(_read, parse, context(request).config)


def _read(parse: Callable[..., PromptBody], config: Config, body: Mapping[str, Any]) -> PromptBody:
    """A body, and its template within the size that items may have. Raises ApiError 400."""
    parsed = parse(body, new_id=new_id, unsupported=config.unsupported_tools)
    num_bytes, most = len(parsed.template or b""), config.max_item_bytes
    if num_bytes > most:
        message = f"Invalid 'template': it may have {most} bytes as JSON, this one has {num_bytes}."
        refuse("template", message, "item_too_large")
    return parsed
