"""How the requests of a key are served: the weight of its owner, the tiers and priorities that it may use.

These are members of the JSON objects of limits, of keys and of owners; the other members are no business of
this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

from pydantic import BaseModel

from server.errors import ApiError
from server.limits import ServedTier, ServiceShape
from server.schema import PRIORITIES, effective_tier, is_tier, tier_of

EVERY_TIER: tuple[ServedTier, ...] = ("default", "flex", "priority")
"""What may be used on a server without keys; the first is what a request gets that names none."""

KEYED_TIERS: tuple[ServedTier, ...] = ("default", "flex")
"""The same where keys are needed: `priority`, by which an owner gets before all others, is given by name."""


@dataclass(frozen=True, slots=True)
class Service:
    """What a principal may have. tiers: the default first. max_priority: the lowest number allowed. keyed:
    whether it has that by a key."""

    weight: float = 1.0
    tiers: tuple[str, ...] = EVERY_TIER
    max_priority: int = PRIORITIES["priority"]
    keyed: bool = True

    @classmethod
    def of(
        cls,
        key: ServiceShape,
        owner: ServiceShape,
        unsaid: tuple[ServedTier, ...] = EVERY_TIER,
        *,
        keyed: bool = True,
    ) -> Service:
        """What the limits of a key and of its owner leave. unsaid: the tiers where neither says which; a
        `max_priority` below 0 says that `priority` is among them."""
        said = [each.max_priority for each in (key, owner) if each.max_priority is not None]
        most = max(said, default=PRIORITIES["priority"])
        if key.service_tiers or (said and most < PRIORITIES["default"]):
            unsaid = EVERY_TIER
        owners = owner.service_tiers or unsaid
        tiers = tuple(
            tier
            for tier in key.service_tiers or owners
            if tier in owners and (tier == "flex" or most <= PRIORITIES[tier])
        )
        # Limits that contradict each other must not shut a key out altogether.
        return cls(owner.weight or 1.0, tiers or ("flex",), most, keyed)

    def resolved(self, asked: str | None, priority: int | None) -> tuple[str, int]:
        """The tier at which a request is served and its number in the queues, for the tier and the number
        that it asks for. ApiError 403 `insufficient_permissions` for one that may not be used."""
        if priority is not None:
            tier, number, param = tier_of(priority), priority, "priority"
        else:
            tier = effective_tier(asked) if is_tier(asked) else self.tiers[0]
            number, param = max(PRIORITIES[tier], self.max_priority), "service_tier"
        who = "This key" if self.keyed else "A request without a key"
        if tier not in self.tiers:
            named = " and ".join(f"'{each}'" for each in self.tiers)
            told = (
                f"'{asked}'" if param == "service_tier" else f"'{tier}', which is that of priority {number}"
            )
            raise _forbidden(f"{who} may not use the service tier {told}. It may use {named}.", param)
        if number < self.max_priority:
            message = f"{who} may not use priority {number}. The most urgent it may use is "
            raise _forbidden(f"{message}{self.max_priority}; lower numbers go first.", param)
        return tier, number


class _Asked(Protocol):
    @property
    def service_tier(self) -> str | None: ...

    @property
    def priority(self) -> int | None: ...


AnyRequest = TypeVar("AnyRequest", bound=_Asked)


def admitted(service: Service, request: AnyRequest) -> AnyRequest:
    """A request with the tier and the number at which it is served. ApiError 403 for one that its key may not
    use."""
    tier, number = service.resolved(request.service_tier, request.priority)
    model = cast(BaseModel, request)
    return cast(AnyRequest, model.model_copy(update={"service_tier": tier, "priority": number}))


def _forbidden(message: str, param: str) -> ApiError:
    return ApiError(403, message, code="insufficient_permissions", param=param)
