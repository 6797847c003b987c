"""The short form of the fuzzer of grammars, and that it sees what is wrong."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from engine.structured.isolation import Constraints
from tests.fuzz.crowd import Reply, Try, fault
from tests.fuzz.grammars import request, requests
from tests.fuzz.sampling import harm, served

SEED = int(os.environ.get("ANTIPHON_FUZZ_SEED", random.SystemRandom().randrange(1 << 30)))
PATIENCE_S = 60.0  # of a machine that others use too; the long form asks for 5


@pytest.mark.long
async def test_no_grammar_ends_the_server_or_fails_as_its_fault(tmp_path: Path) -> None:
    print(f"ANTIPHON_FUZZ_SEED={SEED}")
    async with served(tmp_path, PATIENCE_S, 8192) as (engine, crowd):
        await crowd.run(requests(SEED, 0, 200), 4)
        assert crowd.found.wrong == [] and crowd.found.late == []
        assert set(crowd.found.replies) == {200, 400} and crowd.found.replies.total() == 200
        assert await harm(engine, crowd) is None


async def test_the_fuzzer_sees_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*args: object) -> object:
        raise KeyError("injected")

    bodies = {
        "/v1/responses": {"input": "x", "max_output_tokens": 16},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
        "/v1/completions": {"prompt": "x", "max_tokens": 2},
    }
    async with served(tmp_path, PATIENCE_S, 8192) as (engine, crowd):
        tries = [
            Try(n, path, json.dumps({**body, "guided_regex": "[ab]"}))
            for n, (path, body) in enumerate(bodies.items())
        ]
        for each in tries:
            await crowd.send(each)
        assert crowd.found.wrong == []
        monkeypatch.setattr(Constraints, "compile", broken)
        for each in tries:
            await crowd.send(each)
        assert len(crowd.found.wrong) == 3 and all("[ab]" in each for each in crowd.found.wrong)
        monkeypatch.undo()
        assert await harm(engine, crowd) is None


def refusal(message: str, param: str | None) -> str:
    return json.dumps({"error": {"message": message, "type": "t", "param": param, "code": "c"}})


@pytest.mark.parametrize(
    ("status", "text", "said"),
    [
        (500, "{}", "500"),
        (404, refusal("Not here.", "a"), "404"),
        (400, "no JSON", "no JSON"),
        (400, '{"error": {"message": "No code."}}', "400"),
        (400, refusal("It is bad.", None), "without its field"),
        (400, refusal("It cannot be compiled (TypeError).", "a"), "own failure"),
        (400, refusal("", "a"), "says nothing"),
        (200, '{"status": "failed", "error": {"code": "server_error", "message": "m"}}', "it failed"),
        (200, "{", "no JSON"),
    ],
)
def test_what_is_wrong_with_a_reply(status: int, text: str, said: str) -> None:
    assert said in (fault(Reply(status, "application/json", text, 0.1)) or "")


def test_a_stream_without_an_end_is_wrong() -> None:
    whole = 'data: {"choices": []}\n\ndata: [DONE]\n\n'
    assert fault(Reply(200, "text/event-stream", whole, 0.1)) is None
    assert "no end" in (fault(Reply(200, "text/event-stream", whole[:24], 0.1)) or "")


def test_a_seed_fixes_every_request() -> None:
    assert [request(7, number) for number in range(50)] == list(requests(7, 0, 50))
    assert request(7, 1) != request(8, 1)
