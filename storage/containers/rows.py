"""The statements on containers; each function runs inside a transaction that its caller holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, and_, delete, func, insert, or_, select, tuple_, update

from storage.drivers import earlier_clock
from storage.records import (
    ContainerChange,
    ContainerFile,
    ContainerFull,
    ContainerRoom,
    Cursor,
    NotFound,
    Order,
    Page,
    PathTaken,
    StoredContainer,
)
from storage.tables import container_files, containers

ROWS = 100
"""Containers that one step of a sweep removes."""


def create(
    conn: Connection, container: StoredContainer, files: Sequence[ContainerFile], room: ContainerRoom
) -> Sequence[str] | None:
    """Stores a container with its first files, in the place of one that has expired; returns the digests of
    that one's files, None where the container is there already. ContainerFull, PathTaken."""
    replaced: Sequence[str] = ()
    lasts = select(_lasts(conn, container.created_at)).where(containers.c.id == container.id)
    there = conn.execute(lasts.with_for_update()).scalar()
    if there is not None:
        if there:
            return None
        replaced = remove(conn, (container.id,))
    values = {**asdict(container), "given": " ".join(container.given), "num_bytes": 0}
    conn.execute(insert(containers).values(values))
    _add(conn, container.id, files, room)
    return replaced


def get(conn: Connection, owner: str, id: str, now: int, *, hold: bool = False) -> StoredContainer:
    """NotFound("container") for one that is unknown, another owner's, or has expired."""
    query = select(*_COLUMNS).where(containers.c.id == id, *_alive(conn, owner, now))
    row = conn.execute(query.with_for_update() if hold else query).first()
    if row is None:
        raise NotFound("container", id)
    return _stored(row)


def state_of(conn: Connection, owner: str, id: str) -> bytes | None:
    """The session of a container, where there is one."""
    query = select(containers.c.state).where(containers.c.owner == owner, containers.c.id == id)
    found: bytes | None = conn.execute(query).scalar()
    return found


def use(conn: Connection, ids: Sequence[str], now: int) -> None:
    """These containers are used now, so that they do not expire; not those that have."""
    held = (
        select(containers.c.id).where(containers.c.id.in_(ids), _lasts(conn, now)).order_by(containers.c.id)
    )
    known = conn.execute(held.with_for_update()).scalars().all()
    conn.execute(update(containers).where(containers.c.id.in_(known)).values(last_active_at=now))


def alive(conn: Connection, ids: Sequence[str], now: int) -> set[str]:
    """Those of these containers that are there."""
    there = select(containers.c.id).where(containers.c.id.in_(ids), _lasts(conn, now))
    return {*conn.execute(there).scalars()}


def list_(
    conn: Connection,
    owner: str,
    *,
    now: int,
    limit: int,
    order: Order,
    after: Cursor | None,
    name: str | None,
) -> Page[StoredContainer]:
    """One page, by time and then id. NotFound("container") for an unknown `after`."""
    query = select(*_COLUMNS).where(*_alive(conn, owner, now))
    if name is not None:
        query = query.where(containers.c.name == name)
    by_time = (containers.c.created_at, containers.c.id)
    if after is not None:
        if isinstance(after, str):
            last = get(conn, owner, after, now)
            after = (last.created_at, last.id)
        at = tuple_(*after)
        query = query.where(tuple_(*by_time) > at if order == "asc" else tuple_(*by_time) < at)
    query = query.order_by(*(by_time if order == "asc" else (column.desc() for column in by_time)))
    rows = conn.execute(query.limit(limit + 1)).all()
    return Page(tuple(map(_stored, rows[:limit])), len(rows) > limit)


def remove(conn: Connection, ids: Sequence[str]) -> Sequence[str]:
    """Removes containers with their files; returns the digests of these."""
    gone = delete(container_files).where(container_files.c.container_id.in_(ids))
    digests = conn.execute(gone.returning(container_files.c.digest)).scalars().all()
    conn.execute(delete(containers).where(containers.c.id.in_(ids)))
    return digests


def expired(now: int) -> ColumnElement[bool]:
    """Which containers have expired."""
    return containers.c.last_active_at + containers.c.lifetime <= now


def of_owner(owner: str, before: int) -> ColumnElement[bool]:
    """Which containers an owner had at that time."""
    return and_(containers.c.owner == owner, containers.c.created_at <= before)


def next_(conn: Connection, which: ColumnElement[bool]) -> Sequence[str]:
    """The next of such containers."""
    return conn.execute(select(containers.c.id).where(which).limit(ROWS)).scalars().all()


def remove_those(
    conn: Connection, ids: Sequence[str], which: ColumnElement[bool]
) -> tuple[int, Sequence[str]]:
    """Removes those of these containers that are still such ones: an id may have been made anew since it was
    read. Returns how many went, and the digests of their files."""
    held = select(containers.c.id).where(containers.c.id.in_(ids), which).order_by(containers.c.id)
    still = conn.execute(held.with_for_update()).scalars().all()
    return len(still), remove(conn, still)


# ------------------------------------------------------------------------------------------------------------
# Files


def files_of(conn: Connection, owner: str, container_id: str) -> tuple[ContainerFile, ...]:
    """All files of a container, oldest first."""
    query = select(container_files).where(
        container_files.c.container_id == container_id, container_files.c.owner == owner
    )
    rows = conn.execute(query.order_by(container_files.c.created_at, container_files.c.id)).all()
    return tuple(ContainerFile(**row._mapping) for row in rows)


def add_files(
    conn: Connection, owner: str, id: str, files: Sequence[ContainerFile], now: int, room: ContainerRoom
) -> Sequence[str]:
    """Stores files in the places of those of the same paths, which is a use of the container; returns the
    digests of these. NotFound, ContainerFull, PathTaken."""
    get(conn, owner, id, now, hold=True)
    replaced = _add(conn, id, files, room)
    _used(conn, id, now)
    return replaced


def give(
    conn: Connection,
    owner: str,
    id: str,
    files: Mapping[str, ContainerFile],
    now: int,
    room: ContainerRoom,
) -> Sequence[str]:
    """The same for copies of uploaded files, by their ids, of those that the container was not given yet."""
    given = get(conn, owner, id, now, hold=True).given
    new = [file_id for file_id in files if file_id not in given]
    if not new:
        return ()
    replaced = _add(conn, id, [files[file_id] for file_id in new], room)
    told = " ".join((*given, *new))
    conn.execute(update(containers).where(containers.c.id == id).values(given=told))
    _used(conn, id, now)
    return replaced


def _add(conn: Connection, id: str, files: Sequence[ContainerFile], room: ContainerRoom) -> Sequence[str]:
    """What clients bring is refused as a whole where there is no room for it, or a folder in its place."""
    own = [*{file.path: file for file in files}.values()]  # of one path the last one
    if not own:
        return ()
    replaced = _put(conn, own, ())
    table = container_files
    paths = {*conn.execute(select(table.c.path).where(table.c.container_id == id)).scalars()}
    for path in paths:
        if above := next((one for one in _above(path) if one in paths), None):
            raise PathTaken(above)
    size = select(func.count(), func.coalesce(func.sum(table.c.num_bytes), 0))
    number, num_bytes = conn.execute(size.where(table.c.container_id == id)).one()
    if number > room.files:
        raise ContainerFull(f"A container may have {room.files} files; it would have {number}.")
    if num_bytes > room.num_bytes:
        most = f"The files of a container may have {room.num_bytes} bytes"
        raise ContainerFull(f"{most}; it would be {num_bytes}.")
    return replaced


def _above(path: str) -> list[str]:
    """The folders that a path lies in."""
    parts = path.split("/")
    return ["/".join(parts[:length]) for length in range(1, len(parts))]


def remove_file(conn: Connection, owner: str, container_id: str, id: str, now: int) -> str:
    """Removes a file; returns its digest. NotFound("container") or NotFound("file")."""
    get(conn, owner, container_id, now, hold=True)
    gone = delete(container_files).where(
        container_files.c.container_id == container_id, container_files.c.id == id
    )
    digest: str | None = conn.execute(gone.returning(container_files.c.digest)).scalar()
    if digest is None:
        raise NotFound("file", id)
    _used(conn, container_id, now)
    return digest


def _used(conn: Connection, id: str, now: int) -> None:
    raised = {"version": containers.c.version + 1, "last_active_at": now}
    conn.execute(update(containers).where(containers.c.id == id).values(raised))


def apply(conn: Connection, changes: Sequence[ContainerChange]) -> Sequence[str]:
    """What finished cells change; returns the digests of files that went. One whose container is gone changes
    nothing."""
    wanted = containers.c.id.in_({change.container_id for change in changes})
    # In one order, so that no two processes wait for each other.
    held = select(containers.c.id).where(wanted).order_by(containers.c.id).with_for_update()
    known = {*conn.execute(held).scalars()}
    gone: list[str] = []
    for change in changes:
        if change.container_id not in known:
            continue
        conn.execute(
            update(containers)
            .where(containers.c.id == change.container_id, containers.c.owner == change.owner)
            .values(
                version=containers.c.version + 1,
                cells=containers.c.cells + 1,
                last_active_at=change.at,
                state=change.state,
                num_bytes=len(change.state or b""),
            )
        )
        gone += _make_way(conn, change.files)
        gone += _put(conn, change.files, [(change.container_id, path) for path in change.removed])
    return gone


def _make_way(conn: Connection, files: Sequence[ContainerFile]) -> list[str]:
    """Removes what would stand in a path as a file and as a folder: where a client has put a file in the
    place of a folder while code was making that, the folder is what the session goes on with. Returns the
    digests of those that went."""
    digests: list[str] = []
    for file in files:
        path, folder = container_files.c.path, f"{file.path}/"
        below = func.substr(path, 1, len(folder)) == folder  # LIKE would ignore the case of letters on SQLite
        taken = delete(container_files).where(
            container_files.c.container_id == file.container_id, or_(below, path.in_(_above(file.path)))
        )
        digests += conn.execute(taken.returning(container_files.c.digest)).scalars()
    return digests


def _put(
    conn: Connection, files: Sequence[ContainerFile], removed: Sequence[tuple[str, str]]
) -> Sequence[str]:
    """Removes files by container and path, and puts others in their places; returns the digests of those that
    went."""
    digests: list[str] = []
    for container_id, path in (*removed, *((file.container_id, file.path) for file in files)):
        gone = delete(container_files).where(
            container_files.c.container_id == container_id, container_files.c.path == path
        )
        digests += conn.execute(gone.returning(container_files.c.digest)).scalars()
    if files:
        conn.execute(insert(container_files), [asdict(file) for file in files])
    return digests


def _lasts(conn: Connection, now: int) -> ColumnElement[bool]:
    return containers.c.last_active_at + containers.c.lifetime > earlier_clock(conn.dialect.name, now)


def _alive(conn: Connection, owner: str, now: int) -> tuple[ColumnElement[bool], ...]:
    return containers.c.owner == owner, _lasts(conn, now)


_COLUMNS = tuple(column for column in containers.c if column.name not in ("state", "num_bytes"))


def _stored(row: Row[*tuple[Any, ...]]) -> StoredContainer:
    return StoredContainer(**{**row._mapping, "given": tuple(row.given.split())})
