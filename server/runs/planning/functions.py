"""Finds the functions that a model may be offered, among a request's tools, the listings of other servers,
and the tools that searches have loaded."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from engine import Constraint, ConstraintError, Shape
from server.items import (
    Call,
    Deferred,
    Elsewhere,
    Execution,
    Item,
    Route,
    Tool,
    each_tool,
    execution_of,
    is_direct,
    is_loading,
    shown_name,
    speakable,
    type_of_calls,
)
from server.prompting import tool_shape
from server.schema import refuse

if TYPE_CHECKING:
    from server.mcp_servers import Approvals, Reach
    from server.model_registry import ServedModel
    from tools import Registry

MAX_LOADED = 1000
"""Tools that the searches of a conversation may have loaded."""

MAX_CHECKED = 64
"""Tools of other servers that are tried one by one where together they cannot be enforced."""


@dataclass(frozen=True, slots=True)
class Functions:
    """Flat tools that the model may be offered: functions, and customs that take a text.

    routes: name -> where calls of it lead, for each of them. names: of the tools of other servers, and of
    those of this one that are shown under another name than their own, by the server's label and the tool's
    own name. elsewhere: the names of those of other servers. unlisted: routes to servers whose tools are not
    known yet.
    listings: where they are, what lists them. lacking: types of tools of the request that this server cannot
    run. deferred: what a search may load, and has not loaded yet. loading: the items whose tools are loaded.
    unknown: the path of what asks a server for tools that it does not list, and why it cannot, as a sentence.
    loose: the names of tools of other servers whose schemas the engine does not take.
    """

    tools: tuple[Tool, ...]
    routes: Mapping[str, Route]
    names: Mapping[tuple[str, str], str] = field(default_factory=dict)
    elsewhere: frozenset[str] = frozenset()
    unlisted: tuple[Route, ...] = ()
    listings: tuple[Item, ...] = ()
    lacking: frozenset[str] = frozenset()
    deferred: tuple[Deferred, ...] = ()
    loading: tuple[Item, ...] = ()
    unknown: tuple[str, str] | None = None
    loose: frozenset[str] = frozenset()

    def of(self, route: Route) -> list[Tool]:
        """The tools that lead to a route of `local`, under their own names, loaded or not."""
        found = [(tool, self.routes[tool["name"]]) for tool in self.tools]
        found += [(known.function, known.route) for known in self.deferred]
        return [
            {**tool, "name": each.fields.get("name", tool["name"])}
            for tool, each in found
            if _nameless(each) == route
        ]

    @property
    def local(self) -> list[Route]:
        """The routes that lead to no other server, each as often as it has functions, whose names they do
        not say."""
        offered = [route for name, route in self.routes.items() if name not in self.elsewhere]
        offered += [known.route for known in self.deferred if not known.elsewhere]
        return list(map(_nameless, offered))

    def allow(self, call: Item) -> bool:
        """Whether such a call can be made with these tools, or with those of a server that is not listed
        yet."""
        routes = [Route(r.type, {"name": name, **r.fields}) for name, r in self.routes.items()]
        return any(
            route.type == call["type"] and all(call.get(key) == said for key, said in route.fields.items())
            for route in (*routes, *self.unlisted)
        )

    def teach(self, reach: Reach) -> None:
        """Tell what reaches other servers which tools they have."""
        for listing in self.listings:
            reach.learn(listing["server_label"], listing["tools"])


def functions_of(
    tools: Sequence[Tool],
    registry: Registry,
    items: Sequence[Item],
    approvals: Approvals,
    num_added: int = 0,
) -> Functions:
    """All functions and customs of a request's tools, those that this server runs after those of the client,
    then those of tools that items have added, and those that a search has loaded last, so that a prompt
    changes as late as it can.

    items: of the conversation so far, in which other servers' tools are listed, and tools are loaded.
    num_added: how many of the tools, the last ones, items have added. approvals: which calls of MCP tools
    need one. Raises ApiError 400 when two share a name, or when a tool asks for what this server has not.
    """
    found = _Found(registry, approvals, len(tools) - num_added)
    loading = tuple(item for item in items if is_loading(item))
    found.take(tools, [entry for item in loading for entry in item["tools"]])
    found.take_listed(tools, items)
    for item in loading:
        found.load(item["tools"])
        if len(found.loaded) > MAX_LOADED:
            refuse("tools", f"Searches have loaded more than {MAX_LOADED} tools in this conversation.")
    return Functions(
        tuple(found.tools()),
        found.routes,
        found.names,
        frozenset(found.elsewhere),
        tuple(found.unlisted),
        tuple(found.listings),
        frozenset(found.lacking),
        tuple(found.deferred),
        loading,
        found.unknown,
    )


class _Found:
    """The functions of a request, as they are gathered; the fields are those of `Functions`."""

    def __init__(self, registry: Registry, approvals: Approvals, num_given: int) -> None:
        self._registry = registry
        self._approvals = approvals
        self._num_given = num_given  # tools of the request itself, which come first
        self._clients: list[Tool] = []
        self._own: list[Tool] = []
        self._added: list[Tool] = []
        self.loaded: dict[str, Tool] = {}
        self._searches: dict[str, Call] = {}  # by the names of their functions
        self._taken: set[str] = set()  # names, also of what is deferred and no other server's
        self._behind_mcp: set[tuple[str, str]] = set()  # labels and own names of this server's, as MCP tools
        self._all_deferred: list[Deferred] = []  # also those that are loaded
        self._waiting: dict[tuple[str, str], Deferred] = {}  # by the server's label, if any, and name
        self.routes: dict[str, Route] = {}
        self.names: dict[tuple[str, str], str] = {}
        self.elsewhere: set[str] = set()
        self.unlisted: list[Route] = []
        self.listings: list[Item] = []
        self.lacking: set[str] = set()
        self.unknown: tuple[str, str] | None = None

    def take(self, tools: Sequence[Tool], loaded: Sequence[Tool]) -> None:
        """The functions of tools that are no other server's. loaded: what items make callable besides."""
        found = [(each, function) for each in _calls(tools) for function in self._offers(*each[:4])]
        # The tools of an MCP server give way to all others, wherever these stand.
        for (_, tool, _, call, _, _), function in found:
            if call.server(tool) is None:
                self._claim(function["name"])
        self._taken |= {shown_name(inner) for _, inner, _ in each_tool(loaded) if inner["type"] != "mcp"}
        for (_, tool, namespace, call, type_, index), function in found:
            own = function["name"]
            route = self._route(tool, function, call, type_)
            shown, route = (function, route) if route.server is None else self._apart(function, route)
            if tool.get("defer_loading"):
                self._defer(Deferred(shown, route, *_said(tool, namespace, own)), own)
                continue
            self.routes[shown["name"]] = route
            given = self._clients if _execution(route) is None else self._own
            (given if index < self._num_given else self._added).append(shown)
            if call.searches is not None:
                self._searches[own] = call

    def _offers(self, path: str, tool: Tool, _namespace: Tool | None, call: Call) -> Sequence[Tool]:
        if call.lacks(tool, self._registry) is not None:
            self.lacking.add(tool["type"])
            return ()
        return call.offers(tool, self._registry, path)

    def _claim(self, name: str) -> None:
        if name in self._taken:
            refuse("tools", f"Two tools are named {name!r}.")
        self._taken.add(name)

    def _apart(self, function: Tool, route: Route) -> tuple[Tool, Route]:
        """A function of this server as one behind MCP, under a name that is free. Under one label it is
        there once, because its calls say nothing else."""
        own, label = function["name"], route.fields["server_label"]
        if (label, own) in self._behind_mcp:
            refuse("tools", f"Two tools are named {own!r}.")
        self._behind_mcp.add((label, own))
        name = _free(own, label, self._taken)
        self._taken.add(name)
        if name == own:
            return function, route
        self.names[label, own] = name
        return {**function, "name": name}, replace(route, fields={**route.fields, "name": own})

    def take_listed(self, tools: Sequence[Tool], items: Sequence[Item]) -> None:
        """The functions of other servers; after the others, because their names can be changed."""
        for path, tool, _, call, type_, index in _calls(tools):
            if (elsewhere := _elsewhere(call)) is None or not elsewhere.meant(tool):
                continue
            found = Route(type_, call.fields(tool), server=call.server(tool))
            if (listing := _listing(call, found, items)) is None:
                self.unlisted.append(found)
                continue
            self.listings.append(listing)
            if self.unknown is None and (unknown := elsewhere.unknown(tool, listing)) is not None:
                member, why = unknown
                self.unknown = f"{path}.{member}", why
            for function, route in elsewhere.offers(tool, listing, self._approvals):
                if tool.get("defer_loading"):
                    own = route.fields["name"]
                    self._defer(Deferred(function, route, *_said(tool, None, own), elsewhere=True), own)
                else:
                    shown = self._own if index < self._num_given else self._added
                    shown.append(self._named(function, route))

    def load(self, tools: Sequence[Tool]) -> None:
        """The functions that an item makes callable. Its definition of one holds in the place of a deferred
        one of the request; tools of a server are loaded where the request has that server, deferred."""
        for entry in tools:
            if entry["type"] == "mcp":
                self._load_of_server(entry)
                continue
            for path, tool, _, call, type_, _ in _calls([entry]):
                for function in call.offers(tool, self._registry, path):
                    name = function["name"]
                    if name in self.routes and name not in self.loaded:
                        if self.routes[name].type != type_:
                            refuse("tools", f"Two tools are named {name!r}.")
                        continue
                    self._taken.add(name)
                    self.loaded[name] = function
                    self.routes[name] = self._route(tool, function, call, type_)
                    self._waiting.pop(("", name), None)

    def _load_of_server(self, entry: Tool) -> None:
        allowed, label = entry.get("allowed_tools"), entry["server_label"]
        wanted = allowed.get("tool_names") if isinstance(allowed, dict) else allowed
        if wanted is None:
            wanted = [name for server, name in self._waiting if server == label]
        for name in wanted:
            if (known := self._waiting.pop((label, name), None)) is None:
                continue
            function = known.function
            if known.elsewhere:
                function = self._named(function, known.route)
            else:
                self.routes[function["name"]] = known.route
            self.loaded[function["name"]] = function

    def tools(self) -> list[Tool]:
        """All that are offered; a search tells what it can find."""
        given = [
            call.searches(tool, self._all_deferred)
            if (call := self._searches.get(tool["name"])) is not None and call.searches is not None
            else tool
            for tool in (*self._clients, *self._own, *self._added)
        ]
        return [*given, *self.loaded.values()]

    @property
    def deferred(self) -> list[Deferred]:
        """What no search has loaded yet."""
        return [*self._waiting.values()]

    def _defer(self, known: Deferred, name: str) -> None:
        """name: the tool's own, where that is another one than it is shown under."""
        label = known.tool["server_label"] if known.tool["type"] == "mcp" else ""
        self._waiting[label, name] = known
        self._all_deferred.append(known)

    def _named(self, function: Tool, route: Route) -> Tool:
        """A function of another server, under a name that is free."""
        said = route.fields
        name = _free(function["name"], said["server_label"], self._taken)
        self._taken.add(name)
        self.routes[name] = route
        self.names[said["server_label"], said["name"]] = name
        self.elsewhere.add(name)
        return {**function, "name": name}

    def _route(self, tool: Tool, function: Tool, call: Call, type_: str) -> Route:
        asks = call.asks(tool, function["name"], self._approvals)
        return Route(type_, call.fields(tool), asks, call.server(tool))


def _calls(tools: Sequence[Tool]) -> Iterator[tuple[str, Tool, Tool | None, Call, str, int]]:
    """The tools that are offered one by one: the path of each, the tool, the namespace that it is in, how
    their calls are made, of which type these are, and the index of the tool or its namespace."""
    for index, entry in enumerate(tools):
        for path, tool, namespace in each_tool([entry], start=index):
            row = type_of_calls(tool["type"])
            if row is not None and row.call is not None and row.call.takes(tool) and is_direct(tool):
                yield path, tool, namespace, row.call, row.type, index


def _said(tool: Tool, namespace: Tool | None, name: str) -> tuple[Tool, str, str | None]:
    """How the output of a search says one function of a tool; and name and description of what it is in."""
    if tool["type"] == "mcp":
        return {**tool, "allowed_tools": [name]}, tool["server_label"], tool.get("server_description")
    if namespace is None:
        return tool, tool["name"], tool.get("description")
    own = {key: value for key, value in tool.items() if key != "namespace"}
    return {**namespace, "tools": [own]}, namespace["name"], namespace["description"]


def _nameless(route: Route) -> Route:
    """A route without the name that its calls say: the same for all functions of a server."""
    return replace(route, fields={key: said for key, said in route.fields.items() if key != "name"})


def _execution(route: Route) -> Execution | None:
    """How this server carries out the calls that take a route; None where the client does."""
    return execution_of({"type": route.type, **route.fields})


def _elsewhere(call: Call) -> Elsewhere | None:
    return None if call.execution is None else call.execution.elsewhere


def _listing(call: Call, route: Route, items: Sequence[Item]) -> Item | None:
    """The last listing of a server's tools."""
    assert call.execution is not None and call.execution.listing is not None, "servers elsewhere are listed"
    shows = call.execution.listing.shows
    return next((item for item in reversed(items) if shows(item, route)), None)


def _free(name: str, label: str, taken: Collection[str]) -> str:
    """A name that no function has: the given one, or else with the label of its server, and a number."""
    if name not in taken:
        return name
    longer = speakable(f"{label}__{name}")[:60]
    candidates = (longer, *(f"{longer}_{number}" for number in range(2, len(taken) + 3)))
    return next(candidate for candidate in candidates if candidate not in taken)


async def enforced(functions: Functions, served: ServedModel, owner: str) -> Functions:
    """The functions, with those strict that are other servers', or leave it open (`strict` null), where the
    engine takes their schemas.

    The arguments of the others are only checked once they are written, also where a call is demanded: nobody
    can mend the schemas of other servers. A client can mend its own.
    """
    foreign = {*functions.elsewhere}
    foreign |= {tool["name"] for tool in functions.tools if tool.get("strict", False) is None}
    if not foreign or not {"grammar", "calls"} <= served.info.capabilities:
        return functions

    async def taken(tools: Sequence[Tool]) -> bool:
        try:
            shapes = tuple(map(tool_shape, tools))
            await served.engine.check(Constraint(shapes, None, Shape("text")), owner)
        except ConstraintError:
            return False
        return True

    tools = [tool for tool in functions.tools if tool["name"] in foreign]
    if await taken(tools):
        strict = frozenset(foreign)
    elif len(tools) <= MAX_CHECKED:
        strict = frozenset([tool["name"] for tool in tools if await taken([tool])])
    else:
        strict = frozenset()
    changed = [{**tool, "strict": True} if tool["name"] in strict else tool for tool in functions.tools]
    return replace(functions, tools=tuple(changed), loose=functions.elsewhere - strict)
