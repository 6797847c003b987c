"""Names what a request says to the model's chat template that this template does not read, and of drafts that
are not made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine import ModelInfo
from server.ignored import ignore
from server.schema import SamplingFields


def name_untold(
    info: ModelInfo, *, effort: str | None, effort_param: str, template_kwargs: Mapping[str, Any]
) -> None:
    """Name an effort of reasoning that the model's chat template cannot be told, and members of
    `chat_template_kwargs` that it does not read.

    effort_param: the field that gives the effort.
    """
    if effort is not None and not info.takes_effort:
        ignore(effort_param)
    for name in template_kwargs:
        if name not in info.template_variables:
            ignore(f"chat_template_kwargs.{name}")


def name_idle_drafts(info: ModelInfo, fields: SamplingFields) -> None:
    """Name what a request says of drafts that its model does not make, or makes in another way: a draft model
    looks nothing up in the text, and only a draft model is sure of its tokens or not."""
    drafts = "drafts" in info.capabilities
    if fields.num_assistant_tokens and not drafts:
        ignore("num_assistant_tokens")
    made = drafts and fields.num_assistant_tokens != 0
    by_model = "draft_model" in info.capabilities
    if fields.max_ngram_size is not None and (by_model or not made):
        ignore("max_ngram_size")
    if fields.assistant_confidence_threshold is not None and not (by_model and made):
        ignore("assistant_confidence_threshold")
