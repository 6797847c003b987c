"""The index of saved blocks, beside a plain model of it: sets of chains and of names."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from engine.tiers import index as module
from engine.tiers.files import Key, Name, Row
from engine.tiers.index import HALF_LIFE_S, Index, SavedFile
from tests.support.saved_blocks import chain


def add(
    index: Index,
    name: str,
    keys: list[Key],
    *,
    first: int = 0,
    owner: bytes = b"a",
    size: int = 100,
    used_at: float = 0.0,
    groups: int = 1,
) -> SavedFile:
    file = SavedFile(Path(name), owner, size * len(keys), used_at)
    index.add(file, [Row(key, b"", 0, size, groups, first + i) for i, key in enumerate(keys)])
    return file


def test_a_name_keeps_a_block_and_all_before_it() -> None:
    index, keys = Index(), chain("abcd")
    first, second = add(index, "1", keys[:2]), add(index, "2", keys[2:], first=2)
    index.give(Name("one", keys[1].digest, None), b"a")
    index.give(Name("two", keys[3].digest, None), b"a")
    assert index.take("one") == [], "the other name needs its blocks"
    assert index.take("two") == [second, first]
    assert (first.num_dead, second.num_dead, len(index)) == (2, 2, 0)
    assert not index.alive(first)


def test_branches_die_up_to_where_they_part() -> None:
    index, left, right = Index(), chain("abcd"), chain("abxy")
    file, other = add(index, "1", left), add(index, "2", right[2:], first=2)
    index.give(Name("left", left[3].digest, None), b"a")
    index.give(Name("right", right[3].digest, None), b"a")
    assert index.take("left") == [file] and file.num_dead == 2
    assert index.alive(file) == {left[0].digest, left[1].digest}
    assert index.take("right") == [other, file] and file.num_dead == 4


def test_a_name_that_is_given_again_lets_go_of_what_it_stood_for() -> None:
    index, old, new = Index(), chain("abc"), chain("axy")
    file = add(index, "1", old)
    index.give(Name("run", old[2].digest, None), b"a")
    add(index, "2", new[1:], first=1)
    assert index.give(Name("run", new[2].digest, None), b"a") == [file]
    assert index.alive(file) == {old[0].digest}
    assert index.give(Name("run", new[2].digest, 5.0), b"a") == [], "the same again"
    assert index.names["run"].until == 5.0


def test_the_same_block_in_two_files_is_there_until_both_are_gone() -> None:
    index, keys = Index(), chain("ab")
    first, second = add(index, "1", keys, groups=1), add(index, "2", keys, groups=3)
    index.give(Name("n", keys[1].digest, None), b"a")
    assert index.groups_of(keys[0].digest) == 3
    assert index.place(keys[0].digest, 2) is second and index.place(keys[0].digest, 1) is first
    assert index.remove(second) == [] and index.place(keys[0].digest, 1) is first
    assert index.place(keys[0].digest, 2) is None and index.groups_of(keys[0].digest) == 1
    assert index.remove(first) == ["n", "n"] and not index.names and not len(index)
    assert index.num_bytes == 0 and not index.bytes_of


def test_names_of_blocks_that_were_evicted_stand_for_those_before() -> None:
    index, keys = Index(), chain("abcd")
    head, tail = add(index, "1", keys[:2]), add(index, "2", keys[2:], first=2)
    index.give(Name("n", keys[3].digest, None), b"a")
    assert set(index.remove(tail)) == {"n"} and index.names["n"].tail == keys[1].digest
    assert index.orphans() == []
    assert index.take("n") == [head]


def test_children_may_be_found_before_their_parents() -> None:
    index, keys = Index(), chain("abcd")
    tail = add(index, "2", keys[2:], first=2)
    index.give(Name("n", keys[3].digest, None), b"a")
    head = add(index, "1", keys[:2])
    assert index.orphans() == [] and index.nameless() == []
    assert index.take("n") == [tail, head]


def test_orphans_and_names_of_nothing_are_found() -> None:
    index, keys, others = Index(), chain("abcd"), chain("xy")
    file, orphan = add(index, "1", keys), add(index, "2", others)
    index.give(Name("n", keys[1].digest, None), b"a")
    index.give(Name("nothing", b"?" * 16, None), b"a")
    assert set(index.orphans()) == {file, orphan}
    assert index.alive(file) == {keys[0].digest, keys[1].digest} and not index.alive(orphan)
    assert index.nameless() == ["nothing"]


def test_what_is_worth_least_goes_first_and_ends_before_beginnings() -> None:
    index, long, short = Index(), chain("abcdef"), chain("xy")
    add(index, "head", long[:3])
    add(index, "end", long[3:], first=3, used_at=10.0)
    add(index, "short", short, used_at=10.0)
    chosen = []
    for file, cause in index.least_worth(700, 1000, lambda index: 1.0 + index, now=10.0):
        chosen.append((file.path.name, cause))
        index.remove(file)
    # a block far behind costs more to compute; the head has to stay while its end is there
    assert chosen == [("short", "quota"), ("end", "quota"), ("head", "quota")]


def test_what_was_not_used_for_long_goes_before_what_was() -> None:
    index = Index()
    for name, used_at in (("old", 0.0), ("new", HALF_LIFE_S), ("newer", HALF_LIFE_S * 2)):
        add(index, name, chain(name), used_at=used_at)
    chosen = next(iter(index.least_worth(1, 1000, lambda _: 1.0, now=HALF_LIFE_S * 2)))
    assert chosen[0].path.name == "old"


def test_who_has_more_than_an_equal_share_goes_first() -> None:
    index = Index()
    add(index, "small", chain("a"), owner=b"b", used_at=0.0)
    for i in range(9):
        add(index, f"much{i}", chain(f"x{i}"), used_at=1e9)
    causes = []
    for file, cause in index.least_worth(1000, 1000, lambda _: 1.0, now=1e9):
        causes.append((file.owner, cause))
        index.remove(file)
    assert causes[:5] == [(b"a", "owner")] * 5 and b"b" not in dict(causes)


def test_a_block_that_nothing_leads_to_is_worth_nothing() -> None:
    index, keys = Index(), chain("abcd")
    add(index, "cut off", keys[2:], first=2, used_at=100.0)
    add(index, "whole", chain("xy"), used_at=0.0)
    assert next(iter(index.least_worth(1, 10, lambda _: 1.0, now=100.0)))[0].path.name == "cut off"


def test_names_end_by_their_time_and_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    index, keys = Index(), chain("a")
    add(index, "1", keys)
    for name, until in (("one", None), ("two", 5.0), ("three", 15.0), ("four", None)):
        index.give(Name(name, keys[0].digest, until), b"a")
    assert index.expired(10.0) == ["two"]
    monkeypatch.setattr(module, "MAX_NAMES", 2)
    assert index.expired(10.0) == ["two", "one"]


@pytest.mark.parametrize("seed", range(20))
def test_random_histories_leave_exactly_what_names_stand_for(seed: int) -> None:
    """Conversations branch, are forgotten and lose files; what is alive is what the plain model says."""
    rng, index = random.Random(seed), Index()
    texts: dict[str, str] = {}
    for step in range(120):
        act = rng.random()
        if act < 0.6:
            base = rng.choice([*texts.values(), ""])
            text = base[: rng.randint(0, len(base))] + "".join(rng.choices("ab", k=rng.randint(1, 5)))
            keys = chain(text)
            missing = [key for key in keys if not index.groups_of(key.digest)]
            if missing:
                add(index, f"f{step}", missing, first=len(keys) - len(missing))
            name = rng.choice([f"n{step}", *texts])
            index.give(Name(name, keys[-1].digest, None), b"a")
            texts[name] = text
        elif texts:
            name = rng.choice(list(texts))
            index.take(name)
            del texts[name]
        wanted = {key.digest for text in texts.values() for key in chain(text)}
        assert {digest for digest in index._nodes} == wanted
        for file in list(index.files.values()):
            alive = index.alive(file)
            assert len(file.digests) - len(alive) == file.num_dead
            if not alive:
                assert index.remove(file) == []
        assert index.orphans() == [] and index.nameless() == []
    for name in list(texts):
        index.take(name)
    assert not len(index) and not index._children and not index._names
