"""The queue: runs that wait for a process to carry them on, in the order in which they begin.

What an earlier owner left at work goes on before anything new begins. Then comes the lowest priority number,
and within it the owner that was served least, counted in tokens against its weight: those of its runs that
have ended, as they really were, and those that its runs at work, wherever they are, were expected to take.
An owner's own runs come by age.

So owners that always have runs in the queue get tokens in proportion to their weights, however long their
prompts and answers are. An owner that comes back, or comes for the first time, starts no lower than the
lowest of those that wait: nobody saves up for later what it did not use.

What was served is written down only while runs are queued; otherwise nobody is kept waiting by another.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson
from sqlalchemy import (
    ColumnElement,
    Connection,
    FromClause,
    Integer,
    Row,
    Select,
    Text,
    and_,
    bindparam,
    delete,
    exists,
    func,
    literal_column,
    or_,
    select,
    tuple_,
)

from storage.drivers import insert_or_add, many
from storage.records import OfModels, TooManyQueued
from storage.tables import owners, queue_shares, responses, runs

FREE = and_(runs.c.runner.is_(None), runs.c.state.in_(("queued", "running")))
"""Nobody owns it, and it does not wait for its client: queued, or its owner gave it back or lost it."""


def _is_queued(table: FromClause) -> ColumnElement[bool]:
    """In the words of the index `runs_queued`, which is used only where they are the same."""
    return and_(table.c.runner.is_(None), table.c.state == literal_column("'queued'"))


QUEUED = _is_queued(runs)


def of_models(models: OfModels) -> ColumnElement[bool]:
    """Runs of these models; and those that are to be cancelled, which need none."""
    named = responses.c.model.in_(models.names)
    model = exists().where(responses.c.id == runs.c.response_id, ~named if models.others else named)
    return or_(and_(model, runs.c.response_id.not_in(models.but)), runs.c.cancel_requested)


INDEXED = (runs, "INDEXED BY runs_queued", "sqlite")
"""For `Select.with_hint`, where SQLite would look through all queued runs by another index."""

_waiting = runs.alias("waiting")
ANY_QUEUED = select(literal_column("1")).select_from(_waiting).where(_is_queued(_waiting)).exists()
"""Whether any run is queued; part of a statement about other runs."""

# ------------------------------------------------------------------------------------------------------------
# What owners were served

ROWS = 1000
"""That `forget` takes out at once."""

_KEY = tuple(queue_shares.primary_key.columns)
_NAMES = ("priority", "owner", "shard", "served", "start")

_settled = (
    select(
        queue_shares.c.priority,
        queue_shares.c.owner,
        (func.sum(queue_shares.c.served) + func.max(queue_shares.c.start)).label("served"),
    )
    .group_by(queue_shares.c.priority, queue_shares.c.owner)
    .subquery("settled")
)
"""The counters of owners: what their runs that have ended took, by their weights."""

_at_work = (
    select(runs.c.priority, runs.c.owner, func.sum(runs.c.cost).label("cost"))
    .where(runs.c.state == literal_column("'running'"), runs.c.runner.is_not(None))
    .group_by(runs.c.priority, runs.c.owner)
    .subquery("at_work")
)
"""The tokens that the runs at work are expected to take."""

_served = func.coalesce(_settled.c.served, literal_column("0.0"))
_in_hand = func.coalesce(_at_work.c.cost, literal_column("0"))


def join(conn: Connection, owner: str, priority: int, shard: int) -> None:
    """A run of an owner is about to be queued. If it is its only one, its counter rises to the lowest of the
    owners that wait; where nobody does, nobody was kept waiting, and it rises to the highest of all."""
    mine = and_(QUEUED, runs.c.priority == priority, runs.c.owner == owner)
    if conn.execute(select(exists().where(mine))).scalar_one():
        return
    table = queue_shares.c
    sums = (func.sum(table.served).label("served"), func.max(table.start).label("start"))
    known = {
        row.owner: row
        for row in conn.execute(
            select(table.owner, *sums).where(table.priority == priority).group_by(table.owner)
        ).all()
    }
    if not known:
        return
    counters = {id: row.served + row.start for id, row in known.items()}
    others = [counters.get(other.owner, 0.0) for other in _contenders(conn, priority)]
    floor = min(others) if others else max(counters.values())
    if floor > counters.get(owner, 0.0):
        start = floor - (known[owner].served if owner in known else 0.0)
        _put(conn, [(priority, owner, shard, 0.0, start)])


def charge(conn: Connection, ended: Iterable[tuple[int, str, float]], shard: int) -> None:
    """Counts what runs took that have ended: their priorities, their owners, and tokens by weight."""
    taken: dict[tuple[int, str], float] = defaultdict(float)
    for priority, owner, served in ended:
        taken[priority, owner] += served
    # In one order, so that no two processes wait for each other.
    _put(conn, [(*key, shard, taken[key], 0.0) for key in sorted(taken)])


def forget(conn: Connection, shard: int) -> int:
    """Drops the counters of priorities in which nothing is queued, where whoever comes next starts level with
    all others, and puts the rows of each owner together. Returns how many rows went; 0: there are no more.

    Rows that another process is about to write stay as they are.
    """
    waits = select(_waiting.c.response_id).where(
        _is_queued(_waiting), _waiting.c.priority == queue_shares.c.priority
    )
    went = len(_take_out(conn, ~waits.exists()))
    several = (
        select(queue_shares.c.priority, queue_shares.c.owner)
        .group_by(queue_shares.c.priority, queue_shares.c.owner)
        .having(func.count() > 1)
    )
    together: dict[tuple[int, str], tuple[float, float]] = {}
    rows = _take_out(conn, tuple_(queue_shares.c.priority, queue_shares.c.owner).in_(several))
    for row in rows:
        served, start = together.get((row.priority, row.owner), (0.0, 0.0))
        together[row.priority, row.owner] = served + row.served, max(start, row.start)
    _put(conn, [(*key, shard, *together[key]) for key in sorted(together)])
    return went + len(rows) - len(together)


def _take_out(conn: Connection, where: ColumnElement[bool]) -> Sequence[Row[*tuple[Any, ...]]]:
    """Deletes rows that no other process holds, at most ROWS, and returns them."""
    query = select(*_KEY).where(where).order_by(*_KEY).limit(ROWS).with_for_update(skip_locked=True)
    held = conn.execute(query).all()
    if not held:
        return ()
    gone = delete(queue_shares).where(tuple_(*_KEY).in_([tuple(key) for key in held]))
    return conn.execute(gone.returning(queue_shares)).all()


def _put(conn: Connection, rows: Sequence[tuple[int, str, int, float, float]]) -> None:
    many(conn, insert_or_add(conn.dialect.name, queue_shares, ("served",), ("start",)), _NAMES, rows)


# ------------------------------------------------------------------------------------------------------------
# Whose turn it is


class _Contender(NamedTuple):
    """An owner with queued runs of one priority. oldest: when the first of them was made. served: its
    counter. in_hand: the tokens that its runs at work are expected to take. limits: its row's."""

    owner: str
    oldest: int
    served: float
    in_hand: int
    limits: bytes | None


def _contenders_query() -> Select[*tuple[Any, ...]]:
    """Each owner is looked up behind the one before it, so that the length of the queue does not matter."""
    first = (
        select(func.min(runs.c.owner).label("owner")).where(_OF_PRIORITY).cte("contenders", recursive=True)
    )
    behind = select(func.min(runs.c.owner)).where(_OF_PRIORITY, runs.c.owner > first.c.owner)
    found = first.union_all(
        select(behind.correlate(first).scalar_subquery()).where(first.c.owner.is_not(None))
    )
    oldest = select(func.min(runs.c.created_at)).where(_OF_PRIORITY, runs.c.owner == found.c.owner)
    age = oldest.correlate(found).scalar_subquery()
    query = select(found.c.owner, age, _served, _in_hand, owners.c.limits).select_from(found)
    for counted in (_settled, _at_work):
        same = and_(counted.c.priority == _PRIORITY, counted.c.owner == found.c.owner)
        query = query.outerjoin(counted, same)
    return query.outerjoin(owners, owners.c.id == found.c.owner).where(found.c.owner.is_not(None))


# Made once, with parameters: making a statement costs more than carrying it out.
_PRIORITY = bindparam("of", type_=Integer)
_OF_PRIORITY = and_(QUEUED, runs.c.priority == _PRIORITY)
_CONTENDERS = _contenders_query()
_OF_OWNER = (
    select(runs.c.response_id, runs.c.created_at, runs.c.cost)
    .where(_OF_PRIORITY, runs.c.owner == bindparam("whose", type_=Text))
    .order_by(runs.c.created_at, runs.c.response_id)
    .limit(bindparam("most", type_=Integer))
)


def _contenders(conn: Connection, priority: int) -> list[_Contender]:
    return [_Contender(*row) for row in conn.execute(_CONTENDERS, {"of": priority}).all()]


def _weight(limits: bytes | None) -> float:
    weight = None if limits is None else orjson.loads(limits).get("weight")
    return 1.0 if weight is None else float(weight)


_OWNERS = select(runs.c.owner).with_hint(*INDEXED).where(QUEUED)


def _weights(conn: Connection, owner: str | None = None) -> dict[str, float]:
    """The weights of the owners of queued runs, or of one owner, where they are not 1."""
    of = owners.c.id.in_(_OWNERS) if owner is None else owners.c.id == owner
    query = select(owners.c.id, owners.c.limits).where(owners.c.limits.is_not(None), of)
    found = {id: _weight(limits) for id, limits in conn.execute(query).all()}
    return {id: weight for id, weight in found.items() if weight != 1.0}


def first(conn: Connection, limit: int, models: OfModels | None = None) -> Sequence[str]:
    """The runs whose turn it is, at most `limit`, the next one first. models: only runs of these."""
    begun = (
        select(runs.c.response_id)
        .where(runs.c.runner.is_(None), runs.c.state == "running", *_only(models))
        .order_by(runs.c.priority, runs.c.created_at, runs.c.response_id)
        .limit(limit)
    )
    found = list(conn.execute(begun).scalars().all())
    lowest = select(func.min(runs.c.priority)).with_hint(*INDEXED).where(QUEUED)
    query = lowest
    while len(found) < limit and (priority := conn.execute(query).scalar()) is not None:
        found += _turns(conn, priority, limit - len(found), models)
        query = lowest.where(runs.c.priority > priority)
    return found


def _only(models: OfModels | None) -> tuple[ColumnElement[bool], ...]:
    return () if models is None else (of_models(models),)


def free_models(conn: Connection) -> Sequence[str]:
    """The models of the runs that nobody owns."""
    query = select(responses.c.model).distinct().join(runs, runs.c.response_id == responses.c.id).where(FREE)
    return conn.execute(query).scalars().all()


def _turns(conn: Connection, priority: int, limit: int, models: OfModels | None) -> list[str]:
    """The next runs of one priority, at most `limit`: each time, of the owner that was served least."""
    contenders = {one.owner: one for one in _contenders(conn, priority)}
    weights = {one.owner: _weight(one.limits) for one in contenders.values()}
    ahead: dict[str, int] = defaultdict(int)  # the tokens of the runs that go before the owner's next one
    runs_of: dict[str, deque[Row[*tuple[Any, ...]]]] = {}

    def served(owner: str) -> float:
        one = contenders[owner]
        return one.served + (one.in_hand + ahead[owner]) / weights[owner]

    turns = [(served(owner), one.oldest, owner) for owner, one in contenders.items()]
    heapq.heapify(turns)
    found: list[str] = []
    while turns and len(found) < limit:
        owner = turns[0][2]
        if owner not in runs_of:
            wanted = {"of": priority, "whose": owner, "most": limit - len(found)}
            query = _OF_OWNER if models is None else _OF_OWNER.where(of_models(models))
            runs_of[owner] = deque(conn.execute(query, wanted).all())
        if runs_of[owner]:  # another process may have taken them all since the contenders were looked up
            run = runs_of[owner].popleft()
            found.append(run.response_id)
            ahead[owner] += run.cost
        if runs_of[owner]:
            heapq.heapreplace(turns, (served(owner), runs_of[owner][0].created_at, owner))
        else:
            heapq.heappop(turns)
    return found


# ------------------------------------------------------------------------------------------------------------
# What is told of it


class Turn(NamedTuple):
    """When a queued run is taken: after those whose turns are lower. served: what its owner will have been
    served by then, in tokens by weight, as `_turns` has it."""

    priority: int
    served: float
    created_at: int
    owner: str
    response_id: str


class Ranking:
    """The queue of one moment. num_begun: runs that go before all others. turns: of the others, in any order.

    It can be told of runs that have come since, and of those that have gone.
    """

    def __init__(self, num_begun: int, turns: Sequence[Turn]) -> None:
        self._num_begun = num_begun
        self._turns = sorted(turns)
        self._turn_of = {turn.response_id: turn for turn in turns}

    def place(self, response_id: str) -> int | None:
        """1 is next; None where the run is not in the queue, as far as is known here."""
        turn = self._turn_of.get(response_id)
        return None if turn is None else self._num_begun + bisect_left(self._turns, turn) + 1

    def add(self, turn: Turn) -> None:
        """A run has come, unless it is here already."""
        if self._turn_of.setdefault(turn.response_id, turn) is turn:
            insort(self._turns, turn)

    def drop(self, response_id: str) -> None:
        """A run has gone, if it was here."""
        turn = self._turn_of.pop(response_id, None)
        if turn is not None:
            del self._turns[bisect_left(self._turns, turn)]


_QUEUE = (
    select(runs.c.priority, runs.c.owner, runs.c.created_at, runs.c.response_id, runs.c.cost)
    .with_hint(*INDEXED)
    .where(QUEUED)
    .order_by(runs.c.priority, runs.c.owner, runs.c.created_at, runs.c.response_id)
)


def ranking(conn: Connection) -> Ranking:
    """The queue as it stands."""
    begun = select(func.count()).where(runs.c.runner.is_(None), runs.c.state == "running")
    num_begun: int = conn.execute(begun).scalar_one()
    return Ranking(num_begun, _ranked(conn, _QUEUE, select(_settled), select(_at_work), _weights(conn)))


def turns(conn: Connection, owner: str, response_ids: Sequence[str]) -> list[Turn]:
    """The turns of those of these runs of an owner that are queued; no other owner's runs are looked at."""
    asked = frozenset(response_ids)
    priorities = select(_waiting.c.priority).where(_waiting.c.response_id.in_(asked))
    ranked = _ranked(
        conn,
        _QUEUE.where(runs.c.owner == owner, runs.c.priority.in_(priorities)),
        select(_settled).where(_settled.c.owner == owner),
        select(_at_work).where(_at_work.c.owner == owner),
        _weights(conn, owner),
    )
    return [turn for turn in ranked if turn.response_id in asked]


def _ranked(
    conn: Connection,
    queued: Select[*tuple[Any, ...]],
    settled: Select[*tuple[Any, ...]],
    at_work: Select[*tuple[Any, ...]],
    weights: Mapping[str, float],
) -> list[Turn]:
    """The turns of queued runs that come by their owners' order, as `_turns` has them."""
    served = {(priority, owner): tokens for priority, owner, tokens in conn.execute(settled).all()}
    ahead: dict[tuple[int, str], int] = defaultdict(int)
    for priority, owner, tokens in conn.execute(at_work).all():
        ahead[priority, owner] = int(tokens)
    found = []
    for priority, owner, created_at, id, cost in conn.execute(queued).all():
        key = priority, owner
        by_then = served.get(key, 0.0) + ahead[key] / weights.get(owner, 1.0)
        found.append(Turn(priority, by_then, created_at, owner, id))
        ahead[key] += cost
    return found


# ------------------------------------------------------------------------------------------------------------
# How long it may be


def require_room(conn: Connection, owner: str, limit: int) -> None:
    """TooManyQueued if `limit` runs of the owner are queued already."""
    query = select(func.count()).where(runs.c.owner == owner, runs.c.state == "queued")
    if conn.execute(query).scalar_one() >= limit:
        raise TooManyQueued(limit)
