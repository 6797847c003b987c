"""180 agent loops on a shipped model, over HTTP with the official SDK: `python -m benchmarks.loops`.

The loops of `benchmarks/loops.toml` are what a newcomer tries first, with strict tools as the SDK makes them
of pydantic models, and with tools that the server runs: its own, a search of a folder, an MCP server's. The
model decides whether to call, what, and with which arguments. A loop counts when exactly the expected calls
were made, all at once or one by one, and each answer ended, is short, and holds what it has to.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
from pydantic import BaseModel, create_model

from benchmarks.start import serving

FILE = Path(__file__).with_suffix(".toml")
DESK = Path(__file__).with_name("desk.py")
MOST_CALLS = 6
"""Turns of the model in one loop; none needs more than three."""
LONGEST = 400
"""Characters of an answer: every right one is shorter, and one that repeats itself is longer."""
MOST_TOKENS = 400
"""Of a turn; no right call or answer has as many, and one that repeats itself would go on for minutes."""

KINDS = {"text": str, "whole": int, "number": float, "yes": bool}
OFFERS: dict[str, list[dict[str, Any]]] = {
    "builtin": [{"type": "mcp", "server_label": "antiphon", "server_url": "builtin:"}],
    "web": [{"type": "web_search"}],
    "desk": [
        {
            "type": "mcp",
            "server_label": "desk",
            "server_url": "builtin:desk",
            "require_approval": "never",
        }
    ],
}
"""Tools that the server runs, as requests let them in."""


class Wrong(Exception):
    """Why a loop does not count."""


# ---------------------------------------------------------------------------------------------------- tools


def _type_of(name: str, spec: Any) -> Any:
    """The Python type of a parameter in the words of the file."""
    if isinstance(spec, list):
        return list[_type_of(name, spec[0])]  # type: ignore[misc]
    if isinstance(spec, dict):
        return _model_of(name.title(), spec)
    if spec.endswith("?"):
        return _type_of(name, spec[:-1]) | None
    return Literal[tuple(spec.split("|"))] if "|" in spec else KINDS[spec]


def _model_of(name: str, takes: dict[str, Any]) -> type[BaseModel]:
    fields: dict[str, Any] = {key: (_type_of(key, spec), ...) for key, spec in takes.items()}
    return create_model(name, **fields)


def tool_of(name: str, described: dict[str, Any]) -> dict[str, Any]:
    """A strict function as `openai.pydantic_function_tool` makes it, in the form of the Responses API."""
    made = openai.pydantic_function_tool(
        _model_of(name, described["takes"]), name=name, description=described["about"]
    )
    return {"type": "function", **made["function"]}


# -------------------------------------------------------------------------------------------------- judging


def same(given: Any, wanted: Any) -> bool:
    """Whether an argument is what was meant. wanted: a text may have alternatives behind `|`."""
    if isinstance(wanted, dict):
        return (
            isinstance(given, dict)
            and given.keys() == wanted.keys()
            and all(same(given[key], value) for key, value in wanted.items())
        )
    if isinstance(wanted, list):
        return (
            isinstance(given, list)
            and len(given) == len(wanted)
            and all(same(one, other) for one, other in zip(given, wanted, strict=True))
        )
    if isinstance(wanted, str):
        said = "null" if given is None else given
        return isinstance(said, str) and said.casefold() in wanted.casefold().split("|")
    return bool(given == wanted) and isinstance(given, bool) == isinstance(wanted, bool)


def check_answer(text: str, says: list[str]) -> None:
    """Raises Wrong unless an answer holds one alternative of each of `says`."""
    if len(text) > LONGEST:
        raise Wrong(f"the answer goes on and on: {text[:80]!r}...")
    for alternatives in says:
        if not any(each.casefold() in text.casefold() for each in alternatives.split("|")):
            raise Wrong(f"the answer lacks {alternatives!r}: {text!r}")


@dataclass
class World:
    """What the tools of a turn answer: expected calls come once each, the others may come."""

    due: list[list[Any]]
    may: list[list[Any]] = field(default_factory=list)

    def answer(self, name: str, arguments: str) -> str:
        """The output of a call. Raises Wrong for one that nobody expects."""
        try:
            given = json.loads(arguments)
        except ValueError:
            raise Wrong(f"arguments of {name} are no JSON: {arguments!r}") from None
        for calls in (self.due, self.may):
            for call in calls:
                if call[0] == name and same(given, call[1]):
                    calls.remove(call)
                    return str(call[2])
        raise Wrong(f"an unexpected call: {name} {arguments}")


# ---------------------------------------------------------------------------------------------------- loops


@dataclass(frozen=True)
class Driver:
    """Asks one server."""

    client: openai.OpenAI
    model: str
    tools: dict[str, dict[str, Any]]
    sampling: dict[str, Any]

    def wrong_in(self, loop: dict[str, Any]) -> Wrong | None:
        """What is wrong with one loop; None: nothing is."""
        try:
            self.run(loop)
        except Wrong as why:
            return why
        return None

    def run(self, loop: dict[str, Any]) -> None:
        """One loop. Raises Wrong."""
        if "runs" in loop:
            return self._served(loop)
        tools = [self.tools[name] for name in loop["tools"]]
        last = self._turn(loop, tools, None)
        if "then" in loop:
            self._turn(loop["then"], tools, last)
        return None

    def _ask(self, **body: Any) -> Any:
        reply = self.client.responses.create(
            model=self.model, max_output_tokens=MOST_TOKENS, **body, **self.sampling
        )
        if reply.status != "completed":
            raise Wrong(f"the response is {reply.status}: {reply.output_text[:80]!r}")
        return reply

    def _turn(self, turn: dict[str, Any], tools: list[Any], before: str | None) -> str:
        """A question up to its answer; returns the last response's id."""
        world = World([*turn.get("does", [])], [*turn.get("may", [])])
        given: Any = turn["ask"]
        for _ in range(MOST_CALLS):
            reply = self._ask(
                input=given,
                tools=tools,
                previous_response_id=before,
                instructions="You are a helpful assistant.",
            )
            before = reply.id
            calls = [item for item in reply.output if item.type == "function_call"]
            if not calls:
                if world.due:
                    raise Wrong(f"no call of {world.due[0][0]}, but {reply.output_text!r}")
                check_answer(reply.output_text, turn["says"])
                return str(reply.id)
            given = [
                {
                    "type": "function_call_output",
                    "call_id": call.call_id,
                    "output": world.answer(call.name, call.arguments),
                }
                for call in calls
            ]
        raise Wrong("it never stops calling")

    def _served(self, loop: dict[str, Any]) -> None:
        """A loop that the server goes round by itself."""
        reply = self._ask(
            input=loop["ask"],
            tools=OFFERS[loop["offers"]],
            max_tool_calls=MOST_CALLS,
            include=["web_search_call.results"] if loop["offers"] == "web" else [],
        )
        made = []
        for item in reply.output:
            if item.type == "mcp_call":
                made.append((item.name, f"{item.output or ''} {item.error or ''}"))
            elif item.type == "web_search_call":
                made.append(("web_search", item.to_json()))
        for name, output in loop["runs"]:
            if not any(name == called and output in said for called, said in made):
                raise Wrong(f"no call of {name} that gives {output!r}, but {made} {reply.output_text!r}")
        if loop["offers"] != "web" and len(made) > len(loop["runs"]):
            raise Wrong(f"too many calls: {made}")
        check_answer(reply.output_text, loop["says"])


def write_settings(data: Path, documents: dict[str, str]) -> Path:
    """Add the MCP server to a data folder, and make the folder that is searched in the place of the web."""
    data.mkdir(mode=0o700)
    command = json.dumps([sys.executable, str(DESK)])
    (data / "antiphon.toml").write_text(f"[mcp.servers.desk]\ncommand = {command}\n")
    web = data.with_name("web")
    web.mkdir()
    for name, text in documents.items():
        (web / name).write_text(text)
    return web


def main() -> None:
    """Run the loops and print how many are right, by kind."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--checkpoint", default="antiphon-small", help="the model's folder, or a shipped model's name"
    )
    parser.add_argument("--greedy", action="store_true", help="temperature 0 instead of the model's defaults")
    parser.add_argument("--show", action="store_true", help="print what was wrong")
    parser.add_argument("--kinds", nargs="*", help="only loops of these kinds")
    parser.add_argument("--at-once", type=int, default=1, help="loops that go round at the same time")
    options = parser.parse_args()
    file = tomllib.loads(FILE.read_text("utf-8"))
    loops = [loop for loop in file["loops"] if not options.kinds or loop["kind"] in options.kinds]
    tools = {name: tool_of(name, described) for name, described in file["tools"].items()}
    right: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        web = write_settings(data, file["documents"])
        # Nobody reads what the server writes: a line for each request would fill the pipe.
        args = ["--demo-web", str(web), "--log-level", "warning", "--model", options.checkpoint]
        with serving(data, *args) as url:
            while httpx.get(f"{url}/ready").status_code != 200:
                time.sleep(0.2)
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", timeout=120, max_retries=0)
            model = client.models.list().data[0].id
            driver = Driver(client, model, tools, {"temperature": 0} if options.greedy else {})
            with ThreadPoolExecutor(options.at_once) as pool:
                for loop, wrong in zip(loops, pool.map(driver.wrong_in, loops), strict=True):
                    right[loop["kind"]] += wrong is None
                    if wrong is not None and options.show:
                        print(f"{loop['kind']}: {loop['ask']}\n    {wrong}", flush=True)
    of = Counter(loop["kind"] for loop in loops)
    for kind, count in of.items():
        print(f"{kind:<14} {right[kind]:>3} of {count}")
    print(f"{'all':<14} {right.total():>3} of {of.total()}")


if __name__ == "__main__":
    main()
