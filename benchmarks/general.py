"""Models of transformers on a CPU, by the kernels and by torch: `python -m benchmarks.general`.

Random weights in bfloat16, made from a seed, of the shape of a model that is none of the native families: a
Gemma, or a mixture of experts. Prompts of 200 tokens, alone and eight at once, then decode steps, by either
in turn, so that a drift of the machine hits both alike. `--keep` leaves the checkpoint, for other servers.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from engine.benchmark.random_weights import write_tokenizer
from tests.support.driver import Driver, greedy

VOCAB_SIZE = 151936
PROMPT = 200  # tokens
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3-1b": (
        "gemma3_text",
        {
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 512,
        },
    ),
    # a Qwen3 of two billion parameters, of which a token passes half a billion
    "qwen3-moe-2b": (
        "qwen3_moe",
        {
            "hidden_size": 1024,
            "moe_intermediate_size": 384,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 128,
        },
    ),
}


def write_model(shape: str, folder: Path) -> None:
    """A checkpoint of a row of `SHAPES`, with a tokenizer, in a folder that is made."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, fields = SHAPES[shape]
    folder.mkdir(parents=True, exist_ok=True)
    tags = write_tokenizer(folder, VOCAB_SIZE)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = AutoConfig.for_model(
            kind,
            vocab_size=VOCAB_SIZE,
            max_position_embeddings=32768,
            tie_word_embeddings=True,
            eos_token_id=max(tags.values()),
            bos_token_id=None,
            pad_token_id=None,
            **fields,
        )
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def measure(driver: Driver, rows: int, steps: int, draw: torch.Generator) -> tuple[float, float]:
    """Seconds until `rows` new prompts have their first tokens, and of a decode step behind them."""
    handles = [
        driver.submit(
            torch.randint(VOCAB_SIZE, (PROMPT,), generator=draw).tolist(),
            greedy(steps + 1, ignore_eos=True, num_assistant_tokens=0),
        )
        for _ in range(rows)
    ]
    began = time.perf_counter()
    while not all(driver.outputs[handle] for handle in handles):
        driver.step()
    prompts = time.perf_counter() - began
    times = []
    for _ in range(steps // 2):  # by then none has ended
        began = time.perf_counter()
        driver.step()
        times.append(time.perf_counter() - began)
    driver.run()
    return prompts, statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), nargs="+", default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="a folder in which the checkpoints are left")
    options = parser.parse_args()
    print("| shape, rows | prompts, by torch; by the kernels | ratio | a decode step | ratio |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        for shape in options.shape:
            folder = (options.keep or Path(temporary)) / shape
            write_model(shape, folder)
            drivers = {
                kernels: Driver(
                    folder,
                    vocab_size=VOCAB_SIZE,
                    kv_cache_bytes=1 << 30,
                    max_model_len=2048,
                    cpu_kernels=kernels,
                )
                for kernels in (False, True)
            }
            for rows, steps in ((1, 24), (8, 12)):
                draw = torch.Generator().manual_seed(rows)
                found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
                for _ in range(options.rounds + 1):
                    for kernels, driver in drivers.items():
                        found[kernels].append(measure(driver, rows, steps, draw))
                by_torch, by_kernels = (
                    [statistics.median(part) for part in zip(*of_one[1:], strict=True)]
                    for of_one in found.values()
                )
                cells = " | ".join(
                    f"{1e3 * before:,.0f}; {1e3 * now:,.0f} ms | {now / before:.2f}"
                    for before, now in zip(by_torch, by_kernels, strict=True)
                )
                print(f"| {shape}, {rows} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
