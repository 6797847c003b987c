"""What limits say of how requests are served: the weight of an owner, the tiers and priorities of a key."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

ServedTier = Literal["default", "flex", "priority"]


class ServiceShape(BaseModel):
    """What limits say of service; None: nothing.

    weight: an owner's share of the tokens, against those of other owners; that of a key is not read.
    service_tiers: those that may be used, first the one that is used where a request names none.
    max_priority: the most urgent number, that is, the lowest one, that a request may ask for.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    weight: Annotated[float | None, Field(strict=True, ge=0.001, le=1000)] = None
    service_tiers: Annotated[tuple[ServedTier, ...] | None, Field(strict=False, min_length=1)] = None
    max_priority: Annotated[int | None, Field(strict=True, ge=-1000, le=1000)] = None

    @field_validator("service_tiers")
    @classmethod
    def _once(cls, tiers: tuple[ServedTier, ...] | None) -> tuple[ServedTier, ...] | None:
        return tiers if tiers is None else tuple(dict.fromkeys(tiers))
