"""Lookups that are made up: both calls of a chain can be told from the request and from the first result."""

from __future__ import annotations

import random
import re

import pytest

from engine.small.everyday import SLOT, WORDS, Table, coined, grafted, read_tables
from engine.small.lookups import lookup

TABLES = read_tables()


@pytest.mark.parametrize("table", TABLES, ids=[str(number) for number in range(len(TABLES))])
def test_the_request_tells_by_what_to_look_up_and_not_what_is_looked_up(table: Table) -> None:
    rng = random.Random(3)
    for _ in range(200):
        chain = lookup(rng, table)
        (key,) = chain.first.takes
        assert chain.first.name not in table.tools
        assert chain.second is table.tools[chain.second.name] and chain.second.takes[chain.link] == "text"
        for request in chain.asks:
            text, first, result, second = table.ask_chain(rng, chain, request)
            assert list(first) == [key] and str(first[key]) in text
            assert second[chain.link] == result and second.keys() == chain.second.takes.keys()
            assert chain.link not in request.slots()
            assert not re.search(r"[{}]", text.replace(str(first[key]), ""))


def test_what_follows_a_lookup_tells_the_rest_of_the_second_call() -> None:
    rng = random.Random(4)
    for _ in range(200):
        table = rng.choice(TABLES)
        chain = lookup(rng, table)
        result = rng.choice(chain.values)
        text, arguments = table.ask_then(rng, chain, result)
        assert arguments[chain.link] == result
        assert text and not SLOT.search(text)


def test_a_lookup_alone_is_asked_for_and_answered() -> None:
    rng = random.Random(5)
    for _ in range(200):
        table = rng.choice(TABLES)
        tool = lookup(rng, table).first
        (key,) = tool.takes
        for request in tool.asks:
            text, arguments = table.ask(rng, tool, request)
            assert str(arguments[key]) in text
        shown, answer = table.result(rng, tool, arguments)
        assert shown in answer
        text, one, other = table.ask_for_two(rng, tool, rng.choice(tool.two))
        assert one != other and all(str(each[key]) in text for each in (one, other))


def test_no_word_list_is_empty_and_names_that_nobody_has_heard_are_names() -> None:
    assert all(WORDS.values())
    rng = random.Random(6)
    names = {coined(rng) for _ in range(500)}
    assert len(names) > 450
    assert all(re.fullmatch(r"[A-Z][a-z]+( [A-Z][a-z]+)?", name) for name in names)


def test_grafted_names_begin_as_one_word_and_end_as_another() -> None:
    rng = random.Random(7)
    words = ["Ottmar", "Delphine", "Kwabena"]
    names = [grafted(rng, words) for _ in range(100)]
    assert len(set(names)) > 30
    for name in names:
        cuts = range(1, len(name))
        assert any(
            any(w.startswith(name[:cut]) for w in words) and any(w.endswith(name[cut:]) for w in words)
            for cut in cuts
        )


def test_names_that_nobody_has_heard_stand_in_no_list() -> None:
    rng = random.Random(8)
    for table in read_tables():
        heard = {text for texts in table.values.values() for text in texts}
        names = [table.unheard(rng) for _ in range(200)]
        assert sum(name in heard for name in names) < 4
        assert len(set(names)) > 190
