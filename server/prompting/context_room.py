"""Decides what happens when prompt and output limit together exceed the model's context length.

Chat and text completions refuse such a request and name both numbers, as the official APIs and vLLM's do:
their limit is a number of tokens that a client counts on. Responses accepts it, as vLLM's does too, because
`max_output_tokens` is a maximum, and the context may end before it: agents (Codex among them) send one large
limit with every turn of a growing conversation. The answer then names the limit as ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from engine import ModelInfo, PromptTooLong, RenderError
from server.errors import ApiError
from server.ignored import ignore
from server.limits import Caps


@contextmanager
def words_of_field(param: str) -> Iterator[None]:
    """Have a prompt that is too long, or that the chat template refuses, name the field that it came from."""
    try:
        yield
    except (PromptTooLong, RenderError) as error:
        error.param = error.param or param
        raise


def require_room(limit: int | None, param: str, *, prompt_tokens: int, info: ModelInfo) -> None:
    """Raise ApiError 400 `context_length_exceeded` where prompt and limit, in tokens, do not fit together.
    limit: as the client gave it; None is none."""
    if limit is None or prompt_tokens + limit <= info.max_model_len:
        return
    message = (
        f"This model's maximum context length is {info.max_model_len} tokens. However, you requested "
        f"{prompt_tokens + limit} tokens ({prompt_tokens} in the input, {limit} for the output). Please "
        f"reduce the length of the input, or '{param}'."
    )
    raise ApiError(400, message, code="context_length_exceeded", param=param)


def name_capped_limit(limit: int | None, param: str, caps: Caps) -> None:
    """Name a limit as ignored where the server's own is lower."""
    if limit is not None and caps.output(limit) != limit:
        ignore(param)


def name_cut_limit(limit: int | None, param: str, *, prompt_tokens: int, info: ModelInfo) -> None:
    """Name a limit as ignored where the context ends before it is reached."""
    if limit is not None and prompt_tokens + limit > info.max_model_len:
        ignore(param)
