"""Finds chat templates that print each message by itself, and renders them in segments.

Such a template walks over the messages once, at its top level. What it prints for one of them depends on
that message, its neighbours, whether it is the first or the last, and what is the same for all. Then the text
of a conversation that has grown is the text of before, up to its last message, and new segments. Whether a
template is of this kind is decided by its syntax, so that what is not understood counts as not of this kind.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from engine.types import RenderError

if TYPE_CHECKING:
    from jinja2 import Environment, Template, nodes

MARK = f"\0{secrets.token_hex(16)}\0"
"""Stands between segments while they are rendered; nobody can have it in a message."""

_NEIGHBOURS = frozenset({"first", "last", "previtem", "nextitem"})
_STATEFUL = frozenset({"cycler", "joiner", "lipsum"})


@lru_cache(maxsize=32)
def local_template(source: str, environment: Environment) -> Template | None:
    """The template, with MARK in front of every message and behind the last; None for one that may look
    further than to a message's neighbours."""
    import jinja2
    from jinja2 import nodes

    try:
        tree = environment.parse(source)
    except jinja2.TemplateError:
        return None
    loops = [node for node in tree.body if isinstance(node, nodes.For) and _is_messages(node.iter)]
    if len(loops) != 1 or not _is_local(tree, loops[0]):
        return None
    [loop] = loops
    loop.body.insert(0, _mark(loop, environment))
    tree.body.insert(tree.body.index(loop) + 1, _mark(loop, environment))
    code: Any = environment.compile(tree)
    return environment.template_class.from_code(environment, code, environment.make_globals(None))


def segments(
    template: Template, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> list[str]:
    """What a local template prints: before the messages, for each of them, and behind them. Raises
    RenderError."""
    try:
        return template.render(messages=messages, **variables).split(MARK)
    except RenderError:
        raise
    except Exception as error:  # whatever a template raises is the request's failure
        raise RenderError(f"the chat template refused the messages: {error}") from error


def _mark(where: nodes.Node, environment: Environment) -> nodes.Node:
    from jinja2 import nodes

    return nodes.Output([nodes.TemplateData(MARK)]).set_lineno(where.lineno).set_environment(environment)


# ------------------------------------------------------------------------------------------------------------
# Syntax


def _is_local(tree: nodes.Template, loop: nodes.For) -> bool:
    from jinja2 import nodes

    foreign = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Block)
    if loop.recursive or loop.test is not None or loop.else_ or list(tree.find_all(foreign)):
        return False
    if _names(tree) & _STATEFUL or any(node.name == "random" for node in tree.find_all(nodes.Filter)):
        return False
    behind = False
    for node in tree.body:
        if node is loop:
            behind = True
        # What is set in front of the loop counts for every message, so it must not follow from the last.
        elif not _reads_messages_well(node, {0, -1} if behind else {0}):
            return False
    repeated = [loop, *tree.find_all(nodes.Macro)]
    if any(list(node.find_all((nodes.NSRef, nodes.Break))) for node in repeated):
        return False
    if any("strftime_now" in _names(node) for node in repeated):
        return False
    return all(_reads_messages_well(node, {0}, of_loop=True) for node in loop.body)


def _names(node: nodes.Node) -> set[str]:
    from jinja2 import nodes

    return {name.name for name in node.find_all(nodes.Name)}


def _reads_messages_well(node: nodes.Node, indices: set[int], *, of_loop: bool = False) -> bool:
    """Whether all that a node reads of `messages` is whether there are any, and those at `indices`; inside of
    the loop, also the neighbours of the one at hand, and of the loop nothing that depends on their number."""
    from jinja2 import nodes

    if isinstance(node, nodes.Name):
        return node.name != "messages" and not (of_loop and node.name == "loop")
    if isinstance(node, nodes.Getitem) and _is_messages(node.node):
        return _integer(node.arg) in indices or (of_loop and _is_beside(node.arg))
    if of_loop and isinstance(node, nodes.Getattr) and _is_loop(node.node):
        return node.attr in _NEIGHBOURS
    if of_loop and isinstance(node, nodes.Compare) and (counted := _position(node.expr)) is not None:
        [operand, *more] = node.ops
        first = 0 if counted == "index0" else 1
        return not more and operand.op in ("eq", "ne", "gt") and _integer(operand.expr) == first
    if isinstance(node, nodes.For) and of_loop:  # inside of it `loop` is its own
        outside = [node.iter, *node.else_]
        inside = [*node.body, *([] if node.test is None else [node.test])]
        return all(_reads_messages_well(each, indices, of_loop=True) for each in outside) and all(
            _reads_messages_well(each, indices) for each in inside
        )
    return all(_reads_messages_well(each, indices, of_loop=of_loop) for each in _looked_into(node))


def _looked_into(node: nodes.Node) -> Iterator[nodes.Node]:
    """A node's children, without a `messages` that only asks whether there are any: there always are."""
    from jinja2 import nodes

    asked: nodes.Node | None = None
    if isinstance(node, nodes.If | nodes.CondExpr):
        asked = node.test
    elif isinstance(node, nodes.And):
        asked = node.left
    elif isinstance(node, nodes.Not):
        asked = node.node
    return (child for child in node.iter_child_nodes() if not (child is asked and _is_messages(child)))


def _is_messages(node: nodes.Node) -> bool:
    from jinja2 import nodes

    return isinstance(node, nodes.Name) and node.name == "messages" and node.ctx == "load"


def _is_loop(node: nodes.Node) -> bool:
    from jinja2 import nodes

    return isinstance(node, nodes.Name) and node.name == "loop"


def _position(node: nodes.Node) -> str | None:
    """`index0` or `index`, where a node is that of the loop."""
    from jinja2 import nodes

    if isinstance(node, nodes.Getattr) and _is_loop(node.node) and node.attr in ("index0", "index"):
        return node.attr
    return None


def _is_beside(node: nodes.Node) -> bool:
    """Whether an index is that of the message before, or behind, the one at hand."""
    from jinja2 import nodes

    if not isinstance(node, nodes.Sub | nodes.Add):
        return False
    return _position(node.left) == "index0" and _integer(node.right) == 1


def _integer(node: nodes.Node) -> int | None:
    from jinja2 import nodes

    if isinstance(node, nodes.Neg):
        value = _integer(node.node)
        return None if value is None else -value
    return node.value if isinstance(node, nodes.Const) and type(node.value) is int else None
