"""Batches in the database: what is to be carried on is found by itself."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection

from storage import open_storage
from storage.batches import NewBatch, batch_rows
from tests.support.making import OTHER, OWNER, RUNNER, instructions, now, query, url

ENDED = f"""
INSERT INTO batches (id, owner, endpoint, input_file_id, metadata, status, created_at, expires_at, ended_at,
  total, completed, failed, num_bytes, fence)
WITH RECURSIVE ages (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM ages WHERE n < 3000)
SELECT 'ended' || n, '{OWNER}', '/v1/responses', 'file', x'7b7d', 'completed', n, n + 1, n + 1, 1, 1, 0, 0, 1
FROM ages
"""


def new_batch(id: str, owner: str) -> NewBatch:
    return NewBatch(id, owner, None, "/v1/responses", "file", "d", b"{}", now(), now() + 1_000_000)


async def test_batches_that_have_ended_are_not_looked_through(tmp_path: Path) -> None:
    storage = await open_storage(url(tmp_path), runner=RUNNER)
    query(storage.url, ENDED)

    def found(conn: Connection) -> tuple[list[str], int]:
        with instructions(conn) as ticks:
            for id, owner in (("b1", OWNER), ("b2", OTHER)):
                batch_rows.create(conn, new_batch(id, owner), 5)
            assert batch_rows.any_of_others(conn, RUNNER, [])
            claimed = batch_rows.claim(conn, RUNNER, 3, [], now(), shared=False)
            assert len(batch_rows.shares(conn, RUNNER, [], now(), shared=False)) == 2
        return [batch.id for batch in claimed], len(ticks)

    claimed, ticks = await storage._write(found)
    assert claimed == ["b1", "b2"]
    assert ticks < 30, "it is not one instruction for each of the ended ones"
    await storage.close()
