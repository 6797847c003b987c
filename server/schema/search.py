"""Parses `best_of` and beam search, which generate more candidates than a request has choices.

Chat and completions share these fields and the rules about what they can be combined with. Neither can be
streamed, because the best answer is known only at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine import MAX_BEAMS, BeamParams
from server.ignored import ignore
from server.shapes import Within, from_pydantic, refuse

# What shapes or ends a text as it is drawn has no meaning for beams: the values that ask for nothing pass.
_NOT_WITH_BEAMS: Mapping[str, tuple[Any, ...]] = {
    "stop": ([],),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "prompt_logprobs": (),
}
_IDLE_WITH_BEAMS = ("temperature", "top_p", "top_k", "min_p", "seed")


@dataclass(frozen=True, slots=True)
class Search:
    """How many candidates each prompt has, of which the best become choices; beams: they are searched, not
    drawn.
    """

    num_candidates: int
    beams: BeamParams | None = None


def num_requests(search: Search | None, n: int) -> int:
    """Generations that one prompt with `n` choices takes."""
    if search is None:
        return n
    return 1 if search.beams is not None else search.num_candidates


class SearchFields(BaseModel):
    """The fields, as they come."""

    model_config = ConfigDict(strict=True, extra="ignore")

    best_of: Annotated[int, Within(0, 20)] | None = None
    use_beam_search: bool = False
    length_penalty: Annotated[float, Field(ge=-10, le=10, allow_inf_nan=False)] = 1.0
    early_stopping: Literal[False, True, "never"] = False


def parse_search(values: Mapping[str, Any], *, n: int, stream: bool) -> Search | None:
    """The search that a screened body asks for, None where each candidate is a choice. Names the fields that
    mean nothing to it. Raises ApiError 400.
    """
    try:
        fields = SearchFields(**values)
    except ValidationError as error:
        raise from_pydantic(error) from None
    count = fields.best_of or n
    if count < n:
        refuse("best_of", f"'best_of' must be at least 'n', but got {count} and {n}.")
    if not fields.use_beam_search:
        for name in ("length_penalty", "early_stopping"):
            if getattr(fields, name) != SearchFields.model_fields[name].default:
                refuse(name, f"'{name}' needs 'use_beam_search' to be true.", "unsupported_parameter")
        if count == n:
            return None
    if stream:
        name = "use_beam_search" if fields.use_beam_search else "best_of"
        refuse("stream", f"'{name}' cannot be streamed: which answer is the best is known at the end.")
    if not fields.use_beam_search:
        return Search(count)
    if count > MAX_BEAMS:
        refuse("best_of", f"At most {MAX_BEAMS} beams can be searched, but got {count}.")
    for name, accepted in _NOT_WITH_BEAMS.items():
        if name in values and values[name] not in accepted:
            refuse(name, f"'{name}' cannot be combined with 'use_beam_search'.", "unsupported_parameter")
    beams = BeamParams(count, fields.length_penalty, fields.early_stopping)
    for name in _IDLE_WITH_BEAMS:
        if name in values:
            ignore(name)
    return Search(count, beams)
