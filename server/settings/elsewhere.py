"""Names what the flags of other servers (vLLM, SGLang, llama.cpp) are called here."""

from __future__ import annotations

from collections.abc import Mapping

_ONE_GPU = "a server for each GPU, or --upstream with one that computes on several"

ELSEWHERE: Mapping[str, str] = {
    # vLLM
    **dict.fromkeys(("tensor-parallel-size", "pipeline-parallel-size"), _ONE_GPU),
    **dict.fromkeys(("data-parallel-size", "enable-expert-parallel"), _ONE_GPU),
    **dict.fromkeys(
        ("task", "runner", "convert"), "--embedding-model, --rerank-model, --classification-model"
    ),
    **dict.fromkeys(("disable-responses-store", "no-store"), "--store false"),
    "responses-session-ttl": "--retention-s",
    "responses-max-active-sessions": "--max-live-runs",
    "responses-default-service-tier": "--owner-service-tier",
    "responses-allowed-service-tiers": "--owner-service-tier",
    "responses-compatibility-mode": "--responses-profile",
    "enable-prefix-caching": "--prefix-caching",
    "no-enable-prefix-caching": "--prefix-caching false",
    "kv-cache-memory-bytes": "--kv-cache-bytes",
    "tool-call-parser": "--tool-dialect",
    "enable-auto-tool-choice": "--tool-dialect",
    "reasoning-parser": "--reasoning-dialect",
    "speculative-config": "--draft-model, --num-assistant-tokens",
    **dict.fromkeys(("enable-lora", "lora-modules"), "--lora"),
    "allowed-origins": "--cors-origin",
    "language-model-only": "--text-only",
    "mm-processor-cache-gb": "--image-cache-bytes",
    "tool-server": "--tools",
    "uvicorn-log-level": "--log-level",
    "enable-log-requests": "--log-prompts",
    # SGLang
    "model-path": "--model",
    "context-length": "--max-model-len",
    "mem-fraction-static": "--gpu-memory-utilization",
    "max-running-requests": "--max-num-seqs",
    "chunked-prefill-size": "--max-num-batched-tokens",
    **dict.fromkeys(("tp", "tp-size", "dp", "dp-size", "pp-size"), _ONE_GPU),
    "disable-radix-cache": "--prefix-caching false",
    "speculative-draft-model-path": "--draft-model",
    "speculative-num-draft-tokens": "--num-assistant-tokens",
    "lora-paths": "--lora",
    "enable-torch-compile": "--compile",
    "enable-deterministic-inference": "--deterministic",
    # llama.cpp
    "ctx-size": "--max-model-len",
    "parallel": "--max-num-seqs",
    "batch-size": "--max-num-batched-tokens",
    "threads": "--num-threads",
    **dict.fromkeys(("gpu-layers", "n-gpu-layers"), "--device"),
    "hf-repo": "--model",
    "alias": "--served-model-name",
    "n-predict": "--max-output-tokens",
    "temp": "--default-temperature",
    "model-draft": "--draft-model",
    "draft-max": "--num-assistant-tokens",
    "draft-p-min": "--assistant-confidence-threshold",
    "cache-type-k": "--kv-cache-dtype",
    "slot-save-path": "--kv-disk-folder",
    "chat-template-file": "--chat-template",
    "reasoning-format": "--reasoning-dialect",
    "ssl-key-file": "--ssl-keyfile",
    "ssl-cert-file": "--ssl-certfile",
    **dict.fromkeys(("embedding", "embeddings"), "--embedding-model"),
    **dict.fromkeys(("rerank", "reranking"), "--rerank-model"),
    "no-webui": "--console false",
}
"""Flags of other servers, without their dashes, and what to write here."""


def counterpart(flag: str) -> str | None:
    """What is written here in the place of another server's flag; None for one that is not known."""
    return ELSEWHERE.get(flag.lstrip("-").replace("_", "-"))
