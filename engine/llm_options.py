"""The options of a prompt in a batch: their defaults, and which of them exclude each other."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.structured import closed_schema
from engine.types import ModelInfo, SamplingParams, Shape

MAX_ANSWERS = 128
"""Answers that are drawn for one prompt at most, as over HTTP."""


@dataclass(frozen=True, slots=True)
class Options:
    """How prompts are answered; None takes what the checkpoint's generation_config.json says, then what is
    usual.

    n: answers to a prompt, which then draw from seeds that follow each other. best_of: how many are drawn for
    them; those whose tokens were likeliest on average are kept, best first.
    max_tokens None, there too: up to the end of the context. seed None: drawn anew for each prompt; one that
    is given holds for each, so a prompt's answer does not depend on its place among others. temperature 0 is
    greedy. adapter: the name of one that the engine was given. stop_token_ids, min_tokens, ignore_eos,
    logprobs (0 to 20 alternatives): as over HTTP. At most one of json_schema (as an object or its text),
    regex, choice and grammar (Lark) shapes the answer; what would cut JSON short cannot stand beside it.
    Raises ValueError.
    """

    n: int = 1
    best_of: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    adapter: str | None = None
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.n <= MAX_ANSWERS:
            raise ValueError(f"n must be between 1 and {MAX_ANSWERS}")
        if self.best_of is not None and not self.n <= self.best_of <= MAX_ANSWERS:
            raise ValueError(f"best_of must be between n ({self.n}) and {MAX_ANSWERS}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError("max_tokens must be at least 1")
        shapes = [name for name in _SHAPES if getattr(self, name) is not None]
        if len(shapes) > 1:
            raise ValueError(f"only one shape can be asked for: {' and '.join(shapes)} are {len(shapes)}")
        if self.json_schema is not None:
            for name in ("stop", "stop_token_ids", "min_tokens", "ignore_eos"):
                if getattr(self, name):
                    raise ValueError(f"{name} would cut JSON short: it cannot stand beside json_schema")

    def shape(self) -> Shape | None:
        """What the answer must look like, as the engine takes it. Raises ValueError for a schema that is no
        JSON object."""
        if self.json_schema is not None:
            schema = self.json_schema
            schema = json.loads(schema) if isinstance(schema, str) else schema
            if not isinstance(schema, Mapping):
                raise ValueError("json_schema is not an object")
            return Shape("json", closed_schema(schema))
        if self.choice is not None:
            return Shape("choice", json.dumps(list(self.choice)))
        if self.regex is not None:
            return Shape("regex", self.regex)
        return None if self.grammar is None else Shape("lark", self.grammar)

    def sampling(self, info: ModelInfo, num_prompt_tokens: int) -> SamplingParams:
        """Every field resolved for one prompt."""
        defaults, room = info.defaults, max(info.max_model_len - num_prompt_tokens, 0)

        def pick(asked: Any, checkpoint: Any, usual: Any) -> Any:
            return next(value for value in (asked, checkpoint, usual) if value is not None)

        return SamplingParams(
            seed=secrets.randbits(63) if self.seed is None else self.seed,
            max_tokens=min(room, pick(self.max_tokens, defaults.max_new_tokens, room)),
            temperature=pick(self.temperature, defaults.temperature, 1.0),
            top_p=pick(self.top_p, defaults.top_p, 1.0),
            top_k=pick(self.top_k, defaults.top_k, 0),
            min_p=pick(self.min_p, defaults.min_p, 0.0),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=pick(self.repetition_penalty, defaults.repetition_penalty, 1.0),
            logit_bias=tuple(sorted(self.logit_bias.items())),
            min_tokens=self.min_tokens,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
        )


_SHAPES = ("json_schema", "regex", "choice", "grammar")
