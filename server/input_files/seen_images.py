"""Reads the images that items hold or name, for models that see.

The pixels of an image become the private half of its item (`server.items.pictures`): they are taken from the
file once, in a confined process, when the item comes in. So later turns and resumed runs show the model the
same.
"""

from __future__ import annotations

import asyncio
import base64
import io
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote, urlsplit

from server.config import THREADED_BYTES, Config
from server.errors import ApiError
from server.input_files.sources import (
    SOON,
    FoundFile,
    NotAllowed,
    RequestFiles,
    found_file,
    in_time,
    not_read,
)
from server.items import SEES, Item, KeptPicture, path_of_image, unseen_images_of, with_pictures
from server.schema import refuse, shorten
from server.threads import begin_large_request
from storage import Storage
from tools import Pixels, ReadersBusy, ToolError, ToolSpec, UnreadableDocument, read_image

MAX_IMAGES = 100
"""In one request."""

MAX_BYTES = 32 << 20
"""Of one image's file."""

SIDES: Mapping[str, int] = {"low": 512, "auto": 2048, "high": 2048, "original": 2048}
"""By `detail`: how many pixels an image may have along a side; a larger one is made smaller."""

MAX_PNG_BYTES = 64 << 20
"""Of the pixels of all images of one request together, as PNG: a small file may hold many, and each part that
names it holds them anew."""

KEPT_BYTES = 64 << 20
"""Of images read before, as PNG, the latest ones: clients that keep a conversation themselves send its images
with every turn. Each owner's are looked for alone: how long an answer takes tells nothing of what others
sent."""

_CODES: Mapping[str, str] = {
    "file_too_large": "image_file_too_large",
    "not_found": "image_file_not_found",
}
"""The official codes of images, by those of other files."""

Key = tuple[str, str, int]
"""Owner, digest of the file, most pixels along a side."""


class SeenImages:
    """The images in items, as pixels."""

    def __init__(self, storage: Storage, config: Config) -> None:
        self._storage = storage
        self._egress = config.egress_policy
        self._hosts = config.allowed_media_domains
        self._folder = config.allowed_local_media_path
        self._max_pixels = config.max_image_pixels
        self._known: OrderedDict[Key, KeptPicture] = OrderedDict()
        self._num_bytes = 0

    @staticmethod
    def tools() -> dict[str, ToolSpec]:
        """What the registry has where a model sees, for tools that need one which does."""

        async def refuse() -> str:
            raise ToolError("Images are seen, and not called.")

        shape: Mapping[str, Any] = {"type": "object", "properties": {}}
        return {SEES: ToolSpec(SEES, "Sees images.", shape, refuse, offered_by="computer", strict=False)}

    async def read(
        self, owner: str, items: Sequence[Item], *, param: str = "input", paths: Iterable[str] | None = None
    ) -> list[Item]:
        """Normalised items, of which those with images hold their pixels; one whose images were read before
        stays as it is. paths: of the images, in their order, where they are not those of items in `param`.

        Raises ApiError: 400 with one of the official codes for what is not one image, cannot be fetched or
        read, or is too large, 404 for an unknown `file_id`; 429 where too many files of the owner wait to be
        read; 503 where one could not be read at this moment, or all of them not in time.
        """
        named = None if paths is None else [*paths]
        reading = self._read(owner, items, param, iter(named) if named else None)
        return await in_time(reading, "images", named[0] if named else param)

    async def _read(
        self, owner: str, items: Sequence[Item], param: str, named: Iterator[str] | None
    ) -> list[Item]:
        sources = RequestFiles(self._storage, self._egress, owner, hosts=self._hosts)
        done, count, num_bytes = list(items), 0, 0
        for index, item in enumerate(items):
            pictures: dict[int, KeptPicture] = {}
            for position, part in unseen_images_of(item):
                path = next(named) if named else path_of_image(item, f"{param}[{index}]", position)
                count += 1
                if count > MAX_IMAGES:
                    refuse(path, f"Invalid '{path}': a request may have at most {MAX_IMAGES} images.")
                pictures[position] = await self._picture(part, sources, owner, path)
                num_bytes += pictures[position].num_bytes
                if num_bytes > MAX_PNG_BYTES:
                    message = (
                        f"Invalid '{path}': the images of a request may have {MAX_PNG_BYTES} bytes together,"
                        " as PNG; with 'detail' 'low' they have fewer."
                    )
                    refuse(path, message, "image_file_too_large")
            if pictures:
                done[index] = with_pictures(item, pictures)
        if num_bytes > THREADED_BYTES:
            begin_large_request()
        return done

    async def _picture(
        self, part: Mapping[str, Any], sources: RequestFiles, owner: str, path: str
    ) -> KeptPicture:
        at, source = await self._source(part, sources, path)
        side = SIDES[part.get("detail") or "auto"]
        key = (owner, source.digest, side)
        if (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            return known
        if not source.num_bytes:
            refuse(at, f"Invalid '{at}': the image file is empty.", "empty_image_file")
        try:
            pixels = await read_image(
                source.content, side=side, max_pixels=self._max_pixels, max_bytes=MAX_BYTES, owner=owner
            )
        except UnreadableDocument as why:
            _refuse(why, source.num_bytes, at)
        except ApiError as gone:
            raise _of_images(gone, path, at) from None
        picture = await asyncio.to_thread(_kept, pixels)
        if key not in self._known:  # else another request has read it meanwhile
            self._known[key] = picture
            self._num_bytes += picture.num_bytes
        while self._num_bytes > KEPT_BYTES:
            self._num_bytes -= self._known.popitem(last=False)[1].num_bytes
        return picture

    async def _source(
        self, part: Mapping[str, Any], sources: RequestFiles, path: str
    ) -> tuple[str, FoundFile]:
        """Where the image is named, and its file."""
        given = [name for name in ("file_id", "image_url") if part.get(name) is not None]
        if len(given) != 1:
            refuse(path, f"Invalid '{path}': give exactly one of 'image_url' and 'file_id'.")
        (field,) = given
        at = f"{path}.{field}"
        try:
            if field == "file_id":
                return at, await sources.find({"file_id": part["file_id"]}, path)
            url = part["image_url"]
            if url.startswith("data:"):
                return at, await sources.find({"file_data": url}, path)
            if url.startswith(("http://", "https://")):
                return at, await sources.find({"file_url": url}, path)
            return at, await asyncio.to_thread(self._local, url, at)
        except ApiError as error:
            raise _of_images(error, path, at) from None

    def _local(self, url: str, at: str) -> FoundFile:
        """An image in the folder that the operator has opened: a path, or a file: URL. Which files there are
        elsewhere, no answer tells."""
        folder = self._folder
        try:
            path = Path(unquote(urlsplit(url).path) if url.startswith("file:") else url)
        except ValueError:  # such as "file://["
            path = Path()
        if folder is None or not path.is_absolute() or "\0" in str(path):
            message = f"Invalid '{at}': expected a data URL, or one of http or https."
            refuse(at, message, "invalid_image_url")
        try:
            found = path.resolve()
            if found.is_relative_to(folder.resolve()) and found.is_file():
                if found.stat().st_size > MAX_BYTES:
                    message = f"Invalid '{at}': an image file may have {MAX_BYTES} bytes."
                    refuse(at, message, "image_file_too_large")
                return found_file(found.read_bytes(), found.name)
        except (OSError, RuntimeError, ValueError):
            # A name that is too long, a link to itself, a file that the server may not read, or one that has
            # gone since.
            pass
        refuse(at, f"Invalid '{at}': there is no such file that may be read.", "invalid_image_url")


def _kept(pixels: Pixels) -> KeptPicture:
    from PIL import Image

    size = (pixels.width, pixels.height)
    data = io.BytesIO()
    Image.frombytes("RGB", size, pixels.rgb).save(data, "PNG", compress_level=3)
    digest = blake2b(repr(size).encode() + pixels.rgb, digest_size=16).hexdigest()
    return KeptPicture(base64.b64encode(data.getvalue()).decode(), digest)


def _of_images(error: ApiError, path: str, at: str) -> ApiError:
    """An error about a file as one about an image."""
    code = error.code
    if code == "invalid_value":
        code = "invalid_base64_image"
    elif code == "invalid_file_url":
        # What the rules refuse was not asked for; anything else was tried.
        code = "invalid_image_url" if isinstance(error, NotAllowed) else "failed_to_download_image"
    error.code = _CODES.get(str(code), code)
    for name in ("file_url", "file_data"):
        error.message = error.message.replace(f"{path}.{name}", f"{path}.image_url")
    error.param = at
    return error


def _refuse(why: UnreadableDocument, num_bytes: int, at: str) -> NoReturn:
    message = f"The image at '{shorten(at)}' cannot be read. {why.message}"
    if isinstance(why, ReadersBusy) and why.own:
        raise ApiError(429, message, code="rate_limit_exceeded", param=at, headers=SOON)
    match why.code:
        case "unsupported_file":
            refuse(at, message, "unsupported_image_media_type")
        case "invalid_file":
            refuse(at, message, "image_parse_error")
        case "too_large":
            refuse(at, message, "image_file_too_large" if num_bytes > MAX_BYTES else "image_too_large")
        case "server_error":
            raise not_read(message, at)
