"""Reads from a checkpoint what is done with a text's hidden states, in the words of sentence-transformers.

Nothing is guessed: a folder without `modules.json` is read as sentence-transformers reads it, and that is
said; what is there and not understood keeps the model from being served.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from engine.model_folder import read_config, read_json
from engine.pooling.values import PoolingKind
from engine.types import LoadError

Head = Literal["states", "classes", "yes_no", "table"]
"""What the model computes last: hidden states; the logits of classes; the logits of two tokens. table: it has
a vector for each token, and computes nothing."""

MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
_LEGACY_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
ACTIVATIONS = ("Identity", "Sigmoid", "Tanh", "ReLU", "GELU", "SiLU", "Softmax")
TOKENS_CONFIGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
STATIC = "StaticEmbedding"
"""The module of sentence-transformers that has a vector for each token: a text's is their mean."""

NO_MODULES = "no modules.json: the default of sentence-transformers"

LONGEST = 1 << 17
"""Tokens of the longest text that a table of vectors is given: nothing but memory bounds it."""


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear map after the pooling: its folder, sizes, and what is applied to its outputs."""

    folder: Path
    inputs: int
    outputs: int
    bias: bool
    activation: str


After = Dense | Literal["normalize"]


@dataclass(frozen=True, slots=True)
class Chat:
    """How a query and a document become messages: their roles are so named. variables: of the template.
    structured: contents are lists of parts. instruction: of the system message; empty: there is none."""

    variables: Mapping[str, Any]
    structured: bool
    instruction: str


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is done with a text. `folder` has the model and its tokenizer; the rest as in `PoolingInfo`."""

    folder: Path
    kind: PoolingKind
    head: Head
    config: Mapping[str, Any]
    modes: tuple[str, ...]
    source: str
    include_prompt: bool = True
    after: tuple[After, ...] = ()
    max_length: int | None = None
    lower_case: bool = False
    cuts: tuple[int, ...] | None = ()
    cut: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    labels: tuple[str, ...] = ()
    activation: str = "Identity"
    yes_no: tuple[int, int] | None = None  # token ids; None: those of "yes" and "no"
    chat: Chat | None = (
        None  # pairs are told by the chat template; None: as a pair of texts, or as a card says
    )
    plain: bool = False  # the checkpoint says that texts are told without the chat template, if it has one

    @property
    def architecture(self) -> str:
        """As config.json names it."""
        return _architecture(self.config)

    @property
    def normalized(self) -> bool:
        """Whether vectors have the length 1."""
        return bool(self.after) and self.after[-1] == "normalize"

    @property
    def causal(self) -> bool:
        """Whether each token sees only those before it."""
        bidirectional = self.config.get("is_causal") is False or self.config.get(
            "use_bidirectional_attention"
        )
        decoder = self.architecture.endswith("ForCausalLM") or self.config.get("model_type") in _DECODERS
        return decoder and not bidirectional

    def dimensions(self, hidden: int) -> int:
        """Of a vector, where the hidden states have so many."""
        size = hidden * len(self.modes)
        for each in self.after:
            if isinstance(each, Dense):
                if each.inputs != size:
                    raise LoadError(f"{each.folder} takes {each.inputs} dimensions, and is given {size}")
                size = each.outputs
        return size


_DECODERS = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "gpt2", "gpt_neox"})


def read_recipe(folder: Path, kind: PoolingKind) -> Recipe:
    """What the checkpoint says. Raises LoadError for what is not served as `kind`."""
    if kind == "embedding":
        return _read_embedding(folder)
    return _read_scores(folder, kind)


# ------------------------------------------------------------------------------------------------------------
# Embeddings


def _read_embedding(folder: Path) -> Recipe:
    modules = _read_modules(folder)
    told = read_json(folder, "config_sentence_transformers.json") or {}
    model = folder / modules[0][1] if modules else folder
    if modules and modules[0][0] == STATIC:
        return _read_static(folder, model, modules, told)
    config = read_config(model)
    if modules:
        modes, include_prompt = _read_pooling(folder, modules)
        after = _read_after(folder, modules[2:])
        source = f"{modules[1][1] or '.'}/config.json"
    else:
        causal_head = _architecture(config).endswith("ForCausalLM") and config.get("is_causal", True)
        modes, include_prompt, after = ("lasttoken" if causal_head else "mean",), True, ()
        source = NO_MODULES
    lengths = _tokens_config(model)
    if "message" in (lengths.get("modality_config") or {}):
        raise LoadError(f"{model} is told texts as messages of a chat, which is not served for embeddings")
    declared = config.get("matryoshka_dimensions")
    cut = told.get("truncate_dim")
    cuts: tuple[int, ...] | None = ()
    if isinstance(declared, list) and all(isinstance(each, int) for each in declared):
        cuts = tuple(declared)
    elif config.get("is_matryoshka") or cut is not None:
        cuts = None
    return Recipe(
        folder=model,
        kind="embedding",
        head="states",
        config=config,
        modes=modes,
        source=source,
        include_prompt=include_prompt,
        after=after,
        max_length=_length(lengths.get("max_seq_length")),
        lower_case=bool(lengths.get("do_lower_case")),
        plain=bool(modules),
        cuts=cuts,
        cut=cut,
        prompts=_prompts(told),
        default_prompt=told.get("default_prompt_name"),
    )


def _read_static(
    folder: Path, model: Path, modules: list[tuple[str, str]], told: Mapping[str, Any]
) -> Recipe:
    cut = told.get("truncate_dim")
    return Recipe(
        folder=model,
        kind="embedding",
        head="table",
        config={"architectures": [STATIC]},
        modes=("mean",),
        source="modules.json",
        after=_read_after(folder, modules[1:]),
        max_length=LONGEST,
        cuts=() if cut is None else None,
        cut=cut,
        prompts=_prompts(told),
        default_prompt=told.get("default_prompt_name"),
    )


def _prompts(told: Mapping[str, Any]) -> dict[str, str]:
    return {name: text for name, text in (told.get("prompts") or {}).items() if isinstance(text, str)}


def _read_modules(folder: Path) -> list[tuple[str, str]]:
    """The last part of each module's type, and its folder; empty without modules.json."""
    path = folder / "modules.json"
    if not path.exists():
        return []
    import json

    try:
        rows = json.loads(path.read_text("utf-8"))
        rows = sorted(rows, key=lambda row: int(row["idx"]))
        found = [(_kind(str(row["type"])), str(row["path"])) for row in rows]
    except (ValueError, TypeError, KeyError) as error:
        raise LoadError(f"{path} is no list of modules: {error!r}") from None
    kinds = [kind for kind, _ in found]
    if kinds[:1] not in (["Transformer"], [STATIC]):
        raise LoadError(f"{path}: the first module is {kinds[:1]}; Transformer and {STATIC} are served")
    return found


def _kind(type_: str) -> str:
    """The name of a module of sentence-transformers; of a checkpoint's own code all of it."""
    return type_.rpartition(".")[2] if type_.startswith("sentence_transformers.") else type_


def _tokens_config(folder: Path) -> dict[str, Any]:
    """What sentence-transformers is told of the model and its tokenizer. Raises LoadError for a task that is
    none of those that are served."""
    found = next((found for name in TOKENS_CONFIGS if (found := read_json(folder, name))), None) or {}
    task = found.get("transformer_task")
    if task not in (None, "feature-extraction", "sequence-classification", "text-generation"):
        raise LoadError(f"{folder} is made for the task {task}, which is not served")
    return found


def _read_pooling(folder: Path, modules: list[tuple[str, str]]) -> tuple[tuple[str, ...], bool]:
    if len(modules) < 2 or modules[1][0] != "Pooling":
        raise LoadError(f"{folder}/modules.json has no Pooling after its Transformer")
    where = folder / modules[1][1]
    pooling = read_json(where, "config.json")
    if pooling is None:
        raise LoadError(f"{where} has no config.json, which says how the model pools")
    return _modes(pooling, where), bool(pooling.get("include_prompt", True))


def _read_after(folder: Path, modules: list[tuple[str, str]]) -> tuple[After, ...]:
    after: list[After] = []
    for kind, path in modules:
        if kind == "Normalize":
            after.append("normalize")
        elif kind == "Dense":
            after.append(_read_dense(folder / path))
        elif kind != "Dropout":  # which does nothing but in training
            raise LoadError(f"{folder}/modules.json has a module {kind}, which is not served")
    return tuple(after)


def _modes(pooling: Mapping[str, Any], where: Path) -> tuple[str, ...]:
    given = pooling.get("pooling_mode")
    if given is None:
        given = [mode for name, mode in _LEGACY_MODES.items() if pooling.get(name)]
    modes = (given,) if isinstance(given, str) else tuple(given)
    if not modes or any(mode not in MODES for mode in modes):
        raise LoadError(f"{where}/config.json says no pooling that is served: {', '.join(map(str, modes))}")
    return modes


def _read_dense(folder: Path) -> Dense:
    config = read_json(folder, "config.json") or {}
    inputs, outputs = config.get("in_features"), config.get("out_features")
    if not isinstance(inputs, int) or not isinstance(outputs, int):
        raise LoadError(f"{folder}/config.json has no in_features and out_features")
    beside = config.get("module_input_name", "sentence_embedding"), config.get("module_output_name")
    if beside[0] != "sentence_embedding" or beside[1] not in (None, "sentence_embedding"):
        raise LoadError(f"{folder} is a Dense of {beside[0]}, which is not served")
    if config.get("use_residual"):
        raise LoadError(f"{folder} is a Dense with a residual, which is not served")
    activation = _activation(config.get("activation_function", "torch.nn.modules.activation.Tanh"), folder)
    return Dense(folder, inputs, outputs, bool(config.get("bias", True)), activation)


def _activation(named: Any, where: Path) -> str:
    name = str(named).rpartition(".")[2]
    if not str(named).startswith("torch.nn.") or name not in ACTIVATIONS:
        raise LoadError(f"{where} has the activation {named}, which is not served")
    return name


# ------------------------------------------------------------------------------------------------------------
# Scores


def _read_scores(folder: Path, kind: PoolingKind) -> Recipe:
    modules = _read_modules(folder)
    model = folder / modules[0][1] if modules else folder
    config = read_config(model)
    architecture = _architecture(config)
    told = read_json(folder, "config_sentence_transformers.json") or {}
    lengths = _tokens_config(model)
    if architecture.endswith("ForSequenceClassification"):
        labels = _labels(config)
        if kind == "rerank" and len(labels) != 1:
            raise LoadError(f"{architecture} has {len(labels)} labels; a reranker has one")
        if modules[1:] or "message" in (lengths.get("modality_config") or {}):
            raise LoadError(f"{folder} is told texts, or scored, in a way that is not served")
        scored = _score_activation(config, told, labels, model)
        return Recipe(
            folder=model,
            kind=kind,
            head="classes",
            config=config,
            modes=("lasttoken" if config.get("model_type") in _DECODERS else "classifier",),
            source="config.json",
            max_length=_length(lengths.get("max_seq_length")),
            lower_case=bool(lengths.get("do_lower_case")),
            labels=labels,
            activation=scored if kind == "rerank" else _class_activation(config),
            plain=kind == "classification" or bool(modules),
        )
    if kind == "rerank" and architecture == "Qwen3ForCausalLM":
        return Recipe(
            folder=model,
            kind=kind,
            head="yes_no",
            config=config,
            modes=("lasttoken",),
            source="modules.json" if modules else "the card of Qwen3-Reranker",
            max_length=_length(lengths.get("max_seq_length")),
            labels=("relevance",),
            activation=_score_activation(config, told, ("relevance",), model),
            yes_no=_yes_no(folder, modules),
            chat=_chat(lengths, told) if modules else None,
            plain=True,
        )
    raise LoadError(
        f"{architecture} is not served for {kind}: that takes a sequence classifier (an architecture that "
        "ends with ForSequenceClassification)" + (" or Qwen3-Reranker" if kind == "rerank" else "")
    )


def _yes_no(folder: Path, modules: list[tuple[str, str]]) -> tuple[int, int] | None:
    for kind, path in modules[1:]:
        if kind != "LogitScore":
            raise LoadError(f"{folder}/modules.json has a module {kind}, which is not served in a reranker")
        told = read_json(folder / path, "config.json") or {}
        yes, no = told.get("true_token_id"), told.get("false_token_id")
        if not isinstance(yes, int) or not isinstance(no, int):
            raise LoadError(f"{folder / path}/config.json has no true_token_id and false_token_id")
        return yes, no
    return None


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    named = config.get("id2label")
    if isinstance(named, dict) and named:
        return tuple(str(named[key]) for key in sorted(named, key=int))
    count = config.get("num_labels", 2)
    return tuple(f"LABEL_{i}" for i in range(count if isinstance(count, int) else 2))


def _score_activation(
    config: Mapping[str, Any], told: Mapping[str, Any], labels: tuple[str, ...], where: Path
) -> str:
    """What sentence-transformers applies to the logits of a cross-encoder."""
    named = told.get("activation_fn") or (config.get("sentence_transformers") or {}).get("activation_fn")
    named = named or config.get("sbert_ce_default_activation_function")
    if named is None:
        return "Sigmoid" if len(labels) == 1 else "Identity"
    return _activation(named, where)


def _chat(lengths: Mapping[str, Any], told: Mapping[str, Any]) -> Chat:
    message = (lengths.get("modality_config") or {}).get("message") or {}
    prompts, default = told.get("prompts") or {}, told.get("default_prompt_name")
    return Chat(
        variables=(lengths.get("processing_kwargs") or {}).get("chat_template") or {},
        structured=message.get("format") == "structured",
        instruction=str(prompts.get(default) or "") if default else "",
    )


def _class_activation(config: Mapping[str, Any]) -> str:
    """What the pipeline of transformers applies to the logits of a classifier."""
    problem = config.get("problem_type")
    if problem == "regression":
        return "Identity"
    if problem == "multi_label_classification" or len(_labels(config)) == 1:
        return "Sigmoid"
    return "Softmax"


def _architecture(config: Mapping[str, Any]) -> str:
    name: str = (config.get("architectures") or [config.get("model_type", "?")])[0]
    return name


def _length(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
