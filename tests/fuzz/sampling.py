"""All sampling fields of all three APIs, two at a time, at the edges of every number.

Owns: the fields and values that are tried, the requests made of them, and what is wrong with a reply. Refuses
to know: what a field means, beyond that a server must take it or say 400. Run it as

    python -m tests.fuzz.sampling --requests 5000 --seed 7

which serves the shipped model in this process, prints what was wrong as bodies to send again, and exits with
1 if anything was.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from engine import LocalEngine
from engine.tiny import CHECKPOINT
from tests.support.running import http_client, running_app

LIMIT_S = 5.0  # a reply that takes longer counts as a hang
CONTEXT = 256  # tokens: so that nothing that may be asked for runs for long
AT_ONCE = 4
VOCABULARY = 3072  # of the shipped model

EDGES: tuple[Any, ...] = (
    *(0, 1, -1, 2, -2, 3, 15, 16, 17, 20, 21, 32, 33, 255, 256),
    *(sign * (1 << power) + add for power in (31, 63) for sign in (1, -1) for add in (-1, 0, 1)),
    *(0.0, -0.0, 0.5, 1.0, 1.5, 2.0, 1e-5, 1e-45, -1e-45, 1e-300, -1e-300, 1e39, 1e308, -1e308),
    *(
        None,
        True,
        False,
        "",
        "x",
        "1",
        "1e-300",
        "\ud83d\ude00",
        "\ud800",
        [],
        [0],
        ["x"],
        [""],
        {},
        {"x": 1},
    ),
)
LISTS: Mapping[str, tuple[Any, ...]] = {
    "stop": ("\n", ["a", "b"], ["x"] * 16, ["x"] * 17, "e" * 5000, [1], [None]),
    "stop_token_ids": (
        [VOCABULARY - 1],
        [VOCABULARY],
        [-1],
        [1 << 31],
        [1 << 63],
        [1.5],
        [True],
        list(range(300)),
    ),
    "logit_bias": (
        *({str(VOCABULARY - 1): 100}, {str(VOCABULARY): 1}, {"-1": 1}, {"1.5": 1}, {"99999999999": 1}),
        *({"5": 100.0, "05": 100.0}, {"5": 1e-300}, {"5": 1e308}, {"5": -100}, {"5": 101}, {"5": True}),
        {str(token): -100 for token in range(1024)},
    ),
    "guided_choice": (["yes", "no"], ["a"] * 2, ["\ud83d\ude00"]),
    "guided_regex": ("[ab]{1,3}", "(a|b)*", "a{0,20000}", "("),
    "guided_json": ({"type": "object"}, {"enum": [1, "a"]}, True, '{"type": "boolean"}'),
    "include": (["message.output_text.logprobs"],),
    "early_stopping": ("never",),
}
SHARED = (
    *(
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
    ),
    *("logit_bias", "seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "num_assistant_tokens"),
    *("max_ngram_size", "assistant_confidence_threshold", "guided_choice", "guided_regex", "guided_json"),
)
SEARCHED = (
    "max_tokens",
    "n",
    "logprobs",
    "best_of",
    "use_beam_search",
    "length_penalty",
    "early_stopping",
    "stream",
)
RUN = (
    *("max_output_tokens", "top_logprobs", "include", "max_tool_calls", "tool_timeout_s"),
    *("stream", "background", "store"),
)
APIS: Mapping[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "responses": ("/v1/responses", {"input": "x", "max_output_tokens": 16}, (*SHARED, *RUN)),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 8},
        (*SHARED, *SEARCHED, "max_completion_tokens", "top_logprobs"),
    ),
    "completions": ("/v1/completions", {"prompt": "x", "max_tokens": 8}, (*SHARED, *SEARCHED, "echo")),
}
"""Path, body to begin with, and the fields that are tried, by API."""

Body = dict[str, Any]


def values_of(name: str) -> tuple[Any, ...]:
    """What is tried as a field."""
    return (*EDGES, *LISTS.get(name, ()))


@dataclass(slots=True)
class Found:
    """What came of it: replies by status, and what was wrong, each with the request that shows it."""

    replies: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


class Fuzzer:
    """Tries one server. limit_s: seconds that a reply may take."""

    def __init__(self, client: httpx.AsyncClient, seed: int, limit_s: float = LIMIT_S) -> None:
        self._client = client
        self._draw = random.Random(seed)
        self._limit_s = limit_s
        self._taken: dict[tuple[str, str], list[Any]] = {}  # values that an API takes as a field
        self.found = Found()

    async def run(self, num_requests: int) -> Found:
        """Every value as every field by itself, as far as a third of the requests goes; then pairs."""
        singles = [
            (api, (name,), (value,))
            for api, (_, _, names) in APIS.items()
            for name in names
            for value in values_of(name)
        ]
        self._draw.shuffle(singles)
        singles = singles[: num_requests // 3]
        await self._try_all(iter(singles))
        await self._try_all(itertools.islice(self._pairs(), num_requests - len(singles)))
        return self.found

    def _pairs(self) -> Iterator[tuple[str, Sequence[str], Sequence[Any]]]:
        """Every pair of fields of every API, in a new order each time, with values that mostly are taken."""
        pairs = [
            (api, pair) for api, (_, _, names) in APIS.items() for pair in itertools.combinations(names, 2)
        ]
        while True:
            self._draw.shuffle(pairs)
            for api, names in pairs:
                yield api, names, [self._value(api, name) for name in names]

    def _value(self, api: str, name: str) -> Any:
        taken = self._taken.get((api, name))
        return self._draw.choice(taken if taken and self._draw.random() < 0.8 else values_of(name))

    async def _try_all(self, tries: Iterator[tuple[str, Sequence[str], Sequence[Any]]]) -> None:
        async def some() -> None:
            for api, names, values in tries:  # one iterator for all
                await self.attempt(api, names, values)

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(some())

    async def attempt(self, api: str, names: Sequence[str], values: Sequence[Any]) -> None:
        """Send one request, and look at what comes of it."""
        path, begun, _ = APIS[api]
        body = begun | dict(zip(names, values, strict=True))
        sent = json.dumps(body)
        before = time.monotonic()
        try:
            async with asyncio.timeout(self._limit_s):
                reply = await self._client.post(
                    path, content=sent, headers={"content-type": "application/json"}
                )
                wrong = _fault(reply) or await self._end(body, reply)
        except TimeoutError:
            self.found.wrong.append(f"{path} {sent}: no reply in {self._limit_s:g} s")
            return
        self.found.slowest_s = max(self.found.slowest_s, time.monotonic() - before)
        self.found.replies[reply.status_code] += 1
        if wrong:
            self.found.wrong.append(f"{path} {sent}: {wrong}")
        elif reply.status_code == 200 and len(names) == 1:
            self._taken.setdefault((api, names[0]), []).append(values[0])

    async def _end(self, body: Body, reply: httpx.Response) -> str | None:
        """What is wrong with the end of a background response."""
        if reply.status_code != 200 or body.get("background") is not True or body.get("stream") is True:
            return None
        path = f"/v1/responses/{reply.json()['id']}"
        ended = await self._client.get(path, params={"wait": str(self._limit_s)})
        return _fault(ended)


def _fault(reply: httpx.Response) -> str | None:
    """What is wrong with a reply; None where it is an answer, or a refusal that says why."""
    if reply.status_code >= 500:
        return f"{reply.status_code} {reply.text[:200]}"
    if reply.status_code != 200:
        return _refusal(reply)
    if reply.headers["content-type"].startswith("text/event-stream"):
        events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
        bad = [
            event for event in events if "error" in event or event.get("type") in ("error", "response.failed")
        ]
        return f"the stream says {json.dumps(bad[0])[:300]}" if bad else None
    whole = reply.json()
    return f"it failed: {whole['error']}" if whole.get("status") == "failed" else None


def _refusal(reply: httpx.Response) -> str | None:
    error = reply.json().get("error", {}) if reply.content else {}
    if reply.status_code == 400 and error.get("message") and error.get("code") and "param" in error:
        return None
    return f"{reply.status_code} {reply.text[:200]}"


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[LocalEngine, httpx.AsyncClient]]:
    """The shipped model behind the API."""
    engine = LocalEngine(CHECKPOINT, max_model_len=CONTEXT, num_threads=1)
    async with running_app(folder, engine) as running, http_client(running) as client:
        yield engine, client


async def harm(engine: LocalEngine, client: httpx.AsyncClient) -> str | None:
    """What the requests have done to the server, None where it is as before."""
    if (health := await client.get("/health")).status_code != 200:
        return f"the server is not well: {health.text}"
    await engine.settled()
    engine.check_integrity()
    stats = engine.stats()
    left = (stats.running, stats.waiting, stats.kv_blocks_used)
    return None if left == (0, 0, 0) else f"something is left behind: {stats}"


async def fuzz(num_requests: int, seed: int, limit_s: float = LIMIT_S) -> Found:
    """So many requests to a server of its own."""
    with tempfile.TemporaryDirectory() as folder:
        async with served(Path(folder)) as (engine, client):
            found = await Fuzzer(client, seed, limit_s).run(num_requests)
            if (harmed := await harm(engine, client)) is not None:
                found.wrong.append(harmed)
            return found


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument(
        "--limit-s", type=float, default=LIMIT_S, help="seconds of a reply (default %(default)g)"
    )
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    found = asyncio.run(fuzz(options.requests, options.seed, options.limit_s))
    for each in found.wrong:
        print(each)
    replies = ", ".join(f"{count} of {status}" for status, count in sorted(found.replies.items()))
    print(f"{replies}; the slowest took {found.slowest_s:.2f} s; {len(found.wrong)} were wrong")
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
