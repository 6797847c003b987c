"""A model that has a vector for each token and computes nothing else: sentence-transformers' StaticEmbedding,
which is also how model2vec writes its models for it.

It stands in the place of a model of transformers, whose states of the tokens are pooled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from engine.models import Checkpoint
from engine.types import LoadError


@dataclass(frozen=True, slots=True)
class _States:
    last_hidden_state: Tensor


class StaticEmbedding(nn.Module):
    """The table of a folder, [tokens, dimensions], in float32."""

    table: Tensor

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Raises LoadError where the folder has no table, or more than is understood."""
        super().__init__()
        table = _read_table(checkpoint)
        if more := checkpoint.unread():
            raise LoadError(f"{checkpoint.folder} has a tensor {more[0]!r} beside its table, not served")
        self.vocab_size, self.hidden_size = table.shape
        self.register_buffer("table", table)

    def forward(self, input_ids: Tensor, **_: Any) -> _States:
        """input_ids [texts, tokens] -> states [texts, tokens, dimensions]."""
        return _States(F.embedding(input_ids, self.table))


def _read_table(checkpoint: Checkpoint) -> Tensor:
    if "embedding.weight" in checkpoint:
        return checkpoint.take("embedding.weight").float()
    # As model2vec writes it: tokens may share a row, and have it with a weight of their own.
    table = checkpoint.take("embeddings").float()
    if "mapping" in checkpoint:
        table = table[checkpoint.take("mapping").long()]
    if "weights" in checkpoint:
        table = table * checkpoint.take("weights").float()[:, None]
    return table
