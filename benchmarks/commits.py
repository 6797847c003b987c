"""What a commit costs: 64 streams that each add a record, and the verbs around them, on both databases.

`python -m benchmarks.commits`. PostgreSQL runs beside it, on a Unix socket, and flushes every commit.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from server.process.process_ends import tune_process
from storage import open_storage
from tests.storage.drivers.test_speed import measure
from tests.support.making import RUNNER, url
from tests.support.postgres import postgres_server


async def run(where: str) -> None:
    storage = await open_storage(where, runner=RUNNER)
    try:
        await measure(storage)
    finally:
        await storage.close()


def main() -> None:
    tune_process()
    with tempfile.TemporaryDirectory() as folder:
        print("SQLite", end="")
        asyncio.run(run(url(Path(folder))))
    with postgres_server(durable=True) as server:
        print("\nPostgreSQL", end="")
        asyncio.run(run(asyncio.run(server.fresh())))


if __name__ == "__main__":
    main()
