"""Shapes that the decoder enforces, as token masks.

Owns: the grammar of a constraint in the layout of the model's dialect, its compilation under limits, and a
bounded cache of what was compiled. Refuses to know: torch (masks are NumPy rows), the step loop, what a tool
does. It stands on llguidance (Lark syntax: github.com/guidance-ai/llguidance, docs/syntax.md) and is imported
only where a request has a constraint; it never imports llguidance.torch, which costs seconds.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from engine.dialects import CallMarks, Dialect, ReasoningMarks
from engine.text import Tokenizer
from engine.types import Constraint, ConstraintError, ToolShape

# A grammar of 50,000 symbols (some 5,000 properties) compiles in about a second: the time grows with the
# square of an object's properties. A step may cost 200,000 units of lexer fuel, about 15 ms.
LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)
MAX_SOURCE = 1 << 20  # characters of one grammar
CACHE_COUNT = 256
CACHE_SIZE = 8 << 20  # characters of all grammars kept

# What json.dumps(value, ensure_ascii=False), so every chat template's `tojson`, writes: what is decoded is
# rendered again character for character. Letters are the escapes it uses; other characters stand as they are.
LAYOUT = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "json_allowed_escapes": '"\\bfnrtu',
}


class Grammars:
    """Compiles constraints for one model, and keeps the latest. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, dialect: Dialect) -> None:
        self._tokenizer = tokenizer
        self._dialect = dialect
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._kept: OrderedDict[tuple[Constraint, str], Grammar] = OrderedDict()
        self._size = 0

    def compile(self, constraint: Constraint, starts_in: str) -> Grammar:
        """The grammar of a constraint behind a prompt that leaves the model in `starts_in` ("text",
        "reasoning").

        Raises ConstraintError that names the tool and the keyword which cannot be honoured. May take a
        second.
        """
        key = (constraint, starts_in)
        with self._lock:
            if (found := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return found
            vocabulary = self._vocabulary = self._vocabulary or self._load()
        source = self._source(constraint.tools, constraint.max_calls, starts_in)
        if len(source) > MAX_SOURCE:
            raise ConstraintError(
                f"the schemas of the tools are too long ({len(source)} characters of grammar)"
            )
        try:
            grammar = Grammar(vocabulary, source)
        except ConstraintError as error:
            raise self._blame(vocabulary, constraint, error) from None
        with self._lock:
            self._keep(key, grammar)
        return grammar

    def _keep(self, key: tuple[Constraint, str], grammar: Grammar) -> None:
        if key in self._kept:
            return
        self._kept[key] = grammar
        self._size += grammar.size
        while len(self._kept) > CACHE_COUNT or (self._size > CACHE_SIZE and len(self._kept) > 1):
            _, dropped = self._kept.popitem(last=False)
            self._size -= dropped.size

    def _load(self) -> LLTokenizer:
        try:
            return LLTokenizer(self._tokenizer.serialized, eos_token=list(self._tokenizer.eos_token_ids))
        except Exception as error:  # the library raises bare Exceptions
            raise ConstraintError(f"this model's tokenizer cannot be constrained: {error}") from error

    def _blame(
        self, vocabulary: LLTokenizer, constraint: Constraint, error: ConstraintError
    ) -> ConstraintError:
        """The same error with the name of the tool that causes it alone, where one does."""
        for tool in constraint.tools:
            try:
                Grammar(vocabulary, self._source((tool,), 1, "text"))
            except ConstraintError as own:
                return ConstraintError(f"the parameters of tool {tool.name!r} cannot be enforced: {own}")
        return error

    # -- the grammar of calls, in Lark -----------------------------------------------------------------------

    def _source(self, tools: tuple[ToolShape, ...], max_calls: int | None, starts_in: str) -> str:
        marks = self._dialect.calls
        if marks is None:
            raise ConstraintError(f"models of the {self._dialect.name!r} dialect have no tool calls")
        if not tools:
            raise ConstraintError("there is no tool to call")
        if max_calls is not None and max_calls < 1:
            raise ConstraintError("at least one call must be allowed")
        more = "*" if max_calls is None else f"{{0,{max_calls - 1}}}"
        repeated = "" if max_calls == 1 else f" ({_quoted(marks.separator)} call){more}"
        thought, rules = self._thought(self._dialect.reasoning, starts_in)
        rules.insert(0, f"start: {thought}call{repeated}")
        rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
        for index, tool in enumerate(tools):
            rules += self._call(marks, tool, index)
        return "%llguidance {}\n" + "\n".join(rules) + "\n"

    def _thought(self, marks: ReasoningMarks | None, starts_in: str) -> tuple[str, list[str]]:
        """What may stand before the first call, and its rules: the rest of a reasoning block, or one the
        model opens.

        The block's text may not spell the closing tag, so that grammar and parser agree where it ends.
        """
        if marks is None:
            return "", []
        close = re.escape(marks.close).replace("/", "\\/")
        any_text = "(.|\\n)*"
        if self._tokenizer.token_id(marks.close) is None:
            rules = [f"thought: THOUGHT {_quoted(marks.after)}", f"THOUGHT[lazy]: /{any_text}{close}/"]
        else:
            rules = [
                f"thought: THOUGHT {self._tag(marks.close)} {_quoted(marks.after)}",
                f"THOUGHT: /{any_text}/ & ~/{any_text}{close}{any_text}/",
            ]
        if starts_in == "reasoning":
            return "thought ", rules
        return "block? ", [f"block: {self._tag(marks.open)} thought", *rules]

    def _call(self, marks: CallMarks, tool: ToolShape, index: int) -> list[str]:
        try:
            schema = json.loads(tool.parameters or "{}")
        except (ValueError, RecursionError) as error:
            raise ConstraintError(f"the parameters of tool {tool.name!r} are not JSON: {error}") from None
        if not isinstance(schema, dict):
            raise ConstraintError(f"the parameters of tool {tool.name!r} are not a JSON Schema object")
        kind = schema.get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            raise ConstraintError(f"the parameters of tool {tool.name!r} must have type object, not {kind!r}")
        name = json.dumps(tool.name, ensure_ascii=False)
        before = _quoted(f"{marks.before_name}{name}{marks.before_arguments}")
        opening = "" if marks.bare else self._tag(marks.open)
        closing = self._tag(marks.close) if marks.close else ""
        # Arguments are an object, whatever the schema leaves open; the layout's options ride on the schema.
        schema = {**schema, "type": "object", "x-guidance": LAYOUT}
        return [
            f"call_{index}: {opening} {before} arguments_{index} {_quoted(marks.end)} {closing}",
            f"arguments_{index}: %json {json.dumps(schema)}",
        ]

    def _tag(self, tag: str) -> str:
        """A tag as its own token where the tokenizer has one (as encoding a rendered prompt would), else as
        text."""
        token_id = self._tokenizer.token_id(tag)
        return _quoted(tag) if token_id is None else f"<[{token_id}]>"


class Grammar:
    """One compiled grammar; immutable."""

    def __init__(self, vocabulary: LLTokenizer, source: str) -> None:
        self.size = len(source)
        self._words = (vocabulary.vocab_size + 31) // 32
        self._start = LLMatcher(vocabulary, source, log_level=0, limits=LIMITS)
        if self._start.is_error():
            raise ConstraintError(_reason(self._start.get_error()))

    def matcher(self) -> Matcher:
        """A matcher at the grammar's start; costs microseconds."""
        return Matcher(self._start.deep_copy(), self._words)


class Matcher:
    """Where one generation stands in a grammar. Not thread-safe."""

    __slots__ = ("_inner", "_words")

    def __init__(self, inner: LLMatcher, words: int) -> None:
        self._inner = inner
        self._words = words

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Write the tokens allowed next: int32 words, lowest bit first, bit set = allowed; one contiguous
        row.

        Ids beyond the tokenizer's are never allowed. Raises ConstraintError when the grammar outgrew its
        limits.
        """
        own = mask if mask.size == self._words else np.empty(self._words, np.int32)
        self._inner.unsafe_compute_mask_ptr(own.ctypes.data, own.nbytes)
        if own is not mask:
            shared = min(own.size, mask.size)
            mask[:shared] = own[:shared]
            mask[shared:] = 0
        if self._inner.is_error():
            raise ConstraintError(_reason(self._inner.get_error()))

    def allows(self, token_id: int) -> bool:
        """Whether this token may come next, without a whole mask."""
        return bool(self._inner.validate_tokens([token_id]))

    def advance(self, token_id: int) -> None:
        """Take a token; raises ConstraintError for one that the mask forbids."""
        if not self._inner.consume_token(token_id):
            raise ConstraintError(
                _reason(self._inner.get_error()) or f"token {token_id} does not fit the shape"
            )

    @property
    def stopped(self) -> bool:
        """The shape is whole and nothing may follow."""
        return bool(self._inner.is_stopped())


def _quoted(text: str) -> str:
    """A Lark string; nothing for an empty one."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def _reason(error: str) -> str:
    """llguidance's first line without its position: 'Unimplemented keys: ["not"]'."""
    first = error.strip().partition("\n   ")[0].strip()
    return re.sub(r"^(at \d+\(\d+\): )?(failed to compile JSON schema: )?", "", first)


def allowed_ids(mask: NDArray[np.int32]) -> NDArray[Any]:
    """The token ids whose bits are set in a mask row, ascending."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
