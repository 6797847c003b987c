"""The statements on prompt templates; each function runs inside a transaction that its caller holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, delete, func, insert, select, tuple_, update

from storage.kept_replies import forget_replies
from storage.prompts.records import DefaultVersion, PromptChange, StoredPrompt, StoredPromptVersion
from storage.records import Cursor, NotFound, Order, Page, page_length
from storage.tables import prompt_versions, prompts

ROW_BYTES = 256
"""What a prompt, or a version of one, takes beside its metadata or its body."""

ROWS = 100
"""Prompts that one step of a purge removes."""


def create(conn: Connection, prompt: StoredPrompt, body: bytes) -> StoredPrompt:
    """Stores a prompt with its first version."""
    _add(conn, prompt)
    _add_version(conn, prompt, prompt.latest_version, body, prompt.created_at)
    return prompt


def put_back(conn: Connection, prompt: StoredPrompt, versions: Sequence[StoredPromptVersion]) -> None:
    """Stores a prompt with all of its versions, as an export has them."""
    _add(conn, prompt)
    for version in versions:
        _add_version(conn, prompt, version.version, version.body, version.created_at)


def _add(conn: Connection, prompt: StoredPrompt) -> None:
    conn.execute(
        insert(prompts).values(
            id=prompt.id,
            owner=prompt.owner,
            created_at=prompt.created_at,
            name=prompt.name,
            metadata=prompt.metadata,
            default_version=prompt.default_version,
            latest_version=prompt.latest_version,
            num_bytes=_size(prompt.metadata, prompt.name),
        )
    )


def get(conn: Connection, owner: str, id: str, *, change: bool = False) -> StoredPrompt:
    """A prompt, held until the transaction's end if it is to be changed. NotFound("prompt")."""
    query = select(prompts).where(prompts.c.id == id, prompts.c.owner == owner)
    row = conn.execute(query.with_for_update() if change else query).first()
    if row is None:
        raise NotFound("prompt", id)
    return _stored(row)


def list_(
    conn: Connection, owner: str, *, limit: int, order: Order, after: Cursor | None
) -> Page[StoredPrompt]:
    """One page, by time and then id. NotFound("prompt") for an unknown `after`."""
    query = select(prompts).where(prompts.c.owner == owner)
    place = tuple_(prompts.c.created_at, prompts.c.id)
    if after is not None:
        if isinstance(after, str):
            last = get(conn, owner, after)
            after = (last.created_at, last.id)
        at = tuple_(*after)
        query = query.where(place > at if order == "asc" else place < at)
    by_time = (prompts.c.created_at, prompts.c.id)
    query = query.order_by(*(by_time if order == "asc" else (column.desc() for column in by_time)))
    rows = conn.execute(query.limit(limit + 1)).all()
    return Page(tuple(map(_stored, rows[:limit])), len(rows) > limit)


def change(conn: Connection, owner: str, id: str, wanted: PromptChange, now: int) -> StoredPrompt:
    """Changes a prompt. NotFound("prompt"), and ("prompt version") for a default that is not there."""
    prompt = get(conn, owner, id, change=True)
    latest, default = prompt.latest_version, prompt.default_version
    if wanted.body is not None:
        latest = default = latest + 1
        _add_version(conn, prompt, latest, wanted.body, now)
    if wanted.default_version is not None:
        default = wanted.default_version
        version(conn, owner, id, default)
    name = prompt.name if wanted.name is None else wanted.name or None
    metadata = prompt.metadata if wanted.metadata is None else wanted.metadata
    conn.execute(
        update(prompts)
        .where(prompts.c.id == id)
        .values(
            name=name,
            metadata=metadata,
            latest_version=latest,
            default_version=default,
            num_bytes=_size(metadata, name),
        )
    )
    return get(conn, owner, id)


def version(conn: Connection, owner: str, id: str, number: int) -> StoredPromptVersion:
    """NotFound("prompt version")."""
    query = select(prompt_versions).where(
        prompt_versions.c.prompt_id == id,
        prompt_versions.c.version == number,
        prompt_versions.c.owner == owner,
    )
    row = conn.execute(query).first()
    if row is None:
        raise NotFound("prompt version", str(number))
    return _version(row)


def versions(
    conn: Connection, owner: str, id: str, *, limit: int, order: Order, after: int | None
) -> Page[StoredPromptVersion]:
    """One page by number. NotFound("prompt")."""
    get(conn, owner, id)
    number = prompt_versions.c.version
    query = select(func.length(prompt_versions.c.body)).where(prompt_versions.c.prompt_id == id)
    if after is not None:
        query = query.where(number > after if order == "asc" else number < after)
    query = query.order_by(number if order == "asc" else number.desc())
    sizes = conn.execute(query.limit(limit + 1)).scalars().all()
    length = page_length(sizes, limit)
    rows = conn.execute(query.with_only_columns(*prompt_versions.c).limit(length)).all()
    return Page(tuple(map(_version, rows)), len(sizes) > length)


def remove_version(conn: Connection, owner: str, id: str, number: int) -> None:
    """NotFound("prompt" | "prompt version"); DefaultVersion for the one that requests get."""
    prompt = get(conn, owner, id, change=True)
    version(conn, owner, id, number)
    if prompt.default_version == number:
        raise DefaultVersion(id, number)
    gone = delete(prompt_versions)
    conn.execute(gone.where(prompt_versions.c.prompt_id == id, prompt_versions.c.version == number))


def remove(conn: Connection, owner: str, id: str) -> None:
    """Removes a prompt with all of its versions. NotFound("prompt")."""
    get(conn, owner, id, change=True)
    remove_all(conn, [id])


def of_owner(conn: Connection, owner: str, before: int) -> Sequence[str]:
    """The next prompts that an owner had at that time."""
    query = select(prompts.c.id).where(prompts.c.owner == owner, prompts.c.created_at <= before)
    return conn.execute(query.limit(ROWS)).scalars().all()


def remove_all(conn: Connection, ids: Sequence[str]) -> int:
    """Removes prompts with all of their versions; returns how many."""
    forget_replies(conn, ids)
    conn.execute(delete(prompt_versions).where(prompt_versions.c.prompt_id.in_(ids)))
    return conn.execute(delete(prompts).where(prompts.c.id.in_(ids))).rowcount


def _add_version(conn: Connection, prompt: StoredPrompt, number: int, body: bytes, now: int) -> None:
    conn.execute(
        insert(prompt_versions).values(
            prompt_id=prompt.id,
            version=number,
            owner=prompt.owner,
            created_at=now,
            body=body,
            num_bytes=ROW_BYTES + len(body),
        )
    )


def _size(metadata: bytes, name: str | None) -> int:
    return ROW_BYTES + len(metadata) + len((name or "").encode())


def _stored(row: Row[*tuple[Any, ...]]) -> StoredPrompt:
    columns = ("id", "owner", "created_at", "name", "metadata", "default_version", "latest_version")
    return StoredPrompt(*(row._mapping[name] for name in columns))


def _version(row: Row[*tuple[Any, ...]]) -> StoredPromptVersion:
    return StoredPromptVersion(row.prompt_id, row.version, row.created_at, row.body)
