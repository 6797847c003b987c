"""What a turn costs by the length of its history: `python -m benchmarks.turn_cost [--model antiphon-tiny]`.

Histories of some lengths, each brought by a chain of stored responses and by a conversation, of many short
items and of few long ones, all of it in the KV cache. Then turns that bring one short message, in turn for
every length. Prints the processor time up to the first text, by what it went to, and how each part grows with
1,000 tokens of history; the attention to the history is in `forward`. Medians. The scripted engine takes the
model out; it reads its whole prompt as text, which a model does not, and which is told apart.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import inspect
import itertools
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import orjson

from engine import SIZES, write_random_model
from server.process.process_ends import tune_process

PARTS: dict[str, tuple[str, ...]] = {
    "read the past": ("server.runs.planning.history:load_context", "server.runs.planning.pasts:Pasts.of"),
    "its JSON": ("server.runs.planning.pasts:read_items",),
    "its calls": ("server.runs.planning.calls:Calls.and_then",),
    "plan": ("server.runs.planning.plan:make_plan",),
    "functions": ("server.runs.planning.plan:functions_of", "server.runs.planning.plan:offer"),
    "messages": ("server.prompting.messages:Told.and_then", "server.runs.planning.plan:to_messages"),
    "render": ("engine.tokenizer.growing_prompts:GrowingPrompts.prompt",),
    "tokenize": ("engine.tokenizer.prompt_encoder:Encoder.encode",),
    "fit and check": (
        "server.runs.planning.plan:fit",
        "server.runs.planning.plan:check_request",
        "engine.backends.local:check_request",
    ),
    "fingerprint": ("server.runs.execution.loop:fingerprint",),
    "assembler": ("server.runs.execution.run:assembler_of", "server.runs.execution.run:_unlisted"),
    "start": ("server.runs.runner:Runs._begin",),
    "emulated reading": ("engine.tokenizer.tokenizer:Tokenizer.decode",),
    "hash blocks": ("engine.core.kv_cache:BlockHasher.extend",),
    "match blocks": ("engine.core.kv_cache:KVCache.match", "engine.core.kv_cache:KVCache.fits"),
    "hold blocks": (
        "engine.core.kv_cache:KVCache.attach",
        "engine.core.kv_cache:KVCache.grow",
        "engine.core.kv_cache:KVCache.release",
    ),
    "schedule": (
        "engine.core.scheduler:Scheduler.add",
        "engine.core.scheduler:Scheduler.schedule",
        "engine.core.scheduler:Scheduler.computed",
        "engine.core.batch_state:Rows.plan",
        "engine.core.speculation:Speculation.propose",
    ),
    "forward": ("engine.executor.runner:Runner.forward",),
    "draw": ("engine.executor.runner:Runner.draw",),
}
"""What is told apart: callables, each without those that it calls. Only modules that are imported count."""

THREADS = {
    "MainThread": "rest of the loop",
    "engine": "rest of the engine",
    "antiphon-reader": "database, reading",
    "antiphon-writer": "database, writing",
}
"""Where processor time outside of all parts goes, by the beginnings of the names of threads."""

MODEL = {"forward"}

ITEM_TOKENS = {"short": 25, "long": 2000}
KINDS = ("chain", "conversation")
WORDS = ["the", "river", "keeps", "its", "stones", "and", "every", "stone", "a", "story", "of", "rain"]

Spent = Counter[str]


class Meter:
    """Processor time by part: a thread's time goes to the innermost part that it is in."""

    def __init__(self) -> None:
        self._spent: Spent = Counter()
        self._lock = threading.Lock()
        self._own = threading.local()

    def install(self) -> None:
        """Have every part measured."""
        for part, names in PARTS.items():
            for name in names:
                module, _, path = name.partition(":")
                if module not in sys.modules:
                    continue
                owner: Any = sys.modules[module]
                *outer, last = path.split(".")
                for each in outer:
                    owner = getattr(owner, each)
                setattr(owner, last, self._measured(getattr(owner, last), part))

    def spent(self) -> Spent:
        """Seconds so far: of parts, and of threads beside them."""
        with self._lock:
            parts = Counter(self._spent)
        for thread in threading.enumerate():
            if thread.name.startswith("client"):
                continue
            stat = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
            name = next((what for which, what in THREADS.items() if thread.name.startswith(which)), None)
            parts[name or "other threads"] += int(stat.split()[0]) / 1e9
        for key in [key for key in parts if key.startswith("of ")]:
            parts[THREADS.get(key[3:], "other threads")] -= parts.pop(key)
        return parts

    def _measured(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(function):

            @wraps(function)
            async def stepped(*args: Any, **kwargs: Any) -> Any:
                return await _Steps(self, part, function(*args, **kwargs))

            return stepped

        @wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            self.enter(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        return measured

    def enter(self, part: str) -> None:
        """This thread begins with a part."""
        now = time.thread_time()
        stack = self._own.__dict__.setdefault("stack", [])
        if stack:
            self._charge(stack[-1], now - self._own.since)
        stack.append(part)
        self._own.since = now

    def leave(self) -> None:
        """This thread is through with what it began last."""
        now = time.thread_time()
        self._charge(self._own.stack.pop(), now - self._own.since)
        self._own.since = now

    def _charge(self, part: str, seconds: float) -> None:
        thread = threading.current_thread().name
        whose = next((which for which in THREADS if thread.startswith(which)), "")
        with self._lock:
            self._spent[part] += seconds
            self._spent[f"of {whose}"] += seconds


class _Steps:
    """A coroutine whose steps are a part's."""

    def __init__(self, meter: Meter, part: str, coroutine: Any) -> None:
        self._meter, self._part, self._coroutine = meter, part, coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        step, argument = self._coroutine.send, None
        while True:
            self._meter.enter(self._part)
            try:
                awaited = step(argument)
            except StopIteration as end:
                return end.value
            finally:
                self._meter.leave()
            try:
                step, argument = self._coroutine.send, (yield awaited)
            except BaseException as error:
                step, argument = self._coroutine.throw, error


# ------------------------------------------------------------------------------------------------------------
# Turns


class Turn(NamedTuple):
    """response_id; seconds by the clock to the first text; processor seconds to it, and of all."""

    response_id: str
    num_tokens: int
    first_s: float
    first: Spent
    whole: Spent


class Histories:
    """Histories of one kind and shape, by their lengths, and the turns that continue them."""

    # No two messages are alike, of whatever histories: what is said twice is tokenized and computed once.
    _numbers = itertools.count(1)

    def __init__(self, base_url: str, meter: Meter, kind: str, shape: str) -> None:
        self._url, self._meter = urlsplit(base_url), meter
        self._kind, self._shape = kind, shape
        self._places: dict[int, dict[str, str]] = {}
        self._client = ThreadPoolExecutor(1, thread_name_prefix="client")

    async def begin(self, length: int) -> None:
        """Bring a history of about so many tokens: some 2,000 a turn of short items, one item a turn of long
        ones."""
        self._places[length] = {}
        if self._kind == "conversation":
            loop = asyncio.get_running_loop()
            made = await loop.run_in_executor(self._client, self._exchange, "/v1/conversations", {})
            self._places[length] = {"conversation": made["id"]}
        size = ITEM_TOKENS[self._shape]
        turn = await self.turn(length)
        while (left := length - turn.num_tokens) > 0:
            num_items = max(1, min(left, 2000) // size)
            turn = await self.turn(length, num_items, min(size, max(left - 10, 10)))

    async def turn(self, length: int, num_items: int = 1, item_tokens: int = 25) -> Turn:
        """Go on with a history."""
        items = [{"role": "user", "content": self._text(item_tokens)} for _ in range(num_items)]
        body = {
            "input": items,
            "stream": True,
            "reasoning": {"effort": "none"},
            "temperature": 0,
            "num_assistant_tokens": 0,
        }
        body |= {"max_output_tokens": 16, "min_tokens": 16, **self._places[length]}
        turn = await asyncio.get_running_loop().run_in_executor(self._client, self._run, body)
        if self._kind == "chain":
            self._places[length] = {"previous_response_id": turn.response_id}
        return turn

    def _text(self, num_tokens: int) -> str:
        number = next(self._numbers)
        words = [WORDS[(number * 7 + at * at) % len(WORDS)] for at in range(num_tokens // 2)]
        return f"{number}: {' '.join(words)}"

    def _run(self, body: dict[str, Any]) -> Turn:
        began, before = time.perf_counter(), self._meter.spent()
        received = bytearray()
        first_s, first = 0.0, Counter[str]()
        with self._sent("/v1/responses", body) as client:
            while data := client.recv(1 << 20):
                received += data
                if not first and b"_text.delta\ndata" in received:
                    first_s, first = time.perf_counter() - began, self._meter.spent() - before
        whole = self._meter.spent() - before
        assert first, bytes(received)[-2000:]
        *_, last = (line for line in received.split(b"\n") if line.startswith(b"data: {"))
        response = orjson.loads(last[6:])["response"]
        return Turn(response["id"], response["usage"]["input_tokens"], first_s, first, whole)

    def _exchange(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        received = bytearray()
        with self._sent(path, body) as client:
            while data := client.recv(1 << 20):
                received += data
        found: dict[str, Any] = orjson.loads(received.partition(b"\r\n\r\n")[2])
        return found

    def _sent(self, path: str, body: dict[str, Any]) -> socket.socket:
        raw = orjson.dumps(body)
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
        client = socket.create_connection((self._url.hostname, self._url.port), timeout=600.0)
        client.sendall(head.encode() + raw)
        return client


# ------------------------------------------------------------------------------------------------------------
# The program


async def main(options: argparse.Namespace, model: str) -> None:
    """Every kind and shape, one after the other; lengths in turn."""
    from server.config import Config
    from server.model_registry import build_engine
    from server.process.serve import load_late_modules
    from tests.support.running import live_app

    await asyncio.to_thread(load_late_modules)
    with tempfile.TemporaryDirectory() as data:
        kind = "scripted" if model == "scripted" else "local"
        engine = build_engine(Config(data=Path(data), engine=kind, model=model, num_threads=1))
        meter = Meter()
        async with live_app(Path(data), engine) as server:
            meter.install()
            gc.freeze()
            for kind, shape in product(options.kinds, options.shapes):
                await measure(
                    Histories(server.base_url, meter, kind, shape), options, f"{kind}, {shape} items"
                )


async def measure(histories: Histories, options: argparse.Namespace, title: str) -> None:
    """Bring histories of one kind, take turns, print what they cost."""
    for length in options.lengths:
        await histories.begin(length)
    turns: dict[int, list[Turn]] = defaultdict(list)
    for number in range(options.rounds + 2):
        for length in options.lengths:
            turn = await histories.turn(length)
            if number > 1:
                turns[length].append(turn)
    print(f"\n{title}: ms of processor time to the first text; us more for 1,000 tokens more")
    print(f"{'tokens':>18}" + "".join(f"{length:9,}" for length in options.lengths))
    least, most = min(options.lengths), max(options.lengths)

    def row(name: str, figure: Callable[[Turn], float]) -> None:
        found = {length: statistics.median(map(figure, turns[length])) * 1e3 for length in options.lengths}
        if max(found.values()) >= 0.02:
            slope = (found[most] - found[least]) / (most - least) * 1e6
            print(f"{name:>18}" + "".join(f"{ms:9.2f}" for ms in found.values()) + f"{slope:9.1f}")

    names = dict.fromkeys([*PARTS, *THREADS.values(), "other threads"]).keys()
    for name in names:
        row(name, partial(_of_first, name))
    row("all but forward", lambda turn: sum(turn.first[name] for name in names - MODEL))
    row("all", lambda turn: sum(turn.first.values()))
    row("by the clock", lambda turn: turn.first_s)
    row("after first text", lambda turn: sum((turn.whole[name] - turn.first[name]) for name in names - MODEL))


def _of_first(name: str, turn: Turn) -> float:
    return turn.first[name]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--model", default="scripted", help="a folder, antiphon-tiny, or a size with random weights"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[1_000, 10_000, 30_000])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--shapes", nargs="+", choices=[*ITEM_TOKENS], default=[*ITEM_TOKENS])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    tune_process()
    with tempfile.TemporaryDirectory() as temporary:
        chosen = options.model
        if chosen in SIZES:
            write_random_model(chosen, Path(temporary) / chosen)
            chosen = str(Path(temporary) / chosen)
        asyncio.run(main(options, chosen))
