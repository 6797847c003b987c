"""Items that change a conversation instead of adding to it; this server has words for none of them."""

from __future__ import annotations

from server.items.item_type import ItemType
from server.items.parts import item_shape
from server.shapes import STRING, mapping

ROWS = (
    # Sealed by another server, with a key that this one does not have.
    ItemType("compaction", "cmp_", item_shape({"encrypted_content": STRING}, statuses=())),
    ItemType("compaction_trigger", "cmpt_", item_shape({}, statuses=())),
    ItemType(
        "configuration_update", "cfg_", item_shape({}, {"reasoning": mapping, "text": mapping}, statuses=())
    ),
)
