"""The general tier: any transformers decoder, its attention replaced through transformers' own interface.

Owns: loading such a model, asking it by a trial run what KV its layers keep, and refusing, in one line, what
it cannot serve rightly. Refuses to know: families by name, and how the paged cache is read.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.blocks import LayerGroup
from engine.models import Attention, ModelSpec
from engine.types import LoadError
from engine.weights import Checkpoint

IMPLEMENTATION = "antiphon_paged"
SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention"})
# what models hand to their attention besides what is served, and that does not change its result
_HARMLESS = frozenset(
    {
        "attention_mask",
        "cache_position",
        "dropout",
        "is_causal",
        "output_attentions",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "use_cache",
    }
)
TRIAL = ((5, 3, 7, 1, 4, 2, 6, 8), (2, 9, 4, 4, 1))  # two sequences of token ids, short enough for any window


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one layer handed to its attention in the trial run."""

    num_kv_heads: int
    head_dim: int
    window: int | None


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    *,
    antiphon: Attention | _Trial | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls: [1, H, T, D] in, [1, T, H, D] out; the batch comes along in
    `antiphon`.
    """
    if antiphon is None:
        raise LoadError("the model keeps the batch's metadata from its attention layers")
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise LoadError(f"{type(module).__name__} has no layer index")
    if isinstance(antiphon, _Trial):
        antiphon.note(module, layer, key, value, sliding_window, rest)
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    mixed = antiphon(layer, q, k, v, scale=scale, softcap=softcap, sinks=s_aux)
    return mixed[None], None


class _Trial:
    """A stand-in for the paged cache: attends over `TRIAL` densely, sequence by sequence, and notes what it
    saw.
    """

    def __init__(self) -> None:
        self.seen: dict[int, _Seen] = {}

    def note(
        self,
        module: torch.nn.Module,
        layer: int,
        key: Tensor,
        value: Tensor,
        window: int | None,
        rest: dict[str, Any],
    ) -> None:
        """Remember a layer's shape; raises LoadError when it asks for something that is not served."""
        kind = type(module).__name__
        if key.shape != value.shape:
            raise LoadError(f"{kind} keeps keys and values of different shapes, which is not served")
        if not getattr(module, "is_causal", True):
            raise LoadError(f"{kind} is not causal")
        unknown = sorted(name for name, given in rest.items() if given is not None and name not in _HARMLESS)
        if unknown:
            raise LoadError(f"{kind} hands {unknown[0]!r} to its attention, which is not served")
        if layer in self.seen:
            raise LoadError(f"{kind} attends twice in layer {layer}")
        self.seen[layer] = _Seen(key.shape[1], key.shape[3], window)

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
        lengths = [len(ids) for ids in TRIAL]
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
        queries, keys, values = (torch.split(part, lengths) for part in (q, k, v))
        return torch.cat(
            [_dense(queries[i], keys[i], values[i], scale, softcap, sinks) for i in range(len(lengths))]
        )


def _dense(
    q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", q, k).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    if sinks is not None:
        own = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat((scores, own), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights.to(v.dtype), v)


class GeneralDecoder:
    """A transformers decoder behind `Model`."""

    def __init__(self, spec: ModelSpec, model: Any) -> None:
        self.spec = spec
        self._model = model

    @classmethod
    def load(
        cls,
        folder: Path,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int | None,
    ) -> GeneralDecoder:
        """Load a model by transformers and try it; raises LoadError for what cannot be served rightly."""
        config, model = _open(folder, dtype, device)
        architecture = type(model).__name__
        for layer_type in getattr(config, "layer_types", None) or ():
            if layer_type not in SERVED_LAYER_TYPES:
                raise LoadError(f"{architecture} has layers of type {layer_type!r}, which are not served")
        try:
            seen, vocab_size = _try(model, config, device)
        except LoadError as error:
            raise LoadError(f"{architecture} is not served: {error}") from None
        except (TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
            line = (str(error).splitlines() or [""])[0]
            raise LoadError(f"{architecture} is not served: {type(error).__name__}: {line}") from error
        spec = ModelSpec(
            architecture=architecture,
            vocab_size=vocab_size,
            max_positions=_max_positions(config),
            num_parameters=checkpoint.num_parameters,
            groups=_groups(seen),
            dtype=dtype,
            fingerprint=checkpoint.fingerprint(),
        )
        return cls(spec, model)

    def forward(
        self, token_ids: Tensor, positions: Tensor, attention: Attention, logits_at: Tensor
    ) -> Tensor:
        """See `Model.forward`."""
        return _forward(self._model, token_ids, positions, attention, logits_at)


def _forward(
    model: Any, token_ids: Tensor, positions: Tensor, attention: Attention, logits_at: Tensor
) -> Tensor:
    """A flattened batch [T] through a transformers model, whose head runs for `logits_at` only."""
    output = model(
        input_ids=token_ids[None],
        position_ids=positions[None],
        use_cache=False,
        logits_to_keep=logits_at,
        antiphon=attention,
    )
    logits: Tensor = output.logits[0]
    return logits


def _open(folder: Path, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    """The text configuration and the model, its attention going through `_attend`."""
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    quiet: Any = logging.disable_progress_bar
    quiet()
    AttentionInterface.register(IMPLEMENTATION, _attend)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            model: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, attn_implementation=IMPLEMENTATION, local_files_only=True
            )
    except KeyError as error:
        if error.args == (IMPLEMENTATION,):  # its attention classes are looked up in a table of its own
            name = (config.architectures or [config.model_type])[0]
            raise LoadError(f"{name} is not served: it keeps attention implementations of its own") from None
        raise LoadError(f"transformers cannot load {folder}: KeyError: {error}") from error
    except Exception as error:  # transformers raises what it likes; one line says what it was
        line = (str(error).strip().splitlines() or [""])[0]
        raise LoadError(f"transformers cannot load {folder}: {type(error).__name__}: {line}") from error
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise LoadError(f"{type(model).__name__} is not a decoder with a language head")
    return config.get_text_config(), model.eval().to(device)


def _try(model: Any, config: Any, device: torch.device) -> tuple[dict[int, _Seen], int]:
    """Run two short sequences flattened, and each by the model's own eager attention: the logits must agree.

    That is how a layer that mixes tokens by anything but this attention (a convolution, a recurrent state,
    another mask) is found out.
    """

    def tensor(values: Sequence[int] | Sequence[list[int]]) -> Tensor:
        return torch.tensor(values, device=device)

    trial = _Trial()
    flat = [token for ids in TRIAL for token in ids]
    positions = [i for ids in TRIAL for i in range(len(ids))]
    every = tensor(list(range(len(flat))))
    logits = _forward(model, tensor(flat), tensor(positions), trial, every).float()
    if sorted(trial.seen) != list(range(config.num_hidden_layers)):
        missing = min(set(range(config.num_hidden_layers)) - set(trial.seen), default=0)
        raise LoadError(f"layer {missing} does not attend through the attention interface")
    model.set_attn_implementation("eager")
    expected = [model(input_ids=tensor([list(ids)]), use_cache=False).logits[0] for ids in TRIAL]
    model.set_attn_implementation(IMPLEMENTATION)
    difference = (logits - torch.cat(expected).float()).abs().max().item()
    spread = logits.std().item()
    if not difference <= (1e-3 if logits.dtype == torch.float32 else 0.1) * max(spread, 1e-6):
        raise LoadError(
            f"its layers mix tokens in a way that is not served (logits differ by {difference:.2g})"
        )
    return trial.seen, logits.shape[-1]


def _groups(seen: dict[int, _Seen]) -> tuple[LayerGroup, ...]:
    """Layers that keep their KV alike share block tables; full attention comes first."""
    order: Callable[[_Seen], tuple[bool, int, int, int]] = lambda own: (  # noqa: E731
        own.window is not None,
        own.window or 0,
        own.num_kv_heads,
        own.head_dim,
    )
    return tuple(
        LayerGroup(
            layers=tuple(layer for layer in sorted(seen) if seen[layer] == kind),
            num_kv_heads=kind.num_kv_heads,
            head_dim=kind.head_dim,
            window=kind.window,
        )
        for kind in sorted(set(seen.values()), key=order)
    )


def _max_positions(config: Any) -> int:
    """Where the served positions end: with longrope before the rotation begins to depend on the batch's
    longest.
    """
    limit = int(config.max_position_embeddings)
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(inner for inner in rope.values() if isinstance(inner, dict))):
        if part.get("rope_type") == "longrope":
            limit = min(limit, int(part["original_max_position_embeddings"]))
    return limit
