"""Settings that are more than one value: tables of a file, the models of `models.toml`, keys that seal; and
what flags of other servers are called here."""

from __future__ import annotations

from server.settings.elsewhere import counterpart
from server.settings.models_file import TABLE as MODELS_TABLE
from server.settings.models_file import Canary, ModelEntry, ModelsFile, entries_beside, read_entries
from server.settings.sealing_keys import SECRET_BYTES, read_sealing_key_file, read_sealing_keys
from server.settings.table import (
    UNITS_S,
    Address,
    Bytes,
    HeaderText,
    Seconds,
    SettingsTable,
    header_value,
    nearest,
    read_table,
)

__all__ = [
    "MODELS_TABLE",
    "SECRET_BYTES",
    "UNITS_S",
    "Address",
    "Bytes",
    "Canary",
    "HeaderText",
    "ModelEntry",
    "ModelsFile",
    "Seconds",
    "SettingsTable",
    "counterpart",
    "entries_beside",
    "header_value",
    "nearest",
    "read_entries",
    "read_sealing_key_file",
    "read_sealing_keys",
    "read_table",
]
