"""Fixtures: an open database of each kind, checked for loose ends when its test is over."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from storage import Storage, open_storage
from tests.support.making import RUNNER, check, url
from tests.support.postgres import Postgres
from tests.support.schema import lay_schema


@pytest.fixture(params=["sqlite", "postgresql"])
async def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    """An empty database of each kind, by its URL; checked at the end."""
    if request.param == "sqlite":
        await lay_schema(tmp_path)
        yield url(tmp_path)
        check(url(tmp_path))
        return
    postgres: Postgres = request.getfixturevalue("postgres")
    fresh = await postgres.fresh()
    yield fresh
    check(fresh)
    await postgres.give_back(fresh)


@pytest.fixture(params=["sqlite", "postgresql"])
async def blank_url(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    """A database of each kind, by its URL, that has no tables yet."""
    if request.param == "sqlite":
        yield url(tmp_path)
        return
    postgres: Postgres = request.getfixturevalue("postgres")
    blank = await postgres.blank()
    yield blank
    await postgres.drop(blank)


@pytest.fixture
async def storage(database_url: str) -> AsyncIterator[Storage]:
    """An empty database, open."""
    opened = await open_storage(database_url, runner=RUNNER)
    yield opened
    await opened.close()
