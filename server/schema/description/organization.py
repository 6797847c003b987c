"""Describes what administrators send and are told, as JSON Schema for the OpenAPI document.

The objects have the official shapes, with what is an extension marked so. Tests check real replies against
them.
"""

from __future__ import annotations

from collections.abc import Mapping

from server.limits import LimitSet, ModelLimits
from server.schema.description.parts import (
    BOOLEAN,
    INTEGER,
    NUMBER,
    STRING,
    listed,
    mapped,
    nullable,
    of,
    page_of,
    ref,
    with_others,
)
from server.schema.description.responses import field_schema
from server.shapes import Schema, or_null
from server.usage import COSTS_GROUP_BY, KINDS

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
_END: dict[str, Schema] = {
    "opens_server": {
        **BOOLEAN,
        "description": "An extension. Whether the server needs no key any more, once this is revoked.",
    },
    "locks_server": {
        **BOOLEAN,
        "description": "An extension. Whether a key is needed and none accepted, once this is revoked.",
    },
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
    return {
        "type": "object",
        "properties": {**members(LimitSet), "models": mapped(model)},
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
            **nullable({"expires_at": _TIME, "last_used_at": _TIME, "replaces": STRING}),
            **more,
        },
        {"used": _USED, **_END},
    )


def _with_value(key: Schema) -> Schema:
    """A key that was just made: the reply is the only place of its value."""
    return {
        **key,
        "properties": {**key["properties"], "value": STRING},
        "required": [*key["required"], "value"],
    }


def _buckets(result: str) -> Schema:
    bucket = of(
        {
            "object": {"const": "bucket"},
            "start_time": _TIME,
            "end_time": _TIME,
            "results": listed(ref(result)),
        }
    )
    ends = {"has_more": BOOLEAN, "next_page": or_null(STRING)}
    return of({"object": {"const": "page"}, "data": listed(bucket), **ends})


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
    admin_key = _key(
        "organization.admin_api_key",
        of(
            {
                "type": {"const": "user"},
                "object": {"const": "organization.user"},
                "id": STRING,
                "name": STRING,
                "role": {"const": "owner"},
                "created_at": _TIME,
            }
        ),
    )
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
            **nullable({"expires_at": _TIME, "replaces": STRING}),
        },
        {"replaced_accepted_until": _TIME},
    )
    project: dict[str, Schema] = {
        "object": {"const": "organization.project"},
        "id": STRING,
        "name": STRING,
        "created_at": _TIME,
        "status": {"enum": ["active", "archived"]},
        "archived_at": or_null(_TIME),
    }
    told = {"name": STRING, "scopes": _SCOPES, "expires_in_seconds": _EXPIRES, "limits": ref("Limits")}
    return {
        "Limits": _limit_set(),
        "CreateAdminKey": of({"name": STRING}, {"expires_in_seconds": _EXPIRES}),
        "AdminKey": admin_key,
        "MadeAdminKey": _with_value(admin_key),
        "AdminKeys": page_of(ref("AdminKey")),
        "ProjectName": of({"name": STRING}),
        "Project": of(project),
        "ArchivedProject": of({**project, **_END}),
        "Projects": page_of(ref("Project")),
        "ServiceAccount": account,
        "ServiceAccounts": page_of(ref("ServiceAccount")),
        "ProjectKeyChange": of({}, told),
        "ProjectKey": project_key,
        "ProjectKeys": page_of(ref("ProjectKey")),
        "MadeProjectKey": made,
        "RotateKey": of(
            {},
            {
                "grace_seconds": {**INTEGER, "minimum": 0, "description": "How long the key lives on."},
                "expires_in_seconds": _EXPIRES,
            },
        ),
        "DeletedKey": of({"id": STRING, "object": STRING, "deleted": {"const": True}, **_END}),
    }


def _limits() -> dict[str, Schema]:
    return {
        "RateLimit": of(
            {
                "object": {"const": "project.rate_limit"},
                "id": STRING,
                "model": STRING,
                **nullable(_OF_A_MODEL),
            }
        ),
        "RateLimits": page_of(ref("RateLimit")),
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
            "node": or_null(STRING),
        },
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
            **nullable(
                {
                    "pid": INTEGER,
                    "idle_s": NUMBER,
                    "memory_bytes": INTEGER,
                    "failure": STRING,
                    "deprecation_date": {**STRING, "format": "date"},
                    "canary": of({"to": STRING, "percent": NUMBER, "owners": texts}),
                }
            ),
        },
    )
    return {
        "ModelState": state,
        "ModelStates": of({"object": {"const": "list"}, "data": listed(ref("ModelState"))}),
    }


_GROUPS: Mapping[str, Schema] = {
    "batch": or_null(BOOLEAN),
    "safety_identifier": {
        **or_null(STRING),
        "description": "An extension. A digest of the person whom requests named by `safety_identifier` or "
        "`user`; null for requests that named nobody, or somebody who is not told apart.",
    },
}
"""What a sum is of, where it is no name."""


def _books() -> dict[str, Schema]:
    """The audit log, usage and costs."""
    results = [
        of(
            {
                "object": {"const": kind.object},
                **dict.fromkeys(kind.counted, INTEGER),
                **({"usage_bytes": INTEGER} if name == "vector_stores" else {}),
                **{group: _GROUPS.get(group, or_null(STRING)) for group in kind.group_by},
            }
        )
        for name, kind in KINDS.items()
    ]
    session = of({"user": of({"id": STRING}), "ip_address": or_null(STRING)})
    key = of({"id": STRING, "type": {"const": "service_account"}})
    actors = (
        of({"type": {"const": kind}, kind: told}) for kind, told in (("session", session), ("api_key", key))
    )
    return {
        "AuditLog": {
            **of(
                {
                    "id": STRING,
                    "type": {**STRING, "description": "The details stand in the member of this name."},
                    "effective_at": _TIME,
                    "project": or_null(of({"id": STRING})),
                    "actor": {"anyOf": [*actors]},
                    "antiphon": {
                        **of(
                            {
                                "number": INTEGER,
                                "hash": STRING,
                                **nullable({"request_id": STRING, "ip_address": STRING}),
                            }
                        ),
                        "description": "An extension.",
                    },
                }
            ),
            "patternProperties": {r"^[a-z_]+\.[a-z_]+$": with_others(of({"id": STRING}))},
        },
        "AuditLogs": page_of(ref("AuditLog")),
        "AuditVerification": of(
            {
                "object": {"const": "organization.audit_log.verification"},
                "number": INTEGER,
                "hash": STRING,
                **nullable({"broken": INTEGER, "hash_of": STRING}),
            },
        ),
        "UsageResult": {"anyOf": results},
        "UsagePage": _buckets("UsageResult"),
        "CostsResult": of(
            {
                "object": {"const": "organization.costs.result"},
                "amount": of({"value": NUMBER, "currency": STRING}),
                **nullable({"quantity": NUMBER, "quantity_unit": STRING}),
                **{group: _GROUPS.get(group, or_null(STRING)) for group in COSTS_GROUP_BY},
            }
        ),
        "CostsPage": _buckets("CostsResult"),
    }


def organization_components() -> Mapping[str, Schema]:
    """The schemas of this family, by name."""
    return {**_limits(), **_keys(), **_runs(), **_models(), **_books()}
