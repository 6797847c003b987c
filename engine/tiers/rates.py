"""What it costs to compute a block, and to read it: a block is restored only where reading is cheaper.

Computing the token at position p takes `a + b * p` seconds: products with weights, and attention over what is
before it. Both are fitted from prefill steps as they happen. Reading takes what the latest reads took.
"""

from __future__ import annotations

FADE = 0.98
"""Weight of what prefill steps have taught before one more."""

FADE_READS = 0.8
"""The same for reads, of which there are fewer."""

FIXED_READ_S = 0.001
"""Of any read: a file is opened, its table checked, threads take turns."""

LEAST_TOKENS = 16
"""A step of fewer says little about a token."""

LEAST_BYTES = 1 << 16
"""A read of fewer says little about a byte."""

TRUST = 0.002
"""How much the arithmetic's own ratio of `b` to `a` counts beside what was measured."""


class Rates:
    """Learns of steps on one thread, and of reads on any; any thread may ask."""

    def __init__(self, *, token_s: float, growth: float, bytes_per_s: float) -> None:
        """token_s: seconds of a token at the beginning. growth: how much more a token takes for each before
        it, as a share of that, by arithmetic. bytes_per_s: of reading."""
        self.token_s = token_s
        self.position_s = token_s * growth  # b
        self.bytes_per_s = bytes_per_s
        self._growth = growth
        # sums over steps of n tokens whose positions sum up to p, in t seconds
        self._nn = self._np = self._pp = self._nt = self._pt = 0.0
        self._bytes = self._seconds = 0.0

    def compute_s(self, begin: int, end: int) -> float:
        """Seconds to compute the tokens from position `begin` up to `end`."""
        return (end - begin) * (self.token_s + self.position_s * (begin + end) / 2)

    def read_s(self, num_bytes: int) -> float:
        """Seconds to read so many bytes."""
        return FIXED_READ_S + num_bytes / self.bytes_per_s

    def computed(self, spans: list[tuple[int, int]], seconds: float) -> None:
        """A step computed prompt tokens, from one position to another of each sequence, in so long."""
        tokens = sum(end - begin for begin, end in spans)
        if tokens < LEAST_TOKENS or seconds <= 0:
            return
        positions = sum((end - begin) * (begin + end) / 2 for begin, end in spans)
        # steps err by a share of what they take, and a long one is no surer than two short ones
        scale = tokens**0.5 / seconds
        n, p, t = tokens * scale, positions * scale, seconds * scale
        self._nn = FADE * self._nn + n * n
        self._np = FADE * self._np + n * p
        self._pp = FADE * self._pp + p * p
        self._nt = FADE * self._nt + n * t
        self._pt = FADE * self._pt + p * t
        self._fit()

    def _fit(self) -> None:
        """Least squares of `n a + p b = t`, drawn a little to `b = growth a`, which alone says what steps at
        one position cannot."""
        weight = TRUST * self._pp
        nn, np, pp = self._nn + weight * self._growth**2, self._np - weight * self._growth, self._pp + weight
        determinant = nn * pp - np * np
        if determinant > 1e-9 * nn * pp:
            a = (self._nt * pp - self._pt * np) / determinant
            b = (self._pt * nn - self._nt * np) / determinant
            if a > 0:
                self.token_s, self.position_s = (a, b) if b >= 0 else (self._nt / self._nn, 0.0)
                return
        self.token_s = self._nt / (self._nn + self._growth * self._np)
        self.position_s = self.token_s * self._growth

    def read(self, num_bytes: int, seconds: float, *, anew: bool = False) -> None:
        """So many bytes were read and checked in so long. anew: what reads took before counts no more."""
        if num_bytes < LEAST_BYTES:
            return
        fade = 0.0 if anew else FADE_READS
        whole = fade * self._bytes + num_bytes
        took = fade * self._seconds + max(seconds - FIXED_READ_S, 1e-6)
        self._bytes, self._seconds, self.bytes_per_s = whole, took, whole / took
