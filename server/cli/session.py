"""One conversation with a server, as `antiphon chat` has it: what is sent, what is shown, and what is gone on
from."""

from __future__ import annotations

import argparse
import os
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any, TextIO

import httpx

from server.cli.connection import DEFAULT_URL, ChatError, read_events, read_json, root
from server.masking import masked, printable
from storage import TERMINAL_STATUSES

TERMINAL_EVENTS = frozenset(f"response.{status}" for status in TERMINAL_STATUSES)
RETRY_S = 0.25  # before the first resume; doubled for each further one, up to 4 s
LOST_S = 600.0
"""How long a chat waits for a server that has gone in the middle of an answer; Ctrl-C ends it sooner."""

TITLE_LENGTH = 80
"""Characters of a conversation's title; the console has as many."""

AWAY = (502, 503, 504)
"""What a server that starts says, and a proxy before one that has gone."""

DIM, BOLD, RED, PLAIN = "\x1b[2m", "\x1b[1m", "\x1b[31m", "\x1b[0m"

TOOLS = {"type": "mcp", "server_label": "antiphon", "server_url": "builtin:"}

APPROVAL_REQUEST = "mcp_approval_request"

SOON_S = 2
"""How long a call that has just been made is given to become what its response waits for."""

CLIENT_CALLS = frozenset(
    {
        *("function_call", "custom_tool_call", "shell_call", "local_shell_call"),
        *("apply_patch_call", "computer_call"),
    }
)
"""Calls whose outputs a client gives, if the server has not given them."""

Approve = Callable[[dict[str, Any]], tuple[bool, str | None]]
"""Whether a call may be made, and a reason that the model is told."""

Output = Callable[[dict[str, Any]], str]
"""What a call of the client's gave."""


class Session:
    """One conversation with a server."""

    def __init__(
        self,
        http: httpx.Client,
        options: argparse.Namespace,
        out: TextIO,
        *,
        colour: bool,
        approve: Approve | None = None,
        output: Output | None = None,
    ) -> None:
        """approve, output: ask for each call that needs one; None where nobody can be asked. Both let the
        interrupt or the end of input pass by which somebody leaves the question."""
        self._http = http
        self._options = options
        self._out = out
        self._colour = colour
        self._approve = approve
        self._output = output
        self._previous: str | None = None
        self._conversation: str | None = None
        self._left: list[dict[str, Any]] = []
        self._requests: list[dict[str, Any]] = []
        self._follows = False  # a response that may wait for what a turn of this chat would do without
        self._style = PLAIN
        self._named_model = options.model is not None
        self.model: str = options.model or ""
        self.url: str = options.url
        self.instructions: str | None = options.instructions
        self.tools: bool = options.tools

    def begin(self, *, anew: bool = False) -> None:
        """Find the model, and what is to be gone on from: where that is nothing, the first turn makes a
        conversation. anew: what was said before is left behind."""
        self._previous = self._conversation = None
        self._left = []
        if not self.model:
            self.model = self._first_model()
        conversation, previous = self._options.conversation, self._options.previous
        if conversation and conversation != "new" and not anew:
            self._conversation = read_json(self._http.get(f"/v1/conversations/{conversation}"))["id"]
            self._look_at_newest()
        elif previous and not anew:
            self._previous = read_json(self._http.get(f"/v1/responses/{previous}"))["id"]
        self._print("", PLAIN)

    def models(self) -> list[str]:
        """The models that answer messages, by name, the server's default first."""
        served = read_json(self._http.get("/v1/models"))["data"]
        return [model["id"] for model in served if "used_for" not in model]

    def _first_model(self) -> str:
        if not (names := self.models()):
            raise ChatError("the server has no model that answers messages")
        return names[0]

    def take_model(self, name: str) -> None:
        """Have this model answer from here on. Raises ChatError where the server does not serve it."""
        if name not in (names := self.models()):
            raise ChatError(f"there is no model {name!r}; there are {', '.join(names)}")
        self.model, self._named_model = name, True

    def fork(self) -> None:
        """Go on in a copy of what was said, so that the original stays as it is. Raises ChatError."""
        if self._conversation:
            made = read_json(self._http.post(f"/v1/conversations/{self._conversation}/fork", json={}))
            self._conversation, self._previous = made["id"], None
        elif self._previous:
            made = read_json(self._http.post(f"/v1/responses/{self._previous}/fork", json={}))
            self._previous = made["id"]
        else:
            raise ChatError("nothing was said yet that could be forked")
        self._print(f"(forked: {made['id']})\n", DIM)
        self._print("", PLAIN)

    def go_on(self, id: str) -> None:
        """Take up a conversation, or what led to a response; what was said last is shown. A response that is
        still being made is followed to its end. Raises ChatError."""
        self._previous = self._conversation = None
        self._left = []
        if id.startswith("conv_"):
            self._conversation = read_json(self._http.get(f"/v1/conversations/{id}"))["id"]
            query = {"limit": "10", "order": "desc"}
            items = read_json(self._http.get(f"/v1/conversations/{id}/items", params=query))["data"][::-1]
            under_way = self._look_at_newest()
            self._show_past([*items, *self._left])
            self._requests = _unanswered(items)
            if under_way is not None:
                self._follow(under_way)
            self._answer_requests()
            return
        response = read_json(self._http.get(f"/v1/responses/{id}"))
        self._previous = response["id"]
        if response.get("conversation"):
            self._conversation = response["conversation"]["id"]
        items = self._input_of(id)
        if response["status"] in TERMINAL_STATUSES:
            self._show_past([*items, *response["output"]])
            self._requests = _unanswered(response["output"])
        else:
            self._show_past(items)
            self._follow(id)
        self._answer_requests()

    def _look_at_newest(self) -> str | None:
        """The response of the conversation that is being made, if one is. A turn that was stopped is no part
        of its conversation: the next one takes it along."""
        query = {"conversation": self._conversation or "", "limit": "1"}
        page = read_json(self._http.get("/v1/responses", params=query))["data"]
        if not page:
            return None
        (newest,) = page
        if newest["status"] == "cancelled":
            said = [*self._input_of(newest["id"]), *newest["output"]]
            open = {item["id"] for item in _unanswered(said)}
            self._left = [item for item in said if item["id"] not in open]
        return None if newest["status"] in TERMINAL_STATUSES else str(newest["id"])

    def _input_of(self, id: str) -> list[dict[str, Any]]:
        """What a response was asked, without what came before it."""
        query = {"limit": "100", "order": "asc"}
        found: list[dict[str, Any]] = read_json(
            self._http.get(f"/v1/responses/{id}/input_items", params=query)
        )["data"]
        return found

    def command_to_return(self) -> str | None:
        """The command line that goes on where this session stands; None where nothing was said."""
        if self._previous is None and self._conversation is None:
            return None
        words = ["antiphon", "chat"]
        if root(self._options.url) != root(os.environ.get("ANTIPHON_URL", DEFAULT_URL)):
            words += ["--url", masked(self._options.url)]
        if self._named_model:
            words += ["--model", self.model]
        if self.instructions:
            words += ["--instructions", self.instructions]
        if self.tools:
            words.append("--tools")
        if self._conversation:
            words += ["--conversation", self._conversation]
        else:
            words += ["--previous", self._previous or ""]
        return shlex.join(words)

    def say(self, text: str) -> bool:
        """One turn: send, show what comes, remember the response to go on from. False where it failed."""
        begins = self._conversation is None and self._previous is None
        if begins:
            self._make_conversation(text)
        try:
            went_well = self._turn(self._events(self._body(text)))
        except ChatError:
            if begins and self._previous is None:
                self._forget_conversation()
            raise
        return self._answer_requests() and went_well

    def _forget_conversation(self) -> None:
        """Leave nothing of a conversation whose first turn was refused."""
        if self._conversation is not None:
            with suppress(httpx.HTTPError):
                self._http.delete(f"/v1/conversations/{self._conversation}")
        self._conversation = None

    def _make_conversation(self, text: str) -> None:
        """Have the turns kept in a conversation, which is named after the first of them."""
        title = " ".join(text.split())[:TITLE_LENGTH]
        try:
            made = read_json(self._http.post("/v1/conversations", json={"title": title}))
        except ChatError as refused:
            if refused.status != 403:
                raise
            return  # the key may make responses alone: they follow each other without a conversation
        self._conversation = made["id"]
        if self._options.conversation == "new":
            self._print(f"conversation {self._conversation}\n", DIM)

    # -- turns -----------------------------------------------------------------------------------------------

    def _body(self, input: str | list[dict[str, Any]]) -> dict[str, Any]:
        if self._left:
            said = [{"role": "user", "content": input}] if isinstance(input, str) else input
            input = [*({"type": "item_reference", "id": item["id"]} for item in self._left), *said]
        body: dict[str, Any] = {"model": self.model, "input": input, "stream": True, "store": True}
        if self.instructions:
            body["instructions"] = self.instructions
        if self.tools:
            body["tools"] = [TOOLS]
        if self._conversation:
            body["conversation"] = self._conversation
        elif self._previous:
            body["previous_response_id"] = self._previous
        return body

    def _turn(self, events: Iterator[dict[str, Any]]) -> bool:
        """Show a turn's events; Ctrl-C has the server stop. False where the response failed."""
        response_id = ""
        failed = False
        self._requests = []
        try:
            for event in events:
                failed = failed or event["type"] == "response.failed"
                if not response_id:
                    response_id = event.get("response", {}).get("id", "")
                    self._left = []
                self._show(event)
        except KeyboardInterrupt:
            self._stop(response_id)
        finally:
            self._print("", PLAIN)  # the prompt that follows has no colour
            if response_id:
                self._previous = response_id
        return not failed

    def _follow(self, id: str) -> bool:
        """Show a response that is being made to its end, and have answered what it waits for; who leaves such
        a question leaves the response waiting. False where it failed."""
        self._previous, waiting = id, _Waiting()
        while True:
            self._follows = True
            try:
                went_well = self._turn(self._until_it_waits(id, waiting))
            finally:
                self._follows = False
            if not waiting.calls:
                return went_well
            self._requests = []  # they are answered here
            try:
                answers = self._answers(waiting.calls)
                read_json(self._http.post(f"/v1/responses/{id}/tool_outputs", json={"tool_outputs": answers}))
            except (KeyboardInterrupt, EOFError):
                self._print("\n(it goes on waiting; --resume comes back to it)\n", DIM)
                self._print("", PLAIN)
                return True
            except ChatError as refused:  # somebody else was first
                self._print(f"({refused})\n", DIM)

    def _until_it_waits(self, id: str, waiting: _Waiting) -> Iterator[dict[str, Any]]:
        """The events of a response from behind those that were seen on, up to its end, or to the call for
        which it waits."""
        waiting.calls = []
        for event in self._events(response_id=id, seen=waiting.seen):
            waiting.seen = event["sequence_number"]
            yield event
            if event["type"] != "response.output_item.done" or not _unanswered([event["item"]]):
                continue
            if calls := self._waited_for(id):
                if all(map(self._asks, calls)):
                    waiting.calls = calls
                    return
                self._print("(it waits for an answer, which cannot be given here)\n", DIM)

    def _waited_for(self, id: str) -> list[dict[str, Any]]:
        """The calls that a response waits for now, or in a moment."""
        response = read_json(self._http.get(f"/v1/responses/{id}", params={"wait": SOON_S}))
        pending = {
            call.get("call_id") or call["approval_request_id"]
            for call in response.get("pending_tool_calls", ())
        }
        return [item for item in _unanswered(response["output"]) if _answered_by(item) in pending]

    def _stop(self, response_id: str) -> None:
        if not response_id:
            self._print("\n(stopped)\n", DIM)
            return
        try:
            self._http.post(f"/v1/responses/{response_id}/cancel")
            if self._conversation:
                self._look_at_newest()
        except (httpx.HTTPError, ChatError):
            self._print("\n(left; the server could not be told to stop)\n", DIM)
        else:
            self._print("\n(stopped)\n", DIM)

    def _answer_requests(self) -> bool:
        """Ask for the calls that need it, have the answers sent, and show what comes of them. Who leaves the
        question says no."""
        went_well = True
        while self._requests and all(map(self._asks, self._requests)):
            try:
                answers = self._answers(self._requests)
            except (KeyboardInterrupt, EOFError):
                self._print("\n", PLAIN)
                answers = [_declined(request) for request in self._requests]
            went_well = self._turn(self._events(self._body(answers))) and went_well
        return went_well

    def _asks(self, call: dict[str, Any]) -> Approve | Output | None:
        """What asks for the answer to a call; None where nobody can be asked."""
        return self._approve if call["type"] == APPROVAL_REQUEST else self._output

    def _answers(self, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The items that answer these calls, for each of which somebody can be asked."""
        return [_answer(call, ask(call)) for call in calls if (ask := self._asks(call)) is not None]

    def _events(
        self, body: dict[str, Any] | None = None, response_id: str = "", seen: int = -1
    ) -> Iterator[dict[str, Any]]:
        """The turn's events behind the number `seen`, each once, over as many connections as it takes, also
        over the end of the server and its next start. Raises TransportError where the first one cannot be
        made."""
        attempt, since = 0, time.monotonic()
        key = token_hex(16)  # what is sent again because no reply came is carried out once
        while time.monotonic() - since < LOST_S:
            try:
                with self._stream(body, key, response_id, seen) as reply:
                    if reply.status_code in AWAY and (response_id or attempt):
                        raise httpx.RemoteProtocolError("the server is not back yet")
                    if reply.status_code != 200:
                        reply.read()
                        read_json(reply)
                    for event in read_events(reply):
                        response_id = response_id or event["response"]["id"]
                        seen = event["sequence_number"]
                        attempt, since = 0, time.monotonic()
                        yield event
                        if event["type"] in TERMINAL_EVENTS:
                            return
            except httpx.ConnectError:
                if not response_id and not attempt:
                    raise
            except httpx.TransportError:
                pass
            if not attempt:
                self._print(" (connection lost, resuming) ", DIM)
            time.sleep(min(RETRY_S * 2**attempt, 4.0))
            attempt += 1
        raise ChatError(f"response {response_id} could not be followed to its end")

    def _stream(
        self, body: dict[str, Any] | None, key: str, response_id: str, seen: int
    ) -> AbstractContextManager[httpx.Response]:
        if not response_id:
            return self._http.stream("POST", "/v1/responses", json=body, headers={"idempotency-key": key})
        params = {"stream": "true", "starting_after": str(seen)}
        return self._http.stream("GET", f"/v1/responses/{response_id}", params=params)

    # -- what is shown ---------------------------------------------------------------------------------------

    def _show(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "response.output_text.delta" | "response.refusal.delta":
                self._print(event["delta"], PLAIN)
            case "response.reasoning_text.delta" | "response.reasoning_summary_text.delta":
                self._print(event["delta"], DIM)
            case "response.output_item.done":
                self._show_item(event["item"])
            case "response.completed":
                self._print("\n", PLAIN)
            case "response.incomplete":
                self._print(f"\n(incomplete: {event['response']['incomplete_details']['reason']})\n", DIM)
            case "response.failed":
                self._print(f"\n({event['response']['error']['message']})\n", RED)
            case "response.cancelled":
                self._print("\n(cancelled)\n", DIM)

    def _show_item(self, item: dict[str, Any]) -> None:
        if item["type"] == "reasoning":
            self._print("\n", DIM)
        elif item["type"] == APPROVAL_REQUEST:
            self._requests.append(item)
            self._print(call_words(item), BOLD)
            told = " -> not made: it needs an approval, which this chat does not give\n"
            self._print("\n" if self._approve is not None or self._follows else told, DIM)
        elif words := call_words(item):
            self._print(words, BOLD)
            outcome = _outcome(item)
            self._print(f" -> {outcome}\n" if outcome else "\n", DIM)

    def _show_past(self, items: list[dict[str, Any]]) -> None:
        """The last question, and what came behind it."""
        asked = [at for at, item in enumerate(items) if item.get("role") == "user"]
        for item in items[asked[-1] if asked else 0 :]:
            if item["type"] == "message":
                mark = "> " if item["role"] == "user" else ""
                self._print(f"{mark}{text_of(item)}\n", DIM)
            elif words := call_words(item):
                self._print(f"{words}\n", DIM)
        self._print("", PLAIN)

    def _print(self, text: str, style: str) -> None:
        """Write text in a style, which stays until another one is written; at once, as it comes."""
        text = printable(text)
        if self._colour and style != self._style:
            text = (PLAIN if style == PLAIN else PLAIN + style) + text
            self._style = style
        self._out.write(text)
        self._out.flush()


@dataclass
class _Waiting:
    """Where a response that is followed stands. calls: what it waits for; empty while it does not."""

    seen: int = -1
    calls: list[dict[str, Any]] = field(default_factory=list)


def _unanswered(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls that wait for an approval or for an output, in their order."""
    answers = {item.get("approval_request_id") or item.get("call_id") for item in items if _is_answer(item)}
    return [item for item in items if (key := _answered_by(item)) is not None and key not in answers]


def _answered_by(item: dict[str, Any]) -> str | None:
    """The id by which a call is answered; None for what is no call of the client's or of an approval."""
    if item["type"] == APPROVAL_REQUEST:
        return str(item["id"])
    return str(item["call_id"]) if item["type"] in CLIENT_CALLS else None


def _is_answer(item: dict[str, Any]) -> bool:
    kind: str = item["type"]
    return kind == "mcp_approval_response" or kind.endswith("_call_output")


def _answer(call: dict[str, Any], said: tuple[bool, str | None] | str) -> dict[str, Any]:
    """The item that answers a call. said: of an approval, whether and why; of another call, what it gave."""
    if isinstance(said, str):
        return {"type": "function_call_output", "call_id": call["call_id"], "output": said}
    approved, reason = said
    answer = {"type": "mcp_approval_response", "approval_request_id": call["id"], "approve": approved}
    return {**answer, **({"reason": reason} if reason else {})}


def _declined(call: dict[str, Any]) -> dict[str, Any]:
    """The item that answers a call where nobody wanted to."""
    return _answer(call, (False, None) if call["type"] == APPROVAL_REQUEST else "The call was not made.")


def text_of(item: dict[str, Any]) -> str:
    """What a message says, in words."""
    content = item.get("content") or ""
    if isinstance(content, str):
        return content
    texts = (part.get("text") or part.get("refusal") or f"({part.get('type')})" for part in content)
    return "\n".join(texts)


def call_words(item: dict[str, Any]) -> str:
    """A call as a line, such as `calculator({"expression": "6 * 7"})`; empty for what is none."""
    kind = item["type"]
    if "name" in item and ("arguments" in item or "input" in item):
        return f"{item['name']}({item.get('arguments', item.get('input'))})"
    if not kind.endswith("_call"):
        return ""
    action = item.get("action") or {}
    said = item.get("code") or item.get("queries") or action.get("query") or action.get("url")
    said = said or action.get("commands") or action.get("command") or ""
    words = said if isinstance(said, str) else ", ".join(map(str, said))
    return f"{kind.removesuffix('_call')}({words})"


def _outcome(item: dict[str, Any]) -> str:
    """What came of a call, as far as its item says."""
    error = item.get("error") or {}
    parts = error.get("content") or () if isinstance(error, dict) else ()
    told = "\n".join(part["text"] for part in parts if part.get("type") == "text")
    told = told or (error if isinstance(error, str) else error.get("message") or "")
    output = item.get("output")
    if told or isinstance(output, str):
        return told or str(output)
    logs = [one["logs"] for one in item.get("outputs") or () if one.get("type") == "logs"]
    if logs:
        return "\n".join(logs)
    return "" if item.get("status") in (None, "completed") else str(item["status"])
