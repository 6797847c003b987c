"""What the disk tier gives agents with long histories: `python -m benchmarks.memory`.

Agents take turns side by side, each on its own growing history, chained by `previous_response_id`. Three
servers are driven, one after the other: one whose KV pool holds every history, one whose pool holds a
quarter of them, and one with the quarter and the disk tier. The last two are then stopped and started again
for one more turn of each agent; the last one does that once more without what it had on disk, which shows
what such a turn costs when nothing was kept for it. For each server this prints the median time to the first
text of a late turn (from the third on), turns a minute, and the share of the prompts' tokens that had to be
computed.

With `--beside NAME=URL=MODEL` another server, which is up already and keeps no conversations, is driven after
ours of that name: agents send it their whole history each time, to its `/v1/chat/completions`. Its pool is
whatever it was started with; `--checkpoint FOLDER` has the same weights served by both.

The model has random weights in a real shape, since only a model of that size makes prompts dear.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.start import serving
from engine import SIZES, write_random_model

WORDS = ("order", "status", "shipped", "pending", "failed", "invoice", "total", "region", "stock", "price")
SETUP_WORDS = 180  # of instructions, about 1,000 tokens
RESULT_WORDS = 52  # of a tool's output, about 300 tokens
ANSWER_TOKENS = 32
# What the words and an answer come to in the tokenizer of random models, rounded up: of random weights' words
# a whole history that is sent as text has three times as many tokens as were drawn.
SETUP_TOKENS, TURN_TOKENS = 1_100, 520
LATE = 2


@dataclass(slots=True)
class Turn:
    """One turn: its place among its agent's turns, seconds to the first text, and tokens of its prompt."""

    number: int
    first_text_s: float
    prompt: int
    cached: int


@dataclass(slots=True)
class Agent:
    """One agent: what it says next is drawn from its own seed, so that every server is told the same."""

    number: int
    seed: int
    words: random.Random = field(init=False)
    response: str | None = None
    turns: int = 0

    def __post_init__(self) -> None:
        self.words = random.Random(f"agent {self.seed} {self.number}")

    def text(self, count: int) -> str:
        """`count` words with numbers, which no other agent says."""
        return " ".join(f"{self.words.choice(WORDS)} {self.words.randint(0, 99)}" for _ in range(count))

    def next_input(self) -> str:
        """What its next turn says: the first time instructions, too."""
        said = f"Result {self.turns}: {self.text(RESULT_WORDS)}"
        return said if self.turns else f"{self.text(SETUP_WORDS)}\n{said}"

    async def turn(self, client: httpx.AsyncClient) -> Turn:
        """Send what is new, read the stream to its end."""
        body = {
            "input": self.next_input(),
            "stream": True,
            "temperature": 0,
            "max_output_tokens": ANSWER_TOKENS,
            "ignore_eos": True,
        }
        if self.response is not None:
            body["previous_response_id"] = self.response
        began, first = time.perf_counter(), None
        async for event in events(client, "/v1/responses", body):
            if first is None and event["type"].endswith(".delta"):
                first = time.perf_counter() - began
        ended = event["response"]
        usage = ended["usage"]
        assert first is not None, ended
        self.response = ended["id"]
        self.turns += 1
        return Turn(
            self.turns - 1,
            first,
            usage["input_tokens"],
            usage["input_tokens_details"]["cached_tokens"],
        )


@dataclass(slots=True)
class ChatAgent(Agent):
    """The same agent before a server that keeps no conversation: it sends all that was said, each time."""

    model: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)

    async def turn(self, client: httpx.AsyncClient) -> Turn:
        """Send the whole history, read the stream to its end."""
        self.messages.append({"role": "user", "content": self.next_input()})
        body = {
            "model": self.model,
            "messages": self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "max_tokens": ANSWER_TOKENS,
            "ignore_eos": True,
        }
        began, first, answer = time.perf_counter(), None, ""
        async for event in events(client, "/v1/chat/completions", body):
            usage = event.get("usage") or {}
            for choice in event["choices"]:
                text = choice["delta"].get("content")
                if text and first is None:
                    first = time.perf_counter() - began
                answer += text or ""
        assert first is not None, usage
        self.messages.append({"role": "assistant", "content": answer})
        self.turns += 1
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return Turn(self.turns - 1, first, usage["prompt_tokens"], cached)


async def events(
    client: httpx.AsyncClient, path: str, body: Mapping[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """What a stream says, event by event."""
    async with client.stream("POST", path, json=body) as reply:
        if reply.is_error:
            raise RuntimeError((await reply.aread()).decode())
        rest = b""
        async for part in reply.aiter_bytes():
            *lines, rest = (rest + part).split(b"\n")  # `aiter_lines` also splits at U+2028, within an event
            for line in lines:
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))


async def take_turns(url: str, agents: Sequence[Agent], count: int) -> tuple[list[Turn], float]:
    """`count` turns of each agent, agents side by side; the turns, and seconds."""
    async with httpx.AsyncClient(base_url=url, timeout=1800) as client:

        async def one(agent: Agent) -> list[Turn]:
            return [await agent.turn(client) for _ in range(count)]

        began = time.perf_counter()
        taken = await asyncio.gather(*map(one, agents))
        return [turn for turns in taken for turn in turns], time.perf_counter() - began


def told(name: str, turns: list[Turn], seconds: float, late: int) -> None:
    """Print a line about turns."""
    waits = [turn.first_text_s for turn in turns if turn.number >= late]
    computed = 1 - sum(turn.cached for turn in turns) / sum(turn.prompt for turn in turns)
    print(
        f"{name:>26}: late first text p50 {statistics.median(waits):7.2f} s, worst {max(waits):7.2f} s; "
        f"{60 * len(turns) / seconds:5.1f} turns/min; computed {computed:5.1%} of the prompts",
        flush=True,
    )


def drive(name: str, model: Path, asked: argparse.Namespace, *flags: str) -> None:
    """Drive one server, and, where its pool is too small, drive it again after a restart. Then the others."""
    everything = ("--model", str(model), "--log-level", "error", *flags)
    agents = [Agent(number, asked.seed) for number in range(asked.agents)]
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        with serving(data, *everything) as url:
            told(name, *asyncio.run(take_turns(url, agents, asked.turns)), LATE)
        if name != "fits":
            with serving(data, *everything) as url:
                told(f"{name}, restarted", *asyncio.run(take_turns(url, agents, 1)), 0)
        if name == "quarter + disk":
            shutil.rmtree(data / "kv")
            with serving(data, *everything) as url:
                told("restarted, disk emptied", *asyncio.run(take_turns(url, agents, 1)), 0)
    for place, url, served in (each.split("=") for each in asked.beside):
        if place == name:
            others = [ChatAgent(number, asked.seed, model=served) for number in range(asked.agents)]
            told(f"{name}, the other", *asyncio.run(take_turns(url, others, asked.turns)), LATE)


def bytes_a_token(config: Mapping[str, Any]) -> int:
    """Bytes of keys and values that one token takes in bf16. config: as in config.json."""
    both, bf16 = 2, 2
    return both * bf16 * int(config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"])


def main() -> None:
    """Drive the servers and print a line for each."""
    parser = argparse.ArgumentParser(description="The disk tier of the KV cache, with agents' turns.")
    parser.add_argument("--size", default="qwen3-0.6b", choices=sorted(SIZES))
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1, help="of what is said, which others may know")
    parser.add_argument("--checkpoint", type=Path, help="serve this folder, which has weights of that size")
    parser.add_argument("--beside", action="append", default=[], metavar="NAME=URL=MODEL")
    parser.add_argument("--only", action="append", choices=("fits", "quarter", "quarter + disk"))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = asked.checkpoint or Path(folder)
        if asked.checkpoint is None:
            write_random_model(asked.size, model)
        longest = SETUP_TOKENS + TURN_TOKENS * (asked.turns + 3)  # one turn more after each restart
        a_history = longest * bytes_a_token(SIZES[asked.size])
        fits = int(1.25 * asked.agents * a_history)
        # No pool is too small for one history: the server would not start with it.
        quarter = max(int(1.02 * a_history), asked.agents * a_history // 4)
        for name, pool, disk in (
            ("fits", fits, 0),
            ("quarter", quarter, 0),
            ("quarter + disk", quarter, 20 << 30),
        ):
            if asked.only and name not in asked.only:
                continue
            flags = ("--kv-cache-bytes", str(pool), "--kv-disk-bytes", str(disk))
            drive(name, model, asked, "--max-model-len", str(longest), *flags)


if __name__ == "__main__":
    main()
