"""An OpenAPI document as one page of HTML: no script, no font, nothing from anywhere else.

Owns the page and the policy under which a browser shows it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

Json = Mapping[str, Any]

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}"
    "code,pre{font:13px/1.4 ui-monospace,monospace}pre{background:#f6f6f6;padding:.7em;overflow:auto}"
    "table{border-collapse:collapse;width:100%;margin:.5em 0}td,th{border-bottom:1px solid #ddd;"
    "padding:.25em .5em;text-align:left;vertical-align:top}h2{border-top:1px solid #ccc;padding-top:1em}"
    "nav li{list-style:none}.m{display:inline-block;width:4.5em;font-weight:600}a{color:#0645ad}"
    "@media(prefers-color-scheme:dark){body{background:#181818;color:#ddd}pre{background:#222}"
    "td,th{border-color:#444}a{color:#8ab4f8}}"
)
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; style-src "
    f"'sha256-{base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()}'"
)


def page(document: Json) -> str:
    """The whole page."""
    title = f"{document['info']['title']} {document['info']['version']}"
    return "".join(_parts(document, title))


def _parts(document: Json, title: str) -> Iterator[str]:
    yield f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title>"
    yield f"<meta name=viewport content='width=device-width'><style>{STYLE}</style>"
    yield f"<h1>{escape(title)}</h1><p>{_prose(document['info'].get('description', ''))}</p>"
    # Relative, because a proxy may show the server under a path.
    yield "<p>The same as JSON: <a href=openapi.json>/openapi.json</a></p>"
    families: dict[str, list[tuple[str, str, Json]]] = {tag["name"]: [] for tag in document["tags"]}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            families[operation["tags"][0]].append((method.upper(), path, operation))
    yield from _contents(families)
    for tag in document["tags"]:
        name = tag["name"]
        yield f"<h1 id='{_anchor('tag-', name)}'>{escape(name)}</h1><p>{_prose(tag['description'])}</p>"
        for method, path, operation in families[name]:
            yield f"<h2 id='{_anchor(method, path)}'><span class=m>{method}</span>{escape(path)}</h2>"
            yield from _operation(operation)
    yield "<h1>Schemas</h1>"
    for name, schema in document["components"]["schemas"].items():
        yield f"<h2 id='schema-{escape(name)}'>{escape(name)}</h2>"
        yield from _schema(schema)
    yield "</html>"


def _contents(families: Mapping[str, Sequence[tuple[str, str, Json]]]) -> Iterator[str]:
    """The table of contents. families: the method, the path and more of each operation, by tag."""
    yield "<nav><ul>"
    for name, operations in families.items():
        yield f"<li><a href='#{_anchor('tag-', name)}'>{escape(name)}</a><ul>"
        for method, path, _ in operations:
            link = f"<a href='#{_anchor(method, path)}'>{escape(path)}</a>"
            yield f"<li><span class=m>{method}</span>{link}</li>"
        yield "</ul></li>"
    yield "</ul></nav>"


def _operation(operation: Json) -> Iterator[str]:
    yield f"<p>{_prose(operation.get('description') or operation.get('summary', ''))}</p>"
    if parameters := operation.get("parameters"):
        yield "<table><tr><th>Parameter<th>In<th>Type<th>"
        for each in parameters:
            yield f"<tr><td><code>{escape(each['name'])}</code><td>{each['in']}<td>{_kind(each['schema'])}"
            yield f"<td>{_prose(each.get('description', ''))}"
        yield "</table>"
    for content in (operation.get("requestBody") or {}).get("content", {}).values():
        yield f"<p>Body: {_kind(content['schema'])}</p>"
    yield "<table><tr><th>Status<th>Reply<th>"
    for status, reply in operation["responses"].items():
        kinds = ", ".join(
            f"{_kind(content['schema'])} as <code>{escape(media_type)}</code>"
            for media_type, content in reply.get("content", {}).items()
        )
        yield f"<tr><td>{escape(status)}<td>{kinds}<td>{_prose(reply.get('description', ''))}"
    yield "</table>"
    told = {
        name: each for reply in operation["responses"].values() for name, each in reply["headers"].items()
    }
    yield "<details><summary>Headers of replies</summary><table>"
    for name, each in told.items():
        yield f"<tr><td><code>{escape(name)}</code><td>{_prose(each['description'])}"
    yield "</table></details>"


def _schema(schema: Json) -> Iterator[str]:
    if note := schema.get("description"):
        yield f"<p>{_prose(note)}</p>"
    properties = schema.get("properties")
    if not properties:
        written = escape(json.dumps(schema, indent=1))
        yield f"<details><summary>JSON Schema</summary><pre>{written}</pre></details>"
        return
    yield "<table><tr><th>Member<th>Type<th>"
    for name, each in properties.items():
        needed = "required. " if name in schema.get("required", ()) else ""
        yield f"<tr><td><code>{escape(name)}</code><td>{_kind(each)}"
        yield f"<td>{needed}{_prose(each.get('description', ''))}"
    yield "</table>"


def _kind(schema: Json) -> str:
    """A schema in a few words, as HTML."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f"<a href='#schema-{name}'>{name}</a>"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(each) for each in schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"<code>{escape(json.dumps(value))}</code>" for value in values)
    kinds = schema.get("type", "anything")
    text = " or ".join(kinds) if isinstance(kinds, list) else kinds
    if "items" in schema:
        return f"{text} of {_kind(schema['items'])}"
    bounds = {"minimum": "from", "maximum": "to", "maxLength": "at most", "maxItems": "at most"}
    return " ".join([text, *(f"{word} {schema[key]:g}" for key, word in bounds.items() if key in schema)])


def _prose(text: str) -> str:
    """Text with `code` in it, as HTML."""
    pieces = escape(" ".join(text.split())).split("`")
    return "".join(f"<code>{piece}</code>" if index % 2 else piece for index, piece in enumerate(pieces))


def _anchor(method: str, path: str) -> str:
    return method.lower() + "".join(char if char.isalnum() else "-" for char in path)
