"""The table `[web]`, and what `antiphon doctor` says of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from mcp.server.mcpserver import MCPServer

from server.cli.doctor import CHECKS
from server.config import Config, ConfigError, load
from server.mcp_servers import read_mcp_settings
from server.process.lifecycle import Refused
from server.web_settings import WebSettings
from tests.support.loopback_web import loopback_web
from tests.support.mcp_servers import serving
from tests.support.running import http_client, running_app
from tests.support.talk import Api


def test_the_table_is_read_with_its_secret(tmp_path: Path) -> None:
    (tmp_path / "antiphon.toml").write_text('[web]\nprovider = "brave"\napi_key = { env = "SEARCH_KEY" }\n')
    config = load({"data": str(tmp_path)}, {"SEARCH_KEY": "s3cret"}).config
    search = config.web.search(config.mcp)
    assert search is not None and config.web.api_key == "s3cret"
    assert search.address == "https://api.search.brave.com/res/v1/web/search"
    assert "s3cret" not in repr(config) and "s3cret" not in repr(search)
    assert Config().web.search(config.mcp) is None


@pytest.mark.parametrize(
    ("table", "fault"),
    [
        (
            'provider = "google"',
            "web.provider: 'google' is no provider; there are: searxng, brave, tavily, mcp:NAME/TOOL",
        ),
        ('provider = "searxng"', "searxng answers where you run it: give url"),
        ('provider = "searxng"\nurl = "localhost"', "web.url: 'localhost' is no address"),
        ('provider = "searxng"\nurl = "me:secret@host?key=k"', "web.url: '***@host?***' is no address"),
        ('provider = "tavily"', "tavily needs a key: give api_key"),
        ('api_key = { env = "NONE" }', "web.api_key: there is no variable 'NONE'"),
        ('api_key = "s3\\nc"', "web.api_key: a header's value is printable ASCII"),
        ('url = "http://a"', "give provider, too"),
        ('provider = "mcp:desk"', "web.provider: 'mcp:desk' is no provider"),
        ('provider = "mcp:desk/search"\nurl = "http://a"', "in its table [mcp.servers.NAME]"),
        ('open = "all"', "web.open: "),
        ("limit = 1", "web.limit: "),
    ],
)
def test_a_wrong_table_is_refused_by_its_place(tmp_path: Path, table: str, fault: str) -> None:
    (tmp_path / "antiphon.toml").write_text(f"[web]\n{table}\n")
    with pytest.raises(ConfigError) as refused:
        load({"data": str(tmp_path)}, {})
    assert fault in str(refused.value) and "s3" not in str(refused.value)


async def test_doctor_makes_a_search_and_says_what_helps(tmp_path: Path) -> None:
    check = CHECKS["web"]
    assert "no search provider" in (await check(Config(data=tmp_path)))[1]
    async with loopback_web() as web:
        table = WebSettings(provider="searxng", url=web.url(""))
        config = Config(data=tmp_path, web=table, egress="public")
        for status, words in ((403, "add json to search.formats"), (429, "its limiter is on")):
            web.status = status
            verdict, said = await check(config)
            assert verdict == "note" and words in said and f"status {status}" in said
        web.status = 200
        assert (await check(config))[1].startswith(f"searxng at {web.url('/search')} answers")
        assert "pages are not opened" in (await check(Config(data=tmp_path, web=table)))[1]
    verdict, said = await check(config)
    assert verdict == "note" and "127.0.0.1" in said


async def test_the_demo_is_a_folder_with_documents(tmp_path: Path) -> None:
    check = CHECKS["web"]
    (tmp_path / "docs").mkdir()
    verdict, said = await check(Config(data=tmp_path, demo_web=tmp_path / "docs"))
    assert (verdict, "there is no .md, .txt or .html file" in said) == ("FAIL", True)
    (tmp_path / "docs" / "a.md").write_text("# A\n\nwords")
    assert (await check(Config(data=tmp_path, demo_web=tmp_path / "docs")))[0] == "ok"
    missing = await check(Config(data=tmp_path, demo_web=tmp_path / "none"))
    assert missing == ("FAIL", f"--demo-web: there is no folder {tmp_path}/none")
    file = await check(Config(data=tmp_path, demo_web=tmp_path / "docs" / "a.md"))
    assert file == ("FAIL", f"--demo-web: {tmp_path}/docs/a.md is not a folder")
    both = Config(data=tmp_path, demo_web=tmp_path / "docs", web=WebSettings(provider="brave", api_key="k"))
    assert (await check(both))[0] == "FAIL"


async def test_a_tool_of_an_mcp_server_is_the_provider(tmp_path: Path) -> None:
    """A search by it has sources and citations like any, and doctor tries it."""
    finder, asked = MCPServer("finder"), list[str]()

    @finder.tool()
    def search(query: str, limit: int = 10) -> list[dict[str, str]]:
        """Search."""
        asked.append(f"{query} {limit}")
        return [{"title": "Tides", "url": "https://bay.example/tides", "snippet": "Two days after."}]

    async with serving(finder.streamable_http_app()) as url:
        servers = read_mcp_settings({"servers": {"finder": {"url": f"{url}/mcp"}}}, {})
        table = WebSettings(provider="mcp:finder/search")
        settings = {"mcp": servers, "web": table}
        async with running_app(tmp_path, registry=None, **settings) as server, http_client(server) as client:
            response = await Api(client).create(
                'call web_search {"queries": ["spring tide"]}',
                tools=[{"type": "web_search", "filters": {"allowed_domains": ["bay.example"]}}],
                include=["web_search_call.action.sources"],
            )
        verdict, said = await CHECKS["web"](Config(data=tmp_path, egress="public", **settings))
        assert (verdict, said) == ("ok", f"mcp:finder/search at {url}/mcp answers with 1 results")
        other = {**settings, "web": WebSettings(provider="mcp:finder/look")}
        verdict, said = await CHECKS["web"](Config(data=tmp_path, egress="public", **other))
        assert verdict == "note" and "What helps: its tools are: search." in said
    found, answer = response["output"]
    assert found["action"]["sources"] == [{"type": "url", "url": "https://bay.example/tides"}]
    assert answer["content"][0]["annotations"][0]["title"] == "Tides"
    assert asked == ["spring tide site:bay.example 8", "test 1"]


async def test_a_server_does_not_start_with_a_provider_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"no MCP server 'desk': give it a table \[mcp.servers.desk\]"):
        async with running_app(tmp_path, registry=None, web=WebSettings(provider="mcp:desk/search")):
            pass
    assert (await CHECKS["web"](Config(data=tmp_path, web=WebSettings(provider="mcp:desk/search"))))[
        0
    ] == "FAIL"
