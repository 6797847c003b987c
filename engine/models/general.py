"""The general tier: serves any transformers decoder, with its attention replaced by the paged cache's.

The replacement goes through transformers' own attention interface. A trial run at load finds what KV the
layers keep; a model that cannot be served correctly is refused in one line.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from itertools import chain
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from engine.config import EngineConfig, Quantization
from engine.kernels import Workspace
from engine.kernels.cpu import Library
from engine.models.checkpoint import Checkpoint, require_finite
from engine.models.compiled import Compiled, Mapped, Routed
from engine.models.cpu_modules import Experts, find_experts, replace_norms
from engine.models.interface import Attention, ModelSpec
from engine.models.linear import Plain, make_linear
from engine.models.lora import Adapters, Place, Stack
from engine.models.trial_run import NARROW, TRIAL, Seen, Trial, tolerance
from engine.step import LayerGroup
from engine.types import LoadError, RenderError
from engine.vision import ImageProcessor, Seeing, Sight, largest_image

log = logging.getLogger("antiphon.engine")

IMPLEMENTATION = "antiphon_paged"
SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention"})
# modules that choose among experts: a rounding error there is another expert
CHOOSERS = frozenset({"gate", "router", "shared_expert_gate"})
# what longrope has twice, once for sequences of the original length and once for longer ones
LONGROPE = ("factor", "mscale")

_of_step: ContextVar[Attention | Trial | None] = ContextVar("_of_step", default=None)
"""The batch of the step that runs, for decoders whose layers hand nothing on to their attention but what they
know."""


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    *,
    antiphon: Attention | Trial | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls: [1, H, T, D] in, [1, T, H, D] out; the batch comes along in
    `antiphon`, or by `_of_step`.
    """
    if antiphon is None:
        antiphon = _of_step.get()
    if antiphon is None:
        raise LoadError(f"{type(module).__name__} attends outside a step")
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise LoadError(f"{type(module).__name__} has no layer index")
    if isinstance(antiphon, Trial):
        antiphon.note(module, layer, key, value, sliding_window, rest)
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    mixed = antiphon(layer, q, k, v, scale=scale, softcap=softcap, sinks=s_aux)
    return mixed[None], None


class Speaking(torch.nn.Module):
    """The language half of a model that sees, as a decoder of its own. The other half is left to `Sight`."""

    def __init__(self, whole: Any, path: str) -> None:
        """path: of the language model within the whole one."""
        super().__init__()
        self.model = whole.get_submodule(path)
        self.lm_head: torch.nn.Module = whole.get_output_embeddings()
        self.dtype: torch.dtype = whole.dtype

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        device: torch.device = self.model.device
        return device

    def get_output_embeddings(self) -> torch.nn.Module:
        """The head."""
        return self.lm_head

    def set_attn_implementation(self, name: str) -> None:
        """See transformers."""
        self.model.set_attn_implementation(name)

    def forward(self, *, logits_to_keep: Tensor | None = None, **given: Any) -> SimpleNamespace:
        """What a transformers decoder with a head gives, as far as it is read: `logits`."""
        hidden = self.model(**given).last_hidden_state
        return SimpleNamespace(
            logits=self.lm_head(hidden if logits_to_keep is None else hidden[:, logits_to_keep])
        )


class GeneralDecoder:
    """A transformers decoder behind `Model`."""

    def __init__(
        self, spec: ModelSpec, model: Any, library: Library | None = None, sight: Sight | None = None
    ) -> None:
        self.spec = spec
        self.library = library
        self.has_experts_in_panels = any(isinstance(each.forward, Routed) for each in model.modules())
        self.adapters: Adapters | None = None
        self.sight = sight
        self._model = model
        self._compiled: Compiled | None = None

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        *,
        weights: Callable[[], dict[str, Tensor]] | None = None,
        library: Library | None = None,
        compile: bool = False,
        row: Seeing | None = None,
    ) -> GeneralDecoder:
        """Load the folder `config.model` by transformers and try it; raises LoadError for what cannot be
        served rightly.

        Of the configuration it reads `quantization`, which is of all linear maps but those that choose among
        experts, while the head is as in `NativeDecoder.load`; `max_model_len`, which with longrope chooses
        the factors, see `_choose_long`; and of a model that sees `text_only`, `image_cache_bytes`, and
        `step_timeout_s`, of which a layer may take half for one image. weights: read in the place of the
        folder's, where these are quantized. library: as in `make_linear`. row: of a model that sees.
        """
        folder, quantization = Path(config.model), config.quantization
        text, model, whole = _open(folder, dtype, device, row, config.max_model_len, weights)
        for name, weight in whole.named_parameters():
            require_finite(name, weight)
        architecture = type(whole).__name__
        for layer_type in getattr(text, "layer_types", None) or ():
            if layer_type not in SERVED_LAYER_TYPES:
                raise LoadError(f"{architecture} has layers of type {layer_type!r}, which are not served")
        try:
            seen, vocab_size = _try(model, text)
        except LoadError as error:
            raise LoadError(f"{architecture} is not served: {error}") from None
        except (TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
            line = (str(error).splitlines() or [""])[0]
            raise LoadError(f"{architecture} is not served: {type(error).__name__}: {line}") from error
        spec = ModelSpec(
            architecture=architecture,
            vocab_size=vocab_size,
            max_positions=_max_positions(text),
            shortened=_shortened(text),
            num_parameters=checkpoint.num_parameters,
            groups=_groups(seen),
            dtype=dtype,
            fingerprint=checkpoint.fingerprint() + (b"" if quantization == "none" else quantization.encode()),
        )
        processor = None
        image_bytes = config.image_cache_bytes
        if row is not None and not config.text_only:
            largest = largest_image(whole, row, config.step_timeout_s / 2)
            processor = ImageProcessor.load(folder, image_bytes, largest)
            spec = replace(spec, fingerprint=spec.fingerprint + processor.fingerprint)
        if library is not None and dtype in (torch.float32, torch.bfloat16) and not compile:
            replace_norms(
                model, library, dtype
            )  # where they are compiled, they become parts of other operations
        if not _repack(model, quantization, library):
            why = "it computes with the weights of its linear maps by itself"
            if quantization != "none":
                raise LoadError(f"{architecture} is not served with quantization {quantization}: {why}")
            log.info("%s keeps its weights as they are stored: %s", architecture, why)
            del model, whole
            _, model, whole = _open(folder, dtype, device, row, config.max_model_len, weights)
        if (
            device.type == "cpu"
        ):  # what is left may be the file itself, mapped: a copy outlives one that is replaced
            for parameter in whole.parameters():
                parameter.data = parameter.data.clone()
        sight = None
        if processor is not None:
            sight = Sight(whole, processor, dtype, image_bytes)
            try:
                sight.try_out()
            except (LoadError, RenderError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                line = (str(error).splitlines() or [""])[0]
                raise LoadError(f"{architecture} is not served with images: {line}") from error
        decoder = cls(spec, model, library, sight)
        if compile:
            decoder.compile()
        return decoder

    def compile(self) -> None:
        """Run by torch.compile from now on; where that fails a warning says why, and all stays as it was."""
        compiled = Compiled(self._model, _forward)
        tokens = torch.tensor(TRIAL[0], device=self._model.device)
        try:
            compiled.prove(tokens, lambda number: Trial([number]), self._model)
        except Exception as error:  # compilers raise what they like
            reason = " ".join(str(error).strip().splitlines()[:2])  # the first is often who says it
            name, kind = self.spec.architecture, type(error).__name__
            log.warning("%s is not compiled, and runs as it is: %s: %s", name, kind, reason)
            return
        self._compiled = compiled

    def forward(
        self, token_ids: Tensor, positions: Tensor, attention: Attention, logits_at: Tensor
    ) -> Tensor:
        """See `Model.forward`."""
        if self._compiled is not None:
            return self._compiled(token_ids, positions, attention, logits_at)
        if self.sight is None:
            return _forward(self._model, token_ids, positions, attention, logits_at)
        embeddings = self.sight.embedded(token_ids)
        positions = self.sight.positions(positions)
        return _forward(self._model, token_ids, positions, attention, logits_at, embeddings)

    def places(self) -> dict[str, Place]:
        """See `Model.places`."""
        head = self._model.get_output_embeddings()
        return {
            path: Place(path, module.in_features, module.out_features)
            for path, module in self._model.named_modules()
            if isinstance(module, torch.nn.Linear) and module is not head
        }

    def adapt(self, adapters: Adapters, stacks: Mapping[str, Stack]) -> None:
        """See `Model.adapt`; raises LoadError for a map that is given other tokens than the step's."""
        for path in _skipping(self._model, stacks):
            raise LoadError(f"{path} is not computed for every token, so no adapter can add to it")
        for path, stack in stacks.items():

            def add(_: Any, given: tuple[Tensor], out: Tensor, stack: Stack = stack) -> None:
                x = given[0].flatten(0, -2)
                stack.add(out.view(len(x), -1), x, adapters.shares)

            self._model.get_submodule(path).register_forward_hook(add)
        self.adapters = adapters


def _forward(
    model: Any,
    token_ids: Tensor,
    positions: Tensor,
    attention: Attention,
    logits_at: Tensor,
    embeddings: Tensor | None = None,
) -> Tensor:
    """A flattened batch [T] through a transformers model, whose head runs for `logits_at` only. positions:
    [T], or as the model takes them. embeddings: [T, hidden], where they are not those of the tokens."""
    named = {"input_ids": token_ids[None]} if embeddings is None else {"inputs_embeds": embeddings[None]}
    before = _of_step.set(attention)
    try:
        output = model(
            **named,
            position_ids=positions[None] if positions.ndim == 1 else positions,
            use_cache=False,
            logits_to_keep=logits_at,
            antiphon=attention,
        )
    finally:
        _of_step.reset(before)
    logits: Tensor = output.logits[0]
    return logits


def _open(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    row: Seeing | None,
    max_model_len: int | None,
    weights: Callable[[], dict[str, Tensor]] | None,
) -> tuple[Any, Any, Any]:
    """The text configuration, the decoder, its attention going through `_attend`, and the whole model: of one
    that sees, its decoder is a part."""
    import transformers
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging

    quiet: Any = logging.disable_progress_bar
    quiet()
    AttentionInterface.register(IMPLEMENTATION, _attend)
    kind: Any = AutoModelForCausalLM if row is None else AutoModelForImageTextToText
    # A vision tower attends by itself: its tokens are no sequence of the batch. Nor are its scores ever in
    # memory as a whole, which of a photo of 2,048 x 2,048 pixels are some 27 GiB.
    attention = IMPLEMENTATION if row is None else {"text_config": IMPLEMENTATION, "vision_config": "sdpa"}
    read = None if weights is None else weights()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            text = config.get_text_config()
            if max_model_len is not None and max_model_len > _max_positions(text):
                _choose_long(text)
            if read is not None:  # which the automatic classes do not take
                kind = getattr(transformers, config.architectures[0])
                del config.quantization_config
            whole, found = kind.from_pretrained(
                folder if read is None else None,
                state_dict=read,
                config=config,
                dtype=dtype,
                attn_implementation=attention,
                local_files_only=True,
                output_loading_info=True,
            )
    except KeyError as error:
        if error.args == (IMPLEMENTATION,):  # its attention classes are looked up in a table of its own
            name = (config.architectures or [config.model_type])[0]
            raise LoadError(f"{name} is not served: it keeps attention implementations of its own") from None
        raise LoadError(f"transformers cannot load {folder}: KeyError: {error}") from error
    except Exception as error:  # transformers raises what it likes; one line says what it was
        line = (str(error).strip().splitlines() or [""])[0]
        raise LoadError(f"transformers cannot load {folder}: {type(error).__name__}: {line}") from error
    for name in sorted(found["missing_keys"]):  # transformers fills it with random numbers
        raise LoadError(f"{folder} lacks {name}, which its model has")
    if "logits_to_keep" not in inspect.signature(whole.forward).parameters:
        raise LoadError(f"{type(whole).__name__} is not a decoder with a language head")
    whole = whole.eval().to(device)
    model = whole if row is None else Speaking(whole, row.language)
    return text, model, whole


def _try(model: Any, config: Any) -> tuple[dict[int, Seen], int]:
    """Run two short sequences flattened, and each by the model's own eager attention: the logits must agree.

    That is how a layer that mixes tokens by anything but this attention (a convolution, a recurrent state,
    another mask) is found out. The sliding window is narrowed for it, so that it hides some of so few tokens:
    the logits also tell whether a layer that hands none to its attention has one in its mask.
    """

    trial = Trial()
    vocab_size = _run(model, trial).shape[-1]
    if sorted(trial.seen) != list(range(config.num_hidden_layers)):
        missing = min(set(range(config.num_hidden_layers)) - set(trial.seen), default=0)
        raise LoadError(f"layer {missing} does not attend through the attention interface")
    window = _window(config)
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    handed = {layer: own.window for layer, own in trial.seen.items()}
    masked = {
        layer: own or (window if types[layer] == "sliding_attention" else None)
        for layer, own in handed.items()
    }
    inputs = [torch.tensor([ids], device=model.device) for ids in TRIAL]
    found: list[tuple[float, dict[int, int | None]]] = []
    with _narrowed(model, window):
        model.set_attn_implementation("eager")
        expected = torch.cat([model(input_ids=ids, use_cache=False).logits[0] for ids in inputs]).float()
        model.set_attn_implementation(IMPLEMENTATION)
        for windows in (handed,) if handed == masked else (handed, masked):
            narrow = {layer: NARROW if own and own == window else own for layer, own in windows.items()}
            logits = _run(model, Trial(windows=narrow)).float()
            # of the token that is furthest off: the furthest of all its logits is mostly rounding
            found.append(((logits - expected).square().mean(dim=-1).sqrt().max().item(), windows))
    difference, windows = min(found, key=itemgetter(0))
    if not difference <= tolerance(expected, model.dtype):
        raise LoadError(
            f"its layers mix tokens in a way that is not served (logits differ by {difference:.2g})"
        )
    return {layer: replace(own, window=windows[layer]) for layer, own in trial.seen.items()}, vocab_size


def _window(config: Any) -> int | None:
    """The sliding window of a configuration, where it hides anything of the served positions."""
    window = getattr(config, "sliding_window", None)
    return window if isinstance(window, int) and 0 < window < _max_positions(config) else None


@contextmanager
def _narrowed(model: Any, window: int | None) -> Iterator[None]:
    """A model whose masks are made with `NARROW` in the place of this window."""
    configs = [each.config for each in model.modules() if hasattr(each, "config")] if window else []
    configs = [own for own in configs if getattr(own, "sliding_window", None) == window]
    try:
        for own in configs:
            own.sliding_window = NARROW
        yield
    finally:
        for own in configs:
            own.sliding_window = window


def _run(model: Any, trial: Trial) -> Tensor:
    """Logits of all tokens of `TRIAL`, flattened."""

    def tensor(values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), device=model.device)

    positions = tensor(i for ids in TRIAL for i in range(len(ids)))
    return _forward(model, tensor(chain(*TRIAL)), positions, trial, tensor(range(len(positions))))


def _skipping(model: Any, paths: Collection[str]) -> Iterator[str]:
    """Those of these modules that are not given every token: a router sends some past them."""
    given: dict[str, int] = {}

    def note(path: str) -> Callable[..., None]:
        return lambda module, inputs, out: given.update({path: inputs[0].flatten(0, -2).shape[0]})

    hooks = [model.get_submodule(path).register_forward_hook(note(path)) for path in paths]
    _run(model, Trial())
    for hook in hooks:
        hook.remove()
    return (path for path in paths if given.get(path) != sum(map(len, TRIAL)))


def _repack(model: Any, quantization: Quantization, library: Library | None) -> bool:
    """Give every linear map of a model the layout that it would have in a native one; False when the model
    cannot be computed so.
    """
    head, workspace = model.get_output_embeddings(), Workspace()
    # by name: a list of the modules themselves would keep the weights of all until the last is done
    for path in [path for path, each in model.named_modules() if type(each) is torch.nn.Linear]:
        module, own = model.get_submodule(path), quantization
        if path.rpartition(".")[2] in CHOOSERS:
            own = "none"
        elif module is head:
            own = "int8" if quantization in ("int8", "int4") else "none"
        bias = None if module.bias is None else module.bias.data
        linear = make_linear(module.weight.data, bias, own, workspace, library)
        if not isinstance(linear, Plain):
            model.set_submodule(path, Mapped(module, linear))
    if library is not None and quantization != "fp8":
        for experts in find_experts(model):
            experts.forward = Routed(Experts(experts, library, quantization))
    try:
        return bool(_run(model, Trial()).isfinite().all())  # the weights that a module shows are not
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return False


def _groups(seen: dict[int, Seen]) -> tuple[LayerGroup, ...]:
    """Layers that keep their KV alike share block tables; full attention comes first."""
    order: Callable[[Seen], tuple[bool, int, int, int]] = lambda own: (  # noqa: E731
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
    """Where the served positions end: before a rotation begins to depend on the length of the sequence."""
    ends = [int(part["original_max_position_embeddings"]) for part in _switching(config)]
    return min([int(config.max_position_embeddings), *ends])


def _switching(config: Any) -> list[dict[str, Any]]:
    """Rotary parameters of longrope that have other factors for long sequences than for short ones."""
    rope = getattr(config, "rope_parameters", None) or {}
    parts = (rope, *(inner for inner in rope.values() if isinstance(inner, dict)))
    longropes = (part for part in parts if part.get("rope_type") == "longrope")
    return [
        part
        for part in longropes
        if any(part.get(f"short_{kind}") != part.get(f"long_{kind}") for kind in LONGROPE)
    ]


def _choose_long(config: Any) -> None:
    """Have a configuration turn all sequences by the factors that longrope has for long ones.

    transformers switches when a sequence grows beyond the original length, and computes the keys of all its
    tokens anew. Keys in the cache cannot be turned anew, and sequences of a batch share one rotation.
    """
    for part in _switching(config):
        part.update({f"short_{kind}": part[f"long_{kind}"] for kind in LONGROPE if f"long_{kind}" in part})


def _shortened(config: Any) -> str:
    """See `ModelSpec.shortened`."""
    served, whole = _max_positions(config), int(config.max_position_embeddings)
    if served == whole:
        return ""
    return (
        f"the context is {served} tokens instead of the {whole} of the model, which rotates longer sequences "
        f"by other factors (longrope): with a max_model_len beyond {served} all are rotated by those"
    )
