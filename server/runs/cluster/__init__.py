"""Shares runs among the processes on one database: the queue, and the takeover of dead processes' runs."""

from __future__ import annotations

from server.runs.cluster.follower import Follower
from server.runs.cluster.leases import Fleet
from server.runs.cluster.presence import Presence
from server.runs.cluster.queue import Queue

__all__ = ["Fleet", "Follower", "Presence", "Queue"]
