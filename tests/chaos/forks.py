"""Row 35: servers are killed while clients fork conversations and responses, go on from them, and delete."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

from tests.chaos.driver import Client, free_port, serving
from tests.chaos.filing import NURSERY, Forked
from tests.chaos.history import History, Json
from tests.chaos.report import Form, Report, row, spread
from tests.support.making import check, query

CLIENTS = 6


@dataclass(slots=True)
class Gardener:
    """A client that grows branches, each request with a key until it is answered, and knows what each holds.

    conversations, responses: the texts that were said there, by id. deleted: texts that are in no branch any
    more.
    """

    number: int
    client: Client
    draw: random.Random
    conversations: dict[str, list[str]] = field(default_factory=dict)
    responses: dict[str, list[str]] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)
    done: int = 0

    async def work(self, stopping: asyncio.Event) -> None:
        """One thing after the other, each to its end."""
        while not stopping.is_set():
            await self.draw.choices(
                (self.begin, self.add, self.fork, self.turn, self.rewind, self.fell, self.take_out),
                (1, 4, 6, 3, 6, 2, 1),
            )[0]()

    async def _post(self, path: str, body: Json) -> Json:
        self.done += 1
        key = f"gardener-{self.number}-{self.done}"
        found: Json = (await self.client.sure("POST", path, body, key=key)).json
        return found

    async def _items(self, path: str, order: str) -> list[Json]:
        page = (await self.client.sure("GET", f"{path}&limit=100&order={order}")).json
        return [item for item in page["data"] if item["type"] == "message"]

    async def begin(self) -> None:
        """A conversation and a response from which branches grow."""
        said = f"say c{self.number}.{self.done}"
        made = await self._post("/v1/conversations", {"items": [{"role": "user", "content": said}]})
        self.conversations[made["id"]] = [said]

    async def add(self) -> None:
        """An item at the end of a branch."""
        if self.conversations:
            id, said = self.draw.choice([*self.conversations]), f"say i{self.number}.{self.done}"
            items = [{"role": "user", "content": said}]
            await self._post(f"/v1/conversations/{id}/items", {"items": items})
            self.conversations[id].append(said)

    async def fork(self) -> None:
        """A branch from any place of another one."""
        if self.conversations:
            id = self.draw.choice([*self.conversations])
            there = await self._items(f"/v1/conversations/{id}/items?", "asc")
            if not there or len(there) == 100:
                return
            place = self.draw.randrange(len(there))
            made = await self._post(f"/v1/conversations/{id}/fork", {"after": there[place]["id"]})
            self.conversations[made["id"]] = [_text(item) for item in there[: place + 1]]

    async def turn(self) -> None:
        """A response that goes on from another one, or from nothing."""
        said = f"r{self.number}.{self.done}"
        before = self.draw.choice([*self.responses]) if self.responses and self.draw.random() < 0.8 else None
        if before is not None and len(self.responses[before]) > 60:
            return
        body: Json = {"input": f"say {said}", "previous_response_id": before}
        made = await self._post("/v1/responses", body)
        self.responses[made["id"]] = [*self.responses.get(before or "", ()), f"say {said}", said]

    async def rewind(self) -> None:
        """A fork of a response at its input, at an event, or as a whole."""
        if self.responses:
            id = self.draw.choice([*self.responses])
            found = (await self.client.sure("GET", f"/v1/responses/{id}")).json
            asked = await self._items(f"/v1/responses/{id}/input_items?", "asc")
            body, kept = self.draw.choice(
                (({}, len(asked) + len(found["output"])), ({"after": asked[-1]["id"]}, len(asked)))
            )
            made = await self._post(f"/v1/responses/{id}/fork", body)
            before = len(self.responses[id]) - len(asked) - len(found["output"])
            self.responses[made["id"]] = self.responses[id][: before + kept]

    async def fell(self) -> None:
        """Delete something that others may have grown from."""
        for kind, there in (("conversations", self.conversations), ("responses", self.responses)):
            if len(there) > 8:
                id = self.draw.choice([*there])
                await self.client.sure("DELETE", f"/v1/{kind}/{id}", ok=(200, 404))
                del there[id]
                self.done += 1

    async def take_out(self) -> None:
        """Delete an item, and with it what all branches have of it."""
        if self.conversations:
            path = f"/v1/conversations/{self.draw.choice([*self.conversations])}/items"
            if there := await self._items(f"{path}?", "desc"):
                item = self.draw.choice(there)
                await self.client.sure("DELETE", f"{path}/{item['id']}", ok=(200, 404))
                self.deleted.add(_text(item))
                self.done += 1

    async def compare(self, report: Report) -> None:
        """Every branch holds what it should, in both orders."""
        for id, said in self.conversations.items():
            wanted = [text for text in said if text not in self.deleted]
            for order, expected in (("asc", wanted), ("desc", wanted[::-1])):
                there = await self._items(f"/v1/conversations/{id}/items?", order)
                report.holds([_text(item) for item in there] == expected[:100], f"{id} holds {there}")
        for id, said in self.responses.items():
            found = (await self.client.sure("GET", f"/v1/responses/{id}")).json
            there = await self._items(f"/v1/responses/{id}/input_items?scope=all", "asc")
            told = [_text(item) for item in (*there, *found["output"])]
            report.holds(told == said, f"{id} stands on {told}, not on {said}")


def _text(item: Json) -> str:
    text: str = item["content"][0]["text"]
    return text


@row(
    "35",
    "`kill -9` beside keyed forks of conversations and responses, and forks of forks, whose parents are "
    "deleted",
    "every fork that was asked for is there once, and holds what it should, in both orders; nothing is left "
    "of what no branch needs",
)
async def forks(form: Form, report: Report) -> None:
    """100 kills in full, 3 in short."""
    draw, kills, starts = form.draw("forks"), form.of(3, 100), list[float]()
    flags = ("--engine", "scripted", "--log-level", "error")
    server = Forked(form.folder / "forks", *flags, port=free_port(draw), code=NURSERY)
    async with serving(server), Client([server], History(), draw) as client:
        crowd = [Gardener(number, client, random.Random(draw.random())) for number in range(CLIENTS)]
        for gardener in crowd:
            await gardener.begin()
            await gardener.turn()
        stopping = asyncio.Event()
        tasks = [asyncio.create_task(gardener.work(stopping)) for gardener in crowd]
        for _ in range(kills):
            before = sum(gardener.done for gardener in crowd)
            async with asyncio.timeout(120):
                while sum(gardener.done for gardener in crowd) < before + draw.randrange(10, 40):
                    if failed := [task for task in tasks if task.done()]:
                        await failed[0]
                    await asyncio.sleep(0.01)
            await server.kill()
            starts.append(await server.start())
            report.so_far(f"{len(starts)} kills")
        stopping.set()
        await asyncio.gather(*tasks)
        for gardener in crowd:
            await gardener.compare(report)
        await server.kill()
    database = server.folder / "antiphon.db"
    check(database)
    sums = {}
    for kind in ("conversations", "responses"):
        [(there,)] = query(database, f"SELECT count(*) FROM {kind} WHERE deleted_at IS NULL")
        sums[kind] = sum(len(getattr(gardener, kind)) for gardener in crowd)
        report.holds(there == sums[kind], f"{there} {kind}, where {sums[kind]} were made")
    [(conversations,)] = query(database, "SELECT count(*) FROM conversations WHERE parent_id IS NOT NULL")
    [(responses,)] = query(database, "SELECT count(*) FROM responses WHERE fork_of IS NOT NULL")
    report.holds(conversations and responses, "nothing was forked")
    report.figure(
        f"{kills} kills under {CLIENTS} clients, {sum(gardener.done for gardener in crowd)} requests "
        f"answered: {sums['conversations']} conversations and {sums['responses']} responses, each there once "
        f"with what it should hold; {conversations} and {responses} forks, deleted ones that others need "
        "included"
    )
    report.figure(f"serving again after {spread(starts)}")
