"""Decoder models: native families, and any other transformers decoder through its attention interface."""

from __future__ import annotations

from engine.models.interface import Attention, Model, ModelSpec
from engine.models.loader import load_model

__all__ = ["Attention", "Model", "ModelSpec", "load_model"]
