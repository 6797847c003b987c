"""/v1/organization/projects: the owners, which the API calls projects, and their one account each."""

from __future__ import annotations

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.access import ADMIN
from server.admin import projects
from server.errors import ApiError, invalid_value
from server.http import actor, context, flag, json_reply, life, read_body
from server.routes.documented import documented, needs
from server.routes.organization import asked
from storage import NotFound, Storage, StoredOwner

PATH = "/v1/organization/projects"

router = APIRouter(prefix=PATH, tags=["Organization"])


@router.get("", **documented("Projects", ADMIN, query=("limit", "after", "include_archived")))
async def list_projects(request: Request) -> Response:
    """One page, oldest first; archived ones with `include_archived=true`."""
    query = request.query_params
    page = await context(request).storage.list_owners(
        limit=asked.limit(query), after=asked.after(query), archived=flag(query, "include_archived")
    )
    return asked.page([projects.project(owner) for owner in page.data], has_more=page.has_more)


@router.post("", **documented("Project", ADMIN, body="ProjectName"))
async def create_project(request: Request) -> Response:
    """Make an owner that has no key yet."""
    body = await read_body(request, only=("name",))
    made = await projects.create(context(request).storage, actor(request), name=asked.name(body))
    return json_reply(orjson.dumps(made))


@router.get("/{project_id}", **documented("Project", ADMIN))
async def get_project(request: Request, project_id: str) -> Response:
    """One owner."""
    return json_reply(orjson.dumps(projects.project(await context(request).storage.get_owner(project_id))))


@router.post("/{project_id}", **documented("Project", ADMIN, body="ProjectName"))
async def update_project(request: Request, project_id: str) -> Response:
    """Give an owner another name."""
    body = await read_body(request, only=("name",))
    storage = context(request).storage
    changed = await projects.rename(storage, actor(request), project_id, name=asked.name(body))
    return json_reply(orjson.dumps(changed))


@router.post("/{project_id}/archive", **documented("ArchivedProject", ADMIN))
async def archive_project(request: Request, project_id: str) -> Response:
    """Revoke an owner's keys, for good; its data stays. The reply also says whether that opens or locks the
    server (extensions)."""
    await read_body(request, allow_empty=True, only=())
    storage, accepted = context(request).storage, life(request).keys
    ending = [
        key.id for key in await storage.list_keys() if key.owner == project_id and key.revoked_at is None
    ]
    try:
        archived = await projects.archive(storage, actor(request), project_id)
    except projects.NeededOwner as error:
        raise invalid_value("project_id", f"{error}.") from None
    accepted.forget()
    return json_reply(orjson.dumps({**archived, **await accepted.without(*ending)}))


@router.get(
    "/{project_id}/service_accounts", **documented("ServiceAccounts", ADMIN, query=("limit", "after"))
)
async def list_service_accounts(request: Request, project_id: str) -> Response:
    """The one account that all keys of a project belong to."""
    asked.limit(request.query_params)
    owner = await context(request).storage.get_owner(project_id)
    found = [] if asked.after(request.query_params) else [projects.service_account(owner)]
    return asked.page(found, has_more=False)


@router.get("/{project_id}/service_accounts/{account_id}", **documented("ServiceAccount", ADMIN))
async def get_service_account(request: Request, project_id: str, account_id: str) -> Response:
    """The one account of a project, by the project's own id."""
    owner = await account(context(request).storage, project_id, account_id)
    return json_reply(orjson.dumps(projects.service_account(owner)))


@router.post("/{project_id}/service_accounts", **needs(ADMIN), include_in_schema=False)
@router.post("/{project_id}/service_accounts/{account_id}", **needs(ADMIN), include_in_schema=False)
@router.delete("/{project_id}/service_accounts/{account_id}", **needs(ADMIN), include_in_schema=False)
async def change_service_accounts(request: Request, project_id: str, account_id: str = "") -> Response:
    """There is one account for as long as there is the project. ApiError 404 that says what to do instead."""
    await context(request).storage.get_owner(project_id)
    raise ApiError(
        404,
        "A project has one service account, whose id is the project's, and which is neither made, changed "
        f"nor deleted by itself. Make and revoke keys of it, at '{PATH}/{project_id}/api_keys'.",
        code="not_found",
    )


async def account(storage: Storage, project_id: str, account_id: str) -> StoredOwner:
    """The owner whose one account this is. NotFound."""
    owner = await storage.get_owner(project_id)
    if account_id != project_id:
        raise NotFound("service account", account_id)
    return owner
