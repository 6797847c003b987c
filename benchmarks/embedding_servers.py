"""Two servers' embeddings of the same model over HTTP: `python -m benchmarks.embedding_servers OURS PEER`.

OURS and PEER are base URLs. In each round both get 16 texts that neither has seen before, in turn:
in one request, and in four at once. Printed are tokens a second, their ratio, and the smallest cosine of both
vectors of a text, which shows that the models are the same.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from typing import Any

import httpx
import numpy as np

WORDS = ("alpha", "beta", "gamma", "delta", "order", "status", "shipped", "pending", "failed", "invoice")
TEXTS = 16


async def measure(ours: str, peer: str, model: str, rounds: int) -> None:
    """Print the figures of one and of four requests at once."""
    draw = random.Random()  # from the system's entropy: no cache knows the texts
    async with httpx.AsyncClient(timeout=600) as client:
        for base in (ours, peer):
            await _embed(client, base, model, _texts(draw), 1)
        for at_once in (1, 4):
            ratios = []
            for _ in range(rounds):
                texts = _texts(draw)
                (mine, a), (theirs, b) = [
                    await _embed(client, base, model, texts, at_once) for base in (ours, peer)
                ]
                cosines = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
                ratios.append(mine / theirs)
                print(
                    f"{at_once} at once: {mine:.0f} and {theirs:.0f} tokens/s, ratio {ratios[-1]:.2f};"
                    f" smallest cosine {cosines.min():.4f}",
                    flush=True,
                )
            print(f"{at_once} at once: median of the ratios {statistics.median(ratios):.2f}", flush=True)


def _texts(draw: random.Random) -> list[str]:
    def text() -> str:
        return " ".join(f"{draw.choice(WORDS)}{draw.randint(0, 99)}" for _ in range(draw.randint(4, 40)))

    return [text() for _ in range(TEXTS)]


async def _embed(
    client: httpx.AsyncClient, base: str, model: str, texts: list[str], at_once: int
) -> tuple[float, Any]:
    """Tokens a second, and the vectors."""

    async def request(part: list[str]) -> Any:
        reply = await client.post(f"{base}/v1/embeddings", json={"model": model, "input": part})
        return reply.raise_for_status().json()

    each, began = len(texts) // at_once, time.perf_counter()
    replies = await asyncio.gather(
        *(request(texts[start : start + each]) for start in range(0, len(texts), each))
    )
    tokens = sum(reply["usage"]["prompt_tokens"] for reply in replies) / (time.perf_counter() - began)
    return tokens, np.array([row["embedding"] for reply in replies for row in reply["data"]])


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("ours")
    parser.add_argument("peer")
    parser.add_argument("--model", default="m")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    asyncio.run(measure(asked.ours, asked.peer, asked.model, asked.rounds))


if __name__ == "__main__":
    main()
