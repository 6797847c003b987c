"""Builds the engines that a configuration asks for."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import (
    Engine,
    EngineConfig,
    LoadError,
    PoolingConfig,
    PoolingEngine,
    PoolingInfo,
    PoolingKind,
    SpeechConfig,
    SpeechEngine,
    SpeechInfo,
    packaged_folder,
    require_file,
)
from server.config import Config
from server.limits import Caps
from server.settings import ModelEntry

if TYPE_CHECKING:
    from engine import EngineLine, RemoteEngine, RemotePooling, RemoteSpeech

log = logging.getLogger("antiphon")


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
    lora = adapters_of(config)
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
    """Where the configured model is: a folder, a name that the engine knows, or an id of the hub."""
    return packaged_folder(config.model) or config.model


def is_hosted(config: Config) -> bool:
    """Whether several server processes have an engine's process behind them: with an upstream engine each
    asks the upstreams itself, and what is hosted are models for vectors, scores and speech, where there are
    any. Models of the file have processes of their own."""
    return generates_here(config) or bool(_asked_pooling(config)) or bool(config.speech_model)


def generates_here(config: Config) -> bool:
    """Whether the model that the settings name is computed by this machine."""
    return config.serves_own_model and config.engine != "upstream"


def build_remote(config: Config, socket: Path) -> tuple[Engine | None, list[RemotePooling | RemoteSpeech]]:
    """What a server process serves of the engines in another one, which listens at `socket`; not yet started.
    None where the settings name no model that generates.

    Raises LoadError.
    """
    from engine import EngineLine, RemotePooling, RemoteSpeech

    line = EngineLine(socket)
    waiting: dict[str, Any] = {
        "num_servers": config.api_server_count,
        "max_waiting": config.max_waiting,
        "max_waiting_tokens": config.max_waiting_tokens,
    }
    kinds = [RemotePooling] * len(_asked_pooling(config)) + [RemoteSpeech] * len(config.speech_model)
    others = [kind(line, index, **waiting) for index, kind in enumerate(kinds)]
    if not config.serves_own_model:
        return None, others
    if config.engine == "upstream":
        return build_engine(config), others
    return remote_engine(config, line, config.api_server_count), others


def remote_engine(config: Config, line: EngineLine, num_servers: int) -> RemoteEngine:
    """What a configuration's engine is to one of `num_servers` processes before it; not yet started. Raises
    LoadError."""
    from engine import RemoteEngine

    return RemoteEngine(
        line,
        None if config.engine == "scripted" else shipped_or_given(config),
        chat_template=chat_template(config),
        allow_special_tokens=config.allow_special_tokens,
        tool_dialect=config.tool_dialect,
        reasoning_dialect=config.reasoning_dialect,
        num_servers=num_servers,
        max_waiting=config.max_waiting,
        max_waiting_tokens=config.max_waiting_tokens,
    )


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
    names, engines = _Names(config), []
    for kind, each in asked:
        name, where = names.take(each, f"--{kind}-model")
        engines.append(
            PoolingEngine(
                PoolingConfig(
                    model=packaged_folder(where) or where,
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


def build_speech(config: Config) -> list[SpeechEngine]:
    """The engines for speech that the configuration asks for, not yet started. Raises LoadError as
    `build_pooling` does."""
    if not config.speech_model:
        return []
    names, engines = _Names(config), []
    for kind, each in _asked_pooling(config):
        names.take(each, f"--{kind}-model")
    for each in config.speech_model:
        name, where = names.take(each, "--speech-model")
        engines.append(
            SpeechEngine(
                SpeechConfig(
                    model=where,
                    name=name,
                    device=config.device,
                    max_waiting=config.max_waiting,
                    num_threads=config.num_threads,
                )
            )
        )
    return engines


class _Names:
    """The names that models have already."""

    def __init__(self, config: Config) -> None:
        self._taken = {*served_names(config), *adapters_of(config)}

    def take(self, asked: str, setting: str) -> tuple[str, str]:
        """The name of a model that a setting asks for, and where the model is. LoadError where another has
        the name."""
        name, equals, where = asked.partition("=")
        if not equals or "/" in name:  # a folder may have an equals sign in its name
            name, where = Path(asked).name, asked
        if name in self._taken:
            raise LoadError(f"two models are named {name!r}; give one another name: {setting} NAME={where}")
        self._taken.add(name)
        return name, where


def build_others(config: Config) -> list[PoolingEngine | SpeechEngine]:
    """The engines beside the one that generates. Raises LoadError."""
    return [*build_pooling(config), *build_speech(config)]


def note_model(info: PoolingInfo | SpeechInfo) -> None:
    """Log what a model beside the one that generates is served for."""
    if isinstance(info, SpeechInfo):
        known = f"{len(info.languages)} languages" if info.languages else "English alone"
        log.info("%s is served for speech: %s, windows of %g s", info.name, known, info.window_s)
        return
    how = f"{'+'.join(info.pooling)} ({info.pooling_source})"
    log.info("%s is served for %s: %s, %d tokens", info.name, info.kind, how, info.max_model_len)


def _engine_settings(config: Config) -> dict[str, Any]:
    """The settings that the engine has by the same names."""
    return {
        field.name: getattr(config, field.name)
        for field in fields(EngineConfig)
        if field.name in Config.model_fields
    }


def adapters_of(config: Config) -> dict[str, str]:
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


def lacking(entry: ModelEntry, config: Config) -> str | None:
    """Why a model of the file cannot be loaded, as far as the folders tell that its entry names; None where
    they do not. config: as it is for the entry."""
    if entry.engine == "scripted" or entry.path is None:
        return None
    # Models for vectors and scores have files of several kinds; of an upstream's only the tokenizer is read.
    generates_or_hears = entry.use in {"text", "speech"} and entry.engine == "local"
    try:
        require_file(entry.path, "config.json" if generates_or_hears else None)
        for name, where in adapters_of(config).items():
            try:
                require_file(where, "adapter_config.json")
            except LoadError as error:
                raise LoadError(f"the adapter {name!r} cannot be served: {error}") from None
    except LoadError as error:
        return str(error)
    return None


def chat_template(config: Config) -> str | None:
    """The text of the template that replaces the model's own: the setting itself where it has a tag of
    templates, or the file that it names. Raises LoadError for a file that cannot be read."""
    given = config.chat_template
    if given is None or "{{" in given or "{%" in given:
        return given
    try:
        return Path(os.path.expanduser(given)).read_text("utf-8")
    except (OSError, ValueError) as error:
        raise LoadError(f"the chat template {config.chat_template} cannot be read: {error}") from None
