"""LoRA adapters: low-rank products added to a model's linear maps, of several adapters in one step.

The matrices of all adapters of a map are stacked: one product by all of them, of which a token keeps its own
adapter's part, costs few calls however adapters are mixed. So tokens whose adapters are neighbours in the
stack share one product; a long run of tokens of one adapter, a prompt for instance, has one of its own, and
tokens without an adapter have none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.linear import Linear
from engine.models.peft import LowRank
from engine.step import Ints

LONG = 64  # tokens of one adapter, next to each other, that are worth products of their own


@dataclass(frozen=True, slots=True)
class Place:
    """Where a checkpoint's linear map is in the model's own: outputs `first..first + outputs` of `map`."""

    map: str
    inputs: int
    outputs: int
    first: int = 0


@dataclass(frozen=True, slots=True)
class Share:
    """Tokens of a step, next to each other, and adapters likewise: what one product is of.

    `others` [tokens, adapters, 1]: True where a token is not under that adapter; None: all are under the one.
    """

    tokens: slice
    adapters: slice
    others: Tensor | None


class Adapters:
    """Which adapter each token of the present step is under. The engine thread owns it."""

    def __init__(self, count: int, device: torch.device, *, fixed: bool) -> None:
        """fixed: a step with any adapter is one share of all, so that its shapes never vary."""
        self.count = count
        self.shares: list[Share] = []
        self._device = device
        self._fixed = fixed

    def choose(self, of_tokens: Ints) -> None:
        """The step to come: 1 is the first adapter, 0 none."""
        self.shares = []
        if not of_tokens.any():
            return
        if self._fixed:
            self.choose_on_device(torch.from_numpy(of_tokens).to(self._device, non_blocking=True))
            return
        for start, end in _stretches(of_tokens):
            stretch = of_tokens[start:end]
            present_ids = np.unique(stretch)
            present = present_ids[present_ids > 0]
            for near in np.split(present, np.flatnonzero(np.diff(present) > 1) + 1) if len(present) else ():
                others = None
                if len(present_ids) > 1:
                    others = torch.from_numpy(stretch[:, None, None] != near[None, :, None])
                    others = others.to(self._device, non_blocking=True)
                at = slice(int(near[0]) - 1, int(near[-1]))
                self.shares.append(Share(slice(start, end), at, others))

    def choose_on_device(self, of_tokens: Tensor | None) -> None:
        """The same for a step whose work is frozen while its adapters, on the device, are not; None: none."""
        self.shares = []
        if of_tokens is not None:
            all_of_them = torch.arange(1, self.count + 1, device=of_tokens.device)
            others = of_tokens[:, None, None] != all_of_them[None, :, None]
            self.shares = [Share(slice(0, len(of_tokens)), slice(0, self.count), others)]


def _stretches(of_tokens: Ints) -> Iterator[tuple[int, int]]:
    """The step's tokens in turn: long runs of one adapter, and whatever is between them."""
    edges = np.concatenate(([0], np.flatnonzero(np.diff(of_tokens)) + 1, [len(of_tokens)]))
    long = np.flatnonzero(np.diff(edges) >= LONG)
    cuts = np.unique(np.concatenate(([0, len(of_tokens)], edges[long], edges[long + 1])))
    return zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)


@dataclass(frozen=True, slots=True)
class Up:
    """The second matrices of all adapters for some outputs of a map, [adapters * their columns, outputs],
    scaled; `columns` of what the first ones make belong to them (None: all).
    """

    columns: slice | None
    outputs: slice
    weight: Tensor


@dataclass(frozen=True, slots=True)
class Stack:
    """The matrices of all adapters of one map. `down` [adapters * rank, inputs]: the first ones."""

    down: Tensor
    ups: tuple[Up, ...]
    rank: int

    def add(self, out: Tensor, x: Tensor, shares: Sequence[Share]) -> None:
        """Add to out [T, outputs] what the adapters make of x [T, inputs]."""
        for share in shares:
            first, last = share.adapters.start, share.adapters.stop
            middle = F.linear(x[share.tokens], self.down[first * self.rank : last * self.rank])
            by_adapter = middle.view(len(middle), -1, self.rank)
            if share.others is not None:
                by_adapter.masked_fill_(share.others, 0.0)
            for up in self.ups:
                own = middle if up.columns is None else by_adapter[:, :, up.columns].flatten(1)
                rank = own.shape[1] // (last - first)
                out[share.tokens, up.outputs].addmm_(own, up.weight[first * rank : last * rank])


@dataclass(frozen=True, slots=True)
class Adapted:
    """A linear map with adapters; see `linear.Linear`."""

    inner: Linear
    stack: Stack
    adapters: Adapters

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        out = self.inner(x, residual)
        self.stack.add(out, x, self.adapters.shares)
        return out


# ------------------------------------------------------------------------------------------------------------
# Making them

Parts = dict[Place, LowRank]  # what one adapter adds to the parts of a map


def make_stack(
    of_adapters: Sequence[Parts], dtype: torch.dtype, device: torch.device, *, apart: bool
) -> Stack:
    """The stack of one map, of which each adapter has these parts.

    apart: parts have products of their own. Else one product is of all, and what a part adds to the outputs
    of another is zero.
    """
    places = sorted({place for parts in of_adapters for place in parts}, key=lambda place: place.first)
    columns: dict[Place, slice] = {}
    rank = 0
    for place in places:
        most = max(len(parts[place].down) for parts in of_adapters if place in parts)
        columns[place] = slice(rank, rank + most)
        rank += most
    down = torch.zeros(len(of_adapters), rank, places[0].inputs, dtype=dtype)
    for i, parts in enumerate(of_adapters):
        for place, own in parts.items():
            at = columns[place].start
            down[i, at : at + len(own.down)] = own.down
    groups = [[place] for place in places] if apart else [places]
    ups = []
    for group in groups:
        begin, first = columns[group[0]].start, group[0].first
        end, last = columns[group[-1]].stop, group[-1].first + group[-1].outputs
        weight = torch.zeros(len(of_adapters), end - begin, last - first, dtype=dtype)
        for i, parts in enumerate(of_adapters):
            for place in group:
                if place in parts:
                    own, at, to = parts[place], columns[place].start - begin, place.first - first
                    scaled = own.up.float().t() * own.scale
                    weight[i, at : at + len(scaled), to : to + place.outputs] = scaled
        own_columns = None if len(groups) == 1 else slice(begin, end)
        ups.append(Up(own_columns, slice(first, last), weight.flatten(0, 1).to(device)))
    return Stack(down.flatten(0, 1).to(device), tuple(ups), rank)


def unadapted(linear: Linear) -> Linear:
    """A map without its adapters."""
    return linear.inner if isinstance(linear, Adapted) else linear
