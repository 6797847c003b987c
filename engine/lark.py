"""A constraint as a grammar in Lark, in the layout of a model's dialect.

Owns: where an answer, a thought and calls may stand, and how each kind of shape is written. Refuses to know:
masks, llguidance's objects, what a tool does. The syntax is llguidance's (github.com/guidance-ai/llguidance,
docs/syntax.md).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from llguidance.gbnf_to_lark import gbnf_to_lark

from engine.marks import CallMarks, Dialect
from engine.schemas import check_repeats, enforceable, read_schema, weigh
from engine.structural import TagWriter, pattern
from engine.types import Constraint, ConstraintError, ReaderParams, Shape, ToolShape

ANY = "(.|\\n)*"
MAX_CLIENT = 1 << 15  # characters of a client's own grammar: some thousand rules, a fifth of a second


@dataclass(frozen=True, slots=True)
class Source:
    """A grammar for llguidance.

    inputs: (what stands before the input of a custom tool, the grammar of that input), for each tool whose
    input has one. It holds for the text that the JSON string spells, which no Lark grammar could say.
    """

    text: str
    inputs: tuple[tuple[str, str], ...] = ()


class Writer:
    """Writes constraints for one model. token_id: the id of a tag that is a token of its own."""

    def __init__(self, dialect: Dialect, token_id: Callable[[str], int | None]) -> None:
        self._dialect = dialect
        self._token_id = token_id
        tags = sorted(filter(lambda tag: token_id(tag) is not None, dialect.tags), key=len, reverse=True)
        self._tags = re.compile("|".join(map(re.escape, tags)) or r"(?!)")

    def write(self, constraint: Constraint, reader: ReaderParams) -> Source:
        """The grammar of what may follow a prompt that is read like this.

        Raises ConstraintError for what cannot be enforced.
        """
        rules: list[str] = []
        answer, tools, marks = constraint.answer, constraint.tools, self._dialect.calls
        if answer is None and not tools:
            raise ConstraintError("there is no tool to call")
        if constraint.max_calls is not None and constraint.max_calls < 1:
            raise ConstraintError("at least one call must be allowed")
        if tools and (marks is None or not self._dialect.forces_calls):
            raise ConstraintError(
                f"models of the {self._dialect.name!r} dialect cannot be made to call tools"
            )
        body, grammars = "", []
        if tools:
            assert marks is not None
            body = self._calls(marks, tools, constraint.max_calls, rules)
        if answer is not None and answer.kind == "text" and marks is not None and tools:
            body = self._free(marks, body, rules)
        elif answer is not None:
            written = "answer" if not reader.dialect else f"{self._answer_head()} answer"
            body = f"( {written} | {body} )" if body else written
            grammars = self._answer(answer, rules)
        thought = self._thought(reader, rules) if reader.dialect else ""
        lark = "\n".join([f"start: {thought}{body}", *rules]) + "\n"
        inputs = [self._input(marks, tool) for tool in tools if tool.input is not None]
        whole = [{"name": "whole", "lark_grammar": lark}, *grammars]
        return Source(json.dumps({"grammars": whole}), tuple(inputs))

    # -- an answer -------------------------------------------------------------------------------------------

    def _answer_head(self) -> str:
        """What opens the text of an answer in a dialect whose turns are rows of messages."""
        channels = self._dialect.channels
        return "" if channels is None else self._spelled(f"{channels.channel}final{channels.message}")

    def _answer(self, shape: Shape, rules: list[str]) -> list[dict[str, str]]:
        """Adds the rule of an answer; returns the grammars that it refers to."""
        if shape.kind == "json":
            rules.append(f"answer: %json {enforceable(read_schema(shape.source))}")
        elif shape.kind == "choice":
            rules.append("answer: " + " | ".join(map(_quoted, json.loads(shape.source))))
        else:
            rules.append("answer: @client")
            if shape.kind == "tags":
                tags = TagWriter.read(shape.source, self._spelled, lambda *own: client_grammar(Shape(*own)))
                return [{"name": "client", "lark_grammar": "\n".join(tags.rules) + "\n"}, *tags.grammars]
            return [{"name": "client", "lark_grammar": client_grammar(shape)}]
        return []

    def _free(self, marks: CallMarks, calls: str, rules: list[str]) -> str:
        """Free text that may end in calls: it does not spell their opening, so that grammar and parser agree
        where they begin. Models like to end with a line break behind their last call."""
        calls = f"{calls} TAIL?"
        rules.append("TAIL: /\\s{1,4}/")
        first = "/(.|\\n)+/" if not marks.bare else "/\\s*[^\\s{\\[](.|\\n)*/"
        if not marks.open:
            rules.append(f"TEXT: {first}")
            return f"( {calls} | TEXT )?"
        opening = pattern(marks.open)
        rules.append(f"TEXT: {first} & ~/{ANY}{opening}{ANY}/")
        if marks.bare:
            return f"( TEXT? {self._spelled(marks.open)} {calls} | {calls} | TEXT )?"
        if self._token_id(marks.open) is not None:
            return f"TEXT? ( {calls} )?"
        # The opening is read as the end of the text, so the first call is written without one.
        rules.append(f"opened[lazy]: /{ANY}{opening}/")
        return f"( opened {calls.removeprefix(_quoted(marks.open))} | TEXT )?"

    # -- a thought -------------------------------------------------------------------------------------------

    def _thought(self, reader: ReaderParams, rules: list[str]) -> str:
        """What may stand before everything else: the rest of a reasoning block, or one that the model opens.

        The block's text may not spell the closing tag, so that grammar and parser agree where it ends.
        """
        marks = self._dialect.reasoning
        if marks is None:
            return ""
        close, after = pattern(marks.close), self._spelled(marks.after)
        if self._token_id(marks.close) is None:
            rules += [f"thought: until_close {after}", f"until_close[lazy]: /{ANY}{close}/"]
        else:
            rules += [
                f"thought: THOUGHT {self._spelled(marks.close)} {after}",
                f"THOUGHT: /{ANY}/ & ~/{ANY}{close}{ANY}/",
            ]
        if reader.starts_in == "reasoning":
            return "thought "
        rules.append(f"block: {self._spelled(marks.open)} thought")
        return "block? "

    # -- calls -----------------------------------------------------------------------------------------------

    def _calls(
        self, marks: CallMarks, tools: tuple[ToolShape, ...], max_calls: int | None, rules: list[str]
    ) -> str:
        weigh([read_schema(tool.parameters) for tool in tools if len(tools) > 1])
        rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
        for index, tool in enumerate(tools):
            before, arguments = self._spelled(_before(marks, tool.name)), _arguments(tool)
            rules += [
                f"call_{index}: {before} arguments_{index} {self._spelled(marks.end)}",
                f"arguments_{index}: %json {arguments}",
            ]
        more = "*" if max_calls is None else f"{{0,{max_calls - 1}}}"
        opening = "" if marks.bare else self._spelled(marks.open)
        close, separator = self._spelled(marks.close), self._spelled(marks.separator)
        if marks.many:
            repeated = "" if max_calls == 1 else f" ({separator} call){more}"
            front, back = self._spelled(marks.front), self._spelled(marks.back)
            return f"{opening} {front} call{repeated} {back} {close}"
        repeated = "" if max_calls == 1 else f" ({separator} {opening} call {close}){more}"
        return f"{opening} call {close}{repeated}"

    def _input(self, marks: CallMarks | None, tool: ToolShape) -> tuple[str, str]:
        assert marks is not None and tool.input is not None
        return f'{_before(marks, tool.name)}{{"input": "', client_grammar(tool.input)

    def _spelled(self, text: str) -> str:
        """A fixed text: tags as their own tokens where the tokenizer has them (as encoding a rendered prompt
        would), the rest as it stands."""
        pieces, at = [], 0
        for tag in self._tags.finditer(text):
            pieces += [_quoted(text[at : tag.start()]), f"<[{self._token_id(tag[0])}]>"]
            at = tag.end()
        return " ".join(filter(None, [*pieces, _quoted(text[at:])]))


def client_grammar(shape: Shape) -> str:
    """The Lark grammar of a client's own shape."""
    if len(shape.source) > MAX_CLIENT:
        raise ConstraintError(f"the grammar has more than {MAX_CLIENT} characters")
    check_repeats(shape.source)
    if shape.kind == "lark":
        return gbnf_to_lark(shape.source) if "::=" in shape.source else shape.source
    if shape.kind == "regex":
        return f"start: /{_regex(shape.source)}/\n"
    raise ConstraintError(f"a shape of kind {shape.kind!r} has no grammar")


def _before(marks: CallMarks, name: str) -> str:
    named = json.dumps(name, ensure_ascii=False) if marks.quoted else name
    return f"{marks.before_name}{named}{marks.before_arguments}"


def _arguments(tool: ToolShape) -> str:
    """The schema of a tool's arguments; they are an object, whatever it leaves open."""
    try:
        schema = read_schema(tool.parameters)
        kind = schema.get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            raise ConstraintError(f"arguments must have type object, not {kind!r}")
        # Beside a reference to itself no other keyword may stand; what it refers to has the type.
        return enforceable(schema if "$ref" in schema else {**schema, "type": "object"})
    except ConstraintError as error:
        raise ConstraintError(str(error), tool=tool.name) from None


def _quoted(text: str) -> str:
    """A Lark string; nothing for an empty one."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def _regex(pattern: str) -> str:
    """A client's regex, which must match a whole text, between slashes."""
    body = pattern.removeprefix("^")
    if body.endswith("$") and not re.search(r"(?<!\\)(\\\\)*\\\$\Z", body):
        body = body[:-1]
    if (body != pattern or "^" in body) and "|" in body:
        body = f"({body})"
    return re.sub(r"\\.|/|\n", lambda each: _AS_LARK.get(each[0], each[0]), body, flags=re.DOTALL)


_AS_LARK = {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}
