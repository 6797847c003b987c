"""Prompts that grow are those of rendering everything, for every template; and local templates are found."""

from __future__ import annotations

import json
import pickle
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from engine.backends.scripted_tokens import TEMPLATE, scripted_tokenizer
from engine.dialects.table import DIALECTS, detect_dialect
from engine.tokenizer import Tokenizer
from engine.tokenizer.chat_template import template_environment
from engine.tokenizer.growing_prompts import GrowingPrompts
from engine.tokenizer.local_template import local_template
from engine.types import Prompt, PromptTooLong, RenderError, RenderInput, Shape

TEMPLATES = Path(__file__).parents[1] / "transcripts" / "templates"
SOURCES = {row.name: TEMPLATES / f"{row.name}.jinja" for row in DIALECTS} | {"antiphon-tiny": TEMPLATE}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
WORDS = (
    "one",
    "zwei",
    "<think>",
    "</think>",
    "<|im_start|>user\n",
    " ",
    "\n\n",
    "[INST]",
    "é",
    "{{ x }}",
    "",
)


def tokenizer_of(source: str) -> Tokenizer:
    """A tokenizer with a token for each mark that a template prints, as its model's has."""
    tokenizer = scripted_tokenizer(source)
    marks = sorted(set(re.findall(r"<[|a-z_/｜▁]+>|\[/?[A-Z_]+\]", source)))
    backend = tokenizer._backend
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return Tokenizer(
        backend,
        templates={"default": source},
        special_tokens={"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"},
        eos_token_ids=tokenizer.eos_token_ids,
    )


def said(drawn: random.Random) -> str:
    return "".join(drawn.choices(WORDS, k=drawn.randrange(1, 6)))


def turn(drawn: random.Random, number: int, *, calls: bool, systems: bool) -> list[dict[str, Any]]:
    """What one turn of a conversation adds."""
    found: list[dict[str, Any]] = [{"role": "user", "content": said(drawn)}]
    if systems and drawn.random() < 0.2:
        found.insert(0, {"role": "system", "content": said(drawn)})
    if calls and drawn.random() < 0.4:
        call_id = f"call_{number}"
        function = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
        call = {"id": call_id, "type": "function", "function": function}
        found.append({"role": "assistant", "content": drawn.choice(["", said(drawn)]), "tool_calls": [call]})
        answer = {"role": "tool", "tool_call_id": call_id, "name": "get_weather", "content": said(drawn)}
        found.append(answer)
    answer = {"role": "assistant", "content": said(drawn)}
    if drawn.random() < 0.3:
        answer["reasoning_content"] = said(drawn)
    return [*found, answer]


def outcome(prompts: GrowingPrompts, inp: RenderInput) -> Prompt | str:
    try:
        return prompts.prompt(inp)
    except RenderError as error:
        return str(error)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SOURCES)
def test_prompts_that_grow_are_those_of_rendering_everything(name: str) -> None:
    source = SOURCES[name].read_text(encoding="utf-8")
    tokenizer, dialect = tokenizer_of(source), detect_dialect(source)
    for seed in range(4):
        drawn = random.Random(seed)
        prompts = GrowingPrompts(tokenizer, dialect)
        calls, systems = bool(seed % 2), bool(seed % 3)
        settings: dict[str, Any] = {"tools": (WEATHER,)} if calls else {}
        settings |= drawn.choice([{}, {"effort": "none"}, {"effort": "high"}])
        messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}] if systems else []
        for number in range(11):
            new = turn(drawn, number, calls=calls, systems=systems)
            asked = [*messages, *new[:-1]]
            for now in (1e9, 1e9 + 86400 * number):
                inp = RenderInput([dict(each) for each in asked], now=now, scope="anna", **settings)
                whole = outcome(GrowingPrompts(tokenizer, dialect), inp)
                assert outcome(prompts, inp) == whole
                alone = RenderInput(asked, now=now, **settings)  # without a scope nothing is remembered
                assert outcome(prompts, alone) == whole
            if drawn.random() < 0.1:  # a turn that is asked again, or in another way
                new[0] = {"role": "user", "content": said(drawn)}
            messages += new


@pytest.mark.parametrize("name", ["antiphon-tiny", "llama3-json", "granite"])
def test_only_what_is_new_is_rendered(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = SOURCES[name].read_text(encoding="utf-8")
    tokenizer, dialect = tokenizer_of(source), detect_dialect(source)
    prompts = GrowingPrompts(tokenizer, dialect)
    seen: list[int] = []
    segments = prompts._segments

    def counted(inp: RenderInput, messages: Any) -> Any:
        seen.append(len(messages))
        return segments(inp, messages)

    monkeypatch.setattr(prompts, "_segments", counted)
    monkeypatch.setattr(tokenizer, "render", None)
    messages: list[dict[str, Any]] = []
    for number in range(30):
        messages += [{"role": "user", "content": f"u{number}"}, {"role": "assistant", "content": "a"}]
        if number >= 4:
            prompts.prompt(RenderInput(list(messages[:-1]), scope="anna"))
    assert seen == [9, *[5] * 25]


def test_others_never_share_a_past_and_memory_is_bounded() -> None:
    tokenizer = scripted_tokenizer()
    dialect = detect_dialect(tokenizer.chat_template)
    prompts = GrowingPrompts(tokenizer, dialect, max_bytes=400_000)
    messages = [{"role": "user", "content": "x" * 20} for _ in range(20)]
    for scope in map(str, range(40)):
        prompts.prompt(RenderInput(messages, scope=scope))
        assert {past.asked.scope for past in prompts._pasts.values()} >= {scope}
        assert sum(past.num_bytes for past in prompts._pasts.values()) == prompts._num_bytes <= 400_000
    assert len(prompts._pasts) < 40


HIDDEN: dict[str, Callable[[str], dict[str, Any]]] = {
    "thoughts": lambda text: {"messages": [{"role": "assistant", "content": "a", "reasoning_content": text}]},
    "fields of messages": lambda text: {
        "messages": [{"role": "user", "content": "q", "note": {"a": [text]}}]
    },
    "tools": lambda text: {"tools": [{"type": "function", "function": {"name": "f", "x-note": text}}]},
    "variables": lambda text: {"template_kwargs": {"unread": text}},
    "an answer's shape": lambda text: {"answer": Shape("json", json.dumps({"description": text}))},
}
"""What a template does not print, and a prompt is told from others by."""


@pytest.mark.parametrize("hidden", HIDDEN)
def test_what_no_template_prints_is_counted_too(hidden: str) -> None:
    source = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    tokenizer = tokenizer_of(source)
    prompts = GrowingPrompts(tokenizer, detect_dialect(source), max_bytes=4_000_000)
    turn = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    for number in range(30):
        given = HIDDEN[hidden](f"{number} " + "x" * 300_000)
        messages = [*given.pop("messages", []), *turn * 4, {"role": "user", "content": f"last {number}"}]
        prompts.prompt(RenderInput(messages, scope="owner", **given))
    assert 0 < len(prompts._pasts) <= 4_000_000 / 300_000
    assert len(pickle.dumps(list(prompts._pasts.items()))) < prompts._num_bytes


def test_a_conversation_that_rests_is_forgotten_when_another_goes_on() -> None:
    tokenizer, now = scripted_tokenizer(), [0.0]
    prompts = GrowingPrompts(tokenizer, detect_dialect(tokenizer.chat_template), clock=lambda: now[0])
    messages = [{"role": "user", "content": "x" * 20} for _ in range(20)]
    for scope in ("resting", "going on"):
        prompts.prompt(RenderInput(messages, scope=scope))
    for now[0] in (500.0, 1000.0):
        messages.append({"role": "user", "content": "more"})
        prompts.prompt(RenderInput(messages, scope="going on"))
    (past,) = prompts._pasts.values()
    assert past.asked.scope == "going on"
    assert past.num_bytes == prompts._num_bytes
    assert len(prompts._used_at) == 1


def test_a_text_that_is_too_long_is_refused_before_it_is_encoded() -> None:
    tokenizer = scripted_tokenizer()
    prompts = GrowingPrompts(tokenizer, detect_dialect(tokenizer.chat_template))
    messages = [{"role": "user", "content": "x" * 20} for _ in range(20)]

    def check(num_chars: int) -> None:
        if num_chars > 2000:
            raise PromptTooLong(num_chars, 2000)

    prompts.prompt(RenderInput(messages, scope="anna"), check)
    with pytest.raises(PromptTooLong):
        prompts.prompt(RenderInput([*messages, {"role": "user", "content": "y" * 2000}], scope="anna"), check)


def test_many_messages_of_the_system_are_refused_as_soon_as_one_as_long() -> None:
    tokenizer = scripted_tokenizer()
    prompts = GrowingPrompts(tokenizer, detect_dialect(tokenizer.chat_template))
    messages = [{"role": "system", "content": f"{number} {'x' * 3000}"} for number in range(4000)]

    def check(num_chars: int) -> None:
        raise PromptTooLong(num_chars, 2000)

    began = time.thread_time()  # of the processor: other threads do not count
    with pytest.raises(PromptTooLong):
        prompts.prompt(RenderInput([*messages, {"role": "user", "content": "hi"}], scope="anna"), check)
    assert time.thread_time() - began < 2.0


LOCAL = {
    "{% for m in messages %}{{ m.content }}{% endfor %}": True,
    "{% if messages and messages[0].role %}x{% endif %}{% for m in messages %}{{ m }}{% endfor %}": True,
    "{% for m in messages %}{{ messages[loop.index0 - 1].role }}{{ loop.last }}{% endfor %}": True,
    "{% for m in messages %}{% if loop.index0 == 0 %}x{% endif %}{% endfor %}{{ messages[-1].role }}": True,
    "{% for m in messages %}{% for c in m.calls %}{{ loop.index }}{% endfor %}{% endfor %}": True,
    "{% set n = namespace(x=0) %}{% set n.x = 1 %}{% for m in messages %}{{ n.x }}{% endfor %}": True,
    "{% for m in messages %}{{ loop.index }}{% endfor %}": False,
    "{% for m in messages %}{{ loop.length }}{% endfor %}": False,
    "{% for m in messages %}{{ loop.changed(m.role) }}{% endfor %}": False,
    "{% for m in messages %}{{ messages | length }}{% endfor %}": False,
    "{% for m in messages %}{{ messages[-1].role }}{% endfor %}": False,
    "{% set last = messages[-1] %}{% for m in messages %}{{ last.role }}{% endfor %}": False,
    "{% set all = messages %}{% for m in all %}{{ m }}{% endfor %}": False,
    "{% set all = messages or [] %}{% for m in messages %}{{ all }}{% endfor %}": False,
    "{% for m in messages[1:] %}{{ m }}{% endfor %}": False,
    "{% for m in messages if m.role %}{{ m }}{% endfor %}": False,
    "{% for m in messages %}{% set outer = loop %}{{ outer.index }}{% endfor %}": False,
    "{% for m in messages %}{% if m.role %}{% break %}{% endif %}{% endfor %}": False,
    "{% set n = namespace(x=0) %}{% for m in messages %}{% set n.x = n.x + 1 %}{% endfor %}": False,
    "{% set n = namespace(x=0) %}{% macro f() %}{% set n.x = 1 %}{% endmacro %}{% for m in messages %}"
    "{{ n.x }}{{ f() }}{% endfor %}": False,
    "{% set s = joiner() %}{% for m in messages %}{{ s() }}{% endfor %}": False,
    "{% for m in messages %}{{ strftime_now('%H') }}{% endfor %}": False,
    "{% for m in messages %}x{% endfor %}{% for m in messages %}y{% endfor %}": False,
    "{% if true %}{% for m in messages %}x{% endfor %}{% endif %}": False,
    "{% for m in messages %}{{ m": False,
}


@pytest.mark.parametrize("source", LOCAL)
def test_which_templates_print_each_message_by_itself(source: str) -> None:
    assert (local_template(source, template_environment()) is not None) is LOCAL[source]


def test_most_families_templates_do() -> None:
    found = {
        name
        for name, path in SOURCES.items()
        if local_template(path.read_text(encoding="utf-8"), template_environment()) is not None
    }
    assert "antiphon-tiny" in found and len(found) >= 20
