"""How Alembic reaches the database.

Owns: the connection of a migration. At a server's start it is handed over, inside a transaction that is
committed by whoever handed it; on the command line it is opened here.
"""

from __future__ import annotations

import asyncio

from sqlalchemy import Connection, create_engine
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import create_async_engine

from alembic import context
from storage import metadata


def run(connection: Connection) -> None:
    # The DDL of both databases is transactional once nobody commits behind its back; batch mode copies tables
    # where SQLite cannot alter them.
    context.configure(
        connection=connection,
        target_metadata=metadata,
        transactional_ddl=True,
        render_as_batch=True,
        # The index of words: each database has it in its own form, and no table of the code.
        include_name=lambda name, *_: not str(name).startswith("vector_words"),
    )
    context.run_migrations()


async def run_on_postgresql(url: str) -> None:
    async with create_async_engine(url).begin() as connection:
        await connection.run_sync(run)


handed: Connection | None = context.config.attributes.get("connection")
if handed is not None:
    run(handed)
else:
    url = context.get_x_argument(as_dictionary=True).get("db")
    if url is None:
        raise SystemExit("say which database: alembic -x db=sqlite:////path/to/antiphon.db ...")
    if make_url(url).get_backend_name() == "postgresql":
        asyncio.run(run_on_postgresql(url))
    else:
        with create_engine(url).begin() as connection:
            run(connection)
