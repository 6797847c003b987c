"""Says who makes a request and what they may do: keys, scopes, principals, entries of the audit log."""

from __future__ import annotations

from server.access.accesses import Accesses
from server.access.actors import AUDIT_TYPES, OPERATOR, PURGED, SERVER, Actor, AuditType
from server.access.held_open import HeldOpen
from server.access.keys import (
    FRESH_S,
    KEY_PREFIX,
    USE_NOTED_S,
    EndedKey,
    KeyFileError,
    Keys,
    hash_key,
    new_key,
    owner_of_flag_key,
    read_key_file,
    unauthorized,
)
from server.access.principal import LOCAL, LOCAL_OWNER, OWNER_PREFIX, THE_OPERATOR, Principal, require_use
from server.access.scopes import (
    ADMIN,
    ADMIN_READS,
    ALL,
    GROUPS,
    LOAD,
    OPEN,
    OPERATOR_ONLY,
    Scopes,
    read_scopes,
    tool_scope,
)
from server.access.tiers import Service, admitted

__all__ = [
    "ADMIN",
    "ADMIN_READS",
    "ALL",
    "AUDIT_TYPES",
    "FRESH_S",
    "GROUPS",
    "KEY_PREFIX",
    "LOAD",
    "LOCAL",
    "LOCAL_OWNER",
    "OPEN",
    "OPERATOR",
    "OPERATOR_ONLY",
    "OWNER_PREFIX",
    "PURGED",
    "SERVER",
    "THE_OPERATOR",
    "USE_NOTED_S",
    "Accesses",
    "Actor",
    "AuditType",
    "EndedKey",
    "HeldOpen",
    "KeyFileError",
    "Keys",
    "Principal",
    "Scopes",
    "Service",
    "admitted",
    "hash_key",
    "new_key",
    "owner_of_flag_key",
    "read_key_file",
    "read_scopes",
    "require_use",
    "tool_scope",
    "unauthorized",
]
