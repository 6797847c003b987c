"""What the model could never carry out is refused before anything is begun, the same way on every API."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support import wire
from tests.support.running import Running

APIS: dict[str, tuple[str, dict[str, Any]]] = {
    "responses": ("/v1/responses", {"input": "say hi"}),
    "background": ("/v1/responses", {"input": "say hi", "background": True}),
    "stream": ("/v1/responses", {"input": "say hi", "stream": True}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "say hi"}]}),
    "completions": ("/v1/completions", {"prompt": "say hi"}),
}


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    ("field", "value"), [("logit_bias", {"99999999": 1}), ("stop_token_ids", [5, 99999999])]
)
async def test_token_ids_that_the_model_has_not(
    server_app: Running, client: httpx.AsyncClient, api: str, field: str, value: Any
) -> None:
    path, body = APIS[api]
    reply = await client.post(path, json={**body, field: value})
    assert reply.status_code == 400
    error = reply.json()
    wire.validate_error(error)
    assert (error["error"]["param"], error["error"]["code"]) == (field, "invalid_request")
    assert (await client.get("/v1/responses")).json()["data"] == [], "nothing was begun"
    last = server_app.context.models.get(None).info.vocab_size - 1
    edge = {str(last): 1} if field == "logit_bias" else [last]
    assert (await client.post(path, json={**body, field: edge})).status_code == 200
