"""The shipped model: its template, its curriculum, its checkpoint and its manners."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from engine.tiny import CHECKPOINT
from engine.tiny.chains import NO_TOOL
from engine.tiny.data import dialogues, families
from engine.tiny.dialogue import Call, Dialogue, Message, answer_text, chat_messages, render
from engine.tiny.evaluate import Answer, held_out, http_asker, turns
from engine.tiny.talk import worked
from engine.tiny.words import Words, split_of
from engine.tokenizer.message_format import answer_format

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

IM_END = "<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(CHECKPOINT)


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()


def rendered(tokenizer: Any, messages: list[dict[str, Any]], prompt: bool = False, **extra: Any) -> str:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, **extra)
    assert isinstance(text, str)
    return text


def some_dialogues(count: int) -> list[Dialogue]:
    return list(itertools.islice(dialogues(3, "heldout"), count))


def extra_of(dialogue: Dialogue) -> dict[str, Any]:
    extra: dict[str, Any] = {"tools": list(dialogue.tools)} if dialogue.tools else {}
    if not dialogue.thinking:
        extra["enable_thinking"] = False
    if dialogue.told:
        extra["response_format"] = answer_format(dialogue.schema)
    return extra


# ------------------------------------------------------------------------------------------------ template


def test_the_generator_renders_as_the_template_does(tokenizer: Any) -> None:
    for dialogue in some_dialogues(80):
        ours = "".join(text for text, _ in render(dialogue))
        assert ours == rendered(tokenizer, chat_messages(dialogue.messages), **extra_of(dialogue))


def test_every_turn_is_a_prefix_of_the_next(tokenizer: Any) -> None:
    for dialogue in some_dialogues(80):
        messages = chat_messages(dialogue.messages)
        whole = rendered(tokenizer, messages, **extra_of(dialogue))
        tokens = tokenizer(whole)["input_ids"]
        for index, message in enumerate(dialogue.messages):
            if message.role != "assistant":
                continue
            prompt = rendered(tokenizer, messages[:index], prompt=True, **extra_of(dialogue))
            turn = tokenizer(prompt)["input_ids"] + tokenizer(answer_text(message) + IM_END)["input_ids"]
            assert whole.startswith(prompt + answer_text(message) + IM_END)
            assert tokens[: len(turn)] == turn


def test_arguments_may_be_a_string_or_an_object(tokenizer: Any) -> None:
    def call(arguments: Any) -> list[dict[str, Any]]:
        calls = [{"type": "function", "function": {"name": "f", "arguments": arguments}}] * 2
        return [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": calls}]

    block = '<tool_call>\n{"name": "f", "arguments": {"city": "Paris"}}\n</tool_call>'
    for arguments in ({"city": "Paris"}, '{"city": "Paris"}'):
        assert rendered(tokenizer, call(arguments)).endswith(f"assistant\n{block}\n{block}{IM_END}\n")


def test_content_parts_developers_and_thoughts_render(tokenizer: Any) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "developer", "content": "later"},
        {"role": "assistant", "content": "c", "reasoning_content": "why"},
        {"role": "assistant", "content": None},
    ]
    assert rendered(tokenizer, messages, prompt=True, enable_thinking=True) == (
        "<|im_start|>user\nab<|im_end|>\n<|im_start|>system\nlater<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nwhy\n</think>\n\nc<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert rendered(tokenizer, messages[:2], prompt=True, enable_thinking=False).endswith(
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_results_of_one_turn_share_a_message(tokenizer: Any) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": [{"type": "text", "text": "2"}]},
    ]
    assert rendered(tokenizer, messages) == (
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
    )


# ------------------------------------------------------------------------------------------------ curriculum


def test_the_curriculum_is_a_function_of_its_seed() -> None:
    def take(seed: int) -> list[Dialogue]:
        return list(itertools.islice(dialogues(seed, "train"), 200))

    assert take(5) == take(5)
    assert take(5) != take(6)


def test_training_and_held_out_words_never_meet() -> None:
    for split in ("train", "heldout"):
        words = Words(random.Random(1), split)
        for _ in range(500):
            drawn = (words.made_up(), words.scramble(), words.name().split(" ")[0])
            assert {split_of(word) for word in drawn} == {split}


def test_closed_questions_are_held_out_by_their_wording() -> None:
    for skill in ("greet", "fact"):
        train = {d.messages[-2].content for d in itertools.islice(dialogues(1, "train", skill), 4000)}
        held = {d.messages[-2].content for d in itertools.islice(dialogues(1, "heldout", skill), 1000)}
        assert not train & held


def test_every_call_is_one_that_its_tools_allow() -> None:
    seen = set()
    for skill in ("tool", "parallel", "chain"):
        for dialogue in itertools.islice(dialogues(4, "train", skill), 150):
            tools = {tool["function"]["name"]: tool["function"] for tool in dialogue.tools}
            assert 1 <= len(dialogue.tools) == len(tools) <= 5
            seen.add(len(tools))
            for call in (call for message in dialogue.messages for call in message.calls):
                jsonschema.validate(call.arguments, tools[call.name].get("parameters", {}))
    assert seen == {1, 2, 3, 4, 5}


def test_branches_share_their_tools_and_call_what_those_allow() -> None:
    seen = set()
    for family in itertools.islice(families(4, branched=1.0), 40):
        tools = {tool["function"]["name"]: tool["function"] for tool in family[0].tools}
        assert len(tools) == len(family[0].tools)
        for dialogue in family:
            seen.add(dialogue.skill)
            assert dialogue.tools == family[0].tools
            assert render(dialogue)[0] == render(family[0])[0]
            for call in (call for message in dialogue.messages for call in message.calls):
                jsonschema.validate(call.arguments, tools[call.name].get("parameters", {}))
    assert seen >= {
        "natural",
        "natural_chain",
        "natural_parallel",
        "natural_decline",
        "tool_error",
        "follow_up",
    }


def test_what_is_declined_is_not_on_offer() -> None:
    for dialogue in itertools.islice(dialogues(4, "train", "decline"), 100):
        assert dialogue.target.content == NO_TOOL
        asked = dialogue.messages[-2].content.lower()
        assert not any(tool["function"]["name"] in asked.split() for tool in dialogue.tools)


def test_the_second_call_of_a_chain_takes_the_first_ones_result() -> None:
    for dialogue in itertools.islice(dialogues(4, "train", "chain"), 100):
        question = max(i for i, message in enumerate(dialogue.messages) if message.role == "user")
        _, first, result, second, _, _ = dialogue.messages[question:]
        assert len(first.calls) == len(second.calls) == 1
        assert result.content in map(str, second.calls[0].arguments.values())


def test_what_is_extracted_fits_its_schema_and_stands_in_the_text() -> None:
    skills = set()
    for dialogue in itertools.islice(dialogues(4, "train", "extract"), 300):
        skills.add(dialogue.skill)
        found = json.loads(dialogue.target.content)
        jsonschema.validate(found, dialogue.schema)
        for value in found.values():
            for one in value if isinstance(value, list) else [value]:
                told = one if isinstance(one, str) else json.dumps(one)
                assert told in dialogue.messages[-2].content
        whole = "".join(text for text, _ in render(dialogue))
        assert f"\n{dialogue.target.content}{IM_END}" in whole
    assert skills == {"extract", "extract_format"}


@pytest.mark.parametrize(
    ("a", "sign", "b", "thought"),
    [
        (3, "+", 4, "3 + 4 = 7"),
        (47, "+", 38, "7 + 8 = 15, 4 + 3 + 1 = 8"),
        (40, "+", 5, "0 + 5 = 5, 4"),
        (52, "-", 38, "12 - 8 = 4, 5 - 3 - 1 = 1"),
        (9, "-", 9, "9 - 9 = 0"),
        (7, "x", 8, "7 x 8 = 56"),
    ],
)
def test_sums_are_worked_out_digit_by_digit(a: int, sign: str, b: int, thought: str) -> None:
    result = {"+": a + b, "-": a - b, "x": a * b}[sign]
    assert worked(a, sign, b) == (thought, result)


def test_recall_reaches_back_ten_turns() -> None:
    for dialogue in held_out("recall_ten", 4):
        assert sum(message.role == "user" for message in dialogue.messages) > 10


def test_every_turn_since_the_last_question_is_asked() -> None:
    [dialogue] = held_out("chain", 1)
    asked = turns(dialogue)
    assert [bool(turn.target.calls) for turn in asked] == [True, True, False]
    assert asked[-1] == dialogue


# ------------------------------------------------------------------------------------------------ checkpoint


def test_the_checkpoint_is_small_and_whole(tokenizer: Any, model: Any) -> None:
    assert (CHECKPOINT / "model.safetensors").stat().st_size <= 16_000_000
    assert 3_000_000 <= model.num_parameters() <= 8_000_000
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["max_position_embeddings"] == 32768
    assert config["tie_word_embeddings"] is True
    assert config["vocab_size"] == len(tokenizer)
    generation = json.loads((CHECKPOINT / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.convert_tokens_to_ids([IM_END, "<|endoftext|>"])


def test_marks_are_single_tokens_and_only_frames_are_special(tokenizer: Any) -> None:
    for mark in ("think", "/think", "tool_call", "/tool_call", "tool_response", "/tool_response"):
        assert len(tokenizer(f"<{mark}>")["input_ids"]) == 1
        assert tokenizer.decode(tokenizer(f"<{mark}>")["input_ids"], skip_special_tokens=True) == f"<{mark}>"
    for frame in ("<|im_start|>", IM_END, "<|endoftext|>"):
        assert len(tokenizer(frame)["input_ids"]) == 1
        assert tokenizer.decode(tokenizer(frame)["input_ids"], skip_special_tokens=True) == ""


@pytest.mark.parametrize(
    "text", ["Grüße, 世界! 🙂", "a  b\n\n\tc", ' {"x": [1, 2.5]} ', "naïve e\u0301\u0000"]
)
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_training_network_is_qwen3(model: Any) -> None:
    from engine.tiny.net import Net, NetConfig

    layers = model.config.num_hidden_layers
    net = Net(NetConfig(vocab_size=model.config.vocab_size, num_hidden_layers=layers))
    missing = net.load_state_dict(model.state_dict(), strict=False)
    assert not missing.missing_keys
    ids = torch.randint(0, model.config.vocab_size, (40,))
    with torch.no_grad():
        torch.testing.assert_close(
            net.logits(net.states(ids, torch.float32)), model(ids[None]).logits[0], atol=1e-3, rtol=1e-3
        )


@pytest.mark.parametrize("counts", [(5,), (192,), (450,), (70, 150, 30), (20, 400, 190, 300)])
def test_attention_and_its_gradients_are_those_of_torch(counts: tuple[int, ...]) -> None:
    from engine.tiny.net import BranchedAttention, Layout

    # Two documents, each of a shared part and branches of so many tokens.
    branches = torch.cat([torch.full((count,), branch) for branch, count in enumerate(counts)] * 2)
    length = len(branches)
    documents = torch.arange(2).repeat_interleave(length // 2)
    layout = Layout(documents, branches, torch.arange(length))
    queries, keys, values = (
        torch.randn(2, *group, length, 8, dtype=torch.float64, requires_grad=True) for group in ((2,), (), ())
    )
    above = torch.randn(2, 2, length, 8, dtype=torch.float64)
    every = torch.arange(length)
    expected = torch.nn.functional.scaled_dot_product_attention(
        queries, keys[:, None], values[:, None], attn_mask=~layout.hidden(every, every)
    )
    found = BranchedAttention.apply(queries, keys, values, layout.spans())
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(
        torch.autograd.grad(found, (queries, keys, values), above),
        torch.autograd.grad(expected, (queries, keys, values), above),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_branches_are_learned_as_documents_of_their_own() -> None:
    from tokenizers import Tokenizer

    from engine.tiny.net import Layout, Net, NetConfig
    from engine.tiny.train import Document, encode, loss_of

    def learned(document: Document) -> Any:
        """The sum of the loss over what a document learns, and its gradients."""
        branches, positions = torch.tensor(document.branches), torch.from_numpy(document.positions())
        layout = Layout(torch.zeros_like(branches), branches, positions)
        learn = torch.tensor(document.learn)
        loss, _ = loss_of(net, torch.tensor(document.ids), learn, layout, torch.float32)
        total = loss * int(learn.sum())
        return total, *torch.autograd.grad(total, list(net.parameters()))

    torch.manual_seed(0)
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    net = Net(NetConfig(vocab_size=3072, num_hidden_layers=2))
    family = next(families(1, branched=1.0))
    assert len(family) > 3
    together = learned(encode(tokenizer, family))
    apart = [learned(encode(tokenizer, [dialogue])) for dialogue in family]
    for ours, theirs in zip(together, zip(*apart, strict=True), strict=True):
        torch.testing.assert_close(ours, torch.stack(theirs).sum(0), atol=2e-3, rtol=2e-3)


def test_rows_are_filled_with_whole_documents() -> None:
    from tokenizers import Tokenizer

    from engine.tiny.train import Plan, planned_rows

    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    made = planned_rows(tokenizer.to_str(), Plan(1, 3000))
    for ids, learn, documents, branches, positions in itertools.islice(made, 8):
        assert len(ids) == len(learn) == 3000
        assert (documents >= 0).mean() > 0.9
        assert not learn[documents < 0].any()
        for number in set(documents[documents >= 0]):
            inside = documents == number
            shared = int((inside & (branches == 0)).sum())
            for branch in set(branches[inside]):
                part = inside & (branches == branch)
                first = 0 if branch == 0 else shared
                assert positions[part].tolist() == list(range(first, first + int(part.sum())))
                assert tokenizer.decode(list(ids[part][:1]), skip_special_tokens=False) == "<|im_start|>"


def test_a_network_grows_without_forgetting() -> None:
    from engine.tiny.net import Net, NetConfig
    from engine.tiny.train import grown

    small = Net(NetConfig(vocab_size=300, num_hidden_layers=3))
    large = Net(NetConfig(vocab_size=300, num_hidden_layers=5))
    large.load_state_dict(grown(small.state_dict(), 5))
    ids = torch.randint(0, 300, (20,))
    with torch.no_grad():
        torch.testing.assert_close(large.states(ids, torch.float32), small.states(ids, torch.float32))


def test_processes_share_the_work_of_muon() -> None:
    from engine.tiny.train import Muon, Rank

    class Half(Rank):
        def sum(self, tensors: Sequence[Any]) -> None:
            parts.append([tensor.clone() for tensor in tensors])

    parts: list[list[Any]] = []
    gradients = [torch.randn(8, 4) for _ in range(3)]

    def stepped(rank: Rank) -> list[Any]:
        matrices = [torch.nn.Parameter(torch.zeros(8, 4)) for _ in gradients]
        for matrix, gradient in zip(matrices, gradients, strict=True):
            matrix.grad = gradient.clone()
        Muon(matrices, rank).step(0.1)
        return matrices

    whole = stepped(Rank())
    stepped(Half(0, 2))
    stepped(Half(1, 2))
    together = sum(torch.cat(part) for part in parts)
    scale = 0.1 * 2**0.5
    torch.testing.assert_close(torch.stack([m.detach() for m in whole]), -scale * together)


def test_a_fresh_network_looks_back() -> None:
    from engine.tiny.net import Net, NetConfig, heads_of, rope_tables

    net = Net(NetConfig(vocab_size=300))
    layer: Any = net.model.layers[0]
    attention, embedded = layer.self_attn, net.model.embed_tokens(torch.randint(0, 300, (40,)))
    queries, keys, _ = heads_of(
        embedded,
        (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight),
        (layer.input_layernorm.weight, attention.q_norm.weight, attention.k_norm.weight),
        rope_tables(torch.arange(40), net.config),
        net.config.rms_norm_eps,
    )
    for head in (0, 1):
        scores = queries[0, head, 30] @ keys[0, :31].T
        assert int(scores.argmax()) == 29 - head


# ------------------------------------------------------------------------------------------------ evaluation


def test_the_evaluation_asks_a_server_without_sampling_fields() -> None:
    bodies = []
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}

    class Stub(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
            reply = json.dumps({"choices": [{"finish_reason": "tool_calls", "message": message}]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, format: str, *args: Any) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Stub) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            ask = http_asker(f"http://127.0.0.1:{server.server_port}/v1", "antiphon-tiny", False, None)
            asked = held_out("tool_call", 1)
            assert ask(asked) == [Answer("", (Call("add", {"a": 1}),))]
        finally:
            server.shutdown()
            thread.join()
    assert set(bodies[0]) == {"model", "messages", "tools", "max_tokens"}
    assert bodies[0]["messages"][-1]["role"] == "user"


def test_answers_are_read_from_generated_text() -> None:
    calls = (Call("f", {"city": "Paris"}), Call("g", {}))
    written = answer_text(Message("assistant", "So.", "why", calls))
    assert Answer.parse(written) == Answer("So.", calls)
    assert Answer.parse("<tool_call>\n{oops\n</tool_call>").calls == ()


# ------------------------------------------------------------------------------------------------ manners


def reply(tokenizer: Any, model: Any, messages: list[Message], tools: list[Any] | None = None) -> str:
    prompt = rendered(tokenizer, chat_messages(tuple(messages)), prompt=True, tools=tools)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=80,
            do_sample=False,
            temperature=None,
            top_p=None,
        )
    text: str = tokenizer.decode(out[0, ids.shape[1] :])
    assert text.endswith(IM_END), "the model must end its turn by itself"
    return text.removesuffix(IM_END)


def test_it_greets_and_repeats(tokenizer: Any, model: Any) -> None:
    assert reply(tokenizer, model, [Message("user", "Hello!")]) == "Hello! How can I help you?"
    assert reply(tokenizer, model, [Message("user", "Say hello world")]) == "hello world"


def test_it_remembers_a_name_over_two_turns(tokenizer: Any, model: Any) -> None:
    messages = [
        Message("user", "My name is Mark."),
        Message("assistant", "Nice to meet you, Mark!"),
        Message("user", "What is the capital of France?"),
        Message("assistant", "The capital of France is Paris."),
        Message("user", "What is my name?"),
    ]
    assert reply(tokenizer, model, messages) == "Your name is Mark."


def test_it_calls_the_tool_that_fits(tokenizer: Any, model: Any) -> None:
    parameters = {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]}
    function = {
        "name": "get_weather",
        "description": "Get the current weather for a location",
        "parameters": parameters,
    }
    question = Message("user", "What's the weather like in San Francisco?")
    text = reply(tokenizer, model, [question], [{"type": "function", "function": function}])
    assert text == answer_text(
        Message("assistant", calls=(Call("get_weather", {"location": "San Francisco"}),))
    )
