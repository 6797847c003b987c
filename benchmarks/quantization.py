"""What fewer bits cost in quality, on the shipped model: `python -m benchmarks.quantization`.

The model's distributions of the next token in held-out dialogues, wherever it was taught what to say: how far
they are with int8, int4 and fp8 weights, with keys and values in fp8, and with those that come back from disk
in int8, from those in bfloat16 (mean KL divergence), and how often the likeliest token is the same. bfloat16
beside float32 gives the scale. Then the shares of right answers, greedy, by skill.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine import GenerateRequest, LocalEngine, ReaderParams, RenderInput, SamplingParams
from engine.config import EngineConfig
from engine.executor.block_memory import to_eight_bits
from engine.kernels.fp8 import to_fp8
from engine.model_folder import find_folder
from engine.models import Attention, Model, load_model
from engine.tiny import CHECKPOINT
from engine.tiny.dialogue import Dialogue, chat_messages, render
from engine.tiny.evaluate import MAX_TOKENS, SKILLS, Answer, Asker, evaluate, held_out
from engine.tokenizer.tokenizer import Tokenizer
from engine.types import Shape

CPU = torch.device("cpu")
KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "fp8": {"quantization": "fp8"},
    "fp8 KV": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    "int8 KV on disk": {},
}


def dense(layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, **rest: Any) -> Tensor:
    """Attention over one whole sequence, without a cache."""
    q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return mixed[0].transpose(0, 1)


def dense_in_fp8(layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, **rest: Any) -> Tensor:
    """The same with keys and values as an fp8 cache keeps them."""
    return dense(layer, q, to_fp8(k).to(k.dtype), to_fp8(v).to(v.dtype), scale=scale)


def dense_in_int8(layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, **rest: Any) -> Tensor:
    """The same with keys and values of the whole prompt as they come back from disk."""
    return dense(layer, q, _from_disk(k), _from_disk(v), scale=scale)


def _from_disk(x: Tensor) -> Tensor:
    shares, scales = to_eight_bits(x.float().reshape(-1, x.shape[-1]).numpy())
    return torch.from_numpy(shares * scales).to(x.dtype).view(x.shape)


def taught(tokenizer: Tokenizer, dialogue: Dialogue) -> tuple[list[int], list[int]]:
    """A dialogue's tokens, and the places whose next token the model learned to say."""
    ids: list[int] = []
    places: list[int] = []
    for text, learn in render(dialogue):
        own = tokenizer.encode(text)
        if learn:
            places += range(len(ids) - 1, len(ids) + len(own) - 1)
        ids += own
    return ids, places


ATTENTIONS: dict[str, Attention] = {"fp8 KV": dense_in_fp8, "int8 KV on disk": dense_in_int8}
"""What differs where neither weights nor arithmetic do."""


def distributions(
    model: Model, texts: list[tuple[list[int], list[int]]], attention: Attention = dense
) -> Iterator[Tensor]:
    """Log probabilities [places, V] of each text."""
    for ids, places in texts:
        positions = torch.arange(len(ids))
        logits = model.forward(torch.tensor(ids), positions, attention, torch.tensor(places))
        yield torch.log_softmax(logits.float(), dim=-1)


def distance(own: Iterable[Tensor], other: Iterable[Tensor]) -> tuple[float, float]:
    """(mean KL divergence of `other` from `own` in nats, share of equal likeliest tokens)."""
    divergence, equal, count = 0.0, 0, 0
    for p, q in zip(own, other, strict=True):
        divergence += (p.exp() * (p - q)).sum().item()
        equal += int((p.argmax(-1) == q.argmax(-1)).sum())
        count += len(p)
    return divergence / count, equal / count


def asker(engine: LocalEngine, runner: asyncio.Runner) -> Asker:
    """Greedy answers of an engine."""
    sampling = SamplingParams(seed=0, max_tokens=MAX_TOKENS, temperature=0.0)

    async def one(dialogue: Dialogue) -> Answer:
        said = chat_messages(dialogue.messages[:-1])
        shape = Shape("json", json.dumps(dialogue.schema)) if dialogue.told else None
        prompt = await engine.render(RenderInput(said, dialogue.tools, answer=shape))
        request = GenerateRequest(str(id(dialogue)), prompt.ids, sampling, ReaderParams(dialect=False))
        ids = [token async for chunk in engine.generate(request) for token in chunk.token_ids]
        ended = ids and ids[-1] in engine.info.eos_token_ids
        text = await engine.detokenize(ids[:-1] if ended else ids)
        return Answer.parse(text if ended else text + "<never ended>")

    async def every(asked: list[Dialogue]) -> list[Answer]:
        return list(await asyncio.gather(*map(one, asked)))

    return lambda asked: runner.run(every(asked))


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=20, help="dialogues a skill; 0: no table of answers")
    parser.add_argument("--texts", type=int, default=5, help="dialogues a skill for the distributions")
    options = parser.parse_args()
    tokenizer = Tokenizer.load(find_folder(CHECKPOINT), None)
    texts = [taught(tokenizer, each) for skill in SKILLS for each in held_out(skill, options.texts)]
    with torch.inference_mode():
        models = {
            kind: load_model(EngineConfig(CHECKPOINT, cpu_kernels=False, **fields), CPU)
            for kind, fields in KINDS.items()
            if kind not in ATTENTIONS
        }
        print(f"{sum(len(places) for _, places in texts)} places of {len(texts)} dialogues\n")
        own = list(distributions(models["bfloat16"], texts))
        print("| beside bfloat16 | mean KL divergence, nats | the same likeliest token |\n|---|---|---|")
        for kind in KINDS:
            if kind == "bfloat16":
                continue
            model = models["bfloat16" if kind in ATTENTIONS else kind]
            divergence, equal = distance(own, distributions(model, texts, ATTENTIONS.get(kind, dense)))
            print(f"| {kind} | {divergence:.5f} | {equal:.2%} |", flush=True)
    for kind in [kind for kind in KINDS if KINDS[kind]] if options.count else ():
        print(f"\n{kind}:")
        with asyncio.Runner() as runner:
            engine = LocalEngine(CHECKPOINT, **KINDS[kind])
            runner.run(engine.start())
            began = time.perf_counter()
            scores = evaluate(asker(engine, runner), list(SKILLS), options.count)
            seconds = time.perf_counter() - began
            print(f"{'mean':<14} {sum(scores.values()) / len(scores):7.1%}  in {seconds:.0f} s", flush=True)
            runner.run(engine.close())


if __name__ == "__main__":
    main()
