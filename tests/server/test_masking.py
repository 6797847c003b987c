"""What a terminal is not shown of texts that models and other people write."""

from __future__ import annotations

from server.masking import one_line, printable

TEXT = "a\x1b[31mred\x07\n\tb\x7f\x9b2J\r é"


def test_what_would_steer_a_terminal_is_not_printed() -> None:
    assert printable(TEXT) == "a[31mred\n\tb2J é"
    assert one_line(TEXT) == "a[31mred  b2J é"
