"""What is still known after a compaction, on the shipped model, over HTTP: `python -m benchmarks.compaction`.

A conversation begins with facts: the user's name, two things that the user tells, and two that the assistant
alone says. Turns follow that have nothing to do with them, as the model's curriculum has them, held out of
its training. Then one request asks for a compaction, and each fact is asked for once with the whole
conversation and once with what the compaction left. Told are the facts that the answers have, the tokens of
the last prompts, and the seconds of a compaction.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.start import serving
from engine.tiny.talk import THINGS, small_talk
from engine.tiny.words import Words

SEED = 17
MOST_TOKENS = 60
"""Of an answer; no right one has as many."""


@dataclass(frozen=True, slots=True)
class Fact:
    """kind: who says it. question: asks for it. value: what the answer has to hold."""

    kind: str
    question: str
    value: str


def conversation(words: Words, turns: int) -> tuple[list[dict[str, Any]], list[Fact]]:
    """A history as input items, and the facts that it begins with."""
    rng, items, facts = words.rng, list[dict[str, Any]](), list[Fact]()

    def said(user: str, assistant: str) -> None:
        items.append({"role": "user", "content": user})
        items.append({"role": "assistant", "content": assistant})

    name = words.name()
    said(f"My name is {name}.", f"Nice to meet you, {name}!")
    facts.append(Fact("name, said by the user", "What is my name?", name))
    for index, thing in enumerate(rng.sample(THINGS, 4)):
        number = "number" in thing or thing == "code"
        value = str(words.number(6)) if number else words.any()
        if index < 2:
            said(f"My {thing} is {value}.", f"I will remember that your {thing} is {value}.")
        else:
            said("Tell me something about me.", f"Your {thing} is {value}.")
        kind = "thing, said by the user" if index < 2 else "thing, said by the assistant alone"
        facts.append(Fact(kind, f"What is my {thing}?", value))
    for _ in range(turns):
        for message in small_talk(words, True):
            items.append({"role": message.role, "content": message.content})
    return items, facts


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=40, help="conversations")
    parser.add_argument("--turns", type=int, default=20, help="of each, between the facts and the compaction")
    asked = parser.parse_args()
    words = Words(random.Random(SEED), "heldout")
    told: dict[str, Counter[str]] = {"whole": Counter(), "compacted": Counter()}
    total: Counter[str] = Counter()
    tokens: dict[str, list[int]] = {"whole": [], "compacted": []}
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as url:
        client = httpx.Client(base_url=url, timeout=600)

        def create(path: str, **body: Any) -> dict[str, Any]:
            reply = client.post(path, json=body)
            reply.raise_for_status()
            made: dict[str, Any] = reply.json()
            return made

        for _ in range(asked.count):
            items, facts = conversation(words, asked.turns)
            start = time.perf_counter()
            compacted = create("/v1/responses/compact", input=items)
            seconds.append(time.perf_counter() - start)
            for fact in facts:
                total[fact.kind] += 1
                for way, before in (("whole", items), ("compacted", compacted["output"])):
                    question = {"role": "user", "content": fact.question}
                    answer = create(
                        "/v1/responses", input=[*before, question], store=False, temperature=0,
                        max_output_tokens=MOST_TOKENS,
                    )  # fmt: skip
                    tokens[way].append(answer["usage"]["input_tokens"])
                    texts = [part["text"] for item in answer["output"] for part in item.get("content") or ()]
                    told[way][fact.kind] += fact.value.lower() in " ".join(texts).lower()
    print("| fact | known from the whole conversation | known after the compaction |\n| --- | --- | --- |")
    for kind, count in total.items():
        shares = (f"{told[way][kind] / count:.0%} ({told[way][kind]}/{count})" for way in told)
        print(f"| {kind} | {' | '.join(shares)} |")
    means = " | ".join(f"{statistics.mean(tokens[way]):.0f}" for way in told)
    print(f"| tokens of a prompt | {means} |")
    print(f"\nA compaction took {statistics.median(seconds):.2f} s (median), {max(seconds):.2f} s at most.")


if __name__ == "__main__":
    main()
