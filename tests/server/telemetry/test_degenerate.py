"""Warnings of sampling settings under which texts fall apart."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine import SamplingParams
from server.telemetry import degenerate
from tests.support.running import http_client, running_app


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({"temperature": 1.6}, ["temperature"]),
        ({"temperature": 1.5}, []),
        ({"temperature": 2.0, "top_p": 0.9}, []),
        ({"temperature": 2.0, "top_k": 40}, []),
        ({"temperature": 2.0, "min_p": 0.1}, []),
        ({"repetition_penalty": 0.9}, ["repetition_penalty"]),
        ({"repetition_penalty": 1.2}, []),
        ({"repetition_penalty": 3.0}, ["repetition_penalty"]),
        ({"frequency_penalty": -1.5, "presence_penalty": -2.0}, ["frequency_penalty", "presence_penalty"]),
        ({"frequency_penalty": 2.0}, []),
    ],
)
def test_what_is_degenerate(fields: dict[str, Any], kinds: list[str]) -> None:
    found = degenerate.degenerate(SamplingParams(seed=0, max_tokens=9, **fields))
    assert [kind for kind, _ in found] == kinds


async def test_each_kind_is_told_now_and_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(degenerate, "time", SimpleNamespace(monotonic=lambda: now))
    async with running_app(tmp_path) as server, http_client(server) as client:

        async def told(**fields: float) -> list[str]:
            caplog.clear()
            reply = await client.post("/v1/responses", json={"input": "say hi", **fields})
            assert reply.status_code == 200
            return [line for line in caplog.messages if "may get bad text" in line]

        (line,) = await told(temperature=2)
        assert "antiphon-scripted" in line and "temperature 2 without" in line
        assert await told(temperature=2) == []
        assert len(await told(temperature=2, repetition_penalty=0.5)) == 1
        now += degenerate.EVERY_S
        assert len(await told(temperature=2)) == 1
        assert await told(temperature=1) == []
