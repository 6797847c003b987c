"""What a flood of texts for vectors costs the streams beside it: `python -m benchmarks.beside_embeddings`.

Eight streams of the shipped model, and in every second window four clients whose requests of 16 texts follow
each other without a pause, on a model for embeddings in the same process: an encoder of MiniLM's shape, then
a decoder of a real size, both with random weights. Printed are the streams' tokens a second in each pair of
windows, their ratio, and what the flood got done.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks.streams import Streams
from engine import PoolingConfig, PoolingEngine, TextInput, write_random_model
from engine.tiny import CHECKPOINT

CLIENTS, TEXTS = 4, 16
GOAL = 0.9


def main() -> None:
    """Measure both kinds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--window", type=float, default=4.0, help="seconds")
    parser.add_argument("--decoder", default="qwen3-0.6b", help="a size of `antiphon bench`; '' for none")
    parser.add_argument("--length", type=int, default=128, help="tokens of the longest text")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="antiphon-beside-") as folder:
        models = {"encoder": _encoder(Path(folder) / "encoder")}
        if asked.decoder:
            write_random_model(asked.decoder, Path(folder) / "decoder")
            models["decoder"] = _with_pooling(Path(folder) / "decoder", "lasttoken")
        asyncio.run(_measure(models, asked))


def _encoder(folder: Path) -> Path:
    """A random BERT of the shape of all-MiniLM-L6-v2, with the tokenizer of the shipped model."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=30522,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        architectures=["BertModel"],
    )
    BertModel(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((CHECKPOINT / name).read_bytes())
    told = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**told, "model_max_length": 512}))
    return _with_pooling(folder, "mean")


def _with_pooling(folder: Path, mode: str) -> Path:
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    rows = [
        {"idx": i, "type": f"sentence_transformers.models.{kind}", "path": path}
        for i, (kind, path) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(rows))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": mode}))
    return folder


async def _measure(models: dict[str, Path], asked: argparse.Namespace) -> None:
    streams = Streams()
    await streams.start()
    for kind, folder in models.items():
        pooling = PoolingEngine(PoolingConfig(folder, "embedding", prefix_caching=False))
        await pooling.start()
        await _flooded(pooling, asked.length, 1)
        pairs: list[tuple[float, float]] = []
        done = 0.0
        for _ in range(asked.rounds):
            before = pooling.stats().steps_total
            flood = [_flooded(pooling, asked.length, 1 << 30, f"client {n}") for n in range(CLIENTS)]
            alone, beside = await streams.alone_and_beside(asked.window, *flood)
            done += pooling.stats().steps_total - before
            pairs.append((alone, beside))
            print(
                f"{kind}: alone {alone:.0f}, beside {beside:.0f} tokens/s: {beside / alone:.2f}", flush=True
            )
        ratio = statistics.median(beside / alone for alone, beside in pairs)
        flooded = done / (asked.rounds * asked.window)
        print(
            f"{kind}: median of the ratios {ratio:.2f}, goal {GOAL}; {flooded:.1f} steps/s of the flood",
            flush=True,
        )
        await pooling.close()
    await streams.close()


async def _flooded(pooling: PoolingEngine, longest: int, times: int, owner: str = "") -> None:
    """Requests of one client, one after the other."""
    random = np.random.default_rng(0)
    for _ in range(times):
        lengths = random.integers(longest // 4, longest + 1, TEXTS)
        texts = [TextInput(random.integers(0, 5000, length).astype(np.int32)) for length in lengths]
        await pooling.pool(texts, owner=owner)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
