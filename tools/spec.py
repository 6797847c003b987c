"""What a tool is: what offers it, what the model is told of it, how it runs, and whether it may run twice."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Exactly one of the two: what the tool said, or why it could not.

    source: what an error comes from: the tool, the protocol by which it is called, or HTTP. code: of an error
    of those two. kept: what is to be kept of the call besides, and shown to nobody, as JSON values.
    uncertain: the call was cut short after it was sent, so that it may have had its effect all the same.
    effects: rows that are to be stored in one transaction with the outcome. settle: told afterwards whether
    they were. fault: of an error, what the log says of it to the operator, in words that hold nothing of
    arguments and outputs; None where the model has only used the tool wrongly, or it is in the log already.
    """

    output: str | None = None
    error: str | None = None
    source: Literal["tool", "protocol", "http"] = "tool"
    code: int | None = None
    kept: Mapping[str, Any] | None = None
    uncertain: bool = False
    effects: tuple[Any, ...] = ()
    settle: Callable[[bool], None] | None = None
    fault: str | None = None


Function = Callable[..., Awaitable[str | ToolResult]]
"""Takes the arguments by name; returns text for the model, or a result that keeps more than a text. Raises
ToolError to tell the model what went wrong."""


class ToolError(Exception):
    """The tool cannot do what it was asked; the message is for the model, which may try again.

    uncertain, fault: as in ToolResult.
    """

    def __init__(self, message: str, *, uncertain: bool = False, fault: str | None = None) -> None:
        super().__init__(message)
        self.uncertain = uncertain
        self.fault = fault


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """One tool.

    parameters: the JSON Schema of its arguments, an object schema. offered_by: the `tools[].type` of the
    requests that offer it. idempotent: after a crash a call that had begun is run again; otherwise the model
    is told that its outcome is unknown. timeout_s: seconds a call may take. strict: the model is held to the
    schema while it writes; otherwise arguments are only checked. run: carries a call out. stops: a call that
    is given up has ended; otherwise it may go on, as a thread does, or the other side of a connection. close:
    ends what it keeps from call to call, such as connections, when the server ends.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    run: Function
    offered_by: str = "mcp"
    idempotent: bool = False
    timeout_s: float = 30.0
    strict: bool = True
    stops: bool = False
    close: Callable[[], Awaitable[None]] | None = None


Registry = Mapping[str, ToolSpec]
"""The tools of an operator's process, by their names."""
