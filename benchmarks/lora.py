"""What adapters cost: `python -m benchmarks.lora`.

The same prompts, greedy, from an engine without adapters and from one with some, in turn, so that a drift of
the machine hits all alike: nobody under an adapter, everybody under one, spread over all of them, and with
every other request under none. The adapters are random, and adapt every linear map.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import torch

from engine import GenerateRequest, LocalEngine, ReaderParams, SamplingParams
from engine.config import EngineConfig
from engine.models import load_model
from engine.tiny import CHECKPOINT
from tests.support.adapters import write_adapter

PROMPT = 32  # tokens


def write_adapters(model: Path, folder: Path, count: int, rank: int) -> dict[str, Path]:
    """Random adapters of a native model, by name."""
    loaded = load_model(EngineConfig(model, cpu_kernels=False), torch.device("cpu"))
    found = {}
    for i in range(count):
        tensors = {}
        generator = torch.Generator().manual_seed(i)
        for path, place in loaded.places().items():
            for half, size in (("A", (rank, place.inputs)), ("B", (place.outputs, rank))):
                weights = torch.randn(size, generator=generator) * 0.01
                tensors[f"base_model.model.{path}.lora_{half}.weight"] = weights
        config = {"r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
        found[f"a{i}"] = write_adapter(folder / f"a{i}", tensors, config)
    return found


async def run(engine: LocalEngine, names: list[str | None], num_tokens: int) -> float:
    """Tokens a second of one request under each of these adapters, all at once."""
    sampling = SamplingParams(
        seed=0, max_tokens=num_tokens, temperature=0.0, ignore_eos=True, num_assistant_tokens=0
    )

    async def one(index: int, name: str | None) -> None:
        prompt = tuple((index * 31 + i * 7) % 500 + 50 for i in range(PROMPT))
        salt = str(time.time())
        request = GenerateRequest(
            f"r{index}", prompt, sampling, ReaderParams(dialect=False), owner=salt, adapter=name
        )
        async for _ in engine.generate(request):
            pass

    began = time.perf_counter()
    await asyncio.gather(*(one(index, name) for index, name in enumerate(names)))
    return len(names) * num_tokens / (time.perf_counter() - began)


async def measure(
    model: Path, batches: list[int], count: int, rank: int, rounds: int, num_tokens: int
) -> None:
    """Print tokens a second of each mix, and its ratio to no adapters at all, round by round."""
    with tempfile.TemporaryDirectory() as folder:
        lora = write_adapters(model, Path(folder), count, rank)
        without, adapted = LocalEngine(model), LocalEngine(model, lora=lora)
        for engine in (without, adapted):
            await engine.start()
            await run(engine, [None] * max(batches), 8)
    names = list(lora)
    for batch in batches:
        over = [names[i % count] for i in range(batch)]
        mixes: dict[str, tuple[LocalEngine, list[str | None]]] = {
            "none configured": (without, [None] * batch),
            "none used": (adapted, [None] * batch),
            "all under one": (adapted, [names[0]] * batch),
            f"over {count}": (adapted, [*over]),
            f"over {count} and none": (adapted, [None if i % 2 else over[i // 2] for i in range(batch)]),
        }
        found: dict[str, list[float]] = {name: [] for name in mixes}
        for turn in range(rounds):
            for name in list(mixes) if turn % 2 else reversed(mixes):
                found[name].append(await run(*mixes[name], num_tokens))
        base = found["none configured"]
        for name, rates in found.items():
            ratios = [own / other for own, other in zip(rates, base, strict=True)]
            print(
                f"batch {batch:3}, {name:16}: {statistics.median(rates):7.0f} tok/s, "
                f"{statistics.median(ratios):.2f} x ({min(ratios):.2f} to {max(ratios):.2f})",
                flush=True,
            )
    for engine in (without, adapted):
        await engine.close()


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=CHECKPOINT, help="folder of a native model")
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    args = parser.parse_args()
    asyncio.run(measure(args.model, args.batch, args.adapters, args.rank, args.rounds, args.tokens))


if __name__ == "__main__":
    main()
