"""Defines a run in memory: its plan, its output so far, and the part of it that is not logged yet.

It also makes the changing part of the run's Response object and the first events of every run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import orjson

from engine import GenerateRequest, Place, TokenLogprob
from server.errors import ApiError
from server.items import ITEM_TYPES, Item, Route, dump_private, is_client_call, is_loading, key_of
from server.limits import Visit
from server.model_registry import ServedModel
from server.moderation import Verdict, unjudged
from server.prompting import Told
from server.runs.events import Assembler, Draft, RunLog, Tokens, derived_id
from server.runs.execution.logprobs import dump_logprobs
from server.runs.planning import Functions, Past, Progress, RunPlan, approved_calls, pending_calls
from storage import NewItem, Record, RunClaim

if TYPE_CHECKING:
    from server.encrypted_reasoning import Seal, Sealing
    from server.mcp_servers import Reach


CancelReason = Literal["unread", "next_turn"]
"""Why the server cancels a run by itself: nobody reads it, or the next turn of its conversation begins."""

UNASKED = unjudged("not_moderated", "The response ended before there was anything to be judged.")


@dataclass(slots=True)
class Unlogged:
    """What of a generation no record holds yet: tokens, facts of theirs, and the drafts they made.

    first_token: the index of the first of `token_ids` within the generation. complete: it is enough for a
    record, which has at least one event.
    """

    generation: int = 0
    first_token: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    drafts: list[Draft] = field(default_factory=list)
    complete: bool = False


@dataclass(frozen=True, slots=True)
class Seals:
    """What seals the output of a run. items: its reasoning and private halves, None where nobody wants that.
    compactions: None where it makes none."""

    items: Seal | None = None
    compactions: Seal | None = None

    @classmethod
    async def of(cls, plan: RunPlan, sealing: Sealing) -> Seals:
        """Those of a plan. Raises StorageUnavailable."""
        by = None if plan.compaction is None else (plan.compaction.key, plan.model)
        items = await sealing.seal(plan.owner, plan.sealed_by)
        return cls(items, await sealing.seal(plan.owner, by))


UNSEALED = Seals()


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A generation that an earlier owner of the run did not bring to its end: the assembler as it stood in
    front of it, and the generation's records."""

    assembler: Assembler
    records: tuple[Record, ...]


@dataclass(slots=True, eq=False)
class Run:
    """One run of this process.

    context: the items before its output, pinned. told: the first of them as messages, where they are known.
    input: its own new ones among them. past: what stands before these, nothing left out; None where another
    process began it. first: the first generation's request, rendered with the plan.
    unlisted: routes whose functions were not shown yet. num_known: how many items of its output its functions
    were found with.

    begun: ids of the calls of this server's tools that were begun, here or perhaps by an earlier owner.

    For a run with an earlier owner. restarts: how often an owner ended while it made it. claim: by which it
    was taken over, until an engine may be given it.
    unfinished: the generation to go on with. gone: why its tools cannot be offered here any more.
    """

    plan: RunPlan
    served: ServedModel
    functions: Functions
    assembler: Assembler
    context: Sequence[Item]
    told: Told | None = None
    input: Sequence[Item] = ()
    past: Past | None = None
    first: GenerateRequest | None = None
    generated: tuple[GenerateRequest, list[int]] | None = None  # this task's last generation, and its tokens
    unlisted: tuple[Route, ...] = ()
    num_known: int = 0
    begun: set[str] = field(default_factory=set)
    queued: bool = False  # no event says yet that it is in progress
    restarts: int = 0
    claim: RunClaim | None = None
    unfinished: Unfinished | None = None
    gone: ApiError | None = None
    progress: Progress = field(default_factory=Progress)
    unlogged: Unlogged = field(default_factory=Unlogged)
    entry: RunLog = field(init=False)  # its place in the journal, given once it has one
    reach: Reach | None = None  # the MCP servers of its tools
    place: Place | None = None  # in the engine's queue, from before its start until its task is over
    visit: Visit | None = None  # the request that waits for it, one of those at once until its task is over
    counted: int | None = None  # tokens that its limits have counted already; None: those of its charge
    task: asyncio.Task[None] | None = None
    watched: int = 0  # the database's counter of readers elsewhere, as it was when it was looked at last
    watched_at: float | None = None  # by the event loop's clock, when that was; None: when the run began
    cancelled: bool = False  # somebody cancelled it: its task is, or will be, cancelled
    cancel_reason: CancelReason | None = None
    refusal: Exception | None = None  # why the log did not take what it wrote
    verdicts: dict[str, Verdict] = field(default_factory=dict)  # on its input and output, where it has any
    num_asked: int = 0  # items of its output that were judged with its input, where a client gave them
    failure: ApiError | None = None  # why it has failed, as a reply that is no response says it
    stepping: bool = True  # False once it has ended or parked: what is left is to make that durable
    ended: bool = False  # its terminal event is written
    lost: bool = False  # the database takes nothing more of it: another process has it, or it is gone
    purged: bool = False  # this process took it out of the database

    @classmethod
    def of(
        cls, plan: RunPlan, served: ServedModel, functions: Functions, context: Sequence[Item],
        seals: Seals = UNSEALED, output: Sequence[Item] = (), unfinished: Collection[int] = (),
    ) -> Run:  # fmt: skip
        """A run with what `fold` made of its events, if there are any, and no place in the journal yet."""
        assembler = assembler_of(plan, functions, seals, context, output, unfinished)
        unlisted = (*_unlisted(functions.local, (*context, *output)), *functions.unlisted)
        known = len(assembler.output)
        return cls(plan, served, functions, assembler, context, unlisted=unlisted, num_known=known)

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        return self.progress.output_tokens + len(self.unlogged.token_ids)

    @property
    def withholds(self) -> bool:
        """Whether a generation is shown only once it was judged as a whole."""
        return self.plan.generates and (self.plan.moderation or {}).get("output") == "block"

    @property
    def approved(self) -> list[Item]:
        """What asked for calls that are approved and not made yet."""
        return approved_calls(self.plan.approved, self.context, self.assembler.output)

    @property
    def has_loaded(self) -> bool:
        """Whether its output has loaded tools since its functions were found."""
        return any(map(is_loading, self.assembler.output[self.num_known :]))

    def learn(self, functions: Functions) -> None:
        """Go on with the tools that are known by now: of all servers, and those that searches have loaded."""
        self.functions, self.num_known = functions, len(self.assembler.output)
        self.assembler.lead(functions.routes)
        if self.reach is not None:
            functions.teach(self.reach)

    def take_unlogged(self) -> tuple[list[Draft], Tokens]:
        """What is not in the log yet, counted, for the record that is about to be written."""
        taken = self.unlogged
        self.progress.add(taken.facts, len(taken.token_ids))
        self.unlogged = Unlogged(taken.generation, taken.first_token + len(taken.token_ids))
        logprobs = dump_logprobs(taken.logprobs) if taken.logprobs else None
        facts = orjson.dumps(taken.facts) if taken.facts else None
        tokens = Tokens(tuple(taken.token_ids), taken.generation, taken.first_token, logprobs, facts)
        return taken.drafts, tokens

    def awaits(self) -> bool:
        """Whether it is about to wait for its client's answers to calls that can be seen already."""
        return self.plan.waits and bool(pending_calls(self.assembler.output))

    def head(
        self, status: str, *, completed_at: int | None = None, error: dict[str, Any] | None = None,
        reason: str | None = None, message: str | None = None, usage: dict[str, Any] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """The part of the Response object that changes, without its output. Times in unix seconds. reason,
        message: why it is incomplete."""
        details = {"reason": reason, **({"message": message} if message else {})}
        judged = self.plan.moderation is not None and usage is not None  # at the end alone
        return {
            **({"moderation": {"input": UNASKED, "output": UNASKED, **self.verdicts}} if judged else {}),
            "id": self.plan.response_id,
            "object": "response",
            "created_at": self.plan.created_at // 1_000_000,
            "status": status,
            "completed_at": completed_at,
            "error": error,
            "incomplete_details": details if reason else None,
            "usage": usage,
            **({"restarts": self.restarts} if self.restarts else {}),
            **({"cancel_reason": self.cancel_reason} if status == "cancelled" and self.cancel_reason else {}),
        }


def assembler_of(
    plan: RunPlan,
    functions: Functions,
    seals: Seals,
    context: Sequence[Item],
    output: Sequence[Item],
    unfinished: Collection[int],
) -> Assembler:
    """A run's assembler with what `fold` made of its events."""
    assembler = Assembler(
        plan.id_secret,
        routes=functions.routes,
        logprobs=plan.logprobs,
        include=plan.include,
        context=context,
        cites=plan.answer is None,  # a shape leaves no room for links
        seal=seals.items,
        seals_private=plan.hidden or not plan.store,
        output=output,
        unfinished=unfinished,
    )
    assembler.max_calls = plan.max_tool_calls
    assembler.compaction_seal = seals.compactions
    return assembler


def _unlisted(routes: Iterable[Route], items: Sequence[Item]) -> tuple[Route, ...]:
    """Those routes, each once, whose functions are shown in a listing, and that none of the items lists."""
    found: list[Route] = []
    for route in routes:
        execution = ITEM_TYPES[route.type].execution
        if execution is None or execution.listing is None or route in found:
            continue
        shows = execution.listing.shows
        if not any(shows(item, route) for item in items):
            found.append(route)
    return tuple(found)


def opening(head: dict[str, Any], *, background: bool) -> list[Draft]:
    """The first events of every run: `response.created` is first, always."""
    snapshot = {**head, "output": []}
    second = "response.queued" if background else "response.in_progress"
    return [{"type": "response.created", "response": snapshot}, {"type": second, "response": snapshot}]


def new_item(item: Item) -> NewItem:
    """An item as storage takes it; `name` marks the calls that a client answers."""
    name = item.get("name") or item["type"] if is_client_call(item) else None
    return NewItem(item["id"], item["type"], orjson.dumps(item), key_of(item), name, dump_private(item))


def new_items(items: Sequence[Item]) -> tuple[NewItem, ...]:
    """Items as storage takes them."""
    return tuple(map(new_item, items))


def output_id(plan: RunPlan, item: Item) -> str:
    """The item id of a tool output posted to a run: derived, so the same output posted twice has the same."""
    return derived_id(plan.id_secret, item["type"], str(key_of(item)))
