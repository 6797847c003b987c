"""Files and images in messages and tool outputs: their bytes, a file's text and an image's pixels for a
prompt."""

from __future__ import annotations

from server.input_files.images import InputImages
from server.input_files.reader import InputFiles
from server.input_files.seen_images import SeenImages

__all__ = ["InputFiles", "InputImages", "SeenImages"]
