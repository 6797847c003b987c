"""What answers a request: the model in this process or in another one, other servers, or a script."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.late import late

if TYPE_CHECKING:
    from engine.backends.local import LocalEngine
    from engine.backends.remote import RemoteEngine
    from engine.backends.remote_host import EngineHost
    from engine.backends.remote_line import EngineLine
    from engine.backends.remote_models import RemotePooling, RemoteSpeech
    from engine.backends.request_checks import check_request
    from engine.backends.script import Fail, Say, Tick, Wait
    from engine.backends.scripted import ScriptedEngine
    from engine.backends.upstream import UpstreamEngine
else:
    __getattr__ = late(
        __name__,
        {
            "engine.backends.local": ("LocalEngine",),
            "engine.backends.remote": ("RemoteEngine",),
            "engine.backends.remote_host": ("EngineHost",),
            "engine.backends.remote_line": ("EngineLine",),
            "engine.backends.remote_models": ("RemotePooling", "RemoteSpeech"),
            "engine.backends.request_checks": ("check_request",),
            "engine.backends.script": ("Fail", "Say", "Tick", "Wait"),
            "engine.backends.scripted": ("ScriptedEngine",),
            "engine.backends.upstream": ("UpstreamEngine",),
        },
    )

__all__ = [
    "EngineHost",
    "EngineLine",
    "Fail",
    "LocalEngine",
    "RemoteEngine",
    "RemotePooling",
    "RemoteSpeech",
    "Say",
    "ScriptedEngine",
    "Tick",
    "UpstreamEngine",
    "Wait",
    "check_request",
]
