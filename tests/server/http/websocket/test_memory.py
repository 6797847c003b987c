"""What sockets hold in memory: each owner within a share, and nobody at the cost of others."""

from __future__ import annotations

from functools import partial

import pytest

from server.errors import ApiError
from server.http.websocket.memory import KeptBytes, WaitingBytes


def test_what_has_to_go_is_of_the_owner_who_has_the_most() -> None:
    gone: list[str] = []
    kept = KeptBytes(100)
    kept.keep("ann", "a1", 20, partial(gone.append, "a1"))
    for index in range(5):
        kept.keep("bob", f"b{index}", 30, partial(gone.append, f"b{index}"))
    assert gone == ["b0", "b1", "b2"]
    kept.used("bob", "b3")
    kept.keep("ann", "a2", 20, partial(gone.append, "a2"))
    assert gone == ["b0", "b1", "b2"] and kept.num_bytes == 100
    kept.keep("cat", "c1", 10, partial(gone.append, "c1"))
    assert gone[3:] == ["b4"], "it was used before b3"
    kept.keep("cat", "c1", 5, partial(gone.append, "c1"))
    assert kept.num_bytes == 20 + 20 + 30 + 5, "what was kept under its key before is not counted any more"
    for owner, key in (
        ("ann", "a1"),
        ("ann", "a2"),
        ("bob", "b3"),
        ("cat", "c1"),
        ("cat", "c1"),
        ("dan", "d"),
    ):
        kept.let_go(owner, key)
    assert kept.num_bytes == 0 and len(gone) == 4


def test_frames_wait_within_every_limit_that_they_are_charged_to() -> None:
    waiting = WaitingBytes()
    one, other = {"line 1": 10, "ann": 15}, {"line 2": 10, "ann": 15}
    with waiting.frame(10, one):
        with pytest.raises(ApiError) as refused:
            waiting.frame(1, one).__enter__()
        assert (refused.value.status, refused.value.code) == (429, "queue_full")
        with waiting.frame(5, other), pytest.raises(ApiError):
            waiting.frame(1, other).__enter__()
        with waiting.frame(10, {"line 3": 10, "bob": 15}):
            pass
    with waiting.frame(10, other):
        pass
