"""Maps model names to the engines that serve them.

Several names may share an engine, and each adapter is served under its own name. The models of a file have
aliases and versions, too, which all mean one entry; by its id runs remember it, so that they stay with it.
Which entry answers a request is decided once, at its beginning.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import format_datetime
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from engine import (
    Engine,
    EngineError,
    EngineUnavailable,
    ModelInfo,
    PoolingEngine,
    PoolingInfo,
    PoolingKind,
    RequestFailed,
    SpeechEngine,
    SpeechInfo,
)
from server.errors import WHILE_LOADING, ApiError
from server.limits import Caps
from server.loading import Breaker, Shelf
from server.model_registry.routing import leads_to
from server.settings import ModelEntry, ModelsFile, nearest

if TYPE_CHECKING:
    from engine import RemotePooling, RemoteSpeech


Use = PoolingKind | Literal["speech"]
"""What a model is for that generates nothing."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One name under which a model is served; several names may share an engine. `created`: unix seconds.

    `adapter`: what the engine calls the adapter that makes it this model; `root`: the first name of the model
    without one.
    """

    name: str
    engine: Engine
    info: ModelInfo
    created: int
    root: str
    adapter: str | None = None
    caps: Caps = field(default_factory=Caps)
    entry: ModelEntry | None = None  # of the file of models
    breaker: Breaker = field(default_factory=Breaker)
    asked: str = ""  # the name that the request gave, where it is another one

    @property
    def sees(self) -> bool:
        """Whether the model is shown images; others are told of them, or refuse them."""
        return "image" in self.info.modalities

    @property
    def allowed_as(self) -> str:
        """The name that a key needs a scope for: the one that was asked for."""
        return self.asked or self.name

    def answered(self, failure: EngineError | None) -> None:
        """Tell the breaker how a generation has ended. Only what others can answer instead is left alone."""
        if self.entry is None or not self.entry.fallback:
            return
        if failure is None:
            self.breaker.succeeded()
        elif isinstance(failure, RequestFailed | EngineUnavailable):
            self.breaker.failed()


@dataclass(frozen=True, slots=True)
class PooledModel:
    """A model that makes vectors, scores or labels of texts, as `info.kind` says. `created`: unix seconds."""

    name: str
    engine: PoolingEngine | RemotePooling
    info: PoolingInfo
    created: int
    caps: Caps = field(default_factory=Caps)
    asked: str = ""  # the name that the request gave, where it is another one

    @property
    def use(self) -> Use:
        """What it is for."""
        return self.info.kind

    @property
    def allowed_as(self) -> str:
        """See `ServedModel.allowed_as`."""
        return self.asked or self.name


@dataclass(frozen=True, slots=True)
class SpeechModel:
    """A model that turns sound into text. `created`: unix seconds."""

    name: str
    engine: SpeechEngine | RemoteSpeech
    info: SpeechInfo
    created: int
    caps: Caps = field(default_factory=Caps)
    asked: str = ""  # the name that the request gave, where it is another one

    @property
    def use(self) -> Use:
        """What it is for."""
        return "speech"

    @property
    def allowed_as(self) -> str:
        """See `ServedModel.allowed_as`."""
        return self.asked or self.name


USED_AT: Mapping[Use, tuple[str, str]] = {
    "embedding": ("embeddings", "/v1/embeddings"),
    "rerank": ("scores of documents", "/v1/rerank"),
    "classification": ("labels of texts", "/v1/classify"),
    "speech": ("text of sound", "/v1/audio/transcriptions"),
}
"""Uses of models that generate nothing: what they make, and where they are asked for it."""


@dataclass(frozen=True, slots=True)
class Load:
    """How much the engines have to do. kv_cache_usage: the share of their KV caches in use, 0 to 1."""

    running: int
    waiting: int
    kv_cache_usage: float


MAX_NAMED = 16
"""Models that an error names; `/v1/models` has all."""


class Models:
    """name -> ServedModel; empty until an engine has started. The models of a file that were never loaded
    have names, and no ServedModel yet."""

    def __init__(self, entries: ModelsFile | None = None, shelf: Shelf | None = None) -> None:
        """entries: the models of the file; `add_entry` says where one has started. shelf: those of them that
        are loaded when they are wanted."""
        self._table: dict[str, ServedModel] = {}
        self._others: dict[str, PooledModel | SpeechModel] = {}  # that generate nothing
        self.shelf = shelf or Shelf()
        self._entries = {entry.id: entry for entry in entries or ()}
        self._named = {} if entries is None else dict(entries.named())
        self.created = int(time.time())
        self._adapters: dict[str, str] = {}  # of entries: to the id of each
        self._breakers: dict[str, Breaker] = {}
        self._default: str | None = next((id for id, entry in self._entries.items() if entry.default), None)

    def add(self, engine: Engine, names: Sequence[str] = (), caps: Caps | None = None) -> None:
        """Serve a started engine under `names`, by default the model's own, and adapters under theirs; the
        first name of the first one added is the default, unless a model of the file is. caps: on requests for
        any of them."""
        caps = caps or Caps()
        created, info = int(time.time()), engine.info
        names = names or (info.name,)
        self._default = self._default or names[0]
        for name in names:
            self._table[name] = ServedModel(name, engine, info, created, names[0], caps=caps)
        for name, fingerprint in info.adapters:
            own = replace(info, name=name, fingerprint=fingerprint)
            self._table[name] = ServedModel(name, engine, own, created, names[0], adapter=name, caps=caps)

    def expect(self, entry: ModelEntry, adapters: Sequence[str] = ()) -> None:
        """Say which adapters an entry will have that has not started."""
        self._adapters |= dict.fromkeys(adapters, entry.id)

    def add_entry(self, entry: ModelEntry, engine: Engine, caps: Caps) -> None:
        """Serve the started engine of an entry."""
        info, breaker = replace(engine.info, name=entry.id), self._breaker(entry.id)
        served = ServedModel(
            entry.id, engine, info, self.created, entry.id, caps=caps, entry=entry, breaker=breaker
        )
        self._table[entry.id] = served
        for name, fingerprint in info.adapters:
            own = replace(info, name=name, fingerprint=fingerprint)
            self._table[name] = replace(served, name=name, info=own, adapter=name)

    def _breaker(self, id: str) -> Breaker:
        held = self.shelf.get(id)
        return self._breakers.setdefault(id, Breaker() if held is None else held.breaker)

    def add_other(
        self, engine: PoolingEngine | RemotePooling | SpeechEngine | RemoteSpeech, caps: Caps | None = None
    ) -> None:
        """Serve a started engine for vectors, scores or speech under its name."""
        kind: Any = SpeechModel if isinstance(engine.info, SpeechInfo) else PooledModel
        name = engine.info.name
        self._others[name] = kind(name, engine, engine.info, int(time.time()), caps or Caps())

    # -- which one answers -----------------------------------------------------------------------------------

    async def choose(self, name: str | None, owner: str = "", key: str | None = None) -> ServedModel:
        """The model that answers a request for this name, loaded. With a canary it may be another one, unless
        the name has a version: always the same for equal `key`s, which may be a conversation's id. Where a
        model cannot answer, those that stand in for it are tried. Raises ApiError as `get` does, and 503
        while it loads; EngineUnavailable and LoadError.
        """
        first = self._id(name)
        entry = self._entries.get(self._adapters.get(first, first))
        asked = name or ""
        if entry is None or entry.use != "text":
            return self.get(name)
        wanted = [first]
        if first == entry.id:
            canary = entry.canary_for(name)
            to = [self._named[canary.to]] if canary is not None and leads_to(canary, owner, key) else []
            wanted = [*dict.fromkeys((*to, first, *(self._named[each] for each in entry.fallback)))]
        failure: Exception | None = None
        for each in wanted:
            try:
                found = await self._usable(each)
            except (ApiError, EngineError) as error:
                failure = error
                continue
            return replace(found, asked=asked) if asked and asked != found.name else found
        assert failure is not None
        raise failure

    async def _usable(self, name: str) -> ServedModel:
        """A model that can answer now."""
        id = self._adapters.get(name, name)
        breaker = self._breaker(id)
        if breaker.is_open:
            seconds = str(breaker.retry_after_s)
            message = f"The model '{name}' has failed again and again. Try again in {seconds} s."
            raise ApiError(503, message, code="model_unavailable", headers={"retry-after": seconds})
        await self.load(id)
        found = self._table[name]
        others = found.entry is not None and bool(found.entry.fallback)
        if found.engine.stats().unavailable:
            if others:  # without them there is no use in asking it later than it can answer again
                breaker.failed()
            raise EngineUnavailable(f"The model '{name}' is away.")
        if breaker.shown_open and not others:
            breaker.succeeded()  # it was its loading that had failed
        return found

    def may_load(self, name: str | None) -> bool:
        """Whether a request for this name may have a model loaded before it is answered."""
        if name is None:
            return any(not held.is_up for held in self.shelf)
        entry = self.entry(name)
        held = None if entry is None else self.shelf.get(entry.id)
        return held is not None and not held.is_up

    async def load(self, name: str) -> None:
        """Return when a model is loaded, if it is one that is loaded when it is wanted. ApiError 503,
        LoadError."""
        if (held := self.shelf.get(self._adapters.get(name, name))) is not None:
            await self.shelf.ready(held)

    def want(self, name: str) -> None:
        """Have a model loaded that runs wait for, unless it has just failed to."""
        held = self.shelf.get(self._adapters.get(name, name))
        if held is not None and not held.breaker.is_open:
            self.shelf.want(held)

    async def load_pooled(self, name: str | None, *kinds: PoolingKind) -> PooledModel:
        """The model of that name for vectors or scores, or the first of these kinds for None, then loaded.
        ApiError 404 `model_not_found`, 400 `unsupported_model` for a model of another kind, 503 while it
        loads; LoadError."""
        found = await self._load_other(name, kinds)
        assert isinstance(found, PooledModel)
        return found

    async def load_speech(self, name: str | None) -> SpeechModel:
        """The same of a model for speech."""
        found = await self._load_other(name, ("speech",))
        assert isinstance(found, SpeechModel)
        return found

    def require(self, use: Use) -> None:
        """ApiError 400 `unsupported_model` where no model that is no generating one has this use."""
        if not self._fit((use,)):
            self._refuse_other(None, use, ())

    def _fit(self, uses: Sequence[Use]) -> list[str]:
        """Names of the models that have one of these uses."""
        fit = [id for id, model in self._others.items() if model.use in uses]
        return [*dict.fromkeys((*fit, *(id for id, entry in self._entries.items() if entry.use in uses)))]

    async def _load_other(self, name: str | None, uses: Sequence[Use]) -> PooledModel | SpeechModel:
        fit = self._fit(uses)
        id = next(iter(fit), None) if name is None else self._named.get(name, name)
        if id in fit:
            await self.load(id)
            found = self._others[id]
            return found if name in (None, id) else replace(found, asked=name)
        self._refuse_other(name, uses[0], fit)

    def _refuse_other(self, name: str | None, use: Use, fit: Sequence[str]) -> NoReturn:
        """fit: names of models that have this use."""
        makes, _ = USED_AT[use]
        if fit:
            instead = f"Models for it here: {', '.join(map(repr, fit[:MAX_NAMED]))}."
        else:
            instead = f"This server has no model for {makes}."
            instead += f" Its operator can give it one with the setting --{use}-model."
        if name is not None and (other := self._other_use(self._named.get(name, name))) is not None:
            instead += f" '{name}' is for {other[1]}."
        elif name is not None and name not in self.names:
            message = f"The model '{name}' does not exist or you do not have access to it. {instead}"
            raise ApiError(404, message, code="model_not_found", param="model")
        message = f"The model '{name}' makes no {makes}. {instead}" if name is not None else instead
        raise ApiError(400, message, code="unsupported_model", param="model")

    def meant(self, name: str | None) -> str:
        """The name that a key needs a scope for: the request's, or that of the default. ApiError 404 for one
        that is not served, and as `get` does."""
        if name is None:
            return self._default_name()
        if name not in self._table and name not in self._named and name not in self._adapters:
            self.get(name)
        return name

    def ways(self, name: str | None) -> list[str]:
        """The models that may answer a request for this name while nothing fails: two with a canary."""
        id = self._default_name() if name is None else self._named.get(name, name)
        entry = self._entries.get(id)
        canary = None if entry is None else entry.canary_for(name)
        return [id] if canary is None else [id, self._named[canary.to]]

    def _id(self, name: str | None) -> str:
        """What a name means. ApiError 404, and 400 without one where there is no default."""
        if name is None:
            return self._default_name()
        return self._named.get(name, name)

    def _default_name(self) -> str:
        if self._default is not None:
            return self._default
        generating = [id for id, entry in self._entries.items() if entry.use == "text"]
        if len(generating) == 1:
            return generating[0]
        if not generating and not self._table:
            raise ApiError(503, "The model is still loading.", code="not_ready", headers=WHILE_LOADING)
        message = "This server has several models and no default: give 'model'."
        message += f" {self._listed()}"
        raise ApiError(400, message, code="missing_required_parameter", param="model")

    def _listed(self) -> str:
        """The names of models that generate, as a sentence."""
        names = [*dict.fromkeys((*self._table, *self._generating_names()))]
        listed = ", ".join(f"'{each}'" for each in names[:MAX_NAMED])
        return f"This server has {listed}{', ...' if len(names) > MAX_NAMED else ''}."

    def _generating_names(self) -> Iterator[str]:
        for name, id in self._named.items():
            if self._entries[id].use == "text":
                yield name
        yield from self._adapters

    # -- what there is ---------------------------------------------------------------------------------------

    @property
    def pooled(self) -> tuple[PooledModel, ...]:
        """The models for vectors, scores and labels."""
        return tuple(model for model in self._others.values() if isinstance(model, PooledModel))

    @property
    def speech(self) -> tuple[SpeechModel, ...]:
        """The models for speech."""
        return tuple(model for model in self._others.values() if isinstance(model, SpeechModel))

    @property
    def names(self) -> list[str]:
        """All names that a request may give, the default model's first."""
        first = () if self._default is None else (self._default,)
        return [*dict.fromkeys((*first, *self._table, *self._others, *self._named, *self._adapters))]

    @property
    def claimable(self) -> tuple[list[str], list[str]]:
        """The names by which runs know models: of those that can go on with runs now, and of the others."""
        now: list[str] = []
        later: list[str] = []
        for name, model in self._table.items():
            held = self.shelf.get(model.root)
            (now if held is None or held.state == "loaded" else later).append(name)
        entries = [id for id, entry in self._entries.items() if entry.use == "text"]
        return now, [
            *dict.fromkeys((*later, *(n for n in (*entries, *self._adapters) if n not in self._table)))
        ]

    @property
    def entries(self) -> tuple[ModelEntry, ...]:
        """The models of the file."""
        return tuple(self._entries.values())

    def started(self, name: str) -> ServedModel | PooledModel | SpeechModel | None:
        """What is known of the model that a name means, once it has started."""
        id = self._named.get(name, name)
        return self._table.get(id) or self._others.get(id)

    def canonical(self, name: str) -> str:
        """What all names of a model have in common, one of them; an adapter is a model of its own."""
        id = self._named.get(name, name)
        model = self._table.get(id)
        return id if model is None or model.adapter is not None else model.root

    def unserved(self, name: str) -> str | None:
        """Why no request has a model by this name, as a sentence; None where requests may have."""
        if name in self.names:
            return None
        meant = nearest(name, self.names)
        hint = f"did you mean '{meant}'?" if meant else f"it serves {', '.join(self.names)}"
        return f"this server does not serve '{name}'; {hint}"

    def aliases(self, id: str) -> list[str]:
        """The other names of an entry."""
        return [name for name, of in self._named.items() if of == id and name != id]

    def entry(self, name: str) -> ModelEntry | None:
        """The entry that a name means; an adapter's is that of the model beside which it stands."""
        return self._entries.get(self._named.get(name, self._adapters.get(name, name)))

    def up(self) -> list[str]:
        """The names of the models that generate and can be asked now. Raises EngineUnavailable where there is
        none, and none that is loaded when it is wanted."""
        up = [
            model.name
            for model in self
            if ((held := self.shelf.get(model.root)) is None or held.is_up)
            and not model.engine.stats().unavailable
        ]
        texts = (entry for entry in self._entries.values() if entry.use == "text")
        if not up and not any(self.shelf.get(entry.id) for entry in texts):
            raise EngineUnavailable("no model can be asked now")
        return up

    @property
    def first(self) -> ServedModel:
        """The default model, or the first that has started."""
        found = self._table.get(self._default or "")
        return found or next(iter(self._table.values()))

    def standing_in(self, name: str) -> ServedModel:
        """The model of this name, or, to end its runs with, another one."""
        return self._table.get(name) or self.first

    def _other_use(self, name: str) -> tuple[str, str] | None:
        """What a model makes that generates no text, loaded or not, and where it is asked for it."""
        if name in self._others:
            return USED_AT[self._others[name].use]
        entry = self._entries.get(name)
        return None if entry is None or entry.use == "text" else USED_AT[entry.use]

    def get(self, name: str | None) -> ServedModel:
        """The model of that name, or the default for None, which has started; ApiError 404 `model_not_found`,
        400 `unsupported_model` for one that does not generate, 503 while it loads."""
        id = self._id(name)
        if not self._table:
            raise ApiError(503, "The model is still loading.", code="not_ready", headers=WHILE_LOADING)
        if (model := self._table.get(id)) is not None:
            return model if name is None or name == id else replace(model, asked=name)
        if (use := self._other_use(id)) is not None:
            makes, path = use
            message = f"The model '{name}' generates no text: it makes {makes}, at {path}."
            message += f" For text there is '{self.first.name}'."
            raise ApiError(400, message, code="unsupported_model", param="model")
        if self._adapters.get(id, id) in self._entries:
            message = f"The model '{name}' is not loaded yet."
            raise ApiError(503, message, code="model_loading", headers={"retry-after": "5"})
        message = f"The model '{name}' does not exist or you do not have access to it. {self._listed()}"
        raise ApiError(404, message, code="model_not_found", param="model")

    def serves(self) -> dict[str, str]:
        """By the names that runs know, what is served: equal where two processes serve the same. Of an entry
        that may not have started it is what the file says of it."""
        served: dict[str, ServedModel | PooledModel | SpeechModel] = {**self._table, **self._others}
        said = {name: model.info.fingerprint for name, model in served.items()}
        for id, entry in self._entries.items():
            told = f"{entry.engine} {entry.path} {sorted(entry.settings.items())}"
            said[id] = blake2b(told.encode(), digest_size=8).hexdigest()
        return said | {name: said[id] for name, id in self._adapters.items()}

    def at_work(self) -> Load:
        """How much there is to do now."""
        engines = {id(model.engine): model.engine.stats() for model in self}.values()
        blocks = sum(each.kv_blocks for each in engines)
        used = sum(each.kv_blocks_used for each in engines)
        return Load(
            sum(each.running for each in engines),
            sum(each.waiting for each in engines),
            used / blocks if blocks else 0.0,
        )

    def is_generating(self) -> bool:
        """Whether any of them generates now."""
        return self.at_work().running > 0

    def require_room(self, body: Mapping[str, Any], owner: str, weight: float) -> None:
        """Raise QueueFull where the engine of the model that a request's body names takes no more of an
        owner. It costs nothing, and so comes before the body is read any further."""
        name = body.get("model")
        if isinstance(name, str):
            name = self._named.get(name, name)
        if isinstance(name, str) and (other := self._others.get(name)) is not None:
            other.engine.admission.require_room(owner, weight)
            return
        model = self._table.get(name if isinstance(name, str) else self._default or "")
        if model is not None:
            model.engine.admission.require_room(owner, weight)

    def headers(self, name: str | None) -> dict[str, str]:
        """What the headers of replies by this model say of it: `x-antiphon-exact-resume: false` where a run
        that was cut off goes on from its last token, but not with the very tokens that it would have had;
        `deprecation` and `sunset` where it is to go."""
        name = (self._default or "") if name is None else self._named.get(name, name)
        model = self._table.get(name)
        exact = model is None or "exact_resume" in model.info.capabilities
        found = {} if exact else {"x-antiphon-exact-resume": "false"}
        entry = self.entry(name)
        if entry is not None and entry.deprecation_date is not None:
            end = datetime.combine(entry.deprecation_date, datetime.min.time(), UTC)
            found["deprecation"] = f"@{int(end.timestamp())}"
            found["sunset"] = format_datetime(end, usegmt=True)
        return found

    def __contains__(self, name: str) -> bool:
        return name in self._table

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._table.values())
