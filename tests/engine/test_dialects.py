"""Rows are detected from templates, and know where a prompt leaves the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.dialects import DIALECTS, detect_dialect, dialect_named

TINY = Path("engine/tiny/checkpoint/chat_template.jinja")

QWEN = """{{- '<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}"""
QWEN_CODER = "{{- '<tool_call>\\n<function=' + tool_call.name + '>\\n' }}{% if tool_call.arguments %}"
LLAMA = """{{- '<|start_header_id|>' }}{{- '{"name": "' + name + '", ' }}{{- '"parameters": ' }}"""


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, "plain"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "plain"),
        (QWEN, "hermes"),
        (LLAMA, "llama3-json"),
        ("{{ '<think>' + m.reasoning_content + '</think>' }}", "think"),
        (QWEN_CODER, "plain"),  # XML calls are not JSON: better read as text than wrongly
    ],
)
def test_detection(template: str | None, name: str) -> None:
    assert detect_dialect(template).name == name


def test_the_shipped_template_is_hermes() -> None:
    assert detect_dialect(TINY.read_text(encoding="utf-8")).name == "hermes"


def test_names_are_unique_and_known() -> None:
    assert len({row.name for row in DIALECTS}) == len(DIALECTS)
    with pytest.raises(KeyError, match="known: hermes"):
        dialect_named("klingon")


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
