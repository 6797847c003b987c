"""API keys, their owners, what both use, the audit log; and the keys that seal reasoning."""

from __future__ import annotations

from storage.queries.keys import api_keys, audit, owners, quotas, sealing_keys, usage

__all__ = ["api_keys", "audit", "owners", "quotas", "sealing_keys", "usage"]
