"""The names of the processes on one database: they tell what each of them serves.

Every process must serve the same models under the same names, because what one begins another may go on with.
A name ends with a digest of them, so that a process sees at a look at the others which of them differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import blake2b

_DIGEST = re.compile(r"-m([0-9a-f]{8})$")


def runner_name(process: str, served: Iterable[tuple[str, str]]) -> str:
    """A process's name, for what it serves: pairs of a model's name and fingerprint."""
    said = "\n".join(f"{name}={fingerprint}" for name, fingerprint in sorted(served))
    return f"{process}-m{blake2b(said.encode(), digest_size=4).hexdigest()}"


def serve_the_same(one: str, other: str) -> bool:
    """Whether two processes serve the same, by their names; True where one of them does not tell."""
    first, second = _DIGEST.search(one), _DIGEST.search(other)
    return first is None or second is None or first[1] == second[1]
