"""Loads the context of a turn: the stored history and the new input, checked against each other.

Every tool output needs its call, and every call one output of its kind. Unanswered calls of cancelled, failed
and incomplete responses are left out. A request for an approval may stay unanswered, and is answered once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from server.access import Principal
from server.errors import ApiError, waits_for_outputs
from server.ignored import ignore
from server.items import (
    ITEM_TYPES,
    Item,
    Tool,
    asks_approval,
    is_answered,
    is_approval,
    is_client_call,
    is_left_out,
    is_output,
    key_of,
    link_of,
    words_of,
)
from server.mcp_servers import Approvals
from server.prompting import Told
from server.runs.planning.calls import Calls
from server.runs.planning.pasts import Past, Pasts, Said
from server.runs.planning.steps import TERMINAL, pending_calls
from server.schema import refuse, unsupported_parts
from server.threads import THREADED_PARTS, aside, begin_large_request, in_large_request
from storage import NotFound

if TYPE_CHECKING:
    from server.model_registry import ServedModel
    from server.schema import CreateResponse
    from storage import Storage


@dataclass(frozen=True, slots=True)
class Turn:
    """A request as a plan is made of it, its references resolved.

    input: its own new items, normalised. as_of: the moment in unix microseconds whose past it continues.
    approvals: which calls of MCP tools need one, for the tools of the turn. past: what the previous response
    leads to, where whoever began the turn has it, because nothing of that is stored.
    """

    request: CreateResponse
    input: Sequence[Item]
    principal: Principal
    served: ServedModel
    as_of: int
    approvals: Callable[[Sequence[Tool]], Approvals]
    past: Past | None = None


@dataclass(frozen=True, slots=True)
class Context:
    """The items that a turn stands on, its own input last, as they were at one moment.

    past: what stands before the input. told: the first of all items as messages, None where that is not
    known. conversation_head, conversation_epoch: of the conversation as it was then; None without one. mixed:
    some are of a conversation that a response before this one ran in.
    """

    items: tuple[Item, ...]
    told: Told | None = None
    past: Past = field(default_factory=Past)
    conversation_head: int | None = None
    conversation_epoch: int | None = None
    mixed: bool = False


async def load_context(turn: Turn, storage: Storage, pasts: Pasts | None = None) -> Context:
    """The stored past of a turn and its new input, checked: there are words for all of it, and every call has
    its output. pasts: of earlier turns, to be built upon. Raises ApiError 400/404, and ConversationLocked
    where they do not fit and the conversation's turn is not over."""
    request, new = turn.request, turn.input
    await aside(in_large_request(), _check_words, new)
    head = epoch = None
    past = Past()
    pasts = pasts or Pasts(storage)
    try:
        if turn.past is not None:
            past = turn.past
        elif request.previous_response_id is not None:
            previous = await storage.get_response(turn.principal.owner, request.previous_response_id)
            if previous.status not in TERMINAL:
                wait = waits_for_outputs(previous.id) if previous.waiting else "Wait for its end"
                message = (
                    f"Response '{previous.id}' has not finished (status {previous.status}). {wait}, or fork "
                    "it behind an item that it has."
                )
                refuse("previous_response_id", message, "response_not_finished")
            past = await pasts.of(previous, turn.as_of)
        elif request.conversation_id is not None:
            past = await pasts.of_conversation(turn.principal.owner, request.conversation_id, turn.as_of)
            head, epoch = past.head, past.epoch
    except NotFound as unknown:
        raise not_found(request, unknown) from None
    try:
        conversation_id = request.conversation_id
        context = await aside(in_large_request(), _joined, past, new, conversation_id)
        if context is None:  # calls of responses that were cut short are looked for among all items
            if len(past.items) > THREADED_PARTS:
                begin_large_request()
            context = await aside(in_large_request(), _joined_anew, past, new, conversation_id)
    except ApiError:
        if request.conversation_id is not None:  # what is missed may be of the turn that is at work there
            await storage.require_unlocked(turn.principal.owner, request.conversation_id)
        raise
    mixed = past.in_conversation
    return replace(context, past=past, conversation_head=head, conversation_epoch=epoch, mixed=mixed)


def _check_words(items: Sequence[Item]) -> None:
    for index, item in enumerate(items):
        words_of(item, f"input[{index}]")
        if is_left_out(item):
            ignore(f"input[{index}]")


def require_readable(
    items: Sequence[Item], served: ServedModel, param: str, *, tells_images: bool = False
) -> None:
    """ApiError 400 `unsupported_content` for a part of items that the model cannot read. tells_images: see
    `unsupported_parts`."""
    modalities = served.info.modalities
    unsupported = unsupported_parts(items, modalities=modalities, param=param, tells_images=tells_images)
    if unsupported:
        path, modality = unsupported[0]
        message = f"The model '{served.name}' cannot read {modality} input."
        refuse(path, message, "unsupported_content")


def _joined(past: Past, new: Sequence[Item], conversation_id: str | None) -> Context | None:
    """A past and new items, checked; None where some of the past may have to be left out. conversation_id:
    whose items the past is. Raises ApiError 400."""
    calls = past.calls.and_then([(item, None) for item in new])
    if calls.doubtful and calls.pending:
        return None
    _check_calls(past.calls, calls, past.items, new, conversation_id)
    return Context((*past.items, *new), past.told)


def _joined_anew(past: Past, new: Sequence[Item], conversation_id: str | None) -> Context:
    """The same, of those items of the past that are not to be left out."""
    kept = replayable(past.said, new)
    check_calls(kept, new, conversation_id)
    return Context((*kept, *new))


def not_found(request: CreateResponse, unknown: NotFound) -> ApiError:
    """The answer to a request that builds on something that is not there."""
    if unknown.kind == "conversation":
        message = f"Conversation with id '{request.conversation_id}' not found."
        return ApiError(404, message, code="not_found", param="conversation")
    message = (
        f"Previous response with id '{request.previous_response_id}' not found. It may have been deleted or "
        "have expired, or it was made with 'store': false."
    )
    return ApiError(400, message, code="previous_response_not_found", param="previous_response_id")


def replayable(history: Sequence[Said], new: Sequence[Item]) -> list[Item]:
    """History without unanswered calls of cancelled, failed and incomplete responses."""
    unanswered = pending_calls([*(item for item, _ in history), *new])
    return [
        item
        for item, status in history
        if status in (None, "completed") or not is_client_call(item) or key_of(item) not in unanswered
    ]


def check_calls(history: Sequence[Item], new: Sequence[Item], conversation_id: str | None = None) -> None:
    """Every output needs its call, and every call one output of its kind. conversation_id: whose items the
    history is, if those of a conversation. Raises ApiError 400 naming the ids."""
    past = Calls().and_then([(item, None) for item in history])
    _check_calls(past, past.and_then([(item, None) for item in new]), history, new, conversation_id)


def _check_calls(
    past: Calls, calls: Calls, history: Sequence[Item], new: Sequence[Item], conversation_id: str | None
) -> None:
    """The same, of the calls among the past items, `history`, and among all of them."""
    approved = set()
    given: Counter[tuple[str, str | None]] = Counter()
    for index, item in enumerate(new):
        if not is_output(item):
            continue
        link = name, key = link_of(item)
        if link not in calls.known and is_approval(item):
            wanted = ITEM_TYPES[item["type"]].answers
            refuse(f"input[{index}].{name}", f"No item of type '{wanted}' found with id '{key}'.")
        if link not in calls.known:
            message = f"No tool call found for function call output with {name} {key}."
            refuse(f"input[{index}].{name}", message)
        if is_approval(item):
            if link in past.answered or link in approved:
                refuse(f"input[{index}].{name}", f"Approval request '{key}' was answered already.")
            approved.add(link)
            continue
        kinds = calls.known[link]
        if item["type"] not in (*kinds, "function_call_output"):  # by which older clients answer any call
            message = f"An output of type '{item['type']}' does not answer this call; '{kinds[-1]}' would."
            refuse(f"input[{index}].type", message)
        given[link] += 1
        too_many = past.answered.get(link, 0) + given[link] > len(kinds)
        if too_many and (given[link] > 1 or not _is_among(item, history)):
            refuse(f"input[{index}].{name}", f"Call '{key}' is answered twice.")
    if calls.demanded:
        told = _how_to_answer(past, calls, conversation_id)
        refuse("input", f"No tool output found for function call {', '.join(calls.demanded)}. {told}")


def _how_to_answer(past: Calls, calls: Calls, conversation_id: str | None) -> str:
    """Where the first call without an output is, and what its client can do. One of the history cannot be
    seen in the request that is refused, and may be of another client."""
    link, call = next((link, item) for link, item in calls.pending.items() if not asks_approval(item))
    name, key = link
    kind = ITEM_TYPES[call["type"]].answered_by
    answer = f"an item of type '{kind}' with the {name} '{key}'"
    if link not in past.pending:
        return f"The call is in this request's input: send {answer} behind it, or leave the call out."
    if conversation_id is None:
        return (
            "The call is in the history that 'previous_response_id' leads to: send "
            f"{answer} in this request's input, or go on from an earlier response."
        )
    path = f"/v1/conversations/{conversation_id}/items/{call['id']}"
    return (
        f"The call is in the conversation '{conversation_id}': send {answer} in this request's input, or "
        f"delete the call's item (DELETE {path})."
    )


def _is_among(output: Item, history: Sequence[Item]) -> bool:
    """Whether an output was given before, word for word: a client may repeat itself."""
    said = {**output, "id": None}
    return any({**item, "id": None} == said for item in history if item["type"] == output["type"])


def drop_oldest(items: Sequence[Item], count: int) -> list[Item]:
    """The items without the first `count`, and without outputs whose call went with them."""
    if not count:
        return list(items)
    kept = list(items[count:])
    calls = {link_of(item) for item in kept if is_answered(item)}
    return [item for item in kept if not is_output(item) or link_of(item) in calls]
