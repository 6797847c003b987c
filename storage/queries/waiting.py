"""Runs that wait for tool outputs: the calls that a client has to answer, and the answers that came.

When the last answer has come the run is marked as queued; whoever claims it writes the answers into its log.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from storage.queries import queue
from storage.queries.items import joined
from storage.queries.keys import audit
from storage.queries.responses import require
from storage.records import NotWaiting, OutputConflict, StoredItem, ToolOutput, UnknownCall, WaitingInputs
from storage.tables import items, response_items, run_inputs, runs


def add_tool_outputs(
    conn: Connection, owner: str, response_id: str, outputs: Sequence[ToolOutput], now: int, shard: int = 0
) -> WaitingInputs:
    """Stores outputs for calls of a waiting run, all or none. The last pending one makes it queued: runnable.

    shard: in which the queue counts. The same output again changes nothing, whatever state the run is in.
    NotFound, UnknownCall, OutputConflict, NotWaiting.
    """
    require(conn, owner, response_id)
    run = conn.execute(select(runs).where(runs.c.response_id == response_id).with_for_update()).first()
    known = {row.call_id: row.body_hash for row in _inputs(conn, response_id)}
    calls = _calls(conn, response_id)
    new: dict[str, ToolOutput] = {}
    for output in outputs:
        earlier = known.get(output.call_id)
        if earlier is None and output.call_id in new:
            earlier = new[output.call_id].body_hash
        if earlier is not None:
            if earlier != output.body_hash:
                raise OutputConflict(output.call_id)
        elif output.call_id not in calls:
            raise UnknownCall(output.call_id)
        elif calls[output.call_id] is None:
            raise OutputConflict(output.call_id)
        else:
            new[output.call_id] = output
    if new and (run is None or run.state != "waiting"):
        raise NotWaiting(response_id)
    if new:
        conn.execute(
            insert(run_inputs),
            [
                {
                    "response_id": response_id,
                    "call_id": output.call_id,
                    "item_id": output.item_id,
                    "kind": output.kind,
                    "body": output.body,
                    "body_hash": output.body_hash,
                    "private": output.private,
                    "created_at": now,
                }
                for output in new.values()
            ],
        )
    for output in new.values():
        if output.audit is not None:
            audit.append(conn, output.audit)
    pending = {} if run is None else _pending(calls, known.keys() | new.keys())
    if run is not None and run.state == "waiting" and not pending:
        queue.join(conn, owner, run.priority, shard)
        conn.execute(
            update(runs).where(runs.c.response_id == response_id).values(state="queued", deadline=None)
        )
        return WaitingInputs({}, True)
    runnable = run is not None and run.state == "queued" and not pending
    return WaitingInputs(pending, runnable, None if run is None else run.deadline or None)


def pending_calls(conn: Connection, owner: str, response_id: str) -> WaitingInputs:
    """Which calls a waiting run still waits for; none for any other run. NotFound."""
    require(conn, owner, response_id)
    run = conn.execute(select(runs.c.state, runs.c.deadline).where(runs.c.response_id == response_id)).first()
    if run is None or run.state != "waiting":
        return WaitingInputs({}, run is not None and run.state == "queued")
    answered = {row.call_id for row in _inputs(conn, response_id)}
    return WaitingInputs(_pending(_calls(conn, response_id), answered), False, run.deadline or None)


def waiting_inputs(conn: Connection, response_id: str) -> tuple[StoredItem, ...]:
    """The outputs that were posted to a run and are not yet among its items, in the order of its calls."""
    calls = _calls(conn, response_id)
    posted = {row.call_id: row for row in _inputs(conn, response_id)}
    return tuple(
        StoredItem(posted[id].item_id, posted[id].kind, posted[id].body, id, private=posted[id].private)
        for id, name in calls.items()
        if name is not None and id in posted
    )


def _inputs(conn: Connection, response_id: str) -> Sequence[Row[*tuple[Any, ...]]]:
    return conn.execute(select(run_inputs).where(run_inputs.c.response_id == response_id)).all()


def _calls(conn: Connection, response_id: str) -> dict[str, str | None]:
    """The client's calls of a response, in order: call id -> name, or None once its output is an item."""
    query = (
        select(items.c.call_id, items.c.name)
        .join_from(response_items, items, joined(response_items))
        .where(
            response_items.c.response_id == response_id,
            response_items.c.direction == "out",
            items.c.call_id.is_not(None),
        )
        .order_by(response_items.c.position)
    )
    calls: dict[str, str | None] = {}
    for call_id, name in conn.execute(query).all():
        calls[call_id] = name
    return calls


def _pending(calls: Mapping[str, str | None], answered: Iterable[str]) -> dict[str, str]:
    done = set(answered)
    return {id: name for id, name in calls.items() if name is not None and id not in done}
