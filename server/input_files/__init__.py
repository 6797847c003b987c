"""Files in messages and tool outputs (`input_file`): where their bytes come from, their text in a prompt."""

from __future__ import annotations

from server.input_files.reader import InputFiles

__all__ = ["InputFiles"]
