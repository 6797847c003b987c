"""Row 24: a migration that is killed at any of its statements, and a database that a newer version wrote.

The migration starts from a database of the first revision with rows in it.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from alembic.config import Config
from sqlalchemy import create_engine

from alembic import command
from storage.migrate import HEAD, script_location
from tests.chaos.driver import ROOT
from tests.chaos.report import Form, Report, row
from tests.support.forking import READY
from tests.support.making import query

OLD = "0001"
KEPT = (
    "INSERT INTO conversations (id, owner, created_at, metadata, head) "
    "VALUES ('conv_{n}', 'o', {n}, x'7b7d', 0)"
)

# The command, which kills itself at a certain statement.
DEADLY = """
import os, signal, sys
from sqlalchemy import event
from sqlalchemy.engine import Engine
import server.cli

left = int(sys.argv.pop())

@event.listens_for(Engine, "before_cursor_execute")
def count(*_):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)

sys.exit(server.cli.main())
"""


def old_database(folder: Path) -> Path:
    """A database of the first revision, with rows."""
    folder.mkdir(parents=True)
    path = folder / "antiphon.db"
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        config = Config()
        config.set_main_option("script_location", str(script_location()))
        config.attributes["connection"] = connection
        command.upgrade(config, OLD)
        for n in range(20):
            connection.exec_driver_sql(KEPT.format(n=n))
    engine.dispose()
    return path


async def antiphon(*argv: str, code: str | None = None) -> tuple[int, str]:
    """Run the command; its exit code and what it said."""
    process = await asyncio.create_subprocess_exec(
        *([sys.executable, "-c", code] if code else [READY, "-m", "server.cli"]), *argv,
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await process.communicate()
    return process.returncode or 0, said.decode()


@row(
    "24",
    "migration killed half-way; an older version on a newer schema",
    "the next start finishes or rolls back; a newer schema is refused with a clear message",
    short=False,
)
async def migrations(form: Form, report: Report) -> None:
    """From the first revision, with rows, on SQLite; each kill at another statement."""
    killed = num = 0
    while True:
        num += 1 if form.full else 4
        path = old_database(form.folder / str(num))
        code, said = await antiphon("migrate", "--data", str(path.parent), str(num), code=DEADLY)
        if code == 0:
            break
        killed += 1
        report.holds(code == -signal.SIGKILL, f"statement {num}: exit code {code}: {said}")
        half = query(path, "SELECT version_num FROM alembic_version")
        report.holds(half in ([(OLD,)], [(HEAD,)]), f"statement {num}: the revision is {half}")
        code, said = await antiphon("migrate", "--data", str(path.parent))
        report.holds(code == 0, f"statement {num}: the next start says {said}")
        report.holds(query(path, "SELECT version_num FROM alembic_version") == [(HEAD,)], "not the newest")
        report.holds(query(path, "SELECT count(*) FROM conversations") == [(20,)], "rows are gone")
    query(path, "UPDATE alembic_version SET version_num = '9999'")
    code, said = await antiphon("serve", "--engine", "scripted", "--port", "0", "--data", str(path.parent))
    report.holds(code == 2 and "9999" in said, f"a newer schema: exit code {code}: {said}")
    report.figure(f"{killed} kills, each at another statement: finished at the next start, no row lost")
    report.figure(f"a newer schema: exit code {code}")
