"""The operator's commands on the database, with or without a running server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from server.admin.backup import run
from server.admin.database_access import (
    AdminError,
    UnknownOwner,
    address_file,
    asking,
    is_served,
    leave_address,
    refusal_of,
)
from server.admin.listing import Columns, table

if TYPE_CHECKING:  # imported when they are asked for
    from server.admin import (
        audit,
        backup,
        keys,
        live_runs,
        projects,
        sealing_keys,
        tenants,
        tiers,
        usage,
        webhooks,
    )

__all__ = [
    "AdminError",
    "Columns",
    "UnknownOwner",
    "address_file",
    "asking",
    "audit",
    "backup",
    "is_served",
    "keys",
    "leave_address",
    "live_runs",
    "projects",
    "refusal_of",
    "run",
    "sealing_keys",
    "table",
    "tenants",
    "tiers",
    "usage",
    "webhooks",
]
