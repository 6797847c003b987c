"""The curriculum's tools as people have them: valid calls, sensible ends, the server's own tools as shown."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from engine.tiny.chains import NO_TOOL
from engine.tiny.data import dialogues
from engine.tiny.dialogue import Call, Dialogue, Message
from engine.tiny.served import CALCULATOR, FIND_IN_PAGE, OPEN_PAGE, SAVE_NOTE, WEB_SEARCH
from engine.tiny.situations import SITUATIONS
from server.items import ITEM_TYPES
from tools import BUILTIN, PAGE, SEARCH

COUNT = 120


def some(skill: str) -> list[Dialogue]:
    return list(itertools.islice(dialogues(4, "train", skill), COUNT))


def calls_of(dialogue: Dialogue) -> list[Call]:
    return [call for message in dialogue.messages for call in message.calls]


def functions_of(dialogue: Dialogue) -> dict[str, dict[str, Any]]:
    return {tool["function"]["name"]: tool["function"] for tool in dialogue.tools}


def text_before(dialogue: Dialogue, call: Call) -> str:
    """What the model has read when it makes a call."""
    at = next(index for index, message in enumerate(dialogue.messages) if call in message.calls)
    return " ".join(message.content for message in dialogue.messages[:at])


@pytest.mark.parametrize("skill", sorted(SITUATIONS))
def test_every_call_is_one_that_its_tools_allow(skill: str) -> None:
    called = 0
    for dialogue in some(skill):
        functions = functions_of(dialogue)
        assert len(functions) == len(dialogue.tools), "each name is there once"
        for call in calls_of(dialogue):
            called += 1
            jsonschema.validate(call.arguments, functions[call.name].get("parameters", {}))
    assert called > COUNT / 2 or skill == "natural_decline"


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in leaves(each)]
    return [leaf for each in value for leaf in leaves(each)] if isinstance(value, list) else [value]


@pytest.mark.parametrize("skill", ["natural", "natural_arguments", "natural_parallel", "natural_chain"])
def test_every_text_and_number_of_a_call_was_told_before(skill: str) -> None:
    """Nothing has to be guessed: a model that copies can be right."""
    for dialogue in some(skill):
        for call in calls_of(dialogue):
            text = text_before(dialogue, call).casefold()
            for leaf in leaves(call.arguments):
                assert leaf is None or isinstance(leaf, bool) or str(leaf).casefold() in text, (call, text)


def test_arguments_are_of_every_type() -> None:
    kinds = set()
    for call in (call for dialogue in some("natural_arguments") for call in calls_of(dialogue)):
        for value in call.arguments.values():
            kinds.add(
                f"list of {type(value[0]).__name__}" if isinstance(value, list) else type(value).__name__
            )
    plain = {"str", "int", "float", "bool", "NoneType", "dict"}
    assert kinds >= {*plain, "list of str", "list of int", "list of dict"}


def test_tools_without_parameters_are_called_without_arguments() -> None:
    assert {json.dumps(call.arguments) for d in some("no_parameters") for call in calls_of(d)} == {"{}"}


def test_after_an_error_the_model_says_so_or_tries_again() -> None:
    ends: dict[str, int] = {"said": 0, "again": 0}
    for dialogue in some("tool_error"):
        _, _, *after = dialogue.messages[
            max(i for i, m in enumerate(dialogue.messages) if m.role == "user") :
        ]
        if len(after) == 2:
            assert after[1].content.startswith("Sorry, the tool failed: ")
            reason = after[1].content.removeprefix("Sorry, the tool failed: ").removesuffix(".")
            assert reason in after[0].content or json.dumps(reason)[1:-1] in after[0].content
            ends["said"] += 1
        else:
            first, second = calls_of(dialogue)[-2:]
            assert first.name == second.name
            ends["again"] += 1
    assert min(ends.values()) > COUNT / 10


def test_what_is_declined_is_not_on_offer() -> None:
    declined = [dialogue for dialogue in some("natural_decline") if dialogue.target.content == NO_TOOL]
    assert len(declined) > COUNT / 2
    for dialogue in declined:
        asked = dialogue.messages[-2].content.lower()
        assert not any(name.lower() in asked.split() for name in functions_of(dialogue))


def test_a_search_is_answered_from_what_it_found() -> None:
    searched = [d for d in some("server_tool") if any(call.name == "web_search" for call in calls_of(d))]
    assert searched
    for dialogue in searched:
        shown: Message = dialogue.messages[-2]
        sentence, marker, _ = dialogue.target.content.partition(" 【")
        assert (marker and sentence in shown.content) or shown.content == "Nothing was found."


def shown_of(name: str) -> dict[str, Any]:
    spec = BUILTIN[name]
    return {"name": spec.name, "description": spec.description, "parameters": dict(spec.parameters)}


def test_the_servers_own_tools_are_shown_as_the_server_shows_them() -> None:
    for tool in (CALCULATOR, SAVE_NOTE):
        assert tool["function"] == shown_of(tool["function"]["name"])
    offers = ITEM_TYPES["web_search_call"].call
    assert offers is not None and offers.offers is not None
    registry: Any = dict.fromkeys((SEARCH, PAGE))
    functions = offers.offers({"type": "web_search"}, registry, "tools[0]")
    keys = ("name", "description", "parameters")
    assert [{key: function[key] for key in keys} for function in functions] == [
        tool["function"] for tool in (WEB_SEARCH, OPEN_PAGE, FIND_IN_PAGE)
    ]
