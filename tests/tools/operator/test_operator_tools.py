"""The operator's own tools: what a file may say, programs and endpoints that misbehave, functions."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Literal

import pytest

from tools import BUILTIN, UNKNOWN_EFFECT, ToolError, ToolsError, ToolSpec, execute, operator_tools, tool
from tools.operator import functions
from tools.runtime import MAX_OUTPUT

PYTHON = json.dumps(sys.executable)


def file_of(folder: Path, text: str) -> Path:
    file = folder / "tools.toml"
    file.write_text(text)
    return file


def program(folder: Path, source: str, *more: str) -> ToolSpec:
    """A tool that is a Python program."""
    (folder / "program.py").write_text(source)
    lines = [
        "[tools.program]",
        'description = "A program."',
        f'command = [{PYTHON}, "program.py"]',
        *more,
        "[tools.program.parameters]",
        'type = "object"',
        "properties = {text = {type = 'string'}}",
    ]
    return operator_tools(file_of(folder, "\n".join(lines)), BUILTIN)["program"]


async def test_a_program_reads_json_and_its_output_is_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTIPHON_API_KEY", "sk-secret")
    spec = program(
        tmp_path,
        "import json, os, sys\n"
        "print(json.load(sys.stdin)['text'], os.getcwd(), os.environ.get('ANTIPHON_API_KEY'))",
        "timeout_s = 20",
        "idempotent = true",
    )
    assert (spec.timeout_s, spec.idempotent, spec.strict) == (20.0, True, True)
    result = await execute(spec, '{"text": "$(id) é; rm"}')
    assert result.output == f"$(id) é; rm {tmp_path} None", "no shell, the file's folder, no settings"


async def test_a_program_has_no_variables_of_the_server_but_those_that_its_table_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mcp.client.stdio import DEFAULT_INHERITED_ENV_VARS

    from tools.operator.command import PASSED_ON

    assert set(PASSED_ON) == set(DEFAULT_INHERITED_ENV_VARS), "those that an MCP server has"
    monkeypatch.setenv("DESK_TOKEN", "sk-desk")
    monkeypatch.setenv("WEATHER_KEY", "sk-weather")
    monkeypatch.setenv("USER", "ann")
    spec = program(
        tmp_path,
        "import json, os\nprint(json.dumps(dict(os.environ)))",
        'env = {KEY = {env = "WEATHER_KEY"}, CITY = "Paris", USER = "bob"}',
    )
    told = json.loads((await execute(spec, "{}")).output or "")
    told.pop("LC_CTYPE", None)  # which Python sets itself
    assert told.keys() <= {*PASSED_ON, "KEY", "CITY"}
    assert (told["KEY"], told["CITY"], told["USER"]) == ("sk-weather", "Paris", "bob")
    assert told["PATH"] == os.environ["PATH"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import sys; sys.exit('no such city')", "the program failed with status 1: no such city"),
        (
            "import os; os.kill(os.getpid(), 15)",
            f"the program was ended by signal 15. {UNKNOWN_EFFECT}",
        ),
        ("import os\nwhile True: os.write(1, b'x' * 65536)", "wrote more than 16777216 bytes"),
        ("import time; time.sleep(60)", f"program took longer than 0.5 s and was stopped. {UNKNOWN_EFFECT}"),
    ],
    ids=["status", "signal", "endless", "hangs"],
)
async def test_programs_that_fail(
    source: str, error: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = await execute(program(tmp_path, source, "timeout_s = 0.5" if "sleep" in source else ""), "{}")
    assert result.output is None and error in str(result.error)
    assert result.fault and "city" not in result.fault and result.fault in str(result.error)
    gc.collect()
    assert caplog.records == []


async def test_a_program_need_not_read_and_may_write_much_and_no_utf8(tmp_path: Path) -> None:
    source = (
        "import sys; sys.stdout.buffer.write(b'\\xff' + b'x' * 3_000_000); sys.stderr.write('y' * 3_000_000)"
    )
    result = await execute(program(tmp_path, source), json.dumps({"text": "z" * 200_000}))
    assert str(result.output).startswith("\N{REPLACEMENT CHARACTER}xxx")
    assert len(str(result.output)) < MAX_OUTPUT + 100


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be collected by its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until_dead(pid: int) -> None:
    async with asyncio.timeout(10):
        while alive(pid):
            await asyncio.sleep(0.01)


FORKS = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open("pids.new", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename("pids.new", "pids")
"""


async def pids(folder: Path) -> list[int]:
    async with asyncio.timeout(10):
        while not (folder / "pids").exists():
            await asyncio.sleep(0.01)
    return [int(pid) for pid in (folder / "pids").read_text().split()]


async def test_a_call_that_is_cancelled_ends_its_program_and_the_programs_of_that(tmp_path: Path) -> None:
    spec = program(tmp_path, f"{FORKS}time.sleep(600)")
    call = asyncio.create_task(execute(spec, "{}"))
    started = await pids(tmp_path)
    assert all(map(alive, started))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    for pid in started:
        await until_dead(pid)


async def test_what_a_program_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    """A child that holds the output open would otherwise hold up the call until its time limit."""
    result = await execute(program(tmp_path, f"{FORKS}print('done')"), "{}")
    assert result.output == "done"
    for pid in await pids(tmp_path):
        await until_dead(pid)


async def test_what_has_left_a_programs_group_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.operator.command.END_S", 0.2)
    source = """
import subprocess
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(child.pid)
"""
    result = await execute(program(tmp_path, source), "{}")
    os.kill(int(result.output or ""), signal.SIGKILL)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ('{"city": "Paris"}', "the arguments do not fit: 'days' is a required property"),
        (
            '{"city": "Paris", "days": 9}',
            "the argument 'days' does not fit: 9 is greater than the maximum of 5",
        ),
        (
            '{"city": "Paris", "days": true}',
            "the argument 'days' does not fit: True is not of type 'integer'",
        ),
        ('{"city": 1, "days": "x"}', "'city' does not fit: 1 is not of type 'string'; the argument 'days'"),
        (
            '{"city": "Paris", "days": 1, "at": [{"h": 25}]}',
            "the argument 'at[0].h' does not fit: 25 is greater",
        ),
        (json.dumps({"city": ["x" * 100_000], "days": 1}), "..."),
    ],
)
async def test_arguments_that_do_not_fit_are_told(arguments: str, error: str, tmp_path: Path) -> None:
    text = f"""
    [tools.weather]
    description = "Weather."
    command = [{PYTHON}, "-c", "raise SystemExit('it was called')"]
    [tools.weather.parameters]
    type = "object"
    required = ["city", "days"]
    [tools.weather.parameters.properties]
    city = {{type = "string"}}
    days = {{type = "integer", maximum = 5}}
    at = {{type = "array", items = {{"$ref" = "#/$defs/time"}}}}
    [tools.weather.parameters."$defs".time]
    type = "object"
    properties = {{h = {{type = "integer", maximum = 23}}}}
    """
    spec = operator_tools(file_of(tmp_path, text), BUILTIN)["weather"]
    result = await execute(spec, arguments)
    assert error in str(result.error) and len(str(result.error)) < 1000


GOOD = 'description = "It is good."\ncommand = ["true"]\n'


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[tools.x\n" + GOOD, "(at line 1, column 9)"),
        ("[tool.x]\n" + GOOD, "'tool' is not known: a tool is a table [tools.NAME]"),
        ("tools = 3", "'tools' holds no tables"),
        ("[tools]\nx = 3", "tool 'x': it is no table"),
        ("\n\n[tools.'a b']\n" + GOOD, ":3: tool 'a b': a tool's name has"),
        ("[tools.x]\n" + GOOD + "\n[tools.y]\ncommand = ['true']", ":5: tool 'y': it has no 'description'"),
        ("[tools.x]\n" + GOOD + "url = 'http://127.0.0.1'", ":1: tool 'x': it must have either"),
        ("[tools.x]\ndescription = 'x'", "it must have either a 'command' or a 'url'"),
        ("[tools.x]\n" + GOOD + "timeout = 3", "'timeout' is not known; there are description, parameters"),
        ("[tools.x]\n" + GOOD + "timeout_s = true", "'timeout_s' has a value of another type"),
        ("[tools.x]\n" + GOOD + "timeout_s = 0", "'timeout_s' must be above 0"),
        ("[tools.x]\n" + GOOD + "idempotent = 'yes'", "'idempotent' has a value of another type"),
        ("[tools.x]\n" + GOOD + "headers = {a = 'b'}", "'headers' belong to a 'url'"),
        ("[tools.x]\ndescription = 'x'\nurl = 'http://a/'\nenv = {a = 'b'}", "'env' belongs to a 'command'"),
        ("[tools.x]\ndescription = 'x'\nurl = 'http://a/'\nheaders = {a = 'ü'}", "holds printable ASCII"),
        ("[tools.x]\n" + GOOD + "env = {a = 3}", "'env.a' is no text"),
        ("[tools.x]\n" + GOOD + "env = {'a=b' = 'c'}", "'env' cannot have the variable 'a=b'"),
        ("[tools.x]\n" + GOOD + "env = {a = {env = 'NO_SUCH'}}", "there is no variable 'NO_SUCH'"),
        ("[tools.x]\n" + GOOD + "headers = {a = {file = 'b'}}", "'headers.a' is no text"),
        ("[tools.x]\ndescription = 'x'\ncommand = []", "'command' is a list of a program"),
        ("[tools.x]\ndescription = 'x'\ncommand = ['nowhere-at-all']", "'nowhere-at-all' cannot be run"),
        ("[tools.x]\ndescription = 'x'\ncommand = ['./tools.toml']", "'./tools.toml' cannot be run"),
        ("[tools.x]\ndescription = 'x'\nurl = 'ftp://a/'", "A URL begins with http:// or https://."),
        ("[tools.x]\ndescription = 'x'\nurl = 'http://a:b@c/'", "may not hold a user name or a password"),
        ("[tools.x]\n" + GOOD + "parameters = {type = 'strung'}", "tool 'x': $.type: 'strung' is not valid"),
        ("[tools.x]\n" + GOOD + "parameters = {type = 'array'}", 'the type must be "object"'),
        ("[tools.x]\n" + GOOD + "parameters = {}", 'the type must be "object"'),
        (
            "[tools.x]\n"
            + GOOD
            + "parameters = {type = 'object', properties = {a = {'$ref' = '#/$defs/b'}}}",
            "'#/$defs/b' refers to nothing in the schema",
        ),
        (
            "[tools.x]\n"
            + GOOD
            + "parameters = {type = 'object', allOf = [{'$ref' = 'http://127.0.0.1:1/s'}]}",
            "'http://127.0.0.1:1/s' refers to nothing in the schema",
        ),
        (
            "[tools.x]\n" + GOOD + "parameters = {type = 'object', properties = {a = {pattern = '('}}}",
            "$.properties.a.pattern: '(' is not a 'regex'",
        ),
        (
            "[tools.x]\n" + GOOD + "parameters = {type = 'object', default = 1979-05-27}",
            "it holds a value that JSON does not have",
        ),
        (
            "[tools.x]\n" + GOOD + "parameters = {type = 'object', maxProperties = inf}",
            "it holds a value that JSON does not have",
        ),
        (
            "[tools.x]\n" + GOOD + "parameters = {type = 'object', required = ['cty'], "
            "properties = {city = {type = 'string'}}, additionalProperties = false}",
            "no call can fit: 'cty' is required, and no property of that name is allowed",
        ),
        ("[tools.calculator]\n" + GOOD, "there are two tools named 'calculator'"),
    ],
)
def test_files_that_are_refused(text: str, error: str, tmp_path: Path) -> None:
    file = file_of(tmp_path, text)
    with pytest.raises(ToolsError) as refused:
        operator_tools(file, BUILTIN)
    assert str(refused.value).startswith(str(file)) and error in str(refused.value), refused.value


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ToolsError, match="nowhere"):
        operator_tools(tmp_path / "nowhere.toml", BUILTIN)


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening(serve: Handler) -> AsyncIterator[str]:
    """An endpoint that serves each connection so, and closes it; its URL. It ends with the last of them."""
    serving: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        try:
            await serve(reader, writer)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async with await asyncio.start_server(connected, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/tool"
        await asyncio.gather(*serving)


@asynccontextmanager
async def endpoint(status: str, body: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """An endpoint that always replies the same; its URL, and the requests that it got."""
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        seen.append(head + await reader.readexactly(length))
        writer.write(f"HTTP/1.1 {status}\r\nconnection: close\r\n\r\n".encode() + body)
        await writer.drain()

    async with listening(serve) as url:
        yield url, seen


def posting(folder: Path, url: str) -> ToolSpec:
    text = f"""
    [tools.post]
    description = "Posts."
    url = "{url}"
    headers = {{authorization = "Bearer secret"}}
    timeout_s = 5
    parameters = {{type = "object", properties = {{text = {{type = "string"}}}}}}
    """
    return operator_tools(file_of(folder, text), BUILTIN)["post"]


async def test_an_endpoint_is_posted_the_arguments(tmp_path: Path) -> None:
    """On loopback, which is where requests may not lead; an operator's URL may."""
    async with endpoint("200 OK", "grün".encode()) as (url, seen):
        result = await execute(posting(tmp_path, url), '{"text": "é"}')
        assert result.output == "grün"
        head, _, body = seen[0].partition(b"\r\n\r\n")
        assert head.startswith(b"POST /tool HTTP/1.1") and b"authorization: Bearer secret" in head.replace(
            b"Authorization", b"authorization"
        )
        assert json.loads(body) == {"text": "é"}


@pytest.mark.parametrize(
    ("status", "body", "error", "fault"),
    [
        ("500 Oh", b"no such city", "the endpoint replied 500: no such city", "HTTP status 500"),
        ("502 Bad Gateway", b"", UNKNOWN_EFFECT, "HTTP status 502"),
        (
            "302 Found\r\nlocation: http://127.0.0.1:1/",
            b"",
            "the endpoint replied 302, and redirects are not followed",
            "HTTP status 302",
        ),
        ("200 OK", b"x" * (2 << 20), "is larger than 1048576 bytes", "its endpoint: too_large"),
    ],
    ids=["error", "gateway", "redirect", "large"],
)
async def test_endpoints_that_fail(status: str, body: bytes, error: str, fault: str, tmp_path: Path) -> None:
    async with endpoint(status, body) as (url, seen):
        result = await execute(posting(tmp_path, url), "{}")
        assert result.output is None and error in str(result.error)
        assert result.fault == fault and len(seen) == 1


@asynccontextmanager
async def dropping(*, after_s: float) -> AsyncIterator[str]:
    """An endpoint that reads each request, and closes its connection in place of an answer."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # the client may give up before it has asked
        with suppress(TimeoutError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            await asyncio.wait_for(reader.read(), after_s)

    async with listening(serve) as url:
        yield url


async def test_a_post_without_an_answer_is_not_known_to_have_had_no_effect(tmp_path: Path) -> None:
    async with dropping(after_s=0.0) as url:
        spec = posting(tmp_path, url)
        broken = await execute(spec, "{}")
        repeatable = await execute(replace(spec, idempotent=True), "{}")
    unsent = await execute(spec, "{}")
    async with dropping(after_s=60.0) as url:
        late = await execute(replace(posting(tmp_path, url), timeout_s=0.2), "{}")
    assert str(broken.error).endswith(UNKNOWN_EFFECT)
    assert repeatable.error and UNKNOWN_EFFECT not in repeatable.error
    assert "accepts no connection" in str(unsent.error) and UNKNOWN_EFFECT not in str(unsent.error)
    told = "post took longer than 0.2 s and may still go on; nobody waits for it any more."
    assert late.error == f"{told} {UNKNOWN_EFFECT}"


async def test_a_function_is_described_by_its_docstring_and_annotations() -> None:
    @tool(idempotent=True, timeout_s=5)
    def repeat(text: str, times: int = 2, mode: Literal["up", "down"] | None = None) -> dict[str, str | int]:
        """Repeat a text."""
        if times < 0:
            raise ToolError("times must not be negative")
        return {"text": text * times, "mode": mode or "none"}

    assert (repeat.name, repeat.description, repeat.idempotent) == ("repeat", "Repeat a text.", True)
    assert repeat.parameters == {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "times": {"type": "integer"},
            "mode": {"anyOf": [{"enum": ["up", "down"]}, {"type": "null"}]},
        },
        "required": ["text"],
        "additionalProperties": False,
    }
    assert (await execute(repeat, '{"text": "ä"}')).output == '{"text": "ää", "mode": "none"}'
    assert (await execute(repeat, '{"text": "a", "times": -1}')).error == "times must not be negative"
    assert "'text' is a required property" in str((await execute(repeat, "{}")).error)


async def words(text: str, wanted: list[str]) -> str:
    """Find words."""
    await asyncio.sleep(0)
    return ", ".join(word for word in wanted if word in text)


def plain(text: str) -> int:
    """Count letters."""
    return len(text)


def mute(text: str) -> str:
    return text


SPEC = ToolSpec("given", "Given whole.", {"type": "object"}, words)
BAD = ToolSpec("bad", "Bad.", {"type": "list"}, words)


async def test_installed_packages_bring_tools_along(monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(**entries: str) -> None:
        found = [EntryPoint(name, value, functions.GROUP) for name, value in entries.items()]
        monkeypatch.setattr(
            functions, "entry_points", lambda group: found if group == functions.GROUP else []
        )

    home = "package_with_tools"
    monkeypatch.setitem(sys.modules, home, sys.modules[__name__])
    installed(find_words=f"{home}:words", count=f"{home}:plain", given=f"{home}:SPEC")
    own = operator_tools(None, BUILTIN)
    assert list(own) == ["find_words", "count", "given"]
    assert (await execute(own["find_words"], '{"text": "a b", "wanted": ["b", "c"]}')).output == "b"
    assert (await execute(own["count"], '{"text": "abc"}')).output == "3"
    for value, error in (
        ("mute", "TypeError: it has no docstring"),
        ("nothing", "AttributeError"),
        ("BAD", "$.type"),
    ):
        installed(broken=f"{home}:{value}")
        with pytest.raises(ToolsError, match="tool 'broken': ") as refused:
            operator_tools(None, BUILTIN)
        assert error in str(refused.value)


async def test_a_function_that_hangs_does_not_hold_the_end_of_the_process() -> None:
    source = (
        "import asyncio, time\n"
        "from tools import execute, tool\n"
        "@tool(timeout_s=0.1)\n"
        "def hang() -> str:\n"
        "    'Hang.'\n"
        "    time.sleep(600)\n"
        "print(asyncio.run(execute(hang, '{}')).error)\n"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", source),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    output, _ = await asyncio.wait_for(process.communicate(), 30)
    told = "hang took longer than 0.1 s and may still go on; nobody waits for it any more."
    assert output.decode().strip() == f"{told} {UNKNOWN_EFFECT}"
