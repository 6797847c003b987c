"""Asks a server with the official endpoints `/v1/images/generations` and `/v1/images/edits` for an image."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tools.egress import Caps, Egress, guarded_client
from tools.images.replies import Image, ImageFailed, complaint, decoded, events_of, image_of, object_of

if TYPE_CHECKING:
    import httpx2

log = logging.getLogger("antiphon.tools")

MAX_PARTIAL_IMAGES = 3
"""Earlier forms of an image that a request may ask for."""

BESIDE_IMAGES = 256 << 10
"""Bytes of a reply that are no image."""

_ALWAYS_BASE64 = re.compile(r"(gpt-image|chatgpt-image)")
"""Models that answer in base64 alone, and refuse to be asked for it."""

_LOOK = Caps(max_bytes=1 << 20, total_s=10.0)


@dataclass(frozen=True, slots=True)
class Original:
    """The bytes of an image that is to be changed, or of a mask. kind: png, jpeg, webp or gif."""

    data: bytes
    kind: str

    def file(self, name: str) -> tuple[str, bytes, str]:
        """It as a file of a form: name, content, media type."""
        return f"{name}.{self.kind}", self.data, f"image/{self.kind}"


@dataclass(frozen=True, slots=True)
class Originals:
    """What an image is made from. mask: where its transparent pixels are, the first one is changed."""

    images: Sequence[Original]
    mask: Original | None = None

    def files(self) -> list[tuple[str, tuple[str, bytes, str]]]:
        """The files of the form, by their fields."""
        field = "image" if len(self.images) == 1 else "image[]"
        found = [(field, image.file(f"image{number}")) for number, image in enumerate(self.images, 1)]
        return found if self.mask is None else [*found, ("mask", self.mask.file("mask"))]


@dataclass(frozen=True, slots=True)
class ImageGenerator:
    """A server that makes images, as the operator has configured it.

    url: with or without its `/v1`. model: None for the server's own choice. timeout_s: seconds that one image
    may take. max_bytes: of one image. idempotent: whether the server may be asked again for an image that may
    have been made.
    """

    url: str
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 180.0
    max_bytes: int = 8 << 20
    idempotent: bool = False

    @property
    def address(self) -> str:
        """Where images are asked for."""
        return self._path("images/generations")

    def _path(self, path: str) -> str:
        return f"{self.url.rstrip('/').removesuffix('/v1')}/v1/{path}"

    async def generate(
        self,
        wanted: Mapping[str, Any],
        show: Callable[[int, Image], None],
        originals: Originals | None = None,
    ) -> Image:
        """The image of a request with these members. show: told its earlier forms, by their index, where
        `partial_images` asks for some and the server sends them. originals: what it is made from besides the
        prompt. Raises ImageFailed, EgressError."""
        body = {**wanted, "n": 1}
        if self.model is not None:
            body["model"] = self.model
        if not _ALWAYS_BASE64.match(self.model or ""):
            body["response_format"] = "b64_json"
        if body.get("partial_images"):
            body["stream"] = True
        # Base64 is a third longer.
        most = (1 + MAX_PARTIAL_IMAGES) * (self.max_bytes * 4 // 3) + BESIDE_IMAGES
        async with (
            self._client(Caps(max_bytes=most, total_s=self.timeout_s)) as client,
            self._asked(client, body, originals) as reply,
        ):
            if reply.headers.get("content-type", "").startswith("text/event-stream") and reply.is_success:
                most_shown = min(body.get("partial_images", 0), MAX_PARTIAL_IMAGES)
                return await self._streamed(events_of(reply.aiter_bytes()), show, most_shown)
            content = await reply.aread()
            if not reply.is_success:
                raise self._refusal(reply.status_code, content)
            return await self._whole(content, client)

    def _asked(
        self, client: httpx2.AsyncClient, body: Mapping[str, Any], originals: Originals | None
    ) -> AbstractAsyncContextManager[httpx2.Response]:
        """The server's answer to a request: JSON, or a form where there are images to be changed."""
        if originals is None:
            return client.stream("POST", self.address, json=body)
        fields = {
            name: str(value).lower() if isinstance(value, bool) else str(value)
            for name, value in body.items()
        }
        return client.stream("POST", self._path("images/edits"), data=fields, files=originals.files())

    async def _whole(self, content: bytes, client: httpx2.AsyncClient) -> Image:
        """The image of a reply that is no stream."""
        said = await asyncio.to_thread(object_of, content)
        images = said.get("data")
        if not isinstance(images, list) or not images or not isinstance(images[0], dict):
            raise (
                complaint(None, said) if said.get("error") else ImageFailed("The image server made no image.")
            )
        told = {**said, **images[0]}
        if isinstance(told.get("b64_json"), str):
            return await self._read(told["b64_json"], told)
        url = told.get("url")
        if not isinstance(url, str):
            raise ImageFailed("The image server made no image.")
        if url.startswith("data:"):
            return await self._read(url, told)
        found = await client.get(url)  # which may lead to this very server, and nowhere else
        if not found.is_success:
            raise ImageFailed(f"The image server's image was answered with status {found.status_code}.")
        return self._bounded(image_of(found.content, told))

    async def _streamed(
        self, events: AsyncIterator[dict[str, Any]], show: Callable[[int, Image], None], most_shown: int
    ) -> Image:
        """The image at the end of a stream. most_shown: earlier forms that are shown."""
        num_shown = 0
        async for event in events:
            kind, image = str(event.get("type")), event.get("b64_json")
            if kind == "error" or event.get("error"):
                raise complaint(None, event)
            if kind.endswith(".completed") and isinstance(image, str):
                return await self._read(image, event)
            if kind.endswith(".partial_image") and isinstance(image, str) and num_shown < most_shown:
                show(num_shown, await self._read(image, event))
                num_shown += 1
        raise ImageFailed("The image server ended its stream without an image.")

    async def _read(self, text: str, told: Mapping[str, Any]) -> Image:
        return self._bounded(await asyncio.to_thread(lambda: image_of(decoded(text), told)))

    def _bounded(self, image: Image) -> Image:
        if image.num_bytes > self.max_bytes:
            raise ImageFailed(f"The image has {image.num_bytes} bytes; at most {self.max_bytes} are taken.")
        return image

    def _refusal(self, status: int, content: bytes) -> ImageFailed:
        try:
            failure = complaint(status, object_of(content))
        except ImageFailed:
            failure = complaint(status, None)
        log.warning("an image was refused with status %s", status)
        return failure

    def _client(self, caps: Caps) -> httpx2.AsyncClient:
        """A client that reaches this server and no other, which the operator has named: what requests may
        reach is no matter here."""
        headers = {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}
        return guarded_client(Egress().allowing(self.address), caps, headers=headers)

    async def look(self) -> int:
        """Ask which models the server has, which costs nothing: the status that it answers with. Raises
        EgressError."""
        async with self._client(_LOOK) as client:
            status: int = (await client.get(self._path("models"))).status_code
            return status
