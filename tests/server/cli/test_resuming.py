"""`antiphon chat --resume`, its commands, approvals and what it remembers; `antiphon complete`."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine import ScriptedEngine
from server.cli import chat, resuming, session
from server.cli.chat import Approval, Chat
from server.cli.commands import main
from server.cli.connection import ChatError
from server.cli.session import Session, call_words, text_of
from server.cli.terminal import MOST_TURNS, History
from server.mcp_servers import McpSettings
from tests.server.cli.test_chat import options, prompts, terminal
from tests.support.running import Running, http_client, live_app
from tests.support.talk import Gate, gated_at


def typed(*lines: str) -> Any:
    """What a person types, one line at each question."""
    left = list(lines)

    def read(prompt: str) -> str:
        if not left:
            raise EOFError
        return left.pop(0)

    return read


async def talk(running: Running, *lines: str, argv: tuple[str, ...] = (), ask: Any = None) -> str:
    """Type these lines into a chat; what was printed by its session."""
    out = io.StringIO()

    def run() -> None:
        wanted = options(*argv)
        with httpx.Client(base_url=running.base_url, timeout=20) as http:
            approve = Approval(wanted.approve, ask).of_policy()
            output = None if ask is None else lambda call: str(ask(call["name"]))
            talking = Session(http, wanted, out, colour=False, approve=approve, output=output)
            talking.begin()
            if wanted.resume is not None:
                talking.go_on(wanted.resume or resuming.pick(http, out, ask))
            Chat(talking, http, typed(*lines), interactive=False).run()

    await asyncio.to_thread(run)
    return out.getvalue()


async def test_the_latest_is_gone_on_with_and_its_end_is_shown(live_server: Running) -> None:
    await talk(live_server, "say one", "say two")
    printed = await talk(live_server, "say three", argv=("--resume",))
    assert printed == "> say two\ntwo\nthree\n"
    lengths = [len(request.prompt_ids) for request in prompts(live_server)]
    assert lengths == sorted(lengths)


async def test_one_is_picked_from_a_list(live_server: Running) -> None:
    await talk(live_server, "say one", "say nothing more")
    async with httpx.AsyncClient(base_url=live_server.base_url) as client:
        first = (await client.post("/v1/responses", json={"input": "say two"})).json()["id"]
        body = {"input": "say three", "previous_response_id": first}
        await client.post("/v1/responses", json=body)
    printed = await talk(live_server, argv=("--resume",), ask=typed("9", "2"))
    rows = [line for line in printed.splitlines() if line[:3].strip().isdigit()]
    assert len(rows) == 2, "what was gone on from is no choice, and neither is a turn of a conversation"
    assert "resp_" in rows[0] and rows[0].endswith("say three")
    assert "conv_" in rows[1] and rows[1].endswith("say one")
    assert printed.endswith("> say nothing more\nnothing more\n")


async def test_where_nothing_is_stored_there_is_nothing_to_resume(live_server: Running) -> None:
    with pytest.raises(ChatError, match="nothing is stored"):
        await talk(live_server, argv=("--resume",))
    with pytest.raises(ChatError, match="resp_nobody"):
        await talk(live_server, argv=("--resume", "resp_nobody"))


@pytest.mark.parametrize("conversation", [False, True])
async def test_an_answer_under_way_is_followed_after_the_servers_end(
    tmp_path: Path, conversation: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    async with live_app(tmp_path, ScriptedEngine(gated_at(gate, "hold"))) as server:
        async with httpx.AsyncClient(base_url=server.base_url) as client:
            body: dict[str, Any] = {"input": "hold\nsay one two", "background": True}
            if conversation:
                body["conversation"] = (await client.post("/v1/conversations", json={})).json()["id"]
            made = (await client.post("/v1/responses", json=body)).json()["id"]
            await gate.reached.wait()
        await server.life.drain(0)
    again = Gate()
    async with live_app(tmp_path, ScriptedEngine(gated_at(again, "hold"))) as server:

        async def go_on_once_it_is_read() -> None:
            while not server.context.runs.feed.total_readers:
                await asyncio.sleep(0.005)
            again.release.set()

        reading = asyncio.create_task(go_on_once_it_is_read())
        printed = await talk(server, argv=("--resume", body.get("conversation", made)))
        await reading
    assert printed.endswith("one two\n")


async def test_commands(live_server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    made = await talk(
        live_server,
        *("/help", "/model", "/model antiphon-scripted", "/model nobody", "/tools on", "/tools"),
        *("/instructions Be brief.", "/instructions none", "/fork", "say one", "/fork", "say two"),
        *("/resume", "/nonsense", "/exit", "say never"),
        argv=("--model", "antiphon-scripted"),
    )
    told = capsys.readouterr()
    assert all(f"/{name} " in told.out for name in chat.COMMANDS) and chat.HELP in told.out
    assert "* antiphon-scripted" in told.out and "tools are offered" in told.out
    assert "Be brief." in told.out and "no instructions" in told.out
    assert "there is no model 'nobody'; there are antiphon-scripted" in told.err
    assert "nothing was said yet" in told.err
    assert made.startswith("one\n(forked: conv_") and "never" not in made
    assert made.endswith("> say two\ntwo\n")


async def test_calls_are_asked_for_and_made_or_not(tmp_path: Path) -> None:
    call = 'call calculator {"expression": "6 * 7"}'
    async with live_app(tmp_path, mcp=McpSettings(approval="always")) as server:
        asked: list[str] = []

        def ask(*answers: str) -> Any:
            left = typed(*answers)

            def answer(question: str) -> str:
                asked.append(question)
                return str(left(question))

            return answer

        printed = await talk(server, call, call, argv=("--tools",), ask=ask("always"))
        assert printed.count("-> 42") == 2 and len(asked) == 1
        assert "May calculator of antiphon be called?" in asked[0]
        assert "-> 42" not in await talk(server, call, argv=("--tools",), ask=ask("it is too late"))
        assert "-> 42" not in await talk(server, call, argv=("--tools",), ask=ask())
        assert "-> 42" in await talk(server, call, argv=("--tools", "--approve", "always"))
        # What was left open is asked for when the chat is taken up again.
        await talk(server, call, argv=("--tools",))
        assert "-> 42" in await talk(server, argv=("--tools", "--resume"), ask=ask("1", "y"))


WEATHER = {"type": "function", "name": "get_weather", "strict": False}
CALL = 'call get_weather {"city": "Paris"}'


async def waiting(http: httpx.AsyncClient, **body: Any) -> tuple[str, str]:
    """A conversation and its response, which waits for somebody; their ids."""
    conversation = (await http.post("/v1/conversations", json={})).json()["id"]
    asked = {"conversation": conversation, "background": True, "await_tool_outputs": True, **body}
    made = (await http.post("/v1/responses", json=asked)).json()["id"]
    shown = (await http.get(f"/v1/responses/{made}?wait=20")).json()
    assert len(shown["pending_tool_calls"]) == 1
    return conversation, made


async def test_what_a_response_waits_for_is_asked_for_and_it_goes_on(tmp_path: Path) -> None:
    builtin = {"type": "mcp", "server_label": "antiphon", "server_url": "builtin:"}
    sums = {"input": 'call calculator {"expression": "6 * 7"}', "tools": [builtin]}
    async with live_app(tmp_path, mcp=McpSettings(approval="always")) as server, http_client(server) as http:
        conversation, made = await waiting(http, input=CALL, tools=[WEATHER])
        printed = await talk(server, argv=("--resume", conversation), ask=typed())
        assert printed.endswith(
            'get_weather({"city": "Paris"})\n\n(it goes on waiting; --resume comes back to it)\n'
        )
        assert (await http.get(f"/v1/responses/{made}")).json()["status"] == "in_progress"
        await talk(server, argv=("--resume", conversation), ask=typed("sunny"))
        done = (await http.get(f"/v1/responses/{made}")).json()
        outputs = [item["output"] for item in done["output"] if item["type"] == "function_call_output"]
        assert done["status"] == "completed" and outputs == ["sunny"]
        conversation, made = await waiting(http, **sums)
        assert "-> 42" in await talk(server, argv=("--resume", made), ask=typed("y"))
        assert (await http.get(f"/v1/responses/{made}")).json()["status"] == "completed"


async def test_nothing_is_said_not_to_be_made_while_somebody_else_may_approve_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builtin = {"type": "mcp", "server_label": "antiphon", "server_url": "builtin:"}
    look = session.Session._waited_for

    def looked(chat: session.Session, id: str) -> list[dict[str, Any]]:
        """The other client approves as soon as the chat has seen for what the response waits."""
        calls = look(chat, id)
        approvals = [
            {"type": "mcp_approval_response", "approval_request_id": call["id"], "approve": True}
            for call in calls
        ]
        given = chat._http.post(f"/v1/responses/{id}/tool_outputs", json={"tool_outputs": approvals})
        given.raise_for_status()
        return calls

    monkeypatch.setattr(session.Session, "_waited_for", looked)
    async with live_app(tmp_path, mcp=McpSettings(approval="always")) as server, http_client(server) as http:
        sums = {"input": 'call calculator {"expression": "6 * 7"}', "tools": [builtin]}
        _, made = await waiting(http, **sums)
        printed = await talk(server, argv=("--resume", made))
    assert "not made" not in printed and "-> 42" in printed
    assert printed.count("it waits for an answer, which cannot be given here") == 1


async def test_what_was_answered_elsewhere_is_told_and_gone_on_from(live_server: Running) -> None:
    async with http_client(live_server) as http:
        conversation, made = await waiting(http, input=CALL, tools=[WEATHER])

    def late(_question: str) -> str:
        with httpx.Client(base_url=live_server.base_url) as http:
            [call] = http.get(f"/v1/responses/{made}").json()["pending_tool_calls"]
            given = {"tool_outputs": [{"call_id": call["call_id"], "output": "sunny"}]}
            http.post(f"/v1/responses/{made}/tool_outputs", json=given).raise_for_status()
        return "rain"

    printed = await talk(live_server, "say more", argv=("--resume", conversation), ask=late)
    assert "was answered already" in printed
    assert printed.endswith("more\n")


async def test_a_call_of_a_stopped_turn_that_nobody_answered_is_left_behind(live_server: Running) -> None:
    async with http_client(live_server) as http:
        conversation, made = await waiting(http, input=CALL, tools=[WEATHER])
        await http.post(f"/v1/responses/{made}/cancel")
        assert (await talk(live_server, "say on", argv=("--resume", conversation))).endswith("on\n")
        items = (await http.get(f"/v1/conversations/{conversation}/items?order=asc")).json()["data"]
    assert [text_of(item) for item in items] == [CALL, "say on", "on"]


async def test_calls_with_which_a_response_ended_are_asked_for_too(live_server: Running) -> None:
    async with http_client(live_server) as http:
        made = (await http.post("/v1/responses", json={"input": CALL, "tools": [WEATHER]})).json()
    await talk(live_server, argv=("--resume", made["id"]), ask=typed("sunny"))
    assert b"sunny" in bytes(id for id in prompts(live_server)[-1].prompt_ids if id < 256)


async def test_a_server_that_starts_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "RETRY_S", 0.0)
    event = '{"type":"response.created","sequence_number":0,"response":{"id":"resp_1"}}'
    end = '{"type":"response.completed","sequence_number":1,"response":{"id":"resp_1"}}'
    replies: Iterator[httpx.Response | Exception] = iter(
        [
            httpx.Response(200, json={"id": "conv_1"}),
            httpx.ReadError("cut before anything came"),
            httpx.Response(200, text=f"data: {event}\n\n"),
            httpx.ConnectError("refused"),
            httpx.Response(503, json={"error": {"message": "The server is starting."}}),
            httpx.Response(200, text=f"data: {end}\n\n"),
        ]
    )
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        reply = next(replies)
        if isinstance(reply, Exception):
            raise reply
        return reply

    out = io.StringIO()
    with httpx.Client(transport=httpx.MockTransport(answer), base_url="http://x") as http:
        assert Session(http, options("m"), out, colour=False).say("hello")
    assert [request.method for request in asked] == ["POST", "POST", "POST", "GET", "GET", "GET"]
    assert len({request.headers["idempotency-key"] for request in asked[1:3]}) == 1
    assert asked[-1].url.params["starting_after"] == "0"
    assert out.getvalue().count("connection lost") == 2


async def test_a_server_that_says_no_is_not_asked_again() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(503, json={"error": {"message": "full"}}))
    with httpx.Client(transport=transport, base_url="http://x") as http:
        talking = Session(http, options("m"), io.StringIO(), colour=False)
        with pytest.raises(ChatError, match="full") as caught:
            talking.say("hello")
    assert caught.value.status == 503


def test_what_is_typed_is_kept_for_this_user_alone(tmp_path: Path) -> None:
    file = tmp_path / "state" / "chat_history"
    history = History(file)
    for number in range(MOST_TURNS + 3):
        history.add(f"turn {number}\nsecond line")
    history.add(f"turn {MOST_TURNS + 2}\nsecond line")  # the same again
    assert len(History(file).turns()) == MOST_TURNS
    assert History(file).turns()[-1] == f"turn {MOST_TURNS + 2}\nsecond line"
    assert file.stat().st_mode & 0o077 == 0 and file.parent.stat().st_mode & 0o077 == 0
    nowhere = History(Path("/dev/null/chat_history"))
    nowhere.add("lost")
    assert nowhere.turns() == []


async def test_what_was_typed_comes_again_in_the_next_chat(live_server: Running, tmp_path: Path) -> None:
    def run() -> None:
        for keys in ("say remembered\r", "\x1b[A\r"):  # the arrow up
            with terminal("--url", live_server.base_url, state=str(tmp_path)) as screen:
                screen.until("> ")
                screen.type(keys)
                screen.until("\rremembered\r\n")

    await asyncio.to_thread(run)


async def test_ctrl_c_ends_the_answer_and_not_the_chat(tmp_path: Path) -> None:
    async with live_app(tmp_path) as server:

        def run() -> None:
            with terminal("--url", server.base_url) as screen:
                screen.until("> ")
                screen.type("tick 50\rcount 1000\r".replace("\r", "\x1b\r", 1))  # two lines, one turn
                screen.until("3")
                screen.interrupt()
                screen.until("(stopped)")
                screen.until("> ")
                screen.type("say after\r")
                screen.until("\rafter\r\n")

        await asyncio.to_thread(run)
        async with httpx.AsyncClient(base_url=server.base_url) as client:
            listed = (await client.get("/v1/responses")).json()["data"]
            path = f"/v1/conversations/{listed[0]['conversation']['id']}/items?order=asc"
            items = (await client.get(path)).json()["data"]
    assert [one["status"] for one in listed] == ["completed", "cancelled"]
    said = [text_of(item) for item in items]
    assert (
        said[0] == "tick 50\ncount 1000"
        and said[1].startswith("1 2 3")
        and said[2:] == ["say after", "after"]
    )


async def test_a_stopped_turn_is_taken_along_when_its_conversation_is_taken_up(tmp_path: Path) -> None:
    gate = Gate()
    async with (
        live_app(tmp_path, ScriptedEngine(gated_at(gate, "hold"))) as server,
        http_client(server) as http,
    ):
        conversation = (await http.post("/v1/conversations", json={})).json()["id"]
        body = {"input": "hold\nsay never", "background": True, "conversation": conversation}
        made = (await http.post("/v1/responses", json=body)).json()["id"]
        await gate.reached.wait()
        await http.post(f"/v1/responses/{made}/cancel")
        printed = await talk(server, "say on", argv=("--resume", conversation))
        again = await talk(server, "say more", argv=("--conversation", conversation))
        items = (await http.get(f"/v1/conversations/{conversation}/items?order=asc")).json()["data"]
    assert printed == "> hold\nsay never\non\n" and again == "more\n"
    texts = [text_of(item) for item in items]
    assert texts == ["hold\nsay never", "say on", "on", "say more", "more"]


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"type": "mcp_call", "name": "add", "arguments": "{}"}, "add({})"),
        ({"type": "custom_tool_call", "name": "sql", "input": "select 1"}, "sql(select 1)"),
        ({"type": "web_search_call", "action": {"type": "search", "query": "news"}}, "web_search(news)"),
        ({"type": "file_search_call", "queries": ["a", "b"]}, "file_search(a, b)"),
        ({"type": "code_interpreter_call", "code": "1 + 1"}, "code_interpreter(1 + 1)"),
        ({"type": "shell_call", "action": {"commands": ["ls", "pwd"]}}, "shell(ls, pwd)"),
        ({"type": "image_generation_call"}, "image_generation()"),
        ({"type": "message"}, ""),
    ],
)
def test_calls_in_words(item: dict[str, Any], words: str) -> None:
    assert call_words(item) == words


def test_messages_in_words() -> None:
    assert text_of({"content": "a"}) == "a"
    parts = [
        {"type": "input_text", "text": "a"},
        {"type": "input_image"},
        {"type": "refusal", "refusal": "b"},
    ]
    assert text_of({"content": parts}) == "a\n(input_image)\nb"


def test_a_model_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert chat.chat(options("a", "--model", "b")) == 2
    assert "MODEL is 'a', and --model 'b'" in capsys.readouterr().err
    assert main(["serve", "a", "--model", "b"]) == 2
    assert "MODEL is 'a', and --model 'b'" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_the_variable_names_a_server_with_or_without_v1(
    live_server: Running, suffix: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTIPHON_URL", live_server.base_url + suffix)
    argv = ["complete", "antiphon-scripted", "--prompt", "say hello", "--max-tokens", "9"]
    assert await asyncio.to_thread(main, argv) == 0
    assert capsys.readouterr().out == "hello\n"


async def test_a_completion_that_cannot_be_had_is_one_line(
    live_server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    url = ["--url", live_server.base_url]
    assert await asyncio.to_thread(main, ["complete", "nobody", "--prompt", "x", *url]) == 1
    assert "nobody" in capsys.readouterr().err
    assert await asyncio.to_thread(main, ["complete", "--prompt", "x", "--url", "nonsense"]) == 2
    assert "no URL of a server" in capsys.readouterr().err


async def test_an_answer_is_shown_whole_whatever_separates_its_lines(
    live_server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "one\u2028two\u2029three"
    argv = ["complete", "--prompt", said, "--max-tokens", "99", "--url", live_server.base_url]
    assert await asyncio.to_thread(main, argv) == 0
    assert capsys.readouterr().out == f"You said: {said}\n"
    assert await talk(live_server, said) == f"You said: {said}\n"
