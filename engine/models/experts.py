"""Mixtures of experts on a CPU: a layer's experts in the layouts of the C++ kernels.

Of a mixture, a token is computed by a few experts of many, which its layer's router chooses. transformers
holds the matrices of all of them as one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.config import Quantization
from engine.kernels import Workspace
from engine.kernels.cpu import Library, Panels, PanelsOfExperts
from engine.models.linear import make_linear


class Experts:
    """The experts of one layer, in the place of a module's own forward; see `find`. `first` and `last`: their
    maps, before and behind the activation."""

    def __init__(self, module: Any, library: Library, quantization: Quantization) -> None:
        """Take a module's weights, which afterwards have only their shapes and type."""
        self._module = module
        first = "gate_up_proj" if module.has_gate else "up_proj"
        self.first = _laid_out(module, first, library, quantization)
        self.last = _laid_out(module, "down_proj", library, quantization)

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """hidden [T, H] by the experts chosen [T, K] of each token, by their weights [T, K] -> [T, H]."""
        module, per_token = self._module, chosen.shape[-1]
        of_pairs = chosen.reshape(-1)
        order = of_pairs.argsort(stable=True)
        # numbers beyond the last expert are no expert's: a router masks some of its choices so
        ends = np.searchsorted(of_pairs[order].numpy(), np.arange(self.first.count + 1))
        order = order[: ends[-1]]
        x = hidden.reshape(-1, hidden.shape[-1])[order // per_token]
        middle = self.first(ends, x)
        middle = module._apply_gate(middle) if module.has_gate else module.act_fn(middle)
        out = self.last(ends, middle.to(x.dtype))
        if module.has_post_expert_norm:
            out = module.post_expert_norm(out)
        pairs = torch.zeros(len(of_pairs), out.shape[-1], dtype=torch.float32)
        pairs[order] = out.float() * weights.reshape(-1)[order, None].float()
        return pairs.view(-1, per_token, out.shape[-1]).sum(dim=1).to(hidden.dtype)


def find(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules of a transformers model that hold the experts of a layer, as its decorator
    `use_experts_implementation` marks them."""
    marks = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed")
    return (each for each in model.modules() if all(hasattr(each, mark) for mark in marks))


def _laid_out(module: Any, name: str, library: Library, quantization: Quantization) -> PanelsOfExperts:
    stored: Tensor = getattr(module, name).data  # [experts, outputs, inputs], or the other way around
    biases: Tensor | None = getattr(module, f"{name}_bias").data if module.has_bias else None
    panels, workspace = [], Workspace()
    for i, weight in enumerate(stored):
        whole = (weight.T if module.is_transposed else weight).contiguous()
        linear = make_linear(whole, None if biases is None else biases[i], quantization, workspace, library)
        assert isinstance(linear, Panels)
        panels.append(linear)
    # only its type and shape mean anything; its numbers do not
    delattr(module, name)
    setattr(module, name, stored.new_full((), torch.nan).expand(stored.shape))
    return PanelsOfExperts(panels)
