"""`antiphon chat` against a live server: what is shown, what is remembered, and a connection that is cut."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import io
import os
import pty
import select
import signal
import subprocess
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest

from engine import GenerateRequest, ScriptedEngine
from server.cli import chat, session
from server.cli.chat import add_arguments
from server.cli.connection import ChatError
from server.cli.session import PLAIN, Session
from server.mcp_servers import McpSettings
from tests.support.forking import READY
from tests.support.running import Running, live_app


class CutOnce(httpx.BaseTransport):
    """Drops the first streamed reply after some bytes, as a bad network would."""

    def __init__(self, after: int) -> None:
        self._inner = httpx.HTTPTransport()
        self._after = after
        self.asked: list[str] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(f"{request.method} {request.url.raw_path.decode()}")
        reply = self._inner.handle_request(request)
        if self._after and reply.headers["content-type"].startswith("text/event-stream"):
            after, self._after = self._after, 0
            assert isinstance(reply.stream, httpx.SyncByteStream)
            reply.stream = _Cut(reply.stream, after)
        return reply

    def close(self) -> None:
        self._inner.close()


class _Cut(httpx.SyncByteStream):
    def __init__(self, stream: httpx.SyncByteStream, after: int) -> None:
        self._stream, self._after = stream, after

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._stream:
            if self._after <= 0:
                raise httpx.ReadError("the network is gone")
            self._after -= len(chunk)
            yield chunk

    def close(self) -> None:
        self._stream.close()


def options(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(argv)


async def talk(
    running: Running, *lines: str, argv: tuple[str, ...] = (), transport: httpx.BaseTransport | None = None
) -> str:
    """Say these lines in one session; what was printed."""
    out = io.StringIO()

    def run() -> None:
        with httpx.Client(base_url=running.base_url, transport=transport, timeout=20) as http:
            session = Session(http, options(*argv), out, colour=False)
            session.begin()
            for line in lines:
                if line == "/new":
                    session.begin(anew=True)
                else:
                    session.say(line)

    await asyncio.to_thread(run)
    return out.getvalue()


def prompts(running: Running) -> list[GenerateRequest]:
    engine = running.context.models.get(None).engine
    assert isinstance(engine, ScriptedEngine)
    return list(engine.requests)


async def test_turns_follow_each_other_until_new(live_server: Running) -> None:
    assert await talk(live_server, "say one", "say two", "/new", "say three") == "one\ntwo\nthree\n"
    lengths = [len(request.prompt_ids) for request in prompts(live_server)]
    assert lengths[1] > lengths[0] > lengths[2] - 5


async def test_a_conversation_is_made_and_kept(live_server: Running) -> None:
    printed = await talk(live_server, "say one", argv=("--conversation", "new"))
    made = printed.split()[1]
    assert made.startswith("conv_")
    assert await talk(live_server, "say two", argv=("--conversation", made)) == "two\n"
    async with httpx.AsyncClient(base_url=live_server.base_url) as client:
        listed = await client.get(f"/v1/conversations/{made}/items")
        shown = (await client.get(f"/v1/conversations/{made}")).json()
    assert len(listed.json()["data"]) == 4 and shown["title"] == "say one"


async def test_a_chat_is_a_conversation_named_after_its_first_turn(live_server: Running) -> None:
    await talk(live_server, f"say {'ab ' * 60}\n  c", "say two", "/new", "say three")
    async with httpx.AsyncClient(base_url=live_server.base_url) as client:
        listed = (await client.get("/v1/conversations?order=asc")).json()["data"]
        responses = (await client.get("/v1/responses?order=asc")).json()["data"]
    assert [one["title"] for one in listed] == [f"say {'ab ' * 60}"[:80], "say three"]
    of = [one["conversation"]["id"] for one in responses]
    assert of == [listed[0]["id"], listed[0]["id"], listed[1]["id"]]


async def test_a_key_for_responses_alone_has_a_chat_too(live_server: Running) -> None:
    class NoConversations(httpx.HTTPTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            if request.url.path == "/v1/conversations":
                return httpx.Response(403, json={"error": {"message": "not with this key"}})
            return super().handle_request(request)

    assert await talk(live_server, "say one", "say two", transport=NoConversations()) == "one\ntwo\n"
    lengths = [len(request.prompt_ids) for request in prompts(live_server)]
    assert lengths[1] > lengths[0]


async def test_instructions_reasoning_and_tools_are_shown(live_server: Running) -> None:
    assert "why" in await talk(live_server, "think why then say because")
    called = await talk(
        live_server,
        'call calculator {"expression": "6 * 7"}',
        argv=("--tools", "--instructions", "Be brief."),
    )
    assert "calculator(" in called and "-> 42" in called


async def test_a_call_that_needs_approval_is_told_not_to_be_made(tmp_path: Path) -> None:
    async with live_app(tmp_path, mcp=McpSettings(approval="always")) as server:
        called = await talk(server, 'call calculator {"expression": "6 * 7"}', "say on", argv=("--tools",))
    assert "calculator(" in called and "-> not made: it needs an approval" in called
    assert "42" not in called and called.endswith("on\n")


@pytest.mark.parametrize("after", [1, 2000, 4000])
async def test_a_cut_connection_is_resumed_where_it_was_cut(
    live_server: Running, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "RETRY_S", 0.0)
    transport = CutOnce(after)
    printed = await talk(live_server, "tick 2\ncount 50", transport=transport)
    assert printed.replace(" (connection lost, resuming) ", "").split() == [str(n) for n in range(1, 51)]
    assert "connection lost" in printed
    assert any("starting_after=" in asked for asked in transport.asked)


async def test_what_the_server_refuses_is_said_in_its_words(live_server: Running) -> None:
    with pytest.raises(ChatError, match="nobody"):
        await talk(live_server, "x", argv=("--model", "nobody"))
    with pytest.raises(ChatError, match="conv_nobody"):
        await talk(live_server, "x", argv=("--conversation", "conv_nobody"))
    async with httpx.AsyncClient(base_url=live_server.base_url) as client:
        assert (await client.get("/v1/conversations")).json()["data"] == []
    assert "failed inside the engine" in await talk(live_server, "fail the dog ate it")


async def test_a_chat_goes_on_after_a_response(live_server: Running) -> None:
    async with httpx.AsyncClient(base_url=live_server.base_url) as client:
        made = (await client.post("/v1/responses", json={"input": "say one"})).json()["id"]
    assert await talk(live_server, "say two", argv=("--previous", made)) == "two\n"
    lengths = [len(request.prompt_ids) for request in prompts(live_server)]
    assert lengths[1] > lengths[0]
    with pytest.raises(ChatError, match="resp_nobody"):
        await talk(live_server, "x", argv=("--previous", "resp_nobody"))


def at_the_terminal() -> None:
    """Make the terminal the process's own. Ctrl-C counts also where these tests run in the background of a
    shell, which has what it starts there ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@contextmanager
def terminal(*argv: str, state: str = "/dev/null") -> Iterator[Terminal]:
    """The command in a terminal of its own. state: where what is typed is kept; nowhere by default."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "INPUTRC": "/dev/null", "XDG_STATE_HOME": state}
    process = subprocess.Popen(
        [READY, "-m", "server.cli", "chat", *argv],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
        preexec_fn=at_the_terminal,
    )
    os.close(theirs)
    try:
        yield Terminal(ours, process)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


class Terminal:
    """What a person does at a terminal: type, and read until something stands there."""

    def __init__(self, descriptor: int, process: subprocess.Popen[bytes]) -> None:
        self._descriptor = descriptor
        self._unread = ""
        self.process = process

    def type(self, keys: str) -> None:
        os.write(self._descriptor, keys.encode())

    def interrupt(self) -> None:
        """Ctrl-C, until something is shown. Python's readline looks for signals and then waits for a key: a
        signal that comes between the two is noticed at the next key, so that a person has to press again."""
        for _ in range(30):
            self.type("\x03")
            if select.select([self._descriptor], [], [], 1)[0]:
                return
        raise AssertionError("Ctrl-C was pressed 30 times, and nothing was shown")

    def until(self, words: str) -> str:
        """What is shown from where the last call ended up to these words, which have to come within 30 s."""
        while words not in self._unread:
            ready, _, _ = select.select([self._descriptor], [], [], 30)
            assert ready, f"{words!r} did not come: {self._unread!r}"
            try:
                self._unread += os.read(self._descriptor, 4096).decode()
            except OSError:  # Linux says so when the program has gone
                raise AssertionError(f"the program ended without {words!r}: {self._unread!r}") from None
        shown, _, self._unread = self._unread.partition(words)
        return shown


PROMPT = "\x1b[?2004h> "
"""What readline shows when it waits: it asks the terminal to mark what is pasted."""


async def test_pasted_lines_are_one_turn_and_leaving_says_how_to_come_back(live_server: Running) -> None:
    def run() -> str:
        with terminal("--url", f"{live_server.base_url}/v1") as screen:
            screen.until(PROMPT)
            screen.type("\x1b[200~say one\nsay two\x1b[201~\r")
            screen.until("\rone\r\ntwo\r\n")
            screen.until(PROMPT)
            screen.type("say three\x1b\rsay four\r")  # Alt-Enter
            screen.until("\rthree\r\nfour\r\n")
            screen.until(PROMPT)
            screen.type("\x04")
            screen.until("To go on: ")
            return screen.until("\n")

    command = await asyncio.to_thread(run)
    request, _ = prompts(live_server)
    engine = live_server.context.models.get(None).engine
    assert "say one\nsay two" in await engine.detokenize(request.prompt_ids)
    assert command.startswith(f"antiphon chat --url {live_server.base_url}/v1 --conversation conv_")


async def test_an_interrupt_clears_the_line(live_server: Running) -> None:
    def run() -> None:
        with terminal("--url", live_server.base_url) as screen:
            screen.until(PROMPT)
            screen.type("say never")
            screen.until("say never")
            screen.interrupt()
            screen.until(PROMPT)
            screen.type("say after\r")
            screen.until("\rafter\r\n")
            screen.until(PROMPT)
            screen.type("/quit\r")
            screen.until("To go on: ")
            assert screen.process.wait(30) == 0

    await asyncio.to_thread(run)
    (request,) = prompts(live_server)
    engine = live_server.context.models.get(None).engine
    assert "never" not in await engine.detokenize(request.prompt_ids)


async def test_no_colour_is_left_for_the_prompt(live_server: Running) -> None:
    out = io.StringIO()

    def run() -> None:
        with httpx.Client(base_url=live_server.base_url, timeout=20) as http:
            session = Session(http, options("--conversation", "new"), out, colour=True)
            session.begin()
            session.say("fail the dog ate it")

    await asyncio.to_thread(run)
    assert session.RED in out.getvalue() and out.getvalue().endswith(PLAIN)


async def test_the_command(tmp_path: Path) -> None:
    command = [READY, "-m", "server.cli", "chat", "--url"]
    async with live_app(tmp_path) as running:
        done = await asyncio.to_thread(
            subprocess.run,
            [*command, running.base_url],
            input=b"say hello\n/nonsense\n/quit\nsay never\n",
            capture_output=True,
            timeout=30,
        )
    assert done.returncode == 0
    assert done.stdout.decode().splitlines() == ["hello", f"There is no /nonsense. {chat.HELP}."]
    refused = subprocess.run([*command, "http://127.0.0.1:9"], capture_output=True, timeout=30)
    assert refused.returncode == 1
    assert b"no server answers at http://127.0.0.1:9 (" in refused.stderr
    assert b"): start one with `antiphon serve`, or name another with --url\n" in refused.stderr
    assert PLAIN.encode() not in done.stdout


@pytest.mark.parametrize("url", ["localhost:8771", "127.0.0.1:8771/v1", "gpu", "ftp://gpu"])
def test_a_url_without_a_scheme_is_told(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat.chat(options("--url", url)) == 2
    meant = url.removeprefix("ftp://")
    told = f"antiphon: {url!r} is no URL of a server: give --url http://{meant}\n"
    assert capsys.readouterr().err == told


async def test_a_server_without_tls_is_told_from_one_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with live_app(tmp_path) as running:
        url = running.base_url.replace("http:", "https:")
        assert await asyncio.to_thread(chat.chat, options("--url", url)) == 1
    told = capsys.readouterr().err
    assert told.endswith("; does the server speak http:// instead?\n") and "no server" not in told


async def test_a_server_that_wants_a_key_says_how_to_give_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with live_app(tmp_path, api_key=("sk-1",)) as running:
        code = await asyncio.to_thread(chat.chat, options("--url", running.base_url))
    told = capsys.readouterr().err
    assert code == 1 and "--api-key or ANTIPHON_CHAT_KEY" in told and "keys create" in told


@pytest.mark.parametrize(
    ("flags", "typed", "code"),
    [
        (("--model", "nobody"), "say a\n", 1),
        ((), "fail now\nsay b\n", 1),  # the turn after it went well
        ((), "say a\nsay b\n", 0),
    ],
)
async def test_a_piped_chat_ends_with_1_where_a_turn_was_refused_or_failed(
    flags: tuple[str, ...], typed: str, code: int, tmp_path: Path
) -> None:
    async with live_app(tmp_path) as running:
        command = [READY, "-m", "server.cli", "chat", "--url", running.base_url, *flags]
        done = await asyncio.to_thread(
            subprocess.run, command, input=typed.encode(), capture_output=True, timeout=30
        )
    assert done.returncode == code, done


def test_a_question_with_words_of_a_model_is_one_line_that_steers_nothing() -> None:
    asked = []

    def read(question: str) -> str:
        asked.append(question)
        return "yes"

    ask = partial(chat._ask_anew, read)
    hostile = "x\x1b]52;c;ZXZpbA==\x07\x9b2J\nMay y be called? "
    chat._ask_for_output(ask, {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": hostile})
    answer = chat.Approval("ask", ask).of_policy()
    assert answer is not None and answer({"server_label": hostile, "name": hostile}) == (True, None)
    harmless = "x]52;c;ZXZpbA==2J May y be called? "
    assert asked == [
        f"What did f({harmless}) give? ",
        f"May {harmless} of {harmless} be called? yes, no, always, or why not: ",
    ]
