"""Item types, one row each: their shapes, their words in a prompt, their events, who carries out calls.

Owns everything that the server knows of one type of item, so that nothing else needs to know it. Messages and
reasoning lie here; `calls` has what the model calls.
"""

from __future__ import annotations

from server.items.calls import InputReader
from server.items.catalogue import (
    FILLED,
    ITEM_TYPES,
    answering,
    broken_in_a_row,
    call_of,
    execution_of,
    filled,
    filled_body,
    instead_of,
    is_client_call,
    is_left_out,
    is_offered,
    is_output,
    is_running,
    lacks,
    tool_shapes,
    type_of_calls,
    words_of,
)
from server.items.item_type import (
    ArgumentReader,
    Call,
    Elsewhere,
    Execution,
    Item,
    ItemType,
    Listing,
    Route,
    Scene,
    Stream,
    Tool,
    Whole,
    function_of,
    unspoken,
)
from server.items.parts import ASSISTANT_PART, OUTPUT_PART, USER_PART, identifier
from server.items.private_half import Private, dump_private, load_item, private_of, with_private
from server.items.sources import Source, Sources
from server.items.transcript import Transcript, text_of

__all__ = [
    "ASSISTANT_PART",
    "FILLED",
    "ITEM_TYPES",
    "OUTPUT_PART",
    "USER_PART",
    "ArgumentReader",
    "Call",
    "Elsewhere",
    "Execution",
    "InputReader",
    "Item",
    "ItemType",
    "Listing",
    "Private",
    "Route",
    "Scene",
    "Source",
    "Sources",
    "Stream",
    "Tool",
    "Transcript",
    "Whole",
    "answering",
    "broken_in_a_row",
    "call_of",
    "dump_private",
    "execution_of",
    "filled",
    "filled_body",
    "function_of",
    "identifier",
    "instead_of",
    "is_client_call",
    "is_left_out",
    "is_offered",
    "is_output",
    "is_running",
    "lacks",
    "load_item",
    "private_of",
    "text_of",
    "tool_shapes",
    "type_of_calls",
    "unspoken",
    "with_private",
    "words_of",
]
