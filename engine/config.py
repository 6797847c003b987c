"""How a local engine is started: every choice in one frozen value.

Owns: names, units and defaults. Refuses to know: what anybody does with them, torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
Quantization = Literal["none", "int8", "int4", "fp8"]
KVDtype = Literal["auto", "fp8"]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What `LocalEngine` was given. None means: derive it from the checkpoint and the machine."""

    model: str | Path
    name: str | None = None
    dtype: Dtype = "auto"  # auto: float32 below 200 M parameters, else the checkpoint's
    device: Device = "auto"
    quantization: Quantization = "none"  # of the weights; int8 and int4 on a CPU; computes in bfloat16
    kv_cache_dtype: KVDtype = "auto"  # what keys and values are kept as; auto: what the model computes in
    compile: bool = False  # models of the general tier, by torch.compile
    max_model_len: int | None = None  # tokens of prompt and output together
    max_waiting: int = 512  # requests that wait for a place in the batch; more are refused
    max_num_seqs: int = 256  # sequences in the batch
    max_num_batched_tokens: int = 2048  # tokens one step computes, decode and prefill together
    block_size: int = 16  # tokens of a KV block
    kv_cache_bytes: int | None = None
    num_blocks: int | None = None  # of the full-attention layers; wins over kv_cache_bytes
    lora: Mapping[str, str | Path] = field(default_factory=dict)  # adapters beside the model, by name
    chat_template: str | None = None
    tool_dialect: str | None = None  # a row of the table of dialects, or "none"
    reasoning_dialect: str | None = None
    generation_config: Literal["auto", "none"] = "auto"
    num_threads: int | None = None  # of torch, within one operation
    cpu_kernels: bool = True  # our own on a CPU, compiled at the first start, where they are the faster way
    step_timeout_s: float = 10.0  # without progress for this long the engine counts as dead
    deterministic: bool = False  # the same tokens whatever shares the batch; slower
    num_assistant_tokens: int = 8  # tokens guessed ahead and checked in one step; 0: none
    max_ngram_size: int = 3  # without a draft model: as many of the last tokens are looked up in the text
    draft_model: str | Path | None = None  # guesses instead; it has the same tokenizer
    assistant_confidence_threshold: float = 0.4  # the draft model stops guessing below this probability
    max_undelivered: int = 256  # tokens a slow consumer may leave lying before its request pauses
