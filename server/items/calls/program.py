"""Programs that call tools, run by other servers."""

from __future__ import annotations

from server.items.item_type import ItemType
from server.items.parts import call_shape, item_shape
from server.shapes import STRING, record

ROWS = (
    ItemType(
        "program",
        "prog_",
        item_shape(call_shape(code=STRING, fingerprint=STRING), statuses=()),
        needs_id=True,
        tools={"programmatic_tool_calling": record({})},
        instead="Leave it out: the model calls every tool directly.",
    ),
    ItemType(
        "program_output",
        "po_",
        item_shape(call_shape(result=STRING), statuses=("completed", "incomplete")),
        needs_id=True,
    ),
)
