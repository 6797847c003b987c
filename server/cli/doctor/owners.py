"""Whether who comes needs a key, what each owner may use, which keys seal what clients keep, and which
webhooks are in trouble."""

from __future__ import annotations

from server.access import LOCAL_OWNER
from server.admin import keys
from server.cli.doctor.database import readable_state
from server.cli.doctor.findings import Finding
from server.config import Config
from server.encrypted_reasoning import given_keys
from server.limits import NONE, changed, load_limits, parse_limits
from storage import StoredWebhook


async def is_keyed(config: Config) -> bool | None:
    """Whether who comes needs a key; None where only the database could tell, and cannot be read."""
    if config.api_key or config.api_key_file is not None:
        return True
    state = await readable_state(config)
    return None if state is None else bool(state.num_keys)


async def check_limits(config: Config) -> Finding:
    """What whoever comes may use: a server without keys knows one owner only."""
    every = changed(NONE, parse_limits(config.owner_limit))
    if (state := await readable_state(config)) is None:
        of_each = keys.shown_limits({"limits": every.given()})
        return (
            "note",
            f"of each owner: {of_each}; the database, which may say otherwise of some, cannot be read",
        )
    own = {owner: limits for owner, dumped in state.limits.items() if (limits := load_limits(dumped)) != NONE}
    if not config.loopback or await is_keyed(config):
        of_others = keys.shown_limits({"limits": every.given()})
        owners = "1 owner has" if len(own) == 1 else f"{len(own)} owners have"
        return "ok", f"{owners} limits of their own; of every other: {of_others}"
    in_force = own.get(LOCAL_OWNER, NONE).over(every).given()
    if not in_force:
        change = f"antiphon owners limits {LOCAL_OWNER} --limit NAME=VALUE{config.flags}"
        return "ok", f"whoever comes is the owner {LOCAL_OWNER}, without limits: {change}"
    return "ok", f"whoever comes is the owner {LOCAL_OWNER}: {keys.shown_limits({'limits': in_force})}"


async def check_sealing(config: Config) -> Finding:
    """Which keys seal what clients keep."""
    try:
        given = given_keys(config.sealing_keys())
    except ValueError as exc:
        return "FAIL", str(exc)
    if not given:
        days = f"{config.sealing_key_s / 86400:g}"
        return "ok", f"reasoning is sealed by keys that the database holds, a new one every {days} days"
    source = "sealing_key" if config.sealing_key_file is None else str(config.sealing_key_file)
    besides = f"; {len(given) - 1} more open what they sealed" if given[1:] else ""
    return "ok", f"reasoning is sealed by key {given[0].number} of {source}{besides}"


async def check_webhooks(config: Config) -> Finding:
    """Which webhooks are not told what they are to be told."""
    if (state := await readable_state(config)) is None:
        return "note", "the database cannot be read"
    troubled = [f"{hook.id} {why}" for hook in state.webhooks if (why := _trouble(hook)) is not None]
    if troubled:
        return "note", "; ".join(troubled)
    return "ok", f"{len(state.webhooks)} webhooks, of which none is gone or failing"


def _trouble(hook: StoredWebhook) -> str | None:
    if hook.disabled_at is not None:
        return (
            f"is gone: its receiver answered 410, and it is told nothing; {hook.pending} notices are kept "
            "until `antiphon webhooks enable` or `remove`"
        )
    if hook.attempts > 1:  # a first attempt may be under way
        return f"is failing: {hook.pending} notices wait, one of them for its attempt {hook.attempts + 1}"
    return None
