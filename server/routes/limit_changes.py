"""Reads the changes of limits that administrators ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server.errors import invalid_value
from server.limits import read_limits


def read_limit_changes(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The `limits` to replace, by name, null for one that ends; None where there are none. Raises ApiError
    400."""
    found: Mapping[str, Any] | None = body.get("limits")
    if found is None:
        return None
    try:
        read_limits(found)
    except ValueError as error:
        raise invalid_value("limits", str(error)) from None
    return found
