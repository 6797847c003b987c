"""What a service manager is told, over a socket as systemd has one."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from server.process import systemd
from server.process.systemd import ServiceManager
from tests.support.blocking import until
from tests.support.processes import server_process


@contextmanager
def manager(address: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(address)
        sock.settimeout(30)
        yield sock


def told(sock: socket.socket) -> dict[str, str]:
    return dict(line.split("=", 1) for line in sock.recv(4096).decode().splitlines())


def test_states_are_told_and_the_environment_is_cleaned(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    environment = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}
    with manager(address) as sock:
        service = ServiceManager.of(environment)
        assert environment == {} and service.watchdog_s == 3.0
        service.still_starting("loading")
        assert told(sock) == {"EXTEND_TIMEOUT_USEC": "60000000", "STATUS": "loading"}
        service.ready("listens")
        assert told(sock) == {"READY": "1", "STATUS": "listens"}
        service.reloading()
        reload = told(sock)
        assert reload["RELOADING"] == "1" and int(reload["MONOTONIC_USEC"]) > 0
        service.stopping("ending")
        assert told(sock) == {"STOPPING": "1", "STATUS": "ending"}


def test_an_abstract_socket_is_told_too() -> None:
    name = f"antiphon-test-{os.getpid()}"
    with manager(f"\0{name}") as sock:
        ServiceManager(f"@{name}").ready("listens")
        assert told(sock)["READY"] == "1"


@pytest.mark.parametrize("environment", [{}, {"WATCHDOG_USEC": "soon"}, {"WATCHDOG_PID": "1"}])
def test_without_a_manager_nobody_is_told(environment: dict[str, str]) -> None:
    service = ServiceManager.of(environment)
    service.ready("listens")
    assert service.address == "" and service.watchdog_s is None


def test_a_watchdog_of_another_process_is_not_ours() -> None:
    environment = {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}
    assert ServiceManager.of(environment).watchdog_s is None


def test_a_manager_that_has_gone_is_told_nothing_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service = ServiceManager(str(tmp_path / "gone"))
    service.ready("listens")
    service.ready("listens")
    assert len(caplog.messages) == 1 and service.address == ""


def filled(address: str) -> int:
    """Leave no room in a manager's queue, as while it is busy; returns how many datagrams it holds."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.setblocking(False)
        for num_sent in itertools.count():
            try:
                other.sendto(b"OTHER=1", address)
            except BlockingIOError:
                return num_sent
    raise AssertionError("the queue has no end")


async def test_signs_of_life_go_on_after_the_manager_was_busy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = str(tmp_path / "notify")
    with manager(address) as sock:
        num_queued = filled(address)
        life = asyncio.create_task(ServiceManager(address, watchdog_s=0.03).alive())
        await until(lambda: any("WATCHDOG=1" in message for message in caplog.messages))
        for _ in range(num_queued):
            assert "OTHER" in told(sock)
        assert "WATCHDOG" in await asyncio.to_thread(told, sock)
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)


async def test_a_change_of_state_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systemd, "ROOM_S", 30.0)
    address = str(tmp_path / "notify")
    with manager(address) as sock:
        service = ServiceManager(address)
        for tell, state in (
            (lambda: service.ready("listens"), "READY"),
            (service.reloading, "RELOADING"),
            (lambda: service.stopping("ending"), "STOPPING"),
        ):
            num_queued = filled(address)
            telling = asyncio.create_task(asyncio.to_thread(tell))
            for _ in range(num_queued):
                assert "OTHER" in await asyncio.to_thread(told, sock)
            assert state in await asyncio.to_thread(told, sock)
            await telling


def test_a_manager_that_stays_busy_is_told_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systemd, "ROOM_S", 0.01)
    address = str(tmp_path / "notify")
    with manager(address) as sock:
        service = ServiceManager(address)
        num_queued = filled(address)
        service.ready("listens")
        for _ in range(num_queued):
            assert "OTHER" in told(sock)
        service.stopping("ending")
        assert "STOPPING" in told(sock)


async def test_signs_of_life_come_while_the_process_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(systemd, "STARTING_S", 0.01)
    address = str(tmp_path / "notify")
    with manager(address) as sock:
        service = ServiceManager(address, watchdog_s=0.03)
        for said, work in (
            ("EXTEND_TIMEOUT_USEC", service.while_starting("x")),
            ("WATCHDOG", service.alive()),
        ):
            task = asyncio.create_task(work)
            for _ in range(2):
                assert said in await asyncio.to_thread(told, sock)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_a_server_tells_its_manager_from_start_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = str(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    seen: list[str] = []
    with manager(address) as sock:

        async def until(state: str) -> dict[str, str]:
            while True:
                lines = await asyncio.to_thread(told, sock)
                seen.extend(lines)
                if state in lines:
                    return lines

        async with server_process(tmp_path / "data") as server:
            assert (await until("READY"))["STATUS"] == f"listens on {server.url}"
            server.signal(signal.SIGHUP)
            await until("RELOADING")
            await until("READY")
            server.signal(signal.SIGTERM)
            await until("STOPPING")
            assert await server.ended() == 0
    assert seen[0] == "EXTEND_TIMEOUT_USEC"
