"""Maps model names to the engines that serve them, and builds the engine that a configuration asks for.

Several names may share an engine, and each adapter is served under its own name. The first name added is the
default for requests that name no model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import (
    Engine,
    EngineConfig,
    LoadError,
    ModelInfo,
    PoolingConfig,
    PoolingEngine,
    PoolingInfo,
    PoolingKind,
)
from server.config import SHIPPED_MODEL, Config
from server.errors import ApiError
from server.limits import Caps

if TYPE_CHECKING:
    from engine import RemotePooling


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


@dataclass(frozen=True, slots=True)
class PooledModel:
    """A model that makes vectors, scores or labels of texts, as `info.kind` says. `created`: unix seconds."""

    name: str
    engine: PoolingEngine | RemotePooling
    info: PoolingInfo
    created: int
    caps: Caps = field(default_factory=Caps)


USED_AT: Mapping[PoolingKind, tuple[str, str]] = {
    "embedding": ("embeddings", "/v1/embeddings"),
    "rerank": ("scores of documents", "/v1/rerank"),
    "classification": ("labels of texts", "/v1/classify"),
}
"""Kinds of models that generate nothing: what they make, and where they are asked for it."""


@dataclass(frozen=True, slots=True)
class Load:
    """How much the engines have to do. kv_cache_usage: the share of their KV caches in use, 0 to 1."""

    running: int
    waiting: int
    kv_cache_usage: float


MAX_NAMED = 16
"""Models that an error names; `/v1/models` has all."""


class Models:
    """name -> ServedModel; empty until an engine has started."""

    def __init__(self) -> None:
        self._table: dict[str, ServedModel] = {}
        self._pooled: dict[str, PooledModel] = {}

    def add(self, engine: Engine, names: Sequence[str] = (), caps: Caps | None = None) -> None:
        """Serve a started engine under `names`, by default the model's own, and adapters under theirs; the
        first name added is the default. caps: on requests for any of them."""
        caps = caps or Caps()
        created, info = int(time.time()), engine.info
        names = names or (info.name,)
        for name in names:
            self._table[name] = ServedModel(name, engine, info, created, names[0], caps=caps)
        for name, fingerprint in info.adapters:
            own = replace(info, name=name, fingerprint=fingerprint)
            self._table[name] = ServedModel(name, engine, own, created, names[0], adapter=name, caps=caps)

    def add_pooled(self, engine: PoolingEngine | RemotePooling, caps: Caps | None = None) -> None:
        """Serve a started engine for vectors or scores under its name."""
        info = engine.info
        self._pooled[info.name] = PooledModel(info.name, engine, info, int(time.time()), caps or Caps())

    @property
    def pooled(self) -> tuple[PooledModel, ...]:
        """The models that generate nothing."""
        return tuple(self._pooled.values())

    @property
    def names(self) -> list[str]:
        """All names that a request may give, the default model's first."""
        return [*self._table, *self._pooled]

    def get_pooled(self, name: str | None, *kinds: PoolingKind) -> PooledModel:
        """The model of that name, or the first of these kinds for None. ApiError 404 `model_not_found`, and
        400 `unsupported_model` for a model of another kind."""
        fit = [model for model in self._pooled.values() if model.info.kind in kinds]
        makes, _ = USED_AT[kinds[0]]
        if name is None and fit:
            return fit[0]
        if name is not None and (found := self._pooled.get(name)) in fit:
            assert found is not None
            return found
        named = ", ".join(f"'{model.name}'" for model in fit[:MAX_NAMED])
        instead = f"Models for it here: {named}." if fit else f"This server has no model for {makes}."
        if name is not None and name in self._pooled:
            _, other = USED_AT[self._pooled[name].info.kind]
            instead += f" '{name}' is for {other}."
        elif name is not None and name not in self._table:
            message = f"The model '{name}' does not exist or you do not have access to it. {instead}"
            raise ApiError(404, message, code="model_not_found", param="model")
        message = f"The model '{name}' makes no {makes}. {instead}" if name is not None else instead
        raise ApiError(400, message, code="unsupported_model", param="model")

    def get(self, name: str | None) -> ServedModel:
        """The model of that name, or the default for None; ApiError 404 `model_not_found`, 400
        `unsupported_model` for one that does not generate, 503 while it loads."""
        if not self._table:
            raise ApiError(503, "The model is still loading.", code="not_ready", headers={"retry-after": "1"})
        if name is None:
            return next(iter(self._table.values()))
        model = self._table.get(name)
        if model is None and name in self._pooled:
            makes, path = USED_AT[self._pooled[name].info.kind]
            message = f"The model '{name}' generates no text: it makes {makes}, at {path}."
            message += f" For text there is '{next(iter(self._table))}'."
            raise ApiError(400, message, code="unsupported_model", param="model")
        if model is None:
            listed = ", ".join(f"'{each}'" for each in [*self._table][:MAX_NAMED])
            more = ", ..." if len(self._table) > MAX_NAMED else ""
            message = f"The model '{name}' does not exist or you do not have access to it."
            message += f" This server has {listed}{more}."
            raise ApiError(404, message, code="model_not_found", param="model")
        return model

    def digest(self) -> str:
        """Of names and fingerprints: equal where two processes serve the same."""
        served: dict[str, ServedModel | PooledModel] = {**self._table, **self._pooled}
        lines = sorted(f"{name}={model.info.fingerprint}" for name, model in served.items())
        return blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()

    def load(self) -> Load:
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
        return self.load().running > 0

    def require_room(self, body: Mapping[str, Any], owner: str, weight: float) -> None:
        """Raise QueueFull where the engine of the model that a request's body names takes no more of an
        owner. It costs nothing, and so comes before the body is read any further."""
        name = body.get("model")
        if isinstance(name, str) and (pooled := self._pooled.get(name)) is not None:
            pooled.engine.admission.require_room(owner, weight)
            return
        model = self._table.get(name) if isinstance(name, str) else next(iter(self._table.values()), None)
        if model is not None:
            model.engine.admission.require_room(owner, weight)

    def resume_headers(self, name: str | None) -> dict[str, str]:
        """`x-antiphon-exact-resume: false` where a run of this model that was cut off goes on from its last
        token, but not with the very tokens that it would have had."""
        model = self._table.get(name) if name else next(iter(self._table.values()), None)
        exact = model is None or "exact_resume" in model.info.capabilities
        return {} if exact else {"x-antiphon-exact-resume": "false"}

    def __contains__(self, name: str) -> bool:
        return name in self._table

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._table.values())


def served_names(config: Config) -> tuple[str, ...]:
    """The names that the configuration gives the model: the flags', or the last part of its path or id."""
    if config.served_model_name:
        return config.served_model_name
    return ("antiphon-scripted",) if config.engine == "scripted" else (Path(config.model).name,)


_TEXT_PARTS: Mapping[str, bool | None] = {"auto": None, "string": False, "openai": True}


def caps_of(config: Config) -> Caps:
    """The caps that the configuration sets."""
    return Caps(
        default_temperature=config.default_temperature,
        default_output_tokens=config.default_max_output_tokens,
        output_tokens=config.max_output_tokens,
        prompt_tokens=config.max_prompt_tokens,
        timeout_s=config.request_timeout_s,
        keys_salt=config.prompt_cache_key_salts,
        request_templates=config.trust_request_chat_template,
        text_parts=_TEXT_PARTS[config.chat_template_content_format],
        response_role=config.response_role,
    )


def build_engine(config: Config) -> Engine:
    """An engine for the configuration, not yet started. It imports what engines need: call it in a thread.

    Raises LoadError for adapters that it could not serve.
    """
    name = served_names(config)[0]
    lora = _adapters(config)
    if config.engine == "scripted":
        from engine import ScriptedEngine

        return ScriptedEngine(
            name=name,
            tick_s=config.tick_s,
            max_running=config.max_num_seqs,
            max_waiting=config.max_waiting,
            max_waiting_tokens=config.max_waiting_tokens,
            chat_template=chat_template(config),
            allow_special_tokens=config.allow_special_tokens,
        )
    model = shipped_or_given(config)
    if config.engine == "upstream":
        from engine import UpstreamEngine

        return UpstreamEngine(
            model,
            config.upstream,
            name=name,
            upstream_model=config.upstream_model,
            api_key=config.upstream_api_key.get_secret_value() if config.upstream_api_key else None,
            max_model_len=config.max_model_len,
            max_waiting=config.max_waiting,
            max_waiting_tokens=config.max_waiting_tokens,
            chat_template=chat_template(config),
            allow_special_tokens=config.allow_special_tokens,
            tool_dialect=config.tool_dialect,
            reasoning_dialect=config.reasoning_dialect,
            generation_config=config.generation_config,
            timeout_s=config.upstream_timeout_s,
            patience_s=config.upstream_patience_s,
        )
    from engine import LocalEngine

    own = {"model": model, "name": name, "lora": lora, "chat_template": chat_template(config)}
    return LocalEngine(EngineConfig(**{**_engine_settings(config), **own}))


def shipped_or_given(config: Config) -> Path | str:
    """Where the configured model is: a folder, or an id of the hub."""
    shipped = Path(str(files("engine"))) / "tiny" / "checkpoint"
    return shipped if config.model == SHIPPED_MODEL else config.model


def is_hosted(config: Config) -> bool:
    """Whether several server processes have an engine's process behind them: with an upstream engine each
    asks the upstreams itself, and what is hosted are models for vectors and scores, where there are any."""
    return config.engine != "upstream" or bool(_asked_pooling(config))


def build_remote(config: Config, socket: Path) -> tuple[Engine, list[RemotePooling]]:
    """What a server process serves of the engines in another one, which listens at `socket`; not yet started.

    Raises LoadError.
    """
    from engine import EngineLine, RemoteEngine, RemotePooling

    line = EngineLine(socket)
    waiting: dict[str, Any] = {
        "num_servers": config.api_server_count,
        "max_waiting": config.max_waiting,
        "max_waiting_tokens": config.max_waiting_tokens,
    }
    pooling = [RemotePooling(line, index, **waiting) for index in range(len(_asked_pooling(config)))]
    if config.engine == "upstream":
        return build_engine(config), pooling
    engine = RemoteEngine(
        line,
        None if config.engine == "scripted" else shipped_or_given(config),
        chat_template=chat_template(config),
        allow_special_tokens=config.allow_special_tokens,
        tool_dialect=config.tool_dialect,
        reasoning_dialect=config.reasoning_dialect,
        **waiting,
    )
    return engine, pooling


def _asked_pooling(config: Config) -> list[tuple[PoolingKind, str]]:
    return [
        *(("embedding", each) for each in config.embedding_model),
        *(("rerank", each) for each in config.rerank_model),
        *(("classification", each) for each in config.classification_model),
    ]


def build_pooling(config: Config) -> list[PoolingEngine]:
    """The engines for vectors and scores that the configuration asks for, not yet started.

    Raises LoadError where a name could mean two models.
    """
    if not (asked := _asked_pooling(config)):
        return []
    taken = {*served_names(config), *_adapters(config)}
    engines = []
    for kind, each in asked:
        name, equals, where = each.partition("=")
        if not equals or "/" in name:  # a folder may have an equals sign in its name
            name, where = Path(each).name, each
        if name in taken:
            setting = f"--{kind}-model"
            raise LoadError(f"two models are named {name!r}; give one another name: {setting} NAME={where}")
        taken.add(name)
        engines.append(
            PoolingEngine(
                PoolingConfig(
                    model=where,
                    kind=kind,
                    name=name,
                    device=config.device,
                    max_waiting=config.max_waiting,
                    max_waiting_tokens=config.max_waiting_tokens,
                    num_threads=config.num_threads,
                    cpu_kernels=config.cpu_kernels,
                )
            )
        )
    return engines


def _engine_settings(config: Config) -> dict[str, Any]:
    """The settings that the engine has by the same names."""
    return {
        field.name: getattr(config, field.name)
        for field in fields(EngineConfig)
        if field.name in Config.model_fields
    }


def _adapters(config: Config) -> dict[str, str]:
    """Where each configured adapter is, by name. Raises LoadError where a name could mean two models."""
    named: dict[str, str] = {}
    for each in config.lora:
        name, where = (part.strip() for part in each.split("=", 1))
        if name in named or name in served_names(config):
            raise LoadError(f"two models are named {name!r}; give the adapter another name: --lora NAME=PATH")
        named[name] = where
    if named and config.engine != "local":
        raise LoadError(f"adapters are served by a model in this process, not with engine {config.engine}")
    return named


def chat_template(config: Config) -> str | None:
    """The text of the template that replaces the model's own: the setting itself where it has a tag of
    templates, or the file that it names. Raises LoadError for a file that cannot be read."""
    given = config.chat_template
    if given is None or "{{" in given or "{%" in given:
        return given
    try:
        return Path(given).expanduser().read_text("utf-8")
    except (OSError, ValueError) as error:
        raise LoadError(f"the chat template {config.chat_template} cannot be read: {error}") from None
