"""Images: the model describes them, and the server that the operator has named for it makes them.

The image is in the item, and the model, which reads text, is told in words that it was made. How it was told,
and the prompt as it wrote it, are the private half of the item.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from server.ignored import ignore
from server.items.item_type import Call, Execution, Item, ItemType, Scene, Tool, flat_function
from server.items.parts import PLACE, item_shape
from server.items.private_half import Private, private_of
from server.items.transcript import Transcript
from server.shapes import STRING, anything, described, mapping, one_of, record, refuse, schema_of, whole
from tools import GENERATE, Registry, ToolResult, execute

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

_OF_EDITS = ("input_fidelity", "input_image_mask")

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
        **dict.fromkeys(_OF_EDITS, anything),
    },
)


def _tool(value: Any, path: str) -> Tool:
    tool: Tool = _TOOL(value, path)
    for name in _OF_EDITS:
        if name in tool:
            _refuse_edits(f"{path}.{name}")
    if tool.get("action") == "edit":
        _refuse_edits(f"{path}.action")
    if "model" in tool:
        ignore(f"{path}.model")  # the operator has chosen one
    return tool


def _refuse_edits(path: str) -> None:
    message = f"Invalid '{path}': this server makes images from words, and changes none."
    refuse(path, message, "unsupported_parameter")


described(_tool, lambda: schema_of(_TOOL))


def _lacks(_tool: Tool, registry: Registry) -> str | None:
    if GENERATE in registry:
        return None
    return "no server of images is configured: the operator names one in the table [images] of antiphon.toml"


def _offers(_tool: Tool, _registry: Registry, _path: str) -> Sequence[Tool]:
    properties = {"prompt": {"type": "string", "description": "All that is to be seen, and in which style."}}
    parameters = {
        "type": "object",
        "properties": properties,
        "required": ["prompt"],
        "additionalProperties": False,
    }
    return [
        flat_function(_FUNCTION, "Make an image from a description, and show it to the user.", parameters)
    ]


_FUNCTION = "image_generation"

# ------------------------------------------------------------------------------------------------------------
# Calls

MAX_PROMPT = 32_000
"""Characters of a prompt, as in the official API; the rest is cut."""

_SAID = ("revised_prompt", "size", "quality", "background", "output_format")


def _opened(_name: str, _call_id: str, arguments: str) -> Item:
    # The official item calls what the model has written the revised prompt, the user's being the first one.
    return {"result": None, "action": "generate", "revised_prompt": _prompt(arguments) or None}


def _prompt(arguments: str) -> str:
    """The prompt among the arguments. JSON can write halves of surrogate pairs, which are no characters."""
    try:
        said = json.loads(arguments)
    except ValueError:
        return ""
    prompt = said.get("prompt") if isinstance(said, dict) else None
    return prompt.encode("utf-8", "replace").decode().strip()[:MAX_PROMPT] if isinstance(prompt, str) else ""


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
    showing = replace(spec, run=partial(spec.run, show=partial(_show, scene)))
    return await execute(showing, json.dumps({"prompt": item["revised_prompt"], **wanted}))


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
    arguments = json.dumps({"prompt": private["prompt"]}, ensure_ascii=False)
    transcript.call(item["id"], _FUNCTION, arguments)
    transcript.answer(item["id"], private["output"])


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
