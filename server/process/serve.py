"""Runs the server process: opens the port, starts the server, handles signals, drains, returns an exit code.

The port opens before the model's libraries are imported. The process handles signals itself, because uvicorn
would end every stream at the first one: the first SIGINT or SIGTERM starts a drain, another one a second or
more later ends the process at once, and SIGHUP reloads what can change while requests are in flight. A timer
in a thread limits how long the process may take to end after a signal or after its engine or storage died,
so that a hung event loop cannot keep a dead server alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import gc
import importlib
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import cast

import orjson
import uvicorn
import uvloop
from fastapi import FastAPI

from engine import Engine, EngineError
from engine import load_late_modules as engine_late_modules
from server import __version__
from server.access import KeyFileError
from server.admin import address_file, leave_address
from server.config import Config, ConfigError
from server.http import BoundedHttp
from server.http.websocket import BoundedWebSocket
from server.masking import masked
from server.process.app import create_app
from server.process.lifecycle import Refused, ServerLifecycle
from server.process.process_ends import ENGINE_DIED, reasons, tune_process
from server.process.seat import REFUSED, HandedConnections, Seat, announce_refusal
from server.process.sockets import Listener, room
from server.process.systemd import ServiceManager
from server.process.tls import CertificateError, Tls
from server.progress import Progress
from server.telemetry import TracingError
from storage import StorageError

log = logging.getLogger("antiphon")

LATE_MODULES = (
    "anyio._backends._asyncio",  # streams
    "cryptography.hazmat.primitives.ciphers.aead",  # sealed reasoning
    "encodings.idna",  # names of other hosts
    "encodings.unicode_escape",  # log lines
    "server.webhooks.sender",  # webhooks
)

ECHO_S = 1.0  # make and shells forward signals, so one Ctrl-C arrives twice
DEATH_NOTICE_S = 1.0  # /health says 503 and readers are cut before the process ends
DEATH_S = 8.0
CLOSING_S = 10.0


def serve(
    config: Config,
    *,
    began: float | None = None,
    engine: Engine | None = None,
    reread: Callable[[], Config] | None = None,
    hung_up: Callable[[], bool] = lambda: False,
    seat: Seat | None = None,
) -> int:
    """Serve until a signal; returns the exit code: 0 drained, 2 refused to start, 70 engine or storage died.

    began: time.monotonic() at the start of the process, for the line that says how long it took. engine: one
    to serve instead of the configured one. reread: the settings as they are now, for SIGHUP; raises
    ConfigError. hung_up: whether SIGHUP came before this process could act on it. seat: this process's place,
    where it is one of several at one port.
    """
    tune_process()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        process = _Process(config, began or time.monotonic(), engine, reread, seat, hung_up)
        return runner.run(process.run())


class _Process:
    def __init__(
        self,
        config: Config,
        began: float,
        engine: Engine | None,
        reread: Callable[[], Config] | None = None,
        seat: Seat | None = None,
        hung_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self._seat = seat
        self._hung_up = hung_up
        # One of several processes is the supervisor's, which speaks for all of them.
        self._manager = ServiceManager.of(os.environ) if seat is None else ServiceManager()
        self._refuse = refuse if seat is None else announce_refusal
        self._config = config
        self._began = began
        self._engine = engine
        self._reread = reread or (lambda: config)
        self._stop = asyncio.Event()
        self._first_signal: float | None = None
        self._ready = False
        self._code = 0
        self._status = ""
        self._tls: Tls | None = None
        self._leave_address: Callable[[Config], None] = lambda _: None

    async def run(self) -> int:
        """The whole story, in order."""
        try:
            self._tls = Tls(self._config) if self._config.ssl_certfile is not None else None
        except CertificateError as exc:
            return self._refuse(str(exc))
        if unreachable := _unreachable(self._config):
            return self._refuse(unreachable)
        sock: socket.socket | HandedConnections
        try:
            sock = bind(self._config.host, self._config.port) if self._seat is None else self._seat.handed
        except OSError as exc:
            return self._refuse(cannot_listen(self._config, exc))
        try:
            life = ServerLifecycle(self._config, engine=self._engine, seat=self._seat)
        except TracingError as exc:
            sock.close()
            return self._refuse(str(exc))
        server = web_server(create_app(life), self._config, self._tls)
        life.num_connections = lambda: len(server.server_state.connections)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._signalled, number)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload, life)
        if self._hung_up():  # the settings may have been read before it came
            self._reload(life)
        serving = asyncio.create_task(server.serve(sockets=[cast(socket.socket, sock)]), name="http")
        starting = asyncio.create_task(self._start(life, sock), name="start")
        stopped = asyncio.create_task(self._stop.wait(), name="stop")
        died = asyncio.create_task(life.died.wait(), name="death")
        alive = asyncio.create_task(self._manager.alive(), name="alive")
        try:
            await asyncio.wait((starting, stopped, died), return_when=asyncio.FIRST_COMPLETED)
            if starting.done() and starting.exception() is None:
                await asyncio.wait((stopped, died), return_when=asyncio.FIRST_COMPLETED)
            await self._end(life, server, starting)
            await serving
            await life.close()
            if self._code == 0:
                log.info("stopped")
        finally:
            if self._ready and self._seat is None:
                address_file(self._config).unlink(missing_ok=True)
            for task in (starting, stopped, died, serving, alive):
                task.cancel()
            await asyncio.gather(starting, stopped, died, serving, alive, return_exceptions=True)
        return self._code

    async def _start(self, life: ServerLifecycle, sock: socket.socket | HandedConnections) -> None:
        waiting = asyncio.create_task(self._manager.while_starting(_starting(self._config)))
        try:
            with Progress(_starting(self._config), say=log.info):
                await life.start(key_required=not self._config.loopback)
        finally:
            waiting.cancel()
        self._ready = True
        # What was imported stays for good; unfrozen, the collector would walk all of it again and again
        # while every stream waits (110 ms a time with torch).
        gc.freeze()
        keyed = await life.keys.needed()
        if isinstance(sock, HandedConnections):
            assert self._seat is not None
            url, say = self._seat.url, self._seat.announce
        else:
            url, say = base_url(sock, tls=self._tls is not None), print_banner
            self._leave_address = functools.partial(leave_address, url=url, token=life.admin_token)
            self._leave_address(self._config)
        if self._seat is None or self._seat.is_first:
            self._warn(keyed=keyed)
        say(_banner(life, url, time.monotonic() - self._began, keyed=keyed))
        self._status = f"listens on {url}"
        self._manager.ready(self._status)
        await asyncio.to_thread(load_late_modules)
        gc.freeze()
        await life.prepare()

    def _warn(self, *, keyed: bool) -> None:
        """Of what is allowed and seldom meant."""
        config = self._config
        if not config.loopback and self._tls is None and not config.require_tls:
            log.warning(
                "keys and texts travel in the clear to %s: give --ssl-certfile, or put a proxy with TLS in "
                "front and give --require-tls and --trusted-proxy",
                config.host,
            )
        if config.led_to is not None and not keyed:
            log.warning(
                "%s leads others to this server, and whoever comes may use it, because there is no key: "
                "antiphon keys create%s",
                config.led_to,
                config.flags,
            )
        if "*" in config.cors_origin and not keyed:
            log.warning(
                "every web page that a browser on this machine shows may use this server: cors_origin is *"
            )

    async def _end(self, life: ServerLifecycle, server: uvicorn.Server, starting: asyncio.Task[None]) -> None:
        """Bring `server` to its end: after a refusal and a death at once, after a signal with a drain."""
        failure = starting.exception() if starting.done() and not starting.cancelled() else None
        self._manager.stopping("ending" if failure is None else "refused to start")
        if life.died.is_set():
            self._code = ENGINE_DIED
            _backstop(DEATH_S, ENGINE_DIED)
            await asyncio.sleep(DEATH_NOTICE_S)
        elif failure is not None:
            self._code = self._refuse(*reasons(failure, EngineError, StorageError, Refused))
        else:
            grace = self._config.drain_grace_s
            _backstop(grace + CLOSING_S, 1)
            log.info("draining: work in flight has %g s to end", grace)
            if not starting.done():
                starting.cancel()
            await life.drain(grace)
        server.should_exit = True

    def _reload(self, life: ServerLifecycle) -> None:
        """Take over what may change while the server runs, and have the service manager know."""
        if not self._ready:
            self._take_over(life)
            return
        self._manager.reloading()
        self._take_over(life)
        self._manager.ready(self._status)

    def _take_over(self, life: ServerLifecycle) -> None:
        """Take over what may change while the server runs; nothing in flight is touched.

        What was wrong is logged, and everything stays as it was.
        """
        try:
            new = self._reread()
        except ConfigError as error:
            log.error("SIGHUP: nothing was reloaded: %s", error)
            return
        failed: list[str] = []
        done = [
            *self._reload_certificates(new, failed),
            *self._reload_log_level(new),
            *(
                given := [
                    *self._reload_keys(new, life, failed),
                    *self._reload_sealing_keys(new, life, failed),
                    *self._reload_limits(new, life),
                ]
            ),
        ]
        if given:
            life.settings_changed()
        taken = {"log_level", "api_key", "sealing_key", "sealing_key_file"}
        waiting = [
            name
            for name in Config.model_fields
            if name not in taken and getattr(new, name) != getattr(self._config, name)
        ]
        if waiting:
            done.append(f"a restart is needed for {', '.join(waiting)}")
        for fault in failed:
            log.error("SIGHUP: %s", fault)
        if done or not failed:
            log.log(
                logging.WARNING if done else logging.INFO,
                "SIGHUP: %s",
                "; ".join(done) or "nothing has changed",
            )

    def _reload_certificates(self, new: Config, failed: list[str]) -> Iterator[str]:
        if self._tls is None or new.ssl_certfile is None:  # from TLS to none and back is a restart
            return
        try:
            self._tls.reload(new)
        except CertificateError as error:
            failed.append(f"the certificates stay as they were: {error}")
            return
        yield "the certificates were read again, for new connections"
        files = {name: getattr(new, name) for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")}
        self._config = self._config.model_copy(update=files)
        self._leave_address(self._config)

    def _reload_log_level(self, new: Config) -> Iterator[str]:
        if new.log_level != self._config.log_level:
            log.setLevel(new.log_level.upper())
            yield f"log_level is now {new.log_level}"
            self._config = self._config.model_copy(update={"log_level": new.log_level})

    def _reload_keys(self, new: Config, life: ServerLifecycle, failed: list[str]) -> Iterator[str]:
        before, after = set(self._config.secrets()), set(new.secrets())
        if before != after:
            life.keys.give(new.secrets())
            yield f"api_key: {len(after - before)} added, {len(before - after)} removed"
            self._config = self._config.model_copy(update={"api_key": new.api_key})
        try:
            if life.keys.reload():
                yield "the file of keys was read again"
        except KeyFileError as error:
            failed.append(f"the keys stay as they were: {error}")

    def _reload_sealing_keys(self, new: Config, life: ServerLifecycle, failed: list[str]) -> Iterator[str]:
        try:
            given = new.sealing_keys()
        except ValueError as error:
            failed.append(f"the sealing keys stay as they were: {error}")
            return
        if life.give_sealing_keys(given):
            seal = "the first of which seals" if given else "so that those of the database seal"
            yield f"sealing keys of the settings: {len(given)}, {seal}"

    def _reload_limits(self, new: Config, life: ServerLifecycle) -> Iterator[str]:
        if new.owner_limit != self._config.owner_limit:
            life.limit_owners(new.owner_limit)
            yield f"owner_limit is now {', '.join(new.owner_limit) or 'empty'}"
            self._config = self._config.model_copy(update={"owner_limit": new.owner_limit})

    def _signalled(self, number: int) -> None:
        now = time.monotonic()
        if self._first_signal is None:
            self._first_signal = now
            self._stop.set()
        elif now - self._first_signal >= ECHO_S:
            log.warning("a second signal: ending now")
            _backstop(0.0, 128 + number)


def _backstop(seconds: float, code: int) -> None:
    """End the process in `seconds`, whatever hangs; a thread, because the loop may be what hangs."""
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()


def load_late_modules() -> None:
    """Import what a request would be the first to need: by then there may be no descriptor to read it by."""
    for name in LATE_MODULES:
        importlib.import_module(name)
    engine_late_modules()


def _starting(config: Config) -> str:
    """What a server does until it is ready."""
    return "starting" if config.engine == "scripted" else f"loading {config.model}"


def _unreachable(config: Config) -> str | None:
    """Why nobody could ever ask this server anything, if so."""
    if not config.require_tls or config.loopback or config.ssl_certfile or config.trusted_proxy:
        return None
    return (
        "require_tls: no request could be taken. Give --ssl-certfile, or --trusted-proxy with the address of "
        "the proxy that ends TLS and says so by X-Forwarded-Proto."
    )


def cannot_listen(config: Config, error: OSError) -> str:
    """Why the port cannot be had."""
    if error.errno == errno.EADDRINUSE:
        why = "another program listens there. Give another --port; 0 takes a free one."
    else:
        why = error.strerror or str(error)
    return f"cannot listen on {config.host} port {config.port}: {why}"


def refuse(*reasons: str) -> int:
    """Print why the server does not start; returns the exit code that says so."""
    for reason in reasons:
        print(f"antiphon: {reason}", file=sys.stderr)
    return REFUSED


# ------------------------------------------------------------------------------------------------------------
# HTTP


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: it ends every stream at the first signal, and the process
    drains."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield

    def __init__(self, options: uvicorn.Config, config: Config, tls: Tls | None) -> None:
        super().__init__(options)
        self._limits = config
        self._tls = tls

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on sockets that are bound, by a listener of our own."""
        config = self._limits
        # A request to an upstream server takes a descriptor more.
        most = room(each=2 if config.engine == "upstream" else 1)
        if config.max_connections is not None:  # of all processes at the port, which share them evenly
            most = math.ceil(config.max_connections / config.api_server_count)
        protocol = functools.partial(
            BoundedHttp,
            config=self.config,
            server_state=self.server_state,
            app_state={},
            head_timeout_s=config.head_timeout_s,
            send_timeout_s=config.send_timeout_s,
        )
        connections = self.server_state.connections
        self.servers = [
            Listener(  # type: ignore[misc]
                sock,
                protocol,
                num_open=lambda: len(connections),
                max_open=most,
                tls=self._tls,
                handshake_timeout_s=config.head_timeout_s,
            )
            for sock in sockets or ()
        ]
        self.started = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: close the connections whose deadlines have passed."""
        now = asyncio.get_running_loop().time()
        for connection in [each for each in self.server_state.connections if each.is_overdue(now)]:  # type: ignore[union-attr]
            connection.expire()  # type: ignore[union-attr]
        for listener in self.servers:
            listener.report()  # type: ignore[attr-defined]
        return await super().on_tick(counter)


def web_server(app: FastAPI, config: Config, tls: Tls | None = None) -> uvicorn.Server:
    """An application's HTTP server, not yet serving; its `serve(sockets=[...])` ends on `should_exit`.

    tls: what it speaks, instead of plain HTTP.
    """
    options = uvicorn.Config(
        app,
        http=BoundedHttp,
        h11_max_incomplete_event_size=config.max_header_bytes,
        ws=functools.partial(  # type: ignore[arg-type]  # uvicorn calls it as it calls a class
            BoundedWebSocket,
            arrivals=app.state.life.arrivals,
            body_timeout_s=config.body_timeout_s,
            send_timeout_s=config.send_timeout_s,
        ),
        ws_max_size=config.max_body_bytes,
        ws_ping_interval=config.keepalive_s,
        ws_ping_timeout=2 * config.send_timeout_s,  # a client that is busy answers late
        ws_per_message_deflate=False,  # a few bytes less for a token, and a buffer for each socket
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # the application has its own place for them (server.process.app)
        timeout_keep_alive=config.idle_timeout_s,  # type: ignore[arg-type]  # seconds, also parts of one
        timeout_graceful_shutdown=1,  # the drain is over by then; what is left is cut
    )
    return _Server(options, config, tls)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket on the first address that `host` resolves to; OSError when it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except UnicodeError:  # of a name such as 127..0.0.1, one label of which is empty
        raise OSError(errno.EINVAL, "it is no name of a host") from None
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(2048)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def base_url(sock: socket.socket, *, tls: bool = False) -> str:
    """How a listening socket is reached."""
    host, port = sock.getsockname()[:2]
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def print_banner(banner: str) -> None:
    """Print what a server says of itself."""
    print(banner, flush=True)


def _banner(life: ServerLifecycle, url: str, seconds: float, *, keyed: bool) -> str:
    """What a server says of itself, once it is ready."""
    assert life.context is not None
    model = life.context.models.first
    body = orjson.dumps({"model": model.name, "input": "Hello!"}).decode()
    key = " -H 'authorization: Bearer YOUR_KEY'" if keyed else ""
    others = [entry.id for entry in life.config.entries if entry.id != model.name]
    besides = f", besides {', '.join(others)}" if others else ""
    return (
        f"Antiphon {__version__} listens on {url} and serves {model.name} "
        f"({model.info.max_model_len} tokens, dialect {model.info.dialect}){besides}, "
        f"ready after {seconds:.1f} s.\n"
        f"Try: curl {url}/v1/responses{key} -H 'content-type: application/json' -d '{body}'"
        + f"\nChat: antiphon chat --url {url}"
        + (f"\nConsole: {url}/" if life.config.console else "")
        + f"\nData: {life.config.data}"
        + ("" if life.config.keeps_database else f"\nDatabase: {masked(life.config.db)}")
    )
