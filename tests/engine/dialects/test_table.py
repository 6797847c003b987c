"""Rows are detected from templates, know where a prompt leaves the model, and read what templates print."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from engine.backends.scripted_tokens import scripted_tokenizer
from engine.dialects import table
from engine.dialects.spec import Dialect, History
from engine.dialects.table import DIALECTS, choose_dialect, detect_dialect, dialect_named
from engine.parsing.parser import Parser
from engine.structured.grammar import Grammars
from engine.tokenizer.chat_template import render_template, variables_of
from engine.types import (
    CallArgs,
    CallEnd,
    CallStart,
    Constraint,
    ReaderParams,
    Reasoning,
    RenderError,
    RenderInput,
    Shape,
    Text,
    ToolShape,
)

TINY = Path("engine/tiny/checkpoint/chat_template.jinja")
TEMPLATES = Path(__file__).parents[1] / "transcripts" / "templates"
ROWS = [row.name for row in DIALECTS]
TOOLS = (
    ToolShape("get_weather", '{"type": "object", "properties": {"city": {"type": "string"}}}'),
    ToolShape("search", '{"properties": {"query": {"type": "string"}, "limit": {"type": "integer"}}}'),
)


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


# -- which row ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROWS)
def test_detection(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert detect_dialect(template(name)).name == name
    for seed in range(5):  # whatever the order of the table
        shuffled = random.Random(seed).sample(DIALECTS, len(DIALECTS))
        monkeypatch.setattr(table, "DIALECTS", tuple(shuffled))
        assert detect_dialect(template(name)).name == name


def test_without_marks_everything_is_text() -> None:
    assert detect_dialect(None).name == "plain"
    assert detect_dialect("{% for m in messages %}{{ m.content }}{% endfor %}").name == "plain"


def test_the_shipped_template_is_hermes() -> None:
    assert detect_dialect(TINY.read_text(encoding="utf-8")).name == "hermes"


def test_a_template_s_own_reasoning_tags_win() -> None:
    tuned = detect_dialect(template("llama3-json") + "{{ '<think>' + thought + '</think>' }}")
    assert tuned.name == "llama3-json+think" and tuned.calls == dialect_named("llama3-json").calls
    assert tuned.reasoning == dialect_named("think").reasoning
    magistral = detect_dialect(template("mistral-list") + "{{ '<think>\n</think>' }}")
    assert magistral.reasoning == dialect_named("think").reasoning


def test_either_half_can_be_named() -> None:
    source = template("hermes")
    assert choose_dialect(source).name == "hermes"
    silent = choose_dialect(source, tools="none")
    assert silent.calls is None and silent.reasoning == dialect_named("hermes").reasoning
    plain = choose_dialect(source, reasoning="none")
    assert plain.calls == dialect_named("hermes").calls and plain.reasoning is None
    both = choose_dialect(source, tools="mistral", reasoning="granite")
    assert (both.calls, both.reasoning) == (
        dialect_named("mistral").calls,
        dialect_named("granite").reasoning,
    )
    assert choose_dialect(None, tools="none", reasoning="none").layouts == ()
    assert choose_dialect(template("gemma3"), tools="glm").name == "glm"
    for half in ({"tools": "klingon"}, {"reasoning": "klingon"}):
        with pytest.raises(KeyError, match="known: none, hermes"):
            choose_dialect(source, **half)


def test_names_are_unique() -> None:
    assert len(set(ROWS)) == len(ROWS)


# -- where a prompt leaves the model ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "state"),
    [
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "text"),
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n", "reasoning"),
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", "text"),
        ("<|im_start|>user\nwhat is <think> for?<|im_end|>\n<|im_start|>assistant\n", "text"),
        ("<|im_start|>assistant\n<think>\na</think>b<|im_end|>\n<|im_start|>assistant\n", "text"),
        ("<|im_start|>assistant\n<think>\nI was thinking", "reasoning"),
        ("<|im_start|>assistant\n<think>\nI was</think>\n\nThe answer", "text"),
        ("[INST] hi [/INST]<think>\n", "reasoning"),
    ],
)
def test_where_a_prompt_leaves_the_model(prompt: str, state: str) -> None:
    assert dialect_named("hermes").starts_in(prompt) == state
    assert dialect_named("plain").starts_in(prompt) == "text"


OPENED = {"minimax-m2", "deepseek-v3.2", "deepseek-v4", "glm-4.7"}
"""Rows whose templates open a thought in the prompt."""


@pytest.mark.parametrize("name", ROWS)
def test_where_a_template_leaves_the_model(name: str) -> None:
    row = dialect_named(name)
    asked = RenderInput([{"role": "user", "content": "What do <think> and [THINK] mean?"}])
    expected = "reasoning" if name in OPENED else "text"
    assert row.starts_in(render_template(template(name), asked, {}, row.history)) == expected


def test_templates_that_open_a_thought_when_asked() -> None:
    row = dialect_named("deepseek-v3.1")
    asked = RenderInput([{"role": "user", "content": "Hi"}], template_kwargs={"thinking": True})
    assert row.starts_in(render_template(template(row.name), asked, {}, row.history)) == "reasoning"


# -- what templates print is read back ----------------------------------------------------------------------

USER = {"role": "user", "content": "How is the weather?"}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"call_{name}", "type": "function", "function": function}


CALLS = [call("get_weather", city="Zürich"), call("search", query='a "b"', limit=3)]
TURNS: dict[str, dict[str, Any]] = {
    "text": {"content": "Fine <b>."},
    "call": {"content": "", "tool_calls": CALLS[:1]},
    "calls": {"content": "", "tool_calls": CALLS},
    "text, calls": {"content": "I look.", "tool_calls": CALLS},
    "thought, text": {"reasoning_content": "Hm.", "content": "Fine."},
    "thought, call": {"reasoning_content": "Hm.", "content": "", "tool_calls": CALLS[:1]},
}
THOUGHTS = {"thought, text", "thought, call"}
MISSED: dict[str, set[str]] = {
    "qwen3-coder": THOUGHTS,
    "llama3-json": {"calls", "text, calls"},
    "llama4-pythonic": {"calls", "text, calls"},
    "mistral-list": {"text", "text, calls", *THOUGHTS},
    "deepseek": THOUGHTS,
    "deepseek-v3.1": THOUGHTS,
    "harmony": {"thought, text"},
    "gemma4": {"calls", "text, calls", "thought, text"},  # arguments sorted, text behind calls
    "glm-4.7": {"text", "call", "calls", "text, calls"},  # the prompt has opened a thought
    "granite": THOUGHTS,
    "phi4": THOUGHTS,
    "minimax-m1": THOUGHTS,
    "minimax-m2": {"text", "call", "calls", "text, calls"},  # the prompt has opened a thought
    "nemotron": THOUGHTS,
    "command-r": {"text, calls", "thought, text"},
    "lfm2": THOUGHTS,
}
"""Turns that a family's template does not print as its model said them, so that the next prompt cannot begin
with their tokens: it leaves thoughts out, or text beside calls, or quotes every value. 121 of 159 hold."""


def said(row: Dialect, turn: dict[str, Any]) -> str | None:
    """What the template prints of a turn behind the prompt for it; None where it refuses or goes on
    otherwise."""
    source, message = template(row.name), {"role": "assistant", **turn}
    prompt = render_template(source, RenderInput([USER]), {}, row.history)
    try:
        asked = RenderInput([USER, message], add_generation_prompt=False)
        history = render_template(source, asked, {}, row.history)
    except RenderError:
        return None
    return history.removeprefix(prompt) if history.startswith(prompt) else None


def heard(row: Dialect, text: str, starts_in: Any) -> dict[str, Any]:
    """The message that a turn is read as."""
    parser = Parser(row, calls=True, tools=TOOLS, starts_in=starts_in)
    parser.finish(text)
    message: dict[str, Any] = {"content": ""}
    for delta in parser.take()[0]:
        match delta:
            case Reasoning():
                message["reasoning_content"] = delta.text
            case Text():
                message["content"] += delta.text
            case CallStart():
                message.setdefault("tool_calls", []).append(call(delta.name))
            case CallArgs():
                message["tool_calls"][-1]["function"]["arguments"] = delta.text
    return message


ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eot|>",
    "</s>",
    "<｜end▁of▁sentence｜>",
    "<end_of_turn>",
    "<|end_of_text|>",
    "<end_of_sentence>",
    "[e~[",
    "<|end|>",
    "<|call|>",
    "<seed:eos>",
    "\n<SPECIAL_12>",
    "<|END_OF_TURN_TOKEN|>",
    "<|eos|>",
    "<turn|>",
)


def keeps(row: Dialect, turn: dict[str, Any]) -> bool:
    """Whether a turn that is said as the template prints it is read as it was, so printed so again."""
    printed = said(row, turn)
    if printed is None:
        return False
    text = printed.removesuffix("\n")
    text = next((text.removesuffix(end) for end in ENDS if text.endswith(end)), text)
    prompt = render_template(template(row.name), RenderInput([USER]), {}, row.history)
    return heard(row, text, row.starts_in(prompt)) == turn


@pytest.mark.parametrize("name", ROWS)
def test_the_next_prompt_begins_with_this_turn(name: str) -> None:
    row = dialect_named(name)
    turns = {what: turn for what, turn in TURNS.items() if row.layouts or "tool_calls" not in turn}
    if row.reasoning is None:
        turns = {what: turn for what, turn in turns.items() if what not in THOUGHTS}
    assert {what for what, turn in turns.items() if not keeps(row, turn)} == MISSED.get(name, set())


# -- what a grammar can enforce -----------------------------------------------------------------------------

OTHERWISE = {"harmony", "mistral-list", "kimi-k2", "command-r"}
"""Rows whose templates print a call otherwise than its model writes it: the recipient first, ids, numbers."""
SINGLE = {"llama3-json"}
"""Rows whose templates refuse two calls of one message."""
FORCED = [row.name for row in DIALECTS if row.calls is not None]
ARGUMENTS = {
    "object": '{"city": "Zürich"}',
    "named": '{"city": "Zürich"}',
    "python": 'city="Zürich"',
    "qwen3-coder": "<parameter=city>\nZürich\n</parameter>\n",
    "glm": "<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n",
    "minimax-m2": '<parameter name="city">Zürich</parameter>\n',
    "seed-oss": "<parameter=city>Zürich</parameter>\n",
    "deepseek-v3.2": '<｜DSML｜parameter name="city" string="true">Zürich</｜DSML｜parameter>\n',
    "deepseek-v4": '<｜DSML｜parameter name="city" string="true">Zürich</｜DSML｜parameter>\n',
    "glm-4.7": "<arg_key>city</arg_key><arg_value>Zürich</arg_value>",
    "keyed": 'city:<|"|>Zürich<|"|>',
}


def test_every_row_with_calls_forces_them() -> None:
    assert [row.name for row in DIALECTS if row.layouts] == FORCED


@pytest.mark.parametrize("num_calls", [1, 2])
@pytest.mark.parametrize("name", FORCED)
def test_a_forced_call_is_written_and_read_in_the_row_s_layout(name: str, num_calls: int) -> None:
    row, tokenizer = dialect_named(name), scripted_tokenizer()
    marks = row.calls
    assert marks is not None
    arguments = ARGUMENTS.get(name) or ARGUMENTS[marks.kind]
    quoted = '"get_weather"' if marks.quoted else "get_weather"
    one = f"{marks.before_name}{quoted}{marks.before_arguments}{arguments}{marks.end}"
    opening, close = ("", "") if marks.bare else (marks.open, marks.close)
    if marks.many:
        text = opening + marks.front + marks.separator.join([one] * num_calls) + marks.back + close
    else:
        text = marks.separator.join([opening + one + close] * num_calls)

    constraint = Constraint(TOOLS[:1], num_calls)
    matcher = Grammars(tokenizer, row).compile(constraint, ReaderParams(calls=True, tools=TOOLS)).matcher(999)
    for token_id in tokenizer.encode(text):
        matcher.advance(token_id)
    assert matcher.stopped

    if name not in OTHERWISE and (num_calls == 1 or name not in SINGLE):
        message = {"role": "assistant", "content": "", "tool_calls": CALLS[:1] * num_calls}
        asked = RenderInput([USER, message], add_generation_prompt=False)
        assert text in render_template(template(name), asked, {}, row.history)

    parser = Parser(row, calls=True, tools=TOOLS)
    parser.finish(text)
    calls = [CallStart("get_weather"), CallArgs('{"city": "Zürich"}'), CallEnd()] * num_calls
    assert parser.take()[0] == calls


# -- what templates are told --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "effort", "told"),
    [
        ("{{ reasoning_effort }}", "minimal", "low"),
        ("{{ reasoning_effort }}", "high", "high"),
        ("{{ reasoning_effort }}", "max", "high"),
        ("{{ enable_thinking }}", "none", "False"),
        ("{{ enable_thinking }}", "low", "True"),
        ("{% if not thinking is defined %}{% set thinking = 0 %}{% endif %}{{ thinking }}", "high", "True"),
        ("{{ thinking_budget }}", "low", "1024"),
        ("{{ thinking_budget }}", "max", "-1"),
        ("{{ messages[0].thinking }}", "high", ""),
        ("{{ reasoning_effort }}", None, ""),
    ],
)
def test_a_template_is_told_the_effort_that_it_asks_for(source: str, effort: str | None, told: str) -> None:
    asked = RenderInput([USER], effort=effort)
    assert render_template(source, asked, {}) == told


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (Shape("json", '{"type": "array"}'), 'json_schema {"type": "array"} {"type": "array"}'),
        (Shape("json", '{"type": "object"}'), "json_object  null"),
        (Shape("regex", "a+"), "  null"),
        (None, "  null"),
    ],
)
def test_a_template_is_told_the_form_of_the_answer(answer: Shape | None, told: str) -> None:
    source = (
        "{{ response_format.type }} {% if response_format.json_schema %}{{ response_format.json_schema.schema"
        " | tojson }}{% endif %} {{ response_schema | default(none) | tojson }}"
    )
    source = "{% set response_format = response_format | default({}) %}" + source
    assert render_template(source, RenderInput([USER], answer=answer), {}) == told
    mine = RenderInput([USER], answer=answer, template_kwargs={"response_format": {"type": "mine"}})
    assert render_template("{{ response_format.type }}", mine, {}) == "mine"


def test_what_a_client_tells_a_template_wins() -> None:
    asked = RenderInput([USER], effort="high", template_kwargs={"enable_thinking": False})
    assert render_template("{{ enable_thinking }}", asked, {}) == "False"
    assert variables_of("{% if %}") == frozenset()


def test_ids_of_calls_take_the_family_s_form() -> None:
    source = (
        "{% for m in messages %}{{ m.tool_calls[0].id if m.tool_calls else m.tool_call_id }} {% endfor %}"
    )
    messages = []
    for turn in ("a", "b"):
        made = {"id": f"call_{turn}", "type": "function", "function": {"name": turn, "arguments": "{}"}}
        messages += [
            {"role": "assistant", "tool_calls": [made]},
            {"role": "tool", "tool_call_id": f"call_{turn}", "content": "1"},
        ]
    kimi = render_template(source, RenderInput(messages), {}, dialect_named("kimi-k2").history)
    assert kimi.split() == ["functions.a:0", "functions.a:0", "functions.b:1", "functions.b:1"]
    mistral = render_template(source, RenderInput(messages), {}, dialect_named("mistral").history).split()
    assert mistral[0] == mistral[1] != mistral[2] == mistral[3]
    assert all(len(each) == 9 and each.isalnum() for each in mistral)
    assert render_template(source, RenderInput(messages), {}).split()[0] == "call_a"


def test_a_template_that_prints_one_call_gets_them_one_by_one() -> None:
    messages: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "reasoning_content": "Hm.", "content": "I look.", "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "call_get_weather", "content": "sun"},
        {"role": "tool", "tool_call_id": "call_search", "content": "nothing"},
    ]
    shown = render_template(template("harmony"), RenderInput(messages), {}, History(single=True))
    order = [
        "I look.",
        "Hm.",
        "functions.get_weather<|channel|>",
        '"sun"',
        "functions.search<|channel|>",
        '"nothing"',
    ]
    places = [shown.find(each) for each in order]
    assert places == sorted(places) and -1 not in places
    assert shown.count("<|call|>") == 2 and shown.count("Hm.") == 1
