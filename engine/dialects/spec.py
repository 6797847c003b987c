"""Defines what a row of the table of dialects holds: the marks around reasoning, calls and channels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

CallKind = Literal["object", "named", "tags", "python", "keyed"]


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The tags of a reasoning block, and the line breaks that the template prints around its text.

    A block reads `open head TEXT tail close after`; characters of `strip` are taken off both ends of TEXT and
    off the front of what follows the block. A tag of `ends` ends a block that was left open, without being
    part of it. Closing one that is not open says nothing, nor does opening one twice. `answers` are pairs of
    tags that may stand around the whole text behind the block, and are no text. `also` are further pairs
    (open, close) that the family's models write. `inner` are tags that `open` and `close` are made of, where
    a tokenizer knows only these.
    """

    open: str
    close: str
    head: str = "\n"
    tail: str = "\n"
    after: str = "\n\n"
    strip: str = "\n"
    ends: tuple[str, ...] = ()
    answers: tuple[tuple[str, str], ...] = ()
    also: tuple[tuple[str, str], ...] = ()
    inner: tuple[str, ...] = ()

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Every pair (open, close)."""
        return ((self.open, self.close), *self.also)


@dataclass(frozen=True, slots=True)
class ParameterMarks:
    """How a call of kind "tags" writes one argument: `open KEY key_close gap value_open pad VALUE pad close
    after`.

    Read: white space for `gap` and `after`, KEY in quotes or not. With `strip` one line break at either end
    of VALUE belongs to the layout, whether or not it is written (`pad`). `kinds` stand after KEY: before a
    text, and before a value that is JSON.
    """

    open: str
    key_close: str
    value_open: str
    close: str
    strip: bool
    quoted: bool = False  # KEY is written in quotes
    gap: str = ""
    pad: str = ""
    after: str = "\n"
    kinds: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class CallMarks:
    r"""The layout of calls: `open`, one call or (`many`) several, `close`.

    Kinds of call: "object" is a JSON object with a name and arguments; "named" a name, marks, and the
    arguments as JSON; "tags" a name and each argument between tags of its own; "python" `NAME(key=value)`;
    "keyed" `NAME{key:value}`, a string standing between two tags `quote`.

    Written: the template prints `lead` between text and the first call. One call is `before_name NAME
    before_arguments ARGUMENTS end`, NAME being a JSON string where `quoted`, and ARGUMENTS JSON with the
    separators ", " and ": ", arguments as `parameters` has them one after another, `key=JSON` with ", ", or
    `key:VALUE` with ",".
    With `many` that is `open front CALL separator CALL ... back close`, else `open CALL close separator open
    CALL close ...`. A `bare` layout is written without `open` and `close`.

    Read: more forgiving than written. Any white space and any order of keys; calls of the kinds "object" and
    "python" may stand in brackets; `each_open` and `each_close` stand around each call where a kind needs
    them, and may begin a call without `open`; characters of `slack` after the arguments are dropped.
    """

    open: str = ""  # "" with `bare`: a call may only be bare
    close: str = ""  # "": calls end where the last one's text ends
    kind: CallKind = "object"
    bare: bool = (
        False  # calls may begin without an opening tag, where a turn begins or an offered tool is named
    )
    many: bool = False
    each_open: str = ""
    each_close: str = ""
    lead: str = "\n"
    separator: str = "\n"
    strip: str = "\n"  # dropped after calls
    slack: str = "}"
    front: str = ""
    back: str = ""
    before_name: str = '{"name": '
    before_arguments: str = ', "arguments": '
    end: str = "}"
    quoted: bool = True
    name_key: str = "name"
    arguments_keys: tuple[str, ...] = ("arguments", "parameters")
    function_key: str = "function"  # of an object that holds the two, or of the name itself
    header: str = ""  # "named": regex of what stands between `each_open` and the arguments; NAME is its group
    alias: str = ""  # regex of how a tool's name, its group, is written, too
    inner: tuple[str, ...] = ()  # tags that `header` looks for, or that other tags are made of
    parameters: ParameterMarks | None = None  # "tags"
    quote: str = ""  # "keyed"

    @property
    def tags(self) -> frozenset[str]:
        """Every tag of the layout."""
        found = {self.open, self.close, self.each_open, self.each_close, self.quote, *self.inner}
        if (marks := self.parameters) is not None:
            found |= {marks.open, marks.key_close, marks.value_open, marks.close}
        return frozenset(found - {""})


@dataclass(frozen=True, slots=True)
class ChannelMarks:
    """A turn that is a row of messages, each `start ROLE channel NAME message TEXT` and one of `ends`.

    A message of a channel of `thoughts` is reasoning, one of `preambles` is said before calls or the answer,
    any other is text. One with a recipient (`to=NAME`) that is none of `people` is a call; `prefix` is no
    part of its name.
    """

    start: str
    channel: str
    message: str
    ends: tuple[str, ...]
    thoughts: tuple[str, ...]
    preambles: tuple[str, ...]
    prefix: str
    people: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()  # further tags of a header

    @property
    def tags(self) -> tuple[str, ...]:
        """Every tag."""
        return (self.start, self.channel, self.message, *self.ends, *self.inner)


@dataclass(frozen=True, slots=True)
class History:
    """The form in which a family's templates want what was said before, so that they print it as it was said.

    arguments: of earlier calls; "object" where the template's own `tojson` prints them. call_ids: "" for any
    ids; else their form, in which {name}, {index} (of the call in the conversation) and {digest} (nine
    letters and digits) are replaced. single: the template prints one call, or one text, of a message and no
    more. null_text: the content of a message that has calls and no text is null. told: how calls are written
    into the text for those of the family's templates that print none.
    """

    arguments: Literal["object", "string"] = "object"
    call_ids: str = ""
    single: bool = False
    null_text: bool = False
    told: CallMarks | None = None


@dataclass(frozen=True, slots=True)
class Dialect:
    """One family's row.

    calls: the layout that the family's templates print, and the one that is enforced. also: further layouts
    that its models are known to write. interrupts: what begins calls even in a thought that nobody has
    closed. detect: alternatives, each a tuple of strings that all stand in the family's chat templates. turn:
    what opens a turn in the rendered prompt, "" where unknown.
    """

    name: str
    reasoning: ReasoningMarks | None = None
    calls: CallMarks | None = None
    also: tuple[CallMarks, ...] = ()
    interrupts: tuple[str, ...] = ()
    channels: ChannelMarks | None = None
    detect: tuple[tuple[str, ...], ...] = ()
    turn: str = ""
    history: History = History()

    def starts_in(self, rendered: str) -> Literal["text", "reasoning"]:
        """Where a rendered prompt leaves the model: inside a reasoning block that the template (or a
        prefilled message) has opened, or in text.

        Only the last turn is looked at, so that a user who writes a tag does not change the answer.
        """
        marks = self.reasoning
        if marks is None:
            return "text"
        if rendered.rstrip().endswith(marks.open):
            return "reasoning"
        start = rendered.rfind(self.turn) if self.turn else -1
        if start < 0:
            return "text"
        opened, closed = rendered.rfind(marks.open, start), rendered.rfind(marks.close, start)
        return "reasoning" if opened > closed else "text"

    def has_thought(self, rendered: str) -> bool:
        """Whether a rendered prompt ends after a thought: a template that is told not to think writes one of
        nothing.
        """
        marks = self.reasoning
        if marks is None or not rendered.rstrip().endswith(marks.close):
            return False
        return rendered.rfind(marks.open) > (rendered.rfind(self.turn) if self.turn else -1)

    @property
    def layouts(self) -> tuple[CallMarks, ...]:
        """Every layout of calls that is read, the family's own first."""
        return (self.calls, *self.also) if self.calls is not None else self.also

    @property
    def typed(self) -> bool:
        """Whether how a turn is read depends on the tools that were offered."""
        return any(layout.bare or layout.kind in ("tags", "python", "keyed") for layout in self.layouts)

    @property
    def tags(self) -> frozenset[str]:
        """Every tag that the parser must see, even where the tokenizer calls it special."""
        found: set[str] = set().union(*(layout.tags for layout in self.layouts))
        if (marks := self.reasoning) is not None:
            found |= {*marks.ends, *marks.inner, *(tag for pair in marks.pairs for tag in pair)}
        if (turns := self.channels) is not None:
            found |= set(turns.tags)
        return frozenset(found)

    def thinking_as(self, other: Dialect) -> Dialect:
        """This row with the reasoning marks of another."""
        if self.reasoning == other.reasoning:
            return self
        name = f"{self.name.partition('+')[0]}+{other.name}"
        return replace(self, name=name, reasoning=other.reasoning, turn=self.turn or other.turn)
