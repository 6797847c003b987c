"""A browser for tests: where it is, and what skips a module where there is none."""

from __future__ import annotations

import os
import shutil

import pytest

NAMES = (
    "chromium-headless-shell",  # draws no window of its own, which takes the others processor time
    "chromium",
    "chromium-browser",
    "google-chrome-stable",
    "google-chrome",
    "chrome",
)
CHROMIUM = os.environ.get("TEST_WITH_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)

MARKS = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None,
        reason="no Chromium found: install the package chromium, or set TEST_WITH_CHROMIUM to its path",
    ),
]
