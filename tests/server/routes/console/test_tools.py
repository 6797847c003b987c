"""GET /v1/tools: which tools a request may have here, and why not the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from server.mcp_servers import McpSettings, ServerSettings
from tests.support.running import http_client, running_app

Json = dict[str, Any]


def by_name(found: Json) -> dict[str, Json]:
    return {each["tool"].get("server_url", each["tool"]["type"]): each for each in found["data"]}


async def test_what_can_be_had_is_taken_by_a_request(client: httpx.AsyncClient) -> None:
    found = by_name((await client.get("/v1/tools")).json())
    assert set(found) == {"builtin:", "web_search", "file_search", "code_interpreter", "image_generation"}
    assert found["builtin:"] == {
        "object": "tool",
        "tool": {"type": "mcp", "server_label": "builtin", "server_url": "builtin:"},
        "available": True,
        "reason": None,
    }
    for name, each in found.items():
        tool = dict(each["tool"])
        if name == "file_search":
            store = (await client.post("/v1/vector_stores", json={"name": "s"})).json()
            tool["vector_store_ids"] = [store["id"]]
        reply = await client.post("/v1/responses", json={"input": "say hello", "tools": [tool]})
        assert (reply.status_code == 200) is each["available"], (name, reply.text)
        if not each["available"]:
            assert each["reason"]


async def test_servers_and_scopes_are_those_of_the_key(tmp_path: Path) -> None:
    servers = {
        "desk": ServerSettings(command=("/bin/desk",), owners=("ann",)),
        "shop": ServerSettings(command=("/bin/shop",), owners=("bob",)),
    }
    settings = McpSettings(servers=servers)
    async with running_app(tmp_path, mcp=settings) as running, http_client(running) as client:

        async def key(owner: str, *scopes: str) -> dict[str, str]:
            reply = await client.post(
                "/admin/keys",
                json={"owner": owner, "scopes": list(scopes)},
                headers={"authorization": f"Bearer {running.life.admin_token}"},
            )
            return {"authorization": f"Bearer {reply.json()['key']}"}

        of_ann = (await client.get("/v1/tools", headers=await key("ann", "responses"))).json()
        ann = by_name(of_ann)
        assert of_ann["owner"] == "ann"
        assert "builtin:desk" in ann and "builtin:shop" not in ann
        assert ann["builtin:desk"]["available"] and ann["file_search"]["available"]
        narrow = await key("bob", "responses", "tool:mcp:builtin:shop")
        bob = by_name((await client.get("/v1/tools", headers=narrow)).json())
        assert bob["builtin:shop"]["available"] and "builtin:desk" not in bob
        assert bob["file_search"]["reason"] == "The key lacks the scope tool:file_search."
        refused = await client.get("/v1/tools", headers=await key("ann", "files"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "insufficient_permissions")
