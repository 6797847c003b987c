"""Names of models to the engines that serve them, and the engines that a configuration asks for."""

from __future__ import annotations

from server.model_registry.building import (
    adapters_of,
    build_engine,
    build_others,
    build_pooling,
    build_remote,
    build_speech,
    caps_of,
    chat_template,
    is_hosted,
    note_model,
    served_names,
    shipped_or_given,
)
from server.model_registry.children import ChildOther, ChildText
from server.model_registry.registry import Load, Models, PooledModel, ServedModel, SpeechModel
from server.model_registry.several_models import SeveralModels

__all__ = [
    "ChildOther",
    "ChildText",
    "Load",
    "Models",
    "PooledModel",
    "ServedModel",
    "SeveralModels",
    "SpeechModel",
    "adapters_of",
    "build_engine",
    "build_others",
    "build_pooling",
    "build_remote",
    "build_speech",
    "caps_of",
    "chat_template",
    "is_hosted",
    "note_model",
    "served_names",
    "shipped_or_given",
]
