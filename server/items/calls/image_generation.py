"""Images that other servers made; text has no words for them."""

from __future__ import annotations

from server.items.item_type import ItemType
from server.items.parts import PLACE, item_shape
from server.shapes import STRING, record, whole

ROWS = (
    ItemType(
        "image_generation_call",
        "ig_",
        item_shape(
            {},
            {"result": STRING},
            statuses=("completed", "in_progress", "generating", "failed"),
            result=None,
        ),
        events={
            "response.image_generation_call.in_progress": PLACE,
            "response.image_generation_call.generating": PLACE,
            "response.image_generation_call.partial_image": f"{PLACE} partial_image_index partial_image_b64",
            "response.image_generation_call.completed": PLACE,
        },
        order=(
            "image_generation_call.in_progress image_generation_call.generating"
            " image_generation_call.partial_image* image_generation_call.completed"
        ),
        tools={
            "image_generation": record(
                {},
                {
                    "model": STRING,
                    "quality": STRING,
                    "size": STRING,
                    "output_format": STRING,
                    "output_compression": whole(0, 100),
                    "partial_images": whole(0, 3),
                },
            )
        },
        instead="Offer a function that makes images, or an MCP server that does.",
    ),
)
