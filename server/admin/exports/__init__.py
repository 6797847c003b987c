"""All that an owner keeps, as JSON lines: `antiphon export` writes them, `antiphon import` puts them back."""

from __future__ import annotations

from server.admin.exports.exporting import exported, note_export
from server.admin.exports.importing import run

__all__ = ["exported", "note_export", "run"]
