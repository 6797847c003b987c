"""Images among the parts of items, as models that see are shown them.

The pixels of an image are the private half of its item, by the positions of the parts: `{"images": {POSITION:
{"png": BASE64, "digest": HEX}}}`. They are taken from the file once, when the item comes in, and stored with
it. So later turns and resumed runs show the model the same pixels, whatever becomes of the file.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from engine import Picture
from server.items.file_texts import FILE_PARTS, file_texts
from server.items.images import is_image
from server.items.private_half import Private, private_of, with_private

_IMAGES = "images"
_SCREEN = {"computer_call_output": "output"}

SEEN: Mapping[str, str] = {**FILE_PARTS, **_SCREEN}
"""The types of items that may have images, and the field that has them: a list of parts, or, of a screen,
one."""

SEES = "image.seen"
"""What the registry has where the server's model sees: the name of a tool that no model is shown."""

AnyItem = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class KeptPicture:
    """The pixels of an image as they are kept: a PNG that this server has written, in base64, and their
    digest in hexadecimal. Items that hold the same picture share its text."""

    png: str
    digest: str

    @property
    def num_bytes(self) -> int:
        """Of the PNG, give or take two."""
        return len(self.png) * 3 // 4

    def form(self) -> dict[str, str]:
        """As JSON."""
        return {"png": self.png, "digest": self.digest}


def images_in(item: AnyItem) -> list[tuple[int, Mapping[str, Any]]]:
    """The parts of an item that are images, with their positions."""
    if item["type"] in _SCREEN:
        return [(0, item["output"])]
    parts = item.get(SEEN.get(item["type"], ""))
    if not isinstance(parts, list) or item.get("role") == "assistant":
        return []
    return [(position, part) for position, part in enumerate(parts) if is_image(part)]


def unseen_images_of(item: AnyItem) -> list[tuple[int, Mapping[str, Any]]]:
    """Those of them whose pixels are not kept yet."""
    kept = _kept(item)
    return [(position, part) for position, part in images_in(item) if str(position) not in kept]


def path_of_image(item: AnyItem, path: str, position: int) -> str:
    """Where the image is that has this position in the item at `path`."""
    field = SEEN[item["type"]]
    return f"{path}.{field}" if item["type"] in _SCREEN else f"{path}.{field}[{position}]"


def with_pictures(item: AnyItem, pictures: Mapping[int, KeptPicture]) -> dict[str, Any]:
    """An item that holds the pixels of its images, by their positions."""
    new = {str(position): picture.form() for position, picture in pictures.items()}
    return with_private(dict(item), {**(private_of(item) or {}), _IMAGES: {**_kept(item), **new}})


def pictures_of(item: AnyItem) -> dict[int, Picture]:
    """The pixels that an item holds, by the positions of their parts."""
    return {
        int(position): Picture(base64.b64decode(form["png"]), bytes.fromhex(form["digest"]))
        for position, form in _kept(item).items()
    }


def shown_parts(item: AnyItem, told: Callable[[int], str]) -> list[dict[str, Any]] | None:
    """The parts of a message as a model that sees is shown them: texts and images; None where no pixels of it
    are kept. told: what is said in the place of an image without pixels, by its number within the message."""
    pictures = pictures_of(item)
    if not pictures:
        return None
    texts, shown, number = file_texts(item), list[Picture | str](), 0
    for position, part in enumerate(item[SEEN[item["type"]]]):
        if is_image(part):
            picture = pictures.get(position)
            shown.append(told(number) if picture is None else picture)
            number += 1
        else:
            shown.append(texts.get(str(position)) or part.get("text") or "")
    parts: list[dict[str, Any]] = []
    for _, beside in groupby(shown, type):
        run = [*beside]
        lines = [each for each in run if isinstance(each, str)]
        if lines:  # texts beside each other stand on lines of their own
            parts.append({"type": "text", "text": "\n".join(lines)})
        else:
            parts += ({"type": "image", "image": picture} for picture in run)
    return parts


def _kept(item: AnyItem) -> Mapping[str, Any]:
    kept: Mapping[str, Any] = (private_of(item) or {}).get(_IMAGES, {})
    return kept


def with_urls(item: dict[str, Any], private: Private) -> None:
    """Write into an item the URLs of those of its images that came without: data URLs of their pixels."""
    kept, field = private.get(_IMAGES, {}), SEEN[item["type"]]
    for position, part in images_in(item):
        form = kept.get(str(position))
        if form is None or part.get("image_url") is not None:
            continue
        shown = {**part, "image_url": f"data:image/png;base64,{form['png']}"}
        if item["type"] in _SCREEN:
            item[field] = shown
        else:
            parts = list(item[field])
            parts[position] = shown
            item[field] = parts
