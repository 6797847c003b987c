"""Fields that chat and text completions share, and Responses does not have: they ask something of the text of
an answer, or beside it, that has no place among items."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from server.ignored import ignore
from server.shapes import MAX_INT32, STRING, Within, refuse

_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")


class PlainFields(BaseModel):
    """The fields, checked; null and absent are one.

    skip_special_tokens: false writes special tokens out in the text, in which reasoning and calls are then
    not told apart. prompt_logprobs: how many alternatives each token of the prompt shows; None is off.
    return_token_ids: the reply names the ids of its tokens and of the prompt. return_tokens_as_token_ids: log
    probabilities write a token as `token_id:<id>`. truncate_prompt_tokens: only so many of the prompt's last
    tokens are read. request_id: what the id of the completion ends with. safety_identifier, and `user`, its
    older name: for whom the client asks, of whom the log tells by a digest.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    prompt_logprobs: Annotated[int, Within(0, 20)] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    truncate_prompt_tokens: Annotated[int, Within(1, MAX_INT32)] | None = None
    request_id: str | None = None
    safety_identifier: Annotated[str, Field(max_length=128)] | None = None
    user: Annotated[str, Field(max_length=1024)] | None = None


def check_plain(fields: PlainFields, body: Mapping[str, Any], *, stream: bool, logprobs: bool) -> None:
    """Raise ApiError 400 for what cannot be combined, and name what makes no difference. logprobs: whether
    log probabilities are shown at all."""
    if fields.prompt_logprobs is not None and stream:
        message = "'prompt_logprobs' cannot be streamed: they come with the whole answer."
        refuse("prompt_logprobs", message, "unsupported_parameter")
    if fields.request_id is not None:
        request_name(fields.request_id)
    if not fields.skip_special_tokens and body.get("spaces_between_special_tokens"):
        ignore("spaces_between_special_tokens")  # no tokenizer that is read here puts any there
    if fields.return_tokens_as_token_ids and not logprobs:
        ignore("return_tokens_as_token_ids")


def request_name(value: Any) -> str:
    """A `request_id`. Raises ApiError 400."""
    found: str = STRING(value, "request_id")
    if not _REQUEST_ID.match(found):
        message = "Invalid 'request_id': expected 1 to 64 letters, digits, underscores or dashes."
        refuse("request_id", message)
    return found


def completion_name(prefix: str, request_id: str | None, fresh: str) -> str:
    """The id of a completion: with what its client calls it, or else a fresh one."""
    return f"{prefix}-{fresh if request_id is None else request_id}"
