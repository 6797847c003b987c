"""Makes one vector of a text's hidden states: pooling, then the maps and norms that come after it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models import Checkpoint
from engine.pooling.recipe import Dense, Recipe
from engine.types import LoadError


class Pooled:
    """The hidden states of one text while they come, in one piece or in several.

    modes: as in `recipe.MODES`; several are joined. skip: tokens at the beginning that do not count, of a
    prompt that is not pooled. raw: what `Finish` is told of it.
    """

    def __init__(self, modes: Sequence[str], skip: int = 0, *, raw: bool = False) -> None:
        self.raw = raw
        self._modes = modes
        self._skip = skip
        self._seen = (
            0  # positions from 0 that were added: a piece may begin with some that were computed twice
        )
        self._num = 0
        self._weight = 0.0
        self._sum: Tensor | None = None
        self._weighted: Tensor | None = None
        self._most: Tensor | None = None
        self._first: Tensor | None = None
        self._last: Tensor | None = None

    def add(self, rows: Tensor, start: int) -> None:
        """Take the states [n, H] of the tokens from position `start` on, f32."""
        fresh = max(self._seen, start)
        self._seen = max(self._seen, start + len(rows))
        rows = rows[fresh - start :]
        if not len(rows):
            return
        self._last = rows[-1]
        counted = max(fresh, self._skip)
        rows = rows[counted - fresh :]
        if not len(rows):
            return
        if self._first is None:
            self._first = rows[0]
        self._num += len(rows)
        if "mean" in self._modes or "mean_sqrt_len_tokens" in self._modes:
            self._sum = _plus(self._sum, rows.sum(dim=0))
        if "weightedmean" in self._modes:
            weights = torch.arange(counted + 1, counted + 1 + len(rows), dtype=rows.dtype, device=rows.device)
            self._weight += float(weights.sum())
            self._weighted = _plus(self._weighted, weights @ rows)
        if "max" in self._modes:
            most = rows.amax(dim=0)
            self._most = most if self._most is None else torch.maximum(self._most, most)

    def result(self) -> Tensor:
        """The vector [H times the number of modes]; NaN where no token counted."""
        assert self._last is not None
        nothing = torch.full_like(self._last, torch.nan)
        parts = []
        for mode in self._modes:
            part = nothing
            if mode == "lasttoken":
                part = self._last
            elif mode == "cls" and self._first is not None:
                part = self._first
            elif mode == "max" and self._most is not None:
                part = self._most
            elif mode == "weightedmean" and self._weighted is not None:
                part = self._weighted / self._weight
            elif self._sum is not None and mode == "mean":
                part = self._sum / self._num
            elif self._sum is not None and mode == "mean_sqrt_len_tokens":
                part = self._sum / self._num**0.5
            parts.append(part)
        return torch.cat(parts)


class Finish:
    """What comes after the pooling, or after the logits of a head: f32 in and out. fingerprint: of the
    weights in it."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        """Raises LoadError where a map's weights are not there."""
        self._steps: list[nn.Module | None] = []  # None: normalize
        self.fingerprint = b""
        for step in recipe.after[: -1 if recipe.normalized else None]:
            if step == "normalize":
                self._steps.append(None)
                continue
            modules, fingerprint = _dense(step, device)
            self._steps += modules
            self.fingerprint += fingerprint
        self._normalized = recipe.normalized
        self._activation = None
        if recipe.kind != "embedding":
            self._activation = (
                nn.Softmax(dim=-1) if recipe.activation == "Softmax" else _named(recipe.activation)
            )
        self._yes_no = recipe.head == "yes_no"

    def __call__(self, rows: Tensor, raw: Sequence[bool]) -> Tensor:
        """rows [N, inputs] -> [N, outputs]. raw: of each row, whether the last norm, or the activation, is
        left out."""
        if self._yes_no:
            rows = rows[:, :1] - rows[:, 1:]
        for step in self._steps:
            rows = F.normalize(rows, dim=-1) if step is None else step(rows)
        last = F.normalize(rows, dim=-1) if self._normalized else rows
        if self._activation is not None:
            last = self._activation(last)
        if not any(raw):
            return last
        return torch.where(torch.tensor(raw, device=rows.device)[:, None], rows, last)


def _dense(step: Dense, device: torch.device) -> tuple[list[nn.Module], bytes]:
    linear = nn.Linear(step.inputs, step.outputs, bias=step.bias, device=device, dtype=torch.float32)
    file = step.folder / "model.safetensors"
    if not file.exists():
        raise LoadError(f"{step.folder} has no model.safetensors")
    weights = Checkpoint(step.folder, [file])
    linear.weight = nn.Parameter(weights.take("linear.weight").to(device, torch.float32))
    if step.bias:
        linear.bias = nn.Parameter(weights.take("linear.bias").to(device, torch.float32))
    return [linear, _named(step.activation)], weights.fingerprint() + step.activation.encode()


def _named(activation: str) -> nn.Module:
    made: nn.Module = getattr(nn, activation)()
    return made


def _plus(total: Tensor | None, more: Tensor) -> Tensor:
    return more if total is None else total + more
