"""Row 36: a server that keeps KV on disk is killed while conversations go on, are forked and deleted."""

from __future__ import annotations

import asyncio
import random
import signal
from dataclasses import dataclass, field

from tests.chaos.driver import Client, Server, free_port, serving
from tests.chaos.history import History, Json
from tests.chaos.report import Form, Report, row, spread

CLIENTS = 3
FACTS = 60
"""Sentences of a first turn: long enough that what is computed of it is worth keeping."""

FLAGS = ("--log-level", "error", "--num-threads", "1")


@dataclass(slots=True)
class Talk:
    """A conversation as its client has led it: what was asked, and what came of it.

    turns: (asked, answered). parent, shared: what it is a fork of, and how many turns it has of that.
    """

    id: str
    turns: list[tuple[str, str]] = field(default_factory=list)
    parent: Talk | None = None
    shared: int = 0


@dataclass(slots=True)
class Talker:
    """A client that goes on with conversations, each turn with a key until it is answered."""

    number: int
    client: Client
    draw: random.Random
    talks: list[Talk] = field(default_factory=list)
    gone: list[Talk] = field(default_factory=list)
    done: int = 0
    cached: int = 0
    prompted: int = 0

    async def work(self, stopping: asyncio.Event) -> None:
        """One thing after the other, each to its end."""
        while not stopping.is_set():
            if len(self.talks) < 2:
                await self.begin()
            await self.draw.choices((self.turn, self.fork, self.delete), (8, 2, 1))[0]()

    async def begin(self) -> None:
        """A conversation with a long first turn."""
        made = (await self._post("/v1/conversations", {})).get("id")
        self.talks.append(Talk(str(made)))
        facts = (f"Box {n} has {self.draw.randrange(90)} stones." for n in range(FACTS))
        await self.turn(self.talks[-1], f"My name is Mark. {' '.join(facts)}")

    async def turn(self, talk: Talk | None = None, said: str = "") -> None:
        """Ask something, and remember the answer and what of its prompt was not computed."""
        talk = talk or self.draw.choice(self.talks)
        said = said or f"How many stones has box {self.draw.randrange(FACTS)}?"
        found = await self._post("/v1/responses", asking(talk.id, said))
        talk.turns.append((said, answer(found)))
        self.prompted += found["usage"]["input_tokens"]
        self.cached += found["usage"]["input_tokens_details"]["cached_tokens"]

    async def fork(self) -> None:
        """Go on from a whole conversation in two ways."""
        talk = self.draw.choice(self.talks)
        if len(self.talks) < 4:
            made = await self._post(f"/v1/conversations/{talk.id}/fork", {})
            self.talks.append(Talk(made["id"], list(talk.turns), talk, len(talk.turns)))

    async def delete(self) -> None:
        """Delete a conversation, whoever shares what it has."""
        if len(self.talks) > 2:
            talk = self.talks.pop(self.draw.randrange(len(self.talks)))
            await self.client.sure("DELETE", f"/v1/conversations/{talk.id}", ok=(200, 404))
            self.gone.append(talk)

    async def _post(self, path: str, body: Json) -> Json:
        self.done += 1
        key = f"talker-{self.number}-{self.done}"
        found: Json = (await self.client.sure("POST", path, body, key=key)).json
        return found


def asking(conversation: str, said: str) -> Json:
    """A turn whose answer depends on nothing but what was said."""
    return {"conversation": conversation, "input": said, "temperature": 0, "max_output_tokens": 16}


def answer(response: Json) -> str:
    """What a response says, and how it ended."""
    text = "".join(item["content"][0]["text"] for item in response["output"] if item["type"] == "message")
    return f"{response['status']}: {text}"


@row(
    "36",
    "`kill -9` while what is computed is saved on disk, read from it, and deleted",
    "every answer is that of a server without a disk, asked the same in the same order; nothing is left on "
    "disk of what was deleted",
    short=False,
)
async def saved_kv(form: Form, report: Report) -> None:
    """20 kills in full, 2 in short."""
    draw, kills, starts = form.draw("saved-kv"), form.of(2, 20), list[float]()
    server = Server(form.folder / "kept", *FLAGS, port=free_port(draw))
    async with serving(server), Client([server], History(), draw) as client:
        crowd = [Talker(number, client, random.Random(draw.random())) for number in range(CLIENTS)]
        stopping = asyncio.Event()
        tasks = [asyncio.create_task(talker.work(stopping)) for talker in crowd]
        for _ in range(kills):
            before = [talker.done for talker in crowd]
            async with asyncio.timeout(600):
                while any(talker.done < then + 3 for talker, then in zip(crowd, before, strict=True)):
                    if failed := [task for task in tasks if task.done()]:
                        await failed[0]
                    await asyncio.sleep(0.02)
            await asyncio.sleep(draw.uniform(0.0, 0.3))
            await server.kill()
            starts.append(await server.start())
            report.so_far(f"{len(starts)} kills")
        stopping.set()
        await asyncio.gather(*tasks)
        metrics = (await client.sure("GET", "/metrics")).body.decode()
        restored = _value(metrics, 'antiphon_kv_hit_tokens_total{model="antiphon-tiny",tier="disk"}')
        for talker in crowd:
            for talk in talker.talks:
                await client.sure("DELETE", f"/v1/conversations/{talk.id}", ok=(200, 404))
        await _emptied(client, report)
        server.send(signal.SIGTERM)
        await server.ended()
    await _compare(form, draw, crowd, report)
    turns = sum(len(talk.turns) - talk.shared for talker in crowd for talk in (*talker.talks, *talker.gone))
    cached, prompted = sum(t.cached for t in crowd), sum(t.prompted for t in crowd)
    report.figure(
        f"{kills} kills, {turns} answers as without a disk; {100 * cached // max(1, prompted)} % of "
        f"{prompted} prompt tokens found, {restored:.0f} on disk since the last kill"
    )
    report.figure(f"listening again after {spread(starts)}")


async def _emptied(client: Client, report: Report) -> None:
    """Wait until no name is left on disk."""
    for _ in range(300):
        metrics = (await client.sure("GET", "/metrics")).body.decode()
        if not _value(metrics, 'antiphon_kv_names{model="antiphon-tiny"}'):
            return
        await asyncio.sleep(0.1)
    report.breaks(["names of what was deleted are left on disk"])


async def _compare(form: Form, draw: random.Random, crowd: list[Talker], report: Report) -> None:
    """Lead every conversation once more, where nothing is kept and nothing killed."""
    server = Server(form.folder / "plain", *FLAGS, "--kv-disk-bytes", "0", port=free_port(draw))
    async with serving(server), Client([server], History(), draw) as client:
        for talker in crowd:
            for talk in (*talker.talks, *talker.gone):
                made = (await client.sure("POST", "/v1/conversations", {})).json["id"]
                for said, answered in talk.turns:
                    found = (await client.sure("POST", "/v1/responses", asking(made, said))).json
                    report.holds(
                        answer(found) == answered, f"{talk.id}: {answered!r}, and without {answer(found)!r}"
                    )


def _value(metrics: str, name: str) -> float:
    return next((float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(name)), 0.0)
