"""Resolves a request, against the model and the stored history, into a plan that leaves nothing open.

The plan is stored when the run starts, so a resumed run works from the same inputs. Planning also picks the
functions that the model is offered, and checks that the context fits, or drops its oldest items where the
request allows that.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from engine import ConstraintError, GenerateRequest, Prompt, PromptTooLong, RenderInput, Shape, check_request
from server.access import require_use
from server.containers import placed
from server.errors import ApiError
from server.ignored import ignore
from server.items import (
    COMPACTION,
    FILLED,
    ITEM_TYPES,
    Item,
    Route,
    approves,
    asks_approval,
    changes_images,
    configuration_of,
    is_answered,
    is_output,
    key_of,
    lacks,
    link_of,
    server_asked,
    server_labelled,
    shown_name,
    source_of,
    told_of,
    type_asked_for,
    type_of_calls,
    with_private,
)
from server.limits import Charge
from server.mcp_servers import Approvals
from server.prompting import (
    Offer,
    Told,
    cache_salt,
    check,
    image_options,
    longest_result,
    name_capped_limit,
    name_cut_limit,
    naming_source,
    offer,
    sampling,
    steady,
    to_messages,
    words_of_field,
)
from server.runs.planning.compaction import Compaction, Part, effective_threshold, next_part
from server.runs.planning.functions import Functions, enforced, functions_of
from server.runs.planning.history import Context, Turn, drop_oldest, load_context, require_readable
from server.runs.planning.pasts import Past
from server.runs.planning.saved_names import name_of
from server.runs.planning.steps import Progress, is_due
from server.runs.planning.tools import TurnTools, turn_tools
from server.schema import CreateResponse, FilledPrompt, SamplingFields, configured, num_parts, refuse
from server.telemetry import current, end_user
from server.threads import THREADED_PARTS, THREADED_TOKENS, aside, in_large_request

if TYPE_CHECKING:
    from server.encrypted_reasoning import SealedBy
    from server.model_registry import ServedModel
    from server.runs.planning.pasts import Pasts
    from storage import Storage
    from tools import Registry


IN_MEMORY = ("in_memory", "in-memory")
"""How a request says that what was computed of it is to be kept in memory alone."""

DAY_S = 86_400.0

SHORTEST_CUT = 256
"""Characters that every result of a tool is shown with, however little room there is."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Everything a run needs besides items; stored at its start, so that a run is pinned to its inputs.

    secret: hex, source of the ids of its output. created_at: microseconds. num_dropped: items that truncation
    took from the beginning of the context. fingerprint: of the model that the plan was made for. hidden: its
    client asked for store=false, and it is stored all the same, for the repeats of its request alone.
    answer: kind and source of the shape that an answer must have. sealed_by: what seals its reasoning, where
    that is wanted. key_id: of the API key that started it, None without one. trace: of the request that began
    it (`RequestRecord.dump`); None in plans of earlier versions. charge: what its start took of limits, None
    where there are none. tools: of its request, and `num_added` that items have added by then. truncates:
    whether the oldest items may be left out. secrets: what its tools said besides, sealed, as long as the run
    is not over. secured: labels of the servers that they were for, which is known when it is over, too.
    approvals: which calls of MCP tools need one. approved: ids of the items that asked for calls
    which the input approves, and which the run makes first. batch: it is a request of a batch. saved_as: the
    name under which the engine may keep on disk what it computes of it; None where nothing may be.
    saved_until: unix seconds after which that goes. generates: false where only its prompt is to be computed.
    prompt: the template that its request named, filled. own_id: its client chose its id. tells_messages: its
    end tells the messages that it was made of. moderation: its model, and the mode of each half
    (`server.moderation`). end_user: a digest of what its client calls the person that asks, for usage
    and logs. compaction: what it is to compact, None where nothing. image_options: how its images are
    processed, as far as that is its choice. newer: what a newer version has said in it besides. Whoever looks
    at a plan does without that; a run does not go on without it.

    It is stored without the fields that have their default, so that an older version goes on with whatever
    uses nothing new: what a default means must never change.
    """

    response_id: str
    owner: str
    model: str
    fingerprint: str
    secret: str
    created_at: int
    store: bool
    background: bool
    previous_response_id: str | None
    conversation_id: str | None
    instructions: str | None
    tools: list[Item]
    tool_choice: Any
    parallel_tool_calls: bool
    max_tool_calls: int | None
    sampling: dict[str, Any]
    seed: int  # used where `sampling` names none
    max_output_tokens: int | None
    logprobs: bool
    num_dropped: int
    template_kwargs: dict[str, Any]
    cache_salt: str
    waits: bool
    tool_timeout_s: float
    hidden: bool = False
    priority: int = 0
    weight: float = 1.0  # of the owner
    answer: tuple[str, str] | None = None
    answer_param: str = "text.format"  # the field that it came from
    effort: str | None = None
    sealed_by: SealedBy | None = None
    key_id: str | None = None
    trace: dict[str, str] | None = None
    charge: Charge | None = None
    truncates: bool = False
    secrets: str | None = None
    secured: list[str] = field(default_factory=list)
    include: list[str] = field(default_factory=list)  # what items are to say of their private halves
    approvals: Approvals = field(default_factory=Approvals)
    approved: list[str] = field(default_factory=list)
    batch: bool = False
    num_added: int = 0
    saved_as: str | None = None
    saved_until: float | None = None
    generates: bool = True
    prompt: FilledPrompt | None = None
    end_user: str | None = None
    compaction: Compaction | None = None
    image_options: dict[str, Any] = field(default_factory=dict)
    moderation: dict[str, str] | None = None
    own_id: bool = False
    tells_messages: bool = False
    newer: tuple[str, ...] = ()

    def dump(self) -> bytes:
        """The plan as stored."""
        values = ((name, getattr(self, name)) for name in _DEFAULTS)
        return orjson.dumps({name: value for name, value in values if value != _DEFAULTS[name]})

    @classmethod
    def load(cls, data: bytes) -> RunPlan:
        """The plan as stored, back."""
        newer: list[str] = []

        def known(kind: type[Any], said: Mapping[str, Any]) -> dict[str, Any]:
            names = {field.name for field in fields(kind)}
            newer.extend(f"{kind.__name__}.{name}" for name in said if name not in names)
            return {name: value for name, value in said.items() if name in names}

        found = known(cls, orjson.loads(data))
        if found.get("charge") is not None:
            found["charge"] = Charge(**known(Charge, found["charge"]))
        if found.get("compaction") is not None:
            found["compaction"] = Compaction(**known(Compaction, found["compaction"]))
        if found.get("prompt") is not None:
            found["prompt"] = FilledPrompt.load(known(FilledPrompt, found["prompt"]))
        if "approvals" in found:
            pinned = known(Approvals, found["approvals"])
            found["approvals"] = Approvals(pinned["policy"], tuple(pinned["trusted"]))
        return cls(**{**found, "newer": (*found.get("newer", ()), *newer)})

    @property
    def id_secret(self) -> bytes:
        """Key of the ids of the output items."""
        return bytes.fromhex(self.secret)

    @property
    def lead(self) -> str | Sequence[Item] | None:
        """What the model is told before its conversation: the messages of a prompt template, where it has
        any, else the instructions."""
        return self.instructions if self.prompt is None else self.prompt.items or self.instructions

    @property
    def lead_text(self) -> str | None:
        """The same as one text."""
        lead = self.lead
        return lead if lead is None or isinstance(lead, str) else "\n".join(map(told_of, lead))

    def functions(self, registry: Registry, items: Sequence[Item] = ()) -> Functions:
        """All functions and customs of the request's tools; see `functions_of`."""
        return functions_of(self.tools, registry, items, self.approvals, self.num_added)

    def offer(self, functions: Functions, *, forced: bool) -> Offer:
        """What the model is offered in a generation: a forced tool choice holds for the first one only.

        Raises ApiError 400 for tools, of a choice or of a filter, that are not there.
        """
        if forced and functions.unknown is not None:  # later on it was refused already, or is a newer rule
            refuse(*functions.unknown)
        # As long as a server has not listed its tools, nobody can say which of them are meant.
        waits = functions.unlisted and _may_mean_listed(self.tool_choice)
        choice = "auto" if waits else _of_functions(self.tool_choice, functions)
        listed = isinstance(self.tool_choice, dict) and self.tool_choice["type"] == "allowed_tools"
        if not forced and listed and isinstance(choice, dict):
            choice = {**choice, "mode": "auto"}
        elif not forced and choice != "none":
            choice = "auto"
        answer = None if self.answer is None else Shape(*self.answer)  # type: ignore[arg-type]
        return offer(functions.tools, choice, self.parallel_tool_calls, answer, loose=functions.loose)

    def named(self, error: ConstraintError, functions: Functions) -> ApiError:
        """The error for a constraint that failed in the middle of a generation."""
        constraint = self.offer(functions, forced=True).constraint
        return naming_source(error, constraint, self.tools, self.answer_param)

    async def rendered(
        self,
        served: ServedModel,
        context: Sequence[Item],
        offered: Offer,
        functions: Functions,
        told: Told | None = None,
        *,
        cuts: bool = True,
    ) -> Prompt:
        """A context as the model is shown it. told: the first of its items as messages. cuts: where little
        room is left for an answer, or none, the longest results of this server's tools are cut. Raises the
        engine's RequestErrors."""
        whole = await self._counted(served, context, offered, functions, told)
        most = served.info.max_model_len - 1
        if served.caps.prompt_tokens is not None:
            most = min(most, served.caps.prompt_tokens)
        eighth = served.info.max_model_len // 8
        wanted = min(most, served.info.max_model_len - min(self.max_output_tokens or eighth, eighth))
        if isinstance(whole, Prompt) and (not cuts or len(whole.ids) <= wanted):
            return whole
        length, shorter = 0, whole
        if cuts:
            much = in_large_request() or num_parts(context) > THREADED_PARTS
            length = await aside(much, longest_result, context, functions.names, told)
        # By powers of two, because prompts of later turns then mostly begin as this one does.
        for power in range((length - 1).bit_length() - 1, SHORTEST_CUT.bit_length() - 2, -1):
            shorter = await self._counted(served, context, offered, functions, most=1 << power)
            if isinstance(shorter, Prompt) and len(shorter.ids) <= wanted:
                return shorter
        for found in (whole, shorter):
            if isinstance(found, Prompt) and len(found.ids) <= most:
                return found
        if isinstance(whole, PromptTooLong):
            raise whole
        return whole

    async def _counted(
        self,
        served: ServedModel,
        context: Sequence[Item],
        offered: Offer,
        functions: Functions,
        told: Told | None = None,
        most: int | None = None,
    ) -> Prompt | PromptTooLong:
        """A context as a prompt, or why it was not even counted. most: characters of each result of this
        server's tools."""
        if told is not None and not told.holds(functions.names):
            told = None
        new = context if told is None else context[told.num_items :]
        much = in_large_request() or num_parts(new) > THREADED_PARTS
        words = partial(self._render_input, served, context, offered, functions, told, most)
        worded = replace(await aside(much, words), text_parts=served.caps.text_parts)
        try:
            return await served.engine.render(worded)
        except PromptTooLong as error:
            return error

    async def rendered_messages(
        self, served: ServedModel, messages: Sequence[Mapping[str, Any]], offered: Offer
    ) -> Prompt:
        """Messages behind the plan's lead as the model is shown them. Raises the engine's RequestErrors."""
        much = in_large_request() or len(messages) > THREADED_PARTS
        lead = await aside(much, to_messages, (), self.lead)
        return await served.engine.render(self._input([*lead, *messages], offered))

    def _render_input(
        self,
        served: ServedModel,
        context: Sequence[Item],
        offered: Offer,
        functions: Functions,
        told: Told | None,
        most: int | None,
    ) -> RenderInput:
        """The template's input for a context. Raises ApiError 400 for one that says nothing."""
        messages = to_messages(context, self.lead, functions.names, told, most, sees=served.sees)
        if not messages:
            message = "There is nothing to answer: neither the input nor what it goes on from has a message."
            refuse("input", message, "invalid_prompt")
        return self._input(messages, offered)

    def _input(self, messages: Sequence[Mapping[str, Any]], offered: Offer) -> RenderInput:
        """The template's input for messages."""
        return RenderInput(
            messages,
            image_options=self.image_options,
            tools=offered.tools,
            template_kwargs=self.template_kwargs,
            effort=self.effort,
            answer=offered.answer,
            now=self.created_at / 1e6,
            scope=self.owner,
        )

    def summary_request(
        self, served: ServedModel, part: Part, offered: Offer, *, generation: int
    ) -> GenerateRequest:
        """The engine request of one generation of a compaction: the likeliest text, and no calls. What the
        client asks of an answer does not hold for it."""
        plan = replace(self, sampling={"temperature": 0.0})
        shown = Offer(tools=offered.tools)
        return plan.request(served, part.prompt, shown, generation=generation, max_tokens=part.max_tokens)

    def request(
        self, served: ServedModel, prompt: Prompt, offered: Offer, *, generation: int, max_tokens: int | None
    ) -> GenerateRequest:
        """The engine request of one generation. Raises PromptTooLong."""
        fields = SamplingFields.model_validate({**self.sampling, "max_tokens": max_tokens})
        params = sampling(
            fields, served.info, prompt_tokens=len(prompt.ids), seed=self.seed, caps=served.caps
        )
        return GenerateRequest(
            id=f"{self.response_id}/{generation}",
            prompt_ids=prompt.ids,
            sampling=steady(params, offered.answer),
            reader=offered.reader(prompt.starts_in),
            constraint=offered.enforced(served.info),
            generation=generation,
            owner=self.owner,
            cache_salt=self.cache_salt,
            weight=self.weight,
            priority=self.priority,
            adapter=served.adapter,
            media=prompt.media,
            saved_as=self.saved_as,
            saved_until=self.saved_until,
            deadline=served.caps.deadline(),
        )


def without_secrets(data: bytes) -> bytes | None:
    """A stored plan that this version may not be able to load, without what must not outlive its run; None
    where nothing is to be changed, or can be."""
    with suppress(orjson.JSONDecodeError):
        found = orjson.loads(data)
        if isinstance(found, dict) and found.get("secrets") is not None:
            return orjson.dumps({**found, "secrets": None})
    return None


def planned_model(data: bytes) -> tuple[str, str] | None:
    """The name and the fingerprint of the model that a stored plan is for; None where it cannot be read."""
    with suppress(ValueError, KeyError, TypeError):
        found = orjson.loads(data)
        return found["model"], found["fingerprint"]
    return None


_DEFAULTS: dict[str, Any] = {
    each.name: each.default if each.default_factory is MISSING else each.default_factory()
    for each in fields(RunPlan)
}
"""Of the fields of a plan; MISSING where one has none."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, with what was needed to make it and its first generation's request. That is not what will be
    asked where other servers have to list their tools first, or approved calls are to be made, but it counts
    against limits. past: what stands before its own input. told: the first of the context's items as
    messages, where they are known. secrets: the credentials of the plan's tools, by their index as a text.
    compacts: it begins with a compaction, and the request stands for that. asked: what it was planned for,
    with the settings that items make."""

    plan: RunPlan
    functions: Functions
    input: tuple[Item, ...]
    context: tuple[Item, ...]
    past: Past
    told: Told | None
    conversation_head: int | None
    request: GenerateRequest
    secrets: Mapping[str, Mapping[str, Any]]
    compacts: bool
    asked: CreateResponse


# ------------------------------------------------------------------------------------------------------------
# Choices of tools that are no functions themselves


def _may_mean_listed(choice: Any) -> bool:
    """Whether a tool choice can mean functions of MCP servers."""
    return not isinstance(choice, dict) or choice["type"] in ("mcp", "allowed_tools")


def _of_functions(choice: Any, functions: Functions) -> Any:
    """A tool choice with every reference to a tool replaced by the functions that it stands for, and without
    references to what no search has loaded yet. Raises ApiError 400 where nothing else is chosen."""
    if not isinstance(choice, dict):
        return choice
    listed = choice["type"] == "allowed_tools"
    found: list[Item] = []
    for ref in choice["tools"] if listed else [choice]:
        meant = _meant(ref, functions)
        if not meant and not (listed and _is_deferred(ref, functions)):
            refuse("tool_choice", _why_not(ref, functions))
        found += meant
    if not listed and not _gives_functions(choice, functions):
        return found[0]
    return {"type": "allowed_tools", "mode": choice.get("mode", "required"), "tools": found}


def _why_not(ref: Mapping[str, Any], functions: Functions) -> str:
    """Why a reference stands for no function, as a sentence: it is deferred, or its server has others."""
    name, label = ref.get("name"), ref.get("server_label")
    what = name or label or ref["type"]
    if _is_deferred(ref, functions):
        return f"Tool choice {what!r} is deferred: it can be called once a search has loaded it."
    routes = functions.routes.items()
    offered = [
        route.fields.get("name", own) for own, route in routes if route.fields.get("server_label") == label
    ]
    if name is None or label is None or not offered:
        return f"Tool choice {label or what!r} was not found in the 'tools' parameter."
    told = f"the tools of {label!r} that this request offers are: {', '.join(offered)}."
    return f"Tool choice {name!r} was not found: {told}"


def _meant(ref: Mapping[str, Any], functions: Functions) -> list[Item]:
    """The references to functions that a reference to a tool stands for; itself, where it stands for none.
    None at all, where there is no such function, or it is deferred."""
    if _is_function(ref):
        itself = {"type": ref.get("type", "function"), "name": shown_name(ref)}
        return [] if _is_deferred(ref, functions) else [itself]
    if not _gives_functions(ref, functions):
        return [dict(ref)]
    named = [name for name, route in functions.routes.items() if _means(ref, name, route)]
    return [{"type": "function", "name": name} for name in named]


def _is_deferred(ref: Mapping[str, Any], functions: Functions) -> bool:
    """Whether a reference is to functions that may be loaded, and are not yet."""
    if _is_function(ref):
        return any(shown_name(ref) == known.function["name"] for known in functions.deferred)
    return any(_means(ref, known.function["name"], known.route) for known in functions.deferred)


def _is_function(ref: Mapping[str, Any]) -> bool:
    return ref.get("type", "function") in ("function", "custom") and isinstance(ref.get("name"), str)


def _gives_functions(ref: Mapping[str, Any], functions: Functions) -> bool:
    return _has_functions(ref) and ref.get("type") not in functions.lacking


def _has_functions(ref: Mapping[str, Any]) -> bool:
    """Whether a tool choice refers to a kind of tool that gives the model functions, and is none itself."""
    kind = ref.get("type", "function")
    return kind not in ("function", "custom") and type_of_calls(kind) is not None


def _means(ref: Mapping[str, Any], name: str, route: Route) -> bool:
    """Whether a tool choice refers to a function: it says nothing else than the function's calls do."""
    if ref["type"] == "namespace":
        return bool(route.fields.get("namespace") == ref.get("name"))
    said = {"name": name, **route.fields}
    same = all(ref.get(key, value) == value for key, value in said.items())
    return same and ref["type"] in ITEM_TYPES[route.type].tools


# ------------------------------------------------------------------------------------------------------------
# Making a plan


async def make_plan(
    turn: Turn,
    storage: Storage,
    registry: Registry,
    *,
    tool_timeout_s: float,
    keyed: bool = False,
    sealed_by: SealedBy | None = None,
    compaction_key: int | None = None,
    pasts: Pasts | None = None,
) -> Planned:
    """Resolve a turn.

    pasts: of earlier turns, to be built upon. keyed: it came with an `Idempotency-Key`, so what it starts is
    stored, hidden where it asks not to be. compaction_key: the number of the key that seals compactions,
    where it may make some. Raises ApiError 400/404 and RequestError for what cannot be
    honoured, PromptTooLong when truncation is disabled.
    """
    context = await load_context(turn, storage, pasts)
    turn = _configured(turn, context)
    request, served = turn.request, turn.served
    tools = await _tools(turn, context.items, registry)
    plan = _resolve(turn, tools, tool_timeout_s, keyed=keyed)
    if compaction_key is not None:
        plan = replace(plan, compaction=_compaction(turn, context, compaction_key))
    with tools.named():
        if plan.tools:
            known = await placed(storage, plan.owner, plan.tools, context.items, plan.id_secret)
            plan = replace(plan, tools=known)
        functions, offered = await _offered(plan, registry, context.items, served)
        plan = replace(plan, include=_filled(request.include, plan, functions))
        approve = partial(_approved, context.items, turn.input, functions, plan.tools)
        approved = await aside(in_large_request(), approve)
        if approved and not plan.generates:
            refuse("generate", "A request that approves calls has to make them: 'generate' cannot be false.")
        if approved and request.compacts:
            refuse("input", "A request that approves calls has to make them: it cannot end with a trigger.")
        for each in (offered, _offered_later(functions)):
            await check(each, served, plan.tools, request.shape_param, turn.principal.owner)
    with words_of_field("input"):
        kept = _num_kept(context.items, approved)
        compacted: int | None = None
        begun: Prompt | None = None
        if plan.compaction is not None:
            compacted, begun = await _compacting(plan, served, context, offered, functions)
        num_dropped, prompt = (
            await fit(plan, served, context.items, offered, functions, context.told, kept=kept)
            if begun is None
            else (0, begun)
        )
    who = turn.principal
    plan = replace(
        plan,
        approved=approved,
        num_dropped=num_dropped,
        saved_as=_saved_as(plan, request.prompt_cache_retention, context),
        sealed_by=sealed_by,
        key_id=who.key_id,
        batch=who.batch,
    )

    def finished() -> Planned:
        most = plan.max_output_tokens if plan.generates else 1
        if compacted is not None:
            most = compacted
        first = plan.request(served, prompt, offered, generation=0, max_tokens=most)
        check_request(first, served.info)
        kept = tuple(drop_oldest(context.items, num_dropped))
        told = None if num_dropped else context.told
        head, past = context.conversation_head, context.past
        own = tuple(turn.input)
        begins = (first, tools.secrets, compacted is not None, request)
        return Planned(plan, functions, own, kept, past, told, head, *begins)

    limit, param = request.max_output_tokens, request.limit_param
    name_capped_limit(limit, param, served.caps)
    if compacted is None:
        name_cut_limit(limit, param, prompt_tokens=len(prompt.ids), info=served.info)
    return await aside(in_large_request() or len(prompt.ids) > THREADED_TOKENS, finished)


def _configured(turn: Turn, context: Context) -> Turn:
    """A turn with the settings that items make. Raises ApiError 400."""
    settings = configuration_of(context.items)
    return replace(turn, request=configured(turn.request, settings)) if settings else turn


def _compaction(turn: Turn, context: Context, key: int) -> Compaction | None:
    """What a turn is to compact. Raises ApiError 400 where it asks for that, and there is nothing."""
    request = turn.request
    if request.compacts:
        if not request.generate:
            refuse("generate", "A compaction has to be written: 'generate' cannot be false.")
        if not context.items:
            refuse("input", "There is nothing to compact: the conversation has no items.", "empty_array")
        return Compaction(None, key)
    if request.compact_threshold is None or not request.generate:
        return None
    return Compaction(effective_threshold(request.compact_threshold, turn.served), key)


async def _compacting(
    plan: RunPlan, served: ServedModel, context: Context, offered: Offer, functions: Functions
) -> tuple[int | None, Prompt | None]:
    """How many tokens a compaction writes that the run begins with, None where it does not, and the prompt of
    that, None where the context's own is to be measured."""
    assert plan.compaction is not None, "it may compact"
    items = context.items
    if not plan.compaction.is_all and not await is_long(
        plan, served, items, offered, functions, context.told
    ):
        return None, None
    part = await next_part(plan, served, items, offered, functions, Progress())
    if isinstance(part, Part):
        return part.max_tokens, part.prompt
    made = with_private({"type": COMPACTION, "id": "", "encrypted_content": ""}, part.dump())
    return 1, await plan.rendered(served, [*items, made], offered, functions)


async def is_long(
    plan: RunPlan, served: ServedModel, items: Sequence[Item], offered: Offer, functions: Functions,
    told: Told | None,
) -> bool:  # fmt: skip
    """Whether the prompt of these items is so long that they are compacted first. Raises the engine's
    RequestErrors."""
    assert plan.compaction is not None, "it may compact"
    num_tokens: int | None = None
    with suppress(PromptTooLong):  # so long that it was not even counted
        num_tokens = len((await plan.rendered(served, items, offered, functions, told, cuts=False)).ids)
    return is_due(items[-2:], num_tokens, plan.compaction.threshold)


def _saved_as(plan: RunPlan, retention: str | None, context: Context) -> str | None:
    """The name under which what is computed of a run may be kept on disk; None where the client wants that
    nowhere but in memory, or where no name could tell that something of it has been deleted."""
    if not plan.store or plan.hidden or retention in IN_MEMORY or context.mixed:
        return None
    if plan.conversation_id is None or context.conversation_epoch is None:
        return plan.response_id
    return name_of(plan.conversation_id, context.conversation_epoch)


def _approved(
    items: Sequence[Item], new: Sequence[Item], functions: Functions, tools: Sequence[Item]
) -> list[str]:
    """The ids of the items that asked for calls which the new ones approve and which are not made yet.

    Raises ApiError 400 for a call that cannot be made with the tools of this request, or that was to be made
    at another server than these tools have under its label. A client may have made the item up that asked, so
    it can have no call approved that it could not have had without being asked.
    """
    if not any(map(approves, new)):
        return []
    made = {source_of(item) for item in items}
    asked = {key_of(item): item for item in items if asks_approval(item)}
    # One that its client sends again, beside the first, may say nothing of its server.
    known = ((key_of(item), server_asked(item)) for item in items if asks_approval(item))
    servers = {key: server for key, server in known if server is not None}
    found: list[str] = []
    for index, answer in enumerate(new):
        if not approves(answer) or key_of(answer) in made:
            continue
        name, key = link_of(answer)
        request = asked[key]
        labelled = server_labelled(request, tools)
        if (wanted := servers.get(key)) is not None and labelled not in (None, wanted):
            message = (
                f"The call that '{key}' asks approval for was to be made at the MCP server {wanted!r}. In "
                f"this request the label {request['server_label']!r} stands for another one, {labelled!r}, "
                "so the approval is not good there. Send the first server in 'tools' under that label, or "
                "have the model ask anew."
            )
            refuse(f"input[{index}].{name}", message)
        if not functions.allow({**request, "type": type_asked_for(request).type}):
            message = (
                f"The call that '{key}' asks approval for is of a tool that this request does not have: "
                f"{request['name']!r} of the MCP server {request['server_label']!r}. "
                f"{_remedy(request, tools)}"
            )
            refuse(f"input[{index}].{name}", message)
        found.append(str(key))
    return found


def _remedy(request: Item, tools: Sequence[Item]) -> str:
    """What a client can do so that a call can be made which these tools do not have, as a sentence."""
    label = request["server_label"]
    labelled = [tool for tool in tools if tool.get("server_label") == label]
    if any(tool.get("allowed_tools") is None and not tool.get("defer_loading") for tool in labelled):
        return (
            "The request allows all tools of the server, which has none of this name (any more). Decline "
            "the call, or leave the request for approval without an answer."
        )
    return "Send the server in 'tools' again, with that label, and allow the tool."


def _num_kept(items: Sequence[Item], approved: Sequence[str]) -> int:
    """How many of the newest items may not be left out: those from the first on that asks for a call which is
    about to be made."""
    if not approved:
        return 1
    wanted = set(approved)
    asking = (index for index, item in enumerate(items) if asks_approval(item) and key_of(item) in wanted)
    return len(items) - next(asking, len(items) - 1)


def _with_calls(items: Sequence[Item], kept: int) -> int:
    """How many of the newest items are the last `kept` ones and the calls that their outputs answer."""
    start, wanted = len(items), set[tuple[str, str | None]]()
    while start > 0 and (wanted or start > len(items) - kept):
        start -= 1
        if is_output(items[start]):
            wanted.add(link_of(items[start]))
        elif is_answered(items[start]):
            wanted.discard(link_of(items[start]))
    return len(items) - start


async def count_input(turn: Turn, storage: Storage, registry: Registry) -> int:
    """How many prompt tokens a turn would have, through the same rendering. Raises ApiError 400/404."""
    context = await load_context(turn, storage)
    turn = _configured(turn, context)
    tools = await _tools(turn, context.items, registry)
    plan = _resolve(turn, tools, tool_timeout_s=0.0, keyed=False)
    with tools.named():
        functions, offered = await _offered(plan, registry, context.items, turn.served)
    with words_of_field("input"):
        prompt = await plan.rendered(turn.served, context.items, offered, functions, context.told)
    return len(prompt.ids)


async def _tools(turn: Turn, items: Sequence[Item], registry: Registry) -> TurnTools:
    """All tools of a turn. items: that it stands on. Raises ApiError 400, also for input that its model
    cannot read, and 403 for tools of stored items that its principal may not use."""
    tools = await aside(in_large_request(), turn_tools, turn.request, items, len(turn.input))
    changed = any(changes_images(tool) and lacks(tool, registry) is None for tool in tools.tools)
    readable = partial(require_readable, turn.input, turn.served, "input", tells_images=changed)
    await aside(in_large_request(), readable)
    tools.require_search()
    if len(tools.tools) > len(turn.request.tools):
        require_use(turn.principal, turn.served.allowed_as, tools.tools)
    return tools


async def _offered(
    plan: RunPlan, registry: Registry, items: Sequence[Item], served: ServedModel
) -> tuple[Functions, Offer]:
    """All functions of a plan that are known, and what of them the first generation is offered. Raises
    ApiError 400."""
    functions = await aside(in_large_request(), plan.functions, registry, items)
    functions = await enforced(functions, served, plan.owner)
    return functions, await aside(in_large_request(), partial(plan.offer, functions, forced=True))


def _filled(include: Sequence[str], plan: RunPlan, functions: Functions) -> list[str]:
    """Those values of an `include` that ask for what items of the response may have. What none can have is
    named as ignored: images of the input among it, which only lists of items show."""
    types = {route.type for route in functions.local}
    any_tool = plan.waits and "tool_search_call" in types  # its client may bring tools of every kind
    if plan.compaction is not None:
        types.add(COMPACTION)
    filled = []
    for index, name in enumerate(include):
        if name not in FILLED:  # it asks for more of texts or of reasoning
            continue
        if any_tool or any(name in ITEM_TYPES[type_].includes for type_ in types):
            filled.append(name)
        else:
            ignore(f"include[{index}]")
    return filled


def _offered_later(functions: Functions) -> Offer:
    """What searches may load of the request's own functions: what cannot be enforced is refused at once."""
    return offer([known.function for known in functions.deferred if not known.elsewhere], "auto", True)


def _resolve(turn: Turn, tools: TurnTools, tool_timeout_s: float, *, keyed: bool) -> RunPlan:
    """The plan before its context was measured. keyed: see `make_plan`."""
    request, served = turn.request, turn.served
    wants_logprobs = "message.output_text.logprobs" in request.include
    if wants_logprobs and "logprobs" not in served.info.capabilities:
        message = f"The model '{served.name}' gives no log probabilities."
        refuse("include", message, "unsupported_parameter")
    fields = request.sampling_fields()
    if "logit_bias" in fields:
        fields["logit_bias"] = {str(token): bias for token, bias in fields["logit_bias"].items()}
    if wants_logprobs:
        fields["logprobs"] = request.top_logprobs or 0
    return RunPlan(
        response_id=f"resp_{request.request_id or secrets.token_hex(24)}",
        own_id=request.request_id is not None,
        tells_messages=request.enable_response_messages,
        owner=turn.principal.owner,
        model=served.name,
        fingerprint=served.info.fingerprint,
        secret=secrets.token_hex(16),
        created_at=turn.as_of,
        store=request.store or keyed,
        hidden=keyed and not request.store,
        background=request.background,
        previous_response_id=request.previous_response_id,
        conversation_id=request.conversation_id,
        instructions=request.instructions,
        prompt=None if request.prompt is None else request.prompt.for_plan(),
        moderation=None if request.moderation is None else request.moderation.dump(),
        end_user=end_user(turn.principal.owner, request.safety_identifier or request.user),
        tools=list(tools.tools),
        num_added=len(tools.tools) - len(request.tools),
        tool_choice=request.tool_choice,
        parallel_tool_calls=request.parallel_tool_calls,
        max_tool_calls=request.max_tool_calls,
        sampling=fields,
        seed=secrets.randbits(63),  # the draw's key unless the client gave one
        max_output_tokens=served.caps.output(request.max_output_tokens),
        logprobs=wants_logprobs,
        num_dropped=0,
        template_kwargs=request.chat_template_kwargs,
        effort=request.reasoning.effort if request.reasoning else None,
        cache_salt=cache_salt(request.cache_salt, request.prompt_cache_key, served.caps),
        waits=request.await_tool_outputs,
        image_options=image_options(request.mm_processor_kwargs, served.info),
        tool_timeout_s=request.tool_timeout_s or tool_timeout_s,
        priority=request.priority or 0,
        weight=turn.principal.service.weight,
        answer=None if request.shape is None else (request.shape.kind, request.shape.source),
        answer_param=request.shape_param,
        truncates=request.truncation == "auto",
        approvals=turn.approvals(tools.tools),
        generates=request.generate,
        saved_until=turn.as_of / 1e6 + DAY_S if request.prompt_cache_retention == "24h" else None,
        trace=None if (record := current.get()) is None else record.dump(),
    )


async def fit(
    plan: RunPlan,
    served: ServedModel,
    context: Sequence[Item],
    offered: Offer,
    functions: Functions,
    told: Told | None = None,
    *,
    kept: int = 1,
) -> tuple[int, Prompt]:
    """How many of the oldest items must go for the prompt to fit, and the prompt.

    told: the first items of the context as messages. Room is kept for the answer: `max_output_tokens`, at
    most half of the context, or an eighth of it when unset. Results of tools are cut only where nothing more
    can go. Without truncation only one token of room is asked for. Raises PromptTooLong with the exact
    counts.
    """
    limit = served.info.max_model_len

    async def without(count: int, *, cuts: bool = True) -> Prompt:
        if not count:
            return await plan.rendered(served, context, offered, functions, told, cuts=cuts)
        much = in_large_request() or len(context) > THREADED_PARTS
        kept = await aside(much, drop_oldest, context, count)
        return await plan.rendered(served, kept, offered, functions, cuts=cuts)

    if not plan.truncates:
        prompt = await without(0)
        if len(prompt.ids) >= limit:
            raise PromptTooLong(len(prompt.ids), limit)
        return 0, prompt
    room = limit - min(plan.max_output_tokens or limit // 8, limit // 2)
    if served.caps.prompt_tokens is not None:
        room = min(room, served.caps.prompt_tokens)

    async def fits(count: int) -> Prompt | None:
        with suppress(PromptTooLong):  # so long that it was not even counted
            prompt = await without(count, cuts=False)
            return prompt if len(prompt.ids) <= room else None
        return None

    if (whole := await fits(0)) is not None:
        return 0, whole
    too_few, enough = 0, max(len(context) - _with_calls(context, kept), 0)  # the newest items always stay
    fitting = await without(enough)
    if len(fitting.ids) >= limit:
        raise PromptTooLong(len(fitting.ids), limit)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if (found := await fits(middle)) is None:
            too_few = middle
        else:
            enough, fitting = middle, found
    return enough, fitting
