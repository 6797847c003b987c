"""What a server warns of at its start."""

from __future__ import annotations

from typing import Any

import pytest

from server.config import Config
from server.process.serve import _Process


@pytest.mark.parametrize(
    ("settings", "keyed", "named"),
    [
        ({"trusted_proxy": ("127.0.0.1",)}, False, "trusted_proxy"),
        ({"allowed_host": ("chat.example",)}, False, "allowed_host"),
        ({"trusted_proxy": ("127.0.0.1",)}, True, None),
        ({}, False, None),
    ],
)
def test_a_server_without_keys_that_others_are_led_to_warns(
    caplog: pytest.LogCaptureFixture, settings: dict[str, Any], keyed: bool, named: str | None
) -> None:
    _Process(Config(**settings), 0.0, None)._warn(keyed=keyed)
    told = [line for line in caplog.messages if "leads others to this server" in line]
    assert [line.split()[0] for line in told] == ([named] if named else [])
