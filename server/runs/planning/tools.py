"""Gathers the tools of a turn: those of its request, and those that items of its conversation add."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from server.errors import ApiError
from server.items import Item, Tool, each_tool, limit_tools, shown_name, tools_added, type_of_calls
from server.schema import CreateResponse, require_search

_PLACE = re.compile(r"tools\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class TurnTools:
    """The tools of a turn: first those of its request, then those that items have added, oldest first, so
    that a prompt changes as late as it can.

    paths: where each of them is said: in the request, or by the id of a stored item. secrets: the credentials
    that the request gives for them, by their index as a text. What a stored item said besides was erased when
    its response ended.
    """

    tools: tuple[Tool, ...] = ()
    paths: tuple[str, ...] = ()
    secrets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Have errors that name `tools[INDEX]`, by the index here, name the place where that tool is said."""
        try:
            yield
        except ApiError as error:
            where = _PLACE.match(error.param or "")
            if where is None or error.param is None or int(where[1]) >= len(self.paths):
                raise
            path = self.paths[int(where[1])]
            error.param = path + error.param.removeprefix(where[0])
            error.message = error.message.replace(where[0], path)
            raise

    def require_search(self) -> None:
        """Raise ApiError 400 where deferred tools and searches do not fit together (`require_search`)."""
        with self.named():
            require_search(self.tools)


def turn_tools(request: CreateResponse, items: Sequence[Item], num_new: int) -> TurnTools:
    """The tools of a request and of the items that it stands on, the last `num_new` of which are its input.

    Of two sources that give the model the same function the later one holds, and the request is the last.
    Raises ApiError 400 for more tools than may be taken.
    """
    own = [(f"tools[{index}]", tool) for index, tool in enumerate(request.tools)]
    num_old = len(items) - num_new
    sources = [_added(item, index - num_old) for index, item in enumerate(items) if tools_added(item)]
    added = _latest([*sources, own]) if sources else []
    found = [*own, *added]
    given = ((str(index), request.secrets.get(path)) for index, (path, _) in enumerate(found))
    gathered = TurnTools(
        tuple(tool for _, tool in found),
        tuple(path for path, _ in found),
        {index: secret for index, secret in given if secret is not None},
    )
    if added:
        with gathered.named():
            limit_tools(gathered.tools)
    return gathered


Said = list[tuple[str, Tool]]
"""The tools of one source, with their paths."""


def _added(item: Item, index: int) -> Said:
    """The tools that an item adds. index: the item's in the input; it is below 0 for a stored one."""
    param = f"input[{index}]" if index >= 0 else item["id"]
    return [(f"{param}.tools[{place}]", tool) for place, tool in enumerate(tools_added(item))]


def _latest(sources: Sequence[Said]) -> Said:
    """The tools of all sources but the last, oldest first, without what a later source says anew."""
    kept: list[Said] = []
    said = _meanings(tool for _, tool in sources[-1])
    for source in reversed(sources[:-1]):
        kept.append([(path, left) for path, tool in source if (left := _without(tool, said)) is not None])
        said |= _meanings(tool for _, tool in source)
    return [each for source in reversed(kept) for each in source]


def _without(tool: Tool, said: set[str]) -> Tool | None:
    """A tool without what was said of it later; None where nothing is left."""
    if tool["type"] != "namespace":
        return None if _meaning(tool) in said else tool
    inner = [own for own in tool["tools"] if _meaning({**own, "namespace": tool["name"]}) not in said]
    return {**tool, "tools": inner} if inner else None


def _meanings(tools: Iterator[Tool]) -> set[str]:
    return {_meaning(tool) for _, tool, _ in each_tool(tools)}


def _meaning(tool: Tool) -> str:
    """What no two sources can both give a model: a function's name, a server's label, or a kind of tool."""
    if tool["type"] in ("function", "custom"):
        return f"function {shown_name(tool)}"
    row = type_of_calls(tool["type"])
    return f"{tool['type'] if row is None else row.type} {tool.get('server_label', '')}"
