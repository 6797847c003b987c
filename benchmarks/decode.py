"""Decoding with the shipped model, in process, beside transformers: `python -m benchmarks.decode`.

The same greedy tokens (128 a sequence, after a prompt of about 30) from `LocalEngine` and from transformers'
own `generate` with its dense cache, at several batch sizes, in turn, so that a drift of the machine hits both
alike.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

from engine import GenerateRequest, LocalEngine, ReaderParams, RenderInput, SamplingParams
from engine.tiny import CHECKPOINT

TOKENS = 128
BATCHES = (1, 16, 64)
ROUNDS = 3


async def ours(engine: LocalEngine, prompts: list[tuple[int, ...]]) -> float:
    """Seconds for all prompts at once."""
    sampling = SamplingParams(
        seed=0, max_tokens=TOKENS, temperature=0.0, ignore_eos=True, num_assistant_tokens=0
    )

    async def one(index: int, prompt: tuple[int, ...]) -> None:
        request = GenerateRequest(
            f"r{index}", prompt, sampling, ReaderParams(dialect=False), owner=str(time.time())
        )
        async for _ in engine.generate(request):
            pass

    began = time.perf_counter()
    await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts)))
    return time.perf_counter() - began


async def main() -> None:
    """Print tokens a second of both, and the ratio."""
    import torch
    from transformers import AutoModelForCausalLM

    peer: Any = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    engine = LocalEngine(CHECKPOINT)
    await engine.start()
    text = "Say alpha beta gamma delta number {}."
    prompts = [
        (await engine.render(RenderInput([{"role": "user", "content": text.format(10 + index)}]))).ids
        for index in range(max(BATCHES))
    ]
    assert len(set(map(len, prompts[:90]))) == 1, "one length, so that the peer needs no padding"
    for batch in BATCHES:
        own: list[float] = []
        theirs: list[float] = []
        for _ in range(ROUNDS):
            own.append(await ours(engine, prompts[:batch]))
            began = time.perf_counter()
            with torch.inference_mode():
                peer.generate(
                    torch.tensor(prompts[:batch]),
                    max_new_tokens=TOKENS,
                    min_new_tokens=TOKENS,
                    do_sample=False,
                    temperature=None,
                    top_p=None,
                    pad_token_id=0,
                )
            theirs.append(time.perf_counter() - began)
        mine, peers = (batch * TOKENS / statistics.median(times) for times in (own, theirs))
        print(
            f"batch {batch:3}: {mine:7.0f} tok/s, transformers generate {peers:7.0f} tok/s, "
            f"ratio {mine / peers:.2f}"
        )
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
