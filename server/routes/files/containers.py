"""The routes under /v1/containers: containers of code, and their files."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import NoReturn

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.clock import now_us
from server.containers import (
    LIFETIME,
    SECONDS,
    cell_limits,
    copied,
    exceeds,
    memory_limit,
    new_file,
    path_of,
    room_of,
    session_of,
    wanted_files,
)
from server.errors import ApiError, to_api_error
from server.http import (
    choice,
    container_file_json,
    container_json,
    context,
    integer,
    json_reply,
    owner,
    page_args,
    page_json,
    principal,
    query_text,
    read_body,
    require_stored_bytes,
)
from server.http.contents import IMAGES, content_reply, load_form, takes_form
from server.ignored import ignore
from server.items import MEMORY_LIMIT, network_policy
from server.routes.documented import documented
from server.schema import array, missing, refuse, text
from server.shapes import name_others, one_of, record, whole
from storage import ContainerFile, ContainerFull, ContainerRoom, Page, PathTaken, StoredContainer

router = APIRouter(prefix="/v1/containers", tags=["Containers"])

MAX_MINUTES = 24 * 60
MAX_FILES = 50

_FIELDS = ("name", "file_ids", "expires_after", "memory_limit", "network_policy")
_EXPIRY = record({"anchor": one_of("last_active_at"), "minutes": whole(1, MAX_MINUTES)})
_PAGE = ("limit", "order", "after")


@router.post("", **documented("Container", "containers.write", body="CreateContainer"))
async def create_container(request: Request) -> Response:
    """Make a container, with copies of files that were uploaded before, where a sandbox runs code."""
    if (why := context(request).runs.intake.lacking([{"type": "code_interpreter"}]).get(0)) is not None:
        raise ApiError(400, f"This server makes no containers: {why}.", code="unsupported_tool")
    body = await read_body(request)
    name_others(body, _FIELDS)
    if body.get("skills"):
        refuse("skills", "Invalid 'skills': containers have none here.", "unsupported_parameter")
    name = text(1, 256)(body.get("name") or missing("name"), "name")
    wanted: list[str] = array(text(1), 0, MAX_FILES)(body.get("file_ids") or [], "file_ids")
    lifetime = LIFETIME
    if body.get("expires_after") is not None:
        lifetime = _EXPIRY(body["expires_after"], "expires_after")["minutes"] * 60 * SECONDS
    asked = body.get("memory_limit")
    if asked is not None:
        MEMORY_LIMIT(asked, "memory_limit")
    limits = cell_limits(context(request).config)
    if exceeds(asked, limits):
        ignore("memory_limit")
    memory = memory_limit(asked, limits)
    if body.get("network_policy") is not None:
        network_policy(body["network_policy"], "network_policy")
    now, who, id = now_us(), owner(request), f"cntr_{secrets.token_hex(24)}"
    made = StoredContainer(id, who, name, now, now, lifetime, memory, given=tuple(dict.fromkeys(wanted)))
    spent = session_of(who, principal(request).key_id, now)
    async with _copies(request, id, wanted, "file_ids") as copies:
        with _refusing("file_ids"):
            await context(request).storage.containers.create(
                made, [*copies.values()], room=_room(request), spent=spent
            )
    return json_reply(container_json(made))


@router.get("", **documented("Containers", "containers.read", query=(*_PAGE, "name")))
async def list_containers(request: Request) -> Response:
    """One page of the containers, newest first unless `order=asc`."""
    query = request.query_params
    page = await context(request).storage.containers.list(
        owner(request), now=now_us(), name=query_text(query, "name"), **page_args(query)
    )
    bodies, ids = [container_json(one) for one in page.data], [one.id for one in page.data]
    return json_reply(page_json(bodies, ids, has_more=page.has_more))


@router.get("/{container_id}", **documented("Container", "containers.read"))
async def get_container(request: Request, container_id: str) -> Response:
    """What is known of a container."""
    found = await context(request).storage.containers.get(owner(request), container_id, now_us())
    return json_reply(container_json(found))


@router.delete("/{container_id}", **documented("Deleted", "containers.write"))
async def delete_container(request: Request, container_id: str) -> Response:
    """Remove a container with its files and its session."""
    here, now = context(request), now_us()
    await here.storage.containers.delete(owner(request), container_id, now)
    if here.cells is not None:
        await here.cells.end(container_id)
    return json_reply(orjson.dumps({"id": container_id, "object": "container.deleted", "deleted": True}))


# ------------------------------------------------------------------------------------------------------------
# Files


@router.post(
    "/{container_id}/files",
    **documented("ContainerFile", "containers.write", body="CreateContainerFile"),
)
async def create_file(request: Request, container_id: str) -> Response:
    """Put a file into a container: a form with `file`, or the `file_id` of one that was uploaded before."""
    storage, who, now = context(request).storage, owner(request), now_us()
    await storage.containers.get(who, container_id, now)
    if takes_form(request):
        form = await load_form(request)
        name_others({**form.fields, **form.files}, ("file", "file_id"))
        if "file_id" not in form.fields:
            if not form.files:
                _name_a_file()
            received = form.file("file")
            path, blob = path_of(received.filename, "file"), received.blob
            origin = secrets.token_hex(16)
            file = new_file(container_id, who, path, blob.num_bytes, blob.digest, now, "user", origin)
            return await _put(request, file, "file")
        file_id = form.fields["file_id"]
    else:
        body = await read_body(request)
        name_others(body, ("file_id",))
        file_id = text(1)(body.get("file_id") or _name_a_file(), "file_id")
    async with _copies(request, container_id, [file_id], "file_id") as copies:
        return await _put(request, copies[file_id], "file_id")


def _name_a_file() -> NoReturn:
    message = "Missing required parameter: send a form with 'file', or the 'file_id' of an uploaded file."
    refuse("file", message, "missing_required_parameter")


async def _put(request: Request, file: ContainerFile, param: str) -> Response:
    with _refusing(param):
        await context(request).storage.containers.add_file(file, _room(request))
    return json_reply(container_file_json(file))


@router.get("/{container_id}/files", **documented("ContainerFiles", "containers.read", query=_PAGE))
async def list_files(request: Request, container_id: str) -> Response:
    """One page of the files of a container, newest first unless `order=asc`."""
    query = request.query_params
    limit = integer(query, "limit", minimum=1, maximum=100) or 20
    order = choice(query, "order", ("asc", "desc")) or "desc"
    files = [*await context(request).storage.containers.files(owner(request), container_id, now_us())]
    if order == "desc":
        files.reverse()
    if (after := query_text(query, "after")) is not None:
        at = next((at for at, file in enumerate(files) if file.id == after), None)
        if at is None:
            raise ApiError(404, f"File with id '{after}' not found.", code="not_found", param="after")
        files = files[at + 1 :]
    page = Page(tuple(files[:limit]), len(files) > limit)
    bodies, ids = [container_file_json(file) for file in page.data], [file.id for file in page.data]
    return json_reply(page_json(bodies, ids, has_more=page.has_more))


@router.get("/{container_id}/files/{file_id}", **documented("ContainerFile", "containers.read"))
async def get_file(request: Request, container_id: str, file_id: str) -> Response:
    """What is known of a file of a container, without its content."""
    return json_reply(container_file_json(await _file(request, container_id, file_id)))


@router.get(
    "/{container_id}/files/{file_id}/content",
    **documented("", "containers.read", texts=("application/octet-stream", *IMAGES)),
)
async def get_content(request: Request, container_id: str, file_id: str) -> Response:
    """The bytes of a file, or the range of them that the header `Range` asks for; images as what they are."""
    file = await _file(request, container_id, file_id)
    name = file.path.rpartition("/")[2]
    return await content_reply(request, file.digest, file.num_bytes, name, shows_images=True)


@router.delete("/{container_id}/files/{file_id}", **documented("Deleted", "containers.write"))
async def delete_file(request: Request, container_id: str, file_id: str) -> Response:
    """Remove a file from a container."""
    await context(request).storage.containers.remove_file(owner(request), container_id, file_id, now_us())
    return json_reply(orjson.dumps({"id": file_id, "object": "container.file.deleted", "deleted": True}))


# ------------------------------------------------------------------------------------------------------------


async def _file(request: Request, container_id: str, file_id: str) -> ContainerFile:
    return await context(request).storage.containers.file(owner(request), container_id, file_id, now_us())


@asynccontextmanager
async def _copies(
    request: Request, container_id: str, file_ids: Sequence[str], path: str
) -> AsyncGenerator[dict[str, ContainerFile]]:
    """A container's copies of files that were uploaded before, by their ids, for a block that commits them.
    path: the field that has the list of ids, or the only one. ApiError 400, 404, 429."""
    storage, who, now = context(request).storage, owner(request), now_us()
    try:
        wanted = await wanted_files(storage, who, file_ids, path, now)
        await require_stored_bytes(request, sum(file.num_bytes for file in wanted.values()))
        async with copied(storage, container_id, who, wanted, path, now) as copies:
            yield copies
    except ApiError as fault:
        if path == "file_id" and fault.param == "file_id[0]":
            fault.param = path  # it is no list
        raise


def _room(request: Request) -> ContainerRoom:
    return room_of(cell_limits(context(request).config))


@contextmanager
def _refusing(param: str) -> Iterator[None]:
    """Files that a container cannot take are refused by the name of the field that brings them."""
    try:
        yield
    except (ContainerFull, PathTaken) as fault:
        raise to_api_error(fault, param=param) from None
