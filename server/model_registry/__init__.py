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
    generates_here,
    is_hosted,
    lacking,
    note_model,
    served_names,
    shipped_or_given,
)
from server.model_registry.children import expected_bytes, is_needed
from server.model_registry.registry import Load, Models, PooledModel, ServedModel, SpeechModel
from server.model_registry.several_models import SeveralModels, first_of
from server.model_registry.shared_models import SharedModels

__all__ = [
    "Load",
    "Models",
    "PooledModel",
    "ServedModel",
    "SeveralModels",
    "SharedModels",
    "SpeechModel",
    "adapters_of",
    "build_engine",
    "build_others",
    "build_pooling",
    "build_remote",
    "build_speech",
    "caps_of",
    "chat_template",
    "expected_bytes",
    "first_of",
    "generates_here",
    "is_hosted",
    "is_needed",
    "lacking",
    "note_model",
    "served_names",
    "shipped_or_given",
]
