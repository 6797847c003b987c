"""What third-party clients need to stay on this machine."""

from __future__ import annotations

import os

# LiteLLM fetches a price list from the network when it is imported, unless told not to.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
