"""Which MCP servers there are, in the words of a refusal, and what their table may not have."""

from __future__ import annotations

import tomllib

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


@pytest.mark.parametrize("secret", ['token = "s3\\nc"', 'headers = { "X-Key" = "s3ü" }'])
def test_a_secret_that_no_header_can_have_is_refused_unsaid(secret: str) -> None:
    table = tomllib.loads(f'[servers.desk]\nurl = "http://a/mcp"\n{secret}\n')
    with pytest.raises(ValueError, match="a header's value is printable ASCII") as refused:
        read_mcp_settings(table, {})
    assert "s3" not in str(refused.value)
