"""API keys, and the keys that seal reasoning."""

from __future__ import annotations

from storage.queries.keys import api_keys, sealing_keys

__all__ = ["api_keys", "sealing_keys"]
