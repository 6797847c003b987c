"""Where images are in prompts: their features, and the positions of all tokens."""

from __future__ import annotations

import numpy as np

from engine.types import MediaSpan, Picture
from engine.vision.prompt_images import PromptImages


def span(offset: int, places: tuple[int, ...], length: int, grid: tuple[int, int] | None) -> MediaSpan:
    return MediaSpan(offset, length, bytes([offset]), Picture(b"", b""), places, grid)


def test_positions_count_rows_and_columns_from_where_an_image_begins() -> None:
    # Two tokens of text, an image of 2 x 3, one of text, an image of 1 x 2, two of text.
    spans = (span(2, tuple(range(6)), 6, (2, 3)), span(9, (0, 1), 2, (1, 2)))
    images = PromptImages.of(spans, 13)
    assert images.positions is not None
    assert images.positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 8, 9],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 6, 8, 9],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 9],
    ]
    assert images.positions_of(np.array([12, 13, 14])).tolist() == [[9, 10, 11]] * 3


def test_a_chunk_shows_its_part_of_each_image() -> None:
    # Features stand between tokens of the image that have none.
    spans = (span(1, (1, 2, 4), 6, None), span(8, (0, 1), 2, None))
    images = PromptImages.of(spans, 10)
    assert images.positions is None
    assert images.positions_of(np.array([3, 4])).tolist() == [[3, 4]] * 3
    (first,) = images.shown(0, 4, row=10)
    assert (first.rows.tolist(), first.features.tolist()) == ([12, 13], [0, 1])
    rest, second = images.shown(4, 10, row=0)
    assert (rest.rows.tolist(), rest.features.tolist()) == ([1], [2])
    assert (second.span, second.rows.tolist(), second.features.tolist()) == (spans[1], [4, 5], [0, 1])
    assert images.shown(0, 2, row=0) == []
