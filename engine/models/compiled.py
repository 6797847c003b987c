"""Runs models of the general tier by torch.compile.

Attention over the paged cache and linear maps with packed weights are operations that the compiler treats as
opaque. Where compiling fails, the model runs uncompiled.

A model is compiled twice while it is loaded: for one token, and for any other number. Nothing is compiled
while a request waits: a step that would need another variant runs uncompiled.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from engine.models.trial_run import tolerance

if TYPE_CHECKING:
    from engine.models.cpu_modules import Experts
    from engine.models.interface import Attention
    from engine.models.linear import Linear

BACKEND = "inductor"

# operations take numbers and tensors: what they are to call is looked up here
_held: WeakValueDictionary[int, Batch | Mapped | Routed] = WeakValueDictionary()
_numbers = count()


class Batch:
    """What a model hands to its attention in a step, when it is compiled: the same object for every step."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.attention: Attention | None = None
        _held[self.number] = self

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `models.Attention`."""
        out: Tensor = torch.ops.antiphon.attend(q, k, v, self.number, layer, scale, softcap, sinks)
        return out


@torch.library.custom_op("antiphon::attend", mutates_args=())
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: int,
    layer: int,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    own = _held[batch]
    assert isinstance(own, Batch) and own.attention is not None
    return own.attention(layer, q, k, v, scale=scale, softcap=softcap, sinks=sinks).contiguous()


@_attend.register_fake
def _(q: Tensor, *rest: Any) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


class Mapped(torch.nn.Linear):
    """A module's place in a transformers model, taken by a linear map whose weights lie as we have them."""

    def __init__(self, module: torch.nn.Linear, linear: Linear) -> None:
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = module.in_features, module.out_features
        # only their type and shape mean anything; their numbers do not
        for name in ("weight", "bias"):
            own = getattr(module, name)
            setattr(self, name, None if own is None else own.data.new_full((), torch.nan).expand(own.shape))
        self.linear = linear
        self.number = next(_numbers)
        _held[self.number] = self

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs] -> [..., outputs]."""
        rows = x.reshape(-1, self.in_features)
        if torch.compiler.is_compiling():
            out = torch.ops.antiphon.multiply(rows, self.number, self.out_features)
        else:
            out = self.linear(rows.contiguous())
        shaped: Tensor = out.view(*x.shape[:-1], self.out_features)
        return shaped


@torch.library.custom_op("antiphon::multiply", mutates_args=())
def _multiply(x: Tensor, map: int, outputs: int) -> Tensor:
    own = _held[map]
    assert isinstance(own, Mapped)
    return own.linear(x.contiguous())


@_multiply.register_fake
def _(x: Tensor, map: int, outputs: int) -> Tensor:
    return torch.empty((x.shape[0], outputs), dtype=x.dtype, device=x.device)


class Routed:
    """What a transformers model calls for a layer's experts, where we compute them."""

    def __init__(self, experts: Experts) -> None:
        self.experts = experts
        self.number = next(_numbers)
        _held[self.number] = self

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """See `Experts`."""
        if torch.compiler.is_compiling():
            out: Tensor = torch.ops.antiphon.route(hidden, chosen, weights, self.number)
            return out
        return self.experts(hidden, chosen, weights)


@torch.library.custom_op("antiphon::route", mutates_args=())
def _route(hidden: Tensor, chosen: Tensor, weights: Tensor, experts: int) -> Tensor:
    own = _held[experts]
    assert isinstance(own, Routed)
    return own.experts(hidden, chosen, weights)


@_route.register_fake
def _(hidden: Tensor, chosen: Tensor, weights: Tensor, experts: int) -> Tensor:
    return torch.empty_like(hidden)


# a model, token ids, positions, attention, logits_at -> logits
Forward = Callable[[Any, Tensor, Tensor, Any, Tensor], Tensor]


class Compiled:
    """A compiled model; called as `Model.forward` is."""

    def __init__(self, model: Any, forward: Forward) -> None:
        """`forward` runs a transformers model, compiled or not."""
        self._model = torch.compile(model, dynamic=True, fullgraph=True, backend=BACKEND)
        self._forward = forward
        self._batch = Batch()

    def prove(self, tokens: Tensor, attention: Callable[[int], Attention], plain: Any) -> None:
        """Compile both variants, and see that they compute what `plain` does; raises what goes wrong.

        attention: stands in for a step of so many tokens.
        """
        for number in (len(tokens), 1):
            given = tokens[:number], torch.arange(number, device=tokens.device)
            wanted = given[1][-3:]
            expected = self._forward(plain, *given, attention(number), wanted).float()
            found = self._run(*given, attention(number), wanted).float()
            difference = (found - expected).abs().max().item()
            if not difference <= tolerance(expected, plain.dtype):
                raise ValueError(f"compiled, its logits differ by {difference:.2g}")

    def __call__(
        self, token_ids: Tensor, positions: Tensor, attention: Attention, logits_at: Tensor
    ) -> Tensor:
        """See `Model.forward`."""
        with torch.compiler.set_stance("eager_on_recompile"):
            return self._run(token_ids, positions, attention, logits_at)

    def _run(self, token_ids: Tensor, positions: Tensor, attention: Attention, logits_at: Tensor) -> Tensor:
        self._batch.attention = attention
        wanted = logits_at
        if len(wanted) < 2:  # none and one would be variants of their own
            wanted = torch.cat((wanted, wanted.new_zeros(2 - len(wanted))))
        return self._forward(self._model, token_ids, positions, self._batch, wanted)[: len(logits_at)]
