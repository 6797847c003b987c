"""Train antiphon-small: an adapter on SmolLM2-135M-Instruct that calls tools.

`python -m engine.small.train --out DIR --minutes N` learns low-rank additions to every linear map of the base
on the dialogues of `engine.small.data`. The base stays as it is, so the adapter is all that is kept: 10 MB.
With `--init FOLDER` a run goes on from an adapter. The learning rate follows the clock, so that any number of
minutes ends with a finished adapter.

glibc gives large pieces of memory back at once and takes them anew at every step, which costs up to half of
the time. Put MALLOC_MMAP_THRESHOLD_=8589934592 and MALLOC_TRIM_THRESHOLD_=17179869184 into the environment.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from engine.shipped import assembly
from engine.small import ADAPTER_FOLDER
from engine.small.data import families
from engine.tiny import (
    BranchedAttention,
    Document,
    Feeder,
    Layout,
    NetConfig,
    Row,
    Span,
    encode,
    rope_tables,
    rotate,
    rows,
    write_atomically,
)

RANK, ALPHA = 16, 32
MAPS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

LoRA = tuple[Tensor, Tensor, Tensor]
"""A frozen map [outputs, inputs], and what is learned: down [RANK, inputs] and up [outputs, RANK]."""


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def adapted(x: Tensor, maps: LoRA) -> Tensor:
    weight, down, up = maps
    return F.linear(x, weight) + (ALPHA / RANK) * F.linear(F.linear(x, down), up)


def before_attention(
    x: Tensor, scale: Tensor, heads: Sequence[LoRA], turn: tuple[Tensor, Tensor], size: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What attention takes, from the states [length, hidden] before a layer, as `tiny.net.heads_of` does."""
    x = norm(x, scale, eps)
    length = x.shape[0]
    queries, keys, values = (adapted(x, maps).view(length, -1, size).transpose(0, 1) for maps in heads)
    queries, keys = rotate(queries, *turn), rotate(keys, *turn)
    return queries.reshape(keys.shape[0], -1, length, size), keys.contiguous(), values.contiguous()


def after_attention(x: Tensor, mixed: Tensor, scale: Tensor, maps: Sequence[LoRA], eps: float) -> Tensor:
    """The states after a layer, from those before it and what attention gave."""
    out, gate, up, down = maps
    x = x + adapted(mixed.flatten(0, 1).transpose(0, 1).flatten(1), out)
    inner = norm(x, scale, eps)
    return x + adapted(F.silu(adapted(inner, gate)) * adapted(inner, up), down)


class AdaptedLlama(nn.Module):
    """A frozen Llama decoder of a Hugging Face folder, and the low-rank additions to its maps.

    compiled: by a C++ compiler, what a layer computes beside attention; rows should then all have one length.
    """

    def __init__(self, folder: Path, compiled: bool) -> None:
        super().__init__()
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.layers: int = config["num_hidden_layers"]
        self.eps: float = config["rms_norm_eps"]
        self.size: int = config["head_dim"]
        self.turning = NetConfig(config["vocab_size"], head_dim=self.size, rope_theta=config["rope_theta"])
        self.frozen = {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
        self.down, self.up = nn.ParameterDict(), nn.ParameterDict()
        for path in self.paths():
            outputs, inputs = self.frozen[f"{path}.weight"].shape
            key = path.replace(".", "/")  # parameters cannot have dots in their names
            self.down[key] = nn.Parameter(torch.randn(RANK, inputs) / math.sqrt(inputs))
            self.up[key] = nn.Parameter(torch.zeros(outputs, RANK))
        self._before = torch.compile(before_attention) if compiled else before_attention
        self._after = torch.compile(after_attention) if compiled else after_attention

    def paths(self) -> Iterator[str]:
        """The adapted maps."""
        for layer in range(self.layers):
            for name in MAPS:
                part = "self_attn" if name in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
                yield f"model.layers.{layer}.{part}.{name}"

    def _maps(self, layer: str, *names: str) -> list[LoRA]:
        paths = [f"{layer}.{name}" for name in names]
        keys = [path.replace(".", "/") for path in paths]
        return [
            (self.frozen[f"{path}.weight"], self.down[key], self.up[key])
            for path, key in zip(paths, keys, strict=True)
        ]

    def states(self, ids: Tensor, layout: Layout) -> Tensor:
        """Final normed states [length, hidden] of a row of documents."""
        spans: list[Span] = layout.spans()
        turn = rope_tables(layout.positions, self.turning)
        x = F.embedding(ids, self.frozen["model.embed_tokens.weight"])
        for index in range(self.layers):
            layer = f"model.layers.{index}"
            scales = [
                self.frozen[f"{layer}.{name}.weight"]
                for name in ("input_layernorm", "post_attention_layernorm")
            ]
            heads = self._maps(layer, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
            rest = self._maps(layer, "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
            q, k, v = self._before(x, scales[0], heads, turn, self.size, self.eps)
            mixed = BranchedAttention.apply(q, k, v, spans)  # type: ignore[no-untyped-call]
            x = self._after(x, mixed, scales[1], rest, self.eps)
        return norm(x, self.frozen["model.norm.weight"], self.eps)

    def loss(self, ids: Tensor, learn: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """(mean loss, which best guesses were right) over the tokens of a row that are to be learned."""
        wanted = learn[1:].nonzero().squeeze(1)
        scores = F.linear(self.states(ids, layout)[wanted], self.frozen["model.embed_tokens.weight"])
        return F.cross_entropy(scores, ids[1:][wanted]), scores.argmax(-1) == ids[1:][wanted]

    def adapter(self) -> dict[str, Tensor]:
        """The additions by PEFT's names."""
        out = {}
        for path in self.paths():
            key = path.replace(".", "/")
            for half, held in (("lora_A", self.down), ("lora_B", self.up)):
                value = held[key].detach().to(torch.bfloat16).contiguous()
                out[f"base_model.model.{path}.{half}.weight"] = value
        return out

    @torch.no_grad()
    def load_adapter(self, folder: Path) -> None:
        """Begin with an adapter of the same rank."""
        saved = load_file(folder / assembly.ADAPTER)
        for path in self.paths():
            key = path.replace(".", "/")
            for half, held in (("lora_A", self.down), ("lora_B", self.up)):
                held[key].copy_(saved[f"base_model.model.{path}.{half}.weight"])


# -------------------------------------------------------------------------------------------------- batches


def documents(tokenizer: Tokenizer, seed: int, length: int) -> Iterator[tuple[Document, np.ndarray]]:
    """Families as documents of at most `length` tokens, with their positions, for ever.

    Mostly half of that is enough: two families teach more than twice as much of one.
    """
    for family in families(seed):
        document = encode(tokenizer, family, length // 2)
        if sum(document.learn) < length // 8:
            document = encode(tokenizer, family, length)
        if len(document.ids) <= length and any(document.learn):
            yield document, document.positions()


def small_rows(tokenizer: Path, seed: int, length: int) -> Iterator[Row]:
    """What the producer process makes."""
    torch.set_num_threads(1)
    return rows(documents(Tokenizer.from_file(str(tokenizer)), seed, length), length)


# ---------------------------------------------------------------------------------------------------- the run


@dataclass
class Options:
    """The command line, typed."""

    out: Path
    minutes: float
    seed: int
    init: Path | None
    row: int
    rate: float
    threads: int
    compile: bool


def parse() -> Options:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the adapter")
    parser.add_argument("--minutes", type=float, default=120, help="training time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--init", type=Path, default=None, help="adapter's folder to begin with")
    parser.add_argument("--row", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--compile",
        action="store_true",
        help="prepare the layers by torch.compile, which needs a C++ compiler",
    )
    return Options(**vars(parser.parse_args()))


def rate_at(progress: float, step: int) -> float:
    """Share of the peak learning rate: a short warm-up, flat, then straight down over the last 60 %."""
    return min(1.0, (step + 1) / 20) * min(1.0, max(0.02, (1 - progress) / 0.6))


def save(model: AdaptedLlama, out: Path) -> None:
    """Write the adapter's folder as PEFT lays it out, the weights last and in one move."""
    out.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    config |= {"target_modules": sorted(MAPS)}
    write_atomically(out / assembly.CONFIG, json.dumps(config, indent=2) + "\n")
    for name in assembly.BESIDE:
        if out.resolve() != ADAPTER_FOLDER.resolve():
            shutil.copyfile(ADAPTER_FOLDER / name, out / name)
    temporary = out / f"{assembly.ADAPTER}.new"
    save_file(model.adapter(), str(temporary), metadata={"format": "pt"})
    temporary.chmod(0o644)
    os.replace(temporary, out / assembly.ADAPTER)


def train(options: Options) -> None:
    """Train until the minutes are spent; prints a line now and then."""
    base = assembly.base_file()
    if base is None:
        raise SystemExit(f"the base is not here: {assembly.HOW_TO_GET}")
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        assembly.assemble(base, Path(folder), sha256=assembly.SHA256)
        source = partial(small_rows, Path(folder) / "tokenizer.json", options.seed, options.row)
        feeder = Feeder(source)
        try:
            model = AdaptedLlama(Path(folder), options.compile)
            if options.init:
                model.load_adapter(options.init)
            _run(model, feeder, options)
        finally:
            feeder.close()
    save(model, options.out)


def _run(model: AdaptedLlama, feeder: Feeder, options: Options) -> None:
    device = torch.device("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, betas=(0.9, 0.98), weight_decay=0.0)
    began = printed = saved = time.monotonic()
    step = tokens = learned = 0
    smooth = [0.0, 0.0]
    while (spent := time.monotonic() - began) < options.minutes * 60:
        for group in optimizer.param_groups:
            group["lr"] = options.rate * rate_at(spent / (options.minutes * 60), step)
        ids, learn, layout = feeder.next(device)
        loss, right = model.loss(ids, learn, layout)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step, tokens, learned = step + 1, tokens + len(ids), learned + len(right)
        for index, value in enumerate((loss.item(), right.float().mean().item())):
            smooth[index] += (value - smooth[index]) * (1 if step == 1 else 0.05)
        now = time.monotonic()
        if now - printed > 20:
            printed = now
            print(
                f"{spent / 60:6.1f} min  step {step}  {tokens:,} tokens, {learned:,} learned  "
                f"{tokens / (now - began):.0f} tok/s  loss {smooth[0]:.4f}  right {smooth[1]:.4f}",
                flush=True,
            )
        if now - saved > 300:
            saved = now
            save(model, options.out)
    print(f"done: {step} steps, {tokens:,} tokens ({learned:,} learned)", flush=True)


if __name__ == "__main__":
    train(parse())
