"""The table `[web]`, and what `antiphon doctor` says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.cli.doctor import CHECKS
from server.config import Config, ConfigError, load
from server.web_settings import WebSettings
from tests.support.loopback_web import loopback_web


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
        ('provider = "tavily"', "tavily needs a key: give api_key"),
        ('api_key = { env = "NONE" }', "web.api_key: there is no variable 'NONE'"),
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
    assert fault in str(refused.value)


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
    both = Config(data=tmp_path, demo_web=tmp_path / "docs", web=WebSettings(provider="brave", api_key="k"))
    assert (await check(both))[0] == "FAIL"
