"""What antiphon-small is trained on: calls that the tools on offer take, in the text of its template."""

from __future__ import annotations

import itertools
from collections import Counter

import jsonschema
import pytest

from engine.small.data import _subject, families, read_talk
from engine.small.everyday import read_tables
from engine.tiny import CHECKPOINT
from engine.tiny.chains import NO_TOOL
from engine.tiny.dialogue import Dialogue, chat_messages, render

DRAWN: list[list[Dialogue]] = list(itertools.islice(families(5), 150))
EVERY = [dialogue for family in DRAWN for dialogue in family]


def test_calls_fit_the_schemas_of_tools_on_offer() -> None:
    calls = 0
    for dialogue in EVERY:
        offered = {tool["function"]["name"]: tool["function"] for tool in dialogue.tools}
        for message in dialogue.messages:
            for call in message.calls:
                parameters = offered[call.name].get("parameters", {"type": "object"})
                jsonschema.validate(call.arguments, parameters)
                calls += 1
    assert calls > 1_000


def test_families_share_their_tools_and_show_every_situation() -> None:
    for family in DRAWN:
        assert len({render(dialogue)[0][0] for dialogue in family}) == 1 or len(family) == 1
    skills = Counter(dialogue.skill for dialogue in EVERY)
    for skill in ("everyday", "everyday_parallel", "everyday_chain", "everyday_decline", "everyday_error"):
        assert skills[skill] > 20
    assert skills["server_tool"] > 20
    assert skills["talk"] > 1
    declined = [d for d in EVERY if d.skill == "everyday_decline"]
    assert all(d.target.content == NO_TOOL and d.tools for d in declined)


def test_chains_call_in_turn_and_at_once_means_two_calls_in_one_message() -> None:
    for dialogue in EVERY:
        made = [len(message.calls) for message in dialogue.messages if message.calls]
        if dialogue.skill == "everyday_chain":
            assert made == [1, 1]
        elif dialogue.skill == "everyday_parallel":
            assert made[0] == 2


@pytest.mark.parametrize("index", range(0, 150, 10))
def test_the_text_is_that_of_the_chat_template(index: int) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    dialogue = DRAWN[index][0]
    template = (CHECKPOINT / "chat_template.jinja").read_text(encoding="utf-8")
    messages = chat_messages(dialogue.messages)
    form = {"type": "json_schema", "json_schema": {"schema": dialogue.schema}} if dialogue.told else None
    rendered, _ = render_jinja_template(
        [messages],
        tools=list(dialogue.tools) or None,
        chat_template=template,
        response_format=form,
        enable_thinking=dialogue.thinking,
    )
    assert "".join(text for text, _ in render(dialogue)) == rendered[0]


def test_what_a_call_takes_stands_in_the_request_letter_by_letter() -> None:
    """Nothing that happens to the request, such as a lower first letter, may reach into a name."""
    found = missed = 0
    for dialogue in EVERY:
        if dialogue.skill not in ("everyday", "everyday_parallel"):
            continue
        said = " ".join(message.content for message in dialogue.messages if message.role == "user")
        for message in dialogue.messages:
            for call in message.calls:
                for value in call.arguments.values():
                    if isinstance(value, str) and value.lower() in said.lower():
                        found, missed = found + 1, missed + (value not in said)
    assert found > 500
    assert missed / found < 0.02  # choices that begin a sentence


def test_what_is_declined_shares_no_subject_with_the_tools_on_offer() -> None:
    """Where another tool's request is declined, none of those on offer could have been meant."""
    tables = read_tables()
    asked = {
        request.say: tool
        for table in tables
        for tool in table.tools.values()
        for request in tool.asks
        if not request.slots()
    }
    known = {tool.name: tool for table in tables for tool in table.tools.values()}
    checked = 0
    for dialogue in EVERY:
        meant = asked.get(dialogue.messages[-2].content)
        if dialogue.skill == "everyday_decline" and meant is not None:
            names = {tool["function"]["name"] for tool in dialogue.tools} & known.keys()
            assert not any(_subject(meant) & _subject(known[name]) for name in names)
            checked += 1
    assert checked > 5


def test_talk_is_of_the_base() -> None:
    talk = read_talk()
    assert len(talk) > 50
    assert all(question and answer for _, question, answer in talk)
