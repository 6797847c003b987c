"""The private half of an item: what the server keeps of it, and shows to no client.

Official items do not hold all that a model was shown: a web search says its queries and not its results. What
later turns need besides is the item's private half, a JSON object: mostly for their prompts; and a request
for an approval, which says the label of a server alone, has there which server that was. It is stored with
the item and erased with it. An item that carries one is still an object with the public fields alone, so that
nothing that writes it as JSON can write the other half. A client that keeps items itself is given it sealed.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

import orjson

Private = Mapping[str, Any]

SEALED = "antiphon_sealed"
"""The field that holds the private half sealed, where a client keeps the item, and nobody else does."""


class PrivateItem(dict[str, Any]):
    """An item with its private half. A copy by `dict` or `{**item}` has the public fields alone."""

    __slots__ = ("private",)

    def __init__(self, item: Mapping[str, Any], private: Private) -> None:
        super().__init__(item)
        self.private = private


BESIDE = "beside"
"""The member that says beside which call the model wrote this one: the id of an earlier item of the same
generation whose call this server carries out. The items do not tell by themselves: that call has its outcome
before this one comes, as it would if the model had seen it."""


def beside(item: Mapping[str, Any]) -> str | None:
    """Beside which call the model wrote this one: an item's id."""
    found: str | None = (private_of(item) or {}).get(BESIDE)
    return found


def private_of(item: Mapping[str, Any]) -> Private | None:
    """The private half of an item; None where nothing is known of it."""
    return item.private if isinstance(item, PrivateItem) else None


def with_private(item: dict[str, Any], private: Private | None) -> dict[str, Any]:
    """An item with a private half, where it has one."""
    return item if private is None else PrivateItem(item, private)


def load_item(body: bytes, private: bytes | None) -> dict[str, Any]:
    """An item as storage has it, both halves."""
    item: dict[str, Any] = orjson.loads(body)
    return with_private(item, None if private is None else orjson.loads(private))


def private_bytes(items: Iterable[Mapping[str, Any]], types: Container[str]) -> int:
    """The bytes of the private halves of the items of these types, as storage takes them."""
    return sum(len(dump_private(item) or b"") for item in items if item["type"] in types)


def dump_private(item: Mapping[str, Any]) -> bytes | None:
    """The private half of an item as storage takes it."""
    private = private_of(item)
    return None if private is None else orjson.dumps(private)
