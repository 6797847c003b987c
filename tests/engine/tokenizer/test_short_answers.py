"""A thought before a few words is had by asking for it."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from engine import Constraint, LocalEngine, RenderInput, Shape
from engine.dialects.table import dialect_named
from engine.tiny import CHECKPOINT
from engine.tokenizer.chat_template import render_template
from engine.tokenizer.grammar_lengths import MAX_SOURCE
from engine.tokenizer.growing_prompts import start_of
from engine.tokenizer.short_answers import is_brief
from engine.types import GenerateRequest, ReaderParams, SamplingParams

YES_OR_NO = Shape("choice", '["yes", "no"]')
ASKED = [{"role": "user", "content": "Is the sky blue?"}]
TEMPLATE = (CHECKPOINT / "chat_template.jinja").read_text()


@pytest.mark.parametrize(
    ("shape", "brief"),
    [
        (YES_OR_NO, True),
        (Shape("choice", json.dumps(["word " * 100])), True),
        (Shape("regex", "yes|no"), True),
        (Shape("regex", r"[A-C]{1,2}-\d{4}"), True),
        (Shape("regex", r"\d{4,}"), False),
        (Shape("regex", "a+"), False),
        (Shape("regex", r"\+[*+]\*"), True),
        (Shape("regex", "((ab){5}c){20}"), False),
        (Shape("regex", r"(\p{Greek}{9}){10}"), False),
        (Shape("regex", r"\p{Greek}{9}"), True),
        (Shape("regex", r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}"), True),
        (Shape("regex", r"\d{1,3}(\.\d{1,3}){3}"), True),
        (Shape("regex", "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"), True),
        (Shape("regex", "^[a-z]{64}$"), True),
        (Shape("regex", "[a-z]{65}"), False),
        (Shape("regex", "(a{40}|b{60}c{4})?"), True),
        (Shape("regex", "(a{40}|b{60}c{5})?"), False),
        (Shape("regex", r"(?i:\x{41}\u0042){32}?(?P<rest>)*"), True),
        (Shape("regex", "a{8}{9}"), False),
        (Shape("regex", "(a*){0}b"), True),
        (Shape("regex", "(a+)?"), False),
        (Shape("regex", "(a"), False),
        (Shape("regex", "a{2,3}[b-d{]"), True),
        (Shape("regex", "(?x)a # [ and more\nb"), False),
        (Shape("regex", r"a\p{Greek"), False),
        (Shape("regex", "[" + "a" * 5000 + "]"), False),
        (Shape("json", '{"enum": ["a", "b"]}'), True),
        (Shape("json", '{"type": "boolean"}'), True),
        (Shape("json", '{"type": "object"}'), False),
        (Shape("json", '{"type": "string"}'), False),
        (Shape("json", "true"), False),
        (Shape("lark", 'start: "a"'), True),
        (
            Shape("lark", 'start: color ("," color)? // two\ncolor: "red"\n  | NUM\nNUM: /[0-9]{2}/'),
            True,
        ),
        (Shape("lark", 'root ::= "yes" | no\nno ::= "no"  # GBNF'), True),
        (Shape("lark", "start: " + " | ".join(f'"word {n}"' for n in range(40))), True),
        (Shape("lark", 'start: "a"+'), False),
        (Shape("lark", 'start: "a" start | "b"'), False),
        (Shape("lark", 'start: x x x x\nx: y y y y\ny: z z z z\nz: "ab"'), False),
        (Shape("lark", 'start: "a"~3..99'), False),
        (Shape("lark", "start: WORD\n%import common.WORD"), False),
        (Shape("lark", 'start: "a"\nstart: /.*/'), False),
        (Shape("lark", "start: " + "(" * 400 + '"a"' + ")" * 400), False),
        (Shape("lark", "start: " + "\n".join(f"r{n}\nr{n}: " for n in range(300)) + '"a"'), False),
        (Shape("lark", "start: nothing"), False),
        (Shape("lark", 'start: %json {"type": "object"}'), False),
        (Shape("lark", 'start[max_tokens=3]: "a"'), False),
        (Shape("lark", "start: <|im_start|>"), False),
        (Shape("lark", ""), False),
    ],
)
def test_which_shapes_are_brief(shape: Shape, brief: bool) -> None:
    assert is_brief(shape) is brief


@pytest.mark.parametrize("part", ["[", r"\p{", "{" + "1" * 4000, "(?x)a # [[[["])
def test_a_regex_is_looked_through_once(part: str) -> None:
    for regex in (part * (MAX_SOURCE // len(part)), part * 10_000):
        began = time.thread_time()  # of the processor: other threads do not count
        assert not is_brief(Shape("regex", regex))
        assert time.thread_time() - began < 0.1


@pytest.mark.parametrize("part", ['"\\', "/\\"])
def test_a_grammar_is_looked_through_once(part: str) -> None:
    grammar = "start: " + part * ((MAX_SOURCE - 7) // len(part))
    began = time.thread_time()
    assert not is_brief(Shape("lark", grammar))
    assert time.thread_time() - began < 0.03


@pytest.mark.parametrize(
    ("fields", "start"),
    [
        ({"answer": YES_OR_NO}, "answer"),
        ({"answer": YES_OR_NO, "effort": "low"}, "text"),
        ({"answer": YES_OR_NO, "template_kwargs": {"enable_thinking": True}}, "text"),
        ({"answer": YES_OR_NO, "template_kwargs": {"enable_thinking": False}}, "answer"),
        ({"answer": Shape("json", '{"type": "object"}')}, "text"),
        ({"answer": Shape("json", '{"type": "object"}'), "effort": "none"}, "answer"),
        ({}, "text"),
        ({"effort": "none"}, "answer"),
    ],
)
def test_where_a_prompt_leaves_the_model(fields: dict[str, Any], start: str) -> None:
    asked = RenderInput(ASKED, **fields)
    prompt = render_template(TEMPLATE, asked, {})
    assert start_of(prompt, asked, dialect_named("hermes")) == start
    assert prompt.endswith("</think>\n\n") is (start == "answer")


def test_a_template_that_cannot_be_told_leaves_it_to_the_shape() -> None:
    asked = RenderInput(ASKED, answer=YES_OR_NO)
    assert start_of("<|im_start|>assistant\n", asked, dialect_named("hermes")) == "answer"
    assert start_of("<|im_start|>assistant\n<think>\n", asked, dialect_named("hermes")) == "reasoning"


@pytest.fixture
async def shipped() -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(CHECKPOINT, num_threads=1)
    await engine.start()
    yield engine
    await engine.close()


async def test_the_shipped_model_answers_at_once_unless_it_is_to_think(shipped: LocalEngine) -> None:
    thought, asked = 0, [{"role": "user", "content": "What is 12 + 7?"}]  # it thinks about sums
    sums = Shape("choice", '["18", "19"]')
    for seed in range(8):
        for fields in ({}, {"effort": "high"}):
            prompt = await shipped.render(RenderInput(asked, answer=sums, **fields))
            request = GenerateRequest(
                id="r",
                prompt_ids=prompt.ids,
                sampling=SamplingParams(seed=seed, max_tokens=60),
                reader=ReaderParams(starts_in=prompt.starts_in, shaped=True),
                constraint=Constraint(answer=sums),
            )
            tokens = [token async for chunk in shipped.generate(request) for token in chunk.token_ids]
            if fields:
                thought += len(tokens) > 4
            else:
                assert await shipped.detokenize(tokens) in ("18", "19")
    assert thought > 4
