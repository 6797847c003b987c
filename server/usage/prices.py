"""What usage costs, by the prices of the configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal

from server.config import Config, read_price
from storage import Counts

LINES = ("input_tokens", "cached_input_tokens", "output_tokens")
"""What is paid for, each at its own price; input that was cached is not paid for as input once more."""

MILLION = 1_000_000


class Prices:
    """The price table: by model, the price of a million tokens of each line, in one currency."""

    def __init__(self, config: Config) -> None:
        self.currency = config.currency
        self._of: dict[str, Sequence[Decimal]] = {
            model: amounts for model, *amounts in map(read_price, config.price)
        }

    def __bool__(self) -> bool:
        return bool(self._of)

    def lines(self, model: str, counts: Counts) -> Mapping[str, tuple[int, Decimal]]:
        """How many tokens of each line were used, and what they cost; empty for a model without a price."""
        prices = self._of.get(model, self._of.get("*"))
        if prices is None:
            return {}
        tokens = (counts.input_tokens - counts.cached_tokens, counts.cached_tokens, counts.output_tokens)
        return {
            line: (num, num * price / MILLION) for line, num, price in zip(LINES, tokens, prices, strict=True)
        }

    def cost(self, model: str, counts: Counts) -> Decimal:
        """What a model's usage costs; 0 for one without a price."""
        return sum((cost for _, cost in self.lines(model, counts).values()), Decimal(0))
