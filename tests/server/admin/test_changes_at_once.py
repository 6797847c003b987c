"""Limits that several administrators change at the same moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from server.access import OPERATOR
from server.admin import keys, projects, tiers
from server.config import Config
from server.limits import NONE, load_limits
from server.usage import Prices
from storage import AuditFilter, Storage, open_storage
from tests.support.making import RUNNER, url
from tests.support.schema import lay_schema


@pytest.fixture
async def storage(tmp_path: Path) -> AsyncIterator[Storage]:
    await lay_schema(tmp_path)
    opened = await open_storage(url(tmp_path), runner=RUNNER)
    yield opened
    await opened.close()


async def test_of_an_owner(storage: Storage) -> None:
    """Each of them is kept, whatever it names."""
    id = (await projects.create(storage, OPERATOR, name="Sales"))["id"]
    prices = Prices(Config())
    await asyncio.gather(
        *(
            projects.limit_model(
                storage, NONE, str, OPERATOR, id, f"m{n}", {"max_requests_per_1_minute": n + 1}
            )
            for n in range(8)
        ),
        projects.limit(storage, prices, NONE, OPERATOR, id, {"total_cost": 5.0}),
        projects.limit(storage, prices, NONE, OPERATOR, id, {"tokens_per_day": 9}),
        tiers.change(storage, OPERATOR, id, weight=2.0),
        tiers.change(storage, OPERATOR, id, max_priority=5),
    )
    assert load_limits((await storage.get_owner(id)).limits).given() == {
        "total_cost": 5.0,
        "tokens_per_day": 9,
        "weight": 2.0,
        "max_priority": 5,
        "models": {f"m{n}": {"requests_per_minute": n + 1} for n in range(8)},
    }


async def test_of_a_key(storage: Storage) -> None:
    id = (await keys.make(storage, OPERATOR, name="x", owner="team")).stored.id
    await asyncio.gather(
        keys.change(storage, OPERATOR, id, limits={"tokens_per_day": 9}),
        keys.change(storage, OPERATOR, id, name="y", limits={"concurrent_streams": 2}),
        tiers.change(storage, OPERATOR, id, max_priority=5),
        tiers.change(storage, OPERATOR, id, service_tiers=["flex"]),
    )
    changed = await storage.get_key(id)
    assert changed.name == "y"
    assert load_limits(changed.limits).given() == {
        "tokens_per_day": 9,
        "concurrent_streams": 2,
        "max_priority": 5,
        "service_tiers": ("flex",),
    }


async def test_a_change_that_leaves_no_limits_changes_nothing(storage: Storage) -> None:
    """Neither the limits nor the audit log."""
    id = (await keys.make(storage, OPERATOR, name="x", owner="team", limits={"tokens_per_day": 9})).stored.id
    prices = Prices(Config())
    with pytest.raises(ValueError, match="tokens_per_day"):
        await keys.change(storage, OPERATOR, id, name="y", limits={"tokens_per_day": -1})
    with pytest.raises(ValueError, match="no limit 'tokens'"):
        await projects.limit(storage, prices, NONE, OPERATOR, "team", {"tokens": 1})
    assert (await storage.get_key(id)).name == "x" and (await storage.get_owner("team")).limits is None
    told = await storage.list_audit(AuditFilter(), limit=9)
    assert [each.entry.action for each in told.data] == ["api_key.created"]
