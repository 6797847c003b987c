"""Finds the functions that a model may be offered, among a request's tools and the listings of other
servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from engine import Constraint, ConstraintError, Shape
from server.items import Call, Elsewhere, Item, Route, Tool, type_of_calls
from server.prompting import tool_shape
from server.schema import refuse

if TYPE_CHECKING:
    from server.mcp_servers import Approvals, Reach
    from server.model_registry import ServedModel
    from tools import Registry

MAX_CHECKED = 64
"""Tools of other servers that are tried one by one where together they cannot be enforced."""


@dataclass(frozen=True, slots=True)
class Functions:
    """Flat tools that the model may be offered: functions, and customs that take a text.

    routes: name -> where calls of it lead, for each of them. names: of the tools of other servers, by the
    server's label and the tool's own name. unlisted: routes to servers whose tools are not known yet.
    listings: where they are, what lists them. lacking: types of tools of the request that this server cannot
    run.
    """

    tools: tuple[Tool, ...]
    routes: Mapping[str, Route]
    names: Mapping[tuple[str, str], str] = field(default_factory=dict)
    unlisted: tuple[Route, ...] = ()
    listings: tuple[Item, ...] = ()
    lacking: frozenset[str] = frozenset()

    def of(self, route: Route) -> list[Tool]:
        """The tools that lead to a route."""
        return [tool for tool in self.tools if self.routes[tool["name"]] == route]

    @property
    def local(self) -> list[Route]:
        """The routes that lead to no other server, each as often as it has functions."""
        elsewhere = set(self.names.values())
        return [route for name, route in self.routes.items() if name not in elsewhere]

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
    tools: Sequence[Tool], registry: Registry, items: Sequence[Item], approvals: Approvals
) -> Functions:
    """All functions and customs of a request's tools, those that this server runs last.

    items: of the conversation so far, in which other servers' tools are listed. approvals: which calls of MCP
    tools need one. Raises ApiError 400 when two share a name, or when a tool asks for what this server has
    not.
    """
    clients: list[Tool] = []
    own: list[Tool] = []
    routes: dict[str, Route] = {}
    lacking: set[str] = set()
    for index, tool, call, type_ in _calls(tools):
        if call.lacks(tool, registry) is not None:
            lacking.add(tool["type"])
            continue
        for function in call.offers(tool, registry, f"tools[{index}]"):
            if function["name"] in routes:
                refuse("tools", f"Two tools are named {function['name']!r}.")
            asks = call.asks(tool, function["name"], approvals)
            routes[function["name"]] = Route(type_, call.fields(tool), asks, call.server(tool))
            (clients if call.execution is None else own).append(function)
    names: dict[tuple[str, str], str] = {}
    unlisted: list[Route] = []
    listings: list[Item] = []
    for _, tool, call, type_ in _calls(tools):  # last, because their names can be changed
        if (elsewhere := _elsewhere(call)) is None or not elsewhere.meant(tool):
            continue
        found = Route(type_, call.fields(tool), server=call.server(tool))
        if (listing := _listing(call, found, items)) is None:
            unlisted.append(found)
            continue
        listings.append(listing)
        for function, route in elsewhere.offers(tool, listing, approvals):
            said = route.fields
            name = _free(function["name"], said["server_label"], routes)
            routes[name] = route
            names[said["server_label"], said["name"]] = name
            own.append({**function, "name": name})
    return Functions((*clients, *own), routes, names, tuple(unlisted), tuple(listings), frozenset(lacking))


def _calls(tools: Sequence[Tool]) -> Iterator[tuple[int, Tool, Call, str]]:
    """The tools that are offered, with their index, how their calls are made, and of which type these are."""
    for index, tool in enumerate(tools):
        row = type_of_calls(tool["type"])
        if row is not None and row.call is not None and row.call.takes(tool):
            yield index, tool, row.call, row.type


def _elsewhere(call: Call) -> Elsewhere | None:
    return None if call.execution is None else call.execution.elsewhere


def _listing(call: Call, route: Route, items: Sequence[Item]) -> Item | None:
    """The last listing of a server's tools."""
    assert call.execution is not None and call.execution.listing is not None, "servers elsewhere are listed"
    shows = call.execution.listing.shows
    return next((item for item in reversed(items) if shows(item, route)), None)


def _free(name: str, label: str, taken: Mapping[str, Route]) -> str:
    """A name that no function has: the given one, or else with the label of its server, and a number."""
    if name not in taken:
        return name
    longer = f"{label}__{name}"[:60]
    candidates = (longer, *(f"{longer}_{number}" for number in range(2, len(taken) + 3)))
    return next(candidate for candidate in candidates if candidate not in taken)


async def enforced(functions: Functions, served: ServedModel, owner: str) -> Functions:
    """The functions, with those of other servers strict whose schemas the engine takes.

    The arguments of the others are only checked once they are written.
    """
    foreign = set(functions.names.values())
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
        strict = foreign
    elif len(tools) <= MAX_CHECKED:
        strict = {tool["name"] for tool in tools if await taken([tool])}
    else:
        strict = set()
    changed = [{**tool, "strict": True} if tool["name"] in strict else tool for tool in functions.tools]
    return replace(functions, tools=tuple(changed))
