"""Builds JSON replies: objects of conversations, files, containers and prompts, and lists, of what is stored.

Stored JSON is put into a reply as it is, without being parsed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from starlette.responses import Response

from server.schema import variables_of
from storage import (
    ContainerFile,
    StoredChatCompletion,
    StoredContainer,
    StoredConversation,
    StoredFile,
    StoredPrompt,
    StoredPromptVersion,
)
from tools import DATA


def json_reply(body: bytes, headers: Mapping[str, str] | None = None) -> Response:
    """A reply of ready JSON."""
    return Response(body, headers=headers, media_type="application/json")


def conversation_json(stored: StoredConversation) -> bytes:
    """The official ConversationResource, with members of ours (extensions): its status, when it was used
    last, a title where it has one, the response that is being made in it, and of a fork what it was forked
    from."""
    shown = {
        "id": stored.id,
        "object": "conversation",
        "created_at": stored.created_at // 1_000_000,
        "updated_at": max(stored.used_at, stored.created_at) // 1_000_000,
        "status": "active" if stored.archived_at is None else "archived",
        "metadata": orjson.Fragment(stored.metadata),
    }
    if stored.title is not None:
        shown["title"] = stored.title
    if stored.active_response_id is not None:
        shown["active_response_id"] = stored.active_response_id
    if stored.parent_id is not None:
        shown["forked_from"] = {"conversation_id": stored.parent_id, "after": stored.parent_item}
    return orjson.dumps(shown)


def file_json(stored: StoredFile) -> bytes:
    """The official File object. Its `status` is deprecated, and required."""
    shown = {
        "id": stored.id,
        "object": "file",
        "bytes": stored.num_bytes,
        "created_at": stored.created_at // 1_000_000,
        "filename": stored.filename,
        "purpose": stored.purpose,
        "status": "processed",
    }
    if stored.expires_at is not None:
        shown["expires_at"] = stored.expires_at // 1_000_000
    return orjson.dumps(shown)


def container_json(container: StoredContainer) -> bytes:
    """The official ContainerResource."""
    shown: dict[str, Any] = {
        "id": container.id,
        "object": "container",
        "name": container.name,
        "created_at": container.created_at // 1_000_000,
        "status": "running",
        "last_active_at": container.last_active_at // 1_000_000,
        "expires_after": {
            "anchor": "last_active_at",
            "minutes": container.lifetime // (60_000_000),
        },
        "memory_limit": container.memory_limit,
        "network_policy": {"type": "disabled"},
    }
    return orjson.dumps(shown)


def container_file_json(file: ContainerFile) -> bytes:
    """The official ContainerFileResource."""
    shown = {
        "id": file.id,
        "object": "container.file",
        "container_id": file.container_id,
        "created_at": file.created_at // 1_000_000,
        "bytes": file.num_bytes,
        "path": f"{DATA}/{file.path}",
        "source": file.source,
    }
    return orjson.dumps(shown)


def stored_completion_json(stored: StoredChatCompletion) -> bytes:
    """The official object of a stored chat completion: what its client was given, and its metadata."""
    return stored.body[:-1] + b',"metadata":' + stored.metadata + b"}"


def page_json(bodies: Sequence[bytes], ids: Sequence[str], *, has_more: bool) -> bytes:
    """The list object of one page: JSON texts in order, and their ids. An empty page has null ids."""
    ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None, "has_more": has_more}
    return b'{"object":"list","data":[' + b",".join(bodies) + b"]," + orjson.dumps(ends)[1:]


def prompt_json(stored: StoredPrompt) -> bytes:
    """A prompt template without its versions (extension)."""
    shown = {
        "id": stored.id,
        "object": "prompt",
        "created_at": stored.created_at // 1_000_000,
        "name": stored.name,
        "metadata": orjson.Fragment(stored.metadata),
        "default_version": str(stored.default_version),
        "latest_version": str(stored.latest_version),
    }
    return orjson.dumps(shown)


def prompt_version_json(stored: StoredPromptVersion) -> bytes:
    """One version of a prompt template, with the names of its variables (extension)."""
    shown = {
        "id": str(stored.version),
        "object": "prompt.version",
        "prompt_id": stored.prompt_id,
        "version": str(stored.version),
        "created_at": stored.created_at // 1_000_000,
        "template": orjson.Fragment(stored.body),
        "variables": variables_of(orjson.loads(stored.body)),
    }
    return orjson.dumps(shown)
