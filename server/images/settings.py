"""The server that makes images: the table `[images]` of `antiphon.toml`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from server.settings import Address, Bytes, HeaderText, SettingsTable, read_table
from tools import ImageGenerator

BESIDE_THE_IMAGE = 256 << 10
"""Bytes of an item's JSON that are kept free for all but its image: a prompt, and what is said of it."""


class ImagesSettings(SettingsTable):
    """`[images]`, its secrets read.

    url: of a server with `/v1/images/generations`; None: no images are made. model: the one that is asked
    for; None: the server's own choice. timeout_s, max_bytes, idempotent: see `ImageGenerator`.
    """

    url: Address | None = None
    model: str | None = Field(None, min_length=1)
    api_key: HeaderText | None = Field(None, repr=False)
    timeout_s: float = Field(180.0, gt=0)
    max_bytes: Bytes = Field(8 << 20, gt=0)
    idempotent: bool = False

    @model_validator(mode="after")
    def _whole(self) -> ImagesSettings:
        if self.url is None and self.model_fields_set - {"url"}:
            given = ", ".join(sorted(self.model_fields_set - {"url"}))
            raise ValueError(f"{given}: of which server? Give url, such as http://127.0.0.1:8188")
        return self

    def generator(self, max_item_bytes: int) -> ImageGenerator | None:
        """The server, where there is one. max_item_bytes: the largest item that clients can send back, so
        that no image is made that they could not."""
        if self.url is None:
            return None
        fits = max((max_item_bytes - BESIDE_THE_IMAGE) * 3 // 4, 1)  # base64 is a third longer
        return ImageGenerator(
            self.url, self.model, self.api_key, self.timeout_s, min(self.max_bytes, fits), self.idempotent
        )


def read_images_settings(table: Any, env: Mapping[str, str]) -> ImagesSettings:
    """The table as it stands in the file. Raises ValueError, which names the place."""
    return read_table(ImagesSettings, "images", table, env)
