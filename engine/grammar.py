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
from collections.abc import Iterable
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from engine.dialects import CallMarks, Dialect, ReasoningMarks
from engine.text import Tokenizer
from engine.types import Constraint, ConstraintError, ToolShape

# One step may cost 200,000 units of lexer fuel, about 15 ms; only hostile patterns come near.
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
# Compiling takes time with the square of an object's properties, 0.05 s for a thousand, before any limit of
# the library's own holds: so the sum of those squares over all objects of a constraint is bounded.
MAX_SQUARES = 5_000_000
CACHE_COUNT = 256
CACHE_SIZE = 8 << 20  # characters of all grammars kept

# What json.dumps(value, ensure_ascii=False), so every chat template's `tojson`, writes: what is decoded is
# rendered again character for character. Letters are the escapes it uses (u: control characters, and without
# it values that contain one could not be written); other characters stand as they are.
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
            grammar = Grammar(vocabulary, source, self._tokenizer.added_ids)
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
                Grammar(vocabulary, self._source((tool,), 1, "text"), self._tokenizer.added_ids)
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
        squares = 0
        for index, tool in enumerate(tools):
            schema = _schema(tool)
            squares += _squares(schema)
            if squares > MAX_SQUARES:
                raise ConstraintError(f"the parameters of tool {tool.name!r} have too many properties")
            rules += self._call(marks, tool.name, schema, index)
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
            rules = [
                f"thought: until_close {_quoted(marks.after)}",
                f"until_close[lazy]: /{any_text}{close}/",
            ]
        else:
            rules = [
                f"thought: THOUGHT {self._tag(marks.close)} {_quoted(marks.after)}",
                f"THOUGHT: /{any_text}/ & ~/{any_text}{close}{any_text}/",
            ]
        if starts_in == "reasoning":
            return "thought ", rules
        return "block? ", [f"block: {self._tag(marks.open)} thought", *rules]

    def _call(self, marks: CallMarks, name: str, schema: dict[str, Any], index: int) -> list[str]:
        quoted = json.dumps(name, ensure_ascii=False)
        before = _quoted(f"{marks.before_name}{quoted}{marks.before_arguments}")
        opening = "" if marks.bare else self._tag(marks.open)
        closing = self._tag(marks.close) if marks.close else ""
        schema = {**schema, "x-guidance": LAYOUT}  # the library reads its options off the schema
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

    def __init__(self, vocabulary: LLTokenizer, source: str, added_ids: Iterable[int]) -> None:
        self.size = len(source)
        self._vocabulary = vocabulary
        self._added = np.zeros((vocabulary.vocab_size + 31) // 32, np.int32)
        _set(self._added, added_ids)
        self._start = LLMatcher(vocabulary, source, log_level=0, limits=LIMITS)
        if self._start.is_error():
            raise ConstraintError(_reason(self._start.get_error()))

    def matcher(self) -> Matcher:
        """A matcher at the grammar's start; costs microseconds."""
        return Matcher(self._start.deep_copy(), self._vocabulary, self._added)


class Matcher:
    """Where one generation stands in a grammar. Not thread-safe."""

    __slots__ = ("_added", "_inner", "_vocabulary")

    def __init__(self, inner: LLMatcher, vocabulary: LLTokenizer, added: NDArray[np.int32]) -> None:
        self._inner = inner
        self._vocabulary = vocabulary
        self._added = added  # bits of the added tokens, tags and specials among them

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Write the tokens allowed next: int32 words, lowest bit first, bit set = allowed; one contiguous
        row.

        Ids beyond the tokenizer's are never allowed. Raises ConstraintError when the grammar outgrew its
        limits.
        """
        own = mask if mask.size == self._added.size else np.empty_like(self._added)
        self._inner.unsafe_compute_mask_ptr(own.ctypes.data, own.nbytes)
        if self._inner.is_error():
            raise ConstraintError(_reason(self._inner.get_error()))
        tags = own & self._added
        if tags.any():
            self._spell(own, tags)
        if own is not mask:
            shared = min(own.size, mask.size)
            mask[:shared] = own[:shared]
            mask[shared:] = 0

    def _spell(self, mask: NDArray[np.int32], tags: NDArray[np.int32]) -> None:
        """Where the text to come is certain, llguidance 1.9 allows its first canonical token only; if that
        text contains a tag (a property named "</tool_call>"), this is the tag's token, which it then
        refuses."""
        for token_id in allowed_ids(tags):
            if not self.allows(int(token_id)):
                mask.view(np.uint32)[token_id >> 5] &= np.uint32(~(1 << (int(token_id) & 31)) & 0xFFFFFFFF)
        if not mask.any():
            forced = self._inner.compute_ff_bytes().decode(errors="ignore")
            _set(mask, self._vocabulary.greedy_tokenize(forced)[:1])

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


def _schema(tool: ToolShape) -> dict[str, Any]:
    """The JSON Schema of a tool's arguments; they are an object, whatever it leaves open."""
    try:
        schema = json.loads(tool.parameters or "{}")
    except (ValueError, RecursionError) as error:
        raise ConstraintError(f"the parameters of tool {tool.name!r} are not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise ConstraintError(f"the parameters of tool {tool.name!r} are not a JSON Schema object")
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise ConstraintError(f"the parameters of tool {tool.name!r} must have type object, not {kind!r}")
    # Beside a reference to itself no other keyword may stand; what it refers to has the type.
    return schema if "$ref" in schema else {**schema, "type": "object"}


def _squares(schema: dict[str, Any]) -> int:
    """The sum, over all objects in a schema, of their number of properties squared."""
    total, pending = 0, [schema]
    while pending:
        value: Any = pending.pop()
        if isinstance(value, dict):
            total += max(len(value.get(key) or ()) if isinstance(value.get(key), dict | list) else 0
                         for key in ("properties", "required")) ** 2  # fmt: skip
            pending += value.values()
        elif isinstance(value, list):
            pending += value
    return total


def _quoted(text: str) -> str:
    """A Lark string; nothing for an empty one."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def _reason(error: str) -> str:
    """llguidance's message without positions and source: 'Unimplemented keys: ["not"]'."""
    message = re.split(r"\n +\d+ \| |\n<non-verbose/>", error.strip())[0]
    message = re.sub(r"^(at \d+\(\d+\): )?(failed to compile JSON schema: )?", "", message)
    return " ".join(message.split())[:500]


def _set(mask: NDArray[np.int32], token_ids: Iterable[int]) -> None:
    """Set the bits of token ids in a mask row."""
    words = mask.view(np.uint32)
    for token_id in token_ids:
        words[token_id >> 5] |= np.uint32(1 << (token_id & 31))


def allowed_ids(mask: NDArray[np.int32]) -> NDArray[Any]:
    """The token ids whose bits are set in a mask row, ascending."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
