"""API keys, the owners that they speak for, what both have used of their limits, the audit log; and the keys
that seal reasoning."""

from __future__ import annotations

from storage.queries.keys import api_keys, audit, owners, quotas, sealing_keys

__all__ = ["api_keys", "audit", "owners", "quotas", "sealing_keys"]
