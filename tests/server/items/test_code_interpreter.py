"""The hosted tool `code_interpreter`: code in a sandbox, its outputs, its files, and links to them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine import GenerateRequest, Say, ScriptedEngine
from engine.backends.script import Script, Step
from server.cli.doctor import examine
from server.clock import now_us
from server.config import Config
from server.process.lifecycle import Refused, ServerLifecycle
from tests.support.running import Running, http_client, running_app
from tests.support.sandboxes import require_sandbox
from tests.support.talk import Api, loose, prompts, saying, wrote
from tests.support.wire import Json
from tools.sandbox import SandboxError, Tier, probe

CODE: Json = {"type": "code_interpreter", "container": {"type": "auto"}}
OUTPUTS = "code_interpreter_call.outputs"


def python(code: str) -> str:
    return wrote("python", code=code)


def turns(*texts: str) -> Script:
    """Each generation says the next text, whichever run it is of."""
    rest = iter(texts)

    def script(_request: GenerateRequest, _prompt: str) -> Iterator[Step]:
        yield Say(next(rest))

    return script


@asynccontextmanager
async def coding(
    folder: Path, engine: ScriptedEngine | None = None, sandbox: Tier = "monty", **settings: Any
) -> AsyncIterator[tuple[Running, Api]]:
    """A server that runs code."""
    await require_sandbox(sandbox)
    async with (
        running_app(folder, engine, registry=None, sandbox=sandbox, **settings) as running,
        http_client(running) as http,
    ):
        yield running, Api(http)


def made(response: Json) -> list[Json]:
    return [item for item in response["output"] if item["type"] == "code_interpreter_call"]


async def test_code_is_streamed_run_and_told(tmp_path: Path) -> None:
    engine = ScriptedEngine(saying(python('x = 6\nprint("a\\"b")\nx * 7'), "It is 42."))
    async with coding(tmp_path, engine) as (_, api):
        stream = await api.stream("What?", tools=[CODE])
        own = [kind for kind in stream.types if "code_interpreter" in kind or kind.startswith("output_item")]
        begun = ["output_item.added", "code_interpreter_call.in_progress"]
        deltas = [kind for kind in own if kind == "code_interpreter_call_code.delta"]
        assert deltas and own == [
            *begun, *deltas, "code_interpreter_call_code.done", "code_interpreter_call.interpreting",
            "code_interpreter_call.completed", "output_item.done", "output_item.added", "output_item.done",
        ]  # fmt: skip
        call = made(stream.response)[0]
        assert (call["status"], call["code"]) == ("completed", 'x = 6\nprint("a\\"b")\nx * 7')
        assert call["outputs"] is None and call["container_id"].startswith("cntr_")
        offered, told = prompts(engine)
        assert "a part of Python only" in offered and 'a"b\n42' in told
        stored = await api.http.get(f"/v1/responses/{stream.response['id']}")
        assert stored.json()["output"] == stream.response["output"]
        filled = await api.http.get(f"/v1/responses/{stream.response['id']}", params={"include[]": OUTPUTS})
        assert made(filled.json())[0]["outputs"] == [{"type": "logs", "logs": 'a"b\n42\n'}]
        again = await api.http.get(f"/v1/responses/{stream.response['id']}", params={"stream": "true"})
        assert again.content == stream.raw


@pytest.mark.parametrize("sandbox", ["monty", "bubblewrap"])
async def test_variables_and_files_stay_for_the_next_turns(tmp_path: Path, sandbox: Tier) -> None:
    script = turns(
        python("x = 41\nopen('/mnt/data/a b.txt', 'w').write('hello')\nNone"),
        "See [it](sandbox:/mnt/data/a%20b.txt), not sandbox:/mnt/data/none.txt",
        python("print(x + 1, open('/mnt/data/a b.txt').read())"),
        "Here: [it](sandbox:/mnt/data/a b.txt)",
    )
    engine = ScriptedEngine(script)
    async with coding(tmp_path, engine, sandbox) as (_, api):
        stream = await api.stream("one", tools=[CODE])
        call, message = stream.response["output"]
        text = message["content"][0]["text"]
        [cited] = message["content"][0]["annotations"]
        place = text[cited["start_index"] : cited["end_index"]]
        assert (place, cited["filename"]) == ("sandbox:/mnt/data/a%20b.txt", "a b.txt")
        assert cited["type"] == "container_file_citation" and cited["container_id"] == call["container_id"]
        url = f"/v1/containers/{call['container_id']}/files"
        content = await api.http.get(f"{url}/{cited['file_id']}/content")
        assert content.content == b"hello" and "attachment" in content.headers["content-disposition"]
        [listed] = (await api.http.get(url)).json()["data"]
        assert (listed["path"], listed["source"], listed["bytes"]) == ("/mnt/data/a b.txt", "assistant", 5)
        second = await api.create(
            "two", tools=[CODE], previous_response_id=stream.response["id"], include=[OUTPUTS]
        )
        assert made(second)[0]["container_id"] == call["container_id"]
        assert made(second)[0]["outputs"] == [{"type": "logs", "logs": "42 hello\n"}]
        [cited] = second["output"][-1]["content"][0]["annotations"]
        assert cited["file_id"] == listed["id"], "a file of an earlier turn"
        assert "[new or changed files: /mnt/data/a b.txt]" in prompts(engine)[1]


async def test_a_named_container_is_used_and_is_its_owners(tmp_path: Path) -> None:
    engine = ScriptedEngine(saying(python("open('in.txt').read()"), "done"))
    async with coding(tmp_path, engine) as (_, api):
        made_one = (await api.http.post("/v1/containers", json={"name": "mine"})).json()
        files = {"file": ("in.txt", b"from the client")}
        put = await api.http.post(f"/v1/containers/{made_one['id']}/files", files=files)
        assert put.status_code == 200, put.text
        tool = {"type": "code_interpreter", "container": made_one["id"]}
        response = await api.create(
            "hi", tools=[tool], include=[OUTPUTS], tool_choice=dict(type="code_interpreter")
        )
        assert made(response)[0]["outputs"] == [{"type": "logs", "logs": "'from the client'\n"}]
        for container, status, code in (
            ("cntr_unknown", 404, "container_not_found"),
            ({"type": "auto", "file_ids": ["file-none"]}, 404, "not_found"),
            ({"type": "auto", "network_policy": {"type": "allowlist", "allowed_domains": ["a"]}}, 400,
             "unsupported_parameter"),
            ({"type": "auto", "memory_limit": "2g"}, 400, "invalid_value"),
            (7, 400, "invalid_type"),
        ):  # fmt: skip
            tool = {"type": "code_interpreter", "container": container}
            reply = await api.http.post("/v1/responses", json={"input": "hi", "tools": [tool]})
            error = reply.json()["error"]
            assert (reply.status_code, error["code"]) == (status, code), reply.text
            assert error["param"].startswith("tools[0].container")
        await api.http.delete(f"/v1/containers/{made_one['id']}")


async def test_errors_of_code_are_the_models_and_calls_are_limited(tmp_path: Path) -> None:
    script = saying(python("1 / 0"), python("2"), "sorry")
    async with coding(tmp_path, ScriptedEngine(script)) as (_, api):
        response = await api.create("hi", tools=[CODE], include=[OUTPUTS], max_tool_calls=1)
        wrong, refused = made(response)
        assert wrong["status"] == "completed" and "ZeroDivisionError" in wrong["outputs"][0]["logs"]
        assert refused["status"] == "failed" and "no more than 1 tool call" in refused["outputs"][0]["logs"]


async def test_a_call_that_is_not_whole_is_told(tmp_path: Path) -> None:
    broken = '<tool_call>\n{"name": "python", "arguments": {"code": "1 +\n</tool_call>'
    async with coding(tmp_path, loose(saying(broken, "sorry"))) as (_, api):
        response = await api.create("hi", tools=[CODE])
        assert made(response)[0]["status"] == "incomplete"


async def test_what_is_not_stored_keeps_its_container_all_the_same(tmp_path: Path) -> None:
    script = turns(python("x = 1"), "done", python("x + 1"), "done")
    async with coding(tmp_path, ScriptedEngine(script)) as (_, api):
        first = await api.create("hi", tools=[CODE], store=False)
        told = [{"role": "user", "content": "hi"}, *first["output"], {"role": "user", "content": "and?"}]
        second = await api.create(told, tools=[CODE], store=False, include=[OUTPUTS])
        assert made(second)[0]["outputs"] == [{"type": "logs", "logs": "2\n"}]


async def test_plots_are_images_at_the_servers_address(tmp_path: Path) -> None:
    code = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()"
    engine = ScriptedEngine(saying(python(code), "done"))
    async with coding(tmp_path, engine, "bubblewrap", public_url="https://ai.example/") as (_, api):
        response = await api.create("hi", tools=[CODE], include=[OUTPUTS])
        image = made(response)[0]["outputs"][-1]
        if image["type"] == "logs" and "No module named" in image["logs"]:
            pytest.skip("matplotlib is not installed")
        assert image["type"] == "image" and image["url"].startswith("https://ai.example/v1/containers/cntr_")
        content = await api.http.get(image["url"].removeprefix("https://ai.example"))
        assert content.content.startswith(b"\x89PNG") and content.headers["content-type"] == "image/png"


async def test_without_a_sandbox_the_tool_is_refused_by_its_name(tmp_path: Path) -> None:
    async with running_app(tmp_path, registry=None) as running, http_client(running) as http:
        reply = await http.post("/v1/responses", json={"input": "hi", "tools": [CODE]})
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "unsupported_tool")
        assert "--sandbox" in reply.json()["error"]["message"]
        assert (await http.get("/version")).json()["sandbox"] == "off"


async def test_a_sandbox_that_is_named_and_does_not_work_keeps_the_server_from_starting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = {"sandbox": "command", "sandbox_command": "/nowhere/jail --"}
    config = Config(data=tmp_path, engine="scripted", **named)
    life = ServerLifecycle(config, engine=ScriptedEngine())
    try:
        with pytest.raises(Refused, match=r"does not work here: command: .*/nowhere/jail"):
            await life.start()
    finally:
        await life.close()
    assert await asyncio.to_thread(examine, config.model_copy(update={"port": 0})) == 1
    assert "FAIL  sandbox   command: " in capsys.readouterr().out


async def test_where_auto_finds_no_sandbox_a_request_is_told_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fails(*_: Any) -> Any:
        raise SandboxError("it is broken")

    for trial in ("_try", "_monty"):
        monkeypatch.setattr(probe, trial, fails)
    shell = {"type": "shell", "environment": {"type": "container_auto"}}
    async with (
        running_app(tmp_path, registry=None, sandbox="auto") as running,
        http_client(running) as http,
    ):
        for tool in (CODE, shell):
            error = (await http.post("/v1/responses", json={"input": "hi", "tools": [tool]})).json()["error"]
            assert error["code"] == "unsupported_tool"
            assert "(bubblewrap: it is broken; monty: it is broken)" in error["message"]
            assert "  " not in error["message"]
        told = (await http.get("/version")).json()["sandbox"]
        assert told == "none (bubblewrap: it is broken; monty: it is broken)"
        refused = (await http.post("/v1/containers", json={"name": "n"})).json()["error"]
        assert refused["code"] == "unsupported_tool" and "monty: it is broken" in refused["message"]
    config = Config(data=tmp_path, engine="scripted", sandbox="auto", port=0)
    assert await asyncio.to_thread(examine, config) == 0
    assert "note  sandbox   no code is run" in capsys.readouterr().out


async def test_memory_that_a_container_cannot_have_is_named_and_not_shown(tmp_path: Path) -> None:
    """The limit of this server is 1 GiB."""
    async with coding(tmp_path) as (_, api):
        for limit, named in (("64g", True), ("1g", False)):
            tool = CODE | {"container": {"type": "auto", "memory_limit": limit}}
            asked = {"input": 'call python {"code": "1"}', "tools": [tool]}
            reply = await api.http.post("/v1/responses", json=asked)
            told = reply.headers.get("x-antiphon-ignored", "")
            assert ("tools[0].container.memory_limit" in told) is named
            made = await api.http.get(f"/v1/containers/{reply.json()['output'][0]['container_id']}")
            assert made.json()["memory_limit"] == "1g"
        own = await api.http.post("/v1/containers", json={"name": "n", "memory_limit": "4g"})
        assert (own.json()["memory_limit"], own.headers["x-antiphon-ignored"]) == ("1g", "memory_limit")
        nothing = await api.http.post(f"/v1/containers/{own.json()['id']}/files", json={})
        error = nothing.json()["error"]
        assert (error["code"], error["param"]) == ("missing_required_parameter", "file")
        assert "'file'" in error["message"] and "'file_id'" in error["message"]


async def test_files_of_a_later_turn_are_added_and_an_expired_container_is_made_anew(tmp_path: Path) -> None:
    script = turns(
        python("open('a.txt').read()"), "done",
        python("open('a.txt', 'w').write('mine')\nopen('b.txt').read()"), "done",
        python("open('a.txt').read()"), "done",
        python("open('a.txt').read()"), "done",
    )  # fmt: skip
    async with coding(tmp_path, ScriptedEngine(script)) as (_, api):
        ids = []
        for name in ("a", "b"):
            sent = {"file": (f"{name}.txt", name.encode()), "purpose": (None, "user_data")}
            ids.append((await api.http.post("/v1/files", files=sent)).json()["id"])
        said, found, previous = [], [], None
        for wanted in (ids[:1], ids, ids):
            tool = {"type": "code_interpreter", "container": {"type": "auto", "file_ids": wanted}}
            response = await api.create(
                "hi", tools=[tool], include=[OUTPUTS], **({} if previous is None else previous)
            )
            previous = {"previous_response_id": response["id"]}
            [call] = made(response)
            said.append(call["outputs"][0]["logs"])
            found.append(call["container_id"])
        assert said == ["'a'\n", "'b'\n", "'mine'\n"], "what code has changed is not copied again"
        assert len(set(found)) == 1
        await api.http.delete(f"/v1/containers/{found[0]}")
        assert previous is not None
        [call] = made(await api.create("hi", tools=[tool], include=[OUTPUTS], **previous))
        assert call["container_id"] != found[0]
        assert call["outputs"][0]["logs"].startswith("[the earlier container has expired or was deleted")
        assert call["outputs"][0]["logs"].endswith("'a'\n")


async def test_a_container_that_goes_while_its_code_runs_ends_it(tmp_path: Path) -> None:
    script = turns(python("x = 1"), "done", python("import time\ntime.sleep(60)"), "it went")
    async with coding(tmp_path, ScriptedEngine(script), "bubblewrap") as (running, api):
        box = (await api.http.post("/v1/containers", json={"name": "mine"})).json()["id"]
        tool = {"type": "code_interpreter", "container": box}
        first = await api.create("hi", tools=[tool])
        cells = running.context.cells
        assert cells is not None
        later = {"previous_response_id": first["id"], "tools": [tool], "include": [OUTPUTS]}
        begun = await api.create("hi", background=True, **later)
        url = f"/v1/responses/{begun['id']}"
        while not cells.num_at_work:
            await asyncio.sleep(0.01)
        # It went by another process's hand: this one sees it with its next look.
        await running.context.storage.containers.delete("local", box, now_us())
        await cells.look()
        done = (await api.http.get(url, params={"wait": "30", "include[]": OUTPUTS})).json()
        [call] = made(done)
        assert call["status"] == "failed" and "has expired, or was deleted" in call["outputs"][0]["logs"]
        await cells.look()
        assert cells.num_live == 0


async def test_contents_are_stored_only_where_there_is_room_for_them(tmp_path: Path) -> None:
    script = turns(python("open('big', 'wb').write(b'x' * 100_000)\nNone"), "too large")
    async with coding(tmp_path, ScriptedEngine(script), owner_limit=("stored_bytes=60000",)) as (_, api):
        [call] = made(await api.create("hi", tools=[CODE], include=[OUTPUTS]))
        assert call["status"] == "failed" and "cannot be stored" in call["outputs"][0]["logs"]
        digest = hashlib.sha256(b"x" * 100_000).hexdigest()
        assert not [*tmp_path.rglob(f"*{digest[2:]}*")], "nothing of it was written"
