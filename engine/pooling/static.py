"""Computes texts by a table that has a vector for each token.

This is sentence-transformers' StaticEmbedding, as which model2vec writes its models, too.

A text's vector is the mean of its tokens' vectors. Texts of all lengths go into a step together.
"""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models import Checkpoint
from engine.pooling.encoder import EncoderWorker
from engine.pooling.values import PoolingConfig
from engine.pooling.work import Item
from engine.types import LoadError

STEP = 1 << 16
"""Tokens of a step: there is little to compute, and each step has others wait for the interpreter's lock."""


class StaticEmbedding(nn.Module):
    """The table of a folder, [tokens, dimensions], in float32."""

    table: Tensor

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Raises LoadError where the folder has no table, or more than is understood."""
        super().__init__()
        table = _read_table(checkpoint)
        if more := checkpoint.unread():
            raise LoadError(f"{checkpoint.folder} has a tensor {more[0]!r} beside its table, not served")
        self.register_buffer("table", table)

    def forward(self, ids: Tensor, starts: Tensor) -> Tensor:
        """ids [tokens] of all texts, one after the other, and where each begins, [texts] -> means [texts,
        dimensions]."""
        return F.embedding_bag(ids, self.table, starts, mode="mean")


class TableWorker(EncoderWorker):
    """See `work.Worker`."""

    def _load(self, config: PoolingConfig, checkpoint: Checkpoint) -> tuple[nn.Module, int, int, None]:
        model = StaticEmbedding(checkpoint).to(self._device)
        return model, *model.table.shape, None

    def _most_tokens(self, config: PoolingConfig) -> int:
        return STEP

    def _threads(self, config: PoolingConfig) -> int:
        return 1

    def _next_batch(self) -> list[Item]:
        """The texts of the owner whose turn it is, and then those of others."""
        turn = self._queues[self._share.least(self._queues)]
        batch: list[Item] = []
        tokens = 0
        for item in chain(turn.values(), *(own.values() for own in self._queues.values() if own is not turn)):
            tokens += len(item.text.ids)
            if batch and tokens > self._size.tokens:
                break
            batch.append(item)
        return batch

    def _rows(self, batch: list[Item]) -> Tensor:
        lengths = [len(item.text.ids) for item in batch]
        ids = np.concatenate([item.text.ids for item in batch]).astype(np.int64)
        rows: Tensor = self._model(self._move(ids), self._move(np.cumsum([0, *lengths[:-1]])))
        return rows


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
