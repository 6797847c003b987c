"""A folder of documents as a web: what is found, and what is opened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import PAGE, SEARCH, ToolError, ToolsError, execute, folder_tools, read_folder
from tools.web.providers import Query

TIDES = "# Tides of the bay\n\nThe spring tide is highest two days after the full moon.\n"


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    (tmp_path / "deep er").mkdir()
    (tmp_path / "tides.md").write_text(TIDES)
    (tmp_path / "deep er" / "rules.TXT").write_text("Boats keep to the right of the second buoy.")
    (tmp_path / "page.html").write_text(
        "<html><head><title>The lighthouse</title></head><body><article><p>The lighthouse of the bay shows"
        " its light every four seconds, all night long, to boats on the sea.</p></article></body></html>"
    )
    (tmp_path / "photo.png").write_bytes(b"\x89PNG")
    return tmp_path


async def test_documents_are_found_by_their_words(documents: Path) -> None:
    folder = await read_folder(documents)
    assert len(folder) == 3
    for query, url, title in (
        ("spring tide?", "https://demo.test/tides.md", "Tides of the bay"),
        (
            '"second" OR buoy)',
            "https://demo.test/deep%20er/rules.TXT",
            "https://demo.test/deep%20er/rules.TXT",
        ),
        ("LIGHTHOUSE*", "https://demo.test/page.html", "The lighthouse"),
    ):
        first = (await folder.find(Query(query, 4)))[0]
        assert (first.url, first.title) == (url, title)
    assert [len(await folder.find(Query(query, 1))) for query in ("bay", "zebra", "?!", "")] == [1, 0, 0, 0]


async def test_documents_are_opened_where_they_were_seen(documents: Path) -> None:
    folder = await read_folder(documents)
    page = await folder.page("https://demo.test/tides.md", ())
    assert (page.title, page.text) == ("Tides of the bay", TIDES.strip())
    with pytest.raises(ToolError, match="no such page"):
        await folder.page("https://demo.test/photo.png", ())
    with pytest.raises(ToolError, match="not among the allowed domains"):
        await folder.page("https://demo.test/tides.md", ["example.org"])
    tools = folder_tools(folder)
    asked = {"url": "https://demo.test/tides.md", "domains": [], "blocked": [], "seen": []}
    assert "was not seen before" in str((await execute(tools[PAGE], json.dumps(asked))).error)
    wanted = {"queries": ["tide", "buoy"], "count": 8, "domains": [], "blocked": []}
    found = await execute(tools[SEARCH], json.dumps(wanted))
    assert [hit["url"][-5:] for hit in json.loads(found.output or "")["results"]] == ["es.md", "s.TXT"]


async def test_a_folder_without_documents_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ToolsError, match=r"no \.md, \.txt or \.html file"):
        await read_folder(tmp_path)
    with pytest.raises(ToolsError, match=f"there is no folder {tmp_path / 'nowhere'}"):
        await read_folder(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(ToolsError, match="is not a folder"):
        await read_folder(tmp_path / "file")
