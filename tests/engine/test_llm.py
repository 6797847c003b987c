"""`LLM`: batches of prompts without a server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from engine import (
    LLM,
    EngineDead,
    GenerateRequest,
    LoadError,
    Options,
    PromptTooLong,
    RequestFailed,
    ScriptedEngine,
)
from engine.llm import IN_FLIGHT

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(max_model_len=4096)


@pytest.fixture(scope="module")
def llm(engine: ScriptedEngine) -> Iterator[LLM]:
    """One for all tests, as a program would have."""
    with LLM(engine) as llm:
        yield llm


def say(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_results_come_in_the_order_of_the_prompts_however_many_there_are(llm: LLM) -> None:
    count = 2 * IN_FLIGHT + 7  # more than the engine takes at once
    results = llm.generate([f"say {number}" for number in range(count)])
    assert [result.text for result in results] == [str(number) for number in range(count)]
    assert {result.finish for result in results} == {"stop"}


def test_a_prompt_is_a_text_or_token_ids_and_one_may_come_alone(llm: LLM) -> None:
    (alone,) = llm.generate("say hello")
    (ids,) = llm.generate([alone.prompt_ids])
    assert alone.text == ids.text == "hello" and alone.prompt_ids == ids.prompt_ids
    assert llm.generate([]) == []


def test_each_prompt_may_have_options_of_its_own(llm: LLM) -> None:
    cut, whole = llm.generate(["count 9", "count 9"], [Options(stop=" 4"), Options()])
    assert (cut.text, cut.stop) == ("1 2 3", " 4") and whole.text.endswith("9")
    (short,) = llm.generate("count 9", Options(max_tokens=3, logprobs=0))
    assert short.finish == "length" and len(short.token_ids) == len(short.logprobs) == 3
    with pytest.raises(ValueError, match="1 options for 2 prompts"):
        llm.generate(["a", "b"], [Options()])


def test_a_seed_makes_an_answer_that_does_not_depend_on_its_place(llm: LLM) -> None:
    first, _, third = llm.generate(["random 8", "say x", "random 8"], Options(seed=5))
    assert first.text == third.text
    again, other = llm.generate(["random 8", "random 8"])
    assert len({first.text, again.text, other.text}) == 3  # without one it is drawn for each


def test_what_fails_is_a_result_and_the_others_go_on(llm: LLM) -> None:
    prompts = ["say a", "tick 1\nsay b\nfail the dog ate it", "x" * 5000, [], "say z"]
    a, failed, long, empty, z = llm.generate(prompts)
    assert (a.text, z.text) == ("a", "z") and a.error is None
    assert isinstance(failed.error, RequestFailed) and "dog" in str(failed.error)
    assert failed.text.startswith("b") and failed.finish is None  # what came before stays
    assert isinstance(long.error, PromptTooLong)
    assert empty.text == "You said: "


def test_a_shape_is_enforced(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    asked = [
        Options(json_schema=schema),
        Options(json_schema=json.dumps(schema)),
        Options(regex="[a-c]{3}"),
        Options(choice=["yes", "no"]),
        Options(grammar='start: "left" | "right"'),
    ]
    first, second, regex, choice, grammar = llm.generate(["?"] * 5, asked)
    assert set(json.loads(first.text)) == set(json.loads(second.text)) == {"n"}
    assert (
        set(regex.text) <= set("abc") and choice.text in ("yes", "no") and grammar.text in ("left", "right")
    )
    (refused,) = llm.generate("?", Options(regex="("))
    assert refused.error is not None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"regex": "a", "choice": ["a"]}, "regex and choice"),
        ({"json_schema": {}, "stop": "x"}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Options(**options)


def test_a_schema_is_an_object(llm: LLM) -> None:
    with pytest.raises(ValueError, match="not an object"):
        llm.generate("?", Options(json_schema="[1]"))


def test_chat_goes_through_the_template(llm: LLM, engine: ScriptedEngine) -> None:
    (one,) = llm.chat(say("say hi"))
    two, three = llm.chat([say("say b"), [{"role": "system", "content": "Be brief."}, *say("say c")]])
    assert (one.text, two.text, three.text) == ("hi", "b", "c")
    (parts,) = llm.chat([{"role": "user", "content": [{"type": "text", "text": "say parts"}]}])
    assert parts.text == "parts"
    (thought,) = llm.chat(say("think why then say because"))
    assert (thought.reasoning.strip(), thought.text.strip()) == ("why", "because")
    with pytest.raises(ValueError, match="image_url"):
        llm.chat([{"role": "user", "content": [{"type": "image_url"}]}])


def test_calls_of_tools(llm: LLM) -> None:
    call = 'call get_weather {"city": "Paris"}'
    (called,) = llm.chat(say(call), tools=[WEATHER])
    assert called.calls[0].name == "get_weather" and json.loads(called.calls[0].arguments) == {
        "city": "Paris"
    }
    (plain,) = llm.chat(say("say no"), tools=[WEATHER])
    assert plain.text == "no" and not plain.calls
    for choice in ("required", "get_weather"):
        (forced,) = llm.chat(say("say no"), tools=[WEATHER], tool_choice=choice)
        assert forced.calls[0].name == "get_weather" and set(json.loads(forced.calls[0].arguments)) == {
            "city"
        }
    (none,) = llm.chat(say(call), tools=[WEATHER], tool_choice="none")
    assert not none.calls
    with pytest.raises(ValueError, match="nobody"):
        llm.chat(say("x"), tools=[WEATHER], tool_choice="nobody")
    with pytest.raises(ValueError, match="no tool"):
        llm.chat(say("x"), tool_choice="required")


def test_the_bar_shows_on_demand_only(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["say a", "say b"])
    assert capsys.readouterr().err == ""  # no terminal
    llm.generate(["say a", "say b"], progress=True)
    assert "2/2" in capsys.readouterr().err


def test_several_threads_may_call(llm: LLM) -> None:
    said: dict[str, str] = {}

    def one(word: str) -> None:
        said[word] = llm.generate(f"say {word}")[0].text

    threads = [threading.Thread(target=one, args=(f"w{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == {f"w{number}": f"w{number}" for number in range(8)}


async def test_a_program_with_a_loop_of_its_own_may_call(llm: LLM) -> None:
    assert llm.generate("say hello")[0].text == "hello"  # as in a notebook


def test_a_bug_on_one_prompt_does_not_lose_the_others() -> None:
    def script(request: GenerateRequest, prompt: str) -> Any:
        if prompt == "b":
            raise ZeroDivisionError("a bug")
        yield from ()

    with LLM(ScriptedEngine(script)) as llm:
        a, b, _ = llm.generate(["a", "b", "c"])
    assert a.error is None and isinstance(b.error, RequestFailed) and "a bug" in str(b.error)


def test_an_engine_that_died_is_told_by_every_result() -> None:
    engine = ScriptedEngine()
    with LLM(engine) as llm:
        assert llm.generate("say a")[0].text == "a"
        llm._loop.call_soon_threadsafe(engine.kill, RuntimeError("gone"))
        assert all(isinstance(result.error, EngineDead) for result in llm.generate(["say b", "say c"]))


def test_it_closes_once_and_says_what_it_cannot_load() -> None:
    llm = LLM(ScriptedEngine())
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("say a")
    with pytest.raises(LoadError, match="nowhere"):
        LLM("/nowhere/at/all")
    with pytest.raises(TypeError, match="dtype"):
        LLM(ScriptedEngine(), dtype="float32")
    with pytest.raises(
        TypeError, match="'tensor_parallel_size': a model is computed by one process, on one GPU"
    ):
        LLM(tensor_parallel_size=2)
    with pytest.raises(TypeError, match="no setting 'max_len': settings are the fields of EngineConfig"):
        LLM(max_len=2)


def test_the_shipped_model_answers() -> None:
    with LLM(max_model_len=512) as llm:
        assert llm.info.name == "antiphon-tiny"
        greedy = Options(temperature=0, max_tokens=24)
        first, second = llm.chat([say("My name is Mark. What is my name?"), say("Hello!")], greedy)
        assert "Mark" in first.text and second.text
        assert llm.chat(say("Hello!"), greedy)[0].token_ids == second.token_ids


def test_a_prompt_may_have_several_answers_which_know_it(llm: LLM) -> None:
    results = llm.generate(["say a", "say b"], Options(n=3, seed=7))
    assert [(result.prompt, result.index, result.text) for result in results] == [
        *(("say a", index, "a") for index in range(3)),
        *(("say b", index, "b") for index in range(3)),
    ]
    (talk,) = llm.chat(say("say hello"))
    assert talk.prompt == say("say hello") and talk.score is None
    mixed = llm.generate(["say a", "say b"], [Options(n=2), Options()])
    assert [result.text for result in mixed] == ["a", "a", "b"]


def test_answers_of_one_prompt_are_drawn_apart_and_again_by_the_same_seed(llm: LLM) -> None:
    wanted = Options(n=3, seed=11, max_tokens=8)
    first, again = llm.generate("random 8", wanted), llm.generate("random 8", wanted)
    assert [result.token_ids for result in first] == [result.token_ids for result in again]
    assert len({result.token_ids for result in first}) == 3
    (alone,) = llm.generate("random 8", Options(seed=12, max_tokens=8))
    assert alone.token_ids == first[1].token_ids, "each is what its seed alone would give"


def test_the_best_of_several_are_kept_best_first(engine: ScriptedEngine, llm: LLM) -> None:
    kept = llm.generate("random 8", Options(n=2, best_of=5, seed=3, max_tokens=8))
    assert {request.sampling.seed for request in list(engine.requests)[-5:]} == {3, 4, 5, 6, 7}
    scores = [result.score for result in kept if result.score is not None]
    assert len(scores) == 2 and scores == sorted(scores, reverse=True) and scores[0] <= 0
    assert [result.index for result in kept] == [0, 1] and kept[0].logprobs == ()
    failed = llm.generate("word " * 5000, Options(n=2, best_of=3))
    assert [type(result.error) for result in failed] == [PromptTooLong] * 2
    assert failed[0].prompt == "word " * 5000


@pytest.mark.parametrize(("asked", "told"), [({"n": 0}, "n must be"), ({"n": 3, "best_of": 2}, "best_of")])
def test_a_number_of_answers_that_cannot_be_is_refused(asked: dict[str, int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Options(**asked)
