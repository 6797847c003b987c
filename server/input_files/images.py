"""Images of a conversation that are worked on: checked when they come, and read when a call needs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from server.errors import ApiError
from server.input_files.sources import FoundFile, RequestFiles
from server.items import READ_IMAGES, Item
from server.schema import refuse
from storage import NotFound, Storage
from tools import Egress, EgressError, Original, Registry, ToolError, ToolResult, ToolSpec, image_kind

FIELDS = ("file_id", "image_url")
"""The members that name an image."""

HEAD = 64
"""Bytes that tell which kind of image a file is."""


class InputImages:
    """The images that messages hold or name, or that were made here. egress: which addresses may be reached
    for `image_url`."""

    def __init__(self, storage: Storage, egress: Egress) -> None:
        self._storage, self._egress = storage, egress

    async def check(self, owner: str, items: Sequence[Item], param: str = "input") -> None:
        """Raise ApiError for an image among new items that could not be worked on: 404 for an unknown
        `file_id`, 400 for what is not one image. What lies at an address is read when it is needed."""
        for index, item in enumerate(items):
            if item["type"] != "message":
                continue
            for position, part in enumerate(item["content"]):
                if part["type"] == "input_image":
                    await self._check(owner, part, f"{param}[{index}].content[{position}]")

    async def _check(self, owner: str, part: Mapping[str, Any], path: str) -> None:
        given = [name for name in FIELDS if part.get(name) is not None]
        if len(given) != 1:
            refuse(path, f"Invalid '{path}': give exactly one of 'image_url' and 'file_id'.")
        url = part.get("image_url")
        if url is not None and not url.startswith("data:"):
            try:
                self._egress.check(url)
            except EgressError as why:
                hint = "The operator may allow it by --egress or --egress-allow."
                refuse(f"{path}.image_url", f"{why} {hint}", "invalid_file_url")
            return
        found = await self._found(self._files(owner), part, path)
        if image_kind(await found.read(HEAD)) is None:
            message = f"Invalid '{path}': expected a PNG, JPEG, WebP or GIF image."
            refuse(f"{path}.{given[0]}", message, "unsupported_file")

    def _files(self, owner: str) -> RequestFiles:
        return RequestFiles(self._storage, self._egress, owner)

    async def _found(self, files: RequestFiles, named: Mapping[str, Any], path: str) -> FoundFile:
        """What a part, or a mask, names. Raises ApiError."""
        url = named.get("image_url")
        if url is None:
            part = {"file_id": named["file_id"]}
        else:  # without a scheme it is base64, as masks may be
            remote = url.startswith(("http://", "https://"))
            part = {"file_url" if remote else "file_data": url}
        try:
            return await files.find(part, path)
        except ApiError as error:
            if url is not None:
                for name in ("file_url", "file_data"):
                    error.message = error.message.replace(f"{path}.{name}", f"{path}.image_url")
                error.param = f"{path}.image_url"
            raise

    async def _made(self, owner: str, item: Mapping[str, Any]) -> str:
        """The base64 of an image that was made before, which a conversation in memory may have without."""
        if isinstance(item.get("result"), str):
            return str(item["result"])
        stored = (await self._storage.get_items(owner, [item["id"]])).get(item["id"])
        found = None if stored is None else orjson.loads(stored.body).get("result")
        if not isinstance(found, str):
            raise ToolError("The image is not there any more.")
        return found

    def tools(self) -> Registry:
        """What reads the images of a call: each of `images` is a part of a message, the item of an image that
        was made, or a mask. All of them together have as many bytes as the files of a request. The result
        keeps, as `images`, an Original of each."""

        async def read_one(owner: str, files: RequestFiles, image: Mapping[str, Any]) -> Original:
            if image.get("type") == "image_generation_call":
                image = {"image_url": await self._made(owner, image)}
            try:
                data = await (await self._found(files, image, "image")).read()
            except (ApiError, NotFound) as error:
                raise ToolError(f"An image could not be read. {error}") from None
            if (kind := image_kind(data)) is None:
                raise ToolError("What was given as an image is no PNG, JPEG, WebP or GIF image.")
            return Original(data, kind)

        async def read(owner: str, images: Sequence[Mapping[str, Any]]) -> ToolResult:
            files = self._files(owner)
            return ToolResult(output="", kept={"images": [await read_one(owner, files, i) for i in images]})

        spec = ToolSpec(
            READ_IMAGES,
            "Reads images.",
            {"type": "object", "properties": {}},
            read,
            offered_by="image_generation",
            idempotent=True,
            timeout_s=60.0,
            strict=False,
        )
        return {spec.name: spec}
