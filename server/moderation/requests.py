"""What requests say of moderation: the field `moderation` of responses and chat completions, and the body of
POST /v1/moderations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from server.ignored import unread
from server.shapes import (
    STRING,
    array,
    check_length,
    mapping,
    missing,
    mistyped,
    name_others,
    one_of,
    record,
    refuse,
    tagged,
    text,
)

Mode = Literal["score", "block"]

MAX_INPUTS = 2048
FIELDS = ("model", "input")


@dataclass(frozen=True, slots=True)
class Moderation:
    """What a request has judged, by which model. score: the verdict is told. block: besides, what is flagged
    goes no further, an input to no model and an output to no client."""

    model: str
    input: Mode = "score"
    output: Mode = "score"

    def dump(self) -> dict[str, str]:
        """What a plan keeps of it."""
        return {"model": self.model, "input": self.input, "output": self.output}


def parse_moderation(value: Any) -> Moderation:
    """The field `moderation`. A half without a policy is scored. Raises ApiError 400."""
    mapping(value, "moderation")
    unread(value, ("model", "policy"), "moderation")
    if value.get("model") is None:
        missing("moderation.model")
    model = text(1, 512)(value["model"], "moderation.model")
    modes: dict[str, Mode] = {}
    policy = mapping({} if value.get("policy") is None else value["policy"], "moderation.policy")
    unread(policy, ("input", "output"), "moderation.policy")
    for half in ("input", "output"):
        if policy.get(half) is not None:
            path = f"moderation.policy.{half}"
            unread(mapping(policy[half], path), ("mode",), path)
            if policy[half].get("mode") is None:
                missing(f"{path}.mode")
            modes[half] = one_of("score", "block")(policy[half]["mode"], f"{path}.mode")
    return Moderation(model, **modes)


@dataclass(frozen=True, slots=True)
class ModerationRequest:
    """A body of POST /v1/moderations: a verdict is wanted of each of `inputs`."""

    model: str | None
    inputs: tuple[str, ...]


_PART = tagged(
    {
        "text": record({"text": STRING}),
        "image_url": record({"image_url": record({"url": STRING})}),
    }
)


def parse_moderation_request(body: Mapping[str, Any]) -> ModerationRequest:
    """A body of POST /v1/moderations. The texts of parts are one input together, as they are officially.
    Raises ApiError 400, `unsupported_content` for an image, which no classifier here can see."""
    name_others(body, FIELDS)
    model = None if body.get("model") is None else text(1, 512)(body["model"], "model")
    given = body.get("input")
    if given is None:
        missing("input")
    if isinstance(given, str):
        return ModerationRequest(model, (given,))
    if not isinstance(given, list):
        mistyped("input", "a string or an array", given)
    check_length("input", len(given), "array", least=1, most=MAX_INPUTS)
    if not isinstance(given[0], dict):
        return ModerationRequest(model, tuple(array(STRING)(given, "input")))
    said: list[str] = []
    for index, part in enumerate(given):
        if _PART(part, f"input[{index}]")["type"] == "image_url":
            message = "The model that moderates here reads text only."
            refuse(f"input[{index}]", message, "unsupported_content")
        said.append(part["text"])
    return ModerationRequest(model, ("\n\n".join(said),))
