"""Decides what a compaction keeps of a conversation, and what the model is asked to summarise of it.

There are three stages. Thoughts are dropped and old outputs of tools are cut; where that makes the prompt
short enough, it is all. Otherwise the model summarises the conversation, in several parts where it is longer
than the context, and the user's newest messages are kept word for word beside the summary. What comes after
the user's last message stays, as far as there is room, where that message has no answer yet.

Everything here follows from items and from the run's counters, so that a run that is taken up after a crash
goes on with the very same prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from engine import Prompt, PromptTooLong
from server.items import Compacted, Item, Sources, compacted
from server.prompting import Offer, to_messages
from server.runs.planning.steps import Progress
from server.threads import THREADED_PARTS, aside, in_large_request
from tools import cut

if TYPE_CHECKING:
    from server.model_registry import ServedModel
    from server.runs.planning.functions import Functions

Message = Mapping[str, Any]

KEPT_TOKENS = 20_000
"""Of the user's messages that are kept word for word, at most."""

SUMMARY_TOKENS = 8_192
"""Of a summary at most, the thoughts before it included."""

LEAST_SUMMARY_TOKENS = 64

WHOLE_OUTPUTS = 4
"""The outputs of so many of the newest turns with calls stay whole."""

SHORT_OUTPUT = 1_000
"""Characters that older outputs of tools are cut to."""

SHORTEST = 256
"""Characters that a text is cut to at least, where a single message is longer than the context."""

ASK = (
    "This conversation has become long. Everything above will be replaced by a summary that you write now, "
    "and by what the user said. Summarize what has happened so far, for yourself, so that you can go on "
    "without the rest: what the user wants, what was done and decided, which facts, names, numbers, files "
    "and results of tools are still needed, and what is to be done next. Answer with the summary alone."
)
"""The message that follows the conversation in the prompt of a compaction."""


@dataclass(frozen=True, slots=True)
class Compaction:
    """What a run is to compact. threshold: the tokens of a prompt from which on it is compacted; None where a
    compaction is all that the run makes. key: the number of the key that seals it."""

    threshold: int | None
    key: int

    @property
    def is_all(self) -> bool:
        """Whether a compaction is all that the run makes."""
        return self.threshold is None


def effective_threshold(asked: int, served: ServedModel) -> int:
    """The threshold for a model, in tokens. asked: the request's, 0 for none: then three quarters of the
    context. It is never so high that no room would be left for an answer."""
    limit = served.info.max_model_len
    found = min(asked or limit * 3 // 4, limit - limit // 8)
    return found if served.caps.prompt_tokens is None else min(found, served.caps.prompt_tokens)


class Plan(Protocol):
    """What of a run's plan is needed here."""

    @property
    def owner(self) -> str:
        """Whose run it is."""
        ...

    @property
    def compaction(self) -> Compaction | None:
        """What the run is to compact."""
        ...

    async def rendered_messages(
        self, served: ServedModel, messages: Sequence[Message], offered: Offer
    ) -> Prompt:
        """Messages behind the plan's lead, as the model is shown them."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """What the model is asked next. summarises: which messages the prompt has, from the first up to the
    second index. max_tokens: of the summary. content: what the compaction will stand for but for its summary,
    where no other part follows."""

    prompt: Prompt
    summarises: tuple[int, int]
    max_tokens: int
    content: Compacted | None


@dataclass(frozen=True, slots=True)
class _Conversation:
    """The messages of a prompt behind its lead. whole: all of them. systems: texts of those of the system.
    before: what an earlier compaction stands for. told: its message. others: what is none of these."""

    whole: Sequence[Message]
    systems: Sequence[str]
    before: Compacted
    told: Sequence[Message]
    others: Sequence[Message]
    sources: Sources

    @classmethod
    def of(cls, items: Sequence[Item], functions: Functions) -> _Conversation:
        whole = to_messages(items, None, functions.names)
        found = (content for item in reversed(items) if (content := compacted(item)) is not None)
        before = next(found, Compacted())
        systems = [message["content"] for message in whole if message["role"] == "system"]
        others = [message for message in whole if message["role"] != "system"]
        told = before.told
        place = next((i for i, one in enumerate(others) if one["content"] == told), None)
        first = [] if told is None or place is None else [others.pop(place)]
        return cls(whole, systems, before, first, others, Sources(items))

    @property
    def system_messages(self) -> list[Message]:
        return [{"role": "system", "content": said} for said in self.systems]

    def trimmed(self) -> list[Message]:
        """The others without thoughts, and with old outputs cut."""
        turns = [index for index, message in enumerate(self.others) if message.get("tool_calls")]
        old = turns[-WHOLE_OUTPUTS] if len(turns) > WHOLE_OUTPUTS else 0
        found: list[Message] = []
        for index, message in enumerate(self.others):
            kept = {name: value for name, value in message.items() if name != "reasoning_content"}
            if index < old and kept["role"] == "tool":
                kept["content"] = cut(kept["content"], SHORT_OUTPUT)
            if kept["content"] or kept["role"] != "assistant" or kept.get("tool_calls"):
                found.append(kept)
        return found

    def compacted(self, **fields: Any) -> Compacted:
        """What a compaction of it stands for, but for these fields."""
        sources, files = self.sources.dump()
        return Compacted(systems=self.systems, sources=sources, container_files=files, **fields)


class _Work:
    """One compaction of a run, of these items, as its engine counts."""

    def __init__(self, plan: Plan, served: ServedModel, conversation: _Conversation, offered: Offer) -> None:
        self._plan = plan
        self._served = served
        self._offered = offered
        self._conversation = conversation
        self._limit = served.info.max_model_len
        caps = served.caps.prompt_tokens
        self._most = self._limit - 1 if caps is None else min(self._limit - 1, caps)

    async def next(self, progress: Progress) -> Part | Compacted:
        """What is to be asked next; what the compaction stands for, where nothing is."""
        conversation, plan = self._conversation, self._plan
        assert plan.compaction is not None, "only what is planned is made"
        threshold = plan.compaction.threshold
        trimmed = await aside(len(conversation.others) > THREADED_PARTS, conversation.trimmed)
        fresh = progress.num_summarised == 0
        whole = await self._rendered(conversation.whole) if fresh else None
        if fresh:
            before = self._limit if whole is None else len(whole.ids)
            short = await self._rendered([*conversation.system_messages, *conversation.told, *trimmed])
            if short is not None and 2 * len(short.ids) <= (before if threshold is None else threshold):
                return self._untold(trimmed)
        base = await self._rendered([*conversation.system_messages, {"role": "user", "content": ""}])
        size = self._limit if threshold is None else threshold
        room = max(size - (size if base is None else len(base.ids)), size // 4)
        tokens = max(LEAST_SUMMARY_TOKENS, min(SUMMARY_TOKENS, room // 4))
        most = max(min(self._most, self._limit - tokens), 1)
        if fresh and whole is not None and len(whole.ids) <= most:
            asked = await self._rendered([*conversation.whole, {"role": "user", "content": ASK}])
            if asked is not None and len(asked.ids) <= most:
                content = await self._content(trimmed, room)
                return Part(asked, (0, len(trimmed)), tokens, content)
        start = progress.num_summarised
        first = conversation.told
        if start:
            first = [{"role": "user", "content": Compacted(summary=progress.summary).told}]
        prompt, until = await self._longest_part(
            [*conversation.system_messages, *first], trimmed, start, most
        )
        last = until == len(trimmed)
        return Part(prompt, (start, until), tokens, await self._content(trimmed, room) if last else None)

    def _untold(self, trimmed: Sequence[Message]) -> Compacted:
        """A compaction that needs no new summary."""
        before = self._conversation.before
        num_users = before.num_users + sum(message["role"] == "user" for message in trimmed)
        num_users -= sum(message["role"] == "user" for message in before.messages)
        return self._conversation.compacted(
            summary=before.summary, users=before.users, messages=trimmed, num_users=num_users
        )

    async def _content(self, trimmed: Sequence[Message], room: int) -> Compacted:
        """What a compaction with a summary stands for. room: tokens that it may have, its summary among
        them."""
        asked = [index for index, message in enumerate(trimmed) if message["role"] == "user"]
        answered = not trimmed or (trimmed[-1]["role"] == "assistant" and not trimmed[-1].get("tool_calls"))
        start = len(trimmed) if answered or not asked else asked[-1]
        left = min(KEPT_TOKENS, room // 2)
        spare = room - left - min(SUMMARY_TOKENS, room // 4)
        tail = await self._tail(trimmed[start:], spare // 2)
        said = [*self._conversation.before.users, *(trimmed[i]["content"] for i in asked if i < start)]
        users: list[str] = []
        for text in reversed(said):
            left -= await self._count(text)
            if left < 0:
                break
            users.insert(0, text)
        num_users = len(users) + bool(tail)
        return self._conversation.compacted(users=users, messages=tail, num_users=num_users)

    async def _tail(self, messages: Sequence[Message], most: int) -> list[Message]:
        """The user's last message, and the newest of what follows it, of so many tokens at most; but at
        least what follows it last, cut where it is longer."""
        if not messages:
            return []
        groups = _groups(messages[1:])
        kept: list[Message] = []
        for group in reversed(groups):
            size = sum([await self._count_message(message) for message in group])
            if kept and size > most:
                break
            length = max(len(_text(message)) for message in group)
            while size > most and length > SHORTEST:
                length = max(SHORTEST, length // 2)
                group = [_shortened(message, length) for message in group]
                size = sum([await self._count_message(message) for message in group])
            kept[:0] = group
            most -= size
        return [messages[0], *kept]

    async def _longest_part(
        self, first: Sequence[Message], messages: Sequence[Message], start: int, most: int
    ) -> tuple[Prompt, int]:
        """The prompt with as many messages from `start` on as fit, and the index behind the last of them."""
        ends = [start]
        for turn in _groups(messages[start:]):
            ends.append(ends[-1] + len(turn))
        ask = {"role": "user", "content": ASK}
        fitting: tuple[Prompt, int] | None = None
        too_many, enough = len(ends), 0
        while too_many - enough > 1:
            middle = (too_many + enough) // 2
            prompt = await self._rendered([*first, *messages[start : ends[middle]], ask])
            if prompt is not None and len(prompt.ids) <= most:
                enough, fitting = middle, (prompt, ends[middle])
            else:
                too_many = middle
        if fitting is not None:
            return fitting
        # Not even one fits, or there is none: it is shown with shorter texts.
        group = messages[start : ends[min(1, len(ends) - 1)]]
        length = max((len(_text(message)) for message in [*first, *group]), default=0)
        while True:
            prompt = await self._rendered([*first, *group, ask])
            if prompt is not None and len(prompt.ids) <= most:
                return prompt, start + len(group)
            if length <= SHORTEST:
                raise PromptTooLong(self._limit if prompt is None else len(prompt.ids), self._limit)
            length = max(SHORTEST, length // 2)
            first = [_shortened(message, length) for message in first]
            group = [_shortened(message, length) for message in group]

    async def _rendered(self, messages: Sequence[Message]) -> Prompt | None:
        """Messages as a prompt, behind the plan's lead; None where there are too many to be counted."""
        try:
            return await self._plan.rendered_messages(self._served, messages, self._offered)
        except PromptTooLong:
            return None

    async def _count(self, text: str) -> int:
        engine, owner = self._served.engine, self._plan.owner
        return len(await engine.tokenize(text, add_special_tokens=False, owner=owner))

    async def _count_message(self, message: Message) -> int:
        return await self._count(_text(message))


async def next_part(
    plan: Plan,
    served: ServedModel,
    items: Sequence[Item],
    offered: Offer,
    functions: Functions,
    progress: Progress,
) -> Part | Compacted:
    """What the model is asked next by a compaction of these items; what that stands for, where it is not
    asked at all. Raises PromptTooLong where not even the instructions fit, and the engine's RequestErrors."""
    much = in_large_request() or len(items) > THREADED_PARTS
    conversation = await aside(much, _Conversation.of, items, functions)
    return await _Work(plan, served, conversation, offered).next(progress)


def _groups(messages: Sequence[Message]) -> list[list[Message]]:
    """Messages with the outputs of their calls, which cannot stand apart."""
    groups: list[list[Message]] = []
    for message in messages:
        if message["role"] == "tool" and groups:
            groups[-1].append(message)
        else:
            groups.append([message])
    return groups


def _text(message: Message) -> str:
    """What of a message counts: its text, and the arguments of its calls."""
    calls = message.get("tool_calls") or ()
    return "".join([message["content"] or "", *(call["function"]["arguments"] for call in calls)])


def _shortened(message: Message, most: int) -> Message:
    """A message with a text of so many characters at most. Arguments of calls stay JSON, so a long call
    becomes one without any."""
    shorter = {**message, "content": cut(message["content"] or "", most)}
    if sum(len(call["function"]["arguments"]) for call in message.get("tool_calls") or ()) > most:
        shorter["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": "{}"}} for call in message["tool_calls"]
        ]
    return shorter
