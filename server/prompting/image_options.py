"""Which arguments of a model's image processor a request may choose (`mm_processor_kwargs`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine import IMAGE_OPTIONS, ModelInfo
from server.ignored import ignore
from server.schema import refuse

FIELD = "mm_processor_kwargs"


def image_options(asked: Mapping[str, Any] | None, info: ModelInfo) -> dict[str, Any]:
    """Those that the model's processor takes; others are named as ignored. Raises ApiError 400 for a value of
    another type, or one below 1."""
    found: dict[str, Any] = {}
    for name, value in (asked or {}).items():
        path = f"{FIELD}.{name}"
        if name not in info.image_options:
            ignore(path)
        elif type(value) is not IMAGE_OPTIONS[name]:
            kind = "a boolean" if IMAGE_OPTIONS[name] is bool else "an integer"
            refuse(path, f"Invalid type for '{path}': expected {kind}.", "invalid_type")
        elif isinstance(value, int) and value is not True and value is not False and value < 1:
            refuse(path, f"Invalid '{path}': expected a number of at least 1.")
        else:
            found[name] = value
    return dict(sorted(found.items()))
