"""Names what a request says to the model's chat template that this template does not read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine import ModelInfo
from server.ignored import ignore


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
