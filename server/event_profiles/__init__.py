"""How one reader is shown the events of a response: under which names, and padded or not.

The log holds official events. What a reader is shown instead is made of them alone, behind the feed, so a
stream can be read again, and on from any event, in each profile.
"""

from __future__ import annotations

from server.event_profiles.obfuscation import padded
from server.event_profiles.older import older_response
from server.event_profiles.view import PING_S, PROFILES, Profile, View

__all__ = ["PING_S", "PROFILES", "Profile", "View", "older_response", "padded"]
