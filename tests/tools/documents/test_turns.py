"""Owners take turns: many documents of one do not hold up another's first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future

import pytest

from tools.documents import ReadersBusy
from tools.documents.turns import Turns


def test_owners_take_turns_and_nobodys_first_waits_for_the_many_of_another() -> None:
    turns, began = Turns(2, of_owner=50), list[str]()
    gates: dict[str, threading.Event] = {}
    lock = threading.Lock()
    changed = threading.Condition(lock)

    def work(name: str) -> Callable[[], str]:
        gates[name] = threading.Event()

        def run() -> str:
            with changed:
                began.append(name)
                changed.notify_all()
            gates[name].wait(60)
            return name

        return run

    def wait_for(*names: str) -> None:
        with changed:
            assert changed.wait_for(lambda: len(began) >= len(names), 10)
            assert sorted(began) == sorted(names)

    def submit(name: str) -> Future[str]:
        return turns.submit(name[0], work(name))

    many = [submit(f"a{number}") for number in range(50)]
    wait_for("a0", "a1")
    first = submit("b0")
    wait_for("a0", "a1", "b0")
    others = [submit(name) for name in ("b1", "c0")]  # all places are taken, and one more is
    gates["a0"].set()
    wait_for("a0", "a1", "b0", "c0")  # c has none at work
    gates["b0"].set()
    assert first.result(10) == "b0"  # b1 has begun by now, since b had nothing else at work
    gates["c0"].set()
    assert others[1].result(10) == "c0"
    wait_for("a0", "a1", "b0", "c0", "b1")
    gates["a1"].set()
    wait_for("a0", "a1", "b0", "c0", "b1", "a2")
    assert many[40].cancel()
    for gate in gates.values():
        gate.set()
    assert [future.result(10) for future in (*many[:40], *many[41:])] == [
        f"a{n}" for n in range(50) if n != 40
    ]
    assert "a40" not in began
    turns.close()


def test_two_owners_leave_a_place_for_a_third() -> None:
    turns, go_on = Turns(4), threading.Event()
    names = ("a1", "a2", "a3", "a4", "b1", "b2", "c1")
    works = {name: turns.submit(name[0], lambda: go_on.wait(60)) for name in names}
    assert [name for name, work in works.items() if work.running()] == ["a1", "a2", "a3", "b1", "c1"]
    go_on.set()
    assert all(work.result(10) for work in works.values())
    turns.close()


def test_work_that_fails_fails_for_whoever_waits_and_leaves_its_place() -> None:
    turns, gate = Turns(1), threading.Event()

    def fails() -> None:
        raise ValueError("broken")

    for _ in range(5):
        with pytest.raises(ValueError, match="broken"):
            turns.submit("a", fails).result(10)
    going, waiting = turns.submit("a", gate.wait), turns.submit("a", gate.wait)
    turns.close()
    gate.set()
    assert going.result(10)
    with pytest.raises(CancelledError):
        waiting.result(10)


def test_what_waits_is_bounded_and_what_is_cancelled_leaves_its_place() -> None:
    turns, gate = Turns(1, waiting=5, of_owner=3), threading.Event()
    going = [turns.submit(owner, gate.wait) for owner in "ab"]  # the place, and one more
    mine = [turns.submit("a", gate.wait) for _ in range(3)]
    with pytest.raises(ReadersBusy) as full:
        turns.submit("a", gate.wait)
    assert full.value.own and turns.num_waiting == 3
    others = [turns.submit("b", gate.wait) for _ in range(2)]
    with pytest.raises(ReadersBusy) as full:
        turns.submit("c", gate.wait)
    assert not full.value.own
    assert mine[1].cancel() and not going[0].cancel()
    assert turns.num_waiting == 4
    others.append(turns.submit("c", gate.wait))
    gate.set()
    assert all(future.result(10) for future in (*going, mine[0], mine[2], *others))
    assert turns.num_waiting == 0
    turns.close()
