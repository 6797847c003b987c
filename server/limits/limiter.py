"""Admits requests within the limits of their key and their owner, and says in headers what is left.

A request is counted before anything is done for it, its prompt's tokens and those that it will probably
generate as soon as the prompt's length is known. When it ends, what it has really used is counted instead.
Prompt tokens that the engine had cached do not count.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engine import Place
from server.errors import ApiError, insufficient_quota
from server.limits.budgets import Budgets
from server.limits.gcra import SECOND, Rate
from server.limits.limit_set import DAY, NONE, Canonical, LimitSet, ModelLimits, load_limits
from server.limits.meters import Meter, Meters
from storage import NotFound, Storage, StorageUnavailable

FIRST_GUESS = 256
"""Tokens that an owner's answer is taken to have at least, until ENOUGH_ANSWERS have ended, unless so many
are known from before this process."""

ENOUGH_ANSWERS = 8

LAST_ANSWERS = 64
"""So many answers of an owner tell how long the next one may become: as long as nine of ten of them."""

MAX_OWNERS = 10_000
"""Owners whose answers are remembered."""

WHAT = {
    "requests_per_second": "requests a second",
    "requests_per_minute": "requests a minute",
    "requests_per_day": "requests a day",
    "tokens_per_minute": "tokens a minute",
    "tokens_per_day": "tokens a day",
    "tool_calls_per_minute": "tool calls a minute",
    "tool_calls_per_day": "tool calls a day",
    "concurrent_requests": "requests at once",
    "concurrent_streams": "open streams",
}


PERSON = "person"


class Subject(NamedTuple):
    """Whose limits they are: `key`, `owner` or `person`, its id, and the limits. The owner is the last of
    those of a request."""

    kind: str
    id: str
    limits: LimitSet


async def owner_subject(storage: Storage, owner: str) -> Subject:
    """An owner by its own limits alone: for what is done when no request is there, nor its key."""
    try:
        limits = load_limits((await storage.get_owner(owner)).limits)
    except NotFound:
        limits = NONE
    return Subject("owner", owner, limits)


class StoredBytes(NamedTuple):
    """The lowest limit on stored bytes, and whose it is, as a message says it."""

    limit: int
    whose: str


@dataclass(frozen=True, slots=True)
class Charge:
    """What a run was charged at its start, for whoever ends it: `tokens` of each of the limits `tokens_of`,
    and the limits that its tool calls count against.

    Both are pairs of a limit's number and its period, in nanoseconds, by the limit's id.
    """

    tokens: int = 0
    tokens_of: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    tool_calls_of: Mapping[str, tuple[int, int]] = field(default_factory=dict)


class Visit:
    """A request that was admitted. It is one of those at once until `leave`.

    used: tells at the end how many tokens were used, and how many of them one answer has.
    """

    def __init__(
        self, limiter: Limiter, subjects: Sequence[Subject], model: str, places: Sequence[str]
    ) -> None:
        self._limiter = limiter
        self._subjects = subjects
        self._model = model
        self._places = list(places)
        self._requests = limiter.meters_of(subjects, model, "requests")
        self._tokens = limiter.meters_of(subjects, model, "tokens")
        self._reserved = 0
        self.used: Callable[[], tuple[int, int]] = lambda: (0, 0)

    async def reserve(self, prompt_tokens: int, most: int, *, answers: int = 1) -> None:
        """Reserve the prompt's tokens and those of the answers, once. most: tokens of one answer. ApiError
        429, and then the request is not counted either."""
        if not self._tokens or self._reserved:
            return
        owner = _owner(self._subjects)
        await self._limiter.learn(owner)
        wanted = prompt_tokens + answers * min(most, self._limiter.guess(owner))
        room = min(meter.rate.limit for meter in self._tokens)
        wanted = max(prompt_tokens, min(wanted, room))
        try:
            await self._limiter.take([(meter, wanted) for meter in self._tokens], self._subjects)
        except BaseException:
            self.uncount()
            raise
        self._reserved = wanted

    def bring(self, place: Place, num_tokens: int) -> None:
        """Count the prompt's tokens among those that wait for the engine. QueueFull where they are too many,
        and then the request is not counted."""
        try:
            place.bring(num_tokens)
        except BaseException:
            self.uncount()
            raise

    def uncount(self) -> None:
        """Give back the request, and what was reserved for it: nothing was begun for it."""
        for meter in self._requests:
            self._limiter.meters.charge(meter, -1)
        self._requests = ()

    @property
    def charge(self) -> Charge | None:
        """What was reserved, for `Limiter.settle`; None where nothing limits tokens or tool calls."""
        calls = self._limiter.meters_of(self._subjects, self._model, "tool_calls")
        charge = Charge(self._reserved, _rates(self._tokens), _rates(calls))
        return charge if charge.tokens_of or charge.tool_calls_of else None

    def hand_over(self) -> None:
        """Leave what was reserved to whoever holds the charge now."""
        self._tokens = ()

    def leave(self) -> None:
        """It is over: what was used of the tokens is counted in place of what was reserved. A second call
        does nothing."""
        self._limiter.give_back(self._places)
        self._places = []
        if self._tokens:
            used, generated = self.used()
            for meter in self._tokens:
                self._limiter.meters.charge(meter, used - self._reserved)
            if generated:
                self._limiter.note_answer(_owner(self._subjects), generated)
            self._tokens = ()


class Limiter:
    """The limits of all keys and owners, as this process applies them."""

    def __init__(
        self,
        meters: Meters,
        budgets: Budgets,
        defaults: LimitSet,
        refused: Callable[[str], None],
        canonical: Canonical,
        persons: LimitSet = NONE,
    ) -> None:
        """defaults: of owners, where they have none of their own. refused: told each limit that refuses.
        persons: of each person for whom clients ask."""
        self.canonical = canonical
        self._persons = persons
        self.meters = meters
        self._budgets = budgets
        self._refused = refused
        self._at_once: Counter[str] = Counter()
        self._answers: dict[str, deque[int]] = {}
        self._first_guesses: dict[str, int] = {}
        self.set_defaults(defaults)

    def set_defaults(self, defaults: LimitSet) -> None:
        """Have other limits hold for owners that have none of their own; what was used of them stays used."""
        self.defaults = defaults
        self._any_defaults = bool(defaults.given())
        self._merged: dict[int, tuple[LimitSet, LimitSet]] = {}

    # -- admitting -------------------------------------------------------------------------------------------

    async def enter(self, subjects: Sequence[Subject], model: str, person: str | None = None) -> Visit:
        """Count a request. person: a digest of the person for whom its client asks.

        ApiError 429 where it is one too many, or where no tokens are left; 403 where a
        budget is spent."""
        if person is not None and self._persons is not NONE:
            subjects = (Subject(PERSON, person, self._persons), *subjects)
        await self._require_budgets(subjects)
        places = self._places(subjects, model, "concurrent_requests")
        visit = Visit(self, subjects, model, places)
        requests = self.meters_of(subjects, model, "requests")
        tokens = self.meters_of(subjects, model, "tokens")
        try:
            if requests or tokens:
                await self.take([*((m, 1) for m in requests), *((m, 0) for m in tokens)], subjects)
        except BaseException:
            visit.leave()
            raise
        return visit

    async def require(self, subjects: Sequence[Subject], model: str | None) -> None:
        """Raise what `enter` would, and count nothing; model: None where it is not known yet."""
        await self._require_budgets(subjects)
        self.give_back(self._places(subjects, model, "concurrent_requests"))
        units = ("requests", "tokens")
        if meters := [meter for unit in units for meter in self.meters_of(subjects, model, unit)]:
            await self.take([(meter, 0) for meter in meters], subjects)

    async def _require_budgets(self, subjects: Sequence[Subject]) -> None:
        for subject in subjects:
            limits = self._limits_of(subject)
            tokens, cost = limits.total_tokens, limits.total_cost
            if tokens is None and cost is None:
                continue
            key_id = None if subject.kind == "owner" else subject.id
            refusal = await self._budgets.require(
                _owner(subjects), key_id, tokens, cost, whose(subject.kind, subjects)
            )
            if refusal is not None:
                self._refused(refusal[0])
                raise refusal[1]

    @contextmanager
    def stream(self, subjects: Sequence[Subject]) -> Iterator[None]:
        """Held while a stream of events is open. ApiError 429 where it is one too many."""
        places = self._places(subjects, None, "concurrent_streams")
        try:
            yield
        finally:
            self.give_back(places)

    async def take(self, wanted: Sequence[tuple[Meter, int]], subjects: Sequence[Subject]) -> None:
        """Take units of several limits, all or none. ApiError 429 that names the limit in the way, and
        whose it is."""
        if (found := await self.meters.take(wanted)) is not None:
            self._refused(_name(found[0].id))
            raise _refusal(subjects, found, self.meters.now())

    async def take_tokens(self, subjects: Sequence[Subject], model: str, tokens: int) -> None:
        """Take the tokens of work that a model does within a request, or long after it: it is counted as no
        request of its own. ApiError 429 where they are not left, 403 where a budget is spent; more than a
        limit ever allows take all of it."""
        await self._require_budgets(subjects)
        if meters := self.meters_of(subjects, model, "tokens"):
            await self.take([(meter, min(tokens, meter.rate.limit)) for meter in meters], subjects)

    def give_tokens_back(self, subjects: Sequence[Subject], model: str, tokens: int) -> None:
        """Give tokens back that were taken (`take_tokens`) and not used."""
        for meter in self.meters_of(subjects, model, "tokens") if tokens else ():
            self.meters.charge(meter, -min(tokens, meter.rate.limit))

    def _places(self, subjects: Sequence[Subject], model: str | None, name: str) -> list[str]:
        """Take a place among those at once, of every limit of this name."""
        found = [
            (id, limit)
            for id, limits in self._sets(subjects, model)
            if (limit := getattr(limits, name, None)) is not None
        ]
        for id, limit in found:
            if self._at_once[id + name] >= limit:
                self._refused(name)
                message = (
                    f"Rate limit reached: {limit} {_limit(id + name, subjects)}. Try again when one of them "
                    "has ended."
                )
                headers = {"retry-after": "1", **_plain_headers(limit, 0, SECOND)}
                raise ApiError(429, message, code="rate_limit_exceeded", headers=headers)
        places = [id + name for id, _ in found]
        self._at_once.update(places)
        return places

    def give_back(self, places: Sequence[str]) -> None:
        """Give places among those at once back."""
        for place in places:
            self._at_once[place] -= 1
            if not self._at_once[place]:
                del self._at_once[place]

    # -- settling --------------------------------------------------------------------------------------------

    def settle(self, charge: Charge, tokens: int) -> None:
        """Count tokens of a run that were used beside those that were counted before; below 0 they are given
        back."""
        for id, rate in charge.tokens_of.items():
            self.meters.charge(self.meters.meter(id, Rate(*rate)), tokens)

    async def tool_call(self, charge: Charge) -> str | None:
        """Count a call of a tool. Returns why it must not be made, or None."""
        wanted = [(self.meters.meter(id, Rate(*rate)), 1) for id, rate in charge.tool_calls_of.items()]
        if not wanted or (found := await self.meters.take(wanted)) is None:
            return None
        name = _name(found[0].id)
        self._refused(name)
        return f"This call was not made: only {found[0].rate.limit} {WHAT[name]} are allowed."

    def guess(self, owner: str) -> int:
        """How many tokens an answer will hardly exceed."""
        answers = self._answers.get(owner, ())
        likely = sorted(answers)[len(answers) * 9 // 10] if answers else 0
        if len(answers) >= ENOUGH_ANSWERS:
            return likely
        return max(likely, self._first_guesses.get(owner, FIRST_GUESS))

    async def learn(self, owner: str) -> None:
        """Look once how long an owner's answers were before this process, where it has not enough of its
        own."""
        if owner in self._first_guesses or len(self._answers.get(owner, ())) >= ENOUGH_ANSWERS:
            return
        with suppress(StorageUnavailable):  # the next request looks
            mean = await self._budgets.mean_answer(owner, ENOUGH_ANSWERS)
            if len(self._first_guesses) >= MAX_OWNERS:
                self._first_guesses.clear()
            self._first_guesses[owner] = FIRST_GUESS if mean is None else mean

    def note_answer(self, owner: str, tokens: int) -> None:
        """Remember how long an answer of an owner was."""
        if owner not in self._answers and len(self._answers) >= MAX_OWNERS:
            del self._answers[next(iter(self._answers))]
        self._answers.setdefault(owner, deque(maxlen=LAST_ANSWERS)).append(tokens)

    # -- looking ---------------------------------------------------------------------------------------------

    def meters_of(self, subjects: Sequence[Subject], model: str | None, unit: str) -> tuple[Meter, ...]:
        """The meters of `requests`, `tokens` or `tool_calls` that concern a request for a model; None: of
        those that concern every model."""
        return tuple(
            self.meters.meter(id + name, rate)
            for id, limits in self._sets(subjects, model)
            for name, rate in limits.all_rates[unit].items()
        )

    def least(self, subjects: Sequence[Subject], name: str, default: int | None) -> int | None:
        """The lowest limit of a name that is no rate, and `default`; None where there is none."""
        found = [getattr(limits, name, None) for _, limits in self._sets(subjects, None)]
        return min((limit for limit in (*found, default) if limit is not None), default=None)

    def stored_bytes(self, subjects: Sequence[Subject]) -> StoredBytes | None:
        """What may be stored of an owner, by its own limit or by that of the key that asks."""
        found = ((self._limits_of(each).stored_bytes, whose(each.kind, subjects)) for each in subjects)
        return min((StoredBytes(limit, whose) for limit, whose in found if limit is not None), default=None)

    def _sets(self, subjects: Sequence[Subject], model: str | None) -> Iterator[tuple[str, ModelLimits]]:
        for subject in subjects:
            limits = self._limits_of(subject)
            if limits is NONE:
                continue
            prefix = f"{subject.kind}:{_without_colons(subject.id)}:"
            yield prefix, limits
            for name, own in () if model is None else limits.of_model(model, self.canonical):
                yield f"{prefix}{name}:", own

    def _limits_of(self, subject: Subject) -> LimitSet:
        """A key's limits; an owner's over the defaults. Computed once for limits that are the same object, as
        they are for as long as a key is believed."""
        limits = subject.limits
        if subject.kind != "owner" or not self._any_defaults:
            return limits
        known = self._merged.get(id(limits))
        if known is None or known[0] is not limits:
            if len(self._merged) >= MAX_OWNERS:
                self._merged.clear()
            known = self._merged[id(limits)] = limits, limits.over(self.defaults)
        return known[1]


class Standing:
    """What is left to whoever makes a request, for the headers of its reply. model: once it is known."""

    def __init__(self, limiter: Limiter, subjects: Sequence[Subject]) -> None:
        self._limiter = limiter
        self._subjects = subjects
        self.model: str | None = None

    def headers(self) -> Iterator[tuple[str, str]]:
        """Of requests and of tokens: the limit of which the least is left. Nothing where there is none."""
        now = self._limiter.meters.now()
        for unit, left, meter in self._least(now):
            yield f"x-ratelimit-limit-{unit}", str(meter.rate.limit)
            yield f"x-ratelimit-remaining-{unit}", str(left)
            yield f"x-ratelimit-reset-{unit}", _duration(meter.reset(now))
            yield f"x-ratelimit-period-{unit}", str(meter.rate.period // SECOND)
            if unit == "requests":
                yield from _plain_headers(meter.rate.limit, left, meter.reset(now)).items()

    def rates(self) -> list[dict[str, Any]]:
        """The same as objects, as events tell it."""
        now = self._limiter.meters.now()
        return [
            {
                "name": unit,
                "limit": meter.rate.limit,
                "remaining": left,
                "reset_seconds": meter.reset(now) / SECOND,
            }
            for unit, left, meter in self._least(now)
        ]

    def _least(self, now: int) -> Iterator[tuple[str, int, Meter]]:
        for unit in ("requests", "tokens"):
            meters = self._limiter.meters_of(self._subjects, self.model, unit)
            if meters:
                pairs = ((meter.remaining(now), meter) for meter in meters)
                left, meter = min(pairs, key=lambda pair: pair[0])
                yield unit, left, meter


def _rates(meters: Sequence[Meter]) -> dict[str, tuple[int, int]]:
    return {meter.id: (meter.rate.limit, meter.rate.period) for meter in meters}


def whose(kind: str, subjects: Sequence[Subject]) -> str:
    """Whose a limit is, for a message: of a subject of this kind, among those whose limits concern a
    request."""
    if kind == PERSON:
        return "this safety_identifier"
    if (
        sum(subject.kind != PERSON for subject in subjects) == 1
    ):  # no key, and so no project that anybody knows of
        return "this server"
    return "your key" if kind == "key" else "your project"


def _owner(subjects: Sequence[Subject]) -> str:
    return subjects[-1].id


def _without_colons(id: str) -> str:
    """An owner's id as it stands in the ids of limits: a colon in it is none of theirs, lest the limits of
    the owner `a:b` be those of the owner `a` for a model `b`."""
    return id.replace("%", "%25").replace(":", "%3A") if "%" in id or ":" in id else id


def _name(id: str) -> str:
    """The name of the limit that an id ends with."""
    return id.rpartition(":")[2]


def _limit(id: str, subjects: Sequence[Subject]) -> str:
    """What a limit limits, whose it is, and of which model where it is one of a model, by its id."""
    kind, _, rest = id.split(":", 2)
    model, _, name = rest.rpartition(":")
    return f"{WHAT[name]} of {whose(kind, subjects)}" + (f" for '{model}'" if model else "")


def _refusal(subjects: Sequence[Subject], found: tuple[Meter, int, int | None], now: int) -> ApiError:
    """429: `rate_limit_exceeded`, or `insufficient_quota` where a day's allowance is spent."""
    meter, units, wait = found
    rate, left = meter.rate, meter.remaining(now)
    headers = _plain_headers(rate.limit, left, meter.reset(now))
    told = f"{_limit(meter.id, subjects)}: limit {rate.limit}, left {left}, requested {max(1, units)}"
    if wait is None:
        message = f"The request is larger than the limit on {told}."
        return ApiError(
            429, message, code="rate_limit_exceeded", headers={**headers, "x-should-retry": "false"}
        )
    headers["retry-after"] = str(math.ceil(wait / SECOND))
    if rate.period == DAY:
        message = f"You have used up your {told}. Try again in {_duration(wait)}."
        return insufficient_quota(429, message, headers)
    message = f"Rate limit reached on {told}. Try again in {_duration(wait)}."
    return ApiError(429, message, code="rate_limit_exceeded", headers=headers)


def _plain_headers(limit: int, left: int, reset: int) -> dict[str, str]:
    return {
        "x-ratelimit-limit": str(limit),
        "x-ratelimit-remaining": str(left),
        "x-ratelimit-reset": str(math.ceil(reset / SECOND)),
    }


def _duration(nanoseconds: int) -> str:
    """As the official API writes it: `20ms`, `1s`, `6m0s`, `23h59m59s`; rounded up."""
    if nanoseconds < SECOND:
        return f"{math.ceil(nanoseconds / 1_000_000)}ms"
    minutes, seconds = divmod(math.ceil(nanoseconds / SECOND), 60)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{seconds}s"
