"""How each model family marks reasoning and tool calls: a table.

Owns: every tag and every layout of a call. Nothing else in the code knows one: the parser, the grammar and
the renderer are driven by a row. Refuses to know: tokens, templates' inner workings, JSON Schema.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The tags of a reasoning block, and the line breaks that the template prints around its text.

    A block reads `open head TEXT tail close after`; characters of `strip` are taken off both ends of TEXT and
    off the front of what follows the block.
    """

    open: str
    close: str
    head: str = "\n"
    tail: str = "\n"
    after: str = "\n\n"
    strip: str = "\n"


@dataclass(frozen=True, slots=True)
class CallMarks:
    """The layout of a call: `open`, a JSON object with a name and arguments, `close`.

    The template prints `lead` between text and the first call and `separator` between calls. One call is
    printed as `open before_name NAME before_arguments ARGUMENTS end close`, NAME being a JSON string and
    ARGUMENTS JSON with the separators ", " and ": ". Reading is more forgiving than writing: any white space,
    any order of keys.
    """

    open: str = ""  # "" with `bare`: a call may only be bare
    close: str = ""  # "": a call ends where its JSON object ends
    bare: bool = False  # a turn that begins with a JSON object may be a call without an opening tag
    lead: str = "\n"
    separator: str = "\n"
    strip: str = "\n"  # dropped after a call
    before_name: str = '{"name": '
    before_arguments: str = ', "arguments": '
    end: str = "}"
    name_key: str = "name"
    arguments_keys: tuple[str, ...] = ("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class Dialect:
    """One family's row.

    detect: alternatives, each a tuple of strings that all stand in the family's chat templates. arguments:
    the form in which a template is handed the arguments of earlier calls so that it prints the layout above
    ("object": the template's own `tojson` prints them). turn: what opens a turn in the rendered prompt, ""
    where unknown.
    """

    name: str
    reasoning: ReasoningMarks | None = None
    calls: CallMarks | None = None
    detect: tuple[tuple[str, ...], ...] = ()
    arguments: Literal["object", "string"] = "object"
    turn: str = ""

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

    @property
    def tags(self) -> frozenset[str]:
        """Every tag that the parser must see, even where the tokenizer calls it special."""
        found = set()
        if self.reasoning is not None:
            found |= {self.reasoning.open, self.reasoning.close}
        if self.calls is not None:
            found |= {self.calls.open, self.calls.close}
        return frozenset(found - {""})


THINK = ReasoningMarks(open="<think>", close="</think>")

# Order matters: the first row whose detection holds is taken.
DIALECTS: tuple[Dialect, ...] = (
    # Qwen2.5, Qwen3, Hermes 2/3 and the shipped model. The reasoning tags are harmless where a model has
    # none.
    Dialect(
        name="hermes",
        reasoning=THINK,
        calls=CallMarks(open="<tool_call>", close="</tool_call>", before_name='\n{"name": ', end="}\n"),
        # Qwen3-Coder's XML calls stand in <tool_call> too: its templates print "<function=" and no such JSON.
        detect=(("<tool_call>", '"arguments"'), ("<tool_call>", "arguments | tojson")),
        turn="<|im_start|>",
    ),
    # Llama 3.1 to 3.3: the whole turn is one JSON object, sometimes behind <|python_tag|>.
    Dialect(
        name="llama3-json",
        calls=CallMarks(
            open="<|python_tag|>",
            bare=True,
            lead="",
            separator="; ",
            strip="; \n",
            before_arguments=', "parameters": ',
        ),
        detect=(("<|start_header_id|>", '"parameters": '),),
        turn="<|start_header_id|>",
    ),
    # Text only. A chat model whose template knows <think> and no calls gets its reasoning read all the same.
    Dialect(name="think", reasoning=THINK, detect=(("</think>",),), turn="<|im_start|>"),
    Dialect(name="plain"),
)


def dialect_named(name: str) -> Dialect:
    """The row of that name; KeyError with the known names."""
    for row in DIALECTS:
        if row.name == name:
            return row
    raise KeyError(f"no dialect {name!r}; known: {', '.join(row.name for row in DIALECTS)}")


def detect_dialect(chat_template: str | None) -> Dialect:
    """The first row whose strings all stand in the chat template; `plain` where none does (or there is
    none)."""
    template = chat_template or ""
    for row in DIALECTS:
        if any(all(mark in template for mark in marks) for marks in row.detect):
            return row
    return dialect_named("plain")
