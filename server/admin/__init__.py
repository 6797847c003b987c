"""The operator's commands on the database, with or without a running server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from server.admin.backup import run
from server.admin.database_access import (
    AdminError,
    UnknownOwner,
    address_file,
    answer_of,
    asking,
    is_served,
    leave_address,
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
    "answer_of",
    "asking",
    "audit",
    "backup",
    "is_served",
    "keys",
    "leave_address",
    "live_runs",
    "projects",
    "run",
    "sealing_keys",
    "table",
    "tenants",
    "tiers",
    "usage",
    "webhooks",
]
