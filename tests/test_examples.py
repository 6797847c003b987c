"""The examples, run as a reader would run them: against `antiphon serve` with the model that ships."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.start import serving
from tests.support.forking import READY

EXAMPLES = Path(__file__).parents[1] / "examples"
EXPECTED = {
    "quickstart": ["Your name is Mark.", "Your name is Anna.", "4 items in the conversation"],
    "stream_and_resume": ["resumed: '1, 2, 3, 4, 5, 6, 7, 8, 9, 10,"],
    "kill_and_resume": ["killed the server after event 20", "same text as without the kill: True"],
    "background": ["queued", "completed 1, 2, 3,", "response.completed"],
    "tool_outputs": ['get_weather {"city": "Paris"}', "official: ", "waiting: "],
    "agent": ["sunny"],
    "own_tools": ['get_weather {"city": "Paris"} -> sunny', "The weather in Paris is sunny"],
    "langchain_chat": ["Your name is Mark."],
    "offline_batch": [
        "Mark",
        "chosen: ",
        'get_weather {"city": "Paris"}',
        "fine: None - too long: the prompt has",
    ],
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server in a process of its own, on a free port."""
    with serving(tmp_path_factory.mktemp("data")) as address:
        yield address


def test_every_example_is_run() -> None:
    """An example that no test runs would rot."""
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_an_example_says_what_it_needs_besides_the_server(name: str) -> None:
    """`make serve` installs what the server needs; a client's packages are for its user to install."""
    tree = ast.parse((EXAMPLES / f"{name}.py").read_text())
    imported = set()
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        imported |= {name.split(".")[0] for name in names}
    wanted = {CLIENTS[each] for each in imported if each in CLIENTS}
    told = " ".join((ast.get_docstring(tree) or "").split())
    found = set(re.findall(r"pip install ([\w-]+)", told))
    brought = {"openai"} if found - {"openai"} else set()  # by the others
    assert wanted <= found | brought, wanted - found


CLIENTS = {"openai": "openai", "agents": "openai-agents", "langchain_openai": "langchain-openai"}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_example(name: str, url: str) -> None:
    """The program ends well and prints what its docstring promises."""
    done = subprocess.run(
        [READY, str(EXAMPLES / f"{name}.py")],
        env={**os.environ, "ANTIPHON_URL": url},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    for line in EXPECTED[name]:
        assert line in done.stdout
