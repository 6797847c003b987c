"""The house keeps its walls: who imports whom, what is light, what a wheel holds."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from engine.shipped import assembly

ROOT = Path(__file__).parents[1]
ROOMS = ("engine", "server", "storage", "tools")
LEAVES = ("engine", "storage", "tools")
FILES = [file for room in ROOMS for file in sorted((ROOT / room).rglob("*.py"))]

FORBIDDEN = {
    "engine": {"pydantic", "sqlalchemy", "fastapi", "starlette", "uvicorn"},
    "storage": {"torch", "transformers", "pydantic", "fastapi", "starlette", "uvicorn", "httpx"},
    "tools": {"torch", "transformers", "sqlalchemy", "fastapi", "starlette", "uvicorn", "pydantic"},
    "server": {
        "torch",
        "transformers",
        "triton",
        "llguidance",
        "tokenizers",
        "sqlalchemy",
        "aiosqlite",
        "alembic",
    },
}
"""What a room never imports, not even late."""

ORDERS = {
    "engine": (
        *("late", "types", "references", "engine_thread", "admission", "interface", "config", "step"),
        *("user_cache", "shipped", "model_folder", "turns", "failures"),
        "search",
        *("dialects", "tokenizer", "parsing", "structured"),
        *(
            "vision",
            "kernels",
            *("tiny", "small", "tiny_embedder"),
            "models",
            "executor",
            "tiers",
            "core",
            "benchmark",
            "pooling",
            "speech",
            "backends",
        ),
        *("llm_options", "llm"),
    ),
    "storage": (
        *("private_files", "patience", "records", "tables", "lineage", "claims", "kept_replies", "pairs"),
        *("drivers", "files", "containers", "chat_completions"),
        *("batches", "prompts", "vector_stores", "queries", "places", "importing", "migrate", "backup"),
        "inspection",
        "storage",
    ),
    "tools": (
        *(
            "spec",
            "encodings",
            "arguments",
            "ranking",
            "egress",
            "runtime",
            "priority",
            "landlock",
            "seccomp",
        ),
        *("documents", "images"),
        *("mcp", "sandbox", "builtin", "operator", "web"),
    ),
    "server": (
        *(
            "clock",
            "console",
            "masking",
            "progress",
            "threads",
            "errors",
            "limits",
            "settings",
            "mcp_servers",
            "web_settings",
            "images",
            "sse_frame",
            "event_profiles",
            "config",
            "telemetry",
        ),
        *("loading", "model_registry"),
        *(
            "environment",
            "quota",
            "usage",
            "ignored",
            "shapes",
            "audio_fields",
            "vector_stores",
            "items",
            "moderation",
            "schema",
            "containers",
        ),
        *(
            "access",
            "item_ids",
            "encrypted_reasoning",
            "input_files",
            "prompting",
            "webhooks",
            "pooling",
            "speech",
            "runs",
        ),
        "stateless",
        *("http", "batches", "admin", "routes", "process", "bench", "cli"),
    ),
    "server.runs": (
        *("events", "planning", "execution", "cluster"),
        *("forks", "views", "takeover", "intake", "tool_outputs", "runner"),
    ),
}
"""What stands in each of these packages, in its order: everything imports only what comes before it."""

MOST_MODULES = 15
"""In one package, its door not counted. Tests and their data are not counted at all."""

MOST_LINES = 100
"""Of one function, its signature and docstring counted."""

MOST_LINES_OF_99_PERCENT = 59
"""Of all but one function in a hundred of a room."""

VAGUE = re.compile(r"(^|_)(utils?|common|helpers?|base|managers?|services?)(_|$)")


@dataclass(frozen=True, slots=True)
class Facts:
    """What the rules ask of a file. Its tree is large, and is not kept.

    imports: wherever in it. functions: the lines, the first line and the name of each. offers: its `__all__`.
    """

    docstring: str | None
    imports: tuple[ast.Import | ast.ImportFrom, ...]
    functions: tuple[tuple[int, int, str], ...]
    offers: frozenset[str] | None


@cache
def facts(file: Path) -> Facts:
    """Read a file, once."""
    tree = ast.parse(file.read_text())
    found: list[ast.Import | ast.ImportFrom] = []
    functions = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            functions.append((node.end_lineno - node.lineno + 1, node.lineno, node.name))
    offers = None
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            offers = frozenset(ast.literal_eval(node.value))
    return Facts(ast.get_docstring(tree), tuple(found), tuple(functions), offers)


def imports(file: Path) -> list[str]:
    """Every module that a file imports, wherever in it; relative ones resolved."""
    package = list(file.relative_to(ROOT).parent.parts)
    found = []
    for node in facts(file).imports:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        else:
            above = package[: len(package) - node.level + 1] if node.level else []
            found.append(".".join([*above, *([node.module] if node.module else [])]))
    return found


# Where a rule is for every file, one test names all that break it: thousands of tests would cost much more.


def test_the_star() -> None:
    """Leaves import nothing of ours but themselves; the server imports leaves through their doors only."""
    wrong = []
    for file in FILES:
        path = file.relative_to(ROOT)
        room = path.parts[0]
        for name in imports(file):
            top = name.split(".")[0]
            if top in FORBIDDEN[room]:
                wrong.append(f"{path}: {room} must not import {name}")
            if top == "tests":
                wrong.append(f"{path} imports a test")
            if top in ROOMS and top != room:
                if room != "server":
                    wrong.append(f"{path}: {room} is a leaf and imports {name}")
                if name != top:
                    wrong.append(f"{path} goes through the door of {top}, not through {name}")
    assert not wrong, "\n".join(wrong)


def test_every_module_says_what_it_does_and_has_a_noun_for_a_name() -> None:
    wrong = []
    for file in FILES:
        path = file.relative_to(ROOT)
        if not facts(file).docstring:
            wrong.append(f"{path} does not begin with a docstring that says what it does")
        if any(VAGUE.search(part) for part in path.with_suffix("").parts):
            wrong.append(f"{path} has a vague name: the noun is missing")
    assert not wrong, "\n".join(wrong)


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(file): file for file in FILES}
PACKAGES = {module for module, file in MODULES.items() if file.name == "__init__.py"}


@cache
def own_imports(module: str) -> dict[str, set[str]]:
    """The modules of ours that a module imports, wherever in it, and the names that it takes from each.

    Imports for type checkers count. A module that is imported by its name from a package is itself imported;
    it stands with its own name. Relative imports are not used.
    """
    found: dict[str, set[str]] = {}
    for node in facts(MODULES[module]).imports:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in MODULES:
                    found.setdefault(alias.name, set())
        elif node.module in MODULES or node.level:
            assert node.module is not None and not node.level, f"{module} has a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.setdefault(inner if inner in MODULES else node.module, set()).add(alias.name)
    return found


def offered(package: str) -> frozenset[str]:
    """The `__all__` of a package."""
    offers = facts(MODULES[package]).offers
    assert offers is not None, f"{package} has no __all__"
    return offers


@pytest.mark.parametrize("package", ORDERS)
def test_nothing_imports_upwards(package: str) -> None:
    rank = {f"{package}.{name}": number for number, name in enumerate(ORDERS[package])}
    depth = package.count(".") + 2

    def part(module: str) -> str:
        return ".".join(module.split(".")[:depth])

    inside = [module for module in MODULES if module.startswith(f"{package}.")]
    assert {part(module) for module in inside} == set(rank), "each has a place in the order"
    for module in inside:
        for imported in own_imports(module):
            if imported.startswith(f"{package}."):
                assert rank[part(imported)] <= rank[part(module)], f"{module} imports {imported}, above it"


def test_there_is_no_circle_of_imports() -> None:
    """Not even one that only type checkers see."""
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " > ".join((*way[way.index(module) :], module))
        if module not in done:
            for imported in own_imports(module):
                visit(imported, (*way, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


def test_other_packages_are_imported_through_their_doors() -> None:
    """A module is for its own package and the packages in it; all others find there what the door offers."""
    wrong = []
    for module in MODULES:
        home = module if module in PACKAGES else module.rpartition(".")[0]
        for imported, names in own_imports(module).items():
            if imported in PACKAGES:
                inside = {name for name in names if f"{imported}.{name}" not in MODULES}
                if imported != home and (more := inside - offered(imported)):
                    wrong.append(f"{module} takes from {imported} what it does not offer: {more}")
                continue
            package, _, name = imported.rpartition(".")
            if f"{home}.".startswith(f"{package}."):
                continue
            if names != {name} or name not in offered(package):
                wrong.append(f"{module} goes past the door of {package}")
    assert not wrong, "\n".join(wrong)


def test_every_package_has_a_door_and_is_small_enough_to_be_known() -> None:
    wrong = []
    for package in sorted(PACKAGES):
        modules = [file for file in MODULES[package].parent.glob("*.py") if file.name != "__init__.py"]
        if len(modules) > MOST_MODULES:
            wrong.append(f"{package} has {len(modules)} modules")
        if not offered(package):
            wrong.append(f"the door of {package} offers nothing")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", ROOMS)
def test_functions_are_short_enough_to_be_read(room: str) -> None:
    lengths = sorted(
        (lines, f"{file.relative_to(ROOT)}:{first} {name}")
        for file in (ROOT / room).rglob("*.py")
        for lines, first, name in facts(file).functions
    )
    assert lengths[-1][0] <= MOST_LINES, lengths[-1]
    rest = lengths[: -1 - len(lengths) // 100]
    assert rest[-1][0] <= MOST_LINES_OF_99_PERCENT, lengths[len(rest) - 1 :]


def test_tests_lie_in_the_packages_that_they_test() -> None:
    for room in ROOMS:
        for file in (ROOT / "tests" / room).rglob("test_*.py"):
            package = ".".join(file.parent.relative_to(ROOT / "tests").parts)
            assert package in PACKAGES, f"{file.relative_to(ROOT)} lies in no package of {room}"


def test_alembic_is_no_package() -> None:
    """A package named alembic in the checkout would shadow the library."""
    assert (ROOT / "alembic" / "env.py").exists()
    assert not (ROOT / "alembic" / "__init__.py").exists()


def test_no_dependency_ships_a_top_level_package_of_ours() -> None:
    shipped = packages_distributions()
    for room in ROOMS:
        assert set(shipped.get(room, ())) <= {"antiphon"}, f"{room} is shipped by {shipped[room]}"


SERVE_WITHOUT_TORCH = """
import asyncio, sys, tempfile
from pathlib import Path
from tests.support.running import http_client, running_app

async def main():
    with tempfile.TemporaryDirectory() as folder:
        async with running_app(Path(folder)) as running, http_client(running) as client:
            assert (await client.post("/v1/responses", json={"input": "say hello"})).status_code == 200

asyncio.run(main())
loaded = {name.split(".")[0] for name in sys.modules}
heavy = loaded & {"torch", "transformers", "triton", "openai", "cryptography"}
assert not heavy, heavy
"""


def test_the_api_on_the_scripted_engine_and_migrations_never_import_torch() -> None:
    subprocess.run([sys.executable, "-c", SERVE_WITHOUT_TORCH], check=True, cwd=ROOT, timeout=60)


def test_what_a_wheel_holds(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path)],
        check=True,
        cwd=ROOT,
        capture_output=True,
        timeout=120,
    )
    (wheel,) = tmp_path.glob("antiphon-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(ROOMS)
    for file in FILES:
        assert str(file.relative_to(ROOT)) in names
    migrations = {file.name for file in (ROOT / "alembic" / "versions").glob("*.py")}
    assert migrations <= {
        Path(name).name for name in names if name.startswith("storage/migrations/versions/")
    }
    assert "storage/migrations/env.py" in names
    sources = [
        *(ROOT / "engine" / "kernels" / "cpu").glob("*.cpp"),
        *(ROOT / "engine" / "kernels" / "cpu").glob("*.h"),
    ]
    console = (ROOT / "server" / "console" / "web").rglob("*")
    models = (ROOT / "engine").glob("tiny*/checkpoint/*")
    small = (ROOT / "engine" / "small" / "adapter").glob("*")
    for shipped in (*models, *small, *sources, *console):
        if shipped.is_file():
            assert str(shipped.relative_to(ROOT)) in names
    assert not any("__pycache__" in name or name.endswith((".pyc", ".db")) for name in names)
    entry = zipfile.ZipFile(wheel).read(next(name for name in names if name.endswith("entry_points.txt")))
    assert b"antiphon = server.cli:main" in entry
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_servers_environment_reads_documents_and_runs_code() -> None:
    """By `make serve`; and what cuts plain text into chunks is no extra."""
    asked = subprocess.run(
        ["make", "-n", "-B", "serve"], check=True, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert "-e '.[files,code,small]'" in asked.stdout
    assert assembly.ALONE in asked.stdout
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[\[><=; ]", each)[0] for each in project["dependencies"]}
    assert "semantic-text-splitter" in names
    assert {"files", "code"} <= project["optional-dependencies"].keys()


def test_the_map_names_every_package() -> None:
    """A newcomer finds every room and every package in it on one page."""
    named = set(re.findall(r"`([a-z0-9_/]+)`", (ROOT / "CONTRIBUTING.md").read_text()))
    packages = {str(file.parent.relative_to(ROOT)) for file in FILES if file.name == "__init__.py"}
    assert packages <= named | {"tools"}, packages - named
