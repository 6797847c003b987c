"""The operator's image server: its settings."""

from __future__ import annotations

from server.images.settings import ImagesSettings, read_images_settings

__all__ = ["ImagesSettings", "read_images_settings"]
