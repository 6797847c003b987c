"""Sealed reasoning: a client keeps it, cannot read or change it, and it comes back as it was."""

from __future__ import annotations

import asyncio
import base64
import re
import string
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import text as sql

from engine import ScriptedEngine
from server import encrypted_reasoning
from server.access import OPERATOR
from server.cli.commands import main
from server.config import Config
from server.encrypted_reasoning import INCLUDE, Sealing
from server.errors import ApiError
from server.items import private_of
from server.settings import SECRET_BYTES
from storage import AuditEntry, SealingKey, Storage, open_storage
from tests.server.runs.execution.test_continuation import left, saying
from tests.support.postgres import Postgres
from tests.support.running import Running, database, http_client, live_app, running_app
from tests.support.talk import WEATHER, Api, Gate, answer, calls, prompts, text
from tests.support.wire import Json

ASKED: Json = {"include": [INCLUDE]}
LENIENT: Json = {**WEATHER, "strict": False}


@dataclass(frozen=True, slots=True)
class Room:
    """A server over ASGI."""

    server: Running
    api: Api

    @property
    def engine(self) -> ScriptedEngine:
        engine = self.server.context.models.get(None).engine
        assert isinstance(engine, ScriptedEngine)
        return engine


@pytest.fixture
async def room(server_app: Running, client: httpx.AsyncClient) -> Room:
    return Room(server_app, Api(client))


def user(content: str) -> Json:
    return {"role": "user", "content": content}


def sealed(response: Json) -> str:
    """The sealed reasoning of a response that has one piece of it."""
    [item] = [item for item in response["output"] if item["type"] == "reasoning"]
    found: str = item["encrypted_content"]
    return found


def key_of(response: Json) -> int:
    """The number of the key that a response was sealed by."""
    return encrypted_reasoning._key_number(sealed(response))


def thought(content: str) -> Json:
    """What is left of a reasoning item in the hands of a client that keeps the seal alone."""
    return {"type": "reasoning", "summary": [], "encrypted_content": content}


# ------------------------------------------------------------------------------------------------------------
# There and back


async def test_reasoning_is_sealed_where_it_is_asked_for(room: Room) -> None:
    for store in (True, False):
        stream = await room.api.stream("think hm then say hi", store=store, **ASKED)
        [added] = [e["item"] for e in stream.events if e["type"] == "response.output_item.added"][:1]
        done = next(e["item"] for e in stream.events if e["type"] == "response.output_item.done")
        assert added["type"] == done["type"] == "reasoning"
        assert added["encrypted_content"] is None
        assert done == stream.response["output"][0] and done["summary"] == []
        assert len(done["encrypted_content"]) > 100 and done["content"][0]["text"] == "hm"
        if store:
            assert await room.api.get(stream.response["id"]) == stream.response
    plain = await room.api.create("think hm then say hi")
    assert sealed(plain) is None


async def test_equal_thoughts_do_not_look_alike(room: Room) -> None:
    first, second = [sealed(await room.api.create("think hm then say hi", **ASKED)) for _ in range(2)]
    assert first != second


@pytest.mark.parametrize(
    "left_of_it",
    [
        {"content": []},
        {"content": None, "summary": []},
        {"id": None, "status": None, "content": None},
        {"content": [{"type": "reasoning_text", "text": "something else"}]},
        {"summary": [{"type": "summary_text", "text": "in short"}], "content": []},
    ],
)
async def test_the_next_turn_sees_what_was_thought(room: Room, left_of_it: Json) -> None:
    """Whatever a client leaves of the item: the prompt is that of the stored chain."""
    asked = "think hm, let me see then say one"
    first = await room.api.create(asked, **ASKED)
    await room.api.create("say two", previous_response_id=first["id"])
    chained = room.engine.requests[-1].prompt_ids
    reasoning, message = first["output"]
    for store in (False, True):
        await room.api.create(
            [user(asked), {**reasoning, **left_of_it}, message, user("say two")], store=store
        )
        assert room.engine.requests[-1].prompt_ids == chained


async def test_each_prompt_begins_with_the_turn_before_it(tmp_path: Path) -> None:
    """An agent's loop without a store: thought, call, output; a cache has all of it already."""
    said = "<think>\nwhere am I\n</think>\n\n" + tool_call()
    engine = ScriptedEngine(saying(said))
    history, begun = [user("go")], list[int]()
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        for _ in range(3):
            response = await Api(client).create(history, tools=[LENIENT], store=False, **ASKED)
            request = engine.requests[-1]
            assert [*request.prompt_ids][: len(begun)] == begun
            begun = [*request.prompt_ids, *engine.tokenizer.encode(said)]
            [made] = calls(response)
            history += [thought(sealed(response)), made, answer(made["call_id"])]


async def test_an_item_that_is_sent_back_with_its_seal_is_the_same_item(room: Room) -> None:
    first = await room.api.create("think hm then say one", **ASKED)
    reasoning, message = first["output"]
    second = await room.api.create([{**reasoning, "content": []}, message, user("say two")])
    listed = await room.api.input_items(second["id"], order="asc")
    assert listed["data"][:2] == [reasoning, message]


async def test_what_was_restored_needs_no_key_any_more(room: Room) -> None:
    first = await room.api.create("think hm then say one", store=False, **ASKED)
    second = await room.api.create([thought(sealed(first)), user("say two")])
    await forget_keys(room.server.context.storage)
    room.server.context.sealing._keys = {}
    await room.api.create("say three", previous_response_id=second["id"])
    assert "<think>\nhm\n</think>" in prompts(room.engine)[-1]


async def test_a_conversation_takes_sealed_items(room: Room) -> None:
    first = await room.api.create("think hm then say one", store=False, **ASKED)
    items = [user("hi"), thought(sealed(first)), first["output"][1]]
    conversation = await room.api.conversation(*items)
    await room.api.create("say two", conversation=conversation)
    assert "<think>\nhm\n</think>" in prompts(room.engine)[-1]
    broken = [thought(sealed(first)[:-8])]
    error = await room.api.fails(
        400, "POST", f"/v1/conversations/{conversation}/items", json={"items": broken}
    )
    assert (error["code"], error["param"]) == ("invalid_encrypted_content", "items[0].encrypted_content")


async def test_tokens_are_counted_with_what_was_sealed(room: Room) -> None:
    first = await room.api.create("think hm then say one", store=False, **ASKED)
    items = [user("hi"), thought(sealed(first)), first["output"][1], user("say two")]
    response = await room.api.create(items, store=False)
    counted = await room.api.http.post("/v1/responses/input_tokens", json={"input": items})
    assert counted.json()["input_tokens"] == response["usage"]["input_tokens"]


async def test_a_continuation_by_tool_outputs_seals_as_well(tmp_path: Path) -> None:
    said = ["<think>\na\n</think>\n\n" + tool_call(), "<think>\nb\n</think>\n\ndone"]
    engine = ScriptedEngine(
        lambda request, prompt: saying(said["<tool_response>" in prompt])(request, prompt)
    )
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        first = await api.create("go", tools=[LENIENT], **ASKED)
        second = await api.outputs(first["id"], {calls(first)[0]["call_id"]: "wet"})
        assert text(second) == "done"
        await api.create([thought(sealed(second)), user("say x")])
        assert "<think>\nb\n</think>" in prompts(engine)[-1]


def tool_call() -> str:
    return '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


# ------------------------------------------------------------------------------------------------------------
# What does not open


class _Table:
    """Storage with nothing but keys; everybody reads before anybody writes."""

    def __init__(self) -> None:
        self.keys: dict[int, SealingKey] = {}
        self.num_reads = 0

    async def sealing_keys(self) -> tuple[SealingKey, ...]:
        self.num_reads += 1
        await asyncio.sleep(0)
        return tuple(self.keys.values())

    async def add_sealing_key(self, key: SealingKey, entry: AuditEntry | None = None) -> bool:
        await asyncio.sleep(0)
        return self.keys.setdefault(key.number, key) is key


CONTENT = [{"type": "reasoning_text", "text": "hm \U0001f600 \N{LATIN SMALL LETTER E WITH ACUTE}"}]


async def seal(table: _Table, content: Any = CONTENT, *, owner: str = "ann", model: str = "m") -> str:
    keys = Sealing(table, 1e9)
    make = await keys.seal(owner, await keys.by([INCLUDE], model))
    assert make is not None
    return make.thought("rs_1", content)


async def opened(table: _Table, content: str, *, owner: str = "ann", model: str | None = "m") -> Any:
    item = {"id": "rs_1", "type": "reasoning", "encrypted_content": content}
    [found] = await Sealing(table, 1e9).opened(owner, [item], model=model)
    return found["content"]


async def refused(table: _Table, content: str, **asked: Any) -> str:
    with pytest.raises(ApiError) as caught:
        await opened(table, content, **asked)
    error = caught.value
    assert (error.status, error.code) == (400, "invalid_encrypted_content")
    assert error.param == "input[0].encrypted_content" and "rs_1" in error.message
    return error.message


async def test_a_seal_opens_for_its_owner_and_model_alone() -> None:
    table = _Table()
    made = await seal(table)
    assert await opened(table, made) == await opened(table, made, model=None) == CONTENT
    assert "somebody else" in await refused(table, made, owner="bob")
    assert "made by the model 'm', not by 'n'" in await refused(table, made, model="n")
    # Neither can be moved into the other.
    assert await refused(table, await seal(table, owner="an", model="nm"), owner="ann", model="m")


async def test_a_private_half_is_no_thought_and_belongs_to_its_item() -> None:
    table = _Table()
    sealing = Sealing(table, 1e9)
    make = await sealing.seal("ann", await sealing.by([INCLUDE], "m"))
    assert make is not None
    made = make.private_half("ws_1", {"output": "o"})
    assert made == make.private_half("ws_1", {"output": "o"}) != make.private_half("ws_2", {"output": "o"})
    for model in ("m", None):
        assert "the seal of something else" in await refused(table, made, model=model)
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed", "antiphon_sealed": made}
    for model in ("m", "n", None):  # whoever is asked next may be shown what was found
        [found] = await sealing.opened("ann", [search], model=model)
        assert private_of(found) == {"output": "o"} and "antiphon_sealed" not in found
    for item, owner, why in (
        ({**search, "id": "ws_2"}, "ann", "it was made for the item ws_1"),
        ({**search, "antiphon_sealed": make.thought("ws_1", CONTENT)}, "ann", "the seal of something else"),
        (search, "bob", "somebody else"),
    ):
        with pytest.raises(ApiError, match=why) as caught:
            await sealing.opened(owner, [item], model="m")
        assert (caught.value.code, caught.value.param) == (
            "invalid_encrypted_content",
            "input[0].antiphon_sealed",
        )


async def test_no_byte_of_a_seal_can_be_changed() -> None:
    table = _Table()
    made = await seal(table)
    letters = string.ascii_letters + string.digits + "-_"
    for at, letter in enumerate(made):
        for other in {letters[(letters.find(letter) + step) % 64] for step in (1, 16, 32)} - {letter}:
            await refused(table, made[:at] + other + made[at + 1 :])
        await refused(table, made[:at])
        await refused(table, made[:at] + made[at + 1 :])
    for other in (made + "=", made + "A", made + "\n", " " + made, made * 2, "", "=", "\u00e9" * 40):
        await refused(table, other)


@settings(deadline=None)
@given(st.one_of(st.text(), st.binary().map(lambda data: base64.urlsafe_b64encode(data).decode())))
def test_nothing_that_this_server_did_not_make_opens(content: str) -> None:
    keys = {1: SealingKey(1, b"k" * SECRET_BYTES, 0)}
    assert encrypted_reasoning._key_number(content) >= 0
    with pytest.raises(ValueError, match=r"make it|no key|changed"):
        encrypted_reasoning._open(keys, "ann", content)


async def test_the_same_is_sealed_the_same() -> None:
    """A replay after a crash has to make the bytes that were seen."""
    table = _Table()
    assert await seal(table) == await seal(table)
    assert await seal(table) != await seal(table, [*CONTENT, *CONTENT])


async def test_a_long_thought_is_opened_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    async def to_thread(work: Any) -> Any:
        threads.append(work)
        return work()

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    table, long = _Table(), [{"type": "reasoning_text", "text": "hm" * 100_000}]
    assert await opened(table, await seal(table)) == CONTENT and not threads
    assert await opened(table, await seal(table, long)) == long and len(threads) == 1


async def test_another_tenant_cannot_use_a_seal(tmp_path: Path) -> None:
    async with running_app(tmp_path, api_key=("sk-ann", "sk-bob")) as server:
        async with http_client(server, authorization="Bearer sk-ann") as client:
            first = await Api(client).create("think hm then say one", **ASKED)
            again = [thought(sealed(first)), user("say two")]
            await Api(client).create(again)
        async with http_client(server, authorization="Bearer sk-bob") as client:
            error = await Api(client).refused(400, again)
            assert (error["code"], error["param"]) == (
                "invalid_encrypted_content",
                "input[0].encrypted_content",
            )


async def test_another_model_cannot_use_a_seal_but_another_name_can(tmp_path: Path) -> None:
    async with running_app(tmp_path, served_model_name=("a", "b")) as server, http_client(server) as client:
        first = await Api(client).create("think hm then say one", model="a", **ASKED)
        again = [thought(sealed(first)), user("say two")]
    names = ("a", "b")
    async with (
        running_app(tmp_path, ScriptedEngine(name="a"), served_model_name=names) as server,
        http_client(server) as client,
    ):
        second = await Api(client).create("think hm then say one", model="b", **ASKED)
        await Api(client).create([thought(sealed(second)), user("say two")], model="a")
        error = await Api(client).refused(400, again)
        assert "made by the model 'antiphon-scripted', not by 'a'" in error["message"]


async def test_a_lost_key_is_told(room: Room) -> None:
    first = await room.api.create("think hm then say one", **ASKED)
    await forget_keys(room.server.context.storage)
    room.server.context.sealing._keys = {}
    error = await room.api.refused(400, [thought(sealed(first)), user("say two")])
    assert error["code"] == "invalid_encrypted_content" and "no key" in error["message"]


async def forget_keys(storage: Storage) -> None:
    await storage._write(lambda conn: conn.execute(sql("DELETE FROM sealing_keys")))


# ------------------------------------------------------------------------------------------------------------
# Keys


async def test_nobody_who_asks_for_no_seal_pays_for_one(room: Room) -> None:
    await room.api.create("think hm then say one", store=False)
    assert await room.server.context.storage.sealing_keys() == ()


async def test_old_keys_open_and_new_ones_seal(room: Room, tmp_path: Path) -> None:
    first = await room.api.create("think one then say one", **ASKED)
    await room.server.context.sealing.rotate(OPERATOR)
    second = await room.api.create("think two then say two", **ASKED)
    assert (key_of(first), key_of(second)) == (1, 2)
    async with running_app(tmp_path / "elsewhere") as stranger, http_client(stranger) as client:
        await Api(client).create("think hm then say hi", **ASKED)
        error = await Api(client).refused(400, [thought(sealed(first)), user("say x")])
        assert error["code"] == "invalid_encrypted_content"
    await room.api.create([thought(sealed(first)), thought(sealed(second)), user("say three")])
    assert "one" in prompts(room.engine)[-1] and "two" in prompts(room.engine)[-1]


async def test_a_key_is_replaced_at_its_age(monkeypatch: pytest.MonkeyPatch) -> None:
    table, now = _Table(), 1_000_000_000_000_000
    monkeypatch.setattr(encrypted_reasoning, "now_us", lambda: now)
    keys = Sealing(table, 60.0)
    numbers = []
    for _ in range(5):
        numbers.append((await keys.key()).number)
        now += 31_000_000
    assert numbers == [1, 1, 2, 2, 3]
    assert len({key.secret for key in table.keys.values()}) == 3
    assert {len(key.secret) for key in table.keys.values()} == {SECRET_BYTES}


async def test_keys_are_not_read_for_every_request() -> None:
    table = _Table()
    keys = Sealing(table, 1e9)
    await keys.key()
    read = table.num_reads
    for _ in range(100):
        await keys.key()
    assert table.num_reads == read


async def test_two_servers_that_rotate_at_once_make_one_key() -> None:
    table = _Table()
    one, two = Sealing(table, 1e9), Sealing(table, 1e9)
    first, second = await asyncio.gather(one.key(), two.key())
    assert first == second and list(table.keys) == [1]
    await asyncio.gather(one.rotate(OPERATOR), two.rotate(OPERATOR))
    assert await one.key() == await two.key() and list(table.keys) == [1, 2]


async def test_a_key_outlives_its_server(tmp_path: Path) -> None:
    async with running_app(tmp_path) as server, http_client(server) as client:
        first = await Api(client).create("think hm then say one", store=False, **ASKED)
    async with running_app(tmp_path) as server, http_client(server) as client:
        await Api(client).create([thought(sealed(first)), user("say two")], store=False)
        assert len(await server.context.storage.sealing_keys()) == 1


@pytest.fixture
async def replicas(postgres: Postgres, tmp_path: Path) -> AsyncIterator[tuple[Room, Room]]:
    url = await postgres.fresh()
    async with (
        running_app(tmp_path / "a", db=url) as a,
        running_app(tmp_path / "b", db=url) as b,
        http_client(a) as at_a,
        http_client(b) as at_b,
    ):
        yield Room(a, Api(at_a)), Room(b, Api(at_b))


async def test_servers_on_one_database_share_their_keys(replicas: tuple[Room, Room]) -> None:
    """Both are asked first at the same time; what one seals with a key just made, the other opens."""
    asked = [room.api.create("think hm then say one", store=False, **ASKED) for room in replicas]
    made = await asyncio.gather(*asked)
    a, b = replicas
    assert len(await a.server.context.storage.sealing_keys()) == 1
    for response in made:
        for room in replicas:
            await room.api.create([thought(sealed(response)), user("say two")], store=False)
    await a.server.context.sealing.rotate(OPERATOR)
    newest = await a.api.create("think new then say one", store=False, **ASKED)
    await b.api.create([thought(sealed(newest)), user("say two")], store=False)
    assert "<think>\nnew\n</think>" in prompts(b.engine)[-1]


def test_the_command_lists_and_rotates(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = ["--data", str(tmp_path)]
    assert main(["migrate", *data]) == 0
    capsys.readouterr()
    assert main(["sealing", "list", *data]) == 0
    assert capsys.readouterr().out.split() == ["NUMBER", "USE", "CREATED"]
    for number in (1, 2):
        assert main(["sealing", "rotate", *data]) == 0
        assert capsys.readouterr().out.startswith(f"key {number} seals from now on")
    assert main(["sealing", "list", *data]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[:2] for line in lines] == [["1", "opens"], ["2", "seals"]]


async def test_a_running_server_rotates_when_it_is_told(room: Room) -> None:
    admin = {"authorization": f"Bearer {room.server.life.admin_token}"}
    first = await room.api.create("think hm then say one", **ASKED)
    made = await room.api.http.post("/admin/sealing_keys", headers=admin)
    assert made.json().keys() == {"number", "created_at", "seals"} and made.json()["number"] == 2
    second = await room.api.create("think hm then say one", **ASKED)
    assert (key_of(first), key_of(second)) == (1, 2)
    listed = (await room.api.http.get("/admin/sealing_keys", headers=admin)).json()["data"]
    assert [key["number"] for key in listed] == [1, 2] and listed[1] == made.json()
    assert (await room.api.http.post("/admin/sealing_keys")).status_code == 401


# ------------------------------------------------------------------------------------------------------------
# After a crash

THINKING = "<think>\nfirst this then that\n</think>\n\nOne two. " + tool_call()
WORDS = len(re.findall(r"\s*\S+", THINKING))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("after", range(1, WORDS, 2))
async def test_a_run_goes_on_with_the_key_that_it_began_with(tmp_path: Path, after: int) -> None:
    """Cut within the thought, or behind it; another key seals by the time it goes on."""
    gate = Gate()
    response_id, seen = await left(tmp_path, saying(THINKING, gate, after), gate, tools=[LENIENT], **ASKED)
    storage = await open_storage(Config(data=tmp_path, **await database(tmp_path)).db, runner="admin")
    assert (await Sealing(storage, 1.0).rotate(OPERATOR)).number == 2
    await storage.close()
    engine = ScriptedEngine(saying(THINKING))
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        done = await api.ended(response_id)
        assert done["status"] == "completed" and len(calls(done)) == 1
        assert (await api.replay(response_id)).startswith(seen)
        await api.create([thought(sealed(done)), user("go on")], tools=[LENIENT])
        assert "<think>\nfirst this then that\n</think>" in prompts(engine)[-1]


async def test_a_cancelled_thought_is_sealed_as_far_as_it_came(tmp_path: Path) -> None:
    gate = Gate()
    engine = ScriptedEngine(saying(THINKING, gate, 3))
    async with live_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        begun = await api.create("go", background=True, **ASKED)
        await gate.reached.wait()
        cancelled = await api.cancel(begun["id"])
        assert cancelled["output"][0]["status"] == "incomplete"
        gate.release.set()
        await api.create([thought(sealed(cancelled)), user("go on")])
        assert "<think>\nfirst this\n</think>" in prompts(engine)[-1]


async def test_a_run_whose_key_is_lost_ends(tmp_path: Path) -> None:
    gate = Gate()
    response_id, seen = await left(tmp_path, saying(THINKING, gate, WORDS - 6), gate, **ASKED)
    storage = await open_storage(Config(data=tmp_path, **await database(tmp_path)).db, runner="admin")
    await forget_keys(storage)
    await storage.close()
    async with (
        running_app(tmp_path, ScriptedEngine(saying(THINKING))) as server,
        http_client(server) as client,
    ):
        done = await Api(client).ended(response_id)
        assert done["status"] == "failed" and "differently" in done["error"]["message"]
        assert (await Api(client).replay(response_id)).startswith(seen)


# ------------------------------------------------------------------------------------------------------------
# Keys of the operator

ONE, TWO = "1a" * 64, "2b" * 64


async def test_a_given_key_seals_and_is_in_no_database(tmp_path: Path) -> None:
    """So what is sealed opens wherever the key is, and a copy of the database does not open it."""
    async with running_app(tmp_path / "a", sealing_key=(ONE,)) as server, http_client(server) as client:
        first = await Api(client).create("think hm then say one", store=False, **ASKED)
        assert key_of(first) >= encrypted_reasoning.GIVEN
        assert await server.context.storage.sealing_keys() == ()
    again = [thought(sealed(first)), user("say two")]
    engine = ScriptedEngine()
    async with (
        running_app(tmp_path / "b", engine, sealing_key=(ONE,)) as server,
        http_client(server) as client,
    ):
        await Api(client).create(again)
        assert "<think>\nhm\n</think>" in prompts(engine)[-1]
    async with running_app(tmp_path / "a") as server, http_client(server) as client:
        error = await Api(client).refused(400, again)
        assert error["code"] == "invalid_encrypted_content" and "no key" in error["message"]


async def test_given_keys_are_rotated_by_their_order(tmp_path: Path) -> None:
    """What each has sealed stays open as long as it is there, and so does what the database's keys sealed."""
    made: list[Json] = []
    keys: tuple[str, ...]
    for keys in ((), (ONE,), (ONE, TWO), (TWO, ONE)):
        async with running_app(tmp_path, sealing_key=keys) as server, http_client(server) as client:
            made.append(await Api(client).create(f"think {len(made)} then say one", store=False, **ASKED))
    numbers = [key_of(response) for response in made]
    assert (
        numbers[0] == 1 and numbers[1] == numbers[2] != numbers[3] and numbers[3] >= encrypted_reasoning.GIVEN
    )
    thoughts = [thought(sealed(response)) for response in made]
    engine = ScriptedEngine()
    async with (
        running_app(tmp_path, engine, sealing_key=(TWO, ONE)) as server,
        http_client(server) as client,
    ):
        await Api(client).create([*thoughts, user("say x")])
        assert "<think>\n0\n\n1\n\n2\n\n3\n</think>" in prompts(engine)[-1]
    async with running_app(tmp_path, sealing_key=(TWO,)) as server, http_client(server) as client:
        error = await Api(client).refused(400, [*thoughts, user("say x")])
        assert error["param"] == "input[1].encrypted_content" and "no key" in error["message"]


async def test_keys_are_given_to_a_server_that_runs(room: Room) -> None:
    first = await room.api.create("think one then say one", **ASKED)
    sealing = room.server.context.sealing
    assert sealing.give([bytes.fromhex(ONE)]) and not sealing.give([bytes.fromhex(ONE)])
    second = await room.api.create("think two then say two", **ASKED)
    await room.api.create([thought(sealed(first)), thought(sealed(second)), user("say three")])
    assert sealing.give(())
    third = await room.api.create("think three then say three", **ASKED)
    assert [key_of(response) for response in (first, third)] == [1, 1]
    await room.api.refused(400, [thought(sealed(second)), user("say three")])


@pytest.mark.parametrize("after", [1, WORDS - 6])
async def test_a_run_goes_on_with_the_given_key_that_it_began_with(tmp_path: Path, after: int) -> None:
    gate = Gate()
    response_id, seen = await left(
        tmp_path,
        saying(THINKING, gate, after),
        gate,
        tools=[LENIENT],
        settings={"sealing_key": (ONE,)},
        **ASKED,
    )
    engine = ScriptedEngine(saying(THINKING))
    async with (
        running_app(tmp_path, engine, sealing_key=(TWO, ONE)) as server,
        http_client(server) as client,
    ):
        api = Api(client)
        done = await api.ended(response_id)
        assert done["status"] == "completed"
        assert (await api.replay(response_id)).startswith(seen)
        assert key_of(done) == encrypted_reasoning.given_keys([bytes.fromhex(ONE)])[0].number


async def test_compactions_signatures_and_tickets_are_sealed_by_it_too(tmp_path: Path) -> None:
    number = encrypted_reasoning.given_keys([bytes.fromhex(ONE)])[0].number
    async with running_app(tmp_path, sealing_key=(ONE,)) as server, http_client(server) as client:
        said = {"role": "user", "content": "think hm then say one"}
        compacted = await Api(client).create([said, {"type": "compaction_trigger"}])
        [item] = compacted["output"]
        name = server.context.models.first.name
        body = {"model": name, "messages": [said], "max_tokens": 50, "thinking": {"type": "adaptive"}}
        message = (await client.post("/v1/messages", json=body)).json()
        ticket = (await client.post("/v1/ws_tickets")).json()
        seals = [
            item["encrypted_content"],
            message["content"][0]["signature"],
            ticket["ticket"].rpartition(".")[2],
        ]
        assert [encrypted_reasoning._key_number(seal) for seal in seals] == [number] * 3
        assert await server.context.storage.sealing_keys() == ()


def test_the_command_shows_given_keys_and_leaves_their_rotation_to_the_operator(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "seals"
    data = ["--data", str(tmp_path)]
    assert main(["migrate", *data]) == main(["sealing", "rotate", *data]) == 0
    file.write_text(f"{ONE}\n{TWO}\n")
    (tmp_path / "antiphon.toml").write_text(f"sealing_key_file = {str(file)!r}\n")
    capsys.readouterr()
    assert main(["sealing", "list", *data]) == 0
    rows = [line.split()[1:3] for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == ["USE", "opens", "seals", "opens"]
    assert [row[1] for row in rows[2:]] == ["by", "by"]
    assert main(["sealing", "rotate", *data]) == 2
    assert "sealing_key_file gives the keys that seal" in capsys.readouterr().err


async def test_a_running_server_refuses_to_rotate_what_the_settings_give(tmp_path: Path) -> None:
    async with (
        running_app(tmp_path, sealing_key=(ONE,)) as server,
        http_client(server, authorization=f"Bearer {server.life.admin_token}") as client,
    ):
        reply = await client.post("/admin/sealing_keys")
        assert reply.status_code == 400 and "put a new one first" in reply.json()["error"]["message"]
        [listed] = (await client.get("/admin/sealing_keys")).json()["data"]
        assert (listed["created_at"], listed["seals"]) == (None, True)


@pytest.mark.parametrize("written", ["12345", None])
async def test_a_server_whose_key_file_is_of_no_use_does_not_start(
    tmp_path: Path, written: str | None
) -> None:
    file = tmp_path / "seals"
    if written is not None:
        file.write_text(written)
    with pytest.raises(ValueError, match="the file of sealing keys"):
        async with running_app(tmp_path, sealing_key_file=file):
            pass
