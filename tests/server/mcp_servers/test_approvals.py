"""Which calls of MCP tools need approval, by `require_approval` and by the operator's policy."""

from __future__ import annotations

from typing import Any

import pytest

from server.mcp_servers import Approvals, read_mcp_settings
from tests.support.wire import Json

READS = {"readOnlyHint": True}
WRITES: Json = {}

REMOTE: Json = {"type": "mcp", "server_label": "desk", "server_url": "builtin:desk"}
OWN: Json = {"type": "mcp", "server_label": "own", "server_url": "builtin:"}
LOOK: Json = {"tool_names": ["look_up"]}
READ_ONLY: Json = {"read_only": True}


def asked(
    wanted: Any, name: str = "look_up", hints: Json | None = None, *, tool: Json = REMOTE, trust: bool = False
) -> bool:
    changed = tool if wanted is None else {**tool, "require_approval": wanted}
    return Approvals("request", (tool["server_label"],) if trust else ()).ask(changed, name, hints)


def test_a_setting_for_all_tools() -> None:
    assert [asked("always"), asked("never"), asked(None)] == [True, False, True]
    assert [asked(wanted, tool=OWN) for wanted in ("always", "never", None)] == [True, False, False]


@pytest.mark.parametrize(
    ("wanted", "look_up", "book"),
    [
        ({}, True, True),
        ({"never": {}}, False, False),
        ({"never": LOOK}, False, True),
        ({"always": LOOK}, True, True),
        ({"always": LOOK, "never": {}}, True, False),
        ({"always": LOOK, "never": LOOK}, True, True),
        ({"never": {"tool_names": []}}, True, True),
    ],
)
def test_filters_by_name(wanted: Json, look_up: bool, book: bool) -> None:
    assert (asked(wanted, "look_up"), asked(wanted, "book")) == (look_up, book)


@pytest.mark.parametrize(
    ("wanted", "reads", "writes"),
    [
        ({"never": READ_ONLY}, False, True),
        ({"never": {"read_only": False}}, True, False),
        ({"never": {}, "always": {"read_only": False}}, False, True),
        ({"never": {**READ_ONLY, "tool_names": ["book"]}}, True, True),
    ],
)
def test_a_hint_counts_where_the_operator_trusts_the_server(wanted: Json, reads: bool, writes: bool) -> None:
    assert asked(wanted, hints=READS, trust=True) is reads
    assert asked(wanted, hints=WRITES, trust=True) is writes


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("hints", [READS, WRITES, {"readOnlyHint": False}])
def test_a_hint_of_another_server_never_lowers_the_guard(reads: bool, hints: Json) -> None:
    assert asked({"never": {"read_only": reads}}, hints=hints)
    assert asked({"never": {}, "always": {"read_only": reads}}, hints=hints)


def test_the_operator_decides_for_all() -> None:
    for tool in (REMOTE, OWN):
        for wanted in ("always", "never", {"never": LOOK}):
            changed = {**tool, "require_approval": wanted}
            assert Approvals("always").ask(changed, "look_up")
            assert not Approvals("never").ask(changed, "look_up")


def test_the_operators_setting() -> None:
    assert read_mcp_settings({}, {}).approval == "request"
    assert read_mcp_settings({"approval": "always"}, {}).approval == "always"
    with pytest.raises(ValueError, match=r"mcp\.approval"):
        read_mcp_settings({"approval": "sometimes"}, {})
