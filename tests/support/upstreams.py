"""Upstream servers for tests: one that speaks token ids as vLLM does, and breaks when it is told to.

The server has /v1/models and /v1/completions and no engine; folders with its tokenizer are made here, too.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine import GenerateRequest, Say
from engine.backends.script import Script, Step
from engine.backends.scripted_tokens import TEMPLATE, scripted_tokenizer
from tests.support.wire import Json

TINY = Path(__file__).parents[2] / "engine" / "tiny" / "checkpoint"
TOKENIZER = scripted_tokenizer()
EOS = TOKENIZER.eos_token_ids[0]


def scripted_folder(folder: Path) -> Path:
    """A model folder without weights, with the scripted engine's tokenizer and template."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(TOKENIZER.serialized)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": list(TOKENIZER.eos_token_ids)}))
    (folder / "chat_template.jinja").write_text(TEMPLATE.read_text())
    return folder


def going_on(*steps: Step) -> Script:
    """A script that says the texts of its steps, going on behind what of them the prompt holds already, as a
    model would."""

    def script(request: GenerateRequest, prompt: str) -> list[Step]:
        _, found, said = prompt.rpartition("<|im_start|>assistant\n")
        said = said if found else ""
        left: list[Step] = []
        for step in steps:
            if isinstance(step, Say):
                known = min(len(step.text), len(said))
                assert step.text[:known] == said[:known]
                said = said[known:]
                left.append(Say(step.text[known:], step.whole))
            elif not said:
                left.append(step)
        return left

    return script


@dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of one completion: refused with `status`, or answered up to `tokens` (None: all), and then
    `ending`: whole, "cut" (the connection), "stall", "error" (an event), "garbage", or "unfinished" (an end
    without a finish reason)."""

    status: int = 200
    headers: Json = field(default_factory=dict)
    tokens: int | None = None
    ending: str = "whole"


class Breakable:
    """A server that says `text`, behind whatever of it the prompt holds already.

    plans: for the next completions; without one they are whole. bodies: of the completions asked for.
    `gone` is set when a client has left a stalled answer. listing: the status of /v1/models; `listed`: how
    often it was asked for.
    """

    def __init__(self, text: str, *, model: str = "m", **card: Any) -> None:
        self.text = text
        self.output = [*TOKENIZER.encode(text), EOS]
        self.card = {"id": model, "max_model_len": 4096, "owned_by": "vllm", **card}
        self.plans: deque[Plan] = deque()
        self.bodies: list[Json] = []
        self.headers: list[Json] = []
        self.gives_ids = True  # of tokens
        self.names_ids = True  # in log probabilities
        self.chunk = 3  # tokens an event
        self.listing, self.listed = 200, 0
        self.stalled, self.gone = asyncio.Event(), asyncio.Event()
        self.url = ""
        self._server: asyncio.Server | None = None
        self._busy: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Listen, on the port of before if there was one."""
        port = int(self.url.rpartition(":")[2] or 0)
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Stop listening and drop every connection."""
        assert self._server is not None
        self._server.close()
        for task in self._busy:
            task.cancel()
        await asyncio.gather(*self._busy, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def asked(self) -> list[Json]:
        """The bodies of what was asked, without probes."""
        return [body for body in self.bodies if isinstance(body["prompt"], list)]

    # -- HTTP ------------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._busy.add(task)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                while await self._answer(reader, writer):
                    pass
        finally:
            self._busy.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        data = await reader.readexactly(int(headers.get("content-length", 0)))
        if first.startswith("GET /v1/models "):
            self.listed += 1
            _reply(writer, self.listing, {"data": [self.card]})
            return True
        body: Json = json.loads(data)
        self.bodies.append(body)
        self.headers.append(headers)
        probe = isinstance(body["prompt"], str)
        plan = self.plans.popleft() if self.plans and not probe else Plan()
        if plan.status != 200:
            _reply(writer, plan.status, {"error": {"message": "as planned"}}, plan.headers)
            return True
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        return await self._stream(reader, writer, body, plan)

    async def _stream(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: Json, plan: Plan
    ) -> bool:
        tokens = self._rest(body["prompt"])
        whole = tokens[: body["max_tokens"]]
        tokens = whole[: plan.tokens]
        parts = [tokens[at : at + self.chunk] for at in range(0, len(tokens), self.chunk)]
        for index, part in enumerate(parts):
            last = index + 1 == len(parts) and plan.ending == "whole"
            reason = None if not last else "stop" if part[-1] == EOS else "length"
            choice: Json = {"index": 0, "text": "", "finish_reason": reason, "logprobs": None}
            if self.gives_ids:
                choice["token_ids"] = part
            if "logprobs" in body:
                ids = [*body["prompt"], *part] if body.get("echo") and not index else part
                names = [f"token_id:{token}" if self.names_ids else chr(token % 256) for token in ids]
                tops = [{name: -0.5, "token_id:7": -1.5} for name in names]
                choice["logprobs"] = {"tokens": names, "token_logprobs": [-0.5] * len(ids)}
                choice["logprobs"]["top_logprobs"] = tops
            if index == 0 and isinstance(body["prompt"], str):
                choice["prompt_token_ids"] = TOKENIZER.encode(body["prompt"])
            _send(writer, json.dumps({"choices": [choice]}))
            await writer.drain()
        if plan.ending == "stall":
            self.stalled.set()
            await reader.read()
            self.gone.set()
        if plan.ending in ("cut", "stall"):
            return False
        if plan.ending == "error":
            _send(writer, json.dumps({"error": {"message": "as planned", "code": 500}}))
        if plan.ending == "garbage":
            _send(writer, "{")
        _send(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    def _rest(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            return self.output
        for known in range(min(len(self.output), len(prompt)), 0, -1):
            if list(prompt[-known:]) == self.output[:known]:
                return self.output[known:]
        return self.output


def _reply(writer: asyncio.StreamWriter, status: int, body: Json, headers: Json | None = None) -> None:
    data = json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(data)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    writer.write("\r\n".join([*lines, "", ""]).encode() + data)


def _send(writer: asyncio.StreamWriter, data: str) -> None:
    event = f"data: {data}\n\n".encode()
    writer.write(b"%x\r\n%s\r\n" % (len(event), event))


@asynccontextmanager
async def breakable(text: str, count: int = 1, **card: Any) -> AsyncIterator[list[Breakable]]:
    """`count` breakable servers that listen."""
    servers = [Breakable(text, **card) for _ in range(count)]
    for server in servers:
        await server.open()
    try:
        yield servers
    finally:
        for server in servers:
            await server.close()


async def until(holds: Callable[[], bool]) -> None:
    """Wait for a state that nobody announces."""
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.001)
