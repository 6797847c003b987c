"""Reads what administrators ask to change of a key, and the changes of limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from server.errors import invalid_value
from server.http import context
from server.limits import read_limits


def require_values(body: Mapping[str, Any], *names: str) -> None:
    """Refuse null for the members `names` of a change: ApiError 400. It could mean that a member stays, that
    all of it ends, or, of scopes, that everything is allowed."""
    for name in names:
        if name in body and body[name] is None:
            ends = ' To end limits, name each of them: {"requests_per_minute": null}.'
            message = f"Invalid '{name}': null. Leave it out to keep it as it is, or give what it is to be."
            raise invalid_value(name, message + (ends if name == "limits" else ""))


def read_limit_changes(request: Request, body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The `limits` to replace, by name, null for one that ends; None where there are none. Raises ApiError
    400, also for limits of a model that this server does not serve; such ones can only be ended."""
    found: Mapping[str, Any] | None = body.get("limits")
    if found is None:
        return None
    try:
        wanted = read_limits(found)
    except ValueError as error:
        raise invalid_value("limits", str(error)) from None
    models = context(request).models
    for model, limits in wanted.models.items():
        if limits.given() and (why := models.unserved(model)) is not None:
            raise invalid_value("limits", f"models: {why}")
    return found
