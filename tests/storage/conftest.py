"""Fixtures: an open database, checked for loose ends when its test is over."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from storage import Storage, open_storage
from tests.storage.making import RUNNER, check, url


@pytest.fixture
async def storage(tmp_path: Path) -> AsyncIterator[Storage]:
    """An empty database that this process holds."""
    opened = await open_storage(url(tmp_path), runner=RUNNER)
    yield opened
    await opened.close()
    check(opened.path)
