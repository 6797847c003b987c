"""Evaluate antiphon-tiny on held-out dialogues and print a table of skill and score.

`antiphon eval-tiny` runs the plain transformers forward in this process; `--base-url http://127.0.0.1:8000/v1`
asks a server's `/chat/completions` instead, which also holds answers to a schema where there is one. Neither
sends sampling fields unless `--greedy` is given. A dialogue counts when every turn of the assistant since the
last question, calls and the answer after them, is exactly the expected one given what came before. The exit
status is 1 below the threshold.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.tiny import CHECKPOINT
from engine.tiny.chains import NO_TOOL
from engine.tiny.data import dialogues
from engine.tiny.dialogue import Call, Dialogue, Message, chat_messages
from engine.tiny.situations import SITUATIONS
from engine.tiny.talk import UNKNOWN, WHO
from engine.tokenizer import answer_format

SEED = 20_261
MAX_TOKENS = 500  # no right answer is longer; a model that has begun to repeat itself would fill its context
THRESHOLD = 0.95
FEWEST = 20  # dialogues of a skill, from which on a single wrong answer does not miss the threshold
EXAMPLES = """examples:
  antiphon eval-tiny --count 5                 a quick look
  antiphon eval-tiny --skills greet everyday --show 3
  antiphon eval-tiny --base-url http://127.0.0.1:8000/v1"""
LINE_S = 5.0  # without a line of the table for so long, it is said how far the next one is
SKILLS: dict[str, tuple[str, ...]] = {
    "greet": ("greet",),
    "repeat": ("repeat",),
    "tool_call": ("tool",),
    "tool_answer": ("tool",),
    "decline": ("decline",),
    "no_tool": ("no_tool",),
    "parallel": ("parallel",),
    "chain": ("chain",),
    "recall_name": ("recall_name",),
    "recall_thing": ("recall_thing",),
    "recall_ten": ("recall_name", "recall_thing"),
    "extract": ("extract",),
    "extract_format": ("extract",),
    "arithmetic": ("arithmetic",),
    "follow": ("follow",),
    "fact": ("fact",),
    "count": ("count",),
    "unknown": ("unknown",),
    **{part: (part,) for part in SITUATIONS},
}
"""Row of the table -> the parts of the curriculum its dialogues are drawn from."""
UNTRAINED = (*SITUATIONS,)
"""Rows that are asked for by name only: the shipped weights are older than these parts of the curriculum."""

_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
_THOUGHT = re.compile(r"\A<think>\n.*?\n</think>\n\n", re.DOTALL)


@dataclass(frozen=True)
class Answer:
    """What a model said: its visible text and its calls."""

    text: str
    calls: tuple[Call, ...] = ()

    @classmethod
    def parse(cls, raw: str) -> Answer:
        """Read generated text (special end tokens already gone)."""
        raw = _THOUGHT.sub("", raw)
        calls = []
        for body in _CALL.findall(raw):
            try:
                call = json.loads(body)
                calls.append(Call(call["name"], call["arguments"]))
            except (ValueError, KeyError, TypeError):
                return cls(raw)
        return cls(_CALL.sub("", raw).strip("\n") if calls else raw, tuple(calls))

    @classmethod
    def expected(cls, message: Message) -> Answer:
        return cls(message.content, message.calls)

    def same(self, other: Answer, as_json: bool) -> bool:
        """Whether two answers say the same: as values where they are JSON, to the letter elsewhere."""
        if not as_json:
            return self == other
        try:
            return bool(json.loads(self.text) == json.loads(other.text))
        except ValueError:
            return False


Asker = Callable[[list[Dialogue]], list[Answer]]
"""Answers to the last question of each dialogue."""


# ---------------------------------------------------------------------------------------------- what is asked


def _tool(name: str, description: str, **kinds: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    parameters = {"type": "object", "properties": properties, "required": list(kinds)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def _ask(*turns: str, system: str = "", tools: tuple[Any, ...] = (), call: Call | None = None) -> Dialogue:
    """A dialogue from alternating user and assistant texts; `call` stands in for the last one."""
    roles = ("user", "assistant")
    messages = [Message(roles[index % 2], text) for index, text in enumerate(turns)]
    if system:
        messages.insert(0, Message("system", system))
    if call:
        messages.append(Message("assistant", calls=(call,)))
    return Dialogue("everyday", tuple(messages), tools)


def everyday() -> list[Dialogue]:
    """What people and test suites ask first, written by hand rather than drawn."""
    return [*_plain_questions(), *_questions_with_tools()]


def _plain_questions() -> list[Dialogue]:
    nice = "Nice to meet you, Mark!"
    return [
        _ask("Hi", "Hello! How can I help you?"),
        _ask("Hello!", "Hello! How can I help you?"),
        _ask("Say hello world", "hello world"),
        _ask("Say hello.", "hello", system="You are a pirate. Always respond in pirate speak."),
        _ask(
            "Repeat after me: the quick brown fox jumps over the lazy dog",
            "the quick brown fox jumps over the lazy dog",
        ),
        _ask("Say: Antiphon works!", "Antiphon works!"),
        _ask("Reply with exactly: pong", "pong"),
        _ask("My name is Mark.", nice, "What is my name?", "Your name is Mark."),
        _ask(
            "My name is Mark.",
            nice,
            "What is the capital of France?",
            "The capital of France is Paris.",
            "What is my name?",
            "Your name is Mark.",
        ),
        _ask(
            "My name is Alice.",
            "Hello Alice! How can I help you today?",
            "What is my name?",
            "Your name is Alice.",
        ),
        _ask(
            "My name is Mark.",
            nice,
            "Say hello.",
            "hello",
            "What's my name?",
            "Your name is Mark.",
            system="You are a helpful assistant.",
        ),
        _ask("What are you?", WHO),
        _ask("What is the capital of France?", "The capital of France is Paris."),
        _ask("What color is the sky?", "The sky is blue.", system="Be concise."),
        _ask("Count from 1 to 5.", "1, 2, 3, 4, 5"),
        _ask("Count from 1 to 20.", ", ".join(map(str, range(1, 21)))),
        _ask("Write the numbers from 1 to 100.", ", ".join(map(str, range(1, 101)))),
        _ask("What is the meaning of life?", UNKNOWN),
        _ask("What is 2 + 2?", "2 + 2 = 4."),
    ]


def _questions_with_tools() -> list[Dialogue]:
    weather = _tool("get_weather", "Get the current weather for a location", location="string")
    hinted = json.loads(json.dumps(weather))
    hinted["function"]["parameters"]["properties"]["location"]["description"] = (
        "The city and state, e.g. San Francisco, CA"
    )
    city = _tool("get_weather", "Get the weather in a city.", city="string")
    add = _tool("add", "Add two numbers.", a="integer", b="integer")
    search = _tool("search", "Search the web.", query="string")
    email = _tool("send_email", "Send an email.", to="string", subject="string")
    return [
        _ask(
            "What's the weather like in San Francisco?",
            tools=(weather,),
            call=Call("get_weather", {"location": "San Francisco"}),
        ),
        _ask(
            "What's the weather like in San Francisco?",
            tools=(hinted,),
            call=Call("get_weather", {"location": "San Francisco"}),
        ),
        _ask("What is the weather in Paris?", tools=(city,), call=Call("get_weather", {"city": "Paris"})),
        _ask("What's the weather in Tokyo?", tools=(add, city), call=Call("get_weather", {"city": "Tokyo"})),
        _ask(
            "What is the weather in Reykjavik today?",
            tools=(search, city, add),
            call=Call("get_weather", {"city": "Reykjavik"}),
        ),
        _ask("Add 17 and 25.", tools=(add, city), call=Call("add", {"a": 17, "b": 25})),
        _ask("What is 3 + 4?", tools=(add,), call=Call("add", {"a": 3, "b": 4})),
        _ask(
            "Search for paged attention.",
            tools=(city, search),
            call=Call("search", {"query": "paged attention"}),
        ),
        _ask(
            "Send an email to bob@example.com with subject Lunch.",
            tools=(email, search),
            call=Call("send_email", {"to": "bob@example.com", "subject": "Lunch"}),
        ),
        _ask("Hello!", "Hello! How can I help you?", tools=(city,)),
        _ask("Send an email to bob@example.com with subject Lunch.", NO_TOOL, tools=(city,)),
        _ask("What is the capital of France?", "Paris", system="Answer with one word."),
        _ask(
            "What is the capital of France?",
            "THE CAPITAL OF FRANCE IS PARIS.",
            system="Answer in upper case.",
        ),
        _ask("What is 17 + 25?", "17 + 25 = 42."),
        _ask("What is 7 x 8?", "7 x 8 = 56."),
        _ask("Say hello world", "hello world", tools=(city, add)),
    ]


def held_out(skill: str, count: int) -> list[Dialogue]:
    """The first `count` held-out dialogues whose last turn shows `skill`."""
    if skill == "everyday":
        return everyday()
    long = skill == "recall_ten"

    def fits(dialogue: Dialogue) -> bool:
        questions = sum(message.role == "user" for message in dialogue.messages)
        return dialogue.thinking and (questions > 10 if long else dialogue.skill == skill)

    def matching(part: str) -> Iterator[Dialogue]:
        return filter(fits, dialogues(SEED, "heldout", part))

    sources = [matching(part) for part in SKILLS[skill]]
    return [next(sources[index % len(sources)]) for index in range(count)]


def turns(dialogue: Dialogue) -> list[Dialogue]:
    """What is asked of a model for one dialogue: each of the assistant's turns since the last question."""
    last = max(index for index, message in enumerate(dialogue.messages) if message.role == "user")
    ends = [i for i in range(last, len(dialogue.messages)) if dialogue.messages[i].role == "assistant"]
    return [replace(dialogue, messages=dialogue.messages[: end + 1]) for end in ends]


# ---------------------------------------------------------------------------------------------- who answers


def local_asker(checkpoint: Path, greedy: bool) -> Asker:
    """Answers through transformers' own `generate`, with the checkpoint's sampling defaults or greedily."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    # The table is what is to be seen.
    transformers_logging.disable_progress_bar()
    torch.manual_seed(1)
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.eval()
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None} if greedy else {}

    def ask(asked: list[Dialogue]) -> list[Answer]:
        prompts = [
            tokenizer.apply_chat_template(
                chat_messages(dialogue.messages[:-1]),
                tools=list(dialogue.tools) or None,
                response_format=answer_format(dialogue.schema) if dialogue.schema else None,
                tokenize=False,
                add_generation_prompt=True,
            )
            for dialogue in asked
        ]
        batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.inference_mode():
            out = model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=MAX_TOKENS,
                **sampling,
            )
        answers = []
        for row in out[:, batch["input_ids"].shape[1] :]:
            text = tokenizer.decode(row)
            head, end, _ = text.partition("<|im_end|>")
            answers.append(Answer.parse(head if end else text + "<never ended>"))
        return answers

    return ask


def http_asker(base_url: str, model: str, greedy: bool, key: str | None) -> Asker:
    """Answers of a server, a few requests at a time; tools are strict, as most SDKs make them."""
    import httpx

    headers = {"authorization": f"Bearer {key}"} if key else {}

    def one(client: httpx.Client, dialogue: Dialogue) -> Answer:
        body: dict[str, Any] = {"model": model, "messages": chat_messages(dialogue.messages[:-1])}
        body["max_tokens"] = MAX_TOKENS
        if dialogue.tools:
            body["tools"] = [
                {**tool, "function": {**tool["function"], "strict": True}} for tool in dialogue.tools
            ]
        if dialogue.schema:
            body["response_format"] = answer_format(dialogue.schema)
        if greedy:
            body["temperature"] = 0
        reply = client.post(base_url.rstrip("/") + "/chat/completions", json=body)
        reply.raise_for_status()
        choice = reply.json()["choices"][0]
        message = choice["message"]
        try:
            calls = [
                Call(call["function"]["name"], json.loads(call["function"]["arguments"]))
                for call in message.get("tool_calls") or []
            ]
        except ValueError:
            return Answer("<arguments are not JSON>")
        text = message.get("content") or ""
        if choice["finish_reason"] not in ("stop", "tool_calls"):
            text += "<never ended>"
        return Answer(text.strip("\n") if calls else text, tuple(calls))

    def ask(asked: list[Dialogue]) -> list[Answer]:
        with httpx.Client(timeout=300, headers=headers) as client, ThreadPoolExecutor(8) as pool:
            try:
                return list(pool.map(lambda dialogue: one(client, dialogue), asked))
            except httpx.HTTPError as fault:
                raise OSError(str(fault)) from fault

    return ask


def evaluate(ask: Asker, skills: list[str], count: int, show: int = 0) -> dict[str, float]:
    """Scores by skill; prints up to `show` wrong answers of each. What takes long says how far it is."""
    scores = {}
    said = time.monotonic()
    for skill in skills:
        chosen = held_out(skill, count)
        asked = [(index, turn) for index, dialogue in enumerate(chosen) for turn in turns(dialogue)]
        wrong: dict[int, tuple[Dialogue, Answer]] = {}
        for start in range(0, len(asked), 16):
            batch = asked[start : start + 16]
            if time.monotonic() - said >= LINE_S:
                said = time.monotonic()
                print(f"{skill}: {start} of {len(asked)} turns", file=sys.stderr, flush=True)
            for (index, turn), answer in zip(batch, ask([turn for _, turn in batch]), strict=True):
                if not answer.same(Answer.expected(turn.target), turn.schema is not None):
                    wrong.setdefault(index, (turn, answer))
        scores[skill] = 1 - len(wrong) / len(chosen)
        print(f"{skill:<14} {scores[skill]:7.1%}  ({len(chosen) - len(wrong)}/{len(chosen)})", flush=True)
        said = time.monotonic()
        for dialogue, answer in list(wrong.values())[:show]:
            print(f"    asked    {dialogue.messages[-2].content!r}")
            print(f"    expected {Answer.expected(dialogue.target)}")
            print(f"    got      {answer}")
    return scores


def main(argv: Sequence[str] | None = None) -> int:
    """The command; `argv` without the program's name."""
    parser = argparse.ArgumentParser(
        prog="antiphon eval-tiny",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--base-url", help="a server's /v1; without it the model runs in this process")
    parser.add_argument("--model", default="antiphon-tiny", help="the model id to ask a server for")
    parser.add_argument("--api-key", default=None, help="a key of that server")
    parser.add_argument(
        "--checkpoint", type=Path, default=CHECKPOINT, help="the model's folder (default: the shipped one)"
    )
    parser.add_argument("--greedy", action="store_true", help="temperature 0 instead of the model's defaults")
    parser.add_argument(
        "--count",
        type=int,
        default=100,
        help="dialogues per skill (default 100; everyday always has the same 35)",
    )
    parser.add_argument(
        "--skills",
        nargs="*",
        default=[*(skill for skill in SKILLS if skill not in UNTRAINED), "everyday"],
        choices=[*SKILLS, "everyday"],
        help="what to score it at (default: all that the shipped weights were trained on)",
    )
    parser.add_argument("--show", type=int, default=0, help="wrong answers to print per skill (default 0)")
    options = parser.parse_args(argv)
    skills: list[str] = options.skills
    if options.count < 1:
        parser.error("--count must be at least 1")
    where = f"{options.model} at {options.base_url}" if options.base_url else f"{options.checkpoint}, here"
    print(f"{where}: right answers to {options.count} held-out dialogues of each skill", flush=True)
    if options.base_url:
        ask = http_asker(options.base_url, options.model, options.greedy, options.api_key)
    else:
        ask = local_asker(options.checkpoint, options.greedy)
    try:
        scores = evaluate(ask, skills, options.count, options.show)
    except OSError as fault:  # of a server; httpx's own errors are made into these
        print(f"antiphon: {options.base_url}: {fault}", file=sys.stderr)
        return 2
    print(
        f"{'all of them':<14} {sum(scores.values()) / len(scores):7.1%}  (the mean of {len(scores)} skills)"
    )
    if options.count < FEWEST:
        print(
            f"{options.count} dialogues per skill are too few to judge by the threshold of {THRESHOLD:.0%}: "
            f"give --count {FEWEST} or more"
        )
        return 0
    low = {skill: score for skill, score in scores.items() if score < THRESHOLD}
    for skill, score in low.items():
        print(f"below the threshold: {skill} {score:.1%} < {THRESHOLD:.0%}")
    return 1 if low else 0


if __name__ == "__main__":
    sys.exit(main())
