"""Compaction: by a threshold, by its trigger, and by its endpoint; what it leaves of a conversation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import GenerateRequest, Say, ScriptedEngine
from server.runs.planning.compaction import ASK
from tests.support.running import http_client, running_app
from tests.support.talk import Api, prompts, text

TRIGGER = {"type": "compaction_trigger"}
MANAGED = [{"type": "compaction", "compact_threshold": 1000}]
SUMMARY = "The user is Mark, who likes teal. " + "More of it. " * 12


def summarising(request: GenerateRequest, prompt: str) -> Iterator[Say]:
    """Summarises where it is asked to, and otherwise says how long its prompt is."""
    asked = prompt.rstrip().removesuffix("<|im_start|>assistant").rstrip().endswith(ASK + "<|im_end|>")
    yield Say(SUMMARY if asked else f"{len(request.prompt_ids)} tokens")


async def test_trigger_makes_one_item(tmp_path: Path) -> None:
    engine = ScriptedEngine(summarising)
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        first = await api.create("My name is Mark.")
        stream = await api.stream([TRIGGER], previous_response_id=first["id"])
        print(stream.types)
        [item] = stream.response["output"]
        print(item, stream.response["usage"])
        second = await api.create("What is my name?", previous_response_id=stream.response["id"])
        print(prompts(engine)[-1])
        print(text(second))
