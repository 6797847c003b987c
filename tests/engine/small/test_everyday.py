"""The tables that antiphon-small is trained on, and how requests, calls and answers are drawn from them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from engine.small.everyday import SLOT, Request, Table, TableError, attempts, read_tables, schema_of

TABLES = read_tables()


def test_everything_in_the_tables_can_be_drawn() -> None:
    rng = random.Random(1)
    drawn = 0
    for table in TABLES:
        for text, draw in attempts(table):
            assert draw(rng), text
            drawn += 1
    assert len(TABLES) == 24
    assert drawn > 27_000


def test_answers_tell_the_result_and_leave_no_slot() -> None:
    rng = random.Random(2)
    for table in TABLES:
        for tool in table.tools.values():
            _, arguments = table.ask(rng, tool, rng.choice(tool.asks))
            for shown in tool.gives:
                answer = table.answer(rng, tool, arguments, shown)
                assert shown.lower() in answer.lower(), (tool.name, answer)
                assert not SLOT.search(answer.replace(shown, "")), (tool.name, answer)


TABLE = """
[values]
room = ["attic", "study", "hall"]
colour = ["red", "green"]
[[tools]]
name = "lamp_of"
about = "Which lamp a room has."
takes = { room = "text" }
from = { room = "room" }
asks = ["Which lamp is in the {room}?"]
two = ["Lamps of the {room} and the {room2}?"]
gives = ["L7"]
answers = ["The {room} has {gives}."]
[[tools]]
name = "dim"
about = "Dims a lamp."
takes = { lamp = "text", level = "whole", slow = "yes", colour = "text?" }
from = { level = "1-9", colour = "colour" }
asks = [{ say = "Dim to {level}, gently.", with = { lamp = "L1", slow = true } }]
gives = ["ok"]
answers = ["It is {colour} now: {gives}."]
[[chains]]
first = "lamp_of"
second = "dim"
link = "lamp"
values = "room"
asks = [{ say = "Dim the {room} to {level} at once.", with = { slow = false } }]
"""


def table_of(text: str, folder: Path) -> Table:
    file = folder / "one.toml"
    file.write_text(text)
    return Table(file)


def test_a_request_its_implied_arguments_and_its_answer(tmp_path: Path) -> None:
    table, rng = table_of(TABLE, tmp_path), random.Random(3)
    dim = table.tools["dim"]
    text, arguments = table.ask(rng, dim, dim.asks[0])
    assert text == f"Dim to {arguments['level']}, gently."
    assert arguments == {"lamp": "L1", "level": arguments["level"], "slow": True, "colour": None}
    # The only answer names what was left out.
    assert table.answer(rng, dim, arguments, "ok") == "The result is ok."
    lamp = table.tools["lamp_of"]
    text, first, second = table.ask_for_two(rng, lamp, lamp.two[0])
    assert first != second
    assert text == f"Lamps of the {first['room']} and the {second['room']}?"
    assert table.answer(rng, lamp, first, "L7") == f"The {first['room']} has L7."


def test_a_chain_gives_the_second_call_what_the_first_has_said(tmp_path: Path) -> None:
    table, rng = table_of(TABLE, tmp_path), random.Random(4)
    (chain,) = table.chains
    text, first, result, second = table.ask_chain(rng, chain, chain.asks[0])
    assert text == f"Dim the {first['room']} to {second['level']} at once."
    assert second == {"lamp": result, "level": second["level"], "slow": False, "colour": None}


@pytest.mark.parametrize(
    ("request_", "fault"),
    [
        (Request("Dim it."), "needs lamp"),
        (Request("Dim {lampe}."), "has no parameter lampe"),
        (Request("Dim.", {"lamp": "a", "level": 1, "slow": True, "fast": True}), "does not take"),
    ],
)
def test_what_a_table_gets_wrong_is_named(request_: Request, fault: str, tmp_path: Path) -> None:
    table = table_of(TABLE, tmp_path)
    with pytest.raises(TableError, match=fault):
        table.ask(random.Random(1), table.tools["dim"], request_)


def test_schemas_of_parameters() -> None:
    assert schema_of("a|b") == {"type": "string", "enum": ["a", "b"]}
    assert schema_of("number?") == {"type": "number"}
    assert schema_of([{"product": "text", "pieces": "whole"}]) == {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"product": {"type": "string"}, "pieces": {"type": "integer"}},
            "required": ["product", "pieces"],
            "additionalProperties": False,
        },
    }
