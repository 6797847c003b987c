"""Renders messages to prompt text by a model's chat template, as transformers does.

Templates run in a sandbox. The result is that of `transformers/utils/chat_template_utils.py` (tests compare),
without the 0.4 s of its imports; jinja itself is imported at the first render.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from engine.dialects import History
from engine.tokenizer.escapes import Escapes, from_ascii_json
from engine.tokenizer.message_format import answer_arguments, effort_arguments, in_form
from engine.tokenizer.pictures import in_parts, wants_parts
from engine.tokenizer.short_answers import skips_thought
from engine.tokenizer.template_fallbacks import orders, says_all, told
from engine.types import RenderError, RenderInput

if TYPE_CHECKING:
    from jinja2 import Environment, Template, nodes

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "strftime_now", "raise_exception"})
_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


def render_template(
    source: str,
    inp: RenderInput,
    special_tokens: Mapping[str, str],
    history: History = History(),  # noqa: B008 (frozen)
    escapes: Escapes = Escapes(()),  # noqa: B008 (immutable)
) -> str:
    """Render one template; raises RenderError for whatever it makes of the messages.

    escapes: how everything that `inp` says is escaped; what the template itself writes is not.
    A template is a program of the checkpoint's author (or of a client, where the server lets it): it sees
    plain data only, in jinja's immutable sandbox.
    """
    if reserved := _RESERVED & inp.template_kwargs.keys():
        raise RenderError(f"chat template arguments may not replace {', '.join(sorted(reserved))}")
    messages = template_messages(source, inp.messages, inp, history, escapes)
    if not messages:
        raise RenderError("there are no messages to render")
    ending = _mark_final(messages, source) if inp.continue_final_message else None
    variables = template_variables(source, inp, special_tokens, escapes)
    kept, refused = [], []
    for ordered in orders(messages):
        try:
            text = _compile_template(source).render(messages=ordered, **variables)
            kept.append(text if ending is None else _cut_at_mark(text, ending))
        except RenderError as error:
            refused.append(error)
        except Exception as error:  # whatever a template raises is the request's failure
            refused.append(RenderError(f"the chat template refused the messages: {error}"))
        else:
            if says_all(text, messages):
                return kept[-1]
    if not kept:
        raise refused[0]
    return kept[0]


def template_messages(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    inp: RenderInput,
    history: History,
    escapes: Escapes,
) -> list[dict[str, Any]]:
    """Some of an input's messages, oldest first, as a template is given them."""
    plain = in_form([_message(message) for message in messages], history)
    completed = _completed_by(source, escapes)
    # Behind `in_form`, which reads JSON, and in front of `told`, which writes markup of the server's own.
    escaped = [escapes.message(message, completed) for message in plain]
    tools = escapes.value(_plain(list(inp.tools)), completed)
    found = told(escaped, tools, source, variables_of(source), history.told)
    wants = _wants_parts(source) if inp.text_parts is None else inp.text_parts
    return in_parts(found) if wants else found


def template_variables(
    source: str, inp: RenderInput, special_tokens: Mapping[str, str], escapes: Escapes
) -> dict[str, Any]:
    """What a template is given beside the messages."""
    completed = _completed_by(source, escapes)
    effort = "none" if skips_thought(inp) else inp.effort
    said = effort_arguments(effort, variables_of(source)) if effort else {}
    if inp.answer is not None:
        said |= escapes.value(answer_arguments(inp.answer), completed)
    now = datetime.fromtimestamp(inp.now, UTC)  # UTC, so that every replica renders a stored run alike
    asked = {
        name: escapes.value(value, completed) for name, value in _plain(dict(inp.template_kwargs)).items()
    }
    return {
        "tools": escapes.value(_plain(list(inp.tools)), completed) or None,
        "add_generation_prompt": inp.add_generation_prompt and not inp.continue_final_message,
        "strftime_now": now.strftime,
        **{"documents": None, **special_tokens, **said, **asked},
    }


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Plain data without null fields, reasoning under each name that templates read."""
    plain: dict[str, Any] = {key: _plain(value) for key, value in message.items() if value is not None}
    reasoning = next((plain[name] for name in _REASONING_FIELDS if name in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """A copy made of exact JSON types: an object's methods would be reachable from the template."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    return f"<{type(value).__name__}>"


def _mark_final(messages: list[dict[str, Any]], source: str) -> str:
    """Append a mark to the final message's text, to cut the rendered prompt there; returns that text."""
    final = messages[-1]
    content = final.get("content")
    if "content" not in source or content is None:
        raise RenderError("continue_final_message is set but the final message has no content to continue")
    if isinstance(content, str):
        final["content"] = content + _MARK
        return content
    for part in reversed(content):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text: str = part["text"]
            part["text"] = text + _MARK
            return text
    raise RenderError("continue_final_message is set but the final message has no text to continue")


def _cut_at_mark(text: str, ending: str) -> str:
    mark = _MARK.strip()
    if ending.strip() not in text or mark not in text:
        raise RenderError("continue_final_message is set but the chat template drops part of it")
    cut = text.rindex(mark)
    # Without the mark's own space the template has trimmed the message, so its white space is not the
    # message's.
    return text[:cut] if text.startswith(_MARK, cut) else text[:cut].rstrip()


@lru_cache(maxsize=32)
def _compile_template(source: str) -> Template:
    return template_environment().from_string(source)


@lru_cache(maxsize=32)
def _wants_parts(source: str) -> bool:
    """See `wants_parts`; false for a template that tells texts from other content itself."""
    if "content" not in source or "is string" in source:
        return False
    if "'type'" not in source and '"type"' not in source and ".type" not in source:
        return False
    return wants_parts(lambda messages: _compile_template(source).render(messages=messages, tools=None))


@lru_cache(maxsize=32)
def _completed_by(source: str, escapes: Escapes) -> frozenset[str]:
    """What a template's own texts complete to control tokens; nothing for one that does not parse."""
    import jinja2

    try:
        tokens = list(template_environment().lexer.tokenize(source))
    except jinja2.TemplateError:
        return frozenset()
    return escapes.completions(str(token.value) for token in tokens if token.type in ("data", "string"))


@lru_cache(maxsize=32)
def variables_of(source: str) -> frozenset[str]:
    """The names that a template reads and nobody but its caller sets; none for one that does not parse. One
    that prints who has written a message reads `messages.name` besides."""
    import jinja2
    from jinja2 import meta

    try:
        tree = template_environment().parse(source)
        found = frozenset(meta.find_undeclared_variables(tree))
    except jinja2.TemplateError:
        return frozenset()
    return found | {AUTHORS} if _reads_authors(tree) else found


AUTHORS = "messages.name"


def _reads_authors(tree: nodes.Template) -> bool:
    """Whether a template reads the name of a message, which is whatever it goes through the messages by."""
    from jinja2 import nodes

    loops = (
        loop.target.name
        for loop in tree.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name)
        and any(
            "messages" in each.name
            for each in (loop.iter, *loop.iter.find_all(nodes.Name))
            if isinstance(each, nodes.Name)
        )
    )
    members = frozenset(loops)

    def is_message(node: nodes.Node) -> bool:
        return isinstance(node, nodes.Name) and node.name in members

    return any(is_message(get.node) and get.attr == "name" for get in tree.find_all(nodes.Getattr)) or any(
        is_message(get.node) and isinstance(get.arg, nodes.Const) and get.arg.value == "name"
        for get in tree.find_all(nodes.Getitem)
    )


@cache
def template_environment() -> Environment:
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """`{% generation %}` marks what the assistant wrote, for training; here it prints its body."""

        tags = {"generation"}  # noqa: RUF012 (jinja's own protocol)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    class Namespace(jinja2.utils.Namespace):
        """Namespaces without underscore names, which reach CPython's internals."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            self, args = args[0], args[1:]
            values = dict(*args, **kwargs)
            for name in values:
                _refuse_private(name)
            jinja2.utils.Namespace.__init__(self, values)

        def __setitem__(self, name: str, value: Any) -> None:
            _refuse_private(name)
            super().__setitem__(name, value)

    def _refuse_private(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"chat templates cannot store {name!r} on a namespace")

    def raise_exception(message: str) -> None:
        raise RenderError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        # jinja's own filter escapes HTML, which no model was trained on
        text = json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        return from_ascii_json(text) if ensure_ascii else text

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["namespace"] = Namespace
    environment.globals["dict"] = _TemplateDict()
    return environment


class _TemplateDict:
    """`dict` for templates: callable, without the type's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)
