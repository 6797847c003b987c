"""The values that server and engine exchange, and the engine's errors.

All are frozen and picklable, so that the engine can move to another process without a change of its callers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

# ------------------------------------------------------------------------------------------------------------
# Requests


CACHED_TOKEN = 0.05
"""What a prompt token counts in fair shares that was in the prefix cache; one that is computed counts 1."""

Start = Literal["text", "reasoning", "answer"]
"""Where a prompt leaves the model: in a text that may yet begin with a thought, within a thought that the
template has opened, or after thoughts, so that a shape is held from the first token on."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn; every field resolved, nothing optional but what is off.

    The noise of a draw is a counter-based function of (seed, choice, generation, output index, vocabulary
    id), so a draw never depends on the batch.
    """

    seed: int
    max_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    presence_penalty: float = 0.0  # presence and frequency count output tokens only
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # counts prompt and output tokens
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop: tuple[str, ...] = ()  # ended by the reader of the text
    include_stop: bool = False  # the text ends with the stop string, or with what a stop token shows
    bad_words: tuple[str, ...] = ()  # texts that the output never holds
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: off; k: the chosen token and the k most likely (0..20)
    prompt_logprobs: int | None = None  # the same for prompt tokens, in the first chunk
    # Guessing ahead changes how soon tokens come, never which; None: as the engine was started.
    num_assistant_tokens: int | None = None  # draft tokens that one step checks; 0 is off
    max_ngram_size: int | None = None  # drafts from the text: as many of its last tokens are looked up
    assistant_confidence_threshold: float | None = None  # a draft model stops drafting below this probability


SAMPLING_RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
    "repetition_penalty": (0.01, 100),
}
"""Of the numbers of `SamplingParams` that scale logits, as far as floats of 32 bits go along: beyond, each
is infinite or nothing."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a text must look like.

    `source` is the text of a JSON Schema ("json"), a regex that the whole text matches, a Lark grammar in
    llguidance's dialect, a JSON array of strings ("choice"), or a structural tag ("tags"; see
    `engine.structured.structural_tags`).
    """

    kind: Literal["text", "json", "regex", "lark", "choice", "tags"]
    source: str = ""


@dataclass(frozen=True, slots=True)
class ToolShape:
    """A tool the model may be made to call: its name and the JSON Schema text of its arguments.

    `input`: the only argument is named `input`, and is a text of this shape ("regex" or "lark").
    """

    name: str
    parameters: str
    input: Shape | None = None


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the decoder enforces: calls of `tools`, an answer of a shape, or, with both, what the model
    chooses.

    An answer of kind "text" may also stand before calls; any other is all there is.
    """

    tools: tuple[ToolShape, ...] = ()
    max_calls: int | None = None  # None: one or more
    answer: Shape | None = None


@dataclass(frozen=True, slots=True)
class ReaderParams:
    """How generated tokens are read as text: plain, or by the model's dialect."""

    dialect: bool = True  # False: everything is text (completions)
    calls: bool = False  # tools were offered, so call markup means calls; otherwise it is text
    tools: tuple[ToolShape, ...] = ()  # those tools: layouts without types or tags are read by them
    max_calls: int | None = None  # end the generation after this many calls; 0: where one would begin
    starts_in: Start = "text"  # where the prompt leaves the model (`Prompt.starts_in`)
    shaped: bool = False  # text, once begun, is a shape: no call or message may follow, whatever it spells
    special_tokens: bool = False  # everything is text, and special tokens are written out in it


IMAGE_OPTIONS: Mapping[str, type] = {"do_image_splitting": bool, "max_pixels": int, "min_pixels": int}
"""Arguments of image processors that a request may choose, and their types: with them an image is made of
fewer pieces than the checkpoint's own settings would make it, and never of more."""


@dataclass(frozen=True, slots=True)
class Picture:
    """An image in a message.

    png: its pixels, as PNG that was written by whoever asks: a stranger's file is not decoded in this
    process. digest: of the pixels. options: arguments of the model's image processor, by name.
    """

    png: bytes = field(repr=False)
    digest: bytes
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """An image in a prompt: `length` tokens at `offset`, content addressed.

    content_hash: of the pixels and of how they are processed. places: the tokens that features stand in place
    of, counted from `offset`. grid: rows and columns of the features, where positions count them. alone: it
    is processed as the only image of its prompt, where that makes a difference.
    """

    offset: int
    length: int
    content_hash: bytes
    picture: Picture
    places: tuple[int, ...] = field(default=(), repr=False)
    grid: tuple[int, int] | None = None
    alone: bool = False


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation: a prompt, and how to go on from it.

    `prefix` holds the token ids of this generation's durable chunks, oldest first: they are replayed to the
    reader (their chunks come out first, one for each, `replayed=True`) and count as output for penalties,
    limits and the draw index. `prefix_logprobs`: theirs, where they were asked for. `prompt_ids` may be what
    `Prompt` has; nobody changes it.
    """

    id: str
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    reader: ReaderParams = ReaderParams()
    constraint: Constraint | None = None
    prefix: tuple[tuple[int, ...], ...] = ()
    prefix_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    choice: int = 0  # which of n
    generation: int = 0  # which generation of the run
    owner: str = ""  # fairness key and first part of the prefix cache's salt
    cache_salt: str = ""
    weight: float = 1.0  # of its owner, above 0: its share of the tokens, against those of other owners
    priority: int = 0  # lower runs first; one above 0 makes room for those below it while it runs
    adapter: str | None = None  # one of `ModelInfo.adapters`; None: the model as it is
    media: tuple[MediaSpan, ...] = ()
    saved_as: str | None = None  # save its KV under this name when it ends (`Engine.save`)
    saved_until: float | None = None  # unix seconds after which what is saved may go; None: no such time
    deadline: float | None = None  # time.monotonic() seconds; past it the request ends with DeadlineExceeded
    trace_headers: tuple[tuple[str, str], ...] = ()  # `traceparent` and the like, for servers asked for it

    @property
    def flat_prefix(self) -> list[int]:
        """The token ids of `prefix`, one after the other."""
        return [token for chunk in self.prefix for token in chunk]


# ------------------------------------------------------------------------------------------------------------
# Prompts


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt, and where it leaves the model.

    ids: mostly an `array` of C ints, which is four bytes a token, and copied, compared and checked at once
    where a tuple is gone through token by token. Others have it, too, so nobody may change it.
    media: the images in it, in their order.
    """

    ids: Sequence[int]
    starts_in: Start = "text"
    media: tuple[MediaSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class RenderInput:
    """What a chat template is given, in the form Hugging Face templates expect.

    messages: dicts with role and content, and reasoning_content, tool_calls [{id, type: "function", function:
    {name, arguments: str}}], tool_call_id, name where they apply. Content is a text, or, for a model that
    sees, a list of {"type": "text", "text"} and {"type": "image", "image": Picture}, which the processor
    takes with `image_options`. tools: {"type": "function", "function": {...}}. answer: what the answer must
    look like, for templates that tell the model. text_parts: texts are given as lists of parts, {"type":
    "text", "text"}, for templates that read nothing else; None: as the engine thinks best.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    effort: str | None = None  # of reasoning: "none" to "max"; a template that cannot be told is not
    chat_template: str | None = None
    answer: Shape | None = None
    now: float = 0.0  # unix seconds, for templates that print a date
    image_options: Mapping[str, Any] = field(default_factory=dict)
    scope: str | None = (
        None  # whose text it is, so that its tokens are remembered for them; None: they are not
    )
    text_parts: bool | None = None


# ------------------------------------------------------------------------------------------------------------
# What comes out


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's log probability (natural log) and the most likely alternatives, best first."""

    token_id: int
    token: str
    data: bytes  # the token's own bytes, which need not be whole characters
    logprob: float
    top: tuple[tuple[int, str, bytes, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Text:
    """Visible text; `logprobs` are those of the tokens that this text (and text held back before it) came
    from. A `preamble`, said before calls or the answer, is a message of its own."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    preamble: bool = False


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of a reasoning block, without its tags."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of a function begins; its name is known."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArgs:
    """More of the current call's arguments, as JSON text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The current call's arguments are whole (`complete`), or the generation ended inside them."""

    complete: bool = True


@dataclass(frozen=True, slots=True)
class Done:
    """The generation ended: `stop` (end of turn, stop string or token, calls done) or `length` (max_tokens or
    the context is full). `stop` is the stop string or stop token id that ended it, None for the end of
    turn."""

    reason: Literal["stop", "length"]
    stop: str | int | None = None


Delta = Text | Reasoning | CallStart | CallArgs | CallEnd | Done


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds that a request took up to its first token: until it was first in a step, and from then on."""

    queue_s: float
    prefill_s: float


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one engine step (or several, coalesced) produced for one request; `Done` is the last delta of the
    last.

    `token_ids` are exactly the tokens that count as output (a stop string cuts them); `logprobs` align with
    them when asked for. `reasoning_tokens` counts those of `token_ids` inside reasoning blocks, tags
    included. `cached_tokens` (prompt tokens found in the prefix cache or read from disk), `timing` and
    `prompt_logprobs` come with the first chunk.
    """

    token_ids: tuple[int, ...]
    deltas: tuple[Delta, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    reasoning_tokens: int = 0
    cached_tokens: int | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    replayed: bool = False
    timing: Timing | None = field(default=None, compare=False)


# ------------------------------------------------------------------------------------------------------------
# The engine itself


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The checkpoint's generation_config.json, where it says something."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    num_assistant_tokens: int | None = None


EFFORT_VARIABLES = frozenset({"reasoning_effort", "enable_thinking", "thinking", "thinking_budget"})
"""Variables by which chat templates are told whether, and how much, the model is to reason."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a served model is and can do.

    `fingerprint` names weights, tokenizer, template and dialect: a run goes on only behind the same one.
    capabilities: calls (they can be enforced), drafts, draft_model (which makes them), exact_resume, grammar,
    logprobs, token_ids, ...
    adapters: (name, fingerprint) of those that a request may name, each as if the model were another one.
    template_variables: the names that the chat template reads beside what it is always given. cache_block:
    tokens of a block of the prefix cache, which keeps whole ones; 0: no prompt is kept.
    shortened: in words, by what `max_model_len` is less than the model allows, where nobody asked for that.
    modalities: what a prompt may hold: text, image. image_options: what a `Picture` may choose of how it is
    processed. image_pixels: to which larger images are scaled down, where they are by pixels.
    """

    name: str
    max_model_len: int  # tokens, prompt and output together
    vocab_size: int
    fingerprint: str
    eos_token_ids: tuple[int, ...]
    defaults: SamplingDefaults = SamplingDefaults()
    capabilities: frozenset[str] = frozenset()
    dialect: str = "plain"
    modalities: frozenset[str] = frozenset({"text"})
    image_options: frozenset[str] = frozenset()
    image_pixels: int | None = None
    adapters: tuple[tuple[str, str], ...] = ()
    template_variables: frozenset[str] = frozenset()
    cache_block: int = 0
    shortened: str = ""

    @property
    def takes_effort(self) -> bool:
        """Whether the chat template can be told how much the model is to reason."""
        return not EFFORT_VARIABLES.isdisjoint(self.template_variables)

    def num_cache_writes(self, num_tokens: int, num_cached: int) -> int:
        """How many tokens of a prompt of `num_tokens` are in the prefix cache from now on, beside the first
        `num_cached`, which it had. The rest is no whole block."""
        if not self.cache_block:
            return 0
        # The last token of a prompt is always computed, so a later one finds the blocks before it.
        return max(0, (num_tokens - 1) // self.cache_block * self.cache_block - num_cached)


TierState = Literal["on", "off", "full", "slow", "failed", "foreign"]
"""Of saved KV on disk. off: by the settings. full: the disk takes no more, and what is there is still read.
slow, failed (the disk has errors): it is left alone, and tried again in a minute. foreign: the folder is that
of another database."""


@dataclass(frozen=True, slots=True)
class TierStats:
    """What of the KV cache is on disk, and what that was good for; totals grow, the rest are gauges.

    state: see `TierState`; where it is another than "on", `why` says more. disk_bytes_limit: 0 where this
    engine looks after no folder. restores_refused: prefixes on disk that were computed instead, by cause:
    `slower` (than computing), `late` (the disk took too long), `damaged`, `busy`, `room` (in the pool),
    `state`. evictions: blocks, by cause: `quota`, `owner` (more than its share), `expired`, `forgotten`,
    `damaged`. saves_refused: ends of which nothing was saved, by cause: `busy`, `small` (computed in a
    moment), `slower` (to read than to compute), `room` (on the disk), `state`.
    """

    state: TierState = "off"
    why: str = ""
    disk_bytes: int = 0
    disk_bytes_limit: int = 0
    files: int = 0
    names: int = 0
    blocks: int = 0
    loading: int = 0  # sequences that wait for the disk
    saving: int = 0  # ends whose blocks are on their way to it
    saved_blocks_total: int = 0
    saved_bytes_total: int = 0
    save_seconds_total: float = 0.0
    restored_tokens_total: int = 0
    restored_bytes_total: int = 0
    restore_seconds_total: float = 0.0  # of reading
    saved_seconds_total: float = 0.0  # that computing would have taken longer, by the measured rates
    restores_refused: Mapping[str, int] = field(default_factory=dict)
    saves_refused: Mapping[str, int] = field(default_factory=dict)
    evictions: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine's counters; totals grow, the rest are gauges.

    hit_tokens: of `prefix_hits_total` those that the pool had, and those that were read from disk; both grow.
    """

    waiting: int = 0
    running: int = 0
    paused: int = 0  # of those that wait: they decoded, and go on once their readers have taken tokens
    prefilling: int = 0  # sequences whose prompts the latest step computed
    decoding: int = 0  # sequences that decoded in the latest step
    unavailable: int = 0  # 1 while no server can generate (`EngineUnavailable`)
    kv_bytes: int = 0  # size of the KV cache
    kv_blocks: int = 0
    kv_blocks_used: int = 0  # referenced by running requests
    kv_blocks_cached: int = 0  # unreferenced, kept for prefix hits
    kv_evictions_total: int = 0  # cached blocks that were given to other tokens
    prefix_queries_total: int = 0  # prompt tokens looked up
    prefix_hits_total: int = 0  # prompt tokens found
    prompt_tokens_total: int = 0
    output_tokens_total: int = 0
    preemptions_total: int = 0
    steps_total: int = 0
    drafts_total: int = 0  # draft tokens that were checked
    drafts_accepted_total: int = 0  # of those, the ones that were right
    hit_tokens: Mapping[str, int] = field(default_factory=lambda: {"pool": 0, "disk": 0})
    tier: TierStats = TierStats()


# ------------------------------------------------------------------------------------------------------------
# Errors


class EngineError(Exception):
    """The root:

    EngineError
    +- RequestError                the caller's fault, this request only
    |  +- PromptTooLong            more tokens than the context holds
    |  +- ConstraintError          a schema or grammar that cannot be honoured
    |  +- RenderError              the chat template refused the messages
    +- QueueFull                   too many waiting; try again
    +- EngineUnavailable           nobody can generate now; try again, the engine lives
    |  +- ModelChanged             another model is there than the one that was asked
    +- DeadlineExceeded            the request's deadline passed
    +- RequestFailed               this request failed inside the engine; others go on
    +- EngineDead                  the engine stopped for all
    +- LoadError                   the model cannot be loaded; says why in one line
    """


class RequestError(EngineError):
    """The request cannot be honoured; the message says why. `param`: the field of it that cannot, if one is
    to blame.
    """

    def __init__(self, *message: object, param: str | None = None) -> None:
        super().__init__(*message)
        self.param = param


class PromptTooLong(RequestError):
    """`num_tokens` prompt tokens, or at least so many, leave no room in a context of `limit`."""

    def __init__(self, num_tokens: int, limit: int, at_least: bool = False) -> None:
        super().__init__(num_tokens, limit)
        self.num_tokens, self.limit, self.at_least = num_tokens, limit, at_least

    @property
    def count(self) -> str:
        """The number of tokens, in words."""
        return f"at least {self.num_tokens}" if self.at_least else str(self.num_tokens)

    def __str__(self) -> str:
        return f"the prompt has {self.count} tokens; the context holds {self.limit}"


class ConstraintError(RequestError):
    """A schema or grammar cannot be honoured.

    reason: why. tool: the name of the tool that it belongs to, if any. place: the keys and indexes that lead
    from a JSON Schema to the part of it that is meant; None where it is not known to be a part of one.
    """

    def __init__(
        self, reason: str, *, tool: str | None = None, place: Sequence[str | int] | None = None
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.tool = tool
        self.place = None if place is None else tuple(place)

    def __str__(self) -> str:
        return f"at {path_of(self.place)}: {self.reason}" if self.place else self.reason

    def of_tool(self, name: str | None) -> ConstraintError:
        """The same error, of the tool of this name."""
        return ConstraintError(self.reason, tool=name, place=self.place)


def path_of(place: Iterable[str | int], start: str = "") -> str:
    """Keys and indexes as people write them, behind what they start from: `properties.list.items[0]`."""
    path = start
    for step in place:
        path += f"[{step}]" if isinstance(step, int) else f"{'.' if path else ''}{step[:64]}"
    return path


class RenderError(RequestError):
    """The chat template refused the messages."""


class QueueFull(EngineError):
    """As many requests, or tokens of prompts, wait as may. `retry_after_s`: the wait to be expected."""

    def __init__(self, message: str = "too many requests wait already", *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineUnavailable(EngineError):
    """What the engine stands on is away for now; it serves again when that has come back."""


class ModelChanged(EngineUnavailable):
    """The engine came back with another model than the one that was asked. model: what clients call it."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.model = model


class DeadlineExceeded(EngineError):
    """The request's deadline passed before it ended."""


class RequestFailed(EngineError):
    """This request failed inside the engine."""


class EngineDead(EngineError):
    """The engine stopped; nothing runs until the process is started again."""


class LoadError(EngineError):
    """The checkpoint cannot be loaded. model: the name of it that clients know, where there is one."""

    model: str | None = None


# ------------------------------------------------------------------------------------------------------------
# Words for numbers

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def readable_size(num_bytes: float) -> str:
    """A number of bytes in the unit that fits it, with a digit behind the point where that says something:
    `812 B`, `3.1 MiB`, `10 GiB`."""
    size, unit = float(num_bytes), 0
    while size >= 1023.95 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.1f}".removesuffix(".0") + f" {_UNITS[unit]}"
