"""Writes a constraint as a grammar in Lark, in the format of a model's dialect.

The grammar says where an answer, reasoning and calls may stand. The syntax is llguidance's
(github.com/guidance-ai/llguidance, docs/syntax.md).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from llguidance.gbnf_to_lark import gbnf_to_lark

from engine.dialects import CallMarks, Dialect
from engine.parsing import Shapes, openings
from engine.structured.call_grammar import ArgumentWriter
from engine.structured.json_documents import document
from engine.structured.json_schema import read_schema, rewrite, weigh
from engine.structured.regexes import ANY, check_fixed, check_pattern, check_repeats, spelled, whole
from engine.structured.structural_tags import TagWriter
from engine.types import Constraint, ConstraintError, ReaderParams, Shape, ToolShape

MAX_CLIENT = 1 << 15  # characters of a client's own grammar: some thousand rules, a fifth of a second


class Input(NamedTuple):
    """The input of a custom tool that has a grammar: what stands before it, and where it ends: with the JSON
    string that spells it, or, as it is, at `pad tag`. No Lark grammar could say either."""

    before: str
    grammar: str
    pad: str = ""
    tag: str = ""


@dataclass(frozen=True, slots=True)
class Source:
    """A grammar for llguidance, and the inputs within it."""

    text: str
    inputs: tuple[Input, ...] = ()

    def written(self) -> str:
        """It as JSON, for another process."""
        return json.dumps([self.text, self.inputs])

    @classmethod
    def read(cls, written: str) -> Source:
        """What `written` wrote."""
        text, inputs = json.loads(written)
        return cls(text, tuple(Input(*each) for each in inputs))


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
        if tools and marks is None:
            raise ConstraintError(
                f"models of the {self._dialect.name!r} dialect cannot be made to call tools"
            )
        body, grammars, inputs = "", [], []
        if tools:
            assert marks is not None
            arguments = ArgumentWriter(marks, self._spelled, self._token_id, Shapes(reader.tools))
            opening, calls, close = self._calls(marks, arguments, tools, constraint.max_calls, rules)
            inputs = [self._input(marks, arguments, tool) for tool in tools if tool.input is not None]
            body = calls if marks.bare else f"{opening} {calls} {close}"
            if answer is not None and answer.kind == "text":
                body = self._free(reader, body, f"{calls} {close}", rules)
        if answer is not None and not (answer.kind == "text" and tools):
            said = "answer" if not reader.dialect else f"{self._answer_head()} answer"
            body = f"( {said} | {body} )" if body else said
            grammars = self._answer(answer, rules)
        thought = self._thought(reader, rules) if reader.dialect else ""
        lark = "\n".join([f"start: {thought}{body}", *rules]) + "\n"
        parts = [{"name": "whole", "lark_grammar": lark}, *grammars]
        return Source(json.dumps({"grammars": parts}), tuple(inputs))

    # -- an answer -------------------------------------------------------------------------------------------

    def _answer_head(self) -> str:
        """What opens the text of an answer in a dialect whose turns are rows of messages."""
        channels = self._dialect.channels
        return "" if channels is None else self._spelled(f"{channels.channel}final{channels.message}")

    def _answer(self, shape: Shape, rules: list[str]) -> list[dict[str, str]]:
        """Adds the rule of an answer; returns the grammars that it refers to."""
        if shape.kind == "json":
            schema = rewrite(read_schema(shape.source))
            rules.append(f"answer: {document(schema, schema, 'answer', rules)}")
        elif shape.kind == "choice":
            choices = json.loads(shape.source)
            for choice in choices:
                check_fixed(choice)
            rules.append("answer: " + " | ".join(map(_quoted, choices)))
        else:
            rules.append("answer: @client")
            if shape.kind == "tags":
                tags = TagWriter.read(shape.source, self._spelled, lambda *own: client_grammar(Shape(*own)))
                return [{"name": "client", "lark_grammar": "\n".join(tags.rules) + "\n"}, *tags.grammars]
            return [{"name": "client", "lark_grammar": client_grammar(shape)}]
        return []

    def _free(self, reader: ReaderParams, calls: str, opened: str, rules: list[str]) -> str:
        """Free text, or calls, or text and then calls (`opened`, without their opening tag).

        The text spells nothing that opens a call, so that grammar and parser agree where one begins. Models
        like to end with a line break after their last call.
        """
        marks = self._dialect.calls
        assert marks is not None
        found = openings(self._dialect.layouts, Shapes(reader.tools).names)
        fronts = "".join(re.escape(each.string) for each in found if not each.anywhere)
        within = [each.string for each in found if each.anywhere]
        first = f"/\\s*[^\\s{fronts}]{ANY}/" if fronts else "/(.|\\n)+/"
        rules += ["TAIL: /\\s{1,4}/", f"TEXT: {first}{_without(within)}"]
        if not marks.open:
            return f"( {calls} TAIL? | TEXT )?"
        if self._token_id(marks.open) is not None:
            head = f"TEXT? {self._spelled(marks.open)}"
        else:
            # The opening is read as the end of the text.
            others = [each for each in within if each != marks.open]
            rules += [f"OPENED: /{ANY}{spelled(marks.open)}/{_without(others)}", "head[lazy]: OPENED"]
            head = "head"
        bare = f"{calls} TAIL? | " if marks.bare else ""
        return f"( {bare}{head} {opened} TAIL? | TEXT )?"

    # -- a thought -------------------------------------------------------------------------------------------

    def _thought(self, reader: ReaderParams, rules: list[str]) -> str:
        """What may stand before everything else: the rest of a reasoning block, or one that the model opens.

        The block's text may not spell a tag that ends it, so that grammar and parser agree where it does.
        """
        marks = self._dialect.reasoning
        if marks is None or reader.starts_in == "answer":
            return ""
        ends, after = [*marks.ends, *self._dialect.interrupts], self._spelled(marks.after)
        if self._token_id(marks.close) is None:
            unwanted = _without(ends)
            rules += [f"CLOSED: /{ANY}{spelled(marks.close)}/{unwanted}", "until_close[lazy]: CLOSED"]
            rules.append(f"thought: until_close {after}")
        else:
            rules.append(f"THOUGHT: /{ANY}/{_without([marks.close, *ends])}")
            rules.append(f"thought: THOUGHT {self._spelled(marks.close)} {after}")
        if reader.starts_in == "reasoning":
            return "thought "
        rules.append(f"block: {self._spelled(marks.open)} thought")
        return "block? "

    # -- calls -----------------------------------------------------------------------------------------------

    def _calls(
        self,
        marks: CallMarks,
        writer: ArgumentWriter,
        tools: tuple[ToolShape, ...],
        max_calls: int | None,
        rules: list[str],
    ) -> tuple[str, str, str]:
        """The tag in front of all calls, the calls, and the tag after them."""
        weigh([read_schema(tool.parameters) for tool in tools if len(tools) > 1])
        rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
        for index, tool in enumerate(tools):
            before = self._spelled(_before(marks, tool.name))
            rules += [
                f"call_{index}: {before} arguments_{index} {self._spelled(marks.end)}",
                f"arguments_{index}: {_arguments(marks, writer, tool, f'arguments_{index}', rules)}",
            ]
        rules += writer.rules
        more = "*" if max_calls is None else f"{{0,{max_calls - 1}}}"
        opening, close, separator = map(self._spelled, (marks.open, marks.close, marks.separator))
        if marks.many:
            repeated = "" if max_calls == 1 else f" ({separator} call){more}"
            front, back = self._spelled(marks.front), self._spelled(marks.back)
            return opening, f"{front} call{repeated} {back}", close
        again = "" if marks.bare else opening
        repeated = "" if max_calls == 1 else f" ({close} {separator} {again} call){more}"
        return opening, f"call{repeated}", close

    def _input(self, marks: CallMarks, writer: ArgumentWriter, tool: ToolShape) -> Input:
        assert tool.input is not None
        before, grammar = _before(marks, tool.name), client_grammar(tool.input)
        if marks.kind in ("tags", "keyed"):
            pad, close = "", marks.quote
            if marks.parameters is not None:
                pad, close = marks.parameters.pad, marks.parameters.close
            return Input(before + writer.before("input") + writer.front(text=True), grammar, pad, close)
        key = writer.before("input") if marks.kind == "python" else '{"input": '
        return Input(f'{before}{key}"', grammar)

    def _spelled(self, text: str) -> str:
        """A fixed text: tags as their own tokens where the tokenizer has them (as encoding a rendered prompt
        would), the rest as it stands."""
        pieces, at = [], 0
        for tag in self._tags.finditer(text):
            pieces += [_quoted(text[at : tag.start()]), f"<[{self._token_id(tag[0])}]>"]
            at = tag.end()
        return " ".join(filter(None, [*pieces, _quoted(text[at:])]))


# A string or a comment of Lark's, in which a slash begins nothing; a regex.
_REGEXES = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?P<regex>(?:\\.|[^/\\\n])+)/')


def client_grammar(shape: Shape) -> str:
    """The Lark grammar of a client's own shape."""
    if len(shape.source) > MAX_CLIENT:
        raise ConstraintError(f"the grammar has more than {MAX_CLIENT} characters")
    if shape.kind == "lark":
        check_repeats(shape.source)
        for found in _REGEXES.finditer(shape.source):
            check_pattern(found["regex"] or "")
        return _from_gbnf(shape.source) if "::=" in shape.source else shape.source
    if shape.kind == "regex":
        check_pattern(shape.source)
        return f"start: /{whole(shape.source)}/\n"
    raise ConstraintError(f"a shape of kind {shape.kind!r} has no grammar")


def _from_gbnf(source: str) -> str:
    try:
        return str(gbnf_to_lark(source))
    except RecursionError:
        raise ConstraintError("the grammar is nested too deeply") from None
    except Exception as error:  # the library raises bare Exceptions too
        raise ConstraintError(f"the grammar cannot be read: {str(error)[:200]}") from None


def _before(marks: CallMarks, name: str) -> str:
    named = json.dumps(name, ensure_ascii=False) if marks.quoted else name
    return f"{marks.before_name}{named}{marks.before_arguments}"


def _arguments(marks: CallMarks, writer: ArgumentWriter, tool: ToolShape, name: str, rules: list[str]) -> str:
    """A tool's arguments, in the form of the layout; they are an object, whatever its schema leaves open.
    Adds what they refer to, under names that begin with `name`, to `rules`."""
    try:
        schema = read_schema(tool.parameters)
        kind = schema.get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            raise ConstraintError(f"arguments must have type object, not {kind!r}")
        # Beside a reference to itself no other keyword may stand; what it refers to has the type.
        rewritten = rewrite(schema if "$ref" in schema else {**schema, "type": "object"})
        if marks.kind in ("tags", "python", "keyed"):
            return writer.write(tool, rewritten)
        return document(rewritten, rewritten, name, rules)
    except ConstraintError as error:
        raise error.of_tool(tool.name) from None


def _without(strings: list[str]) -> str:
    """A term of Lark that takes texts out in which one of these stands."""
    return f" & ~/{ANY}({'|'.join(map(spelled, strings))}){ANY}/" if strings else ""


def _quoted(text: str) -> str:
    """A Lark string; nothing for an empty one."""
    return json.dumps(text, ensure_ascii=False) if text else ""
