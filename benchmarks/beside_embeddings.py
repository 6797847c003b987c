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
import time
from pathlib import Path

import numpy as np
import torch

from engine import (
    GenerateRequest,
    LocalEngine,
    PoolingConfig,
    PoolingEngine,
    ReaderParams,
    RenderInput,
    SamplingParams,
    TextInput,
    write_random_model,
)
from engine.tiny import CHECKPOINT

STREAMS, CLIENTS, TEXTS = 8, 4, 16
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
    engine = LocalEngine(CHECKPOINT)
    await engine.start()
    prompt = (await engine.render(RenderInput([{"role": "user", "content": "Tell me a story."}]))).ids
    await rate_of_streams(engine, prompt, 1.0)  # warm
    for kind, folder in models.items():
        pooling = PoolingEngine(PoolingConfig(folder, "embedding", prefix_caching=False))
        await pooling.start()
        await _flooded(pooling, asked.length, 1)
        pairs: list[tuple[float, float]] = []
        done = 0.0
        for _ in range(asked.rounds):
            alone = await rate_of_streams(engine, prompt, asked.window)
            before = pooling.stats().steps_total
            flood = [
                asyncio.create_task(_flooded(pooling, asked.length, 1 << 30, f"client {n}"))
                for n in range(CLIENTS)
            ]
            beside = await rate_of_streams(engine, prompt, asked.window)
            for each in flood:
                each.cancel()
            await asyncio.gather(*flood, return_exceptions=True)
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
    await engine.close()


async def rate_of_streams(engine: LocalEngine, prompt: tuple[int, ...], window_s: float) -> float:
    """Tokens a second of all streams together."""
    num = 0

    async def stream(number: int) -> None:
        nonlocal num
        sampling = SamplingParams(seed=number, max_tokens=900, ignore_eos=True)
        while True:
            asked = GenerateRequest(f"r{number}", prompt, sampling, ReaderParams(dialect=False))
            async for chunk in engine.generate(asked):
                num += len(chunk.token_ids)

    streams = [asyncio.create_task(stream(number)) for number in range(STREAMS)]
    await asyncio.sleep(0.3)  # all are under way
    before, began = num, time.perf_counter()
    await asyncio.sleep(window_s)
    rate = (num - before) / (time.perf_counter() - began)
    for each in streams:
        each.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    return rate


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
