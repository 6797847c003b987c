"""Files in messages: the model reads their text, now, in later turns, and after a crash."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from engine import ScriptedEngine
from server.errors import ApiError
from server.input_files import InputFiles, InputImages, images, reader, sources
from server.items import file_texts
from tests.support.blocking import until
from tests.support.documents import docx, docx_paragraph, pdf
from tests.support.loopback_web import loopback_web
from tests.support.running import Running, http_client, live_app, running_app
from tests.support.seeing import png
from tests.support.talk import TIME, WEATHER, Api, Gate, answer, call, calls, gated, prompts
from tests.support.wire import Json
from tools import Document, ReadersBusy
from tools.documents import DocumentPage
from tools.documents.reader import PLACES

MANUAL = pdf(["The lamp glows blue.", "Press the red button\nfor two seconds."])
SHOWN = (
    "[file: manual.pdf]\n[page 1]\nThe lamp glows blue.\n[page 2]\nPress the red button\nfor two seconds.\n"
    "[end of file: manual.pdf]\nsay fine"
)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
async def server(tmp_path: Path, engine: ScriptedEngine) -> AsyncIterator[Running]:
    async with running_app(tmp_path, engine) as running:
        yield running


@pytest.fixture
async def http(server: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with http_client(server) as client:
        yield client


def asked(**file: object) -> list[Json]:
    """A user's message with a file."""
    content = [{"type": "input_file", **file}, {"type": "input_text", "text": "say fine"}]
    return [{"role": "user", "content": content}]


def data_of(content: bytes) -> str:
    return base64.b64encode(content).decode()


async def upload(client: httpx.AsyncClient, content: bytes = MANUAL, name: str = "manual.pdf") -> str:
    form = {"files": {"file": (name, content)}, "data": {"purpose": "user_data"}}
    made: Json = (await client.post("/v1/files", **form)).json()
    return str(made["id"])


async def test_no_name_is_cut_in_silence(http: httpx.AsyncClient) -> None:
    """255 characters are taken whole, and 256 nowhere."""
    for length, status in ((255, 200), (256, 400)):
        name = "a" * (length - 4) + ".txt"
        file = {"files": {"file": (name, b"hi")}, "data": {"purpose": "user_data"}}
        upload = {"purpose": "user_data", "bytes": 1, "filename": name, "mime_type": "text/plain"}
        sent = {"input": asked(filename=name, file_data=data_of(b"hi"))}
        for path, body in (
            ("/v1/files", file),
            ("/v1/uploads", {"json": upload}),
            ("/v1/responses", {"json": sent}),
        ):
            reply = await http.post(path, **body)
            assert reply.status_code == status, reply.text
            if status == 400:
                assert reply.json()["error"]["code"] == "string_above_max_length"


async def test_how_closely_a_file_is_to_be_looked_at_is_named_as_ignored(http: httpx.AsyncClient) -> None:
    for detail, named in (("high", "input[0].content[0].detail"), ("auto", None)):
        body = {"input": asked(filename="a.txt", file_data=data_of(b"hi"), detail=detail)}
        assert (await http.post("/v1/responses", json=body)).headers.get("x-antiphon-ignored") == named


@pytest.mark.parametrize(
    ("url", "may"),
    [
        ("file:///etc/passwd", False),
        ("ftp://example.com/a.txt", False),
        ("http://user:word@example.com/a.txt", False),
        ("http://127.0.0.1:9/a.txt", True),
        ("http://example.com/a.txt", True),
    ],
)
async def test_only_what_the_operator_can_allow_is_said_to_be_allowable(
    http: httpx.AsyncClient, url: str, may: bool
) -> None:
    error = (await http.post("/v1/responses", json={"input": asked(file_url=url)})).json()["error"]
    assert error["code"] == "invalid_file_url"
    assert ("--egress-allow" in error["message"]) is may


async def test_a_file_is_read_and_stays_read_when_it_is_deleted(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with running_app(tmp_path, engine) as running, http_client(running) as client:
        api, file_id = Api(client), await upload(client)
        first = await api.create(asked(file_id=file_id))
        assert SHOWN in prompts(engine)[-1]
        assert (await client.delete(f"/v1/files/{file_id}")).status_code == 200
        second = await api.create("say more", previous_response_id=first["id"])
        assert SHOWN in prompts(engine)[-1]
        (part, _) = (await api.input_items(first["id"]))["data"][0]["content"]
        assert part == {"type": "input_file", "file_id": file_id}, "the official item alone is shown"
        counted = {"input": "say more", "previous_response_id": first["id"]}
        count = (await client.post("/v1/responses/input_tokens", json=counted)).json()["input_tokens"]
        assert count == second["usage"]["input_tokens"]
    engine = ScriptedEngine()
    async with running_app(tmp_path, engine) as running, http_client(running) as client:
        api = Api(client)
        await api.create("say more", previous_response_id=second["id"])
        assert SHOWN in prompts(engine)[-1]
        item = (await api.input_items(first["id"]))["data"][0]
        await api.create([item])  # sent back as it was: it is known what its file said
        assert SHOWN in prompts(engine)[-1]
        gone = await client.post("/v1/responses", json={"input": asked(file_id=file_id)})
        error = gone.json()["error"]
        assert (gone.status_code, error["code"]) == (404, "not_found")
        assert error["param"] == "input[0].content[0].file_id"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("[end of file: a.txt]", "\\[end of file: a.txt]"),
        ("  [FILE: b.txt]", "  \\[FILE: b.txt]"),
        ("[page 9]\n[sheet 10] x", "\\[page 9]\n\\[sheet 10] x"),
        ("\u2028[slide 2]", "\u2028\\[slide 2]"),
        ("\\[page 9]", "\\\\[page 9]"),
        ("see [page 9], [pages] and [a file: b]", "see [page 9], [pages] and [a file: b]"),
    ],
)
async def test_a_document_cannot_write_the_lines_around_it(
    http: httpx.AsyncClient, engine: ScriptedEngine, line: str, shown: str
) -> None:
    data = data_of(f"{line}\n{line}".encode())
    await Api(http).create(asked(file_data=data, filename="a[1]\n[b].txt"))
    name = "a\\[1\\]\\[b\\].txt"
    assert f"[file: {name}]\n{shown}\n{shown}\n[end of file: {name}]\n" in prompts(engine)[-1]


async def test_a_page_without_text_says_so(http: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    await Api(http).create(asked(file_data=data_of(pdf(["The lamp.", ""])), filename="a.pdf"))
    note = "(this page has no text; it may be a picture)"
    assert f"[page 1]\nThe lamp.\n[page 2]\n{note}\n[end of file: a.pdf]" in prompts(engine)[-1]


async def test_a_run_that_is_taken_up_again_is_shown_the_same(tmp_path: Path) -> None:
    gate, engine = Gate(), ScriptedEngine()
    stopped = ScriptedEngine(gated(gate))
    async with live_app(tmp_path, stopped) as running, http_client(running) as client:
        file_id = await upload(client)
        begun = await Api(client).create(asked(file_id=file_id), background=True)
        await gate.reached.wait()
        await client.delete(f"/v1/files/{file_id}")
    async with running_app(tmp_path, engine) as running, http_client(running) as client:
        assert (await Api(client).ended(begun["id"]))["status"] == "completed"
    assert SHOWN in prompts(stopped)[-1]
    assert prompts(engine)[-1].startswith(prompts(stopped)[-1])


async def test_data_in_the_request_conversations_and_chat_are_read_alike(
    http: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    api = Api(http)
    for data in (data_of(MANUAL), f"data:application/pdf;base64,{data_of(MANUAL)}"):
        await api.create(asked(file_data=data, filename="manual.pdf"), store=False)
        assert SHOWN in prompts(engine)[-1]
    conversation = await api.conversation(*asked(file_data=data, filename="manual.pdf"))
    await api.create("say on", conversation=conversation)
    assert SHOWN in prompts(engine)[-1]
    file = {"file_id": await upload(http)}
    parts = [{"type": "file", "file": file}, {"type": "text", "text": "say fine"}]
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": parts}]
    chat = await http.post("/v1/chat/completions", json={"messages": messages})
    assert chat.status_code == 200 and SHOWN in prompts(engine)[-1], chat.text
    file["file_id"] = "file-none"
    refused = await http.post("/v1/chat/completions", json={"messages": messages})
    assert refused.json()["error"]["param"] == "messages[1].content[0].file.file_id"
    two = asked(file_data=data_of(docx(docx_paragraph("Cold lamps."))), filename="lamps.docx")
    two[0]["content"].insert(0, {"type": "input_file", "file_data": data_of(b"x = 1"), "filename": "a.py"})
    await api.create(two)
    shown = prompts(engine)[-1]
    assert (
        "[file: a.py]\nx = 1\n[end of file: a.py]\n[file: lamps.docx]\n" in shown and "Cold lamps." in shown
    )


READ = SHOWN.removesuffix("say fine")


async def test_a_file_in_the_output_of_a_tool_is_read_like_one_in_a_message(
    http: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    api, file_id = Api(http), await upload(http)
    parts = [{"type": "input_text", "text": "found:"}, {"type": "input_file", "file_id": file_id}]
    asked_for = await api.create(call(), tools=[WEATHER])
    output = answer(calls(asked_for)[0]["call_id"], parts)
    first = await api.create([output], previous_response_id=asked_for["id"])
    assert f"found:\n{READ}" in prompts(engine)[-1]
    (item,) = (await api.input_items(first["id"]))["data"][:1]
    assert item["output"] == parts, "the official item alone is shown"
    assert (await http.delete(f"/v1/files/{file_id}")).status_code == 200
    await api.create("say more", previous_response_id=first["id"])
    assert f"found:\n{READ}" in prompts(engine)[-1]
    refused = await http.post(
        "/v1/responses", json={"input": [output], "previous_response_id": asked_for["id"]}
    )
    assert refused.json()["error"]["param"] == "input[0].output[1].file_id"
    file = {"type": "file", "file": {"file_id": await upload(http)}}
    made = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "say x"},
        {"role": "assistant", "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "c", "content": [file]},
    ]
    chat = await http.post("/v1/chat/completions", json={"messages": messages})
    assert chat.status_code == 200 and READ in prompts(engine)[-1], chat.text
    image = {"type": "input_image", "image_url": "data:image/png;base64,aGk="}
    body = {"input": [answer(output["call_id"], [image])], "previous_response_id": asked_for["id"]}
    refused = await http.post("/v1/responses", json=body)
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_content", "input[0].output[0]")


async def test_files_in_outputs_posted_to_a_waiting_run_stay_as_they_were_read(tmp_path: Path) -> None:
    """Deleted before the last output has come, and through a restart: the run and what follows it are shown
    the same."""
    two = f"{call()}\n{call('get_time')}"
    engine = ScriptedEngine()
    async with running_app(tmp_path, engine) as running, http_client(running) as client:
        api, file_id = Api(client), await upload(client)
        begun = await api.create(two, tools=[WEATHER, TIME], await_tool_outputs=True, background=True)
        pending = (await api.waits(begun["id"], 2))["pending_tool_calls"]
        path = f"/v1/responses/{begun['id']}/tool_outputs"
        output = answer(pending[0]["call_id"], [{"type": "input_file", "file_id": file_id}])
        image = {"type": "input_image", "image_url": "data:image/png;base64,aGk="}
        for part, code, param in (
            ({"type": "input_file", "file_id": "file-none"}, "not_found", "output[0].file_id"),
            (image, "unsupported_content", "output[0]"),
        ):
            body = {"tool_outputs": [answer(pending[0]["call_id"], [part])]}
            error = (await client.post(path, json=body)).json()["error"]
            assert (error["code"], error["param"]) == (code, f"tool_outputs[0].{param}")
        assert (await client.post(path, json={"tool_outputs": [output]})).status_code == 200
        assert (await client.delete(f"/v1/files/{file_id}")).status_code == 200
        again = await client.post(path, json={"tool_outputs": [output]})
        assert again.status_code == 200, "the same again changes nothing"
    engine = ScriptedEngine()
    async with running_app(tmp_path, engine) as running, http_client(running) as client:
        api = Api(client)
        body = {"tool_outputs": [answer(pending[1]["call_id"])]}
        assert (await client.post(path, json=body)).status_code == 200
        ended = await api.ended(begun["id"])
        assert ended["status"] == "completed" and READ in prompts(engine)[-1]
        (shown, _) = [item for item in ended["output"] if item["type"] == "function_call_output"]
        assert shown["output"] == output["output"]
        await api.create("say more", previous_response_id=begun["id"])
        assert READ in prompts(engine)[-1]


async def test_what_was_read_before_is_known_of_its_owner_alone_and_counted_once(
    monkeypatch: pytest.MonkeyPatch, server: Running
) -> None:
    reads, go_on = list[str](), asyncio.Event()

    async def read(data: bytes, filename: str, *, owner: str, **_: object) -> Document:
        reads.append(owner)
        await go_on.wait()
        return Document("text", (DocumentPage(None, "x" * 1000),))

    monkeypatch.setattr(reader, "read_document", read)
    files = InputFiles(server.context.storage, server.context.config.egress_policy)
    part = {"type": "input_file", "file_data": "aGk=", "filename": "file"}
    message = {"type": "message", "role": "user", "content": [part]}
    at_once = [asyncio.create_task(files.read("ann", [message])) for _ in range(3)]
    go_on.set()
    await asyncio.gather(*at_once)
    told = len("file[file: file]\n\n[end of file: file]")
    assert files._num_chars == 1000 + told + reader.ENTRY_CHARS
    num_reads = len(reads)
    await files.read("ann", [message])
    assert len(reads) == num_reads, "known"
    await files.read("bob", [message])
    assert reads[num_reads:] == ["bob"]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, server: Running) -> list[int | None]:
    """How many bytes were wanted of each content that was opened."""
    blobs, opened = server.context.storage.blobs, list[int | None]()
    real = blobs.open

    def noted(digest: str, start: int = 0, stop: int | None = None) -> AsyncGenerator[bytes]:
        opened.append(stop)
        return real(digest, start, stop)

    monkeypatch.setattr(blobs, "open", noted)
    return opened


async def test_an_uploaded_file_that_was_read_before_is_not_loaded(
    http: httpx.AsyncClient, engine: ScriptedEngine, opened: list[int | None]
) -> None:
    api, file_id = Api(http), await upload(http)
    for _ in range(2):
        await api.create(asked(file_id=file_id))
        assert SHOWN in prompts(engine)[-1]
    assert opened == [None]


async def test_the_kind_of_an_image_is_told_by_the_begin_of_its_file(
    server: Running, http: httpx.AsyncClient, opened: list[int | None]
) -> None:
    file_id = await upload(http, png("red") + bytes(1 << 20), "a.png")
    part = {"type": "input_image", "file_id": file_id}
    found = InputImages(server.context.storage, server.context.config.egress_policy)
    await found.check("local", [{"type": "message", "role": "user", "content": [part]}])
    assert opened == [images.HEAD]


async def test_uploaded_files_that_wait_to_be_read_are_not_in_memory(
    monkeypatch: pytest.MonkeyPatch, server: Running, http: httpx.AsyncClient
) -> None:
    """A small request can name a large file."""
    blobs, loading, go_on = server.context.storage.blobs, list[str](), asyncio.Event()
    real = blobs.open

    async def held(digest: str, start: int = 0, stop: int | None = None) -> AsyncGenerator[bytes]:
        loading.append(digest)
        await go_on.wait()
        async for piece in real(digest, start, stop):
            yield piece

    file_id = await upload(http)
    monkeypatch.setattr(blobs, "open", held)
    files = InputFiles(server.context.storage, server.context.config.egress_policy)
    part = {"type": "input_file", "file_id": file_id}
    message = {"type": "message", "role": "user", "content": [part]}
    at_once = 1 + PLACES // 2  # of one owner
    reads = [asyncio.create_task(files.read("local", [message])) for _ in range(at_once + 16 + 4)]
    await until(lambda: sum(read.done() for read in reads) == 4 and len(loading) >= at_once)
    assert len(loading) == at_once
    for read in (each for each in reads if each.done()):
        refused = read.exception()
        assert isinstance(refused, ApiError) and refused.status == 429
    go_on.set()
    told = await asyncio.gather(*reads, return_exceptions=True)
    texts = [file_texts(each[0]) for each in told if not isinstance(each, BaseException)]
    assert texts == [{"0": READ.rstrip()}] * (at_once + 16)


async def test_a_file_that_is_deleted_while_it_waits_to_be_read_is_unknown(
    monkeypatch: pytest.MonkeyPatch, server: Running, http: httpx.AsyncClient
) -> None:
    file_id = await upload(http)

    async def read(load: Callable[[], Awaitable[bytes]], *_: object, **__: object) -> Document:
        assert (await http.delete(f"/v1/files/{file_id}")).status_code == 200
        await load()
        raise AssertionError("it was not deleted")

    monkeypatch.setattr(reader, "read_document", read)
    reply = await http.post("/v1/responses", json={"input": asked(file_id=file_id)})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (404, "not_found")
    assert error["param"] == "input[0].content[0].file_id"


@pytest.mark.parametrize(
    ("own", "status", "code", "kind"),
    [
        (True, 429, "rate_limit_exceeded", "rate_limit_exceeded"),
        (False, 503, "file_not_read", "server_error"),
    ],
)
async def test_a_file_that_finds_no_place_is_told_to_come_again(
    monkeypatch: pytest.MonkeyPatch, http: httpx.AsyncClient, own: bool, status: int, code: str, kind: str
) -> None:
    async def busy(*_: object, **__: object) -> Document:
        raise ReadersBusy(own=own)

    monkeypatch.setattr(reader, "read_document", busy)
    reply = await http.post("/v1/responses", json={"input": asked(file_data="aGk=")})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["type"]) == (status, code, kind)
    assert error["param"] == "input[0].content[0]" and reply.headers["retry-after"] == "1"


async def test_the_files_of_a_request_have_a_time_together_and_what_was_read_stays_known(
    monkeypatch: pytest.MonkeyPatch, http: httpx.AsyncClient
) -> None:
    reads = list[str]()

    async def read(data: bytes, *_: object, **__: object) -> Document:
        reads.append(data.decode())
        if reads == ["one", "two"]:
            await asyncio.Event().wait()
        return Document("text", (DocumentPage(None, data.decode()),))

    monkeypatch.setattr(reader, "read_document", read)
    monkeypatch.setattr(sources, "TOTAL_S", 0.2)
    parts = [{"type": "input_file", "file_data": data_of(data)} for data in (b"one", b"two")]
    body = {"input": [{"role": "user", "content": [*parts, {"type": "input_text", "text": "say fine"}]}]}
    late = await http.post("/v1/responses", json=body)
    assert (late.status_code, late.json()["error"]["code"]) == (503, "file_not_read")
    assert late.json()["error"]["param"] == "input" and late.headers["retry-after"] == "1"
    monkeypatch.setattr(sources, "TOTAL_S", 60.0)
    assert (await http.post("/v1/responses", json=body)).status_code == 200
    assert reads == ["one", "two", "two"]


@pytest.mark.parametrize(
    ("file", "status", "code", "field"),
    [
        ({"file_data": "aGk=", "filename": "a" * 256}, 400, "string_above_max_length", ".filename"),
        ({}, 400, "invalid_value", ""),
        ({"file_id": "file-a", "file_data": "aGk="}, 400, "invalid_value", ""),
        ({"file_id": "file-a"}, 404, "not_found", ".file_id"),
        ({"file_data": "no base64!"}, 400, "invalid_value", ".file_data"),
        ({"file_data": "data:text/plain,hi"}, 400, "invalid_value", ".file_data"),
        ({"file_data": data_of(b"%PDF-1.4 broken"), "filename": "a.pdf"}, 400, "invalid_file", ""),
        ({"file_data": data_of(bytes(range(256)) * 9), "filename": "a.bin"}, 400, "unsupported_file", ""),
        ({"file_url": "http://127.0.0.1:9/a.pdf"}, 400, "invalid_file_url", ".file_url"),
        ({"file_url": "ftp://127.0.0.1/a.pdf"}, 400, "invalid_file_url", ".file_url"),
        ({"file_url": "https://example.com/a.pdf"}, 400, "invalid_file_url", ".file_url"),
        (
            {"file_data": data_of(b"one two " * 40_000), "filename": "a.txt"},
            400,
            "context_length_exceeded",
            None,
        ),
    ],
)
async def test_what_cannot_be_read_is_refused_by_its_path(
    http: httpx.AsyncClient, file: Json, status: int, code: str, field: str | None
) -> None:
    reply = await http.post("/v1/responses", json={"input": asked(**file)})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (status, code), reply.text
    assert error["param"] == ("input" if field is None else f"input[0].content[0]{field}")
    items = await http.post("/v1/conversations", json={"items": asked(**file)})
    if field is not None:
        assert items.status_code == status and items.json()["error"]["param"] == f"items[0].content[0]{field}"


async def test_an_address_is_read_where_the_operator_lets_it_be_reached(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with loopback_web() as web:
        settings = {"egress_allow": (web.host,)}
        async with running_app(tmp_path, engine, **settings) as running, http_client(running) as client:
            api = Api(client)
            await api.create(asked(file_url=web.url("/p/moved")))
            assert "[file: moved]\nline 1 of the bay\nline 2 of the bay\n" in prompts(engine)[-1]
            reply = await client.post("/v1/responses", json={"input": asked(file_url=web.url("/p/nowhere"))})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_file_url")


async def test_the_text_counts_among_what_the_owner_stores(tmp_path: Path) -> None:
    limit = ("stored_bytes=55000",)
    async with running_app(tmp_path, owner_limit=limit) as running, http_client(running) as client:
        file_id = await upload(client, b"one " * 5_000, "a.txt")
        for store, status in ((False, 200), (True, 200), (True, 429)):
            body = {"input": asked(file_id=file_id), "store": store}
            reply = await client.post("/v1/responses", json=body)
            assert reply.status_code == status, reply.text


async def test_the_files_of_one_request_are_bounded_together(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(content: bytes, times: int) -> tuple[str, str]:
        part = {"type": "input_file", "file_id": await upload(http, content, "a.txt")}
        body = {"input": [{"role": "user", "content": [part] * times}]}
        reply = await http.post("/v1/responses", json=body)
        error = reply.json()["error"]
        assert reply.status_code == 400, reply.text
        return error["code"], error["param"]

    assert await refused(b"a" * 2_500_000, 2) == ("file_too_large", "input[0].content[1]")
    assert await refused(b"a" * 4_000_001, 1) == ("file_too_large", "input[0].content[0]")
    assert await refused(b"a", 33) == ("invalid_value", "input[0].content[32]")
    monkeypatch.setattr("server.input_files.sources.MAX_BYTES", 1000)
    assert await refused(b"b" * 400, 3) == ("file_too_large", "input[0].content[2].file_id")
