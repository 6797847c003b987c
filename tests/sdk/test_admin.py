"""The official SDK, unmodified, administers: projects, their keys, administrators' keys, the audit log."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import httpx2
import pytest
from openai import (
    AsyncOpenAI,
    AuthenticationError,
    BadRequestError,
    InternalServerError,
    NotFoundError,
    PermissionDeniedError,
)

from server.access import ADMIN, OPERATOR
from server.access.accesses import NOTED_S
from server.admin import keys
from storage import AuditEntry, AuditFilter, StorageUnavailable
from tests.support.running import Running, http_client

MODEL = "antiphon-scripted"


def client_of(running: Running, key: str) -> AsyncOpenAI:
    return AsyncOpenAI(
        api_key=key,
        admin_api_key=key,
        base_url=f"{running.base_url}/v1",
        http_client=httpx2.AsyncClient(transport=httpx2.ASGITransport(running.app)),
        max_retries=0,
    )


@pytest.fixture
async def admin(server_app: Running) -> AsyncIterator[AsyncOpenAI]:
    """The SDK with an administrator's key, made as `antiphon keys create --scope admin` makes it."""
    made = await keys.make(server_app.context.storage, OPERATOR, name="ops", scopes=(ADMIN,))
    server_app.life.keys.forget()
    async with client_of(server_app, made.key) as client:
        yield client


async def test_a_team_gets_its_keys(admin: AsyncOpenAI, server_app: Running) -> None:
    organization = admin.admin.organization
    team = await organization.projects.create(name="Sales")
    assert (team.object, team.name, team.status) == ("organization.project", "Sales", "active")
    team = await organization.projects.update(team.id, name="Buying")
    assert await organization.projects.retrieve(team.id) == team and team.name == "Buying"
    assert team.id in [each.id async for each in organization.projects.list(limit=1)]

    accounts = organization.projects.service_accounts
    [account] = [each async for each in accounts.list(team.id)]
    assert await accounts.retrieve(account.id, project_id=team.id) == account
    made: Any = [
        await accounts.api_keys.create(
            account.id,
            project_id=team.id,
            name=name,
            scopes=["responses.write", "models"],
            expires_in_seconds=3600,
        )
        for name in ("laptop", "server")
    ]
    assert made[0].expires_at == made[0].created_at + 3600
    async with client_of(server_app, made[0].value) as laptop:
        response = await laptop.responses.create(model=MODEL, input="say hello")
        assert response.output_text == "hello"
        with pytest.raises(PermissionDeniedError, match=r"Missing scopes: responses\.read"):
            await laptop.responses.retrieve(response.id)
        with pytest.raises(PermissionDeniedError, match="Missing scopes: admin"):
            await laptop.admin.organization.projects.list()

        api_keys = organization.projects.api_keys
        listed = [key async for key in api_keys.list(team.id, limit=1)]
        assert [key.name for key in listed] == ["laptop", "server"]
        assert made[0].value not in str(listed) and listed[0].redacted_value.endswith(made[0].value[-4:])
        assert listed[0].owner.service_account is not None
        assert listed[0].owner.service_account.name == "Buying"
        changed: Any = await api_keys.update(made[0].id, project_id=team.id, scopes=["api.all.read"])
        assert changed.scopes == ["all.read"]
        assert (await laptop.responses.retrieve(response.id)).output_text == "hello"
        with pytest.raises(BadRequestError, match="there is no scope") as refused:
            await api_keys.update(made[0].id, project_id=team.id, scopes=["everything"])
        assert refused.value.param == "scopes"

        deleted = await api_keys.delete(made[0].id, project_id=team.id)
        assert (deleted.id, deleted.deleted) == (made[0].id, True)
        with pytest.raises(AuthenticationError):
            await laptop.responses.retrieve(response.id)
    with pytest.raises(NotFoundError):
        await api_keys.retrieve(made[0].id, project_id=team.id)
    kept = await api_keys.retrieve(made[1].id, project_id=team.id)
    assert kept.last_used_at is None
    with pytest.raises(NotFoundError):  # of another project
        await api_keys.retrieve(made[1].id, project_id="local")

    archived = await organization.projects.archive(team.id)
    assert archived.status == "archived" and archived.archived_at is not None
    async with client_of(server_app, made[1].value) as server:
        with pytest.raises(AuthenticationError):
            await server.models.list()
    assert team.id not in [each.id async for each in organization.projects.list()]
    assert team.id in [each.id async for each in organization.projects.list(include_archived=True)]
    with pytest.raises(BadRequestError, match="is archived"):
        await accounts.api_keys.create(account.id, project_id=team.id)


async def test_keys_of_administrators(admin: AsyncOpenAI, server_app: Running) -> None:
    admin_keys = admin.admin.organization.admin_api_keys
    made = await admin_keys.create(name="second", expires_in_seconds=60)
    assert made.object == "organization.admin_api_key" and made.expires_at == made.created_at + 60
    assert [key.name async for key in admin_keys.list(limit=1)] == ["ops", "second"]
    assert [key.name async for key in admin_keys.list(order="desc")] == ["second", "ops"]
    found = await admin_keys.retrieve(made.id)
    assert found.name == "second" and found.redacted_value.endswith(made.value[-4:])
    async with client_of(server_app, made.value) as second:
        assert [key.id async for key in second.admin.organization.admin_api_keys.list()][1] == made.id
        with pytest.raises(PermissionDeniedError, match=r"Missing scopes: responses\.write"):
            await second.responses.create(model=MODEL, input="say hello")
        assert (await admin_keys.delete(made.id)).deleted
        with pytest.raises(AuthenticationError):
            await second.admin.organization.admin_api_keys.retrieve(made.id)
    with pytest.raises(NotFoundError):
        await admin_keys.retrieve(made.id)
    for name in ("", "a\0b"):
        with pytest.raises(BadRequestError) as refused:
            await admin_keys.create(name=name)
        assert refused.value.param == "name"


async def test_the_audit_log(admin: AsyncOpenAI) -> None:
    organization = admin.admin.organization
    team = await organization.projects.create(name="Sales")
    key = await organization.projects.service_accounts.api_keys.create(
        team.id, project_id=team.id, name="laptop", scopes=["files.read"]
    )
    await organization.projects.api_keys.delete(key.id, project_id=team.id)
    logs: list[Any] = [log async for log in organization.audit_logs.list(limit=2)]
    assert [log.type for log in logs] == [
        "admin.accessed", "api_key.deleted", "api_key.created", "project.created", "api_key.created",
        "models.updated",
    ]  # fmt: skip
    logs = logs[1:5]
    [ops] = [key async for key in organization.admin_api_keys.list()]
    assert {log.actor.api_key.id for log in logs[:3]} == {ops.id}
    assert logs[3].actor.type == "session" and logs[3].actor.session.user.id == "operator"
    assert (logs[1].api_key_created.id, logs[1].api_key_created.data.scopes) == (key.id, ["files.read"])
    assert logs[2].project_created.id == team.id and logs[0].project.id == team.id

    async def ids(**wanted: Any) -> list[str]:
        return [log.id async for log in organization.audit_logs.list(**wanted)]

    everything = [log.id for log in logs]
    changes = ["api_key.deleted", "api_key.created", "project.created"]
    assert await ids(event_types=["project.created", "api_key.deleted"]) == [everything[0], everything[2]]
    assert await ids(actor_ids=[ops.id], event_types=changes) == everything[:3]
    assert await ids(resource_ids=[key.id]) == everything[:2]
    assert await ids(project_ids=[team.id]) == everything[:3]
    assert await ids(actor_emails=["a@example.com"]) == []
    newest, oldest = logs[0].effective_at, logs[3].effective_at
    within = {"gte": oldest, "lte": newest}
    assert await ids(effective_at=within, event_types=changes) == everything
    assert await ids(effective_at={"gt": newest}, event_types=changes) == []
    assert await ids(effective_at={"lt": oldest}, event_types=changes) == []
    before = await organization.audit_logs.list(before=everything[2], event_types=cast(Any, changes))
    assert [log.id for log in before.data] == everything[:2]
    with pytest.raises(NotFoundError):
        await organization.audit_logs.list(after="nope")


async def test_what_an_administrator_reads_is_in_the_audit_log_once_an_hour(
    admin: AsyncOpenAI, server_app: Running
) -> None:
    organization = admin.admin.organization
    team = await organization.projects.create(name="Sales")
    for _ in range(2):
        await organization.projects.retrieve(team.id)
        await organization.usage.completions(start_time=1)
        with pytest.raises(NotFoundError):
            await organization.projects.retrieve("own_nobody")

    async def reads() -> list[tuple[str, str | None]]:
        found: list[Any] = [
            log async for log in organization.audit_logs.list(event_types=cast(Any, ["admin.accessed"]))
        ]
        [ops] = {log.actor.api_key.id for log in found}
        assert ops.startswith("key_") and all(log.antiphon["ip_address"] for log in found)
        return [(log.model_extra["admin.accessed"]["id"], log.project and log.project.id) for log in found]

    path = "/v1/organization"
    expected = [
        (f"{path}/audit_logs", None),
        (f"{path}/projects/own_nobody", "own_nobody"),
        (f"{path}/usage/completions", None),
        (f"{path}/projects/{team.id}", team.id),
    ]
    assert await reads() == expected
    accesses = server_app.life.accesses
    accesses._noted = {read: until - NOTED_S for read, until in accesses._noted.items()}
    await organization.projects.retrieve(team.id)
    assert await reads() == [expected[0], expected[3], *expected]


async def test_reads_of_others_are_no_administrator_s(server_app: Running) -> None:
    """Those of an owner's own usage, and of whoever has the admin token."""
    storage = server_app.context.storage
    made = await keys.make(storage, OPERATOR, name="x", owner="team")
    for token in (made.key, server_app.life.admin_token):
        async with http_client(server_app, authorization=f"Bearer {token}") as client:
            reply = await client.get("/v1/organization/usage/completions?start_time=1")
            assert reply.status_code == 200
    assert not (await storage.list_audit(AuditFilter(actions=("admin.accessed",)), limit=9)).data


async def test_a_read_that_cannot_be_written_down_is_not_shown(
    admin: AsyncOpenAI, server_app: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(_: AuditEntry) -> None:
        raise StorageUnavailable("the disk is full")

    monkeypatch.setattr(server_app.context.storage, "add_audit", full)
    with pytest.raises(InternalServerError) as refused:
        await admin.admin.organization.projects.list()
    assert refused.value.status_code == 503


async def test_rate_limits_of_a_project(admin: AsyncOpenAI) -> None:
    rates = admin.admin.organization.projects.rate_limits
    team = await admin.admin.organization.projects.create(name="Sales")
    first: Any
    [first] = [each async for each in rates.list_rate_limits(team.id)]
    assert (first.object, first.id, first.model) == ("project.rate_limit", f"rl-{MODEL}", MODEL)
    assert first.max_requests_per_1_minute is None, "nothing is limited at first"
    changed = await rates.update_rate_limit(
        first.id, project_id=team.id, max_requests_per_1_minute=5, max_tokens_per_1_minute=900
    )
    again = await rates.update_rate_limit(first.id, project_id=team.id, max_requests_per_1_day=7)
    assert (changed.max_requests_per_1_minute, changed.max_tokens_per_1_minute) == (5, 900)
    assert (again.max_requests_per_1_minute, again.max_requests_per_1_day) == (5, 7)
    assert [each async for each in rates.list_rate_limits(team.id, limit=1)] == [again]
    assert [each async for each in rates.list_rate_limits(team.id, after=again.id)] == []
    told: list[Any] = [
        log async for log in admin.admin.organization.audit_logs.list(event_types=["rate_limit.updated"])
    ]
    assert [(log.rate_limit_updated.id, log.project.id) for log in told] == [(first.id, team.id)] * 2
    asked = told[1].rate_limit_updated.changes_requested
    assert (asked.max_requests_per_1_minute, asked.max_requests_per_1_day) == (5, None)
    assert told[0].rate_limit_updated.changes_requested.max_requests_per_1_day == 7
    with pytest.raises(BadRequestError, match="greater than or equal to 1") as refused:
        await rates.update_rate_limit(first.id, project_id=team.id, max_tokens_per_1_minute=0)
    assert refused.value.param == "max_tokens_per_1_minute"
    for unknown in ("rl-other", MODEL):
        with pytest.raises(NotFoundError):
            await rates.update_rate_limit(unknown, project_id=team.id, max_requests_per_1_minute=5)
    with pytest.raises(NotFoundError):
        await rates.list_rate_limits(team.id, after="rl-other")
    path = f"/organization/projects/{team.id}/limits"
    said: Any = await admin.post(path, body={"limits": {"stored_bytes": 9}}, cast_to=object)
    rows = {"requests_per_minute": 5, "tokens_per_minute": 900, "requests_per_day": 7}
    assert said["limits"] == {"stored_bytes": 9, "models": {MODEL: rows}}
    assert await admin.get(path, cast_to=object) == said
    with pytest.raises(BadRequestError, match="did you mean 'stored_bytes'"):
        await admin.post(path, body={"limits": {"store_bytes": 9}}, cast_to=object)


async def test_a_key_has_limits_of_its_own(admin: AsyncOpenAI) -> None:
    projects = admin.admin.organization.projects
    team = await projects.create(name="Sales")
    made: Any = await admin.post(
        f"/organization/projects/{team.id}/api_keys", body={"limits": {"tokens_per_day": 5}}, cast_to=object
    )
    changed: Any = await projects.api_keys.update(
        made["id"], project_id=team.id, extra_body={"limits": {"requests_per_minute": 3}}
    )
    assert changed.limits == {"tokens_per_day": 5, "requests_per_minute": 3}
    with pytest.raises(BadRequestError) as refused:
        await projects.api_keys.update(made["id"], project_id=team.id, extra_body={"limits": {"x": 3}})
    assert refused.value.param == "limits"
    [told] = [
        each
        async for each in admin.admin.organization.audit_logs.list(resource_ids=[made["id"]])
        if each.type == "api_key.updated"
    ]
    assert "requests_per_minute" in told.model_dump_json()
