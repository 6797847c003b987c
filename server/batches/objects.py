"""Batches, and the lines of their files, in their official form."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import orjson

from server.batches.carrier import Reply
from storage import BatchLine, StoredBatch

_ENDS = ("completed", "failed", "expired", "cancelled")


def batch_json(batch: StoredBatch) -> bytes:
    """The batch object."""
    errors = None
    if batch.errors is not None:
        errors = {"object": "list", "data": orjson.loads(batch.errors)}
    return orjson.dumps(
        {
            "id": batch.id,
            "object": "batch",
            "endpoint": batch.endpoint,
            "model": batch.model,
            "errors": errors,
            "input_file_id": batch.input_file_id,
            "completion_window": "24h",
            "status": batch.status,
            "output_file_id": batch.output_file_id,
            "error_file_id": batch.error_file_id,
            "created_at": _seconds(batch.created_at),
            "in_progress_at": _seconds(batch.in_progress_at),
            "expires_at": _seconds(batch.expires_at),
            "finalizing_at": _seconds(batch.finalizing_at),
            **{f"{end}_at": _seconds(batch.ended_at) if batch.status == end else None for end in _ENDS},
            "cancelling_at": _seconds(batch.cancelling_at),
            "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
            "usage": None if batch.usage is None else orjson.loads(batch.usage),
            "metadata": orjson.loads(batch.metadata) or None,
        }
    )


def _seconds(at: int | None) -> int | None:
    return None if at is None else at // 1_000_000


def output_line(batch_id: str, line: BatchLine, reply: Reply) -> tuple[bytes, bytes]:
    """The line of a file for a request that was carried out, whatever came of it, and what of it `UsageSum`
    adds up."""
    told, body = reply.outcome, reply.body
    try:
        # A reply of one of our routes goes into the line as it is; refusals are short.
        said = orjson.Fragment(body) if told is not None else orjson.loads(body)
    except orjson.JSONDecodeError:
        said = {"error": {"message": body.decode("utf-8", "replace")}}
    request_id = reply.headers.get("x-request-id")
    response = {"status_code": reply.status, "request_id": request_id, "body": said}
    used = {} if told is None else {"model": told.model, "usage": told.usage}
    return _line(batch_id, line, response, None), orjson.dumps(used)


def expired_line(batch_id: str, line: BatchLine) -> bytes:
    """The line of the error file for a request that nobody came to before its batch expired."""
    error = {
        "code": "batch_expired",
        "message": "This request could not be executed before the completion window expired.",
    }
    return _line(batch_id, line, None, error)


def _line(
    batch_id: str, line: BatchLine, response: dict[str, Any] | None, error: dict[str, str] | None
) -> bytes:
    own = f"batch_req_{batch_id.removeprefix('batch_')}_{line.position}"
    told = {"id": own, "custom_id": line.custom_id, "response": response, "error": error}
    return orjson.dumps(told) + b"\n"


class UsageSum:
    """The tokens of all requests of a batch that were carried out, and the model that the first one used."""

    def __init__(self) -> None:
        self.model: str | None = None
        self._input = self._cached = self._output = self._reasoning = 0

    async def counting(self, results: AsyncGenerator[tuple[bytes, bytes | None]]) -> AsyncGenerator[bytes]:
        """The same lines of a file, counted by what each used."""
        async for result, used in results:
            # A line that an earlier version has carried out does not say it.
            self._add(orjson.loads(result)["response"]["body"] if used is None else orjson.loads(used))
            yield result

    def _add(self, body: dict[str, Any]) -> None:
        if self.model is None and isinstance(body.get("model"), str):
            self.model = body["model"]
        usage = body.get("usage") or {}
        chat = "prompt_tokens" in usage
        read, written = ("prompt", "completion") if chat else ("input", "output")
        self._input += usage.get(f"{read}_tokens", 0)
        self._output += usage.get(f"{written}_tokens", 0)
        self._cached += (usage.get(f"{read}_tokens_details") or {}).get("cached_tokens", 0)
        self._reasoning += (usage.get(f"{written}_tokens_details") or {}).get("reasoning_tokens", 0)

    def json(self) -> dict[str, Any]:
        """The official usage object of a batch."""
        return {
            "input_tokens": self._input,
            "input_tokens_details": {"cached_tokens": self._cached},
            "output_tokens": self._output,
            "output_tokens_details": {"reasoning_tokens": self._reasoning},
            "total_tokens": self._input + self._output,
        }
