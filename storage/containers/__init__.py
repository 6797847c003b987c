"""Containers of code: their rows, their files, which are blobs, and what a finished cell changes of them."""

from __future__ import annotations

from storage.containers.rows import apply
from storage.containers.verbs import Containers

__all__ = ["Containers", "apply"]
