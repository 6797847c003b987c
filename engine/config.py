"""`EngineConfig`: every choice with which a local engine is started, checked once and passed on whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from engine.types import LoadError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
Quantization = Literal["none", "int8", "int4", "fp8"]
KVDtype = Literal["auto", "fp8", "int8"]
KVTierDtype = Literal["auto", "int8"]
GenerationDefaults = Literal["auto", "none"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How a local engine loads its model and fills its steps; raises LoadError for values that cannot be.

    None means: derive it from the checkpoint and the machine.
    """

    model: str | Path  # a folder, or a hub id
    name: str | None = None  # what the model is called; None: the last part of `model`
    dtype: Dtype = "auto"  # auto: float32 below 200 M parameters, else the checkpoint's
    device: Device = "auto"
    quantization: Quantization = "none"  # of the weights; int8 and int4 on a CPU; computes in bfloat16
    kv_cache_dtype: KVDtype = "auto"  # of keys and values; auto: what the model computes in; int8: on a CPU
    compile: bool = False  # models of the general tier, by torch.compile
    max_model_len: int | None = None  # tokens of prompt and output together
    max_waiting: int = 512  # requests that wait for a place in the batch; more are refused
    max_waiting_tokens: int | None = None  # tokens of the prompts of those whose callers took a place
    max_num_seqs: int = 256  # sequences in the batch
    max_num_batched_tokens: int = 2048  # tokens one step computes, decode and prefill together
    block_size: int = 16  # tokens of a KV block
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float | None = None  # share of a GPU's memory; None: what is free but a reserve
    num_blocks: int | None = None  # of the full-attention layers; wins over kv_cache_bytes
    kv_disk_bytes: int = 10 << 30  # of saved KV on disk, at most; 0: none is saved
    kv_disk_folder: Path | None = None  # where it lies; None: none is saved
    kv_disk_database: str | None = None  # whose the folder is to be, 32 hex digits; None: anybody's
    kv_tier_dtype: KVTierDtype = "auto"  # what is saved on disk; auto: the same bits
    text_only: bool = False  # of a model that sees, its language model alone
    image_cache_bytes: int = 256 << 20  # features of images that are remembered, and as many of pixels
    prefix_caching: bool = True  # requests may read the blocks that others have computed
    lora: Mapping[str, str | Path] = field(default_factory=dict)  # folders of adapters, by name
    max_lora_rank: int | None = None  # adapters of higher ranks are refused
    chat_template: str | None = None  # the text of a template that replaces the checkpoint's
    allow_special_tokens: bool = False  # what messages say may become the template's control tokens
    tool_dialect: str | None = None  # a row of the table of dialects, or "none"
    reasoning_dialect: str | None = None
    generation_config: GenerationDefaults = "auto"  # auto: sampling defaults are the checkpoint's
    num_threads: int | None = None  # of torch, within one operation
    cpu_kernels: bool = True  # the C++ kernels on a CPU, compiled at the first start, where they are faster
    step_timeout_s: float = 10.0  # without progress for this long the engine counts as dead
    deterministic: bool = False  # the same tokens whatever shares the batch; slower
    num_assistant_tokens: int = 8  # draft tokens that one step checks; 0: none
    max_ngram_size: int = 3  # without a draft model: as many of the last tokens are looked up in the text
    draft_model: str | Path | None = None  # makes the drafts instead; it has the same tokenizer
    assistant_confidence_threshold: float = 0.4  # the draft model stops drafting below this probability
    max_undelivered: int = 256  # tokens that a slow consumer may leave unread before its request pauses

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise LoadError(f"{name} {getattr(self, name)!r} is none of {', '.join(choices)}")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise LoadError(f"{name} is {value}, and has to be at least {least}")
        if not self.step_timeout_s > 0:
            raise LoadError(f"step_timeout_s is {self.step_timeout_s}, and has to be more than 0")
        if self.deterministic and self.kv_tier_dtype != "auto":
            raise LoadError(
                f"kv_tier_dtype {self.kv_tier_dtype} rounds what is read from disk, and tokens would "
                "depend on that, which deterministic excludes"
            )
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise LoadError("gpu_memory_utilization is a share, above 0 and at most 1")
        if not 0 <= self.assistant_confidence_threshold <= 1:
            raise LoadError("assistant_confidence_threshold is a probability, from 0 to 1")

    def for_draft_model(self, max_num_batched_tokens: int) -> EngineConfig:
        """The configuration of the draft model: as it is stored, in what memory the model has left."""
        assert self.draft_model is not None
        return replace(
            self,
            model=self.draft_model,
            draft_model=None,
            quantization="none",
            compile=False,
            deterministic=False,
            lora={},
            max_model_len=None,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_bytes=None,
            num_blocks=None,
            kv_disk_folder=None,
            text_only=True,
        )


_CHOICES = {
    "dtype": get_args(Dtype),
    "device": get_args(Device),
    "quantization": get_args(Quantization),
    "kv_cache_dtype": get_args(KVDtype),
    "kv_tier_dtype": get_args(KVTierDtype),
    "generation_config": get_args(GenerationDefaults),
}
_LEAST = {
    "max_model_len": 1,
    "max_waiting": 0,
    "max_waiting_tokens": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "block_size": 1,
    "kv_cache_bytes": 1,
    "num_blocks": 1,
    "kv_disk_bytes": 0,
    "image_cache_bytes": 0,
    "max_lora_rank": 1,
    "num_threads": 1,
    "num_assistant_tokens": 0,
    "max_ngram_size": 1,
    "max_undelivered": 1,
}


_OF_SEVERAL_GPUS = {"tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"}


def read_settings(model: str | Path, settings: Mapping[str, Any]) -> EngineConfig:
    """The configuration with these fields. Raises LoadError, and TypeError for what is no field."""
    strangers = sorted(settings.keys() - {each.name for each in fields(EngineConfig)})
    if not strangers:
        return EngineConfig(model, **settings)
    why = "settings are the fields of EngineConfig"
    if _OF_SEVERAL_GPUS.intersection(strangers):
        why = "a model is computed by one process, on one GPU at most"
    raise TypeError(f"there is no setting {', '.join(map(repr, strangers))}: {why}")
