"""Reads and checks what requests bring, before there is a run: which model and tools they may use, and the
texts and pixels of their files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import orjson

from server.access import Principal, require_use
from server.clock import now_us
from server.containers import cell_limits, unkept_memory
from server.errors import ApiError, to_api_error
from server.ignored import ignore
from server.input_files import InputFiles, InputImages, SeenImages
from server.item_ids import identify, may_be_known
from server.items import SEEN, Item, lacks, private_bytes, stores_of
from server.runs.planning import Past, Turn, TurnTools, count_input, require_readable, turn_tools
from server.schema import LEAD, check_sizes
from server.threads import aside, in_large_request
from server.vector_stores import usable_stores
from storage import NotFound

if TYPE_CHECKING:
    from server.config import Config
    from server.encrypted_reasoning import Sealing
    from server.limits import Limiter
    from server.mcp_servers import Directory
    from server.model_registry import Models, ServedModel
    from server.quota import Quota
    from server.schema import CreateResponse
    from storage import Storage
    from tools import Registry


class Intake:
    """The requests of one server."""

    def __init__(
        self,
        storage: Storage,
        models: Models,
        sealing: Sealing,
        config: Config,
        quota: Quota,
        registry: Registry,
        limiter: Limiter,
        directory: Directory,
    ) -> None:
        self._storage = storage
        self._models = models
        self._sealing = sealing
        self._config = config
        self._quota = quota
        self._registry = registry
        self._limiter = limiter
        self._directory = directory
        self._files = InputFiles(storage, config.egress_policy)
        self._images = InputImages(storage, config.egress_policy)
        self._seen_images = SeenImages(storage, config)

    # -- what a request may use ------------------------------------------------------------------------------

    def served(self, request: CreateResponse) -> ServedModel:
        """The model that answers a request, which has started. Raises ApiError."""
        served = self._models.get(request.model)
        return served if request.asked_model is None else replace(served, asked=request.asked_model)

    def turn(
        self,
        request: CreateResponse,
        items: Sequence[Item],
        principal: Principal,
        served: ServedModel,
        past: Past | None = None,
    ) -> Turn:
        approvals = partial(self._directory.approvals, owner=principal.owner)
        return Turn(request, items, principal, served, now_us(), approvals, past)

    def allowed(
        self,
        principal: Principal,
        served: ServedModel,
        request: CreateResponse,
        input_items: Sequence[Item],
    ) -> TurnTools:
        """The tools that a request itself gives. Raises ApiError: 403 where the principal may not use them,
        or the model; 400 for MCP servers that cannot be reached."""
        tools = turn_tools(request, input_items, len(input_items))
        require_use(principal, served.allowed_as, tools.tools)
        with tools.named():
            self._directory.require(tools.tools, tools.secrets, principal.owner)
        return tools

    async def require_stores(self, owner: str, tools: Sequence[Item]) -> None:
        """Raise ApiError 404 where a tool is to search a vector store that the owner does not have, 400 where
        it has expired."""
        for index, tool in enumerate(tools):
            for place, id in enumerate(stores_of(tool)):
                try:
                    await usable_stores(self._storage, owner, [id])
                except (NotFound, ApiError) as unusable:
                    error = to_api_error(unusable)
                    error.param = f"tools[{index}].vector_store_ids[{place}]"
                    raise error from None

    def lacking(self, tools: Sequence[Item]) -> dict[int, str]:
        """The tools of a request that this server cannot run though it knows how: index -> why."""
        found = {index: lacks(tool, self._registry) for index, tool in enumerate(tools)}
        return {index: why for index, why in found.items() if why is not None}

    def name_unkept_memory(self, tools: Sequence[Item], paths: Sequence[str]) -> None:
        """Name among what is ignored of a request the memory that its containers cannot have."""
        limits = cell_limits(self._config)
        for tool, path in zip(tools, paths, strict=True):
            if (end := unkept_memory(tool, limits)) is not None:
                ignore(f"{path}.{end}")

    def servers_of(self, owner: str) -> list[dict[str, str]]:
        """The MCP servers that an owner's requests reach by name, as their tools would write them."""
        return self._directory.named(owner)

    def asking(self, tools: Sequence[Item]) -> dict[int, str]:
        """The tools of a request whose calls its client may have to approve: index -> why, as sentences."""
        return self._directory.asking(tools)

    # -- reading it ------------------------------------------------------------------------------------------

    async def read(
        self,
        principal: Principal,
        request: CreateResponse,
        input_items: Sequence[Item],
        served: ServedModel,
        *,
        keyed: bool,
    ) -> tuple[CreateResponse, Sequence[Item]]:
        """A request that is to become a run, and its items: with their ids, unsealed, and with what their
        files and images say. keyed: it is kept for its repeats. Raises ApiError, also where there is no room
        for them, and StorageUnavailable."""
        owner = principal.owner
        num_bytes = await aside(in_large_request(), _num_bytes, request, input_items, self._config)
        if request.store or keyed or request.conversation_id is not None:
            await self._quota.require(owner, num_bytes, self._limiter.stored_bytes(principal.subjects))
        # Items of an unstored turn are stored at its end, when it is too late to find that an id is taken.
        late = request.conversation_id is not None and not request.store and not keyed
        items = await self._sealing.opened(owner, input_items, model=served.info.name)
        if late or any(map(may_be_known, items)):
            items = await identify(self._storage, owner, items)
        items = await self.read_inputs(owner, items, served)
        told = await aside(in_large_request(), private_bytes, items, SEEN)
        if told and (request.store or keyed or late):
            await self._quota.require(owner, told, self._limiter.stored_bytes(principal.subjects))
        return await self._lead_read(principal, request, served), items

    async def count_input(
        self, principal: Principal, request: CreateResponse, input_items: Sequence[Item]
    ) -> int:
        """How many prompt tokens a request would have. Raises ApiError."""
        owner = principal.owner
        served = self.served(request)
        self.allowed(principal, served, request, input_items)
        items = await self._sealing.opened(owner, input_items, model=served.info.name)
        items = await identify(self._storage, owner, items)
        items = await self.read_inputs(owner, items, served)
        request = await self._lead_read(principal, request, served)
        turn = self.turn(request, items, principal, served)
        return await count_input(turn, self._storage, self._registry)

    async def read_inputs(
        self,
        owner: str,
        items: Sequence[Item],
        served: ServedModel | None,
        *,
        param: str = "input",
        files: Sequence[str] | None = None,
        images: Sequence[str] | None = None,
    ) -> list[Item]:
        """Normalised items with the texts of their files, and, where the model sees, the pixels of their
        images. served: None where it is not known which model is to read them. files, images: the paths of
        these, in their order, where they are not those of items in `param`. Raises ApiError: see
        `InputFiles.read` and `SeenImages.read`."""
        items = await self._files.read(owner, items, param=param, paths=files)
        return await self.read_images(owner, items, served, param=param, paths=images)

    async def read_images(
        self,
        owner: str,
        items: Sequence[Item],
        served: ServedModel | None,
        *,
        param: str = "input",
        paths: Sequence[str] | None = None,
    ) -> list[Item]:
        """The same of images alone."""
        sees = any(model.sees for model in self._models) if served is None else served.sees
        if not sees:
            return list(items)
        return await self._seen_images.read(owner, items, param=param, paths=paths)

    async def _lead_read(
        self, principal: Principal, request: CreateResponse, served: ServedModel
    ) -> CreateResponse:
        """A request with the files among the messages of its prompt template read. Raises ApiError, also for
        what the model cannot read."""
        prompt = request.prompt
        if prompt is None or not prompt.items:
            return request
        with prompt.named():
            require_readable(prompt.items, served, LEAD)
            items = await self.read_inputs(principal.owner, prompt.items, served, param=LEAD)
            if told := await aside(in_large_request(), private_bytes, items, SEEN):
                await self._quota.require(
                    principal.owner, told, self._limiter.stored_bytes(principal.subjects)
                )
        return request.model_copy(update={"prompt": replace(prompt, items=tuple(items))})

    async def check_images(self, owner: str, items: Sequence[Item], served: ServedModel) -> None:
        """Raise ApiError where the images of items could not be read, though the model does not see them."""
        if not served.sees:
            await self._images.check(owner, items)


def _num_bytes(request: CreateResponse, items: Sequence[Item], config: Config) -> int:
    """What a request takes in storage; ApiError 400 for an item that is larger than it may be."""
    size = check_sizes(items, config.max_item_bytes, outputs=config.max_tool_output_bytes)
    if request.prompt is not None:
        with request.prompt.named():
            size += check_sizes(request.lead, config.max_item_bytes, param=LEAD)
        size += len(orjson.dumps(request.prompt.echo()))
    return size + len(orjson.dumps([request.instructions, request.tools]))
