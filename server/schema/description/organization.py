"""Describes what administrators send and are told, as JSON Schema for the OpenAPI document.

The objects have the official shapes, with what is an extension marked so. Tests check real replies against
them.
"""

from __future__ import annotations

from collections.abc import Mapping

from server.limits import LimitSet, ModelLimits
from server.schema.description.parts import BOOLEAN, INTEGER, NUMBER, OBJECT, STRING, listed, of, ref
from server.schema.description.responses import field_schema
from server.shapes import Schema

_TIME: Schema = {**INTEGER, "description": "Unix seconds."}
_SCOPES = listed(STRING)
_EXPIRES: Schema = {
    **INTEGER,
    "minimum": 1,
    "description": "An extension. How long the key lives, in seconds.",
}
_USED: Schema = {
    **of({"total_tokens": INTEGER, "total_cost": NUMBER}),
    "description": "An extension. What was used of budgets.",
}
_USED_BY_PROJECT: Schema = {
    **of({"total_tokens": INTEGER, "total_cost": NUMBER, "stored_bytes": INTEGER}),
    "description": "An extension. What was used of budgets, and how many bytes are stored now.",
}
_FOR_EACH_MODEL = ("max_requests_per_1_minute", "max_tokens_per_1_minute", "max_requests_per_1_day")
_OF_A_MODEL: Mapping[str, Schema] = {
    name: {**INTEGER, "minimum": 1} for name in (*_FOR_EACH_MODEL, "max_tokens_per_1_day")
}


def _limit_set() -> Schema:
    """What can be limited, of everything and of single models; null is no limit, and ends one."""

    def members(model: type[LimitSet | ModelLimits]) -> dict[str, Schema]:
        return {name: field_schema(model, name) or {} for name in model.model_fields if name != "models"}

    model = {"type": "object", "properties": members(ModelLimits), "additionalProperties": False}
    models: Schema = {"type": "object", "additionalProperties": model}
    return {
        "type": "object",
        "properties": {**members(LimitSet), "models": models},
        "additionalProperties": False,
    }


def _key(object_name: str, owner: Schema, **more: Schema) -> Schema:
    return of(
        {
            "object": {"const": object_name},
            "id": STRING,
            "name": STRING,
            "redacted_value": STRING,
            "created_at": _TIME,
            "scopes": _SCOPES,
            "limits": ref("Limits"),
            "owner": owner,
            **more,
        },
        {"expires_at": _TIME, "last_used_at": _TIME, "replaces": STRING, "used": _USED},
    )


def _with_value(key: Schema) -> Schema:
    """A key that was just made: the reply is the only place of its value."""
    return {
        **key,
        "properties": {**key["properties"], "value": STRING},
        "required": [*key["required"], "value"],
    }


def _page(of_what: str) -> Schema:
    return of(
        {"object": {"const": "list"}, "data": listed(ref(of_what)), "has_more": BOOLEAN},
        {"first_id": STRING, "last_id": STRING},
    )


def _buckets(result: str) -> Schema:
    bucket = of(
        {
            "object": {"const": "bucket"},
            "start_time": _TIME,
            "end_time": _TIME,
            "results": listed(ref(result)),
        }
    )
    return of(
        {"object": {"const": "page"}, "data": listed(bucket), "has_more": BOOLEAN}, {"next_page": STRING}
    )


def _keys() -> dict[str, Schema]:
    """Projects and keys."""
    account = of(
        {
            "object": {"const": "organization.project.service_account"},
            "id": STRING,
            "name": STRING,
            "role": {"enum": ["owner", "member"]},
            "created_at": _TIME,
        }
    )
    admin_key = _key("organization.admin_api_key", OBJECT)
    project_key = _key(
        "organization.project.api_key",
        of({"type": {"const": "service_account"}, "service_account": ref("ServiceAccount")}),
        owner_project_access={"enum": ["active", "inactive"]},
    )
    made = of(
        {
            "object": {"const": "organization.project.service_account.api_key"},
            "id": STRING,
            "name": STRING,
            "value": STRING,
            "created_at": _TIME,
            "scopes": _SCOPES,
            "limits": ref("Limits"),
        },
        {"expires_at": _TIME, "replaces": STRING, "replaced_accepted_until": _TIME},
    )
    told = {"name": STRING, "scopes": _SCOPES, "expires_in_seconds": _EXPIRES, "limits": ref("Limits")}
    return {
        "Limits": _limit_set(),
        "CreateAdminKey": of({"name": STRING}, {"expires_in_seconds": _EXPIRES}),
        "AdminKey": admin_key,
        "MadeAdminKey": _with_value(admin_key),
        "AdminKeys": _page("AdminKey"),
        "ProjectName": of({"name": STRING}),
        "Project": of(
            {
                "object": {"const": "organization.project"},
                "id": STRING,
                "name": STRING,
                "created_at": _TIME,
                "status": {"enum": ["active", "archived"]},
            },
            {"archived_at": _TIME},
        ),
        "Projects": _page("Project"),
        "ServiceAccount": account,
        "ServiceAccounts": _page("ServiceAccount"),
        "ProjectKeyChange": of({}, told),
        "ProjectKey": project_key,
        "ProjectKeys": _page("ProjectKey"),
        "MadeProjectKey": made,
        "RotateKey": of(
            {},
            {
                "grace_seconds": {**INTEGER, "minimum": 0, "description": "How long the key lives on."},
                "expires_in_seconds": _EXPIRES,
            },
        ),
        "DeletedKey": of({"id": STRING, "object": STRING, "deleted": {"const": True}}),
    }


def _limits() -> dict[str, Schema]:
    return {
        "RateLimit": of(
            {"object": {"const": "project.rate_limit"}, "id": STRING, "model": STRING}, _OF_A_MODEL
        ),
        "RateLimits": _page("RateLimit"),
        "RateLimitChange": of({}, _OF_A_MODEL),
        "ProjectLimits": of(
            {
                "object": {"const": "project.limits"},
                "limits": ref("Limits"),
                "in_force": ref("Limits"),
                "used": _USED_BY_PROJECT,
            }
        ),
        "ProjectLimitsChange": of({"limits": ref("Limits")}),
    }


def _runs() -> dict[str, Schema]:
    run = of(
        {
            "id": STRING,
            "owner": STRING,
            "model": STRING,
            "state": {"enum": ["queued", "running", "waiting", "unowned"]},
            "background": BOOLEAN,
            "created_at": _TIME,
            "output_tokens": INTEGER,
            "attempt": INTEGER,
        },
        {"node": STRING},
    )
    cancelled: dict[str, Schema] = {
        "object": {"const": "organization.run.cancelled"},
        "cancelled": BOOLEAN,
    }
    return {
        "LiveRuns": of({"object": {"const": "list"}, "data": listed(run)}),
        "CancelRun": of(
            {},
            {"owner": {**STRING, "description": "Whose it is, where several owners have one of this id."}},
        ),
        "CancelledRun": of({"id": STRING, **cancelled}),
    }


def _models() -> dict[str, Schema]:
    """The models of the file."""
    texts = listed(STRING)
    state = of(
        {
            "id": STRING,
            "object": {"const": "model.state"},
            "state": {"enum": ["unloaded", "waiting", "loading", "loaded", "failed"]},
            "engine": {"enum": ["local", "upstream", "scripted"]},
            "use": {"enum": ["text", "embedding", "rerank", "classification", "speech"]},
            "child": {**BOOLEAN, "description": "Whether it has a process of its own."},
            "aliases": texts,
            "default": BOOLEAN,
            "pinned": BOOLEAN,
            "waiting": {**INTEGER, "description": "Requests that wait for it to be loaded."},
            "loads": INTEGER,
            "crashes": INTEGER,
            "fallback": texts,
        },
        {
            "pid": INTEGER,
            "idle_s": {"type": "number"},
            "memory_bytes": INTEGER,
            "failure": STRING,
            "deprecation_date": {**STRING, "format": "date"},
            "canary": of({"to": STRING, "percent": {"type": "number"}, "owners": texts}),
        },
    )
    return {
        "ModelState": state,
        "ModelStates": of({"object": {"const": "list"}, "data": listed(ref("ModelState"))}),
    }


def _books() -> dict[str, Schema]:
    """The audit log, usage and costs."""
    counted = ("input_tokens", "input_cached_tokens", "output_tokens", "output_reasoning_tokens")
    groups = ("project_id", "user_id", "api_key_id", "model", "service_tier", "line_item", "api_source")
    person = {
        **STRING,
        "description": "An extension. A digest of the person whom requests named by `safety_identifier` or "
        "`user`; null for requests that named nobody, or somebody who is not told apart.",
    }
    return {
        "AuditLog": of(
            {
                "id": STRING,
                "type": {**STRING, "description": "The details stand in the member of this name."},
                "effective_at": _TIME,
                "actor": of(
                    {"type": {"enum": ["session", "api_key"]}}, {"session": OBJECT, "api_key": OBJECT}
                ),
                "antiphon": {
                    **of({"number": INTEGER, "hash": STRING}, {"request_id": STRING, "ip_address": STRING}),
                    "description": "An extension.",
                },
            },
            {"project": of({"id": STRING})},
        ),
        "AuditLogs": _page("AuditLog"),
        "AuditVerification": of(
            {
                "object": {"const": "organization.audit_log.verification"},
                "number": INTEGER,
                "hash": STRING,
            },
            {"broken": INTEGER, "hash_of": STRING},
        ),
        "UsageResult": of(
            {"object": STRING},
            {
                **dict.fromkeys((*counted, "num_model_requests", "num_sessions", "num_requests"), INTEGER),
                **dict.fromkeys(groups, STRING),
                "batch": BOOLEAN,
                "safety_identifier": person,
            },
        ),
        "UsagePage": _buckets("UsageResult"),
        "CostsResult": of(
            {
                "object": {"const": "organization.costs.result"},
                "amount": of({"value": NUMBER, "currency": STRING}),
            },
            {
                "quantity": NUMBER,
                "quantity_unit": STRING,
                **dict.fromkeys(("project_id", "user_id", "api_key_id", "line_item", "api_source"), STRING),
                "safety_identifier": person,
            },
        ),
        "CostsPage": _buckets("CostsResult"),
    }


def organization_components() -> Mapping[str, Schema]:
    """The schemas of this family, by name."""
    return {**_limits(), **_keys(), **_runs(), **_models(), **_books()}
