"""Tools that come with an item: they are offered from that item on, with those of each request."""

from __future__ import annotations

from server.items.item_type import ItemType, unspoken
from server.items.parts import item_shape
from server.shapes import array, mapping, one_of

ROWS = (
    ItemType(
        "additional_tools",
        "at_",
        # Its tools are read as those of a request are: `schema.items` does that.
        item_shape({"tools": array(mapping)}, {"role": one_of("developer")}, statuses=(), role="developer"),
        unspoken,
        adds=True,
    ),
)
