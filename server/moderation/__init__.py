"""What requests have judged: the field `moderation`, bodies of /v1/moderations, the texts that are judged,
and what verdicts mean. `server.pooling.Moderator` judges."""

from __future__ import annotations

from server.moderation.requests import (
    Moderation,
    ModerationRequest,
    parse_moderation,
    parse_moderation_request,
)
from server.moderation.verdicts import Verdict, asked_in, blocks, said_in, unjudged

__all__ = [
    "Moderation",
    "ModerationRequest",
    "Verdict",
    "asked_in",
    "blocks",
    "parse_moderation",
    "parse_moderation_request",
    "said_in",
    "unjudged",
]
