"""Takes the outputs and approvals that clients give to runs that wait for them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import orjson

from engine import PromptTooLong
from server.access import Actor, Principal, require_use
from server.clock import now_us
from server.errors import to_api_error
from server.items import (
    SEEN,
    Item,
    answering,
    answers_of,
    approves,
    dump_private,
    input_files_of,
    is_client_call,
    key_of,
    link_of,
    load_item,
    path_of_image,
    private_bytes,
    private_of,
    unseen_images_of,
    with_private,
)
from server.runs.events import Snapshot
from server.runs.execution import RunTasks, output_id
from server.runs.planning import Progress, RunPlan, pending_calls, require_readable
from server.schema import check_sizes
from server.threads import aside, in_large_request
from storage import AuditEntry, OutputConflict, StoredResponse, ToolOutput, UnknownCall

if TYPE_CHECKING:
    from server.config import Config
    from server.limits import Limiter
    from server.model_registry import Models, ServedModel
    from server.quota import Quota
    from server.runs.intake import Intake
    from server.runs.takeover import Takeover
    from server.runs.views import Views
    from storage import Storage


FRAME_TOKENS = 64
"""Tokens that a template puts around one tool output, at most; the output itself has no more than bytes."""


RESERVED_TOKENS = 256
"""Room that is kept for the output of a call that is still to come: a run with outputs that leave none could
not be answered any more."""


class ToolOutputs:
    """The outputs that clients give to runs."""

    def __init__(
        self,
        storage: Storage,
        models: Models,
        config: Config,
        quota: Quota,
        limiter: Limiter,
        tasks: RunTasks,
        intake: Intake,
        views: Views,
        takeover: Takeover,
    ) -> None:
        self._storage = storage
        self._models = models
        self._config = config
        self._quota = quota
        self._limiter = limiter
        self._tasks = tasks
        self._intake = intake
        self._views = views
        self._takeover = takeover

    async def pending(self, owner: str, response_id: str) -> tuple[StoredResponse, dict[str, str]]:
        """A response, and the calls of it that nobody has answered: call_id -> name. Raises NotFound.

        A client may see a call before its run could park; that it parks or ends is waited for.
        """
        run = self._tasks.get(response_id)
        if run is not None and run.plan.owner == owner and run.awaits():
            await self._tasks.over(run)
        stored = await self._storage.get_response(owner, response_id)
        elsewhere = stored.run is not None and stored.run.runner not in (None, self._storage.runner)
        if elsewhere and _pending(stored) and RunPlan.load(stored.plan).waits:
            reader, stored = await self._views.follow(owner, response_id)
            try:
                stored = await self._views.at_rest(reader, stored)
            finally:
                reader.close()
        return stored, _pending(stored)

    async def feed(
        self, principal: Principal, stored: StoredResponse, outputs: Sequence[Item], *, by: Actor
    ) -> Snapshot:
        """Give tool outputs to a waiting run; returns the Response as it then stands.

        The same output again changes nothing. by: whom the audit log names for approvals. Raises NotFound,
        NotWaiting, UnknownCall, OutputConflict, and ApiError: 403 where the principal may not use the model
        or a tool of the run, which goes on with them; 429 where the request is one too many; 400 where they
        leave the model no room to answer, and the run waits for shorter ones.
        """
        owner = principal.owner
        served = self._models.standing_in(stored.model)
        require_use(principal, served.allowed_as, RunPlan.load(stored.plan).tools)
        if stored.waiting:
            (await self._limiter.enter(principal.subjects, stored.model)).leave()
        num_bytes, new = await aside(in_large_request(), _new_outputs, stored, outputs, self._config)
        require_readable(outputs, served, "tool_outputs")
        items = await self._outputs_read(stored, new, served)
        num_bytes += await aside(in_large_request(), private_bytes, items, SEEN)
        await self._quota.require(owner, num_bytes, self._limiter.stored_bytes(principal.subjects))
        if items and stored.waiting:
            await self._require_room(stored, served, items)
        if items:
            fresh = await aside(in_large_request(), _tool_outputs, stored, items, by)
            try:
                waiting = await self._storage.add_tool_outputs(owner, stored.id, fresh, now_us())
            except (OutputConflict, UnknownCall) as misfit:
                raise to_api_error(misfit, param=_place_of(misfit.call_id, new)) from misfit
            if waiting.runnable:
                await self._takeover.claim(stored.id)
        return await self._views.get(owner, stored.id)

    async def _require_room(self, stored: StoredResponse, served: ServedModel, new: Sequence[Item]) -> None:
        """ApiError 400 where these outputs, and those that were posted before, do not fit behind the prompt
        of their run, which could only end. What is compacted first may make room."""
        plan, pending = RunPlan.load(stored.plan), _pending(stored)
        if plan.compaction is not None:
            return
        outputs = {item["id"]: item for item in new}
        if len(new) < len(pending):
            posted = await self._storage.waiting_inputs(stored.id)
            outputs = {item.id: load_item(item.body, item.private) for item in posted} | outputs
        reserve = RESERVED_TOKENS * len(pending.keys() - set(map(key_of, outputs.values())))
        # No token is of less than a byte. Behind the prompt come what the model said, what this server's
        # tools returned to it, and the outputs.
        [last] = Progress.of(await self._storage.token_counts(stored.id)).turns[-1:]
        said = [len(item.body) + len(item.private or b"") for item in stored.output[last.first_item :]]
        sizes = [*said, *(len(orjson.dumps(item)) for item in outputs.values())]
        most = last.input_tokens + last.output_tokens + sum(sizes) + FRAME_TOKENS * len(sizes) + reserve
        # Or more than that: texts of files, images, and tools that a forced choice had left out.
        is_more = any(map(private_of, outputs.values())) or plan.tool_choice not in ("auto", "none")
        context = served.info.max_model_len
        if is_more or most >= min(context, served.caps.prompt_tokens or context):
            try:
                await self._takeover.require_room(stored.owner, stored.id, [*outputs.values()], reserve)
            except PromptTooLong as why:
                raise to_api_error(why, param="tool_outputs") from why

    async def _outputs_read(
        self, stored: StoredResponse, new: Mapping[int, Item], served: ServedModel
    ) -> list[Item]:
        """Outputs by their index in the request, as items whose files and images have been read. ApiError
        400, 404."""
        if not any(input_files_of(item) or unseen_images_of(item) for item in new.values()):
            return [*new.values()]
        # What was posted before is as it was read then, also where the file is gone.
        posted = {item.id: item for item in await self._storage.waiting_inputs(stored.id)}
        outputs = []
        for item in new.values():
            before = posted.get(item["id"])
            private = None if before is None or before.private is None else orjson.loads(before.private)
            outputs.append(with_private(dict(item), private))
        paths = [
            f"tool_outputs[{index}].output[{position}]"
            for index, item in zip(new, outputs, strict=True)
            for position, _ in input_files_of(item)
        ]
        images = [
            path_of_image(item, f"tool_outputs[{index}]", position)
            for index, item in zip(new, outputs, strict=True)
            for position, _ in unseen_images_of(item)
        ]
        return await self._intake.read_inputs(stored.owner, outputs, served, files=paths, images=images)


def _pending(stored: StoredResponse) -> dict[str, str]:
    return pending_calls([orjson.loads(item.body) for item in stored.output])


def _new_outputs(
    stored: StoredResponse, outputs: Sequence[Item], config: Config
) -> tuple[int, dict[int, Item]]:
    """The bytes of tool outputs, and those of them that their run does not have yet, by their index. Raises
    OutputConflict, and ApiError 400 for an output that is larger than it may be."""
    num_bytes = check_sizes(
        outputs, config.max_item_bytes, outputs=config.max_tool_output_bytes, param="tool_outputs"
    )
    plan = RunPlan.load(stored.plan)
    items = [orjson.loads(item.body) for item in stored.output]
    taken = answers_of(items)
    new: dict[int, Item] = {}
    for index, item in enumerate(answering(outputs, items)):
        name, key = link_of(item)
        if link_of(item) not in taken:
            # Its id is such that posting it again is posting the same.
            new[index] = {**item, "id": output_id(plan, item)}
        elif _said(taken[link_of(item)]) != _said(item):
            raise to_api_error(OutputConflict(str(key)), param=f"tool_outputs[{index}].{name}")
    return num_bytes, new


def _tool_outputs(stored: StoredResponse, items: Sequence[Item], by: Actor) -> list[ToolOutput]:
    """Outputs as storage takes them, with what the audit log is to tell of approvals."""
    made = [orjson.loads(item.body) for item in stored.output]
    calls = {link_of(item): item for item in made if is_client_call(item)}
    plan = RunPlan.load(stored.plan)
    return [
        replace(
            _tool_output(item),
            audit=approval_entry(calls[link_of(item)], plan, by) if approves(item) else None,
        )
        for item in items
    ]


def _place_of(key: str, outputs: Mapping[int, Item]) -> str | None:
    """The field of a request that names a call by this key. outputs: by their index in the request."""
    paths = {key_of(item): f"tool_outputs[{index}].{link_of(item)[0]}" for index, item in outputs.items()}
    return paths.get(key)


def _said(output: Item) -> Item:
    """What an output says, whatever its id."""
    return {name: value for name, value in sorted(output.items()) if name != "id"}


def _tool_output(item: Item) -> ToolOutput:
    digest = hashlib.blake2b(orjson.dumps(_said(item)), digest_size=16).digest()
    return ToolOutput(
        str(key_of(item)),
        orjson.dumps(item),
        digest,
        item["id"],
        kind=item["type"],
        private=dump_private(item),
    )


def approval_entry(request: Item, plan: RunPlan, by: Actor) -> AuditEntry:
    """The entry of one approval. plan: of the response that makes the call."""
    said: Item = {name: request[name] for name in ("server_label", "name") if name in request}
    if plan.end_user is not None:
        said["safety_identifier"] = plan.end_user
    return by.did(
        "tool_call.approved", str(key_of(request)), plan.owner, response_id=plan.response_id, **said
    )
