"""Which MCP servers there are, in the words of a refusal."""

from __future__ import annotations

import pytest

from server.errors import ApiError
from server.mcp_servers import Directory, read_mcp_settings
from tools import Egress


@pytest.mark.parametrize(
    ("servers", "told"),
    [({}, "here. The operator adds one"), ({"shop": {"command": ["true"]}}, "here. There are: shop. The")],
)
async def test_a_server_that_is_not_there_is_told_beside_those_that_are(
    servers: dict[str, dict[str, list[str]]], told: str
) -> None:
    directory = Directory(read_mcp_settings({"servers": servers}, {}), Egress())
    tool = {"type": "mcp", "server_label": "desk", "server_url": "builtin:desk"}
    with pytest.raises(ApiError) as refused:
        directory.require([tool], {}, "ann")
    assert told in refused.value.message
    await directory.close()
