"""Runs in flight: how they start, what is appended to them, and who owns them.

A run is written to by one claim at a time. A claim is a fence number: it is raised by whoever takes the run
over, and an append that carries an older one writes nothing. Each function here is a job for the writer:
`(conn, ...)` in one transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    LargeBinary,
    Row,
    Select,
    Text,
    bindparam,
    case,
    delete,
    func,
    insert,
    literal_column,
    or_,
    select,
    update,
)

from storage import pairs
from storage.containers import apply
from storage.drivers import Keys, by_keys, insert_unless_taken, many, shared_clock
from storage.queries import conversations, events, items, queue, webhooks
from storage.queries.keys import usage
from storage.queries.responses import require
from storage.records import (
    PROGRESS_EVENTS,
    TERMINAL_STATUSES,
    Appended,
    ConversationMoved,
    Finish,
    NewItem,
    NewResponse,
    NotFound,
    OfModels,
    ResponseKnown,
    RunAppend,
    RunClaim,
    RunLost,
)
from storage.tables import response_items, responses, runs

# ------------------------------------------------------------------------------------------------------------
# Start

# Made once, with rows as parameters: making a statement costs more than carrying it out.
_NEW_RESPONSE = insert(responses)
_NEW_PLACES = insert(response_items)
_NEW_RUN = insert(runs)


def start(conn: Connection, new: NewResponse, runner: str | None, shard: int = 0) -> RunClaim:
    """Stores a response, its input, its run, its first record, and takes its conversation's lock.

    runner: who owns it from now on; None leaves it queued. shard: in which the queue counts.
    NotFound("conversation" | "response"), ConversationFull, ConversationLocked, ConversationMoved,
    ItemConflict, ResponseKnown, TooManyQueued.
    """
    if runner is None:
        if new.queue_limit is not None:
            queue.require_room(conn, new.owner, new.queue_limit)
        queue.join(conn, new.owner, new.priority, shard)
    head = _lock_conversation(conn, new)
    if new.previous_response_id is not None:
        require(conn, new.owner, new.previous_response_id, hold=True)
    _insert_response(conn, new, head)
    if new.store:
        if not new.hidden:
            pairs.add(conn, new.owner, "response", new.id, new.created_at, new.metadata)
        items.put(conn, new.owner, new.input_items)
        places = [_place(new.id, "in", i, new.owner, item.id) for i, item in enumerate(new.input_items)]
        if places:
            conn.execute(_NEW_PLACES, places)
    return _insert_run(conn, new, runner)


def is_known(conn: Connection, id: str) -> bool:
    """Whether there is a response of this id, whoever's, be it deleted."""
    return conn.execute(select(responses.c.id).where(responses.c.id == id)).first() is not None


def _lock_conversation(conn: Connection, new: NewResponse) -> int | None:
    """Takes the lock of the response's conversation; its head, or None where it runs in none."""
    if new.conversation_id is None:
        return None
    head = conversations.lock(
        conn,
        new.owner,
        new.conversation_id,
        new.id,
        new.created_at,
        limit=new.conversation_limit,
    )
    if new.conversation_head not in (None, head):
        raise ConversationMoved(new.conversation_id, head)
    return head


def _insert_response(conn: Connection, new: NewResponse, conversation_head: int | None) -> None:
    row = {
        "id": new.id,
        "owner": new.owner,
        "created_at": new.created_at,
        "status": new.status,
        "model": new.model,
        "background": new.background,
        "store": new.store,
        "head": new.head,
        "echo": new.echo,
        "plan": new.plan,
        "previous_response_id": new.previous_response_id,
        "conversation_id": new.conversation_id,
        "conversation_head": conversation_head,
        "hidden": new.hidden,
    }
    if not new.named:
        conn.execute(_NEW_RESPONSE, row)
    elif not insert_unless_taken(conn, responses, row):
        raise ResponseKnown(new.id)


def _insert_run(conn: Connection, new: NewResponse, runner: str | None) -> RunClaim:
    """Stores the run with its first record, if it has one; the claim of whoever started it."""
    next_seq, segment, segment_end = 0, None, 0
    if new.record is not None:
        log = [new.record]
        growth = events.Growth(new.id, 0, None, 0, log, events.end_of(log, 0))
        [(next_seq, segment, segment_end, _)] = events.write(conn, [growth])
    claim = RunClaim(
        response_id=new.id,
        owner=new.owner,
        fence=1,
        next_seq=next_seq,
        attempt=0 if runner is None else 1,
        strikes=0,
        state="queued" if runner is None else "running",
        cancel_requested=False,
    )
    row = {
        "response_id": new.id,
        "owner": new.owner,
        "runner": runner,
        "fence": claim.fence,
        "state": claim.state,
        "attempt": claim.attempt,
        "strikes": claim.attempt,
        "next_seq": next_seq,
        "segment": segment,
        "segment_end": segment_end,
        "cancel_requested": False,
        "priority": new.priority,
        "created_at": new.created_at,
        "cost": new.cost,
    }
    conn.execute(_NEW_RUN, row)
    return claim


def _place(response_id: str, direction: str, position: int, owner: str, item_id: str) -> dict[str, Any]:
    return {
        "response_id": response_id,
        "direction": direction,
        "position": position,
        "owner": owner,
        "item_id": item_id,
    }


# ------------------------------------------------------------------------------------------------------------
# Append


def append(conn: Connection, batch: Sequence[RunAppend], counting: usage.Counting) -> Appended:
    """Writes what many runs add, in one transaction.

    counting: how what they used is counted, for usage and for the queue.

    What is refused is RunLost, or ValueError for a gap in the numbers. Raises what a bad row raises; then
    nothing is written.

    The statements are per batch, not per run: 64 streams that advance cost three.
    """
    held = {row[0]: row for row in by_keys(conn, _held, [one.response_id for one in batch])}
    refused: dict[str, Exception] = {}
    growing: list[events.Growth] = []
    rest: list[RunAppend] = []
    for one in batch:
        response_id, records = one.response_id, one.records
        if response_id not in held or held[response_id][1] != one.fence:
            refused[response_id] = RunLost(response_id)
            continue
        _, _, next_seq, segment, segment_end = held[response_id]
        if records:
            try:
                end = events.end_of(records, next_seq)
            except ValueError as gap:
                refused[response_id] = gap
                continue
            growing.append(events.Growth(response_id, next_seq, segment, segment_end, records, end))
        if _has_rest(one):
            rest.append(one)
    if growing:
        many(conn, _ADVANCE, _ADVANCE_NAMES, events.write(conn, growing))
    return Appended(refused, _append_rest(conn, rest, counting) if rest else ())


def _has_rest(one: RunAppend) -> bool:
    """Whether an append has more than records."""
    changed = one.head is not None or one.status is not None
    return bool(changed or one.closed or one.finish or one.park or one.effects)


def _append_rest(conn: Connection, rest: Sequence[RunAppend], counting: usage.Counting) -> Sequence[str]:
    """Everything of the appends that is not records; returns the digests of contents whose rows went."""
    rows = {row[0]: row for row in by_keys(conn, _rows, [one.response_id for one in rest])}
    owners: dict[str, str] = {id: owner for id, owner, _, _ in rows.values()}
    _close_items(conn, rest, owners)
    effects = [change for one in rest for change in one.effects]
    gone = apply(conn, effects) if effects else ()
    changes = [
        (
            one.head,
            one.status if one.finish is None else one.finish.status,
            None if one.finish is None else one.finish.completed_at,
            one.response_id,
        )
        for one in rest
        if one.head is not None or one.status is not None or one.finish is not None
    ]
    if many(conn, _CHANGE, _CHANGE_NAMES, changes) != len(changes):
        raise RunLost(changes[0][-1])  # some response had ended: each is to be tried alone
    for one in rest:
        if one.finish is None and one.park is not None:
            deadline = shared_clock(conn.dialect.name, one.park.at) + one.park.timeout
            conn.execute(
                update(runs)
                .where(runs.c.response_id == one.response_id)
                .values(
                    state="waiting",
                    runner=None,
                    deadline=case((runs.c.cancel_requested, 0), else_=deadline),
                )
            )
    ending = [(one.response_id, one.finish) for one in rest if one.finish is not None]
    if ending:
        _finish(conn, ending)
    if told := [(one.response_id, one.notice) for one in rest if one.notice is not None]:
        # After the deletion of what is not stored: nobody can read it.
        readable = {row[0] for row in by_keys(conn, _readable, [response_id for response_id, _ in told])}
        webhooks.announce(conn, [(owners[id], id, notice) for id, notice in told if id in readable])
    if ending:
        # At last, so that other processes wait for these rows as short as can be.
        spent = [(rows[id], end.spent) for id, end in ending if end.spent is not None]
        usage.add(conn, [used for _, used in spent], counting)
        contested = [(priority, owner, used.served) for (_, owner, priority, others), used in spent if others]
        queue.charge(conn, contested, counting.shard)
    return gone


def _held(keys: Keys) -> Select[*tuple[Any, ...]]:
    columns = (runs.c.response_id, runs.c.fence, runs.c.next_seq, runs.c.segment, runs.c.segment_end)
    running = runs.c.state == literal_column("'running'")
    held = select(*columns).where(runs.c.response_id.in_(keys), running)
    # In one order, so that no two processes wait for each other.
    return held.order_by(runs.c.response_id).with_for_update()


def _rows(keys: Keys) -> Select[*tuple[Any, ...]]:
    """Besides, whether any run is queued: otherwise it does not matter who was served how much."""
    columns = (runs.c.response_id, runs.c.owner, runs.c.priority, queue.ANY_QUEUED)
    return select(*columns).where(runs.c.response_id.in_(keys))


_ADVANCE = (
    update(runs)
    .where(runs.c.response_id == bindparam("run"))
    .values(
        next_seq=bindparam("next", type_=BigInteger),
        segment=bindparam("open", type_=BigInteger),
        segment_end=bindparam("until", type_=BigInteger),
    )
)


_ADVANCE_NAMES = ("next", "open", "until", "run")

_CHANGE = (
    update(responses)
    .where(
        responses.c.id == bindparam("run"),
        responses.c.status.not_in([literal_column(f"'{s}'") for s in TERMINAL_STATUSES]),
    )
    .values(
        head=func.coalesce(bindparam("new_head", type_=LargeBinary), responses.c.head),
        status=func.coalesce(bindparam("new_status", type_=Text), responses.c.status),
        completed_at=func.coalesce(bindparam("ended", type_=BigInteger), responses.c.completed_at),
    )
)


_CHANGE_NAMES = ("new_head", "new_status", "ended", "run")


def _close_items(conn: Connection, rest: Sequence[RunAppend], owners: Mapping[str, str]) -> None:
    by_owner: dict[str, list[NewItem]] = {}
    places = []
    for one in rest:
        owner = owners[one.response_id]
        for closed in one.closed:
            by_owner.setdefault(owner, []).append(closed.item)
            places.append(_place(one.response_id, "out", closed.position, owner, closed.item.id))
    for owner, closing in by_owner.items():
        items.put(conn, owner, closing)
    if places:
        conn.execute(_NEW_PLACES, places)


_TURN = (
    select(response_items.c.item_id, response_items.c.direction)
    .where(response_items.c.response_id == bindparam("id"))
    .order_by(response_items.c.direction, response_items.c.position)
)


def _finish(conn: Connection, ending: Sequence[tuple[str, Finish]]) -> None:
    """Delete the runs' rows, append their items to their conversations, and delete responses that are not
    stored."""
    many(conn, _END, ("run",), [(response_id,) for response_id, _ in ending])
    ended = {row[0]: row for row in by_keys(conn, _ended, [response_id for response_id, _ in ending])}
    for response_id, finish in ending:
        if finish.plan is not None:
            conn.execute(update(responses).where(responses.c.id == response_id).values(plan=finish.plan))
        _, conversation_id, stored, readable = ended[response_id]
        if not stored:
            conn.execute(delete(responses).where(responses.c.id == response_id))
        if conversation_id is None:
            continue
        turn: list[tuple[str, str]] = []
        new: list[NewItem] = []
        if finish.append and stored:
            turn = [(row.item_id, row.direction) for row in conn.execute(_TURN, {"id": response_id}).all()]
        elif finish.append:
            new = [*finish.inputs, *finish.outputs]
            turn = [(item.id, "in") for item in finish.inputs]
            turn += [(item.id, "out") for item in finish.outputs]
        conversations.unlock(
            conn,
            conversation_id,
            response_id,
            turn,
            new,
            kept=bool(readable),
            status=finish.status,
            now=finish.completed_at,
        )


_END = delete(runs).where(runs.c.response_id == bindparam("run"))


_READABLE = responses.c.store & ~responses.c.hidden


def _ended(keys: Keys) -> Select[*tuple[Any, ...]]:
    columns = (responses.c.id, responses.c.conversation_id, responses.c.store, _READABLE)
    return select(*columns).where(responses.c.id.in_(keys))


def _readable(keys: Keys) -> Select[*tuple[Any, ...]]:
    return select(responses.c.id).where(responses.c.id.in_(keys), _READABLE)


# ------------------------------------------------------------------------------------------------------------
# Claims


def claim(conn: Connection, response_id: str, runner: str, models: OfModels | None = None) -> RunClaim | None:
    """Takes over a run that nobody owns and that can go on or is to be cancelled; None if it has ended, has
    an owner, or is not of these models.

    So of two claims (two posts of tool outputs, a post and a cancel) one wins. Who comes late may find that
    the run waits again, for the next outputs: it is left alone, since deadlines are for `claim_due`.
    """
    query = select(runs).where(
        runs.c.response_id == response_id,
        runs.c.runner.is_(None),
        or_(runs.c.state != "waiting", runs.c.cancel_requested),
    )
    if models is not None:
        query = query.where(queue.of_models(models))
    return next(iter(claim_rows(conn, conn.execute(query.with_for_update()).all(), runner)), None)


def claim_rows(conn: Connection, found: Sequence[Row[*tuple[Any, ...]]], runner: str) -> tuple[RunClaim, ...]:
    """Raises the fence of runs without an owner, whose rows this transaction holds.

    What was queued or waited begins a new attempt, without a blemish; what an earlier owner left running is
    admitted to the engine later (`admit`).
    """
    if not found:
        return ()
    begun = runs.c.state == "running"
    conn.execute(
        update(runs)
        .where(runs.c.response_id.in_([run.response_id for run in found]))
        .values(
            fence=runs.c.fence + 1,
            runner=runner,
            state="running",
            deadline=None,
            attempt=case((begun, runs.c.attempt), else_=runs.c.attempt + 1),
            strikes=case((begun, runs.c.strikes), else_=1),
            admitted_seq=case((begun, runs.c.admitted_seq), else_=runs.c.next_seq),
        )
    )
    return tuple(
        RunClaim(
            response_id=run.response_id,
            owner=run.owner,
            fence=run.fence + 1,
            next_seq=run.next_seq,
            attempt=run.attempt + (run.state != "running"),
            strikes=_strikes(run) if run.state == "running" else 0,
            state=run.state,
            cancel_requested=run.cancel_requested,
            watched=run.watched,
        )
        for run in found
    )


def _strikes(run: Row[*tuple[Any, ...]]) -> int:
    """How many processes in a row ended while they ran it, the last one included. One that got somewhere is
    suspected of the last end only."""
    fruitless = run.next_seq - run.admitted_seq < PROGRESS_EVENTS
    return int(run.strikes) if fruitless else min(run.strikes, 1)


def admit(conn: Connection, response_id: str, fence: int, strikes: int) -> None:
    """Begins another attempt of a run found running; `strikes` are its claim's. RunLost."""
    admitted = conn.execute(
        update(runs)
        .where(runs.c.response_id == response_id, runs.c.fence == fence)
        .values(attempt=runs.c.attempt + 1, strikes=strikes + 1, admitted_seq=runs.c.next_seq)
    )
    if not admitted.rowcount:
        raise RunLost(response_id)


def cap_deadlines(conn: Connection, now: int, longest: int) -> None:
    """Has no waiting run wait for longer than `longest` microseconds from now on: a clock that was ahead may
    have put its deadline years away. now: as in `Park`."""
    latest = shared_clock(conn.dialect.name, now) + longest
    waiting = update(runs).where(runs.c.state == "waiting", runs.c.deadline > latest)
    conn.execute(waiting.values(deadline=latest))


DUE = 64
"""Runs that are out of time which one process takes over at once: after a time when none was there, thousands
may be, and all that are taken over are read into memory."""


def claim_due(conn: Connection, runner: str, now: int) -> tuple[RunClaim, ...]:
    """Takes over waiting runs whose deadline has come, and those to be cancelled, at most DUE, the earliest
    first. now: as in `Park`."""
    due = runs.c.deadline <= shared_clock(conn.dialect.name, now)
    query = select(runs).where(runs.c.state == "waiting", due).order_by(runs.c.deadline).limit(DUE)
    return claim_rows(conn, conn.execute(query.with_for_update(skip_locked=True)).all(), runner)


def request_cancel(conn: Connection, owner: str, response_id: str) -> None:
    """Marks a run in flight as to be cancelled; nothing for one that has ended. NotFound."""
    require(conn, owner, response_id)
    _mark_cancelled(conn, response_id)


def cancel_of_any_owner(conn: Connection, response_id: str) -> None:
    """Marks a run in flight of any owner as to be cancelled. NotFound("run")."""
    if not _mark_cancelled(conn, response_id):
        raise NotFound("run", response_id)


def delete_conversation(conn: Connection, owner: str, id: str, now: int) -> str | None:
    """Makes the id unknown. A run that holds the lock goes on, pinned; but one that waits for tool outputs is
    marked as to be cancelled: its response's id, else None. NotFound("conversation")."""
    holder: str | None = conversations.live(conn, owner, id, change=False).active_response_id
    # Its row first, in the order of those who end it; and only while it waits.
    waits = holder is not None and _mark_cancelled(conn, holder, runs.c.state == "waiting")
    conversations.delete(conn, owner, id, now)
    return holder if waits else None


def _mark_cancelled(conn: Connection, response_id: str, *only: ColumnElement[bool]) -> bool:
    # A run that waits has no owner who would notice: it is due at once.
    due = case((runs.c.state == "waiting", 0), else_=runs.c.deadline)
    marked = update(runs).where(runs.c.response_id == response_id, *only)
    return bool(conn.execute(marked.values(cancel_requested=True, deadline=due)).rowcount)
