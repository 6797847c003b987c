"""Compiles constraints into grammars, and computes the tokens that each grammar allows next.

Compiled grammars are cached, and compiling has limits. It stands on llguidance, which a foreign grammar can
crash or hang: a server imports it only in the processes of `isolation`. Masks are NumPy rows;
llguidance.torch is never imported, because that takes seconds.
"""

from __future__ import annotations

import copy
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from engine.dialects import Dialect, ReasoningMarks
from engine.structured.json_schema import read_schema, unlisted
from engine.structured.json_string_grammar import QuotedText, QuotedVocabulary
from engine.structured.lark_writer import Input, Source, Writer
from engine.structured.raw_text_grammar import RawText, RawVocabulary
from engine.tokenizer import Tokenizer
from engine.types import Constraint, ConstraintError, ReaderParams, Shape, ToolShape

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
NOTHING_FITS_PROPERTY = "nothing fits the required property"
CACHE_COUNT = 256
CACHE_SIZE = 8 << 20  # characters of all grammars kept

Key = tuple[Constraint, str, bool, tuple[ToolShape, ...]]


class Grammars:
    """Compiles constraints for one model, and keeps the latest. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, dialect: Dialect) -> None:
        self._tokenizer = tokenizer
        self._dialect = dialect
        self._writer = Writer(dialect, tokenizer.token_id)
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._kept: OrderedDict[Key, Grammar] = OrderedDict()
        self._size = 0

    def compile(self, constraint: Constraint, reader: ReaderParams) -> Grammar:
        """The grammar of a constraint behind a prompt whose answer is read like this.

        Raises ConstraintError that names the tool and the keyword which cannot be honoured. May take a
        second.
        """
        offered = reader.tools if self._dialect.typed and constraint.tools else ()
        key = (constraint, reader.starts_in, reader.dialect, offered)
        with self._lock:
            if (found := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return found
            vocabulary = self._vocabulary = self._vocabulary or Vocabulary(self._tokenizer)
        try:
            bounded = constraint.answer is None or constraint.answer.kind != "text"
            marks = self._dialect.reasoning if reader.dialect and bounded else None
            source = self._writer.write(constraint, reader)
            grammar = Grammar(vocabulary, source, marks, reader.starts_in)
        except ConstraintError as error:
            raise _located(self._blame(vocabulary, constraint, error), constraint) from None
        with self._lock:
            self._keep(key, grammar)
        return grammar

    def again(self, source: str, marked: bool, starts_in: str) -> Grammar:
        """A grammar that was compiled elsewhere, from its `Source.written`, `marked` and start."""
        vocabulary = self._vocabulary = self._vocabulary or Vocabulary(self._tokenizer)
        marks = self._dialect.reasoning if marked else None
        return Grammar(vocabulary, Source.read(source), marks, starts_in)

    def read(self) -> None:
        """Make now what is otherwise made where it is first needed. Raises ConstraintError for a tokenizer
        that cannot be constrained."""
        self.compile(Constraint(answer=Shape("json", '{"pattern": "^a"}')), ReaderParams(dialect=False))
        assert self._vocabulary is not None
        self._vocabulary.read()
        self._kept.clear()
        self._size = 0

    @property
    def size(self) -> int:
        """How many tokens the vocabulary has."""
        assert self._vocabulary is not None
        return self._vocabulary.size

    def _keep(self, key: Key, grammar: Grammar) -> None:
        if key in self._kept:
            return
        self._kept[key] = grammar
        self._size += grammar.size
        while len(self._kept) > CACHE_COUNT or (self._size > CACHE_SIZE and len(self._kept) > 1):
            _, dropped = self._kept.popitem(last=False)
            self._size -= dropped.size

    def _blame(
        self, vocabulary: Vocabulary, constraint: Constraint, error: ConstraintError
    ) -> ConstraintError:
        """The same error with the name of the tool that causes it alone, where one does."""
        if error.tool is not None or not constraint.tools:
            return error
        for tool in constraint.tools:
            try:
                source = self._writer.write(Constraint((tool,), 1), ReaderParams(tools=constraint.tools))
                Grammar(vocabulary, source, None, "text")
            except ConstraintError as own:
                return own.of_tool(tool.name)
        return error


class Vocabulary:
    """One model's tokens, as grammars see them; immutable."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        try:
            self.inner = LLTokenizer(tokenizer.serialized, eos_token=list(tokenizer.eos_token_ids))
        except Exception as error:  # the library raises bare Exceptions
            raise ConstraintError(f"this model's tokenizer cannot be constrained: {error}") from error
        self.size = self.inner.vocab_size
        self.added = np.zeros((self.size + 31) // 32, np.int32)
        _set(self.added, tokenizer.added_ids)
        self._lock = threading.RLock()

    @property
    def quoted(self) -> QuotedVocabulary:
        """The same tokens as what they spell inside of a JSON string."""
        with self._lock:
            return self._quoted

    @property
    def raw(self) -> RawVocabulary:
        """The same tokens by their bytes."""
        with self._lock:
            return self._raw

    def read(self) -> None:
        """Make all of it now."""
        _ = self.raw, self._lengths
        with suppress(ConstraintError):  # who needs it is told
            _ = self.quoted

    def within(self, mask: NDArray[np.int32], length: int) -> None:
        """Take tokens of more than so many bytes out of a mask."""
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        bits[: self.size][self._lengths > length] = 0
        mask[:] = np.packbits(bits, bitorder="little").view(np.int32)

    @cached_property
    def _quoted(self) -> QuotedVocabulary:
        added = sorted(self.tokenizer.added_ids)
        return QuotedVocabulary(self._tokens, added, self.tokenizer.eos_token_ids[0])

    @cached_property
    def _raw(self) -> RawVocabulary:
        return RawVocabulary(self._tokens, self.added)

    @cached_property
    def _lengths(self) -> NDArray[np.int64]:
        return np.array([len(token) for token in self._tokens])

    @cached_property
    def _tokens(self) -> list[bytes]:
        return [self.tokenizer.token_bytes(token_id) for token_id in range(self.size)]


class Grammar:
    """One compiled grammar; immutable. marks: of a thought before the shape that must find an end."""

    def __init__(
        self, vocabulary: Vocabulary, source: Source, marks: ReasoningMarks | None, starts_in: str
    ) -> None:
        self.size = len(source.text) + sum(len(each.grammar) for each in source.inputs)
        if self.size > MAX_SOURCE:
            raise ConstraintError(f"the shape is too long ({self.size} characters of grammar)")
        self.source = source
        self.marked = marks is not None
        self._vocabulary = vocabulary
        self._marks = marks
        self._thinks = starts_in == "reasoning"
        start = LLMatcher(vocabulary.inner, source.text, log_level=0, limits=LIMITS)
        thought = "" if marks is None else ("" if self._thinks else marks.open) + marks.close + marks.after
        self._start = _compiled(start, vocabulary.tokenizer.encode(thought))
        self._inputs = [(each, _compiled(_input(vocabulary, each))) for each in source.inputs]

    def matcher(self, max_tokens: int) -> Matcher:
        """A matcher at the grammar's start; costs microseconds. max_tokens: of the whole generation, half of
        which a thought may take."""
        thought = None
        if self._marks is not None:
            thought = Thought(self._vocabulary.tokenizer, self._marks, self._thinks, max_tokens // 2)
        inputs = Inputs(self._vocabulary, self._inputs) if self._inputs else None
        return Matcher(self._start.deep_copy(), self._vocabulary, thought, inputs)


class Matcher:
    """Where one generation stands in a grammar. Not thread-safe."""

    __slots__ = ("_inner", "_inputs", "_thought", "_vocabulary")

    def __init__(
        self, inner: LLMatcher, vocabulary: Vocabulary, thought: Thought | None, inputs: Inputs | None
    ) -> None:
        self._inner = inner
        self._vocabulary = vocabulary
        self._thought = thought
        self._inputs = inputs

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Write the tokens allowed next: int32 words, lowest bit first, bit set = allowed; one contiguous
        row.

        Ids beyond the tokenizer's are never allowed. Raises ConstraintError when the grammar outgrew its
        limits.
        """
        added = self._vocabulary.added
        own = mask if mask.size == added.size else np.empty_like(added)
        self._inner.unsafe_compute_mask_ptr(own.ctypes.data, own.nbytes)
        if self._inner.is_error():
            raise ConstraintError(_reason(self._inner.get_error()))
        if not (own & ~added).any():
            self._spell(own)
        if self._inputs is not None:
            self._inputs.narrow(own)
        if self._thought is not None and (token_id := self._closing()) is not None:
            own[:] = 0
            _set(own, (token_id,))
        if own is not mask:
            shared = min(own.size, mask.size)
            mask[:shared] = own[:shared]
            mask[shared:] = 0

    def _closing(self) -> int | None:
        """The next token of the closing tag, where a thought has had its share and may be closed here."""
        token_id = None if self._thought is None else self._thought.closing
        return token_id if token_id is not None and self._inner.validate_tokens([token_id]) else None

    def _spell(self, mask: NDArray[np.int32]) -> None:
        """Where the text to come is certain, llguidance 1.9 allows its first canonical token only; if that
        text contains a tag (a property named "</tool_call>"), this is the tag's token, which it then
        refuses. `validate_tokens` would refuse the end of the turn, too, which a grammar may name."""
        for token_id in allowed_ids(mask):
            if not self._inner.deep_copy().consume_token(int(token_id)):
                mask.view(np.uint32)[token_id >> 5] &= np.uint32(~(1 << (int(token_id) & 31)) & 0xFFFFFFFF)
        if not mask.any():
            forced = self._inner.compute_ff_bytes().decode(errors="ignore")
            _set(mask, self._vocabulary.inner.greedy_tokenize(forced)[:1])

    def allows(self, token_id: int) -> bool:
        """Whether this token may come next, without a whole mask."""
        if not self._inner.validate_tokens([token_id]):
            return False
        if (closing := self._closing()) is not None:
            return token_id == closing
        return self._inputs is None or self._inputs.allows(token_id)

    def advance(self, token_id: int) -> None:
        """Take a token; raises ConstraintError for one that the mask forbids."""
        if not self._inner.consume_token(token_id):
            raise ConstraintError(
                _reason(self._inner.get_error()) or f"token {token_id} does not fit the shape"
            )
        if self._thought is not None:
            self._thought.advance(token_id)
            if self._thought.over:
                self._thought = None
        if self._inputs is not None:
            self._inputs.advance(token_id)

    def fork(self) -> Matcher:
        """Another matcher at the same place, to look ahead with; costs microseconds."""
        thought = copy.copy(self._thought)
        inputs = None if self._inputs is None else self._inputs.fork()
        return Matcher(self._inner.deep_copy(), self._vocabulary, thought, inputs)

    @property
    def stopped(self) -> bool:
        """The shape is whole and nothing may follow."""
        return bool(self._inner.is_stopped())


class Thought:
    """A thought before a shape, which must leave room for it: `closing` is what to say once it had its
    share."""

    __slots__ = ("_close", "_inside", "_left", "_open", "_said", "_to_say", "_tokenizer", "over")

    def __init__(self, tokenizer: Tokenizer, marks: ReasoningMarks, inside: bool, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._open, self._close = marks.open.encode(), marks.close.encode()
        self._to_say = tokenizer.encode(marks.close)
        self._inside = inside
        self._left = max_tokens
        self._said = b""
        self.over = False

    @property
    def closing(self) -> int | None:
        if not self._inside or self._left > 0:
            return None
        said = next(
            (size for size in range(len(self._close) - 1, 0, -1) if self._said.endswith(self._close[:size])),
            0,
        )
        return self._tokenizer.encode(self._close[said:].decode(errors="ignore"))[0]

    def advance(self, token_id: int) -> None:
        self._left -= 1
        self._said += self._tokenizer.token_bytes(token_id)
        if not self._inside:
            self._inside = self._said.startswith(self._open)
            self.over = not self._inside and not self._open.startswith(self._said)
            self._said = b"" if self._inside else self._said
            return
        self._said = self._said[-4 * len(self._close) :]
        self.over = self._close in self._said


class Inputs:
    """The inputs of custom tools that have a grammar: found as they begin, narrowed while they last."""

    __slots__ = ("_begun", "_grammars", "_open", "_said", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, grammars: list[tuple[Input, LLMatcher]]) -> None:
        self._vocabulary = vocabulary
        self._grammars = [(own.before.encode(), own, start) for own, start in grammars]
        self._open: QuotedText | RawText | None = None
        self._said = b""
        self._begun = max(len(before) for before, _, _ in self._grammars)

    def narrow(self, mask: NDArray[np.int32]) -> None:
        """Take out what the grammar of an input forbids, and what would run into one."""
        if self._open is not None:
            self._open.narrow(mask)
        elif (left := self._left()) is not None:
            self._vocabulary.within(mask, left)

    def allows(self, token_id: int) -> bool:
        if self._open is not None:
            return self._open.allows(token_id)
        left = self._left()
        return left is None or len(self._vocabulary.tokenizer.token_bytes(token_id)) <= left

    def advance(self, token_id: int) -> None:
        token = self._vocabulary.tokenizer.token_bytes(token_id)
        if self._open is not None:
            self._open.advance(token_id, token)
            if self._open.closed:
                self._open, self._said = None, b""
            return
        self._said = (self._said + token)[-self._begun :]
        for before, own, start in self._grammars:
            if self._said.endswith(before):
                self._open = self._opened(own, start.deep_copy())

    def fork(self) -> Inputs:
        other = copy.copy(self)
        other._open = None if self._open is None else self._open.fork()
        return other

    def _opened(self, own: Input, start: LLMatcher) -> QuotedText | RawText:
        if not own.tag:
            return QuotedText(start, self._vocabulary.quoted)
        tag_id = self._vocabulary.tokenizer.token_id(own.tag)
        return RawText(start, self._vocabulary.raw, own.pad.encode(), own.tag.encode(), tag_id)

    def _left(self) -> int | None:
        """How many bytes are missing to an input's beginning, where only its quote may still come."""
        for before, _, _ in self._grammars:
            for left in range(1, min(32, len(before))):
                if self._said.endswith(before[:-left]):
                    return left
        return None


def _input(vocabulary: Vocabulary, own: Input) -> LLMatcher:
    if not own.tag:
        return vocabulary.quoted.compile(own.grammar, LIMITS)
    return LLMatcher(vocabulary.inner, own.grammar, log_level=0, limits=LIMITS)


def _compiled(matcher: LLMatcher, thought: Sequence[int] = ()) -> LLMatcher:
    """The same matcher, once its first step is known to be possible, after a thought: a schema that is only
    a reference to itself compiles."""
    first = matcher.deep_copy()
    if not first.is_error():
        first.try_consume_tokens(list(thought))
        first.compute_bitmask()
    if first.is_error():
        raise ConstraintError(_reason(first.get_error()))
    return matcher


def _reason(error: str) -> str:
    """llguidance's message without positions and source: 'Unimplemented keys: ["not"]'."""
    message = re.split(r"\n +\d+ \| |\n<non-verbose/>", error.strip())[0]
    if message.startswith("NoExtension"):
        return "nothing fits the shape"
    message = re.sub(r"^(at \d+\(\d+\): )?(failed to compile JSON schema: )?", "", message)
    if (found := re.match(r"Pointer '(.*)' does not exist", message)) is not None:
        return f"'$ref' to '#{found[1][:128]}' cannot be enforced: what stands there cannot be enforced alone"
    if (
        found := re.match(r"Unsatisfiable schema: required property (.*) is unsatisfiable", message)
    ) is not None:
        return f"{NOTHING_FITS_PROPERTY} {found[1][:128]}"
    message = message.replace("Unsatisfiable schema", "nothing fits the schema", 1)
    return " ".join(message.split())[:500]


def _located(error: ConstraintError, constraint: Constraint) -> ConstraintError:
    """The same error; where it is that nothing fits a property, with the reason and the place, if the
    property is required and not allowed."""
    answer = constraint.answer
    sources = [tool.parameters for tool in constraint.tools if tool.name == error.tool]
    if error.tool is None and answer is not None and answer.kind == "json":
        sources = [answer.source]
    if not error.reason.startswith(NOTHING_FITS_PROPERTY) or not sources:
        return error
    if (found := unlisted(read_schema(sources[0]))) is None:
        return error
    name, place = found
    why = (
        f"'required' names {name[:64]!r}, which 'properties' does not list and 'additionalProperties' forbids"
    )
    return ConstraintError(f"nothing fits it: {why}", tool=error.tool, place=place)


def _set(mask: NDArray[np.int32], token_ids: Iterable[int]) -> None:
    """Set the bits of token ids in a mask row."""
    words = mask.view(np.uint32)
    for token_id in token_ids:
        words[token_id >> 5] |= np.uint32(1 << (token_id & 31))


def allowed_ids(mask: NDArray[np.int32]) -> NDArray[np.int64]:
    """The token ids whose bits are set in a mask row, ascending."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
