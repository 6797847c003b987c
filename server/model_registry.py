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
from typing import Any

from engine import Engine, EngineConfig, LoadError, ModelInfo
from server.config import SHIPPED_MODEL, Config
from server.errors import ApiError
from server.limits import Caps


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

    def get(self, name: str | None) -> ServedModel:
        """The model of that name, or the default for None; ApiError 404 `model_not_found`, 503 while it
        loads."""
        if not self._table:
            raise ApiError(503, "The model is still loading.", code="not_ready", headers={"retry-after": "1"})
        if name is None:
            return next(iter(self._table.values()))
        model = self._table.get(name)
        if model is None:
            listed = ", ".join(f"'{each}'" for each in [*self._table][:MAX_NAMED])
            more = ", ..." if len(self._table) > MAX_NAMED else ""
            message = f"The model '{name}' does not exist or you do not have access to it."
            message += f" This server has {listed}{more}."
            raise ApiError(404, message, code="model_not_found", param="model")
        return model

    def digest(self) -> str:
        """Of names and fingerprints: equal where two processes serve the same."""
        lines = sorted(f"{name}={model.info.fingerprint}" for name, model in self._table.items())
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

    def require_room(self, body: Mapping[str, Any], owner: str, weight: float) -> None:
        """Raise QueueFull where the engine of the model that a request's body names takes no more of an
        owner. It costs nothing, and so comes before the body is read any further."""
        name = body.get("model")
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


def caps_of(config: Config) -> Caps:
    """The caps that the configuration sets."""
    return Caps(
        default_temperature=config.default_temperature,
        default_output_tokens=config.default_max_output_tokens,
        output_tokens=config.max_output_tokens,
        prompt_tokens=config.max_prompt_tokens,
        timeout_s=config.request_timeout_s,
        keys_salt=config.prompt_cache_key_salts,
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
    shipped = Path(str(files("engine"))) / "tiny" / "checkpoint"
    model = shipped if config.model == SHIPPED_MODEL else config.model
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
    """The text of the template that replaces the model's own. Raises LoadError for a file that cannot be
    read."""
    if config.chat_template is None:
        return None
    try:
        return config.chat_template.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise LoadError(f"the chat template {config.chat_template} cannot be read: {error}") from None
