"""The files of the console as a browser gets them: bytes, media type, entity tag and security headers."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "web"
PAGE = "index.html"

MEDIA_TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
    ".txt": "text/plain; charset=utf-8",
}
"""By the end of a file's name. A file that ends otherwise is no asset."""

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "object-src 'none'",
        "frame-src 'none'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
    )
)
"""Scripts, styles and requests are the server's own, nothing is inline, and no text becomes markup unless
DOMPurify has made it so."""

HEADERS: Mapping[str, str] = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # kept, and asked about by its tag: a new version is seen at once
    "vary": "accept-encoding",
}
"""Of every asset."""


@dataclass(frozen=True, slots=True)
class Asset:
    """A file: its bytes, its media type and its entity tag."""

    body: bytes
    media_type: str
    tag: str

    def headers(self, accepts: str) -> dict[str, str]:
        """The headers of a reply to a client that accepts these encodings."""
        encoding = {"content-encoding": "gzip"} if _takes_gzip(accepts) else {}
        return {**HEADERS, "etag": f'"{self.tag}"', **encoding}

    def content(self, accepts: str) -> bytes:
        """The bytes for a client that accepts these encodings."""
        return _packed(self.body) if _takes_gzip(accepts) else self.body

    def is_known(self, if_none_match: str) -> bool:
        """Whether a client that sends this header has the file as it is."""
        known = (tag.strip().removeprefix("W/").strip('"') for tag in if_none_match.split(","))
        return any(tag in (self.tag, "*") for tag in known)


@cache
def _packed(body: bytes) -> bytes:
    """A file by gzip, once it is asked for: all of them at once would hold the first request up."""
    return gzip.compress(body, 6, mtime=0)


def _takes_gzip(accepts: str) -> bool:
    for each in accepts.lower().split(","):
        name, _, weight = each.partition(";")
        if name.strip() in ("gzip", "*"):
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


@cache
def assets() -> Mapping[str, Asset]:
    """All files of the console by their path below its folder, read once."""
    files = (file for file in sorted(FOLDER.rglob("*")) if file.suffix in MEDIA_TYPES)
    return {file.relative_to(FOLDER).as_posix(): _read(file) for file in files}


def _read(file: Path) -> Asset:
    body = file.read_bytes()
    tag = hashlib.sha256(body).hexdigest()[:32]
    return Asset(body, MEDIA_TYPES[file.suffix], tag)
