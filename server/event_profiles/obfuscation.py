"""Pads the events that carry pieces of text, so that their lengths on the wire tell less of what they say.

The padding is derived from a secret of the response and the number of the event: an event that is sent again
has the same bytes.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from hashlib import blake2b

BLOCK = 32
"""A padded event has a multiple of so many bytes."""

_MEMBER = b',"obfuscation":"'
_END = b'"}'


def padded(event: bytes, sequence_number: int, key: bytes) -> bytes:
    """An event, a JSON object, with a member `obfuscation` of 1 to 32 characters.

    key: the secret, at most 64 bytes.
    """
    size = len(event) - 1 + len(_MEMBER) + len(_END)
    length = BLOCK - size % BLOCK
    number = sequence_number.to_bytes(8, "big")
    drawn = blake2b(number, digest_size=BLOCK, key=key, person=b"padding").digest()
    return event[:-1] + _MEMBER + urlsafe_b64encode(drawn)[:length] + _END
