"""Fixtures: a running server, and clients of it."""

from __future__ import annotations

import gc
import os
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import certifi
import httpx
import pytest

from storage.drivers import sqlite
from tests.support import unsynced
from tests.support.forking import PREPARED, install
from tests.support.running import (
    ON_POSTGRESQL,
    Running,
    give_back_databases,
    http_client,
    live_app,
    running_app,
)

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from tests.support.postgres import Postgres


# Read when torch is first imported. Its threads would get in the way of each other, and of other tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported

PREPARED.append(unsynced.__name__)
install()


# A client that is made without a word about certificates reads all that this machine trusts, which takes it
# 40 ms; tests make thousands, and speak to loopback. What a test asks for by other files is read each time.
read_certificates = ssl.create_default_context
known_certificates = cache(read_certificates)
CERTIFICATES = {certifi.where(), os.environ.get("SSL_CERT_FILE")}  # the files of this machine


def certificates(purpose: ssl.Purpose = ssl.Purpose.SERVER_AUTH, **places: str | None) -> ssl.SSLContext:
    """`ssl.create_default_context`, which reads those of this machine once."""
    usual = places.keys() <= {"cafile"} and places.get("cafile", certifi.where()) in CERTIFICATES
    return (known_certificates if usual else read_certificates)(purpose, **places)  # type: ignore[arg-type]


ssl.create_default_context = certificates


class Statements(dict[Any, Any]):
    """Compiled statements of all databases of one kind: SQLAlchemy keeps those of each engine by themselves,
    and tests open thousands of databases."""

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(self._shared(key), default)

    def __setitem__(self, key: Any, compiled: Any) -> None:
        super().__setitem__(self._shared(key), compiled)

    @staticmethod
    def _shared(key: Any) -> Any:
        dialect, *statement = key
        return type(dialect), dialect.statement_compiler, *statement


sqlite.create_engine = partial(  # type: ignore[assignment, attr-defined]
    sqlite.create_engine,  # type: ignore[attr-defined]
    execution_options={"compiled_cache": Statements()},
)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What collecting makes, some millions of objects, lasts as long as the run does: the garbage collector
    does not look through it meanwhile, nor each time that it looks for what the tests left, which is seldomer
    than usual."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000)
        gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--long` runs everything."""
    parser.addoption("--long", action="store_true", help="also what takes long, and every case of a sample")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without `--long`, leaves out what takes long, and all but one of n cases where a sample is enough."""
    if config.getoption("--long"):
        return
    seen: Counter[str] = Counter()
    kept, left_out = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        function = item.nodeid.partition("[")[0]
        sampled = item.get_closest_marker("sampled")
        passed_over = sampled is not None and seen[function] % sampled.args[0]
        seen[function] += 1
        (left_out if passed_over or item.get_closest_marker("long") else kept).append(item)
    items[:] = kept
    if left_out:
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A real PostgreSQL server, started by the first test that asks for it.

    A machine that runs several tests at once stands still for seconds at times. No test is about how long a
    statement may take, so here it may take a minute.
    """
    from tests.support.postgres import the_server

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("storage.drivers.postgres.STATEMENT_MS", 60_000)
        patch.setattr("storage.drivers.postgres.COMMAND_S", 61.0)
        yield the_server()


if ON_POSTGRESQL:

    @pytest.fixture(autouse=True)
    def databases(postgres: Postgres, request: pytest.FixtureRequest) -> Iterator[None]:
        """Where the servers of tests have their state on PostgreSQL: it is given back when a test is over."""
        yield
        if (folder := request.node.funcargs.get("tmp_path")) is not None:
            give_back_databases(folder)


@pytest.fixture(scope="session")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from a name of `seeing_checkpoints.SEEING` to the folder of that checkpoint."""
    from tests.support.seeing_checkpoints import make_seeing

    made: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in made:
            made[name] = make_seeing(name, tmp_path_factory.mktemp(name))
        return made[name]

    return find


@pytest.fixture
async def server_app(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Running]:
    """A server over ASGI, on a scripted engine and an empty database; with the settings that a test gives it
    by `indirect` parameters, as `with_sandbox` does."""
    async with running_app(tmp_path, **getattr(request, "param", {})) as running:
        yield running


@pytest.fixture
async def client(server_app: Running) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of `server_app`."""
    async with http_client(server_app) as client:
        yield client


@pytest.fixture
async def sdk(server_app: Running) -> AsyncIterator[AsyncOpenAI]:
    """The official SDK against `server_app`."""
    import httpx2
    from openai import AsyncOpenAI

    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(server_app.app))
    async with AsyncOpenAI(
        api_key="unused", base_url=f"{server_app.base_url}/v1", http_client=http, max_retries=0
    ) as sdk:
        yield sdk


@pytest.fixture
async def live_server(tmp_path: Path) -> AsyncIterator[Running]:
    """A server on a socket: for streams, disconnects and whatever else ASGI alone does not show."""
    async with live_app(tmp_path) as running:
        yield running


@pytest.fixture
async def live_client(live_server: Running) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of `live_server`."""
    async with http_client(live_server) as client:
        yield client


@pytest.fixture
async def live_sdk(live_server: Running) -> AsyncIterator[AsyncOpenAI]:
    """The official SDK against `live_server`."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(api_key="unused", base_url=f"{live_server.base_url}/v1", max_retries=0) as sdk:
        yield sdk
