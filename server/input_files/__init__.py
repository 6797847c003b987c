"""Files in messages (`input_file`): where their bytes come from, and their text in a prompt."""

from __future__ import annotations

from server.input_files.reader import InputFiles

__all__ = ["InputFiles"]
