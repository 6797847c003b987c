"""What templates leave out, or refuse, is said in the words that they have."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from engine.dialects.spec import History
from engine.dialects.table import detect_dialect, dialect_named
from engine.parsing.parser import Parser
from engine.tokenizer.chat_template import render_template
from engine.tokenizer.template_fallbacks import MAX_BEFORE, holds_system, in_text
from engine.types import CallArgs, CallEnd, CallStart, RenderError, RenderInput

TEMPLATES = Path(__file__).parents[1] / "transcripts" / "templates"
USER = {"role": "user", "content": "How is the weather?"}
CALLS = [
    {
        "id": f"call_{city}",
        "type": "function",
        "function": {"name": "get_weather", "arguments": json.dumps({"city": city})},
    }
    for city in ("Oslo", "Rome")
]
ASKED = {"role": "assistant", "content": "", "tool_calls": CALLS}
OUTPUTS = [
    {"role": "tool", "tool_call_id": "call_Oslo", "content": "snow"},
    {"role": "tool", "tool_call_id": "call_Rome", "content": "sun"},
]
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}

GEMMA = """\
{%- set first = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}
{%- for message in (messages[1:] if first else messages) %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate!') }}{% endif %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}
    {{- first if loop.first }}{{ message.content | trim }}<end_of_turn>
{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
PHI = """\
{%- for message in messages %}
    {%- if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}
        {{- '<|system|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}
    {%- else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
EARLY = """\
{%- for message in messages %}
    {%- if message['role'] == 'assistant' and message['content'] is none %}
        {%- for tool in message['tool_calls'] %}
            {{- '<｜tool▁calls▁begin｜>```json' + tool['function']['arguments'] }}
        {%- endfor %}
    {%- endif %}
    {%- if message['role'] == 'assistant' and message['content'] is not none %}
        {{- '[said]' + message['content'] }}
    {%- endif %}
{%- endfor %}"""


def rendered(source: str, *messages: dict[str, Any], tools: tuple[dict[str, Any], ...] = ()) -> str:
    return render_template(source, RenderInput(messages, tools), {}, detect_dialect(source).history)


def test_calls_and_outputs_stand_in_the_text_of_a_template_that_knows_none() -> None:
    prompt = rendered(GEMMA, USER, {**ASKED, "content": "I look.\n"}, *OUTPUTS)
    assert prompt == (
        "<start_of_turn>user\nHow is the weather?<end_of_turn>\n"
        '<start_of_turn>model\nI look.\n[get_weather(city="Oslo"), get_weather(city="Rome")]<end_of_turn>\n'
        "<start_of_turn>user\nsnow\n\nsun<end_of_turn>\n<start_of_turn>model\n"
    )


def test_tools_are_described_to_a_model_whose_template_never_looks_at_them() -> None:
    prompt = rendered(GEMMA, {"role": "system", "content": "Be brief."}, USER, tools=(TOOL,))
    assert prompt.startswith("<start_of_turn>user\nBe brief.\n\nYou may call functions.")
    assert '[NAME(PARAMETER="VALUE")]' in prompt and json.dumps(TOOL["function"]) in prompt
    assert "You may call" not in rendered(GEMMA, USER)


def test_tools_are_given_to_a_template_that_looks_for_them_in_the_system_message() -> None:
    prompt = rendered(PHI, USER, tools=(TOOL,))
    assert prompt.startswith(f"<|system|><|tool|>{json.dumps([TOOL['function']])}<|/tool|><|end|><|user|>How")
    assert '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}, ' in rendered(
        PHI, USER, ASKED
    )


def test_calls_are_not_hidden_by_the_text_beside_them() -> None:
    assert rendered(EARLY, USER, ASKED).count("```json") == 2
    both = rendered(EARLY, USER, {**ASKED, "content": "I look."})
    assert both.startswith("[said]I look.") and both.count("```json") == 2


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("*.jinja")), ids=lambda path: path.stem)
@pytest.mark.parametrize("arguments", ['{"city" "Oslo"}', "[1]", "null", "", "{}"])
def test_no_template_refuses_arguments_that_are_no_object(path: Path, arguments: str) -> None:
    """A model wrote them, and its client sends them back with what became of the call."""
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    asked = {"role": "assistant", "content": "", "tool_calls": [call]}
    answer = {"role": "tool", "tool_call_id": "c1", "name": "get_weather", "content": "No JSON."}
    assert "No JSON." in rendered(path.read_text("utf-8"), USER, asked, answer)


THINKS = ("glm", "harmony", "hermes", "hunyuan", "internlm", "kimi-k2", "minimax-m2", "mistral", "seed-oss")


@pytest.mark.parametrize("name", THINKS)
@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("num_calls", [1, 2])
def test_a_thought_beside_calls_is_shown_once(name: str, field: str, num_calls: int) -> None:
    asked = {**ASKED, "tool_calls": CALLS[:num_calls], field: "They ask for snow."}
    prompt = rendered((TEMPLATES / f"{name}.jinja").read_text("utf-8"), USER, asked, *OUTPUTS[:num_calls])
    assert prompt.count("They ask for snow.") == 1
    assert prompt.index("How is the weather?") < prompt.index("They ask for snow.") < prompt.index("Oslo")


@pytest.mark.parametrize(
    "name",
    ["hermes", "llama4-pythonic", "mistral-list", "deepseek", "gemma3", "granite", "phi4", "kimi-k2", "lfm2"],
)
def test_what_is_said_in_text_is_read_back(name: str) -> None:
    row = dialect_named(name)
    assert row.calls is not None
    given = [{"name": "get_weather", "arguments": {"city": "Zürich", "days": [1, None]}}, {"name": "now"}]
    parser = Parser(row, calls=True)
    parser.finish(in_text(given, row.calls))
    assert parser.take()[0] == [
        *(CallStart("get_weather"), CallArgs('{"city": "Zürich", "days": [1, null]}'), CallEnd()),
        *(CallStart("now"), CallArgs("{}"), CallEnd()),
    ]


# -- roles ---------------------------------------------------------------------------------------------------

SAY = "{{ m.role[0] }}:{{ m.content }} "
NO = "{{ raise_exception('no') }}"
SAY_ALL = f"{{% for m in messages %}}{SAY}{{% endfor %}}"
ALTERNATE = (
    f"{{% for m in messages %}}{{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}}{NO}{{% endif %}}"
    f"{SAY}{{% endfor %}}"
)
SYSTEM_FIRST = (
    f"{{% for m in messages %}}{{% if m.role == 'system' and not loop.first %}}{NO}{{% endif %}}"
    f"{SAY}{{% endfor %}}"
)
FIRST_ONLY = (
    f"{{% for m in messages %}}{{% if m.role != 'system' or loop.first %}}{SAY}{{% endif %}}{{% endfor %}}"
)
MUTE = f"{{% for m in messages if m.role != 'system' %}}{SAY}{{% endfor %}}"


@pytest.mark.parametrize(
    ("source", "roles", "prompt"),
    [
        (ALTERNATE, "uau", "u:0 a:1 u:2 "),
        (ALTERNATE, "uuaau", "u:0\n\n1 a:2\n\n3 u:4 "),
        (ALTERNATE, "suau", "u:0\n\n1 a:2 u:3 "),
        (ALTERNATE, "uatau", "u:0 a:1 u:2 a:3 u:4 "),
        (SYSTEM_FIRST, "ssu", "s:0\n\n1 u:2 "),
        (SYSTEM_FIRST, "suasu", "s:0 u:1 a:2 u:3\n\n4 "),
        (FIRST_ONLY, "su", "s:0 u:1 "),
        (FIRST_ONLY, "ssu", "s:0\n\n1 u:2 "),
        (FIRST_ONLY, "uasu", "u:0 a:1 u:2\n\n3 "),
        (MUTE, "su", "u:1 "),
    ],
)
def test_any_order_of_roles_is_taken(source: str, roles: str, prompt: str) -> None:
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    messages = [{"role": names[role], "content": str(index)} for index, role in enumerate(roles)]
    assert render_template(source, RenderInput(messages), {}, History()) == prompt


def test_what_no_order_helps_is_refused_in_the_template_s_own_words() -> None:
    source = "{{ raise_exception('only ' ~ messages | length ~ ' messages') }}"
    with pytest.raises(RenderError, match=r"^only 2 messages$"):
        render_template(source, RenderInput([USER, USER]), {}, History())


NUMBERS = [f"{number:03}" for number in range(MAX_BEFORE + 2)]


@pytest.mark.parametrize(
    ("prompt", "texts", "held"),
    [
        ("s:a s:ab s:b s:a s:ba", ["a", "ab", "b", "a", " a ", "", "ba"], True),
        ("s:ab", ["ab", "a", "b"], True),
        ("s:ab", ["ab", "ba"], False),
        (" ".join(reversed(NUMBERS[1:])), NUMBERS[1:], True),
        (" ".join(reversed(NUMBERS)), NUMBERS, False),
    ],
)
def test_what_the_system_said_is_found_in_a_prompt(prompt: str, texts: list[str], held: bool) -> None:
    """In another order only as far as a few texts stand in front of earlier ones."""
    messages = [{"role": "system", "content": text} for text in texts]
    assert holds_system(prompt, [*messages, {"role": "user", "content": "not there"}]) is held


@pytest.mark.parametrize("source", [SAY_ALL, ALTERNATE, SYSTEM_FIRST, FIRST_ONLY])
def test_many_messages_of_the_system_take_no_longer_than_one_as_long(source: str) -> None:
    said = [{"role": "system", "content": f"{number} {'x' * 3000}"} for number in range(4000)]
    began = time.thread_time()  # of the processor: other threads do not count
    prompt = render_template(source, RenderInput([*said, USER]), {}, History())
    assert time.thread_time() - began < 2.0
    assert f"3999 {'x' * 3000}" in prompt


def test_contents_with_images_are_joined_part_by_part() -> None:
    def said(*contents: Any) -> str:
        messages = [{"role": "user", "content": content} for content in contents]
        return render_template(ALTERNATE, RenderInput(messages), {}, History())

    image = {"type": "image"}
    text = {"type": "text", "text": "c"}
    gap = {"type": "text", "text": "\n\n"}
    parts = [{"type": "text", "text": "a"}, gap, image, image, gap, text]
    assert said("a", [image], [image], "c") == f"u:{parts} "
    assert said("a", "", None, "b") == "u:a\n\nb "
