"""Work that comes at once begins in parts, in its order, and nothing else waits for all of it."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from contextlib import suppress
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from server.http.authentication import BEGUN_AT_ONCE
from server.threads import LoopTurns
from tests.support.blocking import until
from tests.support.running import Running, http_client

AT_ONCE = 3


async def test_a_few_begin_in_each_turn_of_the_loop() -> None:
    turns, begun = LoopTurns(AT_ONCE), []

    async def work(number: int) -> None:
        await turns.take()
        begun.append(number)

    tasks = [asyncio.create_task(work(number)) for number in range(10)]
    sizes = []
    for _ in range(10):
        before = len(begun)
        await asyncio.sleep(0)
        sizes.append(len(begun) - before)
    assert begun == list(range(10)) and max(sizes) == AT_ONCE and all(task.done() for task in tasks)
    await asyncio.sleep(0)  # a turn later nobody is ahead
    alone = turns.take()
    with suppress(StopIteration):
        alone.send(None)
        raise AssertionError("it waited")


async def test_who_no_longer_waits_takes_no_turn() -> None:
    turns, begun = LoopTurns(AT_ONCE), []

    async def work(number: int) -> None:
        await turns.take()
        begun.append(number)

    tasks = [asyncio.create_task(work(number)) for number in range(9)]
    await asyncio.sleep(0)
    assert begun == [0, 1, 2]
    for task in tasks[3:6]:
        task.cancel()
    for _ in range(3):  # as many turns of the loop as three more tasks take: one to be let go, one to begin
        await asyncio.sleep(0)
    assert begun == [0, 1, 2, 6, 7, 8]


async def test_requests_that_arrive_together_begin_a_few_at_a_time(live_server: Running) -> None:
    num_requests, turn, begun = 5 * BEGUN_AT_ONCE, 0, Counter[int]()
    loop = asyncio.get_running_loop()

    async def route(request: Request) -> Response:
        begun[turn] += 1
        return Response()

    def count() -> None:
        nonlocal turn
        turn += 1
        if begun.total() < num_requests:
            loop.call_soon(count)

    live_server.app.add_route("/count", route, methods=["POST"])
    async with http_client(live_server) as client:
        await client.post("/count")  # from now on, who asks is known without a look into the database
    begun.clear()
    address = urlsplit(live_server.base_url)
    where = (str(address.hostname), int(address.port or 0))
    clients = [await asyncio.to_thread(socket.create_connection, where) for _ in range(num_requests)]
    await until(lambda: live_server.life.num_connections() == num_requests)
    for sock in clients:  # all of them before the loop looks at any
        sock.sendall(b"POST /count HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n")
    count()
    for sock in clients:
        assert (await asyncio.to_thread(sock.recv, 12)) == b"HTTP/1.1 200"
        sock.close()
    assert begun.total() == num_requests and max(begun.values()) == BEGUN_AT_ONCE
