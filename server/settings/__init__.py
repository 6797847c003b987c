"""Settings that are tables of a file: how such a table is read, and the models of `models.toml`."""

from __future__ import annotations

from server.settings.models_file import TABLE as MODELS_TABLE
from server.settings.models_file import Canary, ModelEntry, ModelsFile, entries_beside, read_entries
from server.settings.table import Address, Bytes, SettingsTable, read_table

__all__ = [
    "MODELS_TABLE",
    "Address",
    "Bytes",
    "Canary",
    "ModelEntry",
    "ModelsFile",
    "SettingsTable",
    "entries_beside",
    "read_entries",
    "read_table",
]
