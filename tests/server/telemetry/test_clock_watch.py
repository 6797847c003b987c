"""A wall clock that is set while the server runs."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from server import clock
from server.telemetry import ClockWatch
from tests.support.running import Running, http_client


async def test_a_clock_that_is_set_is_told_once_and_measured(
    server_app: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def set_wall_clock(seconds: int) -> None:
        wall = SimpleNamespace(
            time_ns=lambda: time.time_ns() + seconds * 10**9, clock_gettime_ns=time.clock_gettime_ns
        )
        monkeypatch.setattr(clock, "time", wall)

    watch, told = ClockWatch(), []
    caplog.set_level("INFO", "antiphon.clock")
    for off in (0, 20, -3600, -3610, 7200, 0):
        caplog.clear()
        set_wall_clock(off)
        watch.look()
        told.append([(record.levelname, record.getMessage()) for record in caplog.records])
    assert [len(lines) for lines in told] == [0, 0, 1, 0, 1, 1]
    behind, ahead, again = told[2][0], told[4][0], told[5][0]
    assert behind[0] == ahead[0] == "WARNING" and again[0] == "INFO"
    assert "3600 s behind the clock" in behind[1] and "7200 s ahead of the clock" in ahead[1]
    assert "restart the server" in behind[1]
    set_wall_clock(-3600)
    async with http_client(server_app) as client:
        page = (await client.get("/metrics")).text
    [line] = [line for line in page.splitlines() if line.startswith("antiphon_clock_ahead_seconds ")]
    assert float(line.split()[1]) == pytest.approx(-3600, abs=20)
