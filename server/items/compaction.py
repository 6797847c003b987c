"""Items that change a conversation instead of adding to it: a compaction, its trigger, other settings.

A compaction stands for everything before it. What it says in a prompt is its private half, which is stored
with it, and which clients are given sealed, as `encrypted_content`. `Compacted` is that content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from server.items.item_type import Item, ItemType, unspoken
from server.items.parts import PLACE, item_shape
from server.items.private_half import Private, private_of
from server.items.transcript import Transcript
from server.shapes import STRING, mapping, text

COMPACTION = "compaction"
TRIGGER = "compaction_trigger"
SUMMARY = "compaction.summary"
"""The value of `include` that shows the summary of a compaction; an extension."""

COMPACTING = "response.compaction.compacting"
"""The event that tells that more of a summary was written, of which nothing is shown."""

MAX_SEALED = 20_971_520
"""Characters of `encrypted_content`, as the official schema has it."""

VERSION = 1

_HEAD = "The earlier part of this conversation was replaced by this message. It has "
_SUMMARY = "a summary of that part"
_USERS = "what the user said in it, word for word, the oldest first"


@dataclass(frozen=True, slots=True)
class Compacted:
    """What stands in the place of everything before a compaction.

    systems: texts of the system messages, which are never summarised. summary: the model's own, None where
    none was needed. users: the user's newest messages, word for word, oldest first. messages: the newest
    messages in the form of chat templates, which stay as they are. num_users: how many messages of users it
    has word for word. sources, container_files: what can be cited (`Sources`).
    """

    systems: Sequence[str] = ()
    summary: str | None = None
    users: Sequence[str] = ()
    messages: Sequence[Mapping[str, Any]] = ()
    num_users: int = 0
    sources: Sequence[Mapping[str, Any]] = ()
    container_files: Sequence[Mapping[str, Any]] = ()
    version: int = VERSION

    def dump(self) -> dict[str, Any]:
        """The private half of a compaction, as JSON has it."""
        return asdict(self)

    @property
    def told(self) -> str | None:
        """The text of the one message; None where all messages stay as they are."""
        has = [name for name, said in ((_SUMMARY, self.summary), (_USERS, self.users)) if said]
        if not has:
            return None
        parts = [f"{_HEAD}{', and '.join(has)}."]
        if self.summary:
            parts.append(f"Summary:\n{self.summary}")
        if self.users:
            parts.append("The user said:\n" + "\n".join(f"- {said}" for said in self.users))
        return "\n\n".join(parts)


ABANDONED: Private = {"version": VERSION, "abandoned": True}
"""The private half of a compaction that its response ended before: it stands for nothing."""


def compacted(item: Item) -> Compacted | None:
    """What an item stands for, where it is a compaction that takes the place of what is before it."""
    private = private_of(item) if item["type"] == COMPACTION else None
    if private is None or private.get("abandoned"):
        return None
    return Compacted(**private)


def is_trigger(item: Mapping[str, Any]) -> bool:
    """Whether an item asks for a compaction."""
    return item.get("type") == TRIGGER


def is_unfinished_compaction(item: Item) -> bool:
    """Whether an item of an output is a compaction that is being made."""
    return bool(item["type"] == COMPACTION and not item["encrypted_content"])


def _say(item: Item, transcript: Transcript) -> None:
    content = compacted(item)
    if content is not None:
        told = content.told
        one = [] if told is None else [{"role": "user", "content": told}]
        transcript.compact(content.systems, [*one, *content.messages])


def _fill_summary(item: Item, private: Private) -> None:
    item["summary"] = private.get("summary")


ROWS = (
    ItemType(
        COMPACTION,
        "cmp_",
        item_shape({"encrypted_content": text(0, MAX_SEALED)}, {"summary": STRING}, statuses=()),
        _say,
        events={COMPACTING: PLACE},
        order="compaction.compacting*",
        told_privately=True,
        includes={SUMMARY: _fill_summary},
    ),
    # It asks for a compaction where it is the last item of a request (`schema.triggered`), and is not kept.
    ItemType(TRIGGER, "cmpt_", item_shape({}, statuses=())),
    # The request that it stands in, and all later ones, are taken to have said what it says.
    ItemType(
        "configuration_update",
        "cfg_",
        item_shape({}, {"reasoning": mapping, "text": mapping}, statuses=()),
        unspoken,
        configures=True,
    ),
)
