"""The names under which vLLM shows what this server measures too, for dashboards that were made for vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import Metric

NAMES: Mapping[str, tuple[str, ...]] = {
    "antiphon_engine_running": ("vllm:num_requests_running",),
    "antiphon_engine_waiting": ("vllm:num_requests_waiting",),
    "antiphon_engine_kv_cache_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "antiphon_engine_preemptions": ("vllm:num_preemptions",),
    "antiphon_engine_prefix_queries": ("vllm:prefix_cache_queries",),
    "antiphon_engine_prefix_hits": ("vllm:prefix_cache_hits",),
    "antiphon_engine_prompt_tokens": ("vllm:prompt_tokens",),
    "antiphon_engine_output_tokens": ("vllm:generation_tokens",),
    "antiphon_engine_prompt_tokens_per_second": ("vllm:avg_prompt_throughput_toks_per_s",),
    "antiphon_engine_output_tokens_per_second": ("vllm:avg_generation_throughput_toks_per_s",),
    "antiphon_generations": ("vllm:request_success",),
    "antiphon_time_to_first_token_seconds": ("vllm:time_to_first_token_seconds",),
    "antiphon_inter_token_seconds": ("vllm:inter_token_latency_seconds",),
    "antiphon_time_per_output_token_seconds": (
        "vllm:time_per_output_token_seconds",
        "vllm:request_time_per_output_token_seconds",
    ),
    "antiphon_generation_seconds": ("vllm:e2e_request_latency_seconds",),
    "antiphon_queue_seconds": ("vllm:request_queue_time_seconds",),
    "antiphon_prefill_seconds": ("vllm:request_prefill_time_seconds",),
    "antiphon_decode_seconds": ("vllm:request_decode_time_seconds",),
    "antiphon_request_prompt_tokens": ("vllm:request_prompt_tokens",),
    "antiphon_request_generation_tokens": ("vllm:request_generation_tokens",),
}
"""Ours, and vLLM's for each; without the `_total` of a counter."""

LABELS = {"model": "model_name", "finish_reason": "finished_reason"}

REASONS = {"tool_calls": "stop", "cancelled": "abort"}
"""vLLM's names of how a generation ended, where they are others; `error` is no success, and is left out."""


def in_vllm_names(families: Iterable[Metric]) -> Iterable[Metric]:
    """Those of the families that vLLM has, under its names and labels."""
    for family in families:
        for name in NAMES.get(family.name, ()):
            renamed = Metric(name, family.documentation, family.type)
            totals: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
            for sample in family.samples:
                if sample.labels.get("finish_reason") == "error":
                    continue
                labels = tuple(_label(*pair) for pair in sample.labels.items())
                key = (sample.name.replace(family.name, name, 1), labels)
                totals[key] = totals.get(key, 0.0) + sample.value
            for (sample_name, labels), value in totals.items():
                renamed.add_sample(sample_name, dict(labels), value)
            yield renamed


def _label(name: str, value: str) -> tuple[str, str]:
    if name == "finish_reason":
        value = REASONS.get(value, value)
    return LABELS.get(name, name), value
