"""What chat and text completions can be asked for besides an answer: what ended it, ids, scores of the
prompt, the usage so far, special tokens, templates and documents."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import torch

from engine import GenerateRequest, LocalEngine, Say, ScriptedEngine, Wait
from server.stateless import choices, live_completions
from tests.support import wire
from tests.support.checkpoints import make_checkpoint, oracle_logits
from tests.support.running import Running, http_client, running_app

Json = dict[str, Any]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def asking(text: str, **fields: Any) -> Json:
    return {"messages": [{"role": "user", "content": text}], **fields}


def scripted(running: Running) -> ScriptedEngine:
    engine = running.context.models.get(None).engine
    assert isinstance(engine, ScriptedEngine)
    return engine


def latest(running: Running) -> GenerateRequest:
    return scripted(running).requests[-1]


async def whole(client: httpx.AsyncClient, path: str, body: Json) -> Json:
    reply = await client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


async def streamed(client: httpx.AsyncClient, path: str, body: Json) -> list[Json]:
    return wire.chunks((await client.post(path, json={**body, "stream": True})).content)


async def refused(client: httpx.AsyncClient, path: str, body: Json) -> Json:
    reply = await client.post(path, json=body)
    assert reply.status_code == 400, reply.text
    return wire.validate_error(reply.json())


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("include", [False, True])
async def test_what_ended_it(client: httpx.AsyncClient, path: str, include: bool) -> None:
    def body(**fields: Any) -> Json:
        text = "say one two three"
        asked = asking(text) if path == CHAT else {"prompt": text, "max_tokens": 50}
        return {**asked, "include_stop_str_in_output": include, **fields}

    def said(choice: Json) -> str:
        return str(choice["message"]["content"] if path == CHAT else choice["text"])

    for fields, stop, text in (
        ({"stop": [" t"]}, " t", "one" + " t" * include),
        ({"stop_token_ids": [ord("w")]}, ord("w"), "one t" + "w" * include),
        ({}, None, "one two three"),
        ({"max_tokens": 3}, None, "one"),
    ):
        (choice,) = (await whole(client, path, body(**fields)))["choices"]
        assert (choice["stop_reason"], said(choice)) == (stop, text)
        chunks = await streamed(client, path, body(**fields))
        name = "CreateChatCompletionStreamResponse" if path == CHAT else "CreateCompletionResponse"
        (folded,) = wire.check_chunks(chunks, name)
        assert (folded["stop_reason"], said(folded)) == (stop, text)
        early = [part for chunk in chunks for part in chunk["choices"] if part["finish_reason"] is None]
        assert all("stop_reason" not in part for part in early)


async def test_responses_keep_stop_strings_too(client: httpx.AsyncClient) -> None:
    body = {"input": "say one two three", "stop": [" t"], "include_stop_str_in_output": True}
    made = (await client.post("/v1/responses", json=body)).json()
    assert made["output"][-1]["content"][0]["text"] == "one t"


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_usage_so_far_in_every_chunk(client: httpx.AsyncClient, path: str) -> None:
    asked = asking("count 5") if path == CHAT else {"prompt": "count 5", "max_tokens": 50}
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await streamed(client, path, {**asked, "n": 2, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] < counts[-1] and not chunks[-1]["choices"]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {chunks[-1]["usage"]["prompt_tokens"]}
    reply = await client.post(
        path, json={**asked, "stream": True, "stream_options": {"continuous_usage_stats": True}}
    )
    assert reply.headers["x-antiphon-ignored"] == "stream_options.continuous_usage_stats"


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_chunks_are_padded(client: httpx.AsyncClient, path: str) -> None:
    """All chunks with a part of an answer have lengths that tell next to nothing of it."""
    asked = asking("say one two three") if path == CHAT else {"prompt": "say one two three", "max_tokens": 50}
    options = {"stream_options": {"include_obfuscation": True, "include_usage": True}}
    reply = await client.post(path, json={**asked, **options, "stream": True})
    assert "x-antiphon-ignored" not in reply.headers
    *frames, usage, done = [frame.removeprefix(b"data: ") for frame in reply.content.split(b"\n\n")[:-1]]
    assert {len(frame) % 32 for frame in frames} == {0} and done == b"[DONE]"
    chunks = [orjson.loads(frame) for frame in frames]
    assert all(0 < len(chunk.pop("obfuscation")) <= 32 for chunk in chunks)
    assert "obfuscation" not in orjson.loads(usage)
    plain = await streamed(client, path, asked)

    def parts(chunks: list[Json]) -> list[Any]:
        return [chunk["choices"] for chunk in chunks]

    assert parts(chunks) == parts(plain)


async def test_chat_tells_token_ids(client: httpx.AsyncClient, server_app: Running) -> None:
    body = asking("think hm so it is", return_token_ids=True, n=2)
    full = await whole(client, CHAT, body)
    request = latest(server_app)
    assert full["prompt_token_ids"] == list(request.prompt_ids)
    engine = scripted(server_app)
    for choice in full["choices"]:
        text = await engine.detokenize(choice["token_ids"])
        assert text.endswith("<|im_end|>") and choice["message"]["content"] in text
    assert sum(len(choice["token_ids"]) for choice in full["choices"]) == full["usage"]["completion_tokens"]
    chunks = await streamed(client, CHAT, body)
    assert chunks[0]["prompt_token_ids"] == full["prompt_token_ids"]
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    for index, choice in enumerate(full["choices"]):
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == index]
        assert [token_id for part in parts for token_id in part["token_ids"]] == choice["token_ids"]
    plain = await whole(client, CHAT, asking("say hi"))
    assert "prompt_token_ids" not in plain and "token_ids" not in plain["choices"][0]


async def test_chat_names_tokens_by_id(client: httpx.AsyncClient) -> None:
    body = asking("say ab", logprobs=True, top_logprobs=2, return_tokens_as_token_ids=True)
    (choice,) = (await whole(client, CHAT, body))["choices"]
    shown = choice["logprobs"]["content"]
    assert [each["token"] for each in shown] == [f"token_id:{ord(char)}" for char in "ab"]
    assert all(top["token"].startswith("token_id:") for each in shown for top in each["top_logprobs"])


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_scores_of_the_prompt(client: httpx.AsyncClient, server_app: Running, path: str) -> None:
    asked = asking("say ab") if path == CHAT else {"prompt": "say ab"}
    full = await whole(client, path, {**asked, "prompt_logprobs": 1, "n": 2})
    scored = [full] if path == CHAT else full["choices"]
    ids = latest(server_app).prompt_ids
    for each in scored:
        first, *rest = each["prompt_logprobs"]
        assert first is None and len(rest) == len(ids) - 1
        for token_id, entry in zip(ids[1:], rest, strict=True):
            assert entry[str(token_id)]["logprob"] == -0.5 and entry[str(token_id)]["rank"] == 1
            assert entry[str(token_id)]["decoded_token"] == scripted(server_app).token_text(token_id)
    asked_for = [request.sampling.prompt_logprobs for request in scripted(server_app).requests]
    assert asked_for == [1, None], "one of the choices has the prompt scored, not each"
    error = await refused(client, path, {**asked, "prompt_logprobs": 1, "stream": True})
    assert error["param"] == "prompt_logprobs"
    for bad in (-1, 21, True, "1"):
        assert (await refused(client, path, {**asked, "prompt_logprobs": bad}))["param"] == "prompt_logprobs"


@pytest.mark.parametrize("best_of", [None, 3])
async def test_every_choice_shows_the_scores_that_one_has_found(
    client: httpx.AsyncClient, server_app: Running, best_of: int | None
) -> None:
    body = {"prompt": ["say ab", "say cde"], "echo": True, "logprobs": 1, "n": 2, "max_tokens": 2}
    if best_of is not None:
        found = (await whole(client, TEXT, {**body, "best_of": best_of}))["choices"]
        shown = [choice["logprobs"]["token_logprobs"] for choice in found]
    else:
        shown = [[], [], [], []]
        for chunk in await streamed(client, TEXT, body):
            for part in chunk["choices"]:
                shown[part["index"]] += part["logprobs"]["token_logprobs"]
    for text, logprobs in zip(("say ab", "say ab", "say cde", "say cde"), shown, strict=True):
        assert logprobs[: len(text)] == [None, *[-0.5] * (len(text) - 1)]
    asked_for = [request.sampling.prompt_logprobs for request in scripted(server_app).requests]
    assert sorted(asked_for, key=str) == [1, 1, *[None] * (2 if best_of is None else 4)]


async def test_a_reply_has_a_bounded_number_of_scores(
    client: httpx.AsyncClient, server_app: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    body: Json = {"prompt": [[65] * 4, [66] * 6], "max_tokens": 1, "n": 2}  # 20 tokens of prompts are shown
    asked: list[tuple[str, Json, str, int]] = [
        (TEXT, {**body, "prompt_logprobs": 1}, "prompt_logprobs", 40),
        (TEXT, {**body, "logprobs": 2, "echo": True}, "logprobs", 60),
        (TEXT, {**body, "logprobs": 2, "echo": True, "prompt_logprobs": 3}, "prompt_logprobs", 80),
    ]
    await whole(client, CHAT, asking("say ab"))
    num_tokens = len(latest(server_app).prompt_ids)
    asked.append((CHAT, asking("say ab", prompt_logprobs=0, n=2), "prompt_logprobs", num_tokens))
    for path, sent, param, needed in asked:
        monkeypatch.setattr(choices, "MAX_SCORES", needed)
        await whole(client, path, sent)
        monkeypatch.setattr(choices, "MAX_SCORES", needed - 1)
        error = await refused(client, path, sent)
        assert error["param"] == param and f"the {needed - 1} that one reply may have" in error["message"]
    await whole(client, TEXT, {**body, "logprobs": 2})  # of tokens of the answer alone


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_replies_at_once_have_a_bounded_number_of_scores_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    release, reached = asyncio.Event(), asyncio.Event()

    def script(request: GenerateRequest, prompt: str) -> Iterator[Say | Wait]:
        yield Say("hi")
        yield Wait(release, reached)

    asked = asking("say ab") if path == CHAT else {"prompt": "say ab"}
    scored = {**asked, "prompt_logprobs": 1}
    engine = ScriptedEngine(script=script)
    async with running_app(tmp_path, engine) as running, http_client(running) as client:
        first = asyncio.create_task(whole(client, path, scored))
        await reached.wait()
        monkeypatch.setattr(live_completions, "MAX_SCORES", 2 * 2 * len(latest(running).prompt_ids) - 1)
        async with asyncio.timeout(30):  # it is refused at once
            reply = await client.post(path, json=scored)
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
        assert wire.validate_error(reply.json())["code"] == "queue_full"
        assert len(engine.requests) == 1, "it has cost the engine nothing"
        release.set()
        await whole(client, path, asked)
        await first
        await whole(client, path, scored)


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_special_tokens_are_shown(client: httpx.AsyncClient, path: str) -> None:
    asked = asking("think hm so") if path == CHAT else {"prompt": "think hm so", "max_tokens": 99}
    (plain,) = (await whole(client, path, asked))["choices"]
    body = {**asked, "skip_special_tokens": False, "include_stop_str_in_output": True}
    (shown,) = (await whole(client, path, body))["choices"]
    said = shown["message"]["content"] if path == CHAT else shown["text"]
    assert "<think>" in said and said.endswith("<|im_end|>")
    if path == CHAT:
        assert "reasoning" in plain["message"] and "reasoning" not in shown["message"]


async def test_a_chat_answer_echoes_what_it_goes_on_with(client: httpx.AsyncClient) -> None:
    turns = [{"role": "user", "content": "say hi"}, {"role": "assistant", "content": "Once upon"}]
    body = {"messages": turns, "echo": True, "continue_final_message": True}
    (choice,) = (await whole(client, CHAT, body))["choices"]
    (plain,) = (await whole(client, CHAT, {**body, "echo": False}))["choices"]
    assert choice["message"]["content"] == "Once upon" + plain["message"]["content"]
    (folded,) = wire.check_chunks(await streamed(client, CHAT, body), "CreateChatCompletionStreamResponse")
    assert folded["message"]["content"] == choice["message"]["content"]
    reply = await client.post(CHAT, json=asking("say hi", echo=True))
    assert reply.headers["x-antiphon-ignored"] == "echo"


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_prompt_is_cut_from_the_left(
    client: httpx.AsyncClient, server_app: Running, path: str
) -> None:
    asked = asking("say ab") if path == CHAT else {"prompt": "say ab", "echo": True}
    await whole(client, path, asked)
    prompt = tuple(latest(server_app).prompt_ids)
    full = await whole(client, path, {**asked, "truncate_prompt_tokens": 4})
    assert tuple(latest(server_app).prompt_ids) == prompt[-4:]
    assert full["usage"]["prompt_tokens"] == 4
    if path == TEXT:
        assert full["choices"][0]["text"].startswith("y ab")
    assert (await refused(client, path, {**asked, "truncate_prompt_tokens": 0}))["param"] == (
        "truncate_prompt_tokens"
    )


async def test_a_template_of_the_request_needs_a_setting(client: httpx.AsyncClient, tmp_path: Path) -> None:
    template = "{% for message in messages %}[{{ message.content }}]{% endfor %}{{ documents[0].text }}"
    body = asking("say hi", chat_template=template, documents=[{"title": "a", "text": "doc"}])
    assert (await refused(client, CHAT, body))["param"] == "chat_template"
    tokenized = await client.post("/tokenize", json=body)
    assert "chat_template" in tokenized.headers["x-antiphon-ignored"], "nor is it rendered elsewhere"
    (tmp_path / "trusting").mkdir()
    async with (
        running_app(tmp_path / "trusting", trust_request_chat_template=True) as running,
        http_client(running) as trusting,
    ):
        await whole(trusting, CHAT, body)
        prompt = await scripted(running).detokenize(latest(running).prompt_ids)
        assert prompt == "[say hi]doc"
        for wrong in ("{% for %}", "{{ raise_exception('no') }}", "{{ messages.__class__.mro() }}"):
            error = await refused(trusting, CHAT, asking("say hi", chat_template=wrong))
            assert error["param"] == "chat_template", wrong
        assert (await trusting.post(CHAT, json=asking("say hi"))).status_code == 200


async def test_documents_that_no_template_reads_are_named(client: httpx.AsyncClient) -> None:
    reply = await client.post(CHAT, json=asking("say hi", documents=[{"text": "a"}]))
    assert reply.headers["x-antiphon-ignored"] == "documents"
    assert (await refused(client, CHAT, asking("say hi", documents=["a"])))["param"] == "documents[0]"


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_words_cannot_be_banned_everywhere(client: httpx.AsyncClient, path: str) -> None:
    asked = asking("say hi") if path == CHAT else {"prompt": "say hi"}
    assert (await refused(client, path, {**asked, "bad_words": ["hi"]}))["param"] == "bad_words"
    for bad in ([""], "hi", ["x" * 65], [1], ["a"] * 129):
        error = await refused(client, path, {**asked, "bad_words": bad})
        assert error["param"].startswith("bad_words")
    assert (await client.post(path, json={**asked, "bad_words": []})).status_code == 200


# ------------------------------------------------------------------------------------------------------------
# With a model


async def test_scores_of_a_prompt_are_those_of_a_forward_pass(tmp_path: Path) -> None:
    """As evaluations ask for them: echo, log probabilities, no new token; warm caches change nothing."""
    (tmp_path / "model").mkdir()
    folder = make_checkpoint("qwen3", tmp_path / "model")
    engine = LocalEngine(folder, num_blocks=300, max_num_batched_tokens=64, num_threads=1)
    (tmp_path / "data").mkdir()
    async with running_app(tmp_path / "data", engine) as running, http_client(running) as client:
        ids = list(b"The cat sat on the mat, and the cat sat on the mat again, said the cat.")
        logits = oracle_logits(folder, tuple(ids))
        expected = torch.log_softmax(torch.as_tensor(logits).float(), -1)
        await whole(client, TEXT, {"prompt": ids, "max_tokens": 8})  # its KV is cached now
        for n in (1, 3):
            body = {"prompt": ids, "echo": True, "logprobs": 5, "prompt_logprobs": 2, "n": n}
            for choice in (await whole(client, TEXT, {**body, "max_tokens": 0}))["choices"]:
                shown = choice["logprobs"]["token_logprobs"]
                assert shown[0] is None and len(shown) == len(ids)
                for at, value in enumerate(shown[1:]):
                    assert math.isclose(value, expected[at, ids[at + 1]].item(), abs_tol=1e-4)
                for at, entry in enumerate(choice["prompt_logprobs"][1:]):
                    best = expected[at].topk(2)
                    ranks = {entry[str(token_id)]["rank"] for token_id in best.indices.tolist()}
                    assert ranks == {1, 2}
                    own = entry[str(ids[at + 1])]["logprob"]
                    assert math.isclose(own, expected[at, ids[at + 1]].item(), abs_tol=1e-4)


async def test_a_model_does_not_say_what_it_must_not(tmp_path: Path) -> None:
    engine = LocalEngine(Path("engine/tiny/checkpoint"), num_blocks=300, num_threads=1)
    async with running_app(tmp_path, engine) as running, http_client(running) as client:
        asked = asking("My name is Mark. What is my name?", temperature=0)
        plain = (await whole(client, CHAT, asked))["choices"][0]["message"]["content"]
        words = [plain[:4], "Mark", "mark"]
        for path, body in (
            (CHAT, {**asked, "bad_words": words, "n": 2}),
            (TEXT, {"prompt": "Hello", "max_tokens": 40, "bad_words": words, "temperature": 1.5, "n": 4}),
        ):
            for choice in (await whole(client, path, body))["choices"]:
                said = orjson.dumps(choice.get("message", choice.get("text"))).decode()
                assert not [word for word in words if word in said]
        error = await refused(
            client, CHAT, {**asked, "bad_words": ["a"], "use_beam_search": True, "best_of": 2}
        )
        assert error["param"] == "bad_words"
