"""Decides which prompts of an owner may share what was computed of them: the salt of the prefix cache."""

from __future__ import annotations

import logging
from functools import cache
from hashlib import blake2b

from server.ignored import ignore
from server.limits import Caps

log = logging.getLogger("antiphon")


def cache_salt(salt: str | None, key: str | None, caps: Caps) -> str:
    """The salt that a request's `cache_salt` or, where the operator wants that, its `prompt_cache_key` comes
    to; empty for none."""
    if salt is not None or key is None or not caps.keys_salt:
        return salt or ""
    return f"prompt_cache_key {blake2b(key.encode(), digest_size=16).hexdigest()}"


def name_unused_key(salt: str | None, key: str | None, caps: Caps) -> None:
    """Name a `prompt_cache_key` that makes no difference as ignored: `cache_salt` wins."""
    if key is None or (caps.keys_salt and salt is None):
        return
    ignore("prompt_cache_key")
    if caps.keys_salt:
        _warn_of_both()


@cache
def _warn_of_both() -> None:
    """Once in the life of the process."""
    log.warning("a request gives both cache_salt and prompt_cache_key: cache_salt wins")
