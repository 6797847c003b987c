"""Resolves tools, a tool choice and an answer's format into one offer to the model.

An offer says which tools the prompt shows, which of them may be called, and which schemas the engine must
enforce. A demand of the client (a forced call or an answer's shape) is refused where the model cannot be held
to it; strict tools under a free choice are enforced only where the engine can.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from engine import (
    Constraint,
    ConstraintError,
    ModelInfo,
    ReaderParams,
    SamplingParams,
    Shape,
    ToolShape,
    closed_schema,
    path_of,
)
from server.errors import ApiError
from server.items import Tool, each_tool, is_direct, shown_name
from server.schema import refuse

if TYPE_CHECKING:
    from server.model_registry import ServedModel

NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
INPUT: Mapping[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""How the input of a custom tool stands among the arguments of calls: it is the only one."""
SCHEMAS: Mapping[str, str] = {
    "text.format": "text.format.schema",
    "response_format": "response_format.json_schema.schema",
    "output_config.format": "output_config.format.schema",
    "output_format": "output_format.schema",
}
"""Where the schema of a field stands that is more than its schema."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What the model is offered in one generation, and what is enforced.

    tools: for the template. shapes: of those that may be called. max_calls: the generation ends after; 0
    where tools are there and none may be called: it ends where a call would begin. demanded: the constraint
    is what the client asked for; otherwise it only keeps strict tools strict, where the engine can.
    custom_tool_names: the names of tools that take a text.
    """

    tools: tuple[dict[str, Any], ...] = ()
    shapes: tuple[ToolShape, ...] = ()
    constraint: Constraint | None = None
    max_calls: int | None = None
    demanded: bool = False

    @classmethod
    def of(cls, answer: Shape | None) -> Offer:
        """An answer, and no calls."""
        if answer is None:
            return cls()
        return cls(constraint=Constraint(answer=answer), demanded=True)

    @property
    def answer(self) -> Shape | None:
        """The shape of an answer that is no call, where one was asked for."""
        found = self.constraint.answer if self.constraint is not None else None
        return None if found is not None and found.kind == "text" else found

    def reader(self, starts_in: Any) -> ReaderParams:
        """How the generation is read."""
        # Values are read by the types that the client gave them, whether or not they are enforced.
        shown = (tool["function"] for tool in self.tools)
        typed = tuple(ToolShape(each["name"], json.dumps(each["parameters"])) for each in shown)
        return ReaderParams(
            calls=bool(self.shapes) or self.max_calls == 0,
            tools=typed,
            max_calls=self.max_calls,
            starts_in=starts_in,
            shaped=self.answer is not None,
        )

    def enforced(self, info: ModelInfo) -> Constraint | None:
        """What this model is held to."""
        return self.constraint if self.demanded or _can(info, self.constraint) else None


def offer(
    tools: Sequence[dict[str, Any]],
    tool_choice: Any,
    parallel: bool,
    answer: Shape | None = None,
    *,
    param: str = "tool_choice",
    loose: Container[str] = (),
) -> Offer:
    """Resolve tools (flat form: functions and customs), a tool choice (official forms) and the shape of an
    answer into an offer. loose: the names of tools whose calls may have any object as arguments, even where a
    call is demanded.

    Raises ApiError 400 when the choice names a tool that is not among `tools`, or needs one where there is
    none.
    """
    offered = [tool for tool in tools if tool.get("type") in ("function", "custom") and is_direct(tool)]
    mode, names = _choice(tool_choice, {tool["name"]: tool["type"] for tool in offered}, param)
    allowed = [tool for tool in offered if tool["name"] in names]
    if mode in ("required", "named") and not allowed:
        refuse(param, "tool_choice requires a tool call, but there is no tool to call.")
    if mode == "none" or not allowed:
        # A model that has called tools before may write a call all the same.
        return replace(Offer.of(answer), max_calls=0 if offered else None)
    if mode == "auto":
        # Only what is shown can be called, so an allow-list narrows what is shown.
        shapes = tuple(tool_shape(tool, strict=_strict(tool)) for tool in allowed)
        max_calls = None if parallel else 1
        constraint = None
        if answer is not None or any(map(_strict, allowed)):
            constraint = Constraint(shapes, max_calls, answer or Shape("text"))
        shown = tuple(map(_for_template, allowed))
        return Offer(shown, shapes, constraint, max_calls, demanded=answer is not None)
    max_calls = 1 if mode == "named" or not parallel else None
    shapes = tuple(tool_shape(tool, strict=tool["name"] not in loose) for tool in allowed)
    shown = tuple(map(_for_template, offered))
    return Offer(shown, shapes, Constraint(shapes, max_calls), max_calls, demanded=True)


async def check(offered: Offer, served: ServedModel, tools: Sequence[Tool], param: str, owner: str) -> None:
    """Raise ApiError 400 for an offer that this model cannot be held to. tools: as the request lists them.
    param: the field that has the answer's shape."""
    constraint = offered.enforced(served.info)
    if constraint is None:
        return
    if not _can(served.info, constraint):
        what, where = (
            ("made to call a tool", "tool_choice") if constraint.tools else ("held to a shape", param)
        )
        message = f"The model '{served.name}' cannot be {what}."
        refuse(where, message, "unsupported_parameter")
    try:
        await served.engine.check(constraint, owner)
    except ConstraintError as error:
        raise naming_source(error, constraint, tools, param) from None


def naming_source(
    error: ConstraintError, constraint: Constraint | None, tools: Sequence[Tool], param: str
) -> ApiError:
    """The ApiError 400 for a constraint that cannot be compiled, or followed: it names the field that it came
    from, which is all tools where one of several failed. tools, param: as in `check`."""
    shapes = () if constraint is None else constraint.tools
    answered = constraint is not None and constraint.answer is not None and constraint.answer.kind != "text"
    if shapes and not answered:
        param, name = "tools", error.tool or (shapes[0].name if len(shapes) == 1 else None)
        return _naming(error, name, tools, param)
    is_schema = constraint is not None and constraint.answer is not None and constraint.answer.kind == "json"
    if error.tool is None and error.place is not None and is_schema:
        schema = path_of(error.place, SCHEMAS.get(param, param))
        message = f"Invalid schema at '{schema}': {error.reason}."
        return ApiError(400, message, code="invalid_schema", param=param)
    return _naming(error, error.tool, tools, param)


def _naming(error: ConstraintError, name: str | None, tools: Sequence[Tool], param: str) -> ApiError:
    """The ApiError 400 that names the tool of this name, or `param` where there is none."""
    named = (
        (path, tool) for path, tool, _ in each_tool(tools) if "name" in tool and shown_name(tool) == name
    )
    path, tool = next(named, (None, {}))
    if name is None or path is None:
        return ApiError(400, f"Invalid '{param}': {error}.", code="invalid_schema", param=param)
    part = "format" if tool.get("type") == "custom" else "parameters"
    where = f" at '{path_of(error.place, part)}'" if error.place else ""
    message = f"Invalid schema for tool '{name}'{where}: {error.reason}."
    return ApiError(400, message, code="invalid_schema", param=f"{path}.{part}")


def steady(params: SamplingParams, answer: Shape | None) -> SamplingParams:
    """Sampling as an answer of a shape needs it: what would cut JSON short does not apply to it."""
    if answer is None or answer.kind != "json":
        return params
    return replace(params, stop=(), stop_token_ids=(), min_tokens=0, ignore_eos=False)


def _can(info: ModelInfo, constraint: Constraint | None) -> bool:
    needed = {"grammar", "calls"} if constraint is not None and constraint.tools else {"grammar"}
    return needed <= info.capabilities


# ------------------------------------------------------------------------------------------------------------
# Choices


def _choice(choice: Any, kinds: Mapping[str, str], param: str) -> tuple[str, frozenset[str]]:
    """(mode, allowed names); mode is none, auto, required or named. kinds: name -> type of what is there."""
    everything = frozenset(kinds)
    if choice is None or isinstance(choice, str):
        return choice or "auto", everything
    kind = choice.get("type")
    if kind in ("function", "custom"):
        return "named", frozenset({_known(choice, kinds, param)})
    if kind == "allowed_tools":
        refs = [
            tool for tool in choice.get("tools", ()) if tool.get("type", "function") in ("function", "custom")
        ]
        allowed = frozenset(_known(ref, kinds, f"{param}.tools") for ref in refs)
        return choice.get("mode", "auto"), allowed
    refuse(param, f"This server cannot force a tool of type {kind!r}.", "unsupported_parameter")


def _known(ref: Mapping[str, Any], kinds: Mapping[str, str], param: str) -> str:
    name = shown_name(ref) if isinstance(ref.get("name"), str) else None
    if name is None or kinds.get(name) != ref.get("type", "function"):
        refuse(param, f"Tool choice {name!r} was not found in the 'tools' parameter.")
    return name


# ------------------------------------------------------------------------------------------------------------
# Tools


def custom_tool_names(tools: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """The names of tools whose calls are `custom_tool_call` items."""
    return frozenset(tool["name"] for tool in tools if tool.get("type") == "custom")


def _strict(tool: Mapping[str, Any]) -> bool:
    return tool["type"] == "custom" or bool(tool.get("strict"))


def tool_shape(tool: Mapping[str, Any], *, strict: bool = True) -> ToolShape:
    """How a call of a tool looks; one that is not strict takes any object."""
    if tool["type"] == "function":
        return ToolShape(
            tool["name"], closed_schema(tool.get("parameters") or NO_ARGUMENTS) if strict else "{}"
        )
    form = tool.get("format") or {}
    shape = None
    if form.get("type") == "grammar":
        shape = Shape("lark" if form["syntax"] == "lark" else "regex", form["definition"])
    return ToolShape(tool["name"], json.dumps(INPUT), shape)


def _for_template(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "description": tool.get("description") or ""}
    function["parameters"] = tool.get("parameters") or {"type": "object", "properties": {}}
    form = tool.get("format") or {}
    if tool["type"] == "custom":
        function["parameters"] = INPUT
    if form.get("type") == "grammar":
        told = f"The input matches this {form['syntax']} grammar:\n{form['definition']}"
        function["description"] = f"{function['description']}\n{told}".lstrip()
    return {"type": "function", "function": function}
