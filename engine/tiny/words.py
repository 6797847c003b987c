"""Word lists, and words that exist nowhere: the raw material of the curriculum.

Every open-class word (names, cities, made-up words) belongs to training or to the held-out split by a hash of
its lower-case letters, so the two can never meet; `Words` draws from one of them.
"""

from __future__ import annotations

import random
import zlib
from typing import Literal

from engine.tiny.phrases import listed

Split = Literal["train", "heldout"]

COMMON = listed("words", "common")
_NAMES = listed("words", "names")
_CITIES = listed("words", "cities")
_REGIONS = listed("words", "regions")
_ONSETS = listed("words", "onsets")
_VOWELS = listed("words", "vowels")
# About half of all syllables are open.
_CODAS = [*listed("words", "codas"), *[""] * 24]
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def split_of(word: str) -> Split:
    """The split an open-class word belongs to, whatever its case."""
    return "heldout" if zlib.crc32(word.lower().encode()) % 8 == 0 else "train"


class Words:
    """A seeded source of words of one split."""

    def __init__(self, rng: random.Random, split: Split) -> None:
        self.rng = rng
        self.split: Split = split
        # Famous cities stay in training: what everyone asks about must work. Held-out cities are invented.
        self._names = [name for name in _NAMES if split_of(name) == split]

    def _invent(self, low: int, high: int) -> str:
        rng = self.rng
        while True:
            word = ""
            for _ in range(rng.randint(low, high)):
                coda = rng.choice(_CODAS)
                word += rng.choice(_ONSETS) + rng.choice(_VOWELS) + coda
            if len(word) >= 3 and split_of(word) == self.split:
                return word

    def made_up(self) -> str:
        """A pronounceable word that no dictionary has."""
        return self._invent(1, self.rng.choice((1, 2, 2, 3)))

    def glued(self) -> str:
        """A name made of parts of common words, so that its tokens are those which other words have, too."""
        rng = self.rng
        while True:
            word = ""
            for _ in range(rng.choice((1, 2, 2, 3))):
                source = rng.choice(COMMON)
                length = rng.randint(2, 5)
                start = rng.randint(0, max(0, len(source) - length))
                word += source[start : start + length]
            if len(word) >= 3 and split_of(word) == self.split:
                return word.capitalize()

    def scramble(self) -> str:
        """A short string of random letters or letters and digits."""
        rng = self.rng
        alphabet = rng.choice(
            (_LETTERS, _LETTERS.upper(), _LETTERS + "0123456789", "ABCDEFGHJKLMNPQRSTUVWXYZ0123456789")
        )
        while True:
            text = "".join(rng.choice(alphabet) for _ in range(rng.randint(3, 8)))
            if split_of(text) == self.split:
                return text

    def common(self) -> str:
        return self.rng.choice(COMMON)

    def name(self) -> str:
        """A first name, real or invented, now and then with a family name."""
        rng = self.rng
        first = rng.choice(self._names) if rng.random() < 0.4 else self._invent(1, 3).capitalize()
        return f"{first} {self._invent(1, 2).capitalize()}" if rng.random() < 0.07 else first

    def city(self) -> str:
        rng = self.rng
        if self.split == "train" and rng.random() < 0.55:
            city = rng.choice(_CITIES)
        else:
            city = self._invent(1, 3).capitalize()
            if rng.random() < 0.25:
                first = rng.choice(("San", "New", "Port", "Saint", "Los", "El", "North", "Lake", "Fort"))
                city = f"{first} {city}"
        return f"{city}, {rng.choice(_REGIONS)}" if rng.random() < 0.1 else city

    def number(self, digits: int = 4) -> int:
        return self.rng.randrange(10 ** self.rng.randint(1, digits))

    def any(self) -> str:
        """One word of any kind, cased in any of the usual ways."""
        rng = self.rng
        roll = rng.random()
        if roll < (0.4 if self.split == "train" else 0.15):
            word = self.common()
        elif roll < 0.85:
            word = self.made_up()
        elif roll < 0.95:
            return self.scramble()
        else:
            return str(self.number(5))
        case = rng.random()
        return word if case < 0.75 else word.capitalize() if case < 0.93 else word.upper()

    def phrase(self, low: int, high: int) -> str:
        return " ".join(self.any() for _ in range(self.rng.randint(low, high)))

    def sentence(self, low: int = 3, high: int = 12) -> str:
        """Words with sentence punctuation, for filler and for exact copying."""
        rng = self.rng
        words = [self.any() for _ in range(rng.randint(low, high))]
        if len(words) > 3 and rng.random() < 0.4:
            words[rng.randrange(len(words) - 1)] += rng.choice((",", ",", ";", ":"))
        text = " ".join(words)
        return text[0].upper() + text[1:] + rng.choice((".", ".", ".", "!", "?"))

    def filler(self, sentences: int) -> str:
        """Long text that has nothing to do with anything."""
        rng = self.rng
        lines = []
        for _ in range(sentences):
            roll = rng.random()
            text = (
                " ".join(
                    self.common() if rng.random() < 0.8 else self.any() for _ in range(rng.randint(4, 14))
                )
                + "."
            )
            if roll < 0.15:
                text = "- " + text
            elif roll < 0.2:
                text = "## " + self.phrase(1, 4)
            elif roll < 0.25:
                text = f"{self.made_up()} = {self.made_up()}({self.number()})"
            lines.append(text + rng.choice((" ", " ", "\n", "\n\n")))
        return "".join(lines).strip()
