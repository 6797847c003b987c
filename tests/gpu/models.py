"""Builds engines with random weights, made on the device from a seed.

Speed does not depend on the values of the weights, so measurements need no checkpoint. `Bench` puts an engine
loop around such a model and steps it by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from engine.benchmark.random_weights import SIZES
from engine.config import EngineConfig, Quantization
from engine.core.batch_state import Rows
from engine.core.kv_cache import KVCache
from engine.core.loop import EngineLoop
from engine.core.messages import Inbox, Submit
from engine.core.scheduler import Scheduler
from engine.core.speculation import ROOM, Lookup, Speculation
from engine.executor import Runner, size_pools
from engine.kernels.torch_attention import Workspace
from engine.models import ModelSpec
from engine.models.decoder import NativeDecoder, _groups, _layer
from engine.models.families import LAYER_PACKING, MODEL_PACKING, DecoderShape, parse
from engine.models.linear import make_linear
from engine.step import RowOutput
from engine.types import GenerateRequest, SamplingParams

BLOCK_SIZE = 16


def random_decoder(
    config: dict[str, Any], device: torch.device, dtype: torch.dtype, quantization: Quantization = "none"
) -> NativeDecoder:
    """A decoder of this config.json with weights from a seed."""
    shape = parse(config, None)
    generator = torch.Generator(device).manual_seed(0)

    def tensor(sources: dict[str, str]) -> Tensor:
        sizes = [[shape.axes[axis] for axis in axes.split()] for axes in sources.values()]
        size = [sum(own[0] for own in sizes), *sizes[0][1:]]
        if len(size) == 1:
            return torch.ones(size, device=device, dtype=dtype)
        return torch.empty(size, device=device, dtype=dtype).normal_(0, 0.02, generator=generator)

    workspace = Workspace()
    rows = [row for row in LAYER_PACKING if row.name not in shape.absent]
    layers = [
        _layer(shape, {row.name: tensor(row.sources) for row in rows}, quantization, workspace)
        for _ in shape.windows
    ]
    weights = {
        row.name: tensor(row.sources) for row in MODEL_PACKING if not (shape.tied and row.name == "head")
    }
    head = make_linear(weights.get("head", weights["embedding"]), None, "none", workspace)
    spec = ModelSpec(
        architecture=shape.architecture,
        vocab_size=shape.vocab_size,
        max_positions=shape.max_positions,
        num_parameters=num_parameters(shape),
        groups=_groups(shape),
        dtype=dtype,
        fingerprint=b"",
    )
    return NativeDecoder(
        spec, shape, layers, embedding=weights["embedding"], final_norm=weights["final_norm"], head=head
    )


def num_parameters(shape: DecoderShape) -> int:
    """Parameters of the matrices that a token is multiplied by, the head included."""
    axes = shape.axes
    layer = axes["hidden"] * (2 * axes["q"] + 2 * axes["kv"] + 3 * axes["middle"])
    return len(shape.windows) * layer + axes["hidden"] * axes["vocab"]


class Bench:
    """An engine loop that is stepped by hand and counts what it hears."""

    def __init__(
        self,
        size: str,
        device: torch.device,
        *,
        max_model_len: int = 8192,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        dtype: torch.dtype = torch.bfloat16,
        config: dict[str, Any] | None = None,
        quantization: Quantization = "none",
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        with torch.inference_mode():
            self.model = random_decoder(config or SIZES[size], device, dtype, quantization)
            self._build(device, kv_dtype, max_model_len, max_num_seqs, max_num_batched_tokens)
        self.num_tokens: dict[int, int] = {}
        self._next = 0
        self.reset(max_num_batched_tokens)

    def _build(
        self,
        device: torch.device,
        kv_dtype: torch.dtype | None,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        config = EngineConfig(
            "random",
            block_size=BLOCK_SIZE,
            kv_cache_dtype="auto" if kv_dtype is None else "fp8",
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        sizes = size_pools(self.model, config, device)
        vocab_size = self.model.spec.vocab_size
        self.runner = Runner(self.model, config, sizes, vocab_size=vocab_size, device=device)
        self._parts = (sizes.num_blocks, sizes.max_len, max_num_seqs)

    def reset(self, max_num_batched_tokens: int) -> None:
        """Forget all sequences and what was cached; the captured graphs stay."""
        num_blocks, max_len, max_seqs = self._parts
        kv = KVCache(self.model.spec.groups, num_blocks, BLOCK_SIZE, max_seqs, max_len)
        rows = Rows(max_seqs, max_len)
        scheduler = Scheduler(
            kv,
            rows,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_len,
            max_undelivered=1 << 30,
            eos_token_ids=(),
        )
        self.inbox: Inbox = SimpleQueue()
        self.loop = EngineLoop(
            self.runner,
            scheduler,
            self.inbox,
            self._hear,
            eos_token_ids=(),
            max_model_len=max_len,
            max_num_seqs=max_seqs,
            speculation=Speculation(rows, Lookup(3), num_assistant_tokens=0, room=ROOM["cuda"]),
        )

    def _hear(self, outputs: Sequence[RowOutput]) -> None:
        for output in outputs:
            if output.error is not None:
                raise output.error
            self.num_tokens[output.handle] = self.num_tokens.get(output.handle, 0) + len(output.token_ids)

    def submit(self, prompt: Sequence[int], max_tokens: int, **sampling: Any) -> int:
        """Hand in a prompt; returns its handle."""
        self._next += 1
        params = SamplingParams(**{"seed": 0, "temperature": 0.0, **sampling, "max_tokens": max_tokens})
        self.inbox.put(Submit(self._next, GenerateRequest(str(self._next), tuple(prompt), params)))
        return self._next

    def step(self) -> bool:
        """One step of the loop; False when there was nothing to do."""
        with torch.inference_mode():
            self.loop.handle_commands()
            return self.loop.step()

    def run_until_decoding(self, handles: Sequence[int]) -> None:
        """Step until each has its first token."""
        while any(not self.num_tokens.get(handle) for handle in handles):
            self.step()
