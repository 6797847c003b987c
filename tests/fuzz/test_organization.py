"""The short form of the fuzzer of keys, limits and usage, and that it sees what is wrong."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from server.access import ADMIN, ADMIN_READS, OPERATOR_ONLY
from tests.fuzz import organization
from tests.fuzz.organization import Ask, fuzz, routes

SEED = int(os.environ.get("ANTIPHON_FUZZ_SEED", random.SystemRandom().randrange(1 << 30)))
PATIENCE_S = 60.0  # of a machine that others use too; the long form asks for 5


async def test_no_request_fails_as_the_servers_fault_or_gets_more_than_its_key_may(tmp_path: Path) -> None:
    print(f"ANTIPHON_FUZZ_SEED={SEED}")
    found = await fuzz(tmp_path, SEED, 600, organization.AT_ONCE, PATIENCE_S)
    assert found.wrong == []
    assert found.replies.total() == 600
    assert found.replies[200] > 20, found.replies  # of 41 seeds, the least was 94
    assert len(found.routes) > len(routes()) / 2


REFUSAL = '{"error": {"message": "It cannot be so.", "type": "x", "param": "name", "code": "invalid_value"}}'


@pytest.mark.parametrize(
    ("why", "scopes", "status", "text"),
    [
        (None, ADMIN, 200, "{}"),
        (None, "all", 400, REFUSAL),
        ("without the scope", "all", 200, "{}"),
        ("without the scope", None, 200, "{}"),
        ("a failure", ADMIN, 500, REFUSAL),
        ("official form", ADMIN, 400, '{"detail": "no"}'),
        ("without its field", ADMIN, 400, REFUSAL.replace('"name"', "null")),
        ("own failure", ADMIN, 400, REFUSAL.replace("cannot be so", "failed (KeyError)")),
        ("how long", ADMIN, 429, REFUSAL),
        ("nobody expects", ADMIN, 418, REFUSAL),
    ],
)
def test_what_is_wrong_with_a_reply(why: str | None, scopes: str | None, status: int, text: str) -> None:
    ask = Ask("POST", "/x", "/x", ADMIN, "{}", None, scopes)
    fault = organization._fault(ask, status, text, None)
    assert fault is None if why is None else why in (fault or "")


def test_every_route_for_administrators_and_operators_is_asked() -> None:
    assert {scope for _, _, scope in routes()} == {ADMIN, OPERATOR_ONLY, ADMIN_READS}
