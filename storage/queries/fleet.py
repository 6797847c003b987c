"""The processes that share a database, and which runs each of them carries on.

The server decides when a process is dead: when its beat has stood still for long enough. The transaction that
takes over its runs checks the beat once more. Should the process only have been slow, its appends are refused
by their fence.

Rows are taken with SKIP LOCKED, so nobody ever waits for a process that stopped in the middle of something.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, case, delete, exists, insert, select, update

from storage.drivers import shared_clock
from storage.queries import conversations
from storage.queries.queue import FREE, first
from storage.queries.runs import claim_rows
from storage.records import FleetView, OfModels, RunClaim, RunGlance
from storage.tables import responses, runners, runs

# ------------------------------------------------------------------------------------------------------------
# Beats


def beat(conn: Connection, runner: str, serves: str) -> bool:
    """Raises the beat of a process. False if its row was not there: it is new, or others took it for dead.

    serves: a digest of the models that it serves.
    """
    raised = update(runners).where(runners.c.id == runner).values(beat=runners.c.beat + 1)
    if conn.execute(raised).rowcount:
        return True
    conn.execute(insert(runners).values(id=runner, beat=1, serves=serves))
    return False


def list_processes(conn: Connection, now: int) -> FleetView:
    """Who beats, and whether there is anything to do; now: microseconds since the epoch, as in `Park`."""
    rows = conn.execute(select(runners)).all()
    beats: dict[str, int | None] = {row.id: row.beat for row in rows}
    owning = select(runs.c.runner).distinct().where(runs.c.runner.is_not(None))
    owners = frozenset(conn.execute(owning).scalars().all())
    for runner in owners:
        beats.setdefault(runner, None)
    clock = shared_clock(conn.dialect.name, now)
    due = exists().where(runs.c.state == "waiting", runs.c.deadline <= clock)
    has_free, has_due = conn.execute(select(exists().where(FREE), due)).one()
    serves = {row.id: row.serves for row in rows if row.serves}
    return FleetView(beats, owners, bool(has_free), bool(has_due), serves)


# ------------------------------------------------------------------------------------------------------------
# Owners


def release_runs(conn: Connection, runner: str, beat: int | None) -> int:
    """Takes its runs from a process whose beat is still `beat` (None: it has no row); returns how many.

    Its row goes with the last of them.
    """
    still = select(runners.c.beat).where(runners.c.id == runner).scalar_subquery()
    owned = select(runs.c.response_id).where(runs.c.runner == runner, still.is_not_distinct_from(beat))
    ids = conn.execute(owned.with_for_update(skip_locked=True)).scalars().all()
    _free(conn, ids)
    idle = select(runners.c.id).where(
        runners.c.id == runner, runners.c.beat == beat, ~exists().where(runs.c.runner == runner)
    )
    for id in conn.execute(idle.with_for_update(skip_locked=True)).scalars().all():
        conn.execute(delete(runners).where(runners.c.id == id))
    return len(ids)


def free_all(conn: Connection) -> None:
    """Takes every run from its owner; only for a process that knows that it is alone."""
    _free(conn, conn.execute(select(runs.c.response_id).where(runs.c.runner.is_not(None))).scalars().all())


def _free(conn: Connection, ids: Sequence[str]) -> None:
    """Nobody owns these any more. Unstored ones died with their process: they go, with their conversation's
    lock."""
    if not ids:
        return
    unstored = select(responses.c.id, responses.c.conversation_id).where(
        responses.c.id.in_(list(ids)), ~responses.c.store
    )
    for row in conn.execute(unstored).all():
        conn.execute(delete(runs).where(runs.c.response_id == row.id))
        conn.execute(delete(responses).where(responses.c.id == row.id))
        if row.conversation_id is not None:
            conversations.unlock(conn, row.conversation_id, row.id, [], kept=False)
    conn.execute(
        update(runs).where(runs.c.response_id.in_(list(ids))).values(runner=None, fence=runs.c.fence + 1)
    )


def give_back(conn: Connection, runner: str, ids: Sequence[str], *, blameless: bool) -> None:
    """Some runs of a process are nobody's any more. blameless: none of them can be why."""
    owned = (runs.c.runner == runner, runs.c.response_id.in_(list(ids)))
    held = conn.execute(select(runs.c.response_id).where(*owned).with_for_update()).scalars().all()
    if blameless:
        conn.execute(update(runs).where(*owned).values(strikes=0, admitted_seq=runs.c.next_seq))
    _free(conn, held)


def release(conn: Connection, runner: str, *, blameless: bool) -> None:
    """A process ends: its runs are nobody's. blameless: none of them can be the cause."""
    owned = runs.c.runner == runner
    held = select(runs.c.response_id).where(owned).order_by(runs.c.response_id).with_for_update()
    ids = conn.execute(held).scalars().all()
    if blameless:
        conn.execute(update(runs).where(owned).values(strikes=0, admitted_seq=runs.c.next_seq))
    _free(conn, ids)
    conn.execute(delete(runners).where(runners.c.id == runner))


def take(conn: Connection, runner: str, limit: int, models: OfModels | None = None) -> tuple[RunClaim, ...]:
    """Takes over up to `limit` runs of the queue, the next ones first. models: only runs of these."""
    ids = first(conn, 2 * limit, models)  # another process may be about to take some of them
    if not ids:
        return ()
    query = (
        select(runs)
        .where(runs.c.response_id.in_(ids), FREE)
        .order_by(case({id: place for place, id in enumerate(ids)}, value=runs.c.response_id))
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    return claim_rows(conn, conn.execute(query).all(), runner)


# ------------------------------------------------------------------------------------------------------------
# Runs of others


def run_status(conn: Connection, runner: str, response_ids: Sequence[str]) -> dict[str, RunGlance]:
    """The state of those of these runs that have not ended, and of every run that `runner` owns."""
    mine = runs.c.runner == runner
    query = select(runs).where(mine | runs.c.response_id.in_(list(response_ids)) if response_ids else mine)
    return {
        row.response_id: RunGlance(row.state, row.runner, row.attempt, row.next_seq, row.cancel_requested)
        for row in conn.execute(query).all()
    }


def mark_watched(conn: Connection, response_ids: Sequence[str]) -> tuple[str, ...]:
    """Tells whoever owns these runs that they are read elsewhere. Returns those that could be told now."""
    query = select(runs.c.response_id).where(runs.c.response_id.in_(list(response_ids)))
    ids = tuple(conn.execute(query.with_for_update(skip_locked=True)).scalars().all())
    if ids:
        conn.execute(update(runs).where(runs.c.response_id.in_(ids)).values(watched=runs.c.watched + 1))
    return ids


def watched(conn: Connection, response_id: str) -> int:
    """How often the run's owner was told that somebody reads elsewhere."""
    return conn.execute(select(runs.c.watched).where(runs.c.response_id == response_id)).scalar() or 0
