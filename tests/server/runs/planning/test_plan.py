"""The plan: what is pinned at a run's start, what of the past still counts, and what fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import Prompt, PromptTooLong, RenderInput, ScriptedEngine, Shape
from server.errors import ApiError
from server.limits import Charge
from server.mcp_servers import Approvals
from server.model_registry import Models
from server.prompting.tool_offer import Offer
from server.runs.planning.functions import Functions
from server.runs.planning.history import check_calls, drop_oldest, replayable
from server.runs.planning.pasts import read_items
from server.runs.planning.plan import RunPlan, fit
from storage import HistoryItem, StoredItem
from tests.support.running import http_client, running_app
from tests.support.talk import WEATHER, Api, call
from tests.support.wire import Json


def user(n: int) -> Json:
    return {
        "type": "message",
        "id": f"m{n}",
        "role": "user",
        "content": [{"type": "input_text", "text": "x" * n}],
    }


def made(call_id: str, status: str = "completed") -> Json:
    return {
        "type": "function_call", "id": f"fc_{call_id}", "call_id": call_id, "name": "f", "arguments": "{}",
        "status": status,
    }  # fmt: skip


def answered(call_id: str) -> Json:
    return {"type": "function_call_output", "id": f"fco_{call_id}", "call_id": call_id, "output": "x"}


def history(*entries: tuple[Json, str | None]) -> list[HistoryItem]:
    return [
        HistoryItem(StoredItem(item["id"], item["type"], orjson.dumps(item)), "resp_1", status, "out")
        for item, status in entries
    ]


# ------------------------------------------------------------------------------------------------------------
# The past


@pytest.mark.parametrize("status", ["cancelled", "failed", "incomplete", "in_progress"])
def test_unanswered_calls_of_a_response_cut_short_are_left_out(status: str) -> None:
    past = read_items(
        history((user(1), status), (made("a"), status), (made("b"), status), (answered("a"), "completed"))
    )
    assert [item["id"] for item in replayable(past, ())] == ["m1", "fc_a", "fco_a"]
    assert [item["id"] for item in replayable(past, [answered("b")])] == ["m1", "fc_a", "fc_b", "fco_a"]


@pytest.mark.parametrize("status", ["completed", None])
def test_unanswered_calls_of_a_completed_response_stay(status: str | None) -> None:
    past = read_items(history((made("a"), status)))
    assert replayable(past, ()) == [made("a")]
    with pytest.raises(ApiError, match="function call a"):
        check_calls(replayable(past, ()), [user(1)])
    check_calls(replayable(past, ()), [answered("a")])


def test_an_output_needs_its_call() -> None:
    with pytest.raises(ApiError) as orphan:
        check_calls([], [user(1), answered("a")])
    assert orphan.value.param == "input[1].call_id"
    check_calls([], [made("a"), answered("a")])


def test_a_call_has_one_output() -> None:
    other = {**answered("a"), "id": "fco_other", "output": "another"}
    for history, new, place in (
        ([], [made("a"), answered("a"), answered("a")], 2),
        ([], [made("a"), answered("a"), other], 2),
        ([made("a")], [answered("a"), answered("a")], 1),
        ([made("a"), answered("a")], [user(1), other], 1),
        ([made("a"), answered("a")], [answered("a"), answered("a")], 1),
    ):
        with pytest.raises(ApiError, match="Call 'a' is answered twice") as twice:
            check_calls(history, new)
        assert (twice.value.code, twice.value.param) == ("invalid_value", f"input[{place}].call_id")
    check_calls([made("a"), answered("a")], [{**answered("a"), "id": "fco_again"}])  # a client repeats itself
    check_calls([], [made("a"), answered("a")] * 2)  # or uses its ids again, or sends its history again
    check_calls([made("a"), answered("a")], [made("a"), answered("a"), user(1)])


def test_an_output_is_of_the_kind_of_its_call() -> None:
    shell: Json = {"type": "shell_call", "id": "sh_a", "call_id": "a", "action": {"commands": ["ls"]}}
    wrong: Json = {"type": "custom_tool_call_output", "id": "ctco_a", "call_id": "a", "output": "x"}
    right: Json = {"type": "shell_call_output", "id": "sho_a", "call_id": "a", "output": []}
    for history, new, place in (([shell], [wrong], 0), ([], [made("a"), right], 1), ([], [shell, wrong], 1)):
        with pytest.raises(ApiError, match="does not answer this call") as other:
            check_calls(history, new)
        assert other.value.param == f"input[{place}].type"
    check_calls([shell], [right])
    check_calls([shell], [answered("a")])  # as older clients answer it


@given(st.lists(st.sampled_from(["u", "c", "o"]), max_size=12), st.integers(1, 12))
def test_what_is_dropped_takes_its_outputs_along(kinds: list[str], count: int) -> None:
    items: list[Json] = []
    for n, kind in enumerate(kinds):
        items.append(user(n) if kind == "u" else made(str(n // 2)) if kind == "c" else answered(str(n // 2)))
    kept = drop_oldest(items, count)
    calls = {item["call_id"] for item in kept if item["type"] == "function_call"}
    assert all(item["call_id"] in calls for item in kept if item["type"] == "function_call_output")
    assert [item for item in items[count:] if item["type"] != "function_call_output"] == [
        item for item in kept if item["type"] != "function_call_output"
    ]


def test_where_nothing_is_dropped_all_stays() -> None:
    # As an output does in a conversation out of which its call was taken.
    assert drop_oldest([answered("a"), user(1)], 0) == [answered("a"), user(1)]


# ------------------------------------------------------------------------------------------------------------
# The fit


class Counting(ScriptedEngine):
    """An engine whose prompts have a token per character of their messages."""

    def __init__(self, max_model_len: int) -> None:
        super().__init__(max_model_len=max_model_len)
        self.renders = 0
        self.shown: dict[int, list[str]] = {}

    async def render(self, messages: RenderInput) -> Prompt:
        self.renders += 1
        shown = [message["content"] for message in messages.messages if message["content"]]
        self.shown[sum(map(len, shown))] = shown
        return Prompt((1,) * sum(len(message["content"]) for message in messages.messages))


PLAN = RunPlan(
    response_id="resp_1",
    owner="o",
    model="m",
    fingerprint="f",
    secret="00",
    created_at=1,
    store=True,
    background=False,
    previous_response_id=None,
    conversation_id=None,
    instructions=None,
    tools=[],
    tool_choice="auto",
    parallel_tool_calls=True,
    max_tool_calls=None,
    sampling={"temperature": 0.5, "logit_bias": {"7": 1.5}},
    seed=1 << 62,
    max_output_tokens=None,
    logprobs=False,
    num_dropped=0,
    template_kwargs={"a": [1, None]},
    cache_salt="",
    waits=False,
    tool_timeout_s=1.0,
)


def result(number: int, text: str) -> Json:
    """A call that the server has made, and what came of it."""
    return {
        "type": "mcp_call", "id": f"mcp_{number}", "server_label": "s", "name": "t", "arguments": "{}",
        "status": "completed", "output": text, "error": None, "approval_request_id": None,
    }  # fmt: skip


async def shown(items: Sequence[Json], limit: int, **changed: Any) -> tuple[int, list[str]]:
    """How many items a prompt of them leaves out, and what it says."""
    engine = Counting(limit)
    await engine.start()
    models = Models()
    models.add(engine)
    plan = replace(PLAN, **changed)
    dropped, prompt = await fit(plan, models.get(None), items, Offer(), Functions((), {}))
    return dropped, engine.shown[len(prompt.ids)]


async def fitted(sizes: Sequence[int], limit: int, *, truncate: bool) -> tuple[int, int, int]:
    engine = Counting(limit)
    await engine.start()
    models = Models()
    models.add(engine)
    items = [user(size) for size in sizes]
    plan = replace(PLAN, truncates=truncate)
    dropped, prompt = await fit(plan, models.get(None), items, Offer(), Functions((), {}))
    return dropped, len(prompt.ids), engine.renders


async def test_what_fits_is_left_whole() -> None:
    assert await fitted([10, 20], 100, truncate=False) == (0, 30, 1)
    assert await fitted([10, 20], 100, truncate=True) == (0, 30, 1)
    assert await fitted([99], 100, truncate=False) == (0, 99, 1), "one token of room is enough"


async def test_truncation_drops_no_more_than_it_must() -> None:
    dropped, length, renders = await fitted([10] * 40, 100, truncate=True)
    assert (dropped, length) == (32, 80), "an eighth is left for the answer"
    assert renders <= 9, "it halves, it does not count down"


async def test_the_newest_item_always_stays() -> None:
    assert (await fitted([50, 95], 100, truncate=True))[:2] == (1, 95)
    with pytest.raises(PromptTooLong) as long:
        await fitted([50, 120], 100, truncate=True)
    assert (long.value.num_tokens, long.value.limit) == (120, 100)
    with pytest.raises(PromptTooLong):
        await fitted([100], 100, truncate=False)


LONG = "[cut: the output had 10000 characters]"


async def test_results_are_cut_to_what_leaves_room_for_an_answer() -> None:
    items = [user(100), result(1, "a" * 10_000), result(2, "b" * 10_000), result(3, "c" * 30)]
    assert await shown(items, 32_768) == (0, ["x" * 100, "a" * 10_000, "b" * 10_000, "c" * 30])
    cut = ["x" * 100, f"{'a' * 512}\n{LONG}", f"{'b' * 512}\n{LONG}", "c" * 30]
    assert await shown(items, 2048) == (0, cut)
    assert await shown([*items, user(800)], 2048) == (
        0,
        ["x" * 100, f"{'a' * 256}\n{LONG}", f"{'b' * 256}\n{LONG}", "c" * 30, "x" * 800],
    )
    more = ["x" * 100, f"{'a' * 4096}\n{LONG}"]
    assert await shown(items[:2], 4400, max_output_tokens=20) == (0, more), "a short answer needs less room"


async def test_a_result_that_was_cut_before_keeps_its_length() -> None:
    was_cut = f"{'a' * 4000}\n[cut: the output had 700000 characters]"
    said = f"{'a' * 512}\n[cut: the output had 700000 characters]"
    assert (await shown([result(1, was_cut)], 1024))[1][-1] == said


async def test_what_a_client_says_is_never_cut() -> None:
    with pytest.raises(PromptTooLong):
        await shown([user(9), made("a"), {**answered("a"), "output": "o" * 10_000}], 2048)
    with pytest.raises(PromptTooLong):
        await shown([user(10_000), result(1, "a" * 10_000)], 2048)


async def test_truncation_leaves_items_out_before_it_cuts_results() -> None:
    items = [user(100), result(1, "a" * 10_000), user(50)]
    assert await shown(items, 2048, truncates=True) == (2, ["x" * 50])
    kept = await shown([user(3000), result(1, "a" * 10_000)], 2048, truncates=True)
    assert kept == (1, [f"{'a' * 1024}\n{LONG}"])


# ------------------------------------------------------------------------------------------------------------
# What is pinned


def test_a_plan_comes_back_from_storage_as_it_was() -> None:
    assert RunPlan.load(PLAN.dump()) == PLAN
    charged = replace(PLAN, charge=Charge(5, {"a": (1, 2)}), approvals=Approvals("always", ("s",)))
    assert RunPlan.load(charged.dump()).approvals == charged.approvals
    assert RunPlan.load(charged.dump()).charge == Charge(5, {"a": [1, 2]})  # type: ignore[dict-item]


def test_an_older_version_is_told_only_what_is_used() -> None:
    said = orjson.loads(PLAN.dump())
    assert said.keys() == {
        each.name for each in fields(RunPlan) if MISSING is each.default is each.default_factory
    }
    assert orjson.loads(replace(PLAN, batch=True).dump()) == {**said, "batch": True}


def test_what_a_newer_version_says_besides_is_named() -> None:
    said = orjson.loads(replace(PLAN, charge=Charge(5)).dump())
    said["curfew"] = said["charge"]["currency"] = 1
    plan = RunPlan.load(orjson.dumps(said))
    assert plan.newer == ("RunPlan.curfew", "Charge.currency")
    assert replace(plan, newer=()) == replace(PLAN, charge=Charge(5))
    assert RunPlan.load(plan.dump()) == plan


async def test_a_stored_run_has_its_plan(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        asked = {"tools": [WEATHER], "temperature": 0.5, "cache_salt": "s", "max_output_tokens": 99}
        response = await Api(client).create(call(), **asked)
        stored = await server.context.storage.get_response("local", response["id"])
        plan = RunPlan.load(stored.plan)
        [request] = engine.requests
        assert (plan.owner, plan.cache_salt) == (request.owner, request.cache_salt) == ("local", "s")
        assert plan.seed == request.sampling.seed, "every run has a seed, and it is kept"
        assert plan.fingerprint == engine.info.fingerprint
        assert request.sampling.max_tokens == 99 and request.sampling.temperature == 0.5


async def test_runs_draw_different_seeds_unless_they_are_given_one(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        for body in ({}, {}, {"seed": 7}, {"seed": 7}):
            await api.create("random 5", **body)
        seeds = [request.sampling.seed for request in engine.requests]
        assert seeds[0] != seeds[1] and seeds[2:] == [7, 7]


class Told(ScriptedEngine):
    """An engine that remembers which form of the answer its template was told."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[Shape | None] = []

    async def render(self, messages: RenderInput) -> Prompt:
        self.answers.append(messages.answer)
        return await super().render(messages)


async def test_the_template_is_told_the_form_that_was_asked_for(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "n", "schema": schema}
    engine = Told()
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        await api.create("echo", text={"format": form})
        await api.create("echo")
        asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        body = {"messages": [{"role": "user", "content": "echo"}], "response_format": asked}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    first, plain, chat = engine.answers
    assert first == chat and plain is None and first is not None
    assert orjson.loads(first.source)["properties"] == {"a": {"const": 1}}
