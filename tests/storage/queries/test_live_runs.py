"""The runs in flight, as an operator looks at them."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection

from storage import open_storage
from storage.queries.live_runs import live_runs
from tests.support.making import OWNER, RUNNER, instructions, new, query, url

ENDED = f"""
INSERT INTO responses
  (id, owner, created_at, completed_at, status, model, background, store, head, echo, plan)
WITH RECURSIVE ages (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM ages WHERE n < 3000)
SELECT 'old' || n, '{OWNER}', n, n, 'completed', 'm', 0, 1, x'', x'', x'' FROM ages
"""


async def test_a_list_of_runs_does_not_walk_all_that_is_stored(tmp_path: Path) -> None:
    storage = await open_storage(url(tmp_path), runner=RUNNER)
    query(storage.url, ENDED)
    for id in ("r1", "r2", "r3"):
        await storage.start_response(new(id))

    def listed(conn: Connection) -> tuple[list[str], int]:
        with instructions(conn) as ticks:
            found = live_runs(conn, 2)
        return [run.response_id for run in found], len(ticks)

    found, ticks = await storage._read(listed)
    assert found == ["r1", "r2"]
    assert ticks < 30, "it is not one instruction for each of the ended ones"
    await storage.close()
