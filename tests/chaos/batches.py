"""Row 32: servers are killed while they carry batches on, and every request of these is looked for."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import orjson

from tests.chaos.driver import Client, Server, free_port, serving
from tests.chaos.history import History, Json
from tests.chaos.report import Form, Report, row, spread
from tests.chaos.scene import MINE, SCRIPTED
from tests.support.batching import line
from tests.support.postgres import postgres_server

FLAGS = (*SCRIPTED, "--tick-s", "0.02")
LINES = 60  # of a batch
BAD = 12  # every so many of them is refused
AT_ONCE = 3  # batches
PROGRESS = 3 * 8 + 8  # requests that end between kills: what was under way, and more
LEASE_S = 2.0
ENDED = ("completed", "failed", "expired", "cancelled")

Outcome = tuple[int, str]
"""What came of a request: the status, and the text or the code of the error."""

KINDS = ("/v1/responses", "/v1/chat/completions", "/v1/completions")


def lines_for(endpoint: str, draw: random.Random) -> list[str]:
    """The requests of a batch, of different lengths; some are refused."""
    found = []
    for number in range(LINES):
        said = f"count {draw.randint(2, 16)}"
        body: Json = {
            "/v1/responses": {"input": said},
            "/v1/chat/completions": {"messages": [{"role": "user", "content": said}]},
            "/v1/completions": {"prompt": said},
        }[endpoint]
        if number % BAD == BAD - 1:
            body["temperature"] = "hot"
        found.append(line(f"{endpoint} {number}", endpoint, body))
    return found


def outcome(result: Json) -> Outcome:
    """What a line of an output or error file says."""
    status, body = result["response"]["status_code"], result["response"]["body"]
    if status != 200:
        return status, body["error"]["code"]
    if "output" in body:
        return status, body["output"][0]["content"][0]["text"]
    choice = body["choices"][0]
    return status, choice["message"]["content"] if "message" in choice else choice["text"]


@dataclass(slots=True)
class Crowd:
    """Batches that are begun one after the other. files: their inputs, by endpoint. going: requests that have
    ended, by the batch, of those that have not."""

    client: Client
    draw: random.Random
    files: dict[str, str] = field(default_factory=dict)
    going: dict[str, int] = field(default_factory=dict)
    num_done: int = 0  # requests of batches that have ended
    stopping: bool = False

    async def upload(self, draw: random.Random) -> None:
        """Bring the inputs."""
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {MINE}"}) as session:
            for endpoint in KINDS:
                form = aiohttp.FormData({"purpose": "batch"})
                form.add_field("file", "\n".join(lines_for(endpoint, draw)), filename="input.jsonl")
                async with session.post(f"{await self.client.url()}/v1/files", data=form) as reply:
                    assert reply.status == 200, await reply.text()
                    self.files[endpoint] = (await reply.json())["id"]

    @property
    def progress(self) -> int:
        """Requests that have ended."""
        return self.num_done + sum(self.going.values())

    async def work(self) -> None:
        """Keep some batches going until `stopping`."""
        while not self.stopping:
            while len(self.going) < AT_ONCE:
                await self.begin(self.draw.choice(KINDS))
            for id in list(self.going):
                found = (await self.client.sure("GET", f"/v1/batches/{id}")).json
                counts = found["request_counts"]
                self.going[id] = counts["completed"] + counts["failed"]
                if found["status"] in ENDED:
                    self.num_done += self.going.pop(id)
            await asyncio.sleep(0.05)

    async def begin(self, endpoint: str) -> None:
        """One more batch; where the reply is cut, it may be two."""
        asked = {"input_file_id": self.files[endpoint], "endpoint": endpoint, "completion_window": "24h"}
        self.going[(await self.client.sure("POST", "/v1/batches", asked)).json["id"]] = 0

    async def results(self) -> list[tuple[Json, list[Json]]]:
        """All batches, once all have ended, and the lines of their files."""
        async with asyncio.timeout(180):
            found = await self._all("batches")
            while any(each["status"] not in ENDED for each in found):
                await asyncio.sleep(0.2)
                found = await self._all("batches")
        return [(each, await self._lines(each)) for each in found]

    async def responses(self) -> list[str]:
        """The ids of all stored responses."""
        return [each["id"] for each in await self._all("responses")]

    async def _all(self, what: str) -> list[Json]:
        found: list[Json] = []
        after = ""
        while True:
            page = (await self.client.sure("GET", f"/v1/{what}?limit=100{after}")).json
            found += page["data"]
            if not page["has_more"]:
                return found
            after = f"&after={page['last_id']}"

    async def _lines(self, batch: Json) -> list[Json]:
        found = []
        for id in (batch["output_file_id"], batch["error_file_id"]):
            if id is not None:
                reply = await self.client.sure("GET", f"/v1/files/{id}/content")
                found += [orjson.loads(each) for each in reply.body.splitlines()]
        return found


@asynccontextmanager
async def crowd(servers: Sequence[Server], form: Form, name: str) -> AsyncIterator[Crowd]:
    """Servers that have the inputs, and their client."""
    draw = form.draw(name)
    async with serving(*servers), Client(servers, History(), draw, key=MINE) as client:
        made = Crowd(client, draw)
        await made.upload(form.draw("lines"))
        yield made


async def undisturbed(form: Form) -> dict[str, Outcome]:
    """What comes of each request where nothing happens to the server."""
    quiet = Server(form.folder / "quiet", *SCRIPTED, port=free_port(form.draw("quiet")))
    async with crowd([quiet], form, "quiet crowd") as calm:
        for endpoint in KINDS:
            await calm.begin(endpoint)
        results = await calm.results()
    return {each["custom_id"]: outcome(each) for _, lines in results for each in lines}


async def killing(
    form: Form, report: Report, servers: Sequence[Server], name: str, kills: int
) -> list[float]:
    """Kills of one server or another while batches are carried on; then all requests are looked for. Returns
    the seconds until requests ended again."""
    expected = await undisturbed(form)
    report.holds(len(expected) == len(KINDS) * LINES, f"{len(expected)} requests without a fault")
    caught: Counter[str] = Counter()
    pauses: list[float] = []
    clock = asyncio.get_running_loop().time
    async with crowd(servers, form, name) as busy:
        working = asyncio.create_task(busy.work())
        for number in range(kills):
            await _advanced(busy, working, PROGRESS)
            await asyncio.sleep(busy.draw.uniform(0.0, 0.8))
            for id in list(busy.going):
                caught[(await busy.client.sure("GET", f"/v1/batches/{id}")).json["status"]] += 1
            victim, then = busy.draw.choice(servers), clock()
            await victim.kill()
            starting = asyncio.create_task(victim.start())
            await _advanced(busy, working, 1)
            pauses.append(clock() - then)
            await starting
            if number % 10 == 9:
                report.so_far(f"{number + 1} kills")
        busy.stopping = True
        await working
        results, stored = await busy.results(), await busy.responses()
    made = _check(report, results, expected)
    report.holds(len(stored) == len(set(stored)), "a response is listed twice")
    report.holds(set(made) == set(stored), f"{len(stored)} responses are stored, {len(made)} are in files")
    listed = ", ".join(f"{count} {status}" for status, count in sorted(caught.items()))
    report.figure(f"{name}: {kills} kills, batches at them: {listed}")
    report.figure(f"{len(results)} batches, {sum(len(lines) for _, lines in results)} requests, each once")
    report.figure(f"{len(made)} responses made once; requests ended again after {spread(pauses)}")
    return pauses


async def _advanced(busy: Crowd, working: asyncio.Task[None], num: int) -> None:
    """Wait until so many more requests have ended: what does not get on under six claims is given up."""
    wanted = busy.progress + num
    async with asyncio.timeout(180):
        while busy.progress < wanted:
            if working.done():
                await working
            await asyncio.sleep(0.01)


def _check(report: Report, results: list[tuple[Json, list[Json]]], expected: dict[str, Outcome]) -> list[str]:
    """Every request of every batch is in its files once, as without a fault; the ids of responses."""
    made = []
    for batch, lines in results:
        told, endpoint = f"{batch['id']} ({batch['endpoint']})", batch["endpoint"]
        wanted = {id for id in expected if id.startswith(f"{endpoint} ")}
        times = Counter(each["custom_id"] for each in lines)
        report.holds(batch["status"] == "completed", f"{told} ended as {batch['status']}: {batch['errors']}")
        report.holds(set(times) == wanted, f"{told} lacks {sorted(wanted - set(times))[:5]}")
        report.holds(max(times.values(), default=1) == 1, f"{told} has {times.most_common(3)}")
        counts = batch["request_counts"]
        failed = sum(each["response"]["status_code"] != 200 for each in lines)
        report.holds(
            counts == {"total": LINES, "completed": LINES - failed, "failed": failed}, f"{told}: {counts}"
        )
        for each in lines:
            got, want = outcome(each), expected.get(each["custom_id"])
            report.holds(got == want, f"{told}, {each['custom_id']}: {got} instead of {want}")
            if endpoint == "/v1/responses" and got[0] == 200:
                made.append(each["response"]["body"]["id"])
    report.holds(len(made) == len(set(made)), "a response stands for two requests")
    return made


@row(
    "32",
    "`kill -9` while batches are carried on: a server on SQLite, one of two replicas on PostgreSQL",
    "every `custom_id` exactly once in the output or error file, every outcome equals that of an "
    "uninterrupted run, every response is made once",
    short=False,  # tests/server/batches/test_batches_after_kill.py kills servers too
)
async def kill_in_batches(form: Form, report: Report) -> None:
    """120 and 50 kills in full, 2 of each in short."""
    draw = form.draw("ports")
    alone = Server(form.folder / "alone", *FLAGS, port=free_port(draw))
    await killing(form, report, [alone], "SQLite", form.of(2, 120))
    with postgres_server() as postgres:
        flags = (*FLAGS, "--db", await postgres.fresh(), "--lease-s", str(LEASE_S))
        pair = [Server(form.folder / f"replica-{n}", *flags, port=free_port(draw)) for n in range(2)]
        await killing(form, report, pair, "PostgreSQL", form.of(2, 50))
