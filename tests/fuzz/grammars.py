"""Schemas, regexes, grammars, structural tags and choices, in every field that takes them, of all three APIs.

Owns the requests made of them, and the command. Run it as

    python -m tests.fuzz.grammars --requests 5000 --seed 7

which starts a server on a small random model (`--model shipped`: on the shipped one), sends what
`grammar_texts` draws, and prints what was wrong as bodies to send again; it exits with 1 if anything was.
Request number N of a seed is the same in every run (`--first N --requests 1`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine.tiny import CHECKPOINT
from tests.fuzz.crowd import Crowd, Found, Try, against, command, parser_of
from tests.fuzz.grammar_texts import Maker
from tests.fuzz.pauses import Pauses
from tests.support.checkpoints import make_checkpoint

AT_ONCE = 4
FLAGS = (
    *("--max-model-len", "512", "--num-threads", "1", "--kv-cache-bytes", "64M"),
    *("--tool-dialect", "hermes"),
)
Json = dict[str, Any]
Forms = tuple[Callable[[], Json], ...]


def request(seed: int, number: int) -> Try:
    """The request of that number."""
    draw = random.Random(f"{seed}/{number}")
    path, body = _plain(draw)
    body |= _shaped(draw, Maker(draw), path)
    return Try(number, path, json.dumps(body))


def _plain(draw: random.Random) -> tuple[str, Json]:
    """A path and a body without a shape."""
    few: Json = {"temperature": draw.choice((0.0, 1.0, 1.0, 2.0)), "seed": draw.randrange(1000)}
    if draw.random() < 0.1:
        few["stream"] = True
    match draw.randrange(3):
        case 0:
            more = draw.choice(({}, {}, {"store": False}, {"store": False}, {"instructions": "Say it."}))
            return "/v1/responses", {"input": "Go.", "max_output_tokens": 16, **more, **few}
        case 1:
            few |= draw.choice(({}, {}, {}, {"n": 2}, {"logprobs": True, "top_logprobs": 2}, {"stop": "a"}))
            messages = [{"role": "user", "content": "Go."}]
            return "/v1/chat/completions", {"messages": messages, "max_tokens": draw.randint(1, 6), **few}
        case _:
            return "/v1/completions", {"prompt": "Go", "max_tokens": draw.randint(1, 6), **few}


def _shaped(draw: random.Random, make: Maker, path: str) -> Json:
    """The fields that ask for a shape."""
    extensions: Forms = (
        lambda: {"guided_json": draw.choice((make.root, lambda: json.dumps(make.root())))()},
        lambda: {"guided_json": make.root()},
        lambda: {"guided_regex": make.regex()},
        lambda: {"guided_regex": make.regex()},
        lambda: {"guided_grammar": make.lark()},
        lambda: {"guided_grammar": make.lark()},
        lambda: {"guided_grammar": make.gbnf()},
        lambda: {"guided_choice": make.choices()},
        lambda: {"structured_outputs": _outputs(draw, make)},
    )
    responses: Forms = (
        lambda: {"text": {"format": {**_named(draw), "type": "json_schema", "schema": make.root()}}},
        lambda: {"text": {"format": make.tag()}},
        lambda: _tools(draw, make, nested=False),
    )
    chat: Forms = (
        lambda: {
            "response_format": {"type": "json_schema", "json_schema": {**_named(draw), "schema": make.root()}}
        },
        lambda: {"response_format": make.tag()},
        lambda: _tools(draw, make, nested=True),
    )
    own = {"/v1/responses": responses, "/v1/chat/completions": chat}.get(path, ())
    return draw.choice(own if own and draw.random() < 0.5 else extensions)()


def _named(draw: random.Random) -> Json:
    return {
        "name": draw.choice(("n", "n", "n", "", "a b", 1)) if draw.random() < 0.1 else "n",
        "strict": True,
    }


def _outputs(draw: random.Random, make: Maker) -> Json:
    kinds: dict[str, Callable[[], Any]] = {
        "json": make.root,
        "regex": make.regex,
        "choice": make.choices,
        "grammar": make.lark,
        "structural_tag": lambda: draw.choice((make.tag(), json.dumps(make.tag()))),
        "json_object": lambda: True,
    }
    return {kind: kinds[kind]() for kind in draw.sample([*kinds], draw.choice((1, 1, 1, 1, 1, 2)))}


def _tools(draw: random.Random, make: Maker, *, nested: bool) -> Json:
    """Tools whose arguments, or input, have a shape, and whether one is to be called."""
    tools: list[Json] = []
    own: Json
    for index in range(draw.choice((1, 1, 2, 3)) if draw.random() < 0.98 else 40):
        name = f"f{index}"
        if draw.random() < 0.25:
            syntax, definition = draw.choice((("lark", make.lark), ("regex", make.regex)))
            form: Json = {"type": "grammar", "syntax": syntax, "definition": definition()}
            if nested:
                form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": form["definition"]}}
            kind, own = "custom", {"name": name, "format": form}
        else:
            parameters = make.root()
            if draw.random() < 0.5:
                parameters = {"type": "object", "properties": {"n": parameters}, "required": ["n"]}
            kind, own = "function", {"name": name, "parameters": parameters, "strict": draw.random() < 0.8}
        tools.append({"type": kind, kind: own} if nested else {"type": kind, **own})
    return {"tools": tools, "tool_choice": draw.choice(("required", "required", "auto"))}


def requests(seed: int, first: int, count: int, until: float = math.inf) -> Iterator[Try]:
    """So many requests, or as many as are begun by then."""
    for number in itertools.takewhile(lambda _: time.monotonic() < until, range(first, first + count)):
        yield request(seed, number)


async def fuzz(folder: Path, options: argparse.Namespace) -> tuple[Found, Pauses]:
    """So many requests to a server process of its own."""
    model = CHECKPOINT if options.model == "shipped" else make_checkpoint("qwen3", folder / "model")
    until = time.monotonic() + options.seconds

    async def through(crowd: Crowd) -> None:
        tries = requests(options.seed, options.first, options.requests, until)
        await crowd.run(tries, options.at_once)

    return await against(folder, (*FLAGS, "--model", str(model)), options, through)


def main() -> int:
    """The command."""
    parser = parser_of(__doc__ or "", AT_ONCE)
    parser.add_argument("--first", type=int, default=0, help="number of the first request (default 0)")
    parser.add_argument("--model", choices=("random", "shipped"), default="random")
    return command(parser.parse_args(), fuzz)


if __name__ == "__main__":
    sys.exit(main())
