"""The log of a run: records are written and read back in order, byte for byte.

`runs` checks that the writer still owns the run before anything is written here.

A run's log is cut into segments of about SEGMENT_EVENTS numbers. Segments are numbered across all runs, in
order of time, and records are keyed by (segment, first_seq): so the records that many runs write in one
commit are neighbours in one index, and the commit touches 20 pages instead of the 105 that a key by response
would cost 64 streams.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple
from zlib import crc32

from sqlalchemy import BigInteger, Connection, Row, Select, bindparam, delete, func, insert, select

from storage.drivers import many, returned
from storage.records import EventsExpired, Record
from storage.tables import records, responses, segments

SEGMENT_EVENTS = 32
READ_ROWS = 256


class Growth(NamedTuple):
    """Records that a run adds: where its log ends now, and where it will end."""

    response_id: str
    next_seq: int
    segment: int | None  # the open one
    segment_end: int  # the number from which a new one is due
    records: Sequence[Record]
    end: int  # `end_of` them


def end_of(batch: Sequence[Record], next_seq: int) -> int:
    """The number after these records. ValueError unless they follow `next_seq` without a gap."""
    for record in batch:
        if record.first_seq != next_seq or record.num_events < 1:
            raise ValueError(f"record {record.first_seq}+{record.num_events} where {next_seq} was to follow")
        next_seq += record.num_events
    return next_seq


def write(conn: Connection, batch: Sequence[Growth]) -> list[tuple[int, int, int, str]]:
    """Appends records to many runs; returns (next_seq, segment, segment_end, response_id) of each, in order.

    IntegrityError if a number is taken: the last line of defence behind the fence.
    """
    new = [
        (response_id, next_seq)
        for response_id, next_seq, segment, segment_end, _, _ in batch
        if segment is None or next_seq >= segment_end
    ]
    opened = {response_id: id for response_id, id in returned(conn, _OPEN, ("response_id", "first_seq"), new)}
    tails = []
    rows = []
    for response_id, next_seq, segment, segment_end, added, end in batch:
        if response_id in opened:
            segment, segment_end = opened[response_id], _segment_end(response_id, next_seq)
        assert segment is not None
        tails.append((end, segment, segment_end, response_id))
        for record in added:
            rows.append(
                (
                    segment,
                    record.first_seq,
                    record.num_events,
                    record.generation,
                    record.first_token,
                    pack(record.token_ids),
                    record.logprobs,
                    record.facts,
                    record.events,
                    record.created_at,
                )
            )
    many(conn, _INSERT, _COLUMNS, rows)
    return tails


def _segment_end(response_id: str, first_seq: int) -> int:
    # Boundaries differ from run to run, lest runs that started together all open a segment in one commit.
    shift = crc32(response_id.encode()) % SEGMENT_EVENTS
    return first_seq + SEGMENT_EVENTS - (first_seq + shift) % SEGMENT_EVENTS


_OPEN = insert(segments).returning(segments.c.response_id, segments.c.id)
_INSERT = insert(records)
_COLUMNS = tuple(records.c.keys())


def _behind() -> Select[*tuple[Any, ...]]:
    """The records that hold any event from number `seq` on."""
    of_run, seq = segments.c.response_id == bindparam("run"), bindparam("seq", type_=BigInteger)
    # The segment that holds the first number asked for, and those behind it.
    begin = select(func.max(segments.c.first_seq)).where(of_run, segments.c.first_seq <= seq)
    return (
        select(records)
        .join_from(segments, records, records.c.segment == segments.c.id)
        .where(
            of_run,
            segments.c.first_seq >= begin.scalar_subquery(),
            records.c.first_seq + records.c.num_events > seq,
        )
        .order_by(segments.c.first_seq, records.c.first_seq)
        .limit(READ_ROWS)
    )


_BEHIND = _behind()


def read(conn: Connection, response_id: str, *, after: int, limit_bytes: int) -> tuple[Record, ...]:
    """The records that hold any event numbered above `after`, in order.

    It stops at the record that reaches `limit_bytes` of events, so it returns at least one if there is one.
    Empty at the end of the log only. EventsExpired where they, or some before them, were pruned.
    """
    found: list[Record] = []
    size = 0
    while True:
        rows = conn.execute(_BEHIND, {"run": response_id, "seq": max(after + 1, 0)}).all()
        if not rows or rows[0].first_seq > after + 1:
            _require_log(conn, response_id)
        for row in rows:
            found.append(_record(row))
            size += len(row.events)
            if size >= limit_bytes:
                return tuple(found)
        if len(rows) < READ_ROWS:
            return tuple(found)
        after = rows[-1].first_seq + rows[-1].num_events - 1


def end(conn: Connection, response_id: str) -> int:
    """The number after the last event of a log; 0 where it has none. EventsExpired where they were pruned."""
    _require_log(conn, response_id)
    of_run = segments.c.response_id == response_id
    last = select(segments.c.id).where(of_run).order_by(segments.c.first_seq.desc()).limit(1)
    after = func.max(records.c.first_seq + records.c.num_events)
    found = conn.execute(select(after).where(records.c.segment == last.scalar_subquery())).scalar()
    return found or 0


def counts(conn: Connection, response_id: str) -> list[tuple[int, bytes | None]]:
    """How many tokens each record of a log holds, and its facts, in order."""
    query = (
        select(func.length(records.c.token_ids), records.c.facts)
        .join_from(segments, records, records.c.segment == segments.c.id)
        .where(segments.c.response_id == response_id)
        .order_by(segments.c.first_seq, records.c.first_seq)
    )
    return [(num_bytes // 4, facts) for num_bytes, facts in conn.execute(query).all()]


def _require_log(conn: Connection, response_id: str) -> None:
    erased = select(responses.c.log_erased_at).where(responses.c.id == response_id)
    if (erased_at := conn.execute(erased).scalar()) is not None:
        raise EventsExpired(response_id, erased_at)


def erase(conn: Connection, response_ids: Sequence[str]) -> None:
    """Removes the whole logs of runs, token ids included."""
    of_runs = segments.c.response_id.in_(response_ids)
    conn.execute(delete(records).where(records.c.segment.in_(select(segments.c.id).where(of_runs))))
    conn.execute(delete(segments).where(of_runs))


def erase_segments(conn: Connection, ids: Sequence[int]) -> None:
    """Removes parts of logs: for one that is too long to go at once."""
    conn.execute(delete(records).where(records.c.segment.in_(ids)))
    conn.execute(delete(segments).where(segments.c.id.in_(ids)))


TOKEN_BYTES = 4
"""Bytes of a packed token id."""


def pack(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32."""
    if not token_ids:
        return b""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack(data: bytes) -> tuple[int, ...]:
    """The reverse of `pack`."""
    ids = array("I", data)
    if sys.byteorder == "big":
        ids.byteswap()
    return tuple(ids)


def _record(row: Row[*tuple[Any, ...]]) -> Record:
    return Record(
        first_seq=row.first_seq,
        num_events=row.num_events,
        events=row.events,
        generation=row.generation,
        first_token=row.first_token,
        token_ids=unpack(row.token_ids),
        logprobs=row.logprobs,
        facts=row.facts,
        created_at=row.created_at,
    )
