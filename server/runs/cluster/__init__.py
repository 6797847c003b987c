"""Runs of several processes on one database: who beats, who is dead, what nobody owns yet."""

from __future__ import annotations

from server.runs.cluster.follower import Follower
from server.runs.cluster.leases import Fleet
from server.runs.cluster.presence import Presence
from server.runs.cluster.queue import Queue

__all__ = ["Fleet", "Follower", "Presence", "Queue"]
