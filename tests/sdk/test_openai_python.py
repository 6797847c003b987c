"""The official Python SDK, unmodified, against a server on a socket."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI, RateLimitError, omit
from openai.types.responses import (
    ResponseCompletedEvent,
    ResponseFunctionToolCall,
    ResponseImageGenCallPartialImageEvent,
    ResponseReasoningItem,
    ResponseTextDeltaEvent,
    ToolParam,
)
from openai.types.responses.response_output_item import (
    ImageGenerationCall,
    McpApprovalRequest,
    McpCall,
)
from pydantic import BaseModel, ValidationError

from engine import ScriptedEngine
from server.images import ImagesSettings
from server.mcp_servers import read_mcp_settings
from tests.support.loopback_images import PNG, loopback_images
from tests.support.mcp_servers import Seen, mcp_server
from tests.support.running import Running, live_app
from tests.support.talk import TIME, WEATHER, Gate, call, gated

MODEL = "antiphon-scripted"
TOOLS: list[Any] = [WEATHER, TIME]


# ------------------------------------------------------------------------------------------------------------
# Creating


async def test_create(live_sdk: AsyncOpenAI) -> None:
    response = await live_sdk.responses.create(model=MODEL, input="say hello")
    assert (response.status, response.output_text) == ("completed", "hello")
    assert response.usage is not None and response.usage.output_tokens == 6
    assert response._request_id
    again = await live_sdk.responses.retrieve(response.id)
    assert again == response


async def test_the_synchronous_client(live_server: Running) -> None:
    def ask() -> tuple[str, str]:
        with OpenAI(api_key="unused", base_url=f"{live_server.base_url}/v1") as client:
            plain = client.responses.create(model=MODEL, input="say hello").output_text
            with client.responses.stream(model=MODEL, input="say hello") as stream:
                streamed = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        return plain, streamed

    assert await asyncio.to_thread(ask) == ("hello", "hello")


async def test_create_streamed(live_sdk: AsyncOpenAI) -> None:
    stream = await live_sdk.responses.create(model=MODEL, input="say one two", stream=True)
    events = [event async for event in stream]
    said = "".join(event.delta for event in events if isinstance(event, ResponseTextDeltaEvent))
    last = events[-1]
    assert isinstance(last, ResponseCompletedEvent)
    assert said == last.response.output_text == "one two"


@pytest.mark.parametrize(
    ("asked", "kinds", "said"),
    [
        ("say one two", ["message"], "one two"),
        ("think hm then say one", ["reasoning", "message"], "one"),
        (f"{call()}\n{call('get_time')}", ["function_call", "function_call"], ""),
        (f"think hm then say one\n{call()}", ["reasoning", "message", "function_call"], "one"),
    ],
)
async def test_the_stream_helper(live_sdk: AsyncOpenAI, asked: str, kinds: list[str], said: str) -> None:
    async with live_sdk.responses.stream(model=MODEL, input=asked, tools=TOOLS) as stream:
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert [item.type for item in final.output] == kinds
    assert final.output_text == "".join(deltas) == said
    for item in final.output:
        if isinstance(item, ResponseFunctionToolCall):
            assert item.parsed_arguments == {"city": "Paris"}  # type: ignore[attr-defined]
        if isinstance(item, ResponseReasoningItem):
            assert item.content is not None and item.content[0].text == "hm"


async def test_parse_of_plain_text(live_sdk: AsyncOpenAI) -> None:
    parsed = await live_sdk.responses.parse(model=MODEL, input="say hello")
    assert parsed.output_text == "hello" and parsed.output_parsed is None


async def test_a_stream_that_ends_incomplete_or_failed(live_sdk: AsyncOpenAI) -> None:
    stream = await live_sdk.responses.create(model=MODEL, input="count 99", stream=True, max_output_tokens=16)
    last = [event async for event in stream][-1]
    assert last.type == "response.incomplete"
    stream = await live_sdk.responses.create(model=MODEL, input="say one\nfail now", stream=True)
    last = [event async for event in stream][-1]
    assert last.type == "response.failed"
    assert last.response.error is not None and last.response.error.code == "server_error"


async def test_the_helpers_do_without_an_answer_that_is_not_complete(live_sdk: AsyncOpenAI) -> None:
    """As docs/errors.md says: the terminal event has the response, also where the helper raises."""
    for asked, status in (("count 99", "incomplete"), ("say one\nfail now", "failed")):
        async with live_sdk.responses.stream(model=MODEL, input=asked, max_output_tokens=16) as stream:
            last: Any = [event async for event in stream][-1]
            assert (last.type, last.response.status) == (f"response.{status}", status)
            with pytest.raises(RuntimeError, match="receive a `response"):
                await stream.get_final_response()

    class Answer(BaseModel):
        city: str

    with pytest.raises(ValidationError):
        await live_sdk.responses.parse(
            model=MODEL, input='say {"city": "' + "a" * 99, text_format=Answer, max_output_tokens=16
        )


async def test_tools_by_previous_response_id(live_sdk: AsyncOpenAI) -> None:
    first = await live_sdk.responses.create(model=MODEL, input=call(), tools=TOOLS)
    [made] = first.output
    assert isinstance(made, ResponseFunctionToolCall)
    second = await live_sdk.responses.create(
        model=MODEL,
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": made.call_id, "output": "rainy"}],
    )
    assert second.output_text == "The tool said: rainy"


async def test_tools_with_everything_resent(live_sdk: AsyncOpenAI) -> None:
    """The output of a response is input for the next one as the SDK dumps it."""
    history: list[Any] = [{"role": "user", "content": f"think hm then {call()}"}]
    for store in (True, False):
        first = await live_sdk.responses.create(model=MODEL, input=history, tools=TOOLS, store=store)
        made = first.output[-1]
        assert isinstance(made, ResponseFunctionToolCall)
        answer = {"type": "function_call_output", "call_id": made.call_id, "output": "rainy"}
        for dumped in (
            list(first.output),
            [item.model_dump() for item in first.output],
            [item.model_dump(exclude_none=True) for item in first.output],
            [item.model_dump(exclude_unset=True) for item in first.output],
            [item.to_dict() for item in first.output],
        ):
            sent: Any = [*history, *dumped, answer]
            second = await live_sdk.responses.create(model=MODEL, input=sent, tools=TOOLS)
            assert second.output_text == "The tool said: rainy"
            if store:
                listed = [i async for i in live_sdk.responses.input_items.list(second.id, order="asc")]
                assert [item.id for item in listed[1:3]] == [item.id for item in first.output]


async def test_sealed_reasoning_without_a_store(live_sdk: AsyncOpenAI, live_server: Running) -> None:
    """An agent's loop as stateless clients run it: they keep the items and drop what they cannot read."""
    history: list[Any] = [{"role": "user", "content": f"think where am I then {call()}"}]
    include: Any = ["reasoning.encrypted_content"]
    async with live_sdk.responses.stream(
        model=MODEL, input=history, tools=TOOLS, store=False, include=include, reasoning={"summary": "auto"}
    ) as stream:
        first = await stream.get_final_response()
    thought, made = first.output
    assert isinstance(thought, ResponseReasoningItem) and isinstance(made, ResponseFunctionToolCall)
    assert thought.encrypted_content and thought.summary == []
    engine = live_server.context.models.get(None).engine
    assert isinstance(engine, ScriptedEngine)
    begun = engine.requests[-1].prompt_ids
    answer = {"type": "function_call_output", "call_id": made.call_id, "output": "rainy"}
    for kept in (
        thought,
        thought.model_dump(exclude={"content"}),
        {**thought.model_dump(), "content": []},
        {"type": "reasoning", "summary": [], "encrypted_content": thought.encrypted_content},
    ):
        sent: Any = [*history, kept, made, answer]
        second = await live_sdk.responses.create(
            model=MODEL, input=sent, tools=TOOLS, store=False, include=include
        )
        assert second.output_text == "The tool said: rainy"
        said = engine.tokenizer.encode("<think>\nwhere am I\n</think>\n\n")
        assert [*engine.requests[-1].prompt_ids][: len(begun) + len(said)] == [*begun, *said]
    broken = thought.model_dump() | {"encrypted_content": thought.encrypted_content[:-4] + "AAAA"}
    sent = [broken, *history]
    with pytest.raises(BadRequestError) as refused:
        await live_sdk.responses.create(model=MODEL, input=sent, store=False)
    assert refused.value.code == "invalid_encrypted_content"


async def test_a_sealed_search_without_a_store(tmp_path: Path) -> None:
    """The SDK keeps a field that it does not know, and sends it back."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "tides.md").write_text("# Tides\n\nThe spring tide is high.\n")
    include: Any = ["reasoning.encrypted_content"]
    tools: Any = [{"type": "web_search"}]
    asked: list[Any] = [{"role": "user", "content": 'call web_search {"queries": ["tide"]}'}]
    async with (
        live_app(tmp_path, registry=None, demo_web=tmp_path / "notes") as server,
        AsyncOpenAI(api_key="unused", base_url=f"{server.base_url}/v1", max_retries=0) as sdk,
    ):
        engine = server.context.models.get(None).engine
        assert isinstance(engine, ScriptedEngine)
        first = await sdk.responses.create(
            model=MODEL, input=asked, tools=tools, store=False, include=include
        )
        async with sdk.responses.stream(
            model=MODEL, input=asked, tools=tools, store=False, include=include
        ) as stream:
            streamed = await stream.get_final_response()
        for response in (first, streamed):
            for kept in (response.output, [item.model_dump() for item in response.output]):
                sent: Any = [*asked, *kept, {"role": "user", "content": "say so"}]
                reply = await sdk.responses.with_raw_response.create(model=MODEL, input=sent, store=False)
                assert "x-antiphon-ignored" not in reply.headers
                shown = engine.tokenizer.decode(engine.requests[-1].prompt_ids)
                assert "https://demo.test/tides.md" in shown


async def test_images_with_their_earlier_forms(tmp_path: Path) -> None:
    asked: list[Any] = [{"role": "user", "content": 'call image_generation {"prompt": "a cat"}'}]
    tools: Any = [{"type": "image_generation", "partial_images": 1}]
    async with loopback_images() as images:
        images.reply = [
            {"type": "image_generation.partial_image", "b64_json": PNG},
            {"type": "image_generation.completed", "b64_json": PNG, "size": "1x1"},
        ]
        table = ImagesSettings(url=images.url)
        async with (
            live_app(tmp_path, registry=None, images=table) as server,
            AsyncOpenAI(api_key="unused", base_url=f"{server.base_url}/v1", max_retries=0) as sdk,
        ):
            async with sdk.responses.stream(model=MODEL, input=asked, tools=tools) as stream:
                events = [event async for event in stream]
                response = await stream.get_final_response()
            shown = [event for event in events if isinstance(event, ResponseImageGenCallPartialImageEvent)]
            assert [(event.partial_image_index, event.partial_image_b64) for event in shown] == [(0, PNG)]
            image = response.output[0]
            assert isinstance(image, ImageGenerationCall)
            assert (image.result, image.size, image.revised_prompt) == (PNG, "1x1", "a cat")
            named: Any = {"type": "image_generation_call", "id": image.id}
            for kept in (image, image.model_dump(), named):
                sent: Any = [*asked, kept, {"role": "user", "content": "say so"}]
                reply = await sdk.responses.create(model=MODEL, input=sent)
                assert reply.output_text == "so"
                items = [item async for item in sdk.responses.input_items.list(reply.id, order="asc")]
                assert items[1].id == image.id
    assert len(images.asked) == 1


async def test_wait_mode_through_extra_body(live_sdk: AsyncOpenAI) -> None:
    stream = await live_sdk.responses.create(
        model=MODEL, input=call(), tools=TOOLS, stream=True, extra_body={"await_tool_outputs": True}
    )
    async for event in stream:
        if event.type == "response.created":
            response_id = event.response.id
        if event.type == "response.output_item.done" and isinstance(event.item, ResponseFunctionToolCall):
            body = {"tool_call_id": event.item.call_id, "output": "rainy"}
            await live_sdk.post(f"/responses/{response_id}/tool_outputs", body=body, cast_to=object)
    assert isinstance(event, ResponseCompletedEvent)
    assert event.response.output_text == "The tool said: rainy"


@pytest.mark.parametrize("store", [True, False], ids=["chained", "resent"])
async def test_an_approval_of_an_mcp_call(tmp_path: Path, store: bool) -> None:
    tool: ToolParam = {"type": "mcp", "server_label": "desk", "server_url": "builtin:desk"}
    async with mcp_server(seen := Seen()) as url:
        known = read_mcp_settings({"servers": {"desk": {"url": url}}}, {})
        async with (
            live_app(tmp_path, mcp=known) as server,
            AsyncOpenAI(api_key="unused", base_url=f"{server.base_url}/v1", max_retries=0) as sdk,
        ):
            asked = 'call book {"room": 3}'
            first = await sdk.responses.create(model=MODEL, input=asked, tools=[tool], store=store)
            request = first.output[-1]
            assert isinstance(request, McpApprovalRequest)
            assert (request.server_label, request.name, seen.called) == ("desk", "book", [])
            answer: Any = {
                "type": "mcp_approval_response",
                "approval_request_id": request.id,
                "approve": True,
            }
            items: Any = [answer]
            if not store:
                items = [{"role": "user", "content": asked}, *first.output, answer]
            async with sdk.responses.stream(
                model=MODEL,
                input=items,
                tools=[tool],
                store=store,
                previous_response_id=first.id if store else omit,
            ) as stream:
                async for _ in stream:
                    pass
                second = await stream.get_final_response()
    made = second.output[0]
    assert isinstance(made, McpCall)
    assert (made.approval_request_id, made.output) == (request.id, "booked 3")
    assert second.output_text == "The tool said: booked 3" and seen.called == ["book"]


# ------------------------------------------------------------------------------------------------------------
# Reading


async def test_retrieve_streamed_after_every_event(live_sdk: AsyncOpenAI) -> None:
    stream = await live_sdk.responses.create(model=MODEL, input="say one two", stream=True)
    events = [event async for event in stream]
    response_id = events[0].response.id  # type: ignore[union-attr]
    whole = [event async for event in await live_sdk.responses.retrieve(response_id, stream=True)]
    assert whole == events
    for after in range(len(events)):
        tail = await live_sdk.responses.retrieve(response_id, stream=True, starting_after=after)
        assert [event async for event in tail] == events[after + 1 :]


async def test_the_stream_helper_resumes(live_sdk: AsyncOpenAI) -> None:
    async with live_sdk.responses.stream(model=MODEL, input="say one two three", background=True) as stream:
        events = [event async for event in stream]
    response_id = (await stream.get_final_response()).id
    for after in (0, 4, len(events) - 2):
        async with live_sdk.responses.stream(response_id=response_id, starting_after=after) as resumed:
            tail = [event async for event in resumed]
            final = await resumed.get_final_response()
        assert [event.sequence_number for event in tail] == list(range(after + 1, len(events)))
        assert final.output_text == "one two three"


async def test_a_background_response_is_polled(tmp_path: Path) -> None:
    gate = Gate()
    async with (
        live_app(tmp_path, ScriptedEngine(gated(gate))) as server,
        AsyncOpenAI(api_key="unused", base_url=f"{server.base_url}/v1") as sdk,
    ):
        response = await sdk.responses.create(model=MODEL, input="hi", background=True)
        assert response.status == "queued"
        await gate.reached.wait()
        # The engine may be asked before the event that says so is durable; a client sees either.
        assert (await sdk.responses.retrieve(response.id)).status in ("queued", "in_progress")
        gate.release.set()
        while response.status in ("queued", "in_progress"):
            response = await sdk.responses.retrieve(response.id)
        assert (response.status, response.output_text) == ("completed", "one two three four")


async def test_cancel(tmp_path: Path) -> None:
    gate = Gate()
    async with (
        live_app(tmp_path, ScriptedEngine(gated(gate))) as server,
        AsyncOpenAI(api_key="unused", base_url=f"{server.base_url}/v1", max_retries=0) as sdk,
    ):
        stream = await sdk.responses.create(model=MODEL, input="hi", background=True, stream=True)
        events = []
        async for event in stream:
            events.append(event)
            if event.type == "response.output_text.delta":
                await gate.reached.wait()
                cancelled = await sdk.responses.cancel(events[0].response.id)  # type: ignore[union-attr]
        assert (cancelled.status, cancelled.output_text) == ("cancelled", "one two")
        assert events[-1].type == "response.cancelled"  # type: ignore[comparison-overlap]


async def test_delete(live_sdk: AsyncOpenAI) -> None:
    response = await live_sdk.responses.create(model=MODEL, input="say hello")
    await live_sdk.responses.delete(response.id)
    with pytest.raises(NotFoundError) as gone:
        await live_sdk.responses.retrieve(response.id)
    assert gone.value.code == "not_found" and gone.value.request_id
    with pytest.raises(BadRequestError) as chained:
        await live_sdk.responses.create(model=MODEL, input="hi", previous_response_id=response.id)
    assert chained.value.code == "previous_response_not_found"


async def test_input_items_page(live_sdk: AsyncOpenAI) -> None:
    asked: list[Any] = [{"role": "user", "content": f"message {n}"} for n in range(23)]
    response = await live_sdk.responses.create(model=MODEL, input=asked)
    for order, limit in (("asc", 10), ("desc", 5), ("asc", 100)):
        pager = live_sdk.responses.input_items.list(response.id, order=order, limit=limit)  # type: ignore[arg-type]
        said = [item.to_dict()["content"][0]["text"] async for item in pager]  # type: ignore[index]
        wanted = [f"message {n}" for n in range(23)]
        assert said == (wanted if order == "asc" else wanted[::-1])


async def test_input_tokens(live_sdk: AsyncOpenAI) -> None:
    counted = await live_sdk.responses.input_tokens.count(model=MODEL, input="say hello", tools=TOOLS)
    response = await live_sdk.responses.create(model=MODEL, input="say hello", tools=TOOLS)
    assert response.usage is not None and counted.input_tokens == response.usage.input_tokens


async def test_every_call_of_the_beta(live_sdk: AsyncOpenAI) -> None:
    """The SDK adds `?beta=true` to the paths of the stable API."""
    beta = live_sdk.beta.responses
    made = await beta.create(model=MODEL, input="say hello")
    assert made.status == "completed"
    streamed = [event.type async for event in await beta.create(model=MODEL, input="say hello", stream=True)]
    assert streamed[-1] == "response.completed"
    assert await beta.retrieve(made.id) == made
    resumed = [event.type async for event in await beta.retrieve(made.id, stream=True)]
    assert (resumed[0], resumed[-1]) == ("response.created", "response.completed")
    raw = await beta.input_items.with_raw_response.list(made.id, order="asc", limit=1)
    assert "x-antiphon-ignored" not in raw.headers
    assert [item.type async for item in beta.input_items.list(made.id)] == ["message"]
    counted = await beta.input_tokens.count(model=MODEL, input="say hello")
    assert made.usage is not None and counted.input_tokens == made.usage.input_tokens
    compacted = await beta.compact(model=MODEL, previous_response_id=made.id)
    assert compacted.output[-1].type == "compaction"
    waiting = await beta.create(model=MODEL, input="count 9999", background=True)
    assert (await beta.cancel(waiting.id)).status == "cancelled"
    await beta.delete(made.id)
    with pytest.raises(NotFoundError):
        await beta.retrieve(made.id)


# ------------------------------------------------------------------------------------------------------------
# Conversations and errors


async def test_conversations(live_sdk: AsyncOpenAI) -> None:
    conversation = await live_sdk.conversations.create(
        items=[{"type": "message", "role": "user", "content": "My name is Mark."}], metadata={"k": "v"}
    )
    response = await live_sdk.responses.create(model=MODEL, input="say hello", conversation=conversation.id)
    assert response.conversation is not None and response.conversation.id == conversation.id
    pager = live_sdk.conversations.items.list(conversation.id, order="asc", limit=1)
    items = [item async for item in pager]
    assert [item.role for item in items] == ["user", "user", "assistant"]  # type: ignore[union-attr]
    assert items[2].id == response.output[0].id
    one = await live_sdk.conversations.items.retrieve(str(items[0].id), conversation_id=conversation.id)
    assert one == items[0]
    await live_sdk.conversations.items.delete(str(items[0].id), conversation_id=conversation.id)
    added = await live_sdk.conversations.items.create(
        conversation.id, items=[{"role": "user", "content": "added"}]
    )
    assert len(added.data) == 1
    updated = await live_sdk.conversations.update(conversation.id, metadata={"k": "w"})
    assert updated.metadata == {"k": "w"}
    await live_sdk.conversations.delete(conversation.id)
    with pytest.raises(NotFoundError):
        await live_sdk.conversations.retrieve(conversation.id)


async def test_output_items_go_into_a_conversation(live_sdk: AsyncOpenAI) -> None:
    """Items that a stored response has already, added to a conversation by hand: the same items."""
    response = await live_sdk.responses.create(model=MODEL, input="think hm then say one")
    dumped: Any = [item.model_dump(exclude_none=True) for item in response.output]
    conversation = await live_sdk.conversations.create(items=dumped)
    items = [item async for item in live_sdk.conversations.items.list(conversation.id, order="asc")]
    assert [item.id for item in items] == [item.id for item in response.output]


async def test_errors_arrive_as_the_sdk_knows_them(tmp_path: Path) -> None:
    engine = ScriptedEngine(tick_s=0.05, max_running=1, max_waiting=1)
    async with (
        live_app(tmp_path, engine, max_waiting=1) as server,
        AsyncOpenAI(api_key="unused", base_url=f"{server.base_url}/v1", max_retries=0) as sdk,
    ):
        with pytest.raises(NotFoundError) as unknown:
            await sdk.responses.create(model="nobody", input="hi")
        assert unknown.value.code == "model_not_found"
        with pytest.raises(BadRequestError) as invalid:
            await sdk.responses.create(model=MODEL, input="hi", temperature=3)
        assert invalid.value.param == "temperature"
        begun = [await sdk.responses.create(model=MODEL, input="count 4", background=True) for _ in range(2)]
        async with asyncio.timeout(10):
            while engine.stats().waiting < 1:
                await asyncio.sleep(0.001)
        with pytest.raises(RateLimitError):
            await sdk.responses.create(model=MODEL, input="hi")
        patient = sdk.with_options(max_retries=3)
        assert (await patient.responses.create(model=MODEL, input="say hi")).output_text == "hi"
        for response in begun:
            assert (await sdk.responses.retrieve(response.id)).status == "completed"


async def test_chat(live_sdk: AsyncOpenAI) -> None:
    asked: list[Any] = [{"role": "user", "content": "say hello"}]
    plain = await live_sdk.chat.completions.create(model=MODEL, messages=asked)
    assert plain.choices[0].message.content == "hello"
    stream = await live_sdk.chat.completions.create(model=MODEL, messages=asked, stream=True)
    said = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
    assert said == "hello"


async def test_models(live_sdk: AsyncOpenAI) -> None:
    assert [model.id async for model in live_sdk.models.list()] == [MODEL]
