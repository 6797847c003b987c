"""One table from leaf errors to answers: every leaf error has a row, and every answer the official shape."""

from __future__ import annotations

from collections.abc import Iterator

import orjson
import pytest

from engine import EngineDead, EngineError, PromptTooLong, QueueFull, RenderError
from server.errors import _TABLE, ApiError, to_api_error
from storage import ConversationLocked, NotFound, OutputConflict, StorageError, StorageUnavailable

RAISED_INSIDE_ONLY = {
    "RunLost",
    "BatchLost",
    "FileClaimLost",
    "LineLost",
    "OwnedByAnother",  # `antiphon import`, which no request asks for
}  # whoever holds the claim, or asks an engine in another process, meets it, never a request


def leaves(kind: type[BaseException]) -> Iterator[type[BaseException]]:
    for sub in kind.__subclasses__():
        yield sub
        yield from leaves(sub)


@pytest.mark.parametrize(
    "kind", [*leaves(EngineError), *leaves(StorageError)], ids=lambda kind: kind.__name__
)
def test_every_leaf_error_has_a_row(kind: type[BaseException]) -> None:
    assert kind in _TABLE or kind.__name__ in RAISED_INSIDE_ONLY


@pytest.mark.parametrize(
    ("exc", "status", "type_", "code"),
    [
        (PromptTooLong(40_000, 32_768), 400, "invalid_request_error", "context_length_exceeded"),
        (RenderError("no user message"), 400, "invalid_request_error", "invalid_prompt"),
        (QueueFull(), 429, "rate_limit_exceeded", "queue_full"),
        (EngineDead("gone"), 503, "server_error", "engine_dead"),
        (StorageUnavailable("disk"), 503, "server_error", "storage_unavailable"),
        (NotFound("response", "resp_1"), 404, "invalid_request_error", "not_found"),
        (ConversationLocked("conv_1", "resp_2"), 400, "invalid_request_error", "conversation_locked"),
        (OutputConflict("call_1"), 409, "invalid_request_error", "tool_output_conflict"),
        (ZeroDivisionError("a secret"), 500, "server_error", "server_error"),
    ],
)
def test_leaf_errors_become_answers(exc: BaseException, status: int, type_: str, code: str) -> None:
    error = to_api_error(exc)
    assert (error.status, error.type, error.code) == (status, type_, code)
    body = orjson.loads(error.response().body)
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "a secret" not in error.message


def test_messages_name_what_matters() -> None:
    assert "40000" in to_api_error(PromptTooLong(40_000, 32_768)).message
    assert "32768" in to_api_error(PromptTooLong(40_000, 32_768)).message
    assert "resp_2" in to_api_error(ConversationLocked("conv_1", "resp_2")).message


def test_retry_headers() -> None:
    assert to_api_error(QueueFull()).headers["retry-after"] == "1"
    assert to_api_error(StorageUnavailable()).headers["retry-after"] == "1"
    assert to_api_error(OutputConflict("c")).headers["x-should-retry"] == "false"
    assert "x-should-retry" not in ApiError(400, "no").headers
