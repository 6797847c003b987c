"""Stored responses: reading one, listing pages of them, deleting them.

An owner sees responses that are its own, stored and not deleted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Connection,
    Row,
    Text,
    bindparam,
    delete,
    exists,
    func,
    insert,
    literal,
    select,
    tuple_,
    update,
)

from storage import pairs
from storage.kept_replies import forget_replies
from storage.lineage import in_turn
from storage.queries import items, webhooks
from storage.records import (
    TERMINAL_STATUSES,
    NewResponseFork,
    NotFound,
    Order,
    Page,
    RunGlance,
    StoredItem,
    StoredResponse,
    page_length,
)
from storage.tables import conversations, idempotency, response_items, responses, run_inputs, runs
from storage.tables import items as item_rows


def visible(owner: str | BindParameter[str], *, hidden: bool = False) -> tuple[ColumnElement[bool], ...]:
    """The conditions under which `owner` sees a response. hidden: or whoever runs or repeats it."""
    seen = (responses.c.owner == owner, responses.c.deleted_at.is_(None), responses.c.store)
    return seen if hidden else (*seen, ~responses.c.hidden)


def require(conn: Connection, owner: str, id: str, *, hold: bool = False) -> None:
    """NotFound("response") unless `owner` sees it. hold: nobody deletes it before this transaction's end."""
    if conn.execute(_HELD if hold else _SEEN, {"id": id, "owner": owner}).first() is None:
        raise NotFound("response", id)


_SEEN = select(responses.c.id).where(
    responses.c.id == bindparam("id"), *visible(bindparam("owner", type_=Text))
)
_HELD = _SEEN.with_for_update(read=True)


_RUN = (runs.c.state, runs.c.runner, runs.c.attempt, runs.c.next_seq, runs.c.cancel_requested)
_SELECT = select(responses, *_RUN).join_from(
    responses, runs, runs.c.response_id == responses.c.id, isouter=True
)
_GET = [
    _SELECT.where(responses.c.id == bindparam("id"), *visible(bindparam("owner", type_=Text), hidden=hidden))
    for hidden in (False, True)
]


def get(conn: Connection, owner: str, id: str, *, hidden: bool = False) -> StoredResponse:
    """One response. NotFound("response") if it is unknown, deleted, unstored, hidden or another owner's."""
    row = conn.execute(_GET[hidden], {"id": id, "owner": owner}).first()
    if row is None:
        raise NotFound("response", id)
    return _stored(row, _outputs(conn, [id])[id])


def gone(conn: Connection, ids: Sequence[str]) -> frozenset[str]:
    """Those of the ids whose responses are deleted or unknown, whoever owns them."""
    there = select(responses.c.id).where(responses.c.id.in_(ids), responses.c.deleted_at.is_(None))
    return frozenset(ids).difference(conn.execute(there).scalars())


def list_(
    conn: Connection,
    owner: str,
    *,
    limit: int,
    order: Order,
    after: str | None,
    status: str | None,
    created_within: tuple[int | None, int | None],
    conversation_id: str | None,
    model: str | None,
    metadata: Mapping[str, str],
) -> Page[StoredResponse]:
    """One page, by time and then id. NotFound("response") for an unknown `after`.

    created_within: after and before when, both exclusive, in microseconds. metadata: only those that have all
    of these pairs.
    """
    created, id = responses.c.created_at, responses.c.id
    walks_pairs = bool(metadata) and conversation_id is None  # a conversation has fewer responses
    by_time = (pairs.CREATED, pairs.ID) if walks_pairs else (created, id)
    place = tuple_(*by_time)
    query = select(id, _SIZE).where(*visible(owner))
    if after is not None:
        cursor = conn.execute(select(created).where(id == after, *visible(owner))).first()
        if cursor is None:
            raise NotFound("response", after)
        at = tuple_(cursor[0], after)
        query = query.where(place > at if order == "asc" else place < at)
    if status is not None:
        # A run that waits is still in progress; one that has been given all outputs is queued, not waiting.
        query = query.where(responses.c.status == ("in_progress" if status == "waiting" else status))
    if status == "waiting":
        query = query.where(exists().where(runs.c.response_id == id, runs.c.state == "waiting"))
    created_after, created_before = created_within
    if created_after is not None:
        query = query.where(by_time[0] > created_after)
    if created_before is not None:
        query = query.where(by_time[0] < created_before)
    if conversation_id is not None:
        query = query.where(responses.c.conversation_id == conversation_id)
    if model is not None:
        query = query.where(responses.c.model == model)
    if walks_pairs:
        query = pairs.walking(conn, query, responses, owner, "response", metadata)
    elif (index := _walked(status, conversation_id, model)) is not None:
        query = pairs.having(query, responses, "response", metadata)
        query = query.with_hint(responses, f"INDEXED BY {index}", "sqlite")
    query = query.order_by(*(by_time if order == "asc" else (column.desc() for column in by_time)))
    listed = conn.execute(query.limit(limit + 1)).all()
    length = page_length([size for _, size in listed], limit)
    ids = [listed_id for listed_id, _ in listed[:length]]
    rows = {row.id: row for row in conn.execute(_SELECT.where(id.in_(ids))).all()}
    outputs = _outputs(conn, ids)
    return Page(tuple(_stored(rows[id], outputs[id]) for id in ids), len(listed) > length)


def _walked(status: str | None, conversation_id: str | None, model: str | None) -> str | None:
    """The index of which the fewest rows do not pass the filters: nearly every response is completed, and
    SQLite, which has no statistics, would not know."""
    if conversation_id is not None:
        return "responses_by_conversation"
    if model is not None and status in (None, "completed"):
        return "responses_by_model"
    return None if status is None else "responses_by_status"


_SIZE = (
    sum(map(func.length, (responses.c.echo, responses.c.plan)), func.length(responses.c.head))
    + select(func.coalesce(func.sum(items.SIZE), 0))
    .join_from(response_items, item_rows, items.joined(response_items))
    .where(in_turn(responses), response_items.c.direction == "out")
    .correlate(responses)
    .scalar_subquery()
)
"""The bytes of a response with its output."""


_OUTPUTS = (
    select(*items.COLUMNS, responses.c.id.label("response_id"))
    .join_from(responses, response_items, in_turn(responses))
    .join(item_rows, items.joined(response_items))
    .where(responses.c.id.in_(bindparam("ids", expanding=True)), response_items.c.direction == "out")
    .order_by(responses.c.id, response_items.c.position)
)


def _outputs(conn: Connection, ids: Sequence[str]) -> dict[str, list[StoredItem]]:
    found: dict[str, list[StoredItem]] = defaultdict(list)
    if ids:
        for row in conn.execute(_OUTPUTS, {"ids": ids}).all():
            found[row.response_id].append(items.stored_item(row))
    return found


def _stored(row: Row[*tuple[Any, ...]], output: Sequence[StoredItem]) -> StoredResponse:
    run = None
    if row.state is not None:
        run = RunGlance(row.state, row.runner, row.attempt, row.next_seq, row.cancel_requested)
    return StoredResponse(
        id=row.id,
        owner=row.owner,
        created_at=row.created_at,
        completed_at=row.completed_at,
        status=row.status,
        model=row.model,
        background=row.background,
        head=row.head,
        echo=row.echo,
        plan=row.plan,
        previous_response_id=row.previous_response_id,
        conversation_id=row.conversation_id,
        conversation_head=row.conversation_head,
        output=tuple(output),
        run=run,
        log_erased_at=row.log_erased_at,
        fork_of=row.fork_of,
    )


def input_items(
    conn: Connection, owner: str, id: str, *, limit: int, order: Order, after: str | None
) -> Page[StoredItem]:
    """One page of a response's own input. NotFound("response"), or ("item") for an unknown `after`."""
    require(conn, owner, id)
    where = (*_turn(conn, id), response_items.c.direction == "in")
    return items.page(conn, response_items, where, limit=limit, order=order, after=after)


def own_input(conn: Connection, id: str) -> tuple[StoredItem, ...]:
    """A response's own input in order, for whoever runs it."""
    query = (
        select(*items.COLUMNS)
        .join_from(response_items, item_rows, items.joined(response_items))
        .where(*_turn(conn, id), response_items.c.direction == "in")
        .order_by(response_items.c.position)
    )
    return tuple(items.stored_item(row) for row in conn.execute(query).all())


def _turn(conn: Connection, id: str) -> tuple[ColumnElement[bool], ...]:
    """The places of a response's items, which are those of another one if it is a fork."""
    row = conn.execute(select(*_FORK).where(responses.c.id == id)).first()
    if row is None or row.fork_of is None:
        return (response_items.c.response_id == id,)
    last = tuple_(literal(row.fork_direction), literal(row.fork_position))
    return response_items.c.response_id == row.fork_of, last >= _PLACE


_FORK = (responses.c.fork_of, responses.c.fork_direction, responses.c.fork_position)
_PLACE = tuple_(response_items.c.direction, response_items.c.position)


LAST = ("out", (1 << 31) - 1)
"""Behind every item of a turn, in its order: direction and position."""


def fork(conn: Connection, owner: str, id: str, new: NewResponseFork) -> None:
    """Stores a response that has ended and has the first items of another one, and whatever led to that.

    NotFound("response"); NotFound("item") for one that it does not have, or not yet with all before it.
    """
    query = select(responses).where(responses.c.id == id, *visible(owner))
    # Held, lest it be collected before it has a fork.
    parent = conn.execute(query.with_for_update(read=True)).first()
    if parent is None:
        raise NotFound("response", id)
    direction, position = _cut(conn, parent, new)
    row = {
        "id": new.id,
        "owner": owner,
        "created_at": new.created_at,
        "completed_at": new.created_at,
        "status": "completed",
        "model": parent.model,
        "background": False,
        "store": True,
        "head": new.head,
        "echo": new.echo,
        "plan": new.plan,
        "previous_response_id": parent.previous_response_id,
        "conversation_id": parent.conversation_id,
        "conversation_head": parent.conversation_head,
        "fork_of": parent.fork_of or parent.id,
        "fork_direction": direction,
        "fork_position": position,
    }
    conn.execute(insert(responses), row)
    pairs.add(conn, owner, "response", new.id, new.created_at, new.metadata)


def _cut(conn: Connection, parent: Row[*tuple[Any, ...]], new: NewResponseFork) -> tuple[str, int]:
    """The place of the last item that a fork is to have."""
    last = LAST if parent.fork_of is None else (parent.fork_direction, parent.fork_position)
    if new.after is None:
        return min(last, ("out", -1)) if new.input_only else last
    turn = _turn(conn, parent.id)
    place = select(response_items.c.direction, response_items.c.position)
    place = (
        place.where(*turn, response_items.c.item_id == new.after)
        .order_by(*(column.desc() for column in place.selected_columns))
        .limit(1)
    )
    row = conn.execute(place).first()
    if row is None:
        raise NotFound("item", new.after)
    if row.direction == "out" and parent.status not in TERMINAL_STATUSES:
        # Calls that are carried out at once end in any order.
        before = select(func.count()).where(*turn, response_items.c.direction == "out")
        if conn.execute(before.where(response_items.c.position < row.position)).scalar_one() < row.position:
            raise NotFound("item", new.after)
    return row.direction, row.position


Settle = Callable[[Connection, Sequence[str]], None]
"""Counts what responses in flight have used, before they go."""


def delete_one(conn: Connection, owner: str, id: str, now: int, settle: Settle | None = None) -> bool:
    """Deletes a response; True if it was in flight: its next append is lost. NotFound("response")."""
    require(conn, owner, id)
    return bool(hide(conn, [id], now, settle))


def hide(conn: Connection, ids: Sequence[str], now: int, settle: Settle | None = None) -> list[str]:
    """Makes tombstones of responses: their runs and what their requests were known by go, their conversations
    are free. Returns those that were in flight.

    Their logs and items are still there. A tombstone has no measure until they are erased
    (`retention.erase`), by which a sweep finds those that a crash has left.
    """
    if settle is not None:
        settle(conn, ids)
    ended = delete(runs).where(runs.c.response_id.in_(ids)).returning(runs.c.response_id)
    ran = list(conn.execute(ended).scalars())
    webhooks.forget(conn, ids)
    pairs.forget(conn, ids)
    conn.execute(delete(run_inputs).where(run_inputs.c.response_id.in_(ids)))
    conn.execute(delete(idempotency).where(idempotency.c.response_id.in_(ids)))
    forget_replies(conn, ids)
    emptied = {"deleted_at": now, "head": b"", "echo": b"", "plan": b"", "num_bytes": 0}
    conn.execute(update(responses).where(responses.c.id.in_(ids)).values(**emptied))
    if ran:
        conn.execute(update(responses).where(responses.c.id.in_(ran)).values(status="cancelled"))
        held = select(responses.c.conversation_id).where(responses.c.id.in_(ran))
        conn.execute(
            update(conversations)
            .where(conversations.c.id.in_(held), conversations.c.active_response_id.in_(ran))
            .values(active_response_id=None)
        )
    return ran
