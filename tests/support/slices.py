"""How long the event loop is held, and the requests that could hold it longest.

A slice is what the loop runs between two looks at its sockets: one callback, or one step of a task. It is
measured in processor time of the loop's thread, which does not depend on what else the machine does.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import orjson

from tests.support.wire import Json

LIMIT_S = 0.020
"""What a slice may take, whatever a client sends."""

TRIES = 3
"""Other programs make slices longer, never shorter: the least of a few tries is a request's own."""

REFERENCE_S = 0.006
"""What the work of `slowness` takes where the limit holds as it is. [measured] 8 to 15 ms on a virtual
machine whose processors others use, too: what a thread has counted there is partly theirs."""

NUM_ITEMS = 10_000
RESPONSES, CHAT, COMPLETIONS = "/v1/responses", "/v1/chat/completions", "/v1/completions"


@dataclass(slots=True)
class Longest:
    """The longest slice while it was watched. seconds: of processor time."""

    seconds: float = 0.0


@contextmanager
def watched() -> Iterator[Longest]:
    """Measure every slice of this thread's loop, which must be asyncio's own."""
    found = Longest()
    run = asyncio.Handle._run

    def measured(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        found.seconds = max(found.seconds, time.thread_time() - began)

    asyncio.Handle._run = measured  # type: ignore[method-assign]
    try:
        yield found
    finally:
        asyncio.Handle._run = run  # type: ignore[method-assign]


def slowness() -> float:
    """How many times as long as on a processor of its own a thread takes now, by work like that of requests:
    many small objects. At least 1."""
    found = []
    for _ in range(TRIES):
        began = time.thread_time()
        items: list[Json] = [
            {"role": "user", "content": [{"text": str(number)}]} for number in range(NUM_ITEMS)
        ]
        assert sum(len(part["text"]) for item in items for part in item["content"]) > NUM_ITEMS
        found.append(time.thread_time() - began)
    return max(1.0, min(found) / REFERENCE_S)


def request(method: str, path: str, body: Json | bytes | None = None, *, key: str | None = None) -> bytes:
    """One request on the wire, the last of its connection. key: its `Idempotency-Key`."""
    raw = b"" if body is None else body if isinstance(body, bytes) else orjson.dumps(body)
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    head += "" if key is None else f"idempotency-key: {key}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


def exchange(base_url: str, raw: bytes) -> tuple[int, bytes]:
    """Send a request and read its reply to the end, away from the loop: status and body."""
    url = urlsplit(base_url)
    received = bytearray()
    with socket.create_connection((url.hostname, url.port), timeout=300.0) as client:
        with suppress(ConnectionError):  # it was refused before it was all sent, and the reply is there
            client.sendall(raw)
        while data := client.recv(1 << 20):
            received += data
    head, _, body = bytes(received).partition(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]), body


# ------------------------------------------------------------------------------------------------------------
# Requests


def items() -> list[Json]:
    """As many input items, or chat messages, as a request may have."""
    said = [{"role": "user" if index % 2 else "assistant", "content": f"m{index}"} for index in range(9_999)]
    return [*said, {"role": "user", "content": "say x"}]


def _calls() -> list[Json]:
    """As many items, calls with their outputs."""
    return [
        each
        for index in range(NUM_ITEMS // 2)
        for each in (
            {"type": "function_call", "call_id": f"c{index}", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": f"c{index}", "output": "ok"},
        )
    ]


def _parts() -> list[Json]:
    """Items with many parts each."""
    part = {"type": "input_text", "text": "x"}
    return [{"role": "user", "content": [part] * 30} for _ in range(1000)]


def _tools(*, strict: bool = False, count: int = 40) -> list[Json]:
    """Tools with large schemas."""
    properties = {f"p{index}": {"type": "string", "description": "d" * 200} for index in range(100)}
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    schema["additionalProperties"] = False
    return [
        {"type": "function", "name": f"t{index}", "parameters": schema, "strict": strict}
        for index in range(count)
    ]


TEXT = "hello world " * 25_000  # 300 kB
HUGE = "hello world " * 1_700_000  # 20 MB
IMAGE = "data:image/png;base64," + "A" * (31 << 20)

LARGE: dict[str, Callable[[], bytes]] = {
    "10,000 items": lambda: request("POST", RESPONSES, {"input": items()}),
    "10,000 items, streamed, with a key": lambda: request(
        "POST", RESPONSES, {"input": items(), "stream": True}, key=secrets.token_hex(8)
    ),
    "10,000 items, not stored": lambda: request("POST", RESPONSES, {"input": items(), "store": False}),
    "10,000 items, cut to fit": lambda: request(
        "POST", RESPONSES, {"input": items(), "truncation": "auto", "background": True}
    ),
    "10,000 calls and outputs": lambda: request("POST", RESPONSES, {"input": _calls()}),
    "1,000 items of 30 parts": lambda: request("POST", RESPONSES, {"input": _parts()}),
    "10,000 references": lambda: request(
        "POST", RESPONSES, {"input": [{"type": "item_reference", "id": f"m{i}"} for i in range(NUM_ITEMS)]}
    ),
    "10,000 items, counted": lambda: request("POST", f"{RESPONSES}/input_tokens", {"input": items()}),
    "10,000 messages": lambda: request("POST", CHAT, {"messages": items()}),
    "10,000 messages, 16 choices, with a key": lambda: request(
        "POST", CHAT, {"messages": items(), "n": 16}, key=secrets.token_hex(8)
    ),
    "10,000 messages, tokens": lambda: request("POST", "/tokenize", {"messages": items()}),
    "900 items in 30 kB": lambda: request(
        "POST", RESPONSES, {"input": [{"role": "user", "content": "m"}] * 899 + items()[-1:]}
    ),
    "a text of 300 kB": lambda: request(
        "POST", RESPONSES, {"input": "say x", "instructions": TEXT, "metadata": {}}
    ),
    "a text of 20 MB": lambda: request("POST", RESPONSES, {"input": HUGE}),
    "a prompt of 60 kB, echoed and scored": lambda: request(
        "POST", COMPLETIONS, {"prompt": TEXT[:60_000], "max_tokens": 1, "echo": True, "logprobs": 1}
    ),
    "token ids of 300 kB": lambda: request("POST", "/tokenize", {"prompt": TEXT, "return_token_strs": True}),
    "an image of 31 MB": lambda: request(
        "POST",
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": IMAGE}]}]},
    ),
    "31 images of 1 MB, chat": lambda: request(
        "POST",
        CHAT,
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE[: 1 << 20]}}]}
            ]
            * 31
        },
    ),
    "20 images of 1 MB, kept in a conversation": lambda: request(
        "POST",
        "/v1/conversations",
        {
            "items": [{"role": "user", "content": [{"type": "input_image", "image_url": IMAGE[: 1 << 20]}]}]
            * 20
        },
    ),
    "40 tools of 25 kB": lambda: request("POST", RESPONSES, {"input": "say x", "tools": _tools()}),
    "16 strict tools of 25 kB": lambda: request(
        "POST", RESPONSES, {"input": "say x", "tools": _tools(strict=True, count=16)}
    ),
    "40 tools of 25 kB, chat": lambda: request(
        "POST",
        CHAT,
        {
            "messages": [{"role": "user", "content": "say x"}],
            "tools": [
                {"type": "function", "function": {"name": tool["name"], "parameters": tool["parameters"]}}
                for tool in _tools()
            ],
        },
    ),
    "a schema of 1 MB": lambda: request(
        "POST",
        RESPONSES,
        {
            "input": "say x",
            "text": {
                "format": {
                    "type": "json_schema",
                    "name": "a",
                    "schema": {
                        "type": "object",
                        "properties": {f"p{index}": {"type": "string"} for index in range(20_000)},
                    },
                }
            },
        },
    ),
    "JSON that is deep": lambda: request("POST", RESPONSES, b'{"a":' * 128 + b"1" + b"}" * 128),
    "JSON that is wide": lambda: request(
        "POST", RESPONSES, b'{"input":"say x","a":[' + b"[]," * 120_000 + b"1]}"
    ),
    "metadata of 30 MB": lambda: request("POST", RESPONSES, {"input": "x", "metadata": {"a": HUGE + TEXT}}),
    "70,000 unknown members": lambda: request(
        "POST", RESPONSES, {"input": "say x", **{f"k{index}": "v" for index in range(70_000)}}
    ),
    "an unknown member of 20 MB": lambda: request("POST", RESPONSES, {"input": "say x", "a": HUGE}),
    "10,000 outputs of tools": lambda: request(
        "POST",
        f"{RESPONSES}/resp_none/tool_outputs",
        {"tool_outputs": [{"call_id": f"c{index}", "output": "ok"} for index in range(NUM_ITEMS)]},
    ),
    "half of an object of 30 MB": lambda: request("POST", RESPONSES, b'{"input":"' + b"x" * 30_000_000),
    "33 MB of brackets": lambda: request("POST", RESPONSES, b"[" * 33_000_000),
}
"""What could hold the loop longest, by name."""


async def go_on(base_url: str) -> dict[str, bytes]:
    """Requests that go on from a conversation of 9,000 items and a response of 10,000, which it has made."""

    async def post(path: str, body: Json) -> Json:
        status, reply = await asyncio.to_thread(exchange, base_url, request("POST", path, body))
        assert status == 200, reply
        found: Json = orjson.loads(reply)
        return found

    conversation = (await post("/v1/conversations", {}))["id"]
    made = await post(RESPONSES, {"conversation": conversation, "input": items()[1000:]})
    response = await post(RESPONSES, {"input": [*_calls()[:-2], *items()[-1:]]})
    return {
        "a turn in a conversation of 9,000 items": request(
            "POST", RESPONSES, {"conversation": conversation, "input": "say x"}
        ),
        "a turn behind a response of 10,000 items": request(
            "POST", RESPONSES, {"previous_response_id": response["id"], "input": "say x"}
        ),
        "a page of a conversation": request("GET", f"/v1/conversations/{conversation}/items?limit=100"),
        "a page of all that a response goes on from": request(
            "GET", f"{RESPONSES}/{made['id']}/input_items?scope=all&limit=100"
        ),
        "a page of responses": request("GET", f"{RESPONSES}?limit=100"),
    }
