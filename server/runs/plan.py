"""The plan: a request resolved against the model and the stored past, with nothing left optional.

Owns every check between a request and its context (calls and outputs that must match, the context's size) and the
pinned `RunPlan`. Reads storage, writes nothing. Refuses to know how a run is executed, and HTTP.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import orjson

from engine import GenerateRequest, Prompt, PromptTooLong, ReaderParams, RenderInput
from server.errors import ApiError
from server.runs.prompt import OUTPUT_KINDS, Item, Offer, offer, sampling, to_messages
from server.runs.steps import pending_calls
from server.schema.fields import SamplingFields
from server.schema.items import unsupported_parts
from server.schema.tools import is_builtin
from storage import HistoryItem, NotFound

if TYPE_CHECKING:
    from server.models import ServedModel
    from server.schema.responses import CreateResponse
    from storage import Storage

TERMINAL = frozenset({"completed", "incomplete", "failed", "cancelled"})
"""Statuses that a response never leaves."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Everything a run needs besides items; stored at its start, so that a run is pinned to its inputs.

    secret: hex, source of the ids of its output. created_at: microseconds. num_dropped: items that truncation
    took from the beginning of the context. fingerprint: of the model that the plan was made for.
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
    sampling: dict[str, Any]
    seed: int  # used where `sampling` names none
    max_output_tokens: int | None
    logprobs: bool
    num_dropped: int
    template_kwargs: dict[str, Any]
    cache_salt: str
    waits: bool
    tool_timeout_s: float

    def dump(self) -> bytes:
        """The plan as stored."""
        return orjson.dumps(asdict(self))

    @classmethod
    def load(cls, data: bytes) -> RunPlan:
        """The plan as stored, back."""
        return cls(**orjson.loads(data))

    @property
    def id_secret(self) -> bytes:
        """Key of the ids of the output items."""
        return bytes.fromhex(self.secret)

    def functions(self, builtin: Mapping[str, Any]) -> tuple[list[Item], dict[str, str]]:
        """All functions the model may be offered, flat; and which of them the server runs: name -> server label.

        Raises ApiError 400 when two share a name.
        """
        functions = [tool for tool in self.tools if tool["type"] == "function"]
        servers: dict[str, str] = {}
        for tool in self.tools:
            if not is_builtin(tool):
                continue
            allowed = tool.get("allowed_tools")
            names = allowed.get("tool_names") if isinstance(allowed, dict) else allowed
            for name, spec in builtin.items():
                if names is None or name in names:
                    servers[name] = tool["server_label"]
                    functions.append(
                        {
                            "type": "function",
                            "name": name,
                            "description": spec.description,
                            "parameters": spec.parameters,
                        }
                    )
        taken = [function["name"] for function in functions]
        for name in servers:
            if taken.count(name) > 1:
                raise ApiError(400, f"Two tools are named {name!r}.", code="invalid_value", param="tools")
        return functions, servers

    def offer(self, functions: Sequence[Item], *, forced: bool) -> Offer:
        """What the model is offered in a generation: a forced tool choice holds for the first one only."""
        choice = self.tool_choice
        if not forced and (choice == "required" or isinstance(choice, dict)):
            choice = (
                {**choice, "mode": "auto"}
                if isinstance(choice, dict) and choice["type"] == "allowed_tools"
                else "auto"
            )
        return offer(functions, choice, self.parallel_tool_calls)

    def render_input(self, context: Sequence[Item], offered: Offer) -> RenderInput:
        """The template's input for a context."""
        return RenderInput(
            to_messages(context, self.instructions),
            tools=offered.tools,
            template_kwargs=self.template_kwargs,
            now=self.created_at / 1e6,
        )

    def request(
        self, served: ServedModel, prompt: Prompt, offered: Offer, *, generation: int, max_tokens: int | None
    ) -> GenerateRequest:
        """The engine request of one generation. Raises PromptTooLong."""
        fields = SamplingFields.model_validate(self.sampling)
        params = sampling(fields, served.info, prompt_tokens=len(prompt.ids), seed=self.seed)
        if max_tokens is not None:
            params = replace(params, max_tokens=min(params.max_tokens, max_tokens))
        reader = ReaderParams(calls=offered.calls, max_calls=offered.max_calls, starts_in=prompt.starts_in)
        return GenerateRequest(
            id=f"{self.response_id}/{generation}",
            prompt_ids=prompt.ids,
            sampling=params,
            reader=reader,
            constraint=offered.constraint,
            generation=generation,
            owner=self.owner,
            cache_salt=self.cache_salt,
        )


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan with what was needed to make it: its own new input, its context and the first prompt."""

    plan: RunPlan
    input: tuple[Item, ...]
    context: tuple[Item, ...]
    request: GenerateRequest


# ---------------------------------------------------------------------------------------------------------------
# Context


async def load_history(
    storage: Storage,
    owner: str,
    previous_response_id: str | None,
    conversation_id: str | None,
    head: int | None = None,
) -> list[Item]:
    """The items that stand before a turn's own input, oldest first. Raises ApiError 400/404."""
    if previous_response_id is not None:
        try:
            previous = await storage.get_response(owner, previous_response_id)
        except NotFound:
            message = f"Previous response with id '{previous_response_id}' not found."
            raise ApiError(
                400, message, code="previous_response_not_found", param="previous_response_id"
            ) from None
        if previous.status not in TERMINAL:
            message = f"Response '{previous_response_id}' has not finished (status {previous.status})."
            raise ApiError(400, message, code="response_not_finished", param="previous_response_id")
        return replayable(await storage.history(owner, previous_response_id=previous_response_id))
    if conversation_id is not None:
        try:
            history = await storage.history(owner, conversation_id=conversation_id, conversation_head=head)
        except NotFound:
            message = f"Conversation with id '{conversation_id}' not found."
            raise ApiError(404, message, code=None, param="conversation") from None
        return replayable(history)
    return []


def replayable(history: Sequence[HistoryItem]) -> list[Item]:
    """History as items, without the calls that a cancelled, failed or incomplete response left unanswered."""
    items = [(orjson.loads(entry.item.body), entry.response_status) for entry in history]
    open_calls = pending_calls([item for item, _ in items])
    return [
        item
        for item, status in items
        if status in (None, "completed")
        or item["type"] not in OUTPUT_KINDS.values()
        or item["call_id"] not in open_calls
    ]


def check_calls(history: Sequence[Item], new: Sequence[Item]) -> None:
    """Every output must answer a call, and every call must have its output. Raises ApiError 400 naming the ids."""
    known = {item["call_id"] for item in (*history, *new) if item["type"] in OUTPUT_KINDS.values()}
    for index, item in enumerate(new):
        if item["type"] in OUTPUT_KINDS and item.get("call_id") not in known:
            message = f"No tool call found for function call output with call_id {item.get('call_id')}."
            raise ApiError(400, message, code="invalid_value", param=f"input[{index}].call_id")
    unanswered = pending_calls([*history, *new])
    if unanswered:
        message = f"No tool output found for function call {', '.join(unanswered)}."
        raise ApiError(400, message, code="invalid_value", param="input")


def drop_oldest(items: Sequence[Item], count: int) -> list[Item]:
    """The items without the first `count`, and without outputs whose call went with them."""
    kept = list(items[count:])
    calls = {item["call_id"] for item in kept if item["type"] in OUTPUT_KINDS.values()}
    return [item for item in kept if item["type"] not in OUTPUT_KINDS or item.get("call_id") in calls]


# ---------------------------------------------------------------------------------------------------------------
# Making a plan


async def make_plan(
    request: CreateResponse, input_items: Sequence[Item], *, owner: str, storage: Storage, served: ServedModel,
    builtin: Mapping[str, Any], now: int, tool_timeout_s: float,
) -> Planned:  # fmt: skip
    """Resolve a request whose input is normalised and whose references are resolved.

    Raises ApiError 400/404 for what cannot be honoured, PromptTooLong when truncation is disabled.
    """
    context = await load_context(request, input_items, owner=owner, storage=storage, served=served)
    plan = _resolve(request, owner=owner, served=served, now=now, tool_timeout_s=tool_timeout_s)
    functions, _ = plan.functions(builtin)
    offered = plan.offer(functions, forced=True)
    if offered.constraint is not None:
        if "grammar" not in served.info.capabilities:
            message = f"The model '{served.name}' cannot be made to call a tool."
            raise ApiError(400, message, code="unsupported_parameter", param="tool_choice")
        await served.engine.check(offered.constraint)
    num_dropped, prompt = await fit(plan, served, context, offered, truncate=request.truncation == "auto")
    plan = replace(plan, num_dropped=num_dropped)
    first = plan.request(served, prompt, offered, generation=0, max_tokens=plan.max_output_tokens)
    return Planned(plan, tuple(input_items), tuple(drop_oldest(context, num_dropped)), first)


async def count_input(
    request: CreateResponse, input_items: Sequence[Item], *, owner: str, storage: Storage, served: ServedModel,
    builtin: Mapping[str, Any], now: int,
) -> int:  # fmt: skip
    """How many prompt tokens the request would have, through the same rendering. Raises ApiError 400/404."""
    context = await load_context(request, input_items, owner=owner, storage=storage, served=served)
    plan = _resolve(request, owner=owner, served=served, now=now, tool_timeout_s=0.0)
    functions, _ = plan.functions(builtin)
    prompt = await served.engine.render(plan.render_input(context, plan.offer(functions, forced=True)))
    return len(prompt.ids)


async def load_context(
    request: CreateResponse, input_items: Sequence[Item], *, owner: str, storage: Storage, served: ServedModel
) -> list[Item]:
    """The stored past and the new input, checked: nothing in it is beyond the model, every call has its output."""
    unsupported = unsupported_parts(input_items, modalities=served.info.modalities)
    if unsupported:
        path, modality = unsupported[0]
        message = f"The model '{served.name}' cannot read {modality} input."
        raise ApiError(400, message, code="unsupported_content", param=path)
    history = await load_history(storage, owner, request.previous_response_id, request.conversation_id)
    check_calls(history, input_items)
    return [*history, *input_items]


def _resolve(
    request: CreateResponse, *, owner: str, served: ServedModel, now: int, tool_timeout_s: float
) -> RunPlan:
    """The plan before its context was measured."""
    wants_logprobs = "message.output_text.logprobs" in request.include
    fields = request.sampling_fields()
    if "logit_bias" in fields:
        fields["logit_bias"] = {str(token): bias for token, bias in fields["logit_bias"].items()}
    if wants_logprobs:
        fields["logprobs"] = request.top_logprobs or 0
    return RunPlan(
        response_id=f"resp_{secrets.token_hex(24)}",
        owner=owner,
        model=served.name,
        fingerprint=served.info.fingerprint,
        secret=secrets.token_hex(16),
        created_at=now,
        store=request.store,
        background=request.background,
        previous_response_id=request.previous_response_id,
        conversation_id=request.conversation_id,
        instructions=request.instructions,
        tools=list(request.tools),
        tool_choice=request.tool_choice,
        parallel_tool_calls=request.parallel_tool_calls,
        sampling=fields,
        seed=secrets.randbits(63),  # the draw's key unless the client gave one
        max_output_tokens=request.max_output_tokens,
        logprobs=wants_logprobs,
        num_dropped=0,
        template_kwargs=request.chat_template_kwargs,
        cache_salt=request.cache_salt or "",
        waits=request.await_tool_outputs,
        tool_timeout_s=request.tool_timeout_s or tool_timeout_s,
    )


async def fit(
    plan: RunPlan, served: ServedModel, context: Sequence[Item], offered: Offer, *, truncate: bool
) -> tuple[int, Prompt]:
    """How many of the oldest items must go for the prompt to fit, and the prompt.

    Room is kept for the answer: `max_output_tokens`, at most half of the context, or an eighth of it when unset.
    Without truncation only one token of room is asked for. Raises PromptTooLong with the exact counts.
    """
    limit = served.info.max_model_len
    prompt = await served.engine.render(plan.render_input(context, offered))
    if len(prompt.ids) < limit and not truncate:
        return 0, prompt
    if not truncate:
        raise PromptTooLong(len(prompt.ids), limit)
    room = limit - min(plan.max_output_tokens or limit // 8, limit // 2)
    if len(prompt.ids) <= room:
        return 0, prompt
    too_few, enough = 0, max(len(context) - 1, 0)  # the newest item always stays
    smallest = await served.engine.render(plan.render_input(drop_oldest(context, enough), offered))
    if len(smallest.ids) >= limit:
        raise PromptTooLong(len(smallest.ids), limit)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        prompt = await served.engine.render(plan.render_input(drop_oldest(context, middle), offered))
        if len(prompt.ids) <= room:
            enough, smallest = middle, prompt
        else:
            too_few = middle
    return enough, smallest
