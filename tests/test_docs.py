"""The README and the guides, run as a reader would run them: every block, and what it is said to print."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from server.config import settings
from server.errors import _TABLE
from server.input_files.seen_images import _CODES as OF_IMAGES
from server.process.lifecycle import _REFUSALS
from server.shapes import BOUND_CODES
from tests.support.pages import RUN, PageError, read_page, run_page

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKED = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "RELIABILITY.md", ROOT / "BENCHMARKS.md"]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_block_does_what_the_page_says(path: Path, tmp_path: Path) -> None:
    """Each block runs, in order; one that cannot run here says why."""
    page = read_page(path)
    runnable = [block for block in page.blocks if block.language in RUN and block.file is None]
    assert runnable, "a guide shows something that can be run"
    assert run_page(page, tmp_path) + sum(block.not_run is not None for block in runnable) == len(runnable)


@pytest.mark.parametrize("path", LINKED, ids=lambda path: path.name)
def test_every_link_leads_somewhere(path: Path) -> None:
    """Links to files of this repository, and to headings in them."""
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text("utf-8")):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), f"{path.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text("utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, f"{path.name} links to {target}"


def error_codes() -> set[str]:
    """Every code that an error of the server can have."""
    codes: set[str | None] = {code for code, _, _ in _REFUSALS.values()}
    codes |= {row.code for row in _TABLE.values()}
    codes |= set(BOUND_CODES.values()) | set(OF_IMAGES.values())
    places = {"refuse": 2, "_refuse": 2}  # where the code stands among a call's arguments
    for file in (ROOT / "server").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            given = [word.value for word in node.keywords if word.arg == "code"]
            given += node.args[places[name] :][:1] if name in places else []
            values = [each.value for each in given if isinstance(each, ast.Constant)]
            codes |= {value for value in values if isinstance(value, str)}
    return {code for code in codes if code is not None}


def test_the_page_on_errors_has_every_code_and_no_other() -> None:
    page = (ROOT / "docs" / "errors.md").read_text("utf-8")
    tables, prose = (
        re.findall(r"^\| \d+ \| `(\w+)` \|", page, re.MULTILINE),
        set(re.findall(r"`(\w+)`", page)),
    )
    known = error_codes()
    assert known <= prose, f"the page does not explain {sorted(known - prose)}"
    assert set(tables) <= known, f"no error has the codes {sorted(set(tables) - known)}"


def test_the_page_on_running_has_every_setting() -> None:
    page = (ROOT / "docs" / "running.md").read_text("utf-8")
    named = set(re.findall(r"`(?:--)?([\w-]+)[^`]*`", page))
    missing = [row.name for row in settings() if not {row.name, row.flag[2:]} & named]
    assert not missing, f"the page does not explain {missing}"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("```sh\nfalse\n```\n", "failed"),
        ("```sh\ntrue | false | true\n```\n", "failed"),
        ("```python\nraise ValueError\n```\n", "failed"),
        ("```sh\necho one\n```\n\n```text\ntwo\n```\n", "'two' is not in its place"),
        ("```sh\nprintf 'a\\nb\\n'\n```\n```text\nb\na\n```\n", "'a' is not in its place"),
        ("```fish\ntrue\n```\n", "a block of fish"),
        ("<!-- not run: why -->\nWords.\n\n```sh\nfalse\n```\n", "between a marker and its block"),
    ],
)
def test_a_page_that_does_not_hold_is_found_out(text: str, fault: str, tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text(f"<!-- server: none -->\n{text}")
    with pytest.raises(PageError, match=fault):
        run_page(read_page(file), tmp_path)


def test_blocks_share_a_shell_and_an_interpreter_and_markers_are_obeyed(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text(
        "<!-- server: none -->\n"
        "```sh\nname=Mark\n```\n\n```python\nseen = [8000]\n```\n\n"
        "<!-- file: note.txt -->\n```text\nport 8000\n```\n\n"
        "<!-- first: echo hidden > hidden.txt -->\n```sh\necho $name; cat hidden.txt note.txt\n```\n\n"
        "```text\nMa...k\nhidden\nport ...\n```\n\n"
        "```python\nprint(seen[0] == int(open('note.txt').read().split()[1]))\n```\n\n```text\nTrue\n```\n\n"
        "<!-- not run: it fails -->\n```sh\nfalse\n```\n"
    )
    assert run_page(read_page(file), tmp_path) == 4
