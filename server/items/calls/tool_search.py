"""Tools that are found or added in the middle of a conversation.

This server offers the tools of the request alone; a model must not be told of others that it cannot call.
"""

from __future__ import annotations

from server.items.item_type import ItemType
from server.items.parts import identifier, item_shape
from server.shapes import NAME, STRING, anything, array, mapping, one_of, record

_TOOLS = array(mapping)
_FIELDS = {"call_id": identifier, "execution": one_of("client", "server")}

ROWS = (
    ItemType(
        "tool_search_call",
        "tsc_",
        item_shape({"arguments": anything}, _FIELDS, call_id=None, execution="client"),
        tools={
            "tool_search": record({}, {"execution": one_of("server", "client"), "parameters": mapping}),
            "namespace": record(
                {"name": NAME, "tools": array(mapping, 1)}, {"description": STRING}, description=""
            ),
        },
        instead="Give the functions themselves: all tools of a request are offered at once.",
    ),
    ItemType(
        "tool_search_output",
        "tso_",
        item_shape({"tools": _TOOLS}, _FIELDS, call_id=None, execution="client"),
    ),
    ItemType(
        "additional_tools",
        "at_",
        item_shape({"tools": _TOOLS}, {"role": one_of("developer")}, statuses=(), role="developer"),
    ),
)
