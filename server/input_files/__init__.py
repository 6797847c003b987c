"""Files and images in messages and tool outputs: their bytes, a file's text for a prompt."""

from __future__ import annotations

from server.input_files.images import InputImages
from server.input_files.reader import InputFiles

__all__ = ["InputFiles", "InputImages"]
