"""Vector stores through the official SDK and the Agents SDK, unmodified."""

from __future__ import annotations

import io

import agents
from openai import AsyncOpenAI

from tests.support.documents import pdf
from tests.support.libraries import TIDES

agents.set_tracing_disabled(True)  # it would go to another server

MODEL = "antiphon-scripted"
ASKS = 'call file_search {"query": "spring tide"}'


def note(name: str, text: bytes | str = TIDES) -> io.BytesIO:
    file = io.BytesIO(text if isinstance(text, bytes) else text.encode())
    file.name = name
    return file


async def test_the_helpers_of_the_sdk_upload_poll_and_search(sdk: AsyncOpenAI) -> None:
    store = await sdk.vector_stores.create(
        name="shelf", expires_after={"anchor": "last_active_at", "days": 3}
    )
    uploaded = await sdk.files.create(file=note("one.md"), purpose="assistants")
    added = await sdk.vector_stores.files.create_and_poll(
        uploaded.id,
        vector_store_id=store.id,
        attributes={"year": 2024},
        chunking_strategy={
            "type": "static",
            "static": {"max_chunk_size_tokens": 100, "chunk_overlap_tokens": 50},
        },
    )
    assert (added.status, added.attributes) == ("completed", {"year": 2024})
    again = await sdk.vector_stores.files.upload_and_poll(vector_store_id=store.id, file=note("two.md"))
    assert again.status == "completed"
    pages = pdf(["Nothing.", "The spring tide drowns the quay."])
    batch = await sdk.vector_stores.file_batches.upload_and_poll(
        store.id, files=[note("tides.pdf", pages), note("photo.png", b"\x89PNG\r\n\x1a\n" + bytes(99))]
    )
    assert (batch.status, batch.file_counts.completed, batch.file_counts.failed) == ("completed", 1, 1)
    failed = await sdk.vector_stores.file_batches.list_files(
        batch.id, vector_store_id=store.id, filter="failed"
    )
    assert [file.last_error.code async for file in failed if file.last_error] == ["unsupported_file"]
    found = await sdk.vector_stores.search(
        store.id,
        query="drowned quay",
        max_num_results=5,
        rewrite_query=True,
        ranking_options={"ranker": "auto", "score_threshold": 0.1},
    )
    assert found.data[0].filename == "tides.pdf" and "drowns the quay" in found.data[0].content[0].text
    filters = {"type": "eq", "key": "year", "value": 2024}
    some = await sdk.vector_stores.search(store.id, query="tide", filters=filters)  # type: ignore[arg-type]
    assert {hit.filename for hit in some.data} == {"one.md"}
    content = await sdk.vector_stores.files.content(added.id, vector_store_id=store.id)
    assert "spring tide" in (content.data[0].text or "")
    changed = await sdk.vector_stores.files.update(
        added.id, vector_store_id=store.id, attributes={"year": 2025}
    )
    assert changed.attributes == {"year": 2025}
    await sdk.files.delete(uploaded.id)
    names = [file.id async for file in await sdk.vector_stores.files.list(store.id)]
    assert added.id not in names and len(names) == 3, "a file that is deleted leaves its stores"
    whole = await sdk.vector_stores.retrieve(store.id)
    assert (whole.file_counts.total, whole.status) == (3, "completed")
    assert (await sdk.vector_stores.delete(store.id)).deleted
    assert [each.id async for each in sdk.vector_stores.list()] == []


async def test_an_agent_searches_files(sdk: AsyncOpenAI) -> None:
    store = await sdk.vector_stores.create()
    await sdk.vector_stores.files.upload_and_poll(vector_store_id=store.id, file=note("tides.md"))
    agent = agents.Agent(
        name="Librarian",
        model=agents.OpenAIResponsesModel(MODEL, sdk),
        tools=[
            agents.FileSearchTool(
                vector_store_ids=[store.id],
                max_num_results=3,
                include_search_results=True,
                ranking_options={"ranker": "auto", "score_threshold": 0.2},
            )
        ],
    )
    result = await agents.Runner.run(agent, ASKS)
    kinds = [item.type for item in result.new_items]
    assert kinds == ["tool_call_item", "message_output_item"]
    call = result.raw_responses[0].output[0]
    assert call.type == "file_search_call" and call.results and call.results[0].filename == "tides.md"
    # The scripted model repeats what the tool said, whose number becomes a citation.
    message = result.raw_responses[0].output[-1]
    assert message.type == "message" and message.content[0].type == "output_text"
    [cited] = message.content[0].annotations
    assert cited.type == "file_citation" and cited.filename == "tides.md"
    assert "second buoy" in result.final_output and "【" not in result.final_output
