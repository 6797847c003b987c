"""Tools that are programs: no shell, arguments as JSON on standard input, standard output as the result."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any

from tools.runtime import cut_note
from tools.spec import Function, ToolError

MAX_KEPT = 1 << 20
"""Bytes of each of its outputs that are kept; of these the model is shown what the runtime allows."""

MAX_WRITTEN = 16 << 20
"""A program that writes more bytes than this is stopped."""

MAX_COMPLAINT = 2000
"""Characters of standard error that the model is shown of a program that failed."""

LOOK_S = 0.02
"""Pause between looks whether a program has ended that writes nothing."""

END_S = 5.0
"""How long the end of a killed program is awaited, or that of its outputs."""


PASSED_ON = ("HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER")
"""Variables of the server that a program has, as has an MCP server that is one; others may hold secrets."""


def command_tool(command: Sequence[str], folder: Path, env: Mapping[str, str]) -> Function:
    """A function that runs a program in a folder. env: its variables, besides those that are passed on.

    The program leads a process group of its own, which is killed when the program ends, and when the call is
    cancelled or takes too long; what leaves the group, as `setsid` does, goes on. Anything but the exit
    status 0 is a ToolError with what it wrote to standard error.
    """

    async def run(**arguments: Any) -> str:
        with tempfile.TemporaryFile() as given:
            given.write(json.dumps(arguments).encode())
            given.seek(0)
            try:
                process = subprocess.Popen(
                    command,
                    stdin=given,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    cwd=folder,
                    env={**_passed_on(), **env},
                    start_new_session=True,
                )
            except OSError as exc:
                told = f"the program could not be started: {exc.strerror or exc}"
                raise ToolError(told, fault=told) from None
        try:
            output, complaint = await _outputs(process)
        finally:
            if process.returncode is None:
                await _end(process)
        if process.returncode:
            status, words = process.returncode, complaint.decode("utf-8", "replace").strip()[-MAX_COMPLAINT:]
            ended = f"was ended by signal {-status}" if status < 0 else f"failed with status {status}"
            told = f"the program {ended}"
            raise ToolError(f"{told}: {words}" if words else told, uncertain=status < 0, fault=told)
        return output.decode("utf-8", "replace").rstrip("\n")

    return run


def _passed_on() -> dict[str, str]:
    return {name: os.environ[name] for name in PASSED_ON if name in os.environ}


async def _outputs(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """What a program writes until it ends; what it has left behind is killed then."""
    assert process.stdout is not None and process.stderr is not None
    async with _reader(process.stdout) as stdout, _reader(process.stderr) as stderr:
        written = _Written(), _Written()
        outputs = asyncio.gather(written[0].read(stdout), written[1].read(stderr))
        # What it ends with when it is given up is seen by nobody, and would be logged for that.
        outputs.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        try:
            while process.poll() is None:
                if outputs.done():  # closed, and it may go on without them
                    outputs.result()
                    await asyncio.sleep(LOOK_S)
                else:
                    await asyncio.wait([outputs], timeout=LOOK_S)
            _kill_group(process.pid)  # what it left behind would hold its outputs open
            # What has left the group, as a daemon does, may hold them still; it is not waited for.
            await asyncio.wait([outputs], timeout=END_S)
            if outputs.done():
                outputs.result()
        finally:
            outputs.cancel()
    return written[0].kept(), written[1].kept()


@asynccontextmanager
async def _reader(pipe: IO[bytes]) -> AsyncIterator[asyncio.StreamReader]:
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
    try:
        yield reader
    finally:
        transport.close()


class _Written:
    """What a program has written to one of its outputs so far."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self._num_bytes = 0

    async def read(self, pipe: asyncio.StreamReader) -> None:
        """Take in everything. ToolError where that is too much."""
        while part := await pipe.read(65536):
            self._num_bytes += len(part)
            if self._num_bytes > MAX_WRITTEN:
                told = f"the program wrote more than {MAX_WRITTEN} bytes and was stopped"
                raise ToolError(told, uncertain=True, fault=told)
            self._kept += part[: MAX_KEPT - len(self._kept)]

    def kept(self) -> bytes:
        """As much as is kept, with a note where there was more."""
        note = cut_note(self._num_bytes).encode() if self._num_bytes > MAX_KEPT else b""
        return bytes(self._kept) + note


async def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a program's group, and wait until it is dead, which only a broken disk can put off."""
    _kill_group(process.pid)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            while process.poll() is None:
                await asyncio.sleep(LOOK_S)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
