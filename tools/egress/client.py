"""Makes HTTP clients that reach what an Egress allows, and nothing else."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import TYPE_CHECKING

from tools.egress.policy import Caps, Egress
from tools.egress.resolver import Resolver, resolve

if TYPE_CHECKING:
    from tools.egress.transport import GuardedClient

_PAGE = Caps()


def guarded_client(
    egress: Egress,
    caps: Caps = _PAGE,
    *,
    headers: Mapping[str, str] | None = None,
    follow_redirects: bool = False,
    ssl_context: ssl.SSLContext | None = None,
    resolver: Resolver = resolve,
) -> GuardedClient:
    """An `httpx2.AsyncClient` under an Egress and Caps, which its caller closes.

    All that goes wrong in sending and reading is an EgressError. The client keeps no cookies and reads
    nothing from the environment: no proxy, no certificates, no `.netrc`. Each redirect is judged like a first
    request. Where redirects are followed, `headers` other than `authorization` go along to other hosts: put
    no secret into them. ssl_context: by default the certificates that the system trusts. resolver: from a
    name to its addresses.
    """
    from tools.egress.transport import MAX_REDIRECTS, GuardedClient, GuardedTransport  # httpx2 loads slowly

    return GuardedClient(
        transport=GuardedTransport(egress, caps, ssl_context=ssl_context, resolver=resolver),
        headers=headers,
        cookies=CookieJar(policy=DefaultCookiePolicy(allowed_domains=[])),
        follow_redirects=follow_redirects,
        max_redirects=MAX_REDIRECTS,
        timeout=None,  # the caps are the limits
        trust_env=False,
    )


def prepare_egress() -> None:
    """Load what the first client would otherwise load on the event loop, for 0.25 s (measured)."""
    from tools.egress.transport import system_certificates

    system_certificates()
