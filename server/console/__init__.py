"""The console: the pages in `web/`, which a browser is given as they lie there, and under which headers.

The pages are plain ES modules without a build. They talk to the server by its public API alone, so
that nothing of the server is here but the reading of files.
"""

from __future__ import annotations

from server.console.assets import CONTENT_SECURITY_POLICY, Asset, assets

__all__ = ["CONTENT_SECURITY_POLICY", "Asset", "assets"]
