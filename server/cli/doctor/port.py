"""Where the server would listen, and whether it may without keys."""

from __future__ import annotations

import httpx

from server.access import KeyFileError, read_key_file
from server.cli.doctor.database import readable_state
from server.cli.doctor.findings import Finding
from server.cli.doctor.owners import is_keyed
from server.cli.doctor.running import left_address, running_server, said_at_port
from server.config import Config


async def check_port(config: Config) -> Finding:
    from server.process import CertificateError, Tls, bind, cannot_listen

    try:
        if config.ssl_certfile is not None:
            Tls(config)
    except CertificateError as exc:
        return "FAIL", str(exc)
    try:
        bind(config.host, config.port).close()
    except OSError as exc:
        running = await running_server(config)
        if running is not None and httpx.URL(running.url).port == config.port:
            return "ok", f"the server of this database listens on {running.url}"
        code, says = await said_at_port(config)
        if code == "not_ready" and await _may_be_ours(config):
            return "note", f"a server that is starting listens on port {config.port}"
        if code in ("storage_unavailable", "engine_unavailable"):
            if (at := left_address(config)).endswith(f":{config.port}"):
                return "note", f"the server that cannot do its work runs{at}"
            return "FAIL", f"a server that cannot do its work listens on port {config.port}, and says: {says}"
        return "FAIL", cannot_listen(config, exc)
    doubts = None
    if config.api_key_file is not None:
        try:
            doubts = read_key_file(config.api_key_file).doubts(config.api_key_file)
        except KeyFileError as exc:
            return "FAIL", str(exc)
    free = f"{config.host}:{config.port} is free"
    if doubts is not None:
        return "note", f"{free}; {doubts}"
    if config.loopback and config.led_to is None:
        return "ok", free
    keyed = await is_keyed(config)
    if keyed:
        return "ok", free
    if keyed is None:
        return "note", f"{free}; whether the database has a key, as an address like this needs, is not known"
    if not config.loopback:
        return "FAIL", f"{free}, but an address like this needs keys: antiphon keys create{config.flags}"
    return "note", (
        f"{free}; {config.led_to} leads others to this server, and whoever comes may use it, because there "
        f"is no key: antiphon keys create{config.flags}"
    )


async def _may_be_ours(config: Config) -> bool:
    """Whether a server that is starting may be that of the database."""
    state = await readable_state(config)
    return state is not None and (state.holder is not None or state.shared)
