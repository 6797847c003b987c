"""A conversation in the words of a prompt: the messages that chat templates expect.

Item types write themselves into a transcript. What one assistant turn said (reasoning, text, calls) becomes
one message, because templates print it as one.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from tools import cut


def text_of(content: Any) -> str:
    """The text of a message's content or a tool's output: a string, or its text parts joined by newlines."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(
        part.get("text") or part.get("refusal") or "" for part in content if isinstance(part, dict)
    )


def speakable(name: str) -> str:
    """A tool's name in the characters that models may write in names."""
    return re.sub(r"[^a-zA-Z0-9_-]", "_", name)[:64]


SHOWN = "shown"
"""The field of a message that has what a model that sees is shown in the place of its text; `seen` makes it
that."""


def seen(messages: Sequence[Mapping[str, Any]], *, sees: bool) -> list[dict[str, Any]]:
    """Messages of a transcript for a model that sees, with their images among their parts, or for any other.

    Few templates have room for an image in the output of a tool. So a message of the user follows the outputs
    of a turn, which shows what they have, in their order.
    """
    found: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []
    for message in messages:
        plain = {name: value for name, value in message.items() if name != SHOWN}
        if waiting and plain["role"] != "tool":
            found.append({"role": "user", "content": waiting})
            waiting = []
        shown = message.get(SHOWN) if sees else None
        if shown is not None and plain["role"] == "tool":
            waiting += shown
        elif shown is not None:
            plain["content"] = list(shown)
        found.append(plain)
    return [*found, {"role": "user", "content": waiting}] if waiting else found


class Transcript:
    """Messages as they are written, oldest first.

    answers: what the client answered anywhere in the conversation, by the answer's field that names the call
    and its value; a call that is not whole is shown only where it has an answer. names: under which the model
    is offered tools of other servers, by the server's label and the tool's own name. made: the calls that
    were approved before they were made, by the ids of the items that asked.
    """

    def __init__(
        self,
        answers: Mapping[tuple[str, str | None], dict[str, Any]] | None = None,
        names: Mapping[tuple[str, str], str] | None = None,
        made: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        self.messages: list[dict[str, Any]] = []
        self.shows_images = False
        """Whether messages have images that models can be shown: these are under `SHOWN`, beside the text."""
        self.settled = True
        """Whether nothing that comes later can change what is written."""
        self.names_others = False
        """Whether tools of other servers are named."""
        self.answers = answers or {}
        self.made = made or {}
        self.asked: dict[str, dict[str, Any]] = {}
        """What asks for calls that were not made: the items by their ids."""
        self.longest = 0
        """Characters of the longest output that is not a client's."""
        self._is_clients = False
        self._most: int | None = None
        self._item: str | None = None
        self._beside: str | None = None
        self._offered_as = names or {}
        self._num_images = 0
        self._calls: dict[
            str, tuple[int, str]
        ] = {}  # by their ids: which they are in their order, and their names
        self._answered: list[int] = []  # which calls the outputs at the end are of
        self._searches: list[str] = []  # the calls whose outputs name no call, and are still to come
        self._callers: frozenset[str | None] = frozenset()  # the items that wrote calls into the last turn
        self._turn: dict[str, Any] | None = None
        self._thoughts: list[str] = []  # of the turn, that are not in its message yet

    def branch(
        self,
        answers: Mapping[tuple[str, str | None], dict[str, Any]],
        names: Mapping[tuple[str, str], str] | None = None,
        made: Mapping[str, dict[str, Any]] | None = None,
    ) -> Transcript:
        """A transcript that goes on from this one, and leaves it as it is."""
        new = Transcript(answers, names, made)
        new.messages, new._calls, new.asked = list(self.messages), dict(self._calls), dict(self.asked)
        new._answered, new._searches = list(self._answered), list(self._searches)
        new.shows_images = self.shows_images
        new.settled, new.names_others = self.settled, self.names_others
        new._num_images, new.longest, new._callers = self._num_images, self.longest, self._callers
        if self._turn is not None:  # it is the last message, and may be added to
            new._turn = new.messages[-1] = dict(self._turn)
            if (calls := self._turn.get("tool_calls")) is not None:
                new._turn["tool_calls"] = list(calls)
            new._thoughts = list(self._thoughts)
        return new

    def pause(self) -> None:
        """Have the messages hold all that was said so far. More may follow."""
        if self._turn is not None and self._thoughts:
            before = self._turn["reasoning_content"]
            self._turn["reasoning_content"] = "\n\n".join(filter(None, (before, *self._thoughts)))
            self._thoughts = []

    def tell(self, role: str, text: str, parts: Sequence[Mapping[str, Any]] | None = None) -> None:
        """A message that is not the assistant's: of the system, or of a user. parts: the same with its
        images, for models that see."""
        while (call_id := self.expected()) is not None:
            self.answer(call_id, "error: The outcome of this call is not known.")
        self._end_turn()
        message: dict[str, Any] = {"role": role, "content": text}
        if parts is not None:
            message[SHOWN] = parts
            self.shows_images = True
        self.messages.append(message)

    def compact(self, systems: Sequence[str], messages: Sequence[Mapping[str, Any]]) -> None:
        """Put other messages in the place of all but those of the system. systems: texts of the latter, for a
        client that sends none before a compaction; others send theirs anew, perhaps in other words."""
        kept = [message for message in self.messages if message["role"] == "system"]
        kept = kept or [{"role": "system", "content": said} for said in systems]
        self.messages = [*kept, *(dict(message) for message in messages)]
        self._end_turn()
        self._calls, self._answered, self._searches, self._callers = {}, [], [], frozenset()

    def by(self, name: str) -> None:
        """Say who has written the last message, for templates that print it."""
        self.messages[-1]["name"] = name

    def turn_to(
        self, *, clients: bool, most: int | None, id: str | None = None, beside: str | None = None
    ) -> None:
        """Say of the next item whether it is a client's output, to how many characters any other output is
        cut, its id, and beside the call of which other item the model wrote its call (`private_half.beside`).
        """
        self._is_clients, self._most, self._item, self._beside = clients, most, id, beside

    def image(self) -> int:
        """The number of the next image: they are told one by one (`images_of`)."""
        self._num_images += 1
        return self._num_images

    def think(self, text: str) -> None:
        """A thought of the assistant. `pause` puts it into its message, because whoever joined each thought
        to those before would copy all of these every time."""
        self._message("content", "tool_calls").setdefault("reasoning_content", "")
        self._thoughts.append(text)

    def say(self, text: str) -> None:
        """A text of the assistant."""
        self._message("content", "tool_calls")["content"] = text

    def shows(self, call_id: str, *, whole: bool) -> bool:
        """Whether a call is to be shown."""
        shown = whole or ("call_id", call_id) in self.answers
        self.settled = self.settled and shown
        return shown

    def name(self, label: str, name: str) -> str:
        """The name of a tool of another server, as the model is offered it."""
        self.names_others = True
        return self._offered_as.get((label, name)) or speakable(name)

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """A call of the assistant; arguments are JSON."""
        self._calls[call_id] = (len(self._calls), name)
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        turn = self._answered_turn() or self._message()
        self._callers = (self._callers if turn.get("tool_calls") else frozenset()) | {self._item}
        turn.setdefault("tool_calls", []).append(call)

    def _answered_turn(self) -> dict[str, Any] | None:
        """The message whose calls the outputs at the end are of, where the item that is written was called
        beside one of them. It may be in other transcripts as well, which do not change."""
        if self._turn is not None or self._beside is None or self._beside not in self._callers:
            return None
        if not self._answered or self.messages[-1]["role"] != "tool":
            return None
        at = len(self.messages) - len(self._answered) - 1
        if (calls := self.messages[at].get("tool_calls")) is None:  # outputs that came behind something else
            return None
        self.messages[at] = {**self.messages[at], "tool_calls": list(calls)}
        return self.messages[at]

    def expect(self, call_id: str) -> None:
        """Say of a call that its output names no call: such outputs come in the order of their calls."""
        self._searches.append(call_id)

    def expected(self) -> str | None:
        """The call that the next such output is of; None where it is of none."""
        return self._searches.pop(0) if self._searches else None

    def has(self, call_id: str) -> bool:
        """Whether a call was written already, and no compaction has taken it away."""
        return call_id in self._calls

    def answer(self, call_id: str, output: str, pictures: Sequence[Mapping[str, Any]] | None = None) -> None:
        """The output of a call. pictures: its images as parts, for models that see. Outputs stand in the
        order of their calls, in whatever order they come: many templates show no ids."""
        self._end_turn()
        if not self._is_clients:
            self.longest = max(self.longest, len(output))
            output = output if self._most is None else cut(output, self._most)
        if not self.messages or self.messages[-1]["role"] != "tool":
            self._answered = []
        which, name = self._calls.get(call_id, (len(self._calls), ""))
        place = bisect_right(self._answered, which)
        index = len(self.messages) - len(self._answered) + place
        self._answered.insert(place, which)
        message: dict[str, Any] = {"role": "tool", "tool_call_id": call_id, "name": name, "content": output}
        if pictures:
            message[SHOWN] = pictures
            self.shows_images = True
        self.messages.insert(index, message)

    def _message(self, *closed_by: str) -> dict[str, Any]:
        """The turn's message; a new one when what comes would stand before something that it has already."""
        if self._turn is None or any(self._turn.get(key) for key in closed_by):
            self._end_turn()
            self._turn = {"role": "assistant", "content": ""}
            self.messages.append(self._turn)
        return self._turn

    def _end_turn(self) -> None:
        self.pause()
        self._turn = None
