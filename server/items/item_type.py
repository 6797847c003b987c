"""What an item type is: one row that holds everything the server knows of it.

A row says how a client sends the item, how a prompt puts it into words, which events bring it, how the model
writes it where it is a call, and who carries that call out. The rest of the server asks the rows and names no
type of call, so that a new tool is one module here, one under `tools`, and their tests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from server.items.private_half import Private
from server.items.sources import Sources
from server.items.transcript import Transcript
from server.mcp_servers import Approvals, Reach
from server.shapes import Shape
from tools import Listing as ServerListing
from tools import Registry, ToolResult, ToolSpec

Item = dict[str, Any]
Tool = dict[str, Any]
Words = Callable[[Item, Transcript], None]
"""Writes an item into a transcript."""


class ArgumentReader(Protocol):
    """Reads the arguments of a call while the model writes them."""

    def feed(self, text: str) -> str:
        """Takes more of the arguments' JSON; returns more of the item's field."""


@dataclass(frozen=True, slots=True)
class Route:
    """Where the calls of one function lead: to items of a type, which say these fields from the start.

    What follows makes no other route. asks: whether the client is asked first. server: which server the
    function is of, where there are several.
    """

    type: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    asks: bool = field(default=False, compare=False)
    server: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Stream:
    """How the arguments of a call are shown while the model writes them.

    field: the item's field that they become. event: what the names of their events begin with; `.delta` and
    `.done` follow. reader: makes what reads the field out of the arguments, where they are not the field
    itself. named: whether the `.done` event says the function's name.
    """

    field: str
    event: str
    reader: Callable[[], ArgumentReader] | None = None
    named: bool = False


@dataclass(frozen=True, slots=True)
class Whole:
    """How a call is shown once the model has written all of it, so that no client carries out a half of one.

    read: the item's fields, for the arguments; None where they are not those of such a call. added: those of
    its fields that are others when the item is added. events: what is shown of the item between its addition
    and its end, as events without their output index. fold: writes what such an event says into an item.
    broken: the fields of a call that cannot be read and that this server would have carried out.
    """

    read: Callable[[str], Item | None]
    added: Callable[[Item], Mapping[str, Any]] = lambda _fields: {}
    events: Callable[[Item], Sequence[Mapping[str, Any]]] = lambda _item: ()
    fold: Callable[[Item, Mapping[str, Any]], None] = lambda _item, _event: None
    broken: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Listing:
    """An item that shows, once in a conversation, the functions that a route leads from.

    type: the item's. opened: its fields when it is added, for the route. filled: those that have changed when
    it is done, for the functions. events: the event types between the two, the last of which says that they
    are known. shows: whether an item is the listing of a route, and is done.
    """

    type: str
    opened: Callable[[Route], Item]
    filled: Callable[[Sequence[Tool]], Item]
    events: tuple[str, ...]
    shows: Callable[[Item, Route], bool]


def _unseen(_event: str, _fields: Mapping[str, Any]) -> None:
    """What is shown of a call that nobody sees."""


@dataclass(frozen=True, slots=True)
class Deferred:
    """A function that the model is not offered before a search has loaded it.

    function: flat, under the name by which it would be shown. route: where its calls lead. tool: how the
    output of a search says it: as a tool of the request that has no other function. group, about: name and
    description of what it belongs to: a namespace, an MCP server, or nothing but itself. elsewhere: whether
    it is a tool of another server.
    """

    function: Tool
    route: Route
    tool: Tool
    group: str
    about: str | None
    elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class Scene:
    """Where a call is made: the tools of its request, its instructions, the conversation so far, and the
    functions that a search may load. owner: whose run it is. key_id: of its API key. at: when that began, in
    microseconds. show: makes an event of the call while it is carried out, for the event's type and its
    fields besides those that every event of an item has."""

    tools: Sequence[Tool]
    instructions: str | None
    items: Sequence[Item]
    deferred: Sequence[Deferred] = ()
    owner: str = ""
    key_id: str | None = None
    at: int = 0
    show: Callable[[str, Mapping[str, Any]], None] = _unseen


@dataclass(frozen=True, slots=True)
class Approval:
    """How a client is asked before this server carries a call out.

    request: the type of the item that asks, which takes the call's place. asked: its fields, for the
    function's name and the whole arguments. made: the fields of the call that is made once it was approved,
    for that item. source: the field of a call that names the item which asked for it. keeps: the private half
    of the item that asks, for the route of the call. server: the server that such a call is to be made at,
    for the item; None where that is not known.
    """

    request: str
    asked: Callable[[str, str], Item]
    made: Callable[[Item], Item]
    source: str
    keeps: Callable[[Route], Private]
    server: Callable[[Item], str | None]


@dataclass(frozen=True, slots=True)
class Execution:
    """How this server carries a call out, between two generations.

    running: the item's status from the moment when the call is whole until its outcome. run: carries a call
    out; never raises. finish: writes the outcome into the item, its status included, and returns the type of
    the event that tells of it, None where there is none. repeatable: whether a call may be made again after a
    crash in the middle of it; the outcome of one that may not is told to be unknown. starts: the types of the
    events that a whole call begins its execution with. keeps: the private half of an item whose outcome is
    written, with what the result keeps among it. broken: the status of a call that is not whole, or of no
    tool. listing: what is shown of the tool before the first generation. elsewhere: where tools of such calls
    may be those of other servers. approval: how a client is asked for calls that need its approval. counts:
    for the result of a call without an error, the kind of usage that it counts as, and the model of that;
    None where it counts as none.
    follows: the item that holds the outcome, where the call's own does not: its type and fields; None for
    none. tells: how that is shown: those of its fields that are others when it is added, and the events until
    its end, as their types and their fields besides those of its place. uncertain: what the model is told of
    a call that a crash cut short and that may not be made again, where there is more to be said than that.
    side_by_side: whether such calls of one turn are made at the same time; those of all other types are made
    one after another, because they may build upon each other, as two cells of one container do.
    """

    running: str
    run: Callable[[Item, Registry, Scene], Awaitable[ToolResult]]
    finish: Callable[[Item, ToolResult], str | None]
    repeatable: Callable[[Item, Registry], bool]
    starts: tuple[str, ...] = ()
    keeps: Callable[[Item, ToolResult], Private] | None = None
    broken: str = "incomplete"
    listing: Listing | None = None
    elsewhere: Elsewhere | None = None
    approval: Approval | None = None
    counts: Callable[[ToolResult], tuple[str, str] | None] | None = None
    follows: Callable[[Item, ToolResult], Item | None] | None = None
    tells: Callable[[Item], tuple[Mapping[str, Any], Sequence[tuple[str, Mapping[str, Any]]]]] = (
        lambda _item: ({}, ())
    )
    uncertain: str | None = None
    side_by_side: bool = False


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Tools that another server has, which are known once a listing among the items says them.

    meant: whether a tool of a request stands for another server. offers: the tools of a listing that such a
    tool lets in, each with its route, among whose fields is its own `name`; a function is shown to the model
    under the name that is given there, unless that is taken. listed: those fields of the listing that have
    changed when it is done, for what the server answered. failed: the type of the last event of a listing
    that failed, in place of the listing's. unknown: what a tool asks for by names that a listing does not
    have: the member of the tool that does, and why it cannot, as a sentence; None where it does not. holds:
    whether a call is one of such tools. run: carries it out; never raises. repeatable: as in `Execution`.
    """

    meant: Callable[[Tool], bool]
    offers: Callable[[Tool, Item, Approvals], Sequence[tuple[Tool, Route]]]
    listed: Callable[[ServerListing], Item]
    failed: str
    unknown: Callable[[Tool, Item], tuple[str, str] | None]
    holds: Callable[[Item, Reach], bool]
    run: Callable[[Item, Reach], Awaitable[ToolResult]]
    repeatable: Callable[[Item, Reach], bool]


def _itself(tool: Tool, _registry: Registry, _path: str) -> Sequence[Tool]:
    return [tool]


def _always(_tool: Tool) -> bool:
    return True


def _never(_tool: Tool) -> bool:
    return False


def _lacks_nothing(_tool: Tool, _registry: Registry) -> None:
    return None


def _no_stores(_tool: Tool) -> Sequence[str]:
    return ()


def _nothing(_tool: Tool) -> Mapping[str, Any]:
    return {}


def _nowhere(_tool: Tool) -> str | None:
    return None


def _unasked(_tool: Tool, _name: str, _approvals: Approvals) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Call:
    """How a call that the model writes becomes an item.

    opened: the fields of a new item, for the function's name, a fresh call id, and the arguments as far as
    they are known when the item is added: none where they are streamed, else all, whole or not. stream: how
    they are shown as they come; None where the item is added once the model has written them. whole: what is
    then read of them besides; a call that it cannot read becomes the function call that the model wrote, one
    that is not whole. opens: the types of the events that follow the item's addition. offers: the flat
    functions that a tool of the request gives the model, a path being its own in messages; raises ApiError
    400. takes: whether such a tool is offered at all, or a tool of other servers that is only echoed. lacks:
    why a server with these tools of its own cannot run such a tool, which is then not offered; None where it
    can. declines: whether its client agrees to that beforehand. stores: the ids of the vector stores that
    such a tool searches. changes_images: whether calls of such a tool may work on the images of the
    conversation, which a model that reads text is then told the numbers of. refers: writes into a new item
    what its arguments refer to among the sources of the conversation.
    fields: what every call of a tool's functions says from the start. server: which server the functions of a
    tool are of. asks: whether calls of a tool's function of this name need the client's approval. searches:
    of calls that load deferred functions, their function, which tells of these. execution: None where the
    client carries the call out.
    """

    opened: Callable[[str, str, str], Item]
    stream: Stream | None = None
    whole: Whole | None = None
    opens: tuple[str, ...] = ()
    offers: Callable[[Tool, Registry, str], Sequence[Tool]] = _itself
    takes: Callable[[Tool], bool] = _always
    lacks: Callable[[Tool, Registry], str | None] = _lacks_nothing
    declines: Callable[[Tool], bool] = _never
    stores: Callable[[Tool], Sequence[str]] = _no_stores
    changes_images: Callable[[Tool], bool] = _never
    refers: Callable[[Item, str, Sources], None] | None = None
    fields: Callable[[Tool], Mapping[str, Any]] = _nothing
    server: Callable[[Tool], str | None] = _nowhere
    asks: Callable[[Tool, str, Approvals], bool] = _unasked
    searches: Callable[[Tool, Sequence[Deferred]], Tool] | None = None
    execution: Execution | None = None

    @property
    def last_event(self) -> str | None:
        """The type of the last event before a whole call is carried out."""
        streamed = () if self.stream is None else (f"{self.stream.event}.done",)
        starts = () if self.execution is None else self.execution.starts
        return next(reversed((*self.opens, *streamed, *starts)), None)


@dataclass(frozen=True, slots=True)
class ItemType:
    """One item type of the API.

    type: its name on the wire. prefix: of the ids that this server gives. shape: reads one that a client
    sends; raises ApiError 400. say: writes it into a transcript; where it is None a prompt has no words for
    it, and whatever brings one is refused. events: the event types of its own, each with the fields that it
    must have besides `type` and `sequence_number`. order: the grammar of all its events (`schema.events`)
    between its addition and its end, without their `response.`.

    needs_id: whether only the client can know its id. doubled: a key that the official schema requires
    without declaring it, and the key that it repeats. told_privately: a prompt words its private half, so
    that one without it is left out of prompts. keeps: such an item has a private half from its beginning, and
    not by an outcome (`Execution.keeps`). includes: by the value of `include` that asks for them, what writes
    fields into an item that only its private half has. known_by_id: a client may send back as little of it as
    its id. heavy: fields that no prompt words, and that are too large to be held in memory with what a turn
    stands on.

    For calls and their outputs. tools: `tools[].type` -> the shape of such a tool. call: how the model writes
    one. instead: where no model here can call one, what a client can do in its place, as a sentence.
    without_secrets: parts such a tool, as it came, from the credentials in it: the tool without them, which
    is all of it that is kept and echoed, and they, by the members that had them.
    answered_by: the type of the items that a client answers it with. answers: the type of the items that it
    is such an answer of. of_text: the fields of such an answer for a text, where it does not have that as its
    `output` and nothing else. key: the field by which an item and its answer name each other. approves: of an
    answer to a request for an approval, whether it lets the call be made. ours: of a type whose calls either
    side may carry out, whether this server does so with such a call, or made such an output. loads: whether
    an item's `tools` can be called from there on. adds: whether an item's `tools` are what those of a request
    are, from there on. configures: whether an item's fields are settings of responses from there on.
    """

    type: str
    prefix: str
    shape: Shape
    say: Words | None = None
    events: Mapping[str, str] = field(default_factory=dict)
    order: str = ""
    needs_id: bool = False
    doubled: tuple[str, str] | None = None
    tools: Mapping[str, Shape] = field(default_factory=dict)
    call: Call | None = None
    answered_by: str | None = None
    answers: str | None = None
    of_text: Callable[[str], Item] | None = None
    key: str = "call_id"
    approves: Callable[[Item], bool] | None = None
    without_secrets: Callable[[Tool], tuple[Tool, Item]] | None = None
    instead: str = ""
    told_privately: bool = False
    keeps: bool = False
    ours: Callable[[Item], bool] | None = None
    loads: bool = False
    adds: bool = False
    configures: bool = False
    includes: Mapping[str, Callable[[Item, Private], None]] = field(default_factory=dict)
    known_by_id: bool = False
    heavy: tuple[str, ...] = ()

    @property
    def execution(self) -> Execution | None:
        """How this server carries such an item out, where it is a call of its own tools."""
        return None if self.call is None else self.call.execution

    @property
    def has_private_half(self) -> bool:
        """Whether the server keeps something of such items that it shows to no client."""
        return self.keeps or (self.execution is not None and self.execution.keeps is not None)


def unspoken(_item: Item, _transcript: Transcript) -> None:
    """The words of an item that needs none, because a prompt tells in another way what it says."""


def with_call_id(_name: str, call_id: str, _arguments: str) -> Item:
    """The fields of a new call of which nothing is known but its id."""
    return {"call_id": call_id}


def function_of(spec: ToolSpec) -> Tool:
    """A tool of this server as a flat function."""
    return flat_function(spec.name, spec.description, spec.parameters, strict=spec.strict)


def flat_function(name: str, description: str, parameters: Mapping[str, Any], *, strict: bool = True) -> Tool:
    """A function in its flat form. One that is strict has its name and its arguments under the grammar from
    the moment when a call begins."""
    return {
        "type": "function",
        "name": name,
        "description": description,
        "parameters": dict(parameters),
        "strict": strict,
    }
