"""Fixtures: tiny random checkpoints, made once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from a name of `checkpoints.CHECKPOINTS` to the folder of that checkpoint."""
    made: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in made:
            made[name] = make_checkpoint(name, tmp_path_factory.mktemp(name))
        return made[name]

    return find
