"""Scopes: what may be written, and what each allows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from server.access import GROUPS, Scopes, read_scopes, tool_scope
from server.errors import ApiError

NEEDED = ("responses.read", "responses.write", "files.read", "admin", "model:m-1", "tool:mcp:example.com")


@pytest.mark.parametrize(
    ("names", "allowed"),
    [
        ("all", "responses.read responses.write files.read model:m-1 tool:mcp:example.com"),
        ("all.read", "responses.read files.read model:m-1 tool:mcp:example.com"),
        ("admin", "admin model:m-1 tool:mcp:example.com"),
        ("all admin", " ".join(NEEDED)),
        ("responses", "responses.read responses.write model:m-1 tool:mcp:example.com"),
        ("responses.write files.read", "responses.write files.read model:m-1 tool:mcp:example.com"),
        ("all model:m-*", "responses.read responses.write files.read model:m-1 tool:mcp:example.com"),
        ("all model:m", "responses.read responses.write files.read tool:mcp:example.com"),
        ("all tool:mcp", "responses.read responses.write files.read model:m-1 tool:mcp:example.com"),
        ("all tool:mcp:*.com", "responses.read responses.write files.read model:m-1 tool:mcp:example.com"),
        ("all tool:mcp:example.org tool:none", "responses.read responses.write files.read model:m-1"),
        ("responsive unheard.read", "model:m-1 tool:mcp:example.com"),
    ],
)
def test_what_scopes_allow(names: str, allowed: str) -> None:
    scopes = Scopes(tuple(names.split()))
    assert {needed for needed in NEEDED if scopes.allow(needed)} == set(allowed.split())


MCP_SERVERS = ("builtin", "builtin:desk", "builtin:shop", "builtin.example", "connector_gmail")


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("mcp", MCP_SERVERS),
        ("mcp:*", MCP_SERVERS),
        ("mcp:builtin", ["builtin"]),
        ("mcp:builtin:desk", ["builtin:desk"]),
        ("mcp:builtin:*", ["builtin:desk", "builtin:shop"]),
        ("mcp:builtin*", ["builtin", "builtin:desk", "builtin:shop", "builtin.example"]),
        ("function", []),
    ],
)
def test_a_scope_for_one_mcp_server_is_for_no_other(name: str, allowed: Sequence[str]) -> None:
    scopes = Scopes(("all", f"tool:{name}"))
    assert [each for each in MCP_SERVERS if scopes.allow(f"tool:mcp:{each}")] == list(allowed)


def test_names_are_what_clients_wrote() -> None:
    """No word of theirs is one of those that scopes are made of."""
    scopes = Scopes(("responses", "tool:mcp:good.example", "model:m"))
    url = "https://evil.example or responses.write/x"
    asked = [tool_scope({"type": "mcp", "server_label": "x", "server_url": url})]
    asked += [tool_scope({"type": "mcp", "server_label": "good.example or tool:mcp:good.example"})]
    for needed in (*asked, "model:x or responses.write", "model:m:x"):
        assert not scopes.allow(needed), needed
    assert scopes.allow("files.read or responses.write") and not scopes.allow("files.read or chat.read")


@pytest.mark.parametrize("group", GROUPS)
def test_all_is_every_group_and_not_admin(group: str) -> None:
    scopes = Scopes(("all",))
    scopes.require(f"{group}.read", f"{group}.write")
    for other in ("admin", "operator", "undeclared", "open"):
        assert not scopes.allow(other)


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ApiError) as refused:
        Scopes(("files",)).require("files.read", "responses.write", "admin")
    assert (refused.value.status, refused.value.code) == (403, "insufficient_permissions")
    assert "Missing scopes: responses.write, admin." in refused.value.message


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ([], ("all",)),
        (["api.all.read"], ("all.read",)),
        (["files.read", "files.read", "chat"], ("files.read", "chat")),
        (
            ["all", "tool:web_search_preview", "tool:mcp:h.example"],
            ("all", "tool:web_search", "tool:mcp:h.example"),
        ),
        (["admin", "model:org/m-*"], ("admin", "model:org/m-*")),
    ],
)
def test_scopes_as_they_are_written(written: list[str], read: tuple[str, ...]) -> None:
    assert read_scopes(written) == read


@pytest.mark.parametrize(
    ("written", "says"),
    [
        (["file"], "no scope 'file'"),
        (["responses.delete"], "no scope"),
        (["embeddings.read"], r"no scope 'embeddings.read'.*embeddings\.write"),
        (["all", "usage.write"], "no scope 'usage.write'"),
        (["admin.read"], "no scope"),
        (["operator"], "no scope"),
        (["model:"], "no scope"),
        (["model:a,b"], "no scope"),
        (["model:a b"], "no scope"),
        (["all,files"], "no scope"),
        (["model:a"], "no endpoint"),
        (["all", "model:" + "a" * 200], "at most 128 characters"),
        ([f"model:{n}" for n in range(65)], "at most 64"),
    ],
)
def test_what_is_no_scope_is_refused(written: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_scopes(written)


@pytest.mark.parametrize(
    ("tool", "scope"),
    [
        ({"type": "function", "name": "f"}, "tool:function"),
        ({"type": "web_search_preview"}, "tool:web_search"),
        ({"type": "unheard_of"}, "tool:unheard_of"),
        ({"type": "mcp", "server_label": "x", "server_url": "builtin:"}, "tool:mcp:builtin"),
        (
            {"type": "mcp", "server_label": "x", "server_url": "https://u:p@Host.example:8/p"},
            "tool:mcp:host.example",
        ),
        ({"type": "mcp", "server_label": "x", "connector_id": "connector_gmail"}, "tool:mcp:connector_gmail"),
        ({"type": "mcp", "server_label": "x"}, "tool:mcp:x"),
    ],
)
def test_the_scope_of_a_tool(tool: dict[str, str], scope: str) -> None:
    assert tool_scope(tool) == scope


def test_the_guide_has_every_group() -> None:
    """The table of `docs/keys.md` is the one that the server goes by; its words may be links."""
    guide = (Path(__file__).parents[3] / "docs" / "keys.md").read_text("utf-8")
    words = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", guide)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in words.splitlines()]
    for group, (reading, writing) in GROUPS.items():
        assert [f"`{group}`", reading, writing] in rows, group
