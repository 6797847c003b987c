"""Tools that are Python functions: their schema by their annotations, and those that packages bring along."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
import types
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from tools.arguments import SchemaFault, check_schema
from tools.operator.fault import ToolFault, ToolsError, check_name
from tools.spec import Function, ToolSpec

GROUP = "antiphon.tools"
"""The group of entry points that name tools."""

_TYPES: Mapping[Any, Mapping[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    dict: {"type": "object"},
    list: {"type": "array"},
}


def tool(
    *, idempotent: bool = False, timeout_s: float = 30.0, name: str | None = None
) -> Callable[[Callable[..., Any]], ToolSpec]:
    """Decorator that makes a tool of a function: its docstring describes it, its annotations are the schema.

    The function may be async; one that is not runs in a thread of its own, which nothing can stop. It returns
    text, or a value that is written as JSON, and raises ToolError to tell the model what went wrong.
    idempotent, timeout_s: as in ToolSpec. Raises TypeError for a function without a docstring, or with
    annotations other than str, int, float, bool, list, dict, Literal and unions of them.
    """

    def make(function: Callable[..., Any]) -> ToolSpec:
        description = inspect.getdoc(function)
        if not description:
            raise TypeError("it has no docstring, by which the model would know what it is for")
        return ToolSpec(
            name=name or function.__name__,
            description=description,
            parameters=_parameters(function),
            run=_awaitable(function),
            idempotent=idempotent,
            timeout_s=timeout_s,
        )

    return make


def installed_tools() -> list[ToolSpec]:
    """The tools of installed packages: each entry point names a ToolSpec or a function; raises ToolsError."""
    return [_load(entry) for entry in entry_points(group=GROUP)]


def _load(entry: EntryPoint) -> ToolSpec:
    package = entry.dist.name if entry.dist is not None else entry.value
    try:
        loaded = entry.load()
        spec = loaded if isinstance(loaded, ToolSpec) else tool(name=entry.name)(loaded)
        check_name(spec.name)
        check_schema(spec.parameters)
    except (ToolFault, SchemaFault) as fault:
        raise ToolsError(f"{package}: tool {entry.name!r}: {fault}") from None
    except Exception as exc:  # what a package does as it is imported is its own
        raise ToolsError(f"{package}: tool {entry.name!r}: {type(exc).__name__}: {exc}") from exc
    return spec


def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    hints = get_type_hints(function)
    properties: dict[str, Any] = {}
    required = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"the parameter {parameter.name!r} cannot be given by its name")
        if parameter.name not in hints:
            raise TypeError(f"the parameter {parameter.name!r} has no annotation")
        properties[parameter.name] = _schema(hints[parameter.name])
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _schema(hint: Any) -> dict[str, Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in _TYPES:
        return dict(_TYPES[hint])
    if hint is type(None):
        return {"type": "null"}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is list:
        return {"type": "array", "items": _schema(arguments[0])}
    if origin is dict and arguments[0] is str:
        return {"type": "object", "additionalProperties": _schema(arguments[1])}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(argument) for argument in arguments]}
    raise TypeError(f"the annotation {hint} has no schema: write a ToolSpec with one")


def _awaitable(function: Callable[..., Any]) -> Function:
    asynchronous = inspect.iscoroutinefunction(function)

    async def run(**arguments: Any) -> str:
        value = await (function(**arguments) if asynchronous else _in_thread(function, arguments))
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    return run


def _in_thread(function: Callable[..., Any], arguments: Mapping[str, Any]) -> asyncio.Future[Any]:
    """Run a function in a thread of its own: it may take long, and the server's pool has few."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if future.done():  # the call was given up
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def work() -> None:
        value, error = None, None
        try:
            value = function(**arguments)
        except BaseException as exc:
            error = exc if isinstance(exc, Exception) else RuntimeError(f"it raised {type(exc).__name__}")
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=work, name="tool", daemon=True).start()
    return future
