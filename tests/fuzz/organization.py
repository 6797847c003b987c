"""What administrators, operators and strangers ask of keys, projects, limits and usage, with keys of all
scopes.

Owns the values that are tried in paths, queries and bodies, and which key may ask what. Refuses to know what
a field means, beyond that a server must take it or say why not. Run it as

    python -m tests.fuzz.organization --requests 5000 --seed 7

which starts a server in this process, prints what was wrong, and exits with 1 if anything was. Wrong is: a
5xx, an error without its official form or its field, an answer to a key that lacks the scope, a reply after
5 s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
from fastapi.routing import APIRoute

from server.access import ADMIN, ADMIN_READS, OPERATOR_ONLY
from server.http import declared_scope
from server.routes import ROUTERS
from tests.fuzz.crowd import LIMIT_S
from tests.fuzz.sampling import EDGES
from tests.support.running import Running, live_app

AT_ONCE = 12
_TRACE = re.compile(r"\([A-Z]\w+(?:Error|Exception|Interrupt)\)|Traceback|object at 0x|sqlite|asyncpg", re.I)

SCOPES = (
    "all",
    "all.read",
    "admin",
    "responses",
    "chat.write",
    "usage.read",
    "all,model:x*",
    "chat,tool:mcp:builtin",
)
"""A key of each is among those that ask, besides none, a wrong one and the operator's."""

LIMIT_NAMES = (
    "requests_per_minute", "requests_per_day", "tokens_per_minute", "tokens_per_day", "concurrent_requests",
    "concurrent_streams", "tool_calls_per_minute", "tool_calls_per_day", "queued_responses", "stored_bytes",
    "weight", "service_tiers", "max_priority", "models", "nothing",
)  # fmt: skip
QUERIES = (
    "limit", "after", "before", "order", "start_time", "end_time", "bucket_width", "group_by[]", "group_by",
    "project_ids[]", "api_key_ids[]", "models[]", "user_ids[]", "batch", "page", "include_archived",
    "effective_at[gt]", "effective_at[gte]", "effective_at[lt]", "effective_at[lte]", "event_types[]",
    "actor_ids[]", "resource_ids[]", "actor_emails[]", "owner", "number", "hash", "line_items[]",
)  # fmt: skip
TAKEN_QUERIES = {
    "limit": ("1", "2", "100"), "order": ("asc", "desc"), "bucket_width": ("1m", "1h", "1d"),
    "group_by[]": ("model", "api_key_id", "project_id", "batch", "line_item", "service_tier"),
    "batch": ("true", "false"), "include_archived": ("true",), "start_time": ("0", "1790000000"),
}  # fmt: skip
FIELDS = (
    "name", "scopes", "expires_in_seconds", "expires_in_s", "limits", "grace_seconds", "grace_s", "owner",
    "before", "keys", "url", "event_types", "allow_http", "max_requests_per_1_minute",
    "max_tokens_per_1_minute", "max_requests_per_1_day", "batch_1_day_max_input_tokens", "weight",
    "service_tiers", "max_priority", "unknown",
)  # fmt: skip
OWN_FIELDS: dict[str, tuple[str, ...]] = {
    "/purge": ("owner", "owner", "before", "keys"),
    "keys": ("name", "scopes", "expires_in_seconds", "expires_in_s", "limits", "owner"),
    "{key_id}": ("name", "scopes", "expires_in_seconds", "expires_in_s", "limits"),
    "/rotate": ("grace_seconds", "grace_s", "expires_in_seconds", "expires_in_s"),
    "/limits": ("limits",),
    "{rate_limit_id:path}": FIELDS[13:17],
    "/tiers/{id}": FIELDS[17:20],
    "/webhooks": ("url", "owner", "event_types", "allow_http"),
}
"""The fields of the routes whose paths end so."""
TAKEN_FIELDS: dict[str, tuple[Any, ...]] = {
    "name": ("a", "x" * 256, "x" * 257, "\u202e", "a\x00b"),
    "scopes": (["all"], ["admin"], ["responses", "model:*"], ["tool:mcp:x"], ["nothing"], ["all"] * 300),
    "owner": ("local", "ann", "own_x", "a\x00b", "admin"),
    "url": (
        "http://127.0.0.1:9/",
        "https://127.0.0.1:9/",
        "http://[::1",
        "ftp://x",
        "http://\x00",
        "https://a:b",
    ),
    "event_types": (["response.completed"], ["nothing"]),
    "service_tiers": (["flex"], ["default", "priority"], ["nothing"], [[]]),
    "keys": (True, False),
    "before": (True, -1, 0, 1 << 62, 1 << 63, 1e300),
}
ODD = (
    "",
    "x",
    "\x00",
    "\ud7ff\uffff",
    "..",
    "%",
    "a/b",
    "\u202e",
    "-1",
    "0",
    "1.5",
    "1e9",
    "99999999999999999999",
    "y" * 3000,
)
PATHS = ("/v1/responses", "/v1/chat/completions")
"""Asked with keys whose limits were changed."""
WITHOUT_FIELD = {"invalid_json", "invalid_string", "project_archived", "key_ended"}
"""What is said of the whole body, or of what the path names."""


@dataclass(slots=True)
class Found:
    """What came of all requests. wrong: one line each, with the request."""

    replies: Counter[int] = field(default_factory=Counter)
    routes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. scopes: of its key; None without one, or with one that nobody has."""

    method: str
    template: str
    path: str
    scope: str  # that the route declares
    body: str | None
    key: str | None
    scopes: str | None


def routes() -> list[tuple[str, str, str]]:
    """Method, path and scope of every route for administrators and operators."""
    found = []
    for router in ROUTERS:
        for route in router.routes:
            if getattr(route, "path", "").startswith(("/v1/organization", "/admin")):
                assert isinstance(route, APIRoute), route
                found += [(method, route.path, declared_scope(route)) for method in sorted(route.methods)]
    return found


class Fuzzer:
    """Asks one server; what it has made is asked for again."""

    def __init__(self, running: Running, session: aiohttp.ClientSession, seed: int, limit_s: float) -> None:
        self.found = Found()
        self._url = running.base_url
        self._session = session
        self._limit_s = limit_s
        self._draw = random.Random(seed)
        self._routes = routes()
        self._operator = running.life.admin_token
        self._callers: list[tuple[str | None, str | None]] = [(None, None), ("sk-nobody", None)]
        self._ids: dict[str, list[str]] = {}  # what was made, by what its id begins with
        self._made: list[str] = []  # keys that were made, whose limits and scopes may be anything

    async def begin(self) -> None:
        """Make the keys that ask; their owner is not among what is changed."""
        for scope in SCOPES:
            reply = await self._session.post(
                f"{self._url}/admin/keys",
                json={"owner": "callers", "name": scope, "scopes": scope.split(",")},
                headers={"authorization": f"Bearer {self._operator}"},
            )
            assert reply.status == 200, await reply.text()
            self._callers.append(((await reply.json())["key"], scope))
        self._callers += [(self._operator, OPERATOR_ONLY)] * len(SCOPES)
        self._callers += [self._callers[2 + SCOPES.index(ADMIN)]] * len(SCOPES)

    async def run(self, num_requests: int, at_once: int = AT_ONCE) -> None:
        """So many requests, so many of them side by side."""
        numbers = iter(range(num_requests))

        async def some() -> None:
            for _ in numbers:
                await self._send(self._asked() if self._draw.random() < 0.8 else self._used())

        await asyncio.gather(*(some() for _ in range(at_once)))

    # -- making requests -------------------------------------------------------------------------------------

    def _asked(self) -> Ask:
        draw = self._draw
        method, template, scope = draw.choice(self._routes)
        while _ends(method, template) and draw.random() < 0.8:  # else there would be little left to ask for
            method, template, scope = draw.choice(self._routes)
        key, scopes = draw.choice(self._callers)
        path = re.sub(r"\{(\w+)(:path)?\}", lambda found: quote(self._part(found[1]), safe=""), template)
        if template == "/admin/webhooks/{webhook_id}/test":
            path = "/admin/webhooks/hook_nobody/test"  # it would call whatever was made
        query = "&".join(f"{quote(name)}={quote(value)}" for name, value in self._query())
        body = None if method in ("GET", "HEAD") else self._body(template)
        return Ask(method, template, path + (f"?{query}" if query else ""), scope, body, key, scopes)

    def _used(self) -> Ask:
        """What a key may do whose limits are anybody's guess."""
        path = self._draw.choice(PATHS)
        body = (
            {"input": "say hi"} if path == PATHS[0] else {"messages": [{"role": "user", "content": "say hi"}]}
        )
        key = self._draw.choice(self._made or [self._callers[2][0]])  # first the callers' own with all scopes
        return Ask(
            "POST", path, path, "", json.dumps({**body, "stream": self._draw.random() < 0.3}), key, None
        )

    def _part(self, name: str) -> str:
        draw = self._draw
        if name == "kind":
            return draw.choice(("completions", "embeddings", "images", "decisions", "nothing", "\x00"))
        if name == "rate_limit_id":
            return draw.choice(("rl-antiphon-scripted", "rl-x", "rl-", "x"))
        known = [id for ids in self._ids.values() for id in ids[-40:]]
        own = [id for id in known if id.startswith(("key_", "hook_") if "key" in name else "own_")]
        kinds: tuple[Sequence[str], ...] = (
            own or ("local",),
            known or ("local",),
            ("local", "admin"),
            ODD[1:],
        )
        return draw.choice(draw.choices(kinds, (6, 1, 1, 2))[0])

    def _query(self) -> Iterator[tuple[str, str]]:
        draw = self._draw
        for _ in range(draw.choice((0, 0, 1, 2, 4))):
            name = draw.choice(QUERIES)
            odd = draw.random() < 0.4
            values: Sequence[str] = ODD if odd else TAKEN_QUERIES.get(name, (self._part("project_id"),))
            yield name, draw.choice(values)
        if draw.random() < 0.4:
            yield "start_time", draw.choice((str(int(time.time()) - 3600), "0", "1"))

    def _body(self, template: str) -> str | None:
        draw = self._draw
        if draw.random() < 0.03:
            return draw.choice(
                (None, "", "[]", "1", "null", "{", '{"name": NaN}', '{"a": 1, "a": 2}', "\x00")
            )
        own = next((fields for end, fields in OWN_FIELDS.items() if template.endswith(end)), ("name",))
        chosen = draw.choices(own, k=draw.choice((0, 1, 2, 3, 4)))
        chosen += draw.sample(FIELDS, draw.choice((0, 0, 0, 1, 2)))
        return json.dumps({name: self._value(name) for name in chosen})

    def _value(self, name: str) -> Any:
        draw = self._draw
        if name == "limits" and draw.random() < 0.85:
            limits: dict[str, Any] = {}
            for each in draw.sample(LIMIT_NAMES, draw.choice((1, 1, 1, 2, 3))):
                limits[each] = self._limit(each)
            return limits
        if name == "owner" and draw.random() < 0.3:
            return self._part("project_id")
        return draw.choice(TAKEN_FIELDS.get(name, EDGES) if draw.random() < 0.6 else EDGES)

    def _limit(self, name: str) -> Any:
        draw = self._draw
        if name == "models":
            model = draw.choice(("antiphon-scripted", "x", "", "a:b", "\ud83d\ude00"))
            return {model: {draw.choice(LIMIT_NAMES): draw.choice((1, *EDGES))}}
        if name in TAKEN_FIELDS:
            return draw.choice((*TAKEN_FIELDS[name], *EDGES))
        return draw.choice((1, 2, 1000, 1 << 40)) if draw.random() < 0.5 else draw.choice(EDGES)

    # -- looking at replies ----------------------------------------------------------------------------------

    async def _send(self, ask: Ask) -> None:
        headers = {"content-type": "application/json"}
        if ask.key is not None:
            headers["authorization"] = f"Bearer {ask.key}"
        began = time.monotonic()
        try:
            async with (
                asyncio.timeout(12 * self._limit_s),
                self._session.request(
                    ask.method, self._url + ask.path, data=ask.body, headers=headers
                ) as reply,
            ):
                text, status, kind = await reply.text(errors="replace"), reply.status, reply.content_type
                waits = reply.headers.get("retry-after") or reply.headers.get("x-should-retry")
        except (TimeoutError, aiohttp.ClientError, ValueError) as error:
            self._wrong(ask, f"no reply: {error!r}")
            return
        took = time.monotonic() - began
        self.found.replies[status] += 1
        self.found.routes[f"{ask.method} {ask.template}"] += 1
        self.found.slowest_s = max(self.found.slowest_s, took)
        if took > self._limit_s:
            self._wrong(ask, f"a reply after {took:.1f} s")
        if (why := _fault(ask, status, text, waits)) is not None:
            self._wrong(ask, f"{why} [{status} {text[:300]}]")
        elif status == 200 and kind == "application/json" and ask.scope:
            self._note(json.loads(text))

    def _note(self, body: Any) -> None:
        """Remember what was made."""
        if not isinstance(body, dict):
            return
        id = body.get("id")
        if isinstance(id, str):
            ids = self._ids.setdefault(id.partition("_")[0], [])
            if id not in ids[-40:] and not any(scope == body.get("name") for scope in SCOPES):
                ids.append(id)
        value = body.get("value") or body.get("key")
        if isinstance(value, str) and value.startswith("sk-"):
            self._made.append(value)
            del self._made[:-6]

    def _wrong(self, ask: Ask, why: str) -> None:
        self.found.wrong.append(f"{why}: {ask.method} {ask.path} {ask.body} as {ask.scopes}")


def _ends(method: str, template: str) -> bool:
    return method == "DELETE" or template.endswith(("/archive", "/purge"))


def _fault(ask: Ask, status: int, text: str, waits: str | None) -> str | None:
    """What is wrong with a reply; None where it is an answer to whoever may have it, or a refusal that says
    why."""
    if status >= 500:
        return "a failure"
    if status < 300:
        return None if _may(ask) else "it is answered to a key without the scope"
    if status not in (400, 401, 403, 404, 409, 429):
        return "a status that nobody expects"
    try:
        error = json.loads(text)["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert isinstance(error["message"], str) and len(error["message"]) > 5 and error["code"], error
    except (ValueError, KeyError, TypeError, AssertionError):
        return "an error that is not in the official form" if ask.method != "HEAD" else None
    if _TRACE.search(error["message"]):
        return "a refusal that speaks of the server's own failure"
    if status == 400 and error["param"] is None and error["code"] not in WITHOUT_FIELD:
        return "a refusal without its field"
    if status == 429 and not waits:
        return "a refusal that does not say how long"
    return None


def _may(ask: Ask) -> bool:
    """Whether the key has the scope that the route declares."""
    if ask.scope == ADMIN:
        return ask.scopes in (ADMIN, OPERATOR_ONLY)
    if ask.scope == ADMIN_READS:
        return ask.scopes in (ADMIN, OPERATOR_ONLY, "all", "all.read", "usage.read", "all,model:x*")
    if ask.scope == OPERATOR_ONLY:
        return ask.scopes == OPERATOR_ONLY
    return True  # of a key that was made here, nobody knows


async def fuzz(folder: Path, seed: int, num_requests: int, at_once: int, limit_s: float = LIMIT_S) -> Found:
    """So many requests to a server of their own, which works as ever afterwards."""
    async with (
        live_app(folder) as running,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        fuzzer = Fuzzer(running, session, seed, limit_s)
        await fuzzer.begin()
        await fuzzer.run(num_requests, at_once)
        async with session.get(f"{running.base_url}/ready") as reply:
            if reply.status != 200:
                fuzzer.found.wrong.append(f"the server is not ready any more: {await reply.text()}")
        return fuzzer.found


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--at-once", type=int, default=AT_ONCE)
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(fuzz(Path(folder), options.seed, options.requests, options.at_once))
    for each in found.wrong[:40]:
        print(f"WRONG {each[:3000]}")
    print(", ".join(f"{count} of {status}" for status, count in sorted(found.replies.items())))
    print(f"{len(found.routes)} routes; the slowest reply took {found.slowest_s:.2f} s")
    print(f"{len(found.wrong)} were wrong")
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
