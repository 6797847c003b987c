"""Embeddings of a decoder of real size with random weights, by the engine and by transformers, in turn:
`python -m benchmarks.embeddings`.

Both get the same token ids, in the checkpoint's bfloat16. transformers gets them as sentence-transformers
does, sorted by length and padded, in batches; the last token's state of each text is taken and normalized.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine import PoolingConfig, PoolingEngine, TextInput, write_random_model

MOST_DIFFERENT = 0.02
"""Of the cosine of both vectors of a text from 1: more is another vector, and not rounding."""


def main() -> None:
    """Measure, and print a line for each round and the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", default="qwen3-0.6b")
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument(
        "--longest", type=int, default=256, help="tokens; lengths are even from a tenth of it"
    )
    parser.add_argument("--batch", type=int, default=32, help="texts of a batch of transformers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    random = np.random.default_rng(0)
    lengths = random.integers(asked.longest // 10, asked.longest + 1, asked.texts)
    texts = [random.integers(0, 5000, length).astype(np.int32) for length in lengths]
    with tempfile.TemporaryDirectory(prefix="antiphon-embeddings-") as folder:
        where = Path(folder) / asked.size
        write_random_model(asked.size, where)
        modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
        rows = [
            {"idx": i, "type": f"sentence_transformers.models.{kind}", "path": path}
            for i, (kind, path) in enumerate(modules)
        ]
        (where / "modules.json").write_text(json.dumps(rows))
        (where / "1_Pooling").mkdir()
        (where / "1_Pooling" / "config.json").write_text('{"pooling_mode": "lasttoken"}')
        asyncio.run(_measure(where, texts, asked))


async def _measure(folder: Path, texts: list[Any], asked: argparse.Namespace) -> None:
    config = PoolingConfig(folder, "embedding", num_threads=asked.threads, prefix_caching=False)
    engine = PoolingEngine(config)
    print(f"{(await engine.start()).engine}, {asked.threads} threads, {asked.texts} texts", flush=True)
    from transformers import AutoModel

    model: Any = AutoModel.from_pretrained(folder, dtype=torch.bfloat16).eval()
    num_tokens = sum(map(len, texts))
    inputs = [TextInput(ids) for ids in texts]
    await engine.pool(inputs[:2])
    _by_transformers(model, texts[:2], asked.batch)
    rates: list[tuple[float, float]] = []
    for _ in range(asked.rounds):
        began = time.perf_counter()
        ours, _ = await engine.pool(inputs)
        middle = time.perf_counter()
        theirs = _by_transformers(model, texts, asked.batch)
        end = time.perf_counter()
        worst = min(float(one @ other) for one, other in zip(ours, theirs, strict=True))
        assert worst > 1 - MOST_DIFFERENT, f"the vectors differ: cosine {worst:.4f}"
        rates.append((num_tokens / (middle - began), num_tokens / (end - middle)))
        one, other = rates[-1]
        print(f"engine {one:.0f}, transformers {other:.0f} tokens/s: {one / other:.2f} times", flush=True)
    print(f"median of the ratios: {statistics.median(one / other for one, other in rates):.2f}")
    await engine.close()


@torch.inference_mode()
def _by_transformers(model: Any, texts: list[Any], batch: int) -> list[Any]:
    found: dict[int, Any] = {}
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        longest = max(len(texts[i]) for i in rows)
        ids, mask = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest)
        for row, i in enumerate(rows):
            ids[row, : len(texts[i])] = torch.from_numpy(texts[i].astype(np.int64))
            mask[row, : len(texts[i])] = 1
        states = model(input_ids=ids, attention_mask=mask.long(), use_cache=False).last_hidden_state
        for row, i in enumerate(rows):
            vector = states[row, len(texts[i]) - 1].float()
            found[i] = (vector / vector.norm()).numpy()
    return [found[i] for i in range(len(texts))]


if __name__ == "__main__":
    main()
