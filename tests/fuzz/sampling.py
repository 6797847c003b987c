"""All sampling fields of all three APIs, two at a time, at the edges of every number.

Owns the fields and values that are tried, and the requests made of them. Refuses to know what a field means,
beyond that a server must take it or say 400. Run it as

    python -m tests.fuzz.sampling --requests 5000 --seed 7

which starts a server with the shipped model, prints what was wrong as bodies to send again, and exits with 1
if anything was.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from engine import LocalEngine
from engine.tiny import CHECKPOINT
from tests.fuzz.crowd import (
    LIMIT_S,
    Crowd,
    Found,
    Reply,
    Try,
    against,
    command,
    crowd_at,
    parser_of,
)
from tests.fuzz.pauses import Pauses
from tests.support.running import live_app

CONTEXT = 128  # tokens: so that nothing that may be asked for runs for long
AT_ONCE = 12
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
        {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 3},
        (*SHARED, *SEARCHED, "max_completion_tokens", "top_logprobs"),
    ),
    "completions": ("/v1/completions", {"prompt": "x", "max_tokens": 3}, (*SHARED, *SEARCHED, "echo")),
}
"""Path, body to begin with, and the fields that are tried, by API."""


def values_of(name: str) -> tuple[Any, ...]:
    """What is tried as a field."""
    return (*EDGES, *LISTS.get(name, ()))


class Fuzzer:
    """Tries one server."""

    def __init__(self, crowd: Crowd, seed: int) -> None:
        self._crowd = crowd
        self._draw = random.Random(seed)
        self._taken: dict[tuple[str, str], list[Any]] = {}  # values that an API takes as a field
        self._sent: dict[int, tuple[str, Sequence[str], Sequence[Any]]] = {}
        self._numbers = itertools.count()

    async def run(self, num_requests: int, at_once: int = AT_ONCE, seconds: float = math.inf) -> None:
        """Every value as every field by itself, as far as a third of the requests goes; then pairs. seconds:
        after which no request begins."""
        until = time.monotonic() + seconds
        singles = [
            (api, (name,), (value,))
            for api, (_, _, names) in APIS.items()
            for name in names
            for value in values_of(name)
        ]
        self._draw.shuffle(singles)
        singles = singles[: num_requests // 3]
        for chosen in (iter(singles), itertools.islice(self._pairs(), num_requests - len(singles))):
            timely = itertools.takewhile(lambda _: time.monotonic() < until, chosen)
            await self._crowd.run((self._try(*each) for each in timely), at_once, self._look)

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

    def _try(self, api: str, names: Sequence[str], values: Sequence[Any]) -> Try:
        path, begun, _ = APIS[api]
        number = next(self._numbers)
        self._sent[number] = (api, names, values)
        return Try(number, path, json.dumps(begun | dict(zip(names, values, strict=True))))

    async def attempt(self, api: str, names: Sequence[str], values: Sequence[Any]) -> None:
        """Send one request, and look at what comes of it."""
        each = self._try(api, names, values)
        if (reply := await self._crowd.send(each)) is not None:
            await self._look(each, reply)

    async def _look(self, each: Try, reply: Reply) -> None:
        """Remember which values are taken, and wait for the end of a background response."""
        api, names, values = self._sent.pop(each.number)
        if reply.status != 200:
            return
        if len(names) == 1:
            self._taken.setdefault((api, names[0]), []).append(values[0])
        asked = dict(zip(names, values, strict=True))
        if asked.get("background") is True and asked.get("stream") is not True:
            await self._crowd.follow(each, json.loads(reply.text)["id"])


@asynccontextmanager
async def served(
    folder: Path, limit_s: float = LIMIT_S, max_model_len: int = CONTEXT
) -> AsyncIterator[tuple[LocalEngine, Crowd]]:
    """The shipped model behind the API, in this process."""
    engine = LocalEngine(CHECKPOINT, max_model_len=max_model_len, num_threads=1)
    async with live_app(folder, engine) as running, crowd_at(running.base_url, limit_s) as (crowd, _):
        yield engine, crowd


async def harm(engine: LocalEngine, crowd: Crowd) -> str | None:
    """What the requests have done to a server in this process, None where it is as before."""
    await engine.settled()
    engine.check_integrity()
    return await crowd.unwell()


async def fuzz(folder: Path, options: argparse.Namespace) -> tuple[Found, Pauses]:
    """So many requests to a server process of its own."""

    async def through(crowd: Crowd) -> None:
        await Fuzzer(crowd, options.seed).run(options.requests, options.at_once, options.seconds)

    flags = ("--max-model-len", str(CONTEXT), "--num-threads", "1")
    return await against(folder, flags, options, through)


def main() -> int:
    """The command."""
    parser = parser_of(__doc__ or "", AT_ONCE)
    return command(parser.parse_args(), fuzz)


if __name__ == "__main__":
    sys.exit(main())
