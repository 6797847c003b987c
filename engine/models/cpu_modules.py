"""Modules of transformers' models that the C++ kernels compute on a CPU: the experts of a layer, and norms.

Of a mixture of experts, a token is computed by a few experts of many, which its layer's router chooses.
transformers holds the matrices of all of them as one tensor. A norm is some eight operations there, each of
which takes longer to call than to compute for the few tokens of a decode step.
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

# how far a number may be from one that transformers rounds once more
TWO_ROUNDINGS = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}


class Experts:
    """The experts of one layer, in the place of a module's own forward; see `find_experts`. `first` and
    `last`: their maps, before and behind the activation."""

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


def find_experts(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
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


class Norm(torch.nn.Module):
    """A root mean square norm by the kernels, rounded once; see `replace_norms`."""

    def __init__(self, library: Library, weight: Tensor, eps: float) -> None:
        """weight [H] f32, by which what is normed is multiplied."""
        super().__init__()
        self._library = library
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> the same shape."""
        x = x.contiguous()
        out = torch.empty_like(x)
        self._library.norm(x, self.weight.data, self._eps, out)
        return out


@torch.inference_mode()
def replace_norms(model: torch.nn.Module, library: Library, dtype: torch.dtype) -> None:
    """Put `Norm` in the place of every module of a model that is seen to compute the same in `dtype`: some
    families multiply by their weights, and some by one more."""
    names = [name for name, each in model.named_modules() if type(each).__name__.endswith("RMSNorm")]
    for name in names:
        module = model.get_submodule(name)
        weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
        eps = getattr(module, "eps", None) if eps is None else eps
        if not isinstance(weight, Tensor) or weight.ndim != 1 or not isinstance(eps, float):
            continue
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(4, len(weight), generator=generator) * torch.tensor([[0.01], [1.0], [3.0], [50.0]])
        x = x.to(dtype)
        try:
            expected = module(x)
        except TypeError:  # it is given more than numbers
            continue
        for own in (weight.float(), weight.float() + 1):
            norm = Norm(library, own, eps)
            if torch.allclose(norm(x), expected, rtol=TWO_ROUNDINGS[dtype], atol=1e-6):
                model.set_submodule(name, norm)
                break
