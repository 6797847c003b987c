"""What an owner or a key may use, as the configuration, the command line and the database have it.

A limit that is not named does not limit. The limits of models stand under `models`, by any of the names under
which they are served; there are no others than rates and requests at once.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from server.limits.gcra import SECOND, Rate
from server.limits.tier_shape import ServiceShape

_BYTES = re.compile(r"(\d{1,12})([KMGT])(iB)?", re.ASCII | re.IGNORECASE)
_WHOLE, _DECIMAL = re.compile(r"\d{1,20}", re.ASCII), re.compile(r"\d{1,20}(\.\d{1,9})?", re.ASCII)

MINUTE, DAY = 60 * SECOND, 86_400 * SECOND
PERIODS = (("_per_second", SECOND), ("_per_minute", MINUTE), ("_per_day", DAY))

Count = Annotated[int | None, Field(ge=1, le=10**12, strict=True)]
Money = Annotated[float | None, Field(gt=0, le=10**12, strict=True, allow_inf_nan=False)]


Canonical = Callable[[str], str]
"""From a name of a model to what all its names have in common."""


class ModelLimits(BaseModel):
    """What may be used of one model. Those with `_per_` in their names are rates."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    requests_per_second: Count = None
    requests_per_minute: Count = None
    requests_per_day: Count = None
    tokens_per_minute: Count = None
    tokens_per_day: Count = None
    concurrent_requests: Count = None

    @cached_property
    def all_rates(self) -> dict[str, dict[str, Rate]]:
        """The rates of `requests`, `tokens` and `tool_calls`, by the names of their limits. Made once: limits
        are changed by `changed`, since a pydantic copy would have these of the original."""
        found: dict[str, dict[str, Rate]] = {"requests": {}, "tokens": {}, "tool_calls": {}}
        for unit, rates in found.items():
            for per, period in PERIODS:
                limit = getattr(self, unit + per, None)
                if limit is not None:
                    rates[unit + per] = Rate(limit, period)
        return found

    def given(self) -> dict[str, Any]:
        """The limits that there are, as JSON values."""
        return self.model_dump(exclude_none=True)


class LimitSet(ModelLimits, ServiceShape):
    """What an owner or a key may use of the whole server, and of single models; and how it is served.

    concurrent_streams: open event streams. tool_calls: those that the server itself carries out.
    queued_responses: background responses that wait for their turn. stored_bytes: what is
    stored of the owner; a write beyond it is refused.
    total_tokens, total_cost: budgets, of which nothing comes back; the cost by the prices of the
    configuration.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    concurrent_streams: Count = None
    tool_calls_per_minute: Count = None
    tool_calls_per_day: Count = None
    queued_responses: Count = None
    stored_bytes: Count = None
    total_tokens: Count = None
    total_cost: Money = None
    models: Mapping[str, ModelLimits] = {}

    def given(self) -> dict[str, Any]:
        """The limits that there are, as JSON values; `models` only where some have any."""
        models = {name: limits.given() for name, limits in self.models.items() if limits.given()}
        plain = self.model_dump(exclude_none=True, exclude={"models"})
        return {**plain, "models": models} if models else plain

    def of_model(self, model: str, canonical: Canonical) -> Iterator[tuple[str, ModelLimits]]:
        """The limits of one model, by each of its names that has any: a request must be within all of them,
        whichever name it gives."""
        wanted = canonical(model)
        return ((name, limits) for name, limits in self.models.items() if canonical(name) == wanted)

    def dump(self) -> bytes | None:
        """As it is stored; None where nothing is limited."""
        return orjson.dumps(given) if (given := self.given()) else None

    def over(self, defaults: LimitSet) -> LimitSet:
        """These limits, and where one is not named the default's."""
        return changed(defaults, self.given())


_A_MODELS = (
    'expected an object of limits by the name of the model, such as {"NAME": {"tokens_per_minute": 1000}}; '
    "null ends a single limit"
)

NONE = LimitSet()
"""No limits at all."""


def read_limits(value: Any) -> LimitSet:
    """Limits that somebody wrote as a JSON object, checked. ValueError names the first fault."""
    try:
        return LimitSet.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path = [str(part) for part in first["loc"]]
        name = ".".join(path)
        if first["type"] == "extra_forbidden":
            known = ModelLimits if path[0] == "models" else LimitSet
            if known is ModelLimits and path[-1] in LimitSet.model_fields.keys() - {"models"}:
                raise ValueError(_not_of_a_model(path[-1])) from None
            raise ValueError(_unknown(path[-1], list(known.model_fields))) from None
        if path[:1] == ["models"] and len(path) < 3:
            raise ValueError(f"{name}: {_A_MODELS}") from None
        raise ValueError(f"{name or 'limits'}: {first['msg'][:1].lower()}{first['msg'][1:]}") from None


def load_limits(stored: bytes | None) -> LimitSet:
    """Limits as they are stored. Names that this version does not know, of a newer one, do not limit."""
    if stored is None:
        return NONE
    found = orjson.loads(stored)
    models = {
        name: {key: value for key, value in limits.items() if key in ModelLimits.model_fields}
        for name, limits in found.get("models", {}).items()
    }
    known = {key: value for key, value in found.items() if key in LimitSet.model_fields}
    return read_limits({**known, "models": models})


def changed(before: LimitSet, changes: Mapping[str, Any]) -> LimitSet:
    """Limits with some of them replaced; those that are None end. ValueError."""
    models = {name: dict(limits) for name, limits in before.given().get("models", {}).items()}
    for name, limits in dict(changes.get("models") or {}).items():
        models[name] = {**models.get(name, {}), **limits}
    return read_limits({**before.given(), **changes, "models": models})


def parse_limits(words: Sequence[str]) -> dict[str, Any]:
    """Changes from words as a command line has them: `NAME=NUMBER`, `MODEL:NAME=NUMBER`, and `NAME=none`,
    which ends a limit. Stored bytes may be written as 64K, 2M, 4G or 1T. ValueError."""
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.rpartition("=")
        model, colon, limit = name.rpartition(":")
        if not equals or not limit or (colon and not model):
            raise ValueError(f"{word!r} is not of the form NAME=NUMBER or MODEL:NAME=NUMBER")
        known = (ModelLimits if colon else LimitSet).model_fields.keys() - {
            "models",
            *ServiceShape.model_fields,
        }
        if colon and limit in LimitSet.model_fields.keys() - known - {"models"}:
            raise ValueError(_not_of_a_model(limit))
        if limit not in known:
            raise ValueError(_unknown(limit, sorted(known)))
        into = found.setdefault("models", {}).setdefault(model, {}) if colon else found
        if limit == "stored_bytes" and (bytes := _BYTES.fullmatch(value)):
            value = str(int(bytes[1]) << (10 * (1 + "KMGT".index(bytes[2].upper()))))
        into[limit] = None if value == "none" else _number(word, value, whole=limit != "total_cost")
    read_limits(found)
    return found


def _number(word: str, value: str, *, whole: bool) -> int | float:
    if not (_WHOLE if whole else _DECIMAL).fullmatch(value):
        wanted = "whole number from 1 on" if whole else "number above 0"
        raise ValueError(f"{word!r}: {value!r} is no {wanted}, and not 'none'")
    return int(value) if whole else float(value)


def _not_of_a_model(name: str) -> str:
    there = ", ".join(sorted(ModelLimits.model_fields))
    return f"the limit {name!r} is one of everything, not of a single model: of a model there are {there}"


def _unknown(name: str, known: Sequence[str]) -> str:
    if name in ServiceShape.model_fields:
        flag = name.replace("_", "-")
        return f"{name!r} is no limit on use: `antiphon tiers ID --{flag} ...` sets it"
    nearest = difflib.get_close_matches(name, known, n=1)
    meant = f"; did you mean {nearest[0]!r}?" if nearest else f": there are {', '.join(sorted(known))}"
    return f"there is no limit {name!r}{meant}"
