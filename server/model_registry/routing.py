"""Which requests a canary answers."""

from __future__ import annotations

import secrets
from hashlib import blake2b

from server.settings import Canary


def leads_to(canary: Canary, owner: str, key: str | None) -> bool:
    """Whether a request goes there. key: requests with the same one go the same way; None: it is drawn."""
    if owner in canary.owners:
        return True
    if key is None:
        share = secrets.randbelow(1 << 32)
    else:
        said = f"{canary.to}\0{owner}\0{key}".encode()
        share = int.from_bytes(blake2b(said, digest_size=4).digest())
    return share < canary.percent / 100 * (1 << 32)
