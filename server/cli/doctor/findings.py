"""How a check tells what it has found."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

from server.config import Config

Verdict = Literal["ok", "note", "FAIL"]


Finding = tuple[Verdict, str]


Check = Callable[[Config], Awaitable[Finding]]
