"""Owners as an operator names them: by id, or by a name that only one of them has.

Names are looked up in the list of owners, in the database or at the server that holds it, before a command
does its work. So every command takes a name wherever it takes an owner, and tables can show names beside ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from server.access import LOCAL_OWNER
from server.admin.database_access import AdminError, UnknownOwner, carry_out
from server.config import Config
from server.settings import nearest
from storage import Page, Storage, StoredOwner, each_row

PATH = "/admin/owners"
LISTED_AT_ONCE = 100


async def every_owner(storage: Storage) -> list[StoredOwner]:
    """All owners, archived ones included, oldest first."""

    async def page_after(id: str | None) -> Page[StoredOwner]:
        return await storage.list_owners(limit=LISTED_AT_ONCE, after=id, archived=True)

    return [owner async for owner in each_row(page_after, lambda owner: owner.id)]


def owner_id(config: Config, word: str, *, makes: bool = False) -> str:
    """The id of the owner that a word of the command line names by its id or its name; the word itself where
    there is none. makes: whether a database may be made for it.

    A name that several owners have is an AdminError that lists their ids; of those, an archived one counts
    only where all are. So is an empty word, such as a variable of a shell that is not set.
    """
    return _found(_owners(config, makes=makes), word) or word


def known_owner_id(config: Config, word: str, *, makes: bool = False) -> str:
    """The id of the owner that a word names, as `owner_id` finds it. UnknownOwner where there is none; the
    owner of a server without keys is always known. makes: as for `owner_id`."""
    if (found := _found(_owners(config, makes=makes), word)) is not None:
        return found
    if word == LOCAL_OWNER:
        return word
    raise UnknownOwner(f"there is no owner whose id or name is {word!r}: see `antiphon owners list`")


def nearest_owner(config: Config, word: str) -> tuple[str, str] | None:
    """The name and the id of the live owner that a word, which names another one, most likely means; None
    where none is near."""
    others = {one["name"]: one["id"] for one in _owners(config) if one["id"] != word and _live(one)}
    meant = nearest(word, others)
    return None if meant is None else (meant, others[meant])


def require_new_name(config: Config, name: str, *, of: str | None = None) -> None:
    """AdminError where another owner than `of` has this name, or has it as its id, and for an empty name. The
    name of an archived owner may be given again; that of a server without keys is never free."""
    if not name:
        raise AdminError("the name of an owner has a character at least")
    others = [one for one in _owners(config, makes=of is None) if one["id"] != of]
    taken = {one["id"] for one in others if name == one["id"] or (name == one["name"] and _live(one))}
    if name == LOCAL_OWNER != of:
        taken.add(LOCAL_OWNER)
    if taken:
        raise AdminError(f"there is an owner {name!r} already: its id is {', '.join(sorted(taken))}")


def with_owner_names(config: Config, objects: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Objects with `owner_name` behind their `owner`, None where there is no owner of that id."""
    listed = list(objects)
    names = {one["id"]: one["name"] for one in _owners(config)} if listed else {}
    return [
        {
            name: value
            for field, given in one.items()
            for name, value in (
                ((field, given), ("owner_name", names.get(given))) if field == "owner" else ((field, given),)
            )
        }
        for one in listed
    ]


def shown_owner(object: Mapping[str, Any]) -> str:
    """An object's owner in a table: its id, and its name where that is another."""
    id, name = object["owner"], object.get("owner_name")
    return f"{id} ({name})" if name and name != id else id or "-"


def _owners(config: Config, *, makes: bool = False) -> Sequence[Mapping[str, Any]]:
    async def listed(storage: Storage) -> dict[str, Any]:
        return {
            "data": [
                {
                    "id": owner.id,
                    "name": owner.name,
                    "status": "active" if owner.archived_at is None else "archived",
                }
                for owner in await every_owner(storage)
            ]
        }

    found: Sequence[Mapping[str, Any]] = carry_out(config, listed, "GET", PATH, makes=makes)["data"]
    return found


def _found(owners: Sequence[Mapping[str, Any]], word: str) -> str | None:
    """The id of the owner that a word names: the one of that id, else the live one of that name, else the
    archived one. None for none; AdminError where there are several, and for an empty word."""
    if not word:
        raise AdminError("an owner is named by its id or name, and not by an empty text")
    if any(one["id"] == word for one in owners):
        return word
    same = [one for one in owners if one["name"] == word]
    named = [one["id"] for one in same if _live(one)] or [one["id"] for one in same]
    if len(named) > 1:
        raise AdminError(f"several owners are named {word!r}: give one of their ids, {', '.join(named)}")
    return named[0] if named else None


def _live(owner: Mapping[str, Any]) -> bool:
    return bool(owner["status"] == "active")
