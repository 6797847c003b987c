"""What outlives a request, as routes and middlewares reach it.

Owns the bundle of long-lived objects, and what may be asked of the process that serves.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from server.access import Accesses, HeldOpen, Keys
    from server.config import Config
    from server.containers import Cells
    from server.encrypted_reasoning import Sealing
    from server.errors import ApiError
    from server.http.arrivals import Arrivals
    from server.http.websocket import OpenSockets
    from server.limits import Limiter
    from server.model_registry import Models
    from server.quota import Quota
    from server.runs import Runs
    from server.stateless import LiveCompletions
    from server.telemetry import Telemetry
    from server.usage import Meter
    from server.vector_stores import Library
    from storage import Storage

Phase = Literal["starting", "ready", "draining", "dead"]


@dataclass(frozen=True, slots=True)
class Context:
    """Everything that outlives a request. It exists once storage is open and the engine has started."""

    config: Config
    storage: Storage
    models: Models
    sealing: Sealing
    runs: Runs
    telemetry: Telemetry
    quota: Quota
    meter: Meter
    limiter: Limiter
    completions: LiveCompletions
    library: Library
    cells: Cells | None  # None: nothing runs code
    several: SeveralModels


class SeveralModels(Protocol):
    """The models of the file, as operators may ask of them; `server.model_registry` has them."""

    def described(self) -> list[dict[str, Any]]:
        """Every model: its state, what it takes, who waits for it."""

    def id_of(self, name: str) -> str:
        """The id of a model that can be loaded and unloaded. ApiError 404, and 400 for one that cannot."""

    async def load(self, id: str) -> None:
        """Load it. ApiError 503, LoadError."""

    async def unload(self, id: str) -> None:
        """Unload it. ApiError 409 while it is used."""


class ServerState(Protocol):
    """The process that serves, as far as a request may ask it; `server.process` has it."""

    config: Config
    telemetry: Telemetry
    arrivals: Arrivals
    num_streams: int  # open event streams
    sockets: OpenSockets
    keys: Keys
    held_open: HeldOpen
    accesses: Accesses
    admin_token: str
    phase: Phase
    sandbox: str | None  # what runs code, or why nothing does, in words; None: not known yet
    context: Context | None  # None: the server cannot serve yet, or no longer

    num_connections: Callable[[], int]  # open connections of clients

    def admit(self, method: str, path: str) -> None:
        """ApiError 503 for what this phase no longer, or not yet, takes."""

    def refusal(self) -> ApiError:
        """Why the server does not serve in its present phase."""

    async def probe(self) -> None:
        """Have the model generate; ApiError 503 where it does not."""

    async def metrics(self) -> bytes:
        """The page of metrics."""

    def batches_stirred(self) -> None:
        """There is a batch to be carried on, or one to be ended."""

    def at_work(self, method: str) -> AbstractContextManager[None]:
        """Held around each request, so that a drain knows when new work has gone quiet."""
