"""The values that cross the door, and how numbers are told."""

from __future__ import annotations

import pytest

from engine.types import readable_size


@pytest.mark.parametrize(
    "num_bytes, shown",
    [
        (0, "0 B"),
        (812, "812 B"),
        (1 << 10, "1 KiB"),
        (3_250_000, "3.1 MiB"),
        ((1 << 30) - 1, "1 GiB"),
        (10 << 30, "10 GiB"),
        (5 << 50, "5120 TiB"),
    ],
)
def test_a_size_has_the_unit_that_fits_it(num_bytes: int, shown: str) -> None:
    assert readable_size(num_bytes) == shown
