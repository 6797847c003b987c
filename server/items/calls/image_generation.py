"""Images: the model describes them, and the server that the operator has named for it makes them.

The image is in the item, and the model, which reads text, is told in words that it was made. How it was told,
and the prompt as it wrote it, are the private half of the item. To have images of the conversation changed,
it names their numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from server.ignored import ignore
from server.items.images import READ_IMAGES, images_of
from server.items.item_type import Call, Execution, Item, ItemType, Scene, Tool, flat_function
from server.items.parts import PLACE, item_shape
from server.items.private_half import Private, private_of
from server.items.transcript import Transcript
from server.shapes import STRING, array, described, mapping, one_of, record, refuse, schema_of, whole
from tools import GENERATE, Originals, Registry, ToolError, ToolResult, execute

if TYPE_CHECKING:
    from tools import Image

# ------------------------------------------------------------------------------------------------------------
# The tool of a request

_SENT = (
    "size",
    "quality",
    "background",
    "output_format",
    "output_compression",
    "moderation",
    "partial_images",
)
"""The members of a tool that the request for an image has as well."""

MAX_ORIGINALS = 16
"""Images that one is made from, as in the official API."""

_MASK = record({}, {"image_url": STRING, "file_id": STRING})


def _mask(value: Any, path: str) -> Any:
    mask = _MASK(value, path)
    if len([name for name in ("image_url", "file_id") if name in mask]) != 1:
        refuse(path, f"Invalid '{path}': give exactly one of 'image_url' and 'file_id'.")
    return mask


described(_mask, lambda: schema_of(_MASK))

_TOOL = record(
    {},
    {
        "model": STRING,
        "size": STRING,
        "quality": STRING,
        "background": one_of("transparent", "opaque", "auto"),
        "output_format": one_of("png", "webp", "jpeg"),
        "output_compression": whole(0, 100),
        "moderation": one_of("auto", "low"),
        "partial_images": whole(0, 3),
        "action": one_of("generate", "edit", "auto"),
        "input_fidelity": one_of("high", "low"),
        "input_image_mask": _mask,
    },
)


def _tool(value: Any, path: str) -> Tool:
    tool: Tool = _TOOL(value, path)
    if "model" in tool:
        ignore(f"{path}.model")  # the operator has chosen one
    if not _changes(tool):
        for name in ("input_fidelity", "input_image_mask"):
            if name in tool:
                ignore(f"{path}.{name}")  # no image is changed
    return tool


def _changes(tool: Tool) -> bool:
    return tool.get("action") != "generate"


described(_tool, lambda: schema_of(_TOOL))


def _lacks(_tool: Tool, registry: Registry) -> str | None:
    if GENERATE in registry:
        return None
    return "no server of images is configured: the operator names one in the table [images] of antiphon.toml"


def _offers(tool: Tool, _registry: Registry, _path: str) -> Sequence[Tool]:
    properties: dict[str, Any] = {
        "prompt": {"type": "string", "description": "All that is to be seen, and in which style."}
    }
    about, required = "Make an image from a description, and show it to the user.", ["prompt"]
    if _changes(tool):
        numbers = {"type": "array", "items": {"type": "integer", "minimum": 1}, "maxItems": MAX_ORIGINALS}
        properties["images"] = {**numbers, "description": _NUMBERS}
        about = "Make an image from a description, or change images of the conversation, and show the result."
    if tool.get("action") == "edit":
        properties["images"]["minItems"] = 1
        required.append("images")
        about = "Change images of the conversation by a description, and show the result to the user."
    parameters = {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
    return [flat_function(_FUNCTION, about, parameters)]


_FUNCTION = "image_generation"
_NUMBERS = "The numbers of the images of the conversation that are to be changed, such as [1] for image 1."


def _fields(tool: Tool) -> Mapping[str, Any]:
    """What the client has decided of the action; the model decides the rest by naming images."""
    return {"action": tool["action"]} if tool.get("action") in ("generate", "edit") else {}


# ------------------------------------------------------------------------------------------------------------
# Calls

MAX_PROMPT = 32_000
"""Characters of a prompt, as in the official API; the rest is cut."""

_SAID = ("revised_prompt", "size", "quality", "background", "output_format")


def _opened(_name: str, _call_id: str, arguments: str) -> Item:
    # The official item calls what the model has written the revised prompt, the user's being the first one.
    prompt, images = _read(arguments)
    said = {"result": None, "action": "edit" if images else "generate", "revised_prompt": prompt or None}
    return {**said, "images": images} if images else said


def _read(arguments: str) -> tuple[str, list[int]]:
    """The prompt among the arguments, and the numbers of images. JSON can write halves of surrogate pairs,
    which are no characters, and integers of any length."""
    try:
        said = json.loads(arguments)
    except (ValueError, RecursionError):
        return "", []
    said = said if isinstance(said, dict) else {}
    prompt, images = said.get("prompt"), said.get("images")
    text = prompt.encode("utf-8", "replace").decode().strip() if isinstance(prompt, str) else ""
    numbers = images if isinstance(images, list) else []
    known = (number for number in numbers if type(number) is int and 0 < number < 1 << 31)
    return text[:MAX_PROMPT], [*dict.fromkeys(known)][:MAX_ORIGINALS]


async def _run(item: Item, registry: Registry, scene: Scene) -> ToolResult:
    spec = registry.get(GENERATE)
    if spec is None:
        return ToolResult(error="Images cannot be made here any more.")
    if not item["revised_prompt"]:
        return ToolResult(error="Give a prompt: say what is to be seen in the image.")
    tool = next((tool for tool in scene.tools if tool["type"] == "image_generation"), {})
    wanted = {name: tool[name] for name in _SENT if tool.get(name) is not None}
    if wanted.get("partial_images") == 0:  # the default, which not every server knows
        del wanted["partial_images"]
    given: dict[str, Any] = {"show": partial(_show, scene)}
    if item["action"] == "edit":
        try:
            given["originals"] = await _originals(item, tool, registry, scene)
        except ToolError as fault:
            return ToolResult(error=str(fault))
        if "input_fidelity" in tool:
            wanted["input_fidelity"] = tool["input_fidelity"]
    calling = replace(spec, run=partial(spec.run, **given))
    return await execute(calling, json.dumps({"prompt": item["revised_prompt"], **wanted}))


async def _originals(item: Item, tool: Tool, registry: Registry, scene: Scene) -> Originals:
    """What an image is made from: those of the conversation that the model has named, or else the latest one.
    They and the mask are read by one call, which bounds their bytes and their time together. Raises
    ToolError."""
    images = images_of(scene.items)
    if not images:
        raise ToolError("There is no image in the conversation to be changed.")
    numbers = item.get("images") or [len(images)]
    if (unknown := max(numbers)) > len(images):
        raise ToolError(f"There is no image {unknown}: the conversation has {len(images)}.")
    wanted, mask = [images[number - 1] for number in numbers], tool.get("input_image_mask")
    reader = registry[READ_IMAGES]
    run = partial(reader.run, owner=scene.owner, images=wanted if mask is None else [*wanted, mask])
    found = await execute(replace(reader, run=run), "{}")
    if found.kept is None:
        raise ToolError(found.error or "The images could not be read.")
    read = found.kept["images"]
    return Originals(read[: len(wanted)], None if mask is None else read[-1])


def _show(scene: Scene, index: int, image: Image) -> None:
    said = {name: image.facts[name] for name in _SAID[1:] if name in image.facts}
    shown = {"partial_image_index": index, "partial_image_b64": image.base64, **said}
    scene.show("response.image_generation_call.partial_image", shown)


def _finish(item: Item, result: ToolResult) -> str | None:
    kept = result.kept or {}
    if result.error is not None:
        fault = {"type": "server_error", "code": None, "message": result.error, **kept.get("fault", {})}
        item |= {"status": "failed", "error": fault}
        return None
    item |= {"status": "completed", "result": kept["base64"], **kept["facts"]}
    return "response.image_generation_call.completed"


def _keeps(item: Item, result: ToolResult) -> Private:
    kept = result.kept or {}
    told = result.output if result.error is None else f"error: {result.error}"
    prompt = kept.get("prompt", item["revised_prompt"]) or ""
    return {"prompt": prompt, "output": told, **({"broken": True} if kept.get("broken") else {})}


def _repeatable(_item: Item, registry: Registry) -> bool:
    return GENERATE in registry and registry[GENERATE].idempotent


def _counts(result: ToolResult) -> tuple[str, str]:
    return "images", (result.kept or {})["model"]


# ------------------------------------------------------------------------------------------------------------
# Prompts


def _say(item: Item, transcript: Transcript) -> None:
    private = private_of(item) or {"prompt": item.get("revised_prompt") or "", "output": _outcome(item)}
    said = {"prompt": private["prompt"], **({"images": item["images"]} if item.get("images") else {})}
    transcript.call(item["id"], _FUNCTION, json.dumps(said, ensure_ascii=False))
    made = item["status"] == "completed"
    number = f" It is image {transcript.image()} of the conversation." if made else ""
    transcript.answer(item["id"], f"{private['output']}{number}")


def _outcome(item: Item) -> str:
    """What the model is told of an image that was not made here, or of which nothing else is known."""
    if item["status"] == "completed":
        return "The image was made, and the user sees it."
    message = (item.get("error") or {}).get("message")
    return f"error: {message if isinstance(message, str) else 'The image was not made.'}"


ROWS = (
    ItemType(
        "image_generation_call",
        "ig_",
        item_shape(
            {},
            {
                "result": STRING,
                "action": STRING,
                "error": mapping,
                "images": array(whole(1), 0, MAX_ORIGINALS),
                **dict.fromkeys(_SAID, STRING),
            },
            statuses=("completed", "in_progress", "generating", "failed"),
            result=None,
        ),
        _say,
        events={
            "response.image_generation_call.in_progress": PLACE,
            "response.image_generation_call.generating": PLACE,
            "response.image_generation_call.partial_image": f"{PLACE} partial_image_index partial_image_b64",
            "response.image_generation_call.completed": PLACE,
        },
        # There is no event for an image that was not made: the item's own end says it.
        order=(
            "image_generation_call.in_progress (image_generation_call.generating"
            " image_generation_call.partial_image* image_generation_call.completed?)?"
        ),
        tools={"image_generation": _tool},
        call=Call(
            _opened,
            opens=("response.image_generation_call.in_progress",),
            offers=_offers,
            lacks=_lacks,
            changes_images=_changes,
            fields=_fields,
            execution=Execution(
                "generating",
                _run,
                _finish,
                _repeatable,
                starts=("response.image_generation_call.generating",),
                keeps=_keeps,
                broken="failed",
                counts=_counts,
            ),
        ),
        instead="Offer a function that makes images, or an MCP server that does.",
        known_by_id=True,
        heavy=("result",),
    ),
)
