"""Describes the bodies of all requests, replies and events as JSON Schema for the OpenAPI document.

The schemas of requests are made from the table of fields and from the models and shapes that check requests,
those of items from their rows, those of events from the table of events. What replies are made of besides is
written here, and in tests every reply, event and frame of every server is held to it, to the last member
(`tests/support/described.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from server.schema.description.audio import audio_components
from server.schema.description.completions import completion_components
from server.schema.description.events import event_components
from server.schema.description.files import FILE_PURPOSES, file_components
from server.schema.description.messages import messages_components
from server.schema.description.organization import organization_components
from server.schema.description.pooling import pooling_components
from server.schema.description.prompts import prompt_components
from server.schema.description.responses import STATUSES, response_components
from server.schema.description.vector_stores import vector_store_components
from server.shapes import Schema

__all__ = ["FILE_PURPOSES", "STATUSES", "components"]


@cache
def components() -> Mapping[str, Schema]:
    """The schemas of the document, by name, those of administrators last."""
    return {
        **response_components(),
        **event_components(),
        **completion_components(),
        **messages_components(),
        **prompt_components(),
        **pooling_components(),
        **audio_components(),
        **file_components(),
        **vector_store_components(),
        **organization_components(),
    }
