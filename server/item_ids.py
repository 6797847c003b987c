"""Gives each of a request's items its identity before the items are stored.

A reference becomes the item that it names, and an item that a client sends back unchanged becomes the stored
one. An item whose id already belongs to a different item gets a new id.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from server.errors import ApiError
from server.ignored import collecting
from server.items import (
    FILLED,
    ITEM_TYPES,
    SEALED,
    Item,
    filled,
    input_files_of,
    load_item,
    private_of,
    unseen_images_of,
    with_private,
)
from server.schema import normalize_item, num_parts
from server.threads import THREADED_PARTS, aside, in_large_request

if TYPE_CHECKING:
    from storage import Storage, StoredItem


def may_be_known(item: Item) -> bool:
    """Whether an item is of a kind that clients send back: anything but a message of theirs, unless it has
    files or images, which may have been read before."""
    if item["type"] != "message" or item["role"] == "assistant":
        return True
    return bool(input_files_of(item) or unseen_images_of(item))


async def identify(
    storage: Storage, owner: str, items: Sequence[Item], *, param: str = "input", taken: str | None = None
) -> list[Item]:
    """Normalised items as storage is to have them, one for one; the order is kept.

    taken: an id that is known not to be free, though no item that the owner can see has it. Raises ApiError
    404 for a reference to an item that the owner cannot see, and for an item that says no more than its id.
    """
    found = await storage.get_items(owner, list({item["id"] for item in items}))
    much = in_large_request() or num_parts(items) > THREADED_PARTS
    return await aside(much, _identified, items, found, param, taken)


def _identified(
    items: Sequence[Item], found: Mapping[str, StoredItem], param: str, taken: str | None
) -> list[Item]:
    known: dict[str, Item] = {
        item_id: load_item(stored.body, stored.private) for item_id, stored in found.items()
    }
    if taken is not None:
        known.setdefault(taken, {"type": "unknown"})
    identified = []
    for index, item in enumerate(items):
        stored = known.setdefault(item["id"], item)
        refers = item["type"] == "item_reference"
        same = not refers and _same(item, stored)
        unknown = item["id"] not in found if refers else not same or stored is item
        if unknown and (refers or _names_only(item)):
            message = f"Item with id '{item['id']}' not found."
            raise ApiError(404, message, code="not_found", param=f"{param}[{index}].id")
        if refers or same:
            item = stored
        else:
            other = {**item, "id": ITEM_TYPES[item["type"]].prefix + secrets.token_hex(24)}
            item = with_private(other, private_of(item))
        identified.append(item)
    return identified


def _names_only(item: Item) -> bool:
    """Whether an item says nothing but which stored item it is, as those may that are known by their ids."""
    row = ITEM_TYPES.get(item["type"])
    if row is None or not row.known_by_id or private_of(item) is not None:
        return False
    said: dict[str, Any] = _bare(item)
    return said.keys() <= {"type", "id", "status", "action"}


def _same(sent: Item, stored: Item) -> bool:
    """Whether both say the same; clients leave nulls and defaults out of what they send back, and send what
    an `include` has filled in, or of some items hardly more than the id."""
    if sent is stored:
        return True
    if sent["type"] != stored["type"]:
        return False
    if SEALED in stored and SEALED not in sent:  # it was opened
        stored = with_private({k: v for k, v in stored.items() if k != SEALED}, private_of(stored))
    if ITEM_TYPES[sent["type"]].known_by_id:
        # A status that the client has left out was taken to be the usual one.
        return all(stored.get(name) == said for name, said in _bare(sent).items() if name != "status")
    if (private := private_of(stored)) is not None:
        sent, stored = filled(sent, private, FILLED), filled(stored, private, FILLED)
    with collecting():  # what was in vain was named when the item came, and is no matter of this request
        again = normalize_item(stored, "stored", lambda prefix: prefix)
    same: bool = _bare(sent) == _bare(again)
    return same


def _bare(value: Any) -> Any:
    """A JSON value without nulls."""
    if isinstance(value, dict):
        return {key: _bare(element) for key, element in value.items() if element is not None}
    return [_bare(element) for element in value] if isinstance(value, list) else value
