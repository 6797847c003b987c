"""Parses and checks the bodies of /v1/embeddings, /v1/rerank, /v1/score, /v1/classify and /pooling."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from server.ignored import unread
from server.schema import check_length, missing, mistyped, refuse, shorten
from server.shapes import member, name_others

MAX_INPUTS = 2048
MAX_TOKENS = 300_000
"""Of all inputs of a request together, as the official API has it."""
MAX_CHARACTERS = 16 * MAX_TOKENS
"""The same before it is known how many tokens they are; hardly a token has more."""

MAX_USER = 1024
"""Characters of a `user`, as elsewhere."""

INT32 = 1 << 31

Input = str | tuple[int, ...]
Format = Literal["float", "base64"]

EMBEDDING_FIELDS = ("model", "input", "encoding_format", "dimensions", "user")
NORMS = ("normalize", "normalized", "use_activation")
"""How clients say whether vectors get the length 1: older ones of vLLM, those of Jina, newer ones of vLLM."""
EMBEDDING_EXTENSIONS = (
    *("input_type", "task", "prompt_name", "truncate_prompt_tokens", "truncate", "embedding_type"),
    *NORMS,
)
RERANK_FIELDS = (
    *("model", "query", "documents", "top_n", "return_documents", "max_tokens_per_doc", "instruction"),
    *("truncate_prompt_tokens", "use_activation"),
)
SCORE_PAIRS = (
    ("text_1", "text_2"),
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
)
"""What vLLM calls the two texts."""
SCORE_FIELDS = ("model", "instruction", "truncate_prompt_tokens", "use_activation")
CLASSIFY_FIELDS = ("model", "input", "truncate_prompt_tokens", "use_activation")
POOLING_FIELDS = (*EMBEDDING_FIELDS, *EMBEDDING_EXTENSIONS)

ONE_WAY: Mapping[str, tuple[Any, str]] = {
    "late_chunking": (False, "each text is read by itself"),
    "return_multivector": (False, "each text gets one vector"),
    "add_special_tokens": (
        True,
        "a text gets those that the tokenizer adds, and token ids are taken as they are",
    ),
    "truncation_side": ("right", "texts are cut at their end"),
}
"""Fields of Jina and vLLM that are taken with the value that says what is done anyway: another one would mean
other numbers."""


@dataclass(frozen=True, slots=True)
class EmbeddingsRequest:
    """single: the input was one text, so its path has no index. dimensions: None for the model's own.
    purpose: what `input_type`, `task` or `prompt_name` says, and the field. truncate: as `cut_of` takes it.
    user: for whom the client asks. norm: one of NORMS and what it says.
    """

    model: str | None
    inputs: tuple[Input, ...]
    single: bool
    encoding_format: Format = "float"
    dimensions: int | None = None
    purpose: tuple[str, str] | None = None
    truncate: int | None = None
    user: str | None = None
    norm: tuple[str, bool] | None = None

    @property
    def raw(self) -> bool:
        """Whether what the model computes is wanted without its last norm or its activation."""
        return self.norm is not None and not self.norm[1]

    @property
    def unit(self) -> bool | None:
        """Whether vectors are to have the length 1; None: where those of the model have it."""
        if self.norm is None or self.norm == ("use_activation", True):
            return None
        return self.norm[1]

    def path(self, index: int) -> str:
        """Where an input stands in the body."""
        return "input" if self.single else f"input[{index}]"


@dataclass(frozen=True, slots=True)
class PoolingRequest:
    """What /pooling asks: `embed` or `classify`; None: what the model is for."""

    asked: EmbeddingsRequest
    task: Literal["embed", "classify"] | None


@dataclass(frozen=True, slots=True)
class ClassifyRequest:
    """Texts to be given labels. raw: with the model's own numbers in the place of probabilities."""

    model: str | None
    inputs: tuple[Input, ...]
    single: bool
    truncate: int | None = None
    raw: bool = False


@dataclass(frozen=True, slots=True)
class RerankRequest:
    """Documents to be put in order by a query. raw: the scores are wanted without their activation."""

    model: str | None
    query: str
    documents: tuple[str, ...]
    top_n: int
    return_documents: bool
    instruction: str = ""
    truncate: int | None = None
    per_document: bool = False  # truncate counts tokens of the document, not of the pair
    raw: bool = False


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Pairs of texts to be scored. field: of the second texts; single: there is one of them. raw: as of
    `RerankRequest`."""

    model: str | None
    pairs: tuple[tuple[str, str], ...]
    field: str
    single: bool
    instruction: str = ""
    truncate: int | None = None
    raw: bool = False


def parse_embeddings(body: Mapping[str, Any]) -> EmbeddingsRequest:
    """A body of POST /v1/embeddings, which has no unknown fields. Raises ApiError 400."""
    _require_one_way(body)
    known = (*EMBEDDING_FIELDS, *EMBEDDING_EXTENSIONS)
    for name in body:
        if name not in known and name not in ONE_WAY:
            message = f"Unknown parameter: '{shorten(name)}'. This endpoint takes {', '.join(known)}."
            refuse(shorten(name), message, "unknown_parameter")
    inputs, single = _inputs(body)
    user = read_text(body, "user")
    if user is not None:
        check_length("user", len(user), "string", most=MAX_USER)
    return EmbeddingsRequest(
        read_text(body, "model"),
        inputs,
        single,
        _format(body),
        read_whole(body, "dimensions", least=1),
        _purpose(body),
        read_whole(body, "truncate_prompt_tokens", least=-1) or (-1 if read_flag(body, "truncate") else None),
        user,
        _norm(body),
    )


def parse_pooling(body: Mapping[str, Any]) -> PoolingRequest:
    """A body of POST /pooling. Raises ApiError 400."""
    _require_one_way(body)
    name_others(body, (*POOLING_FIELDS, *ONE_WAY))
    task = body.get("task")
    if task not in (None, "embed", "classify"):
        refuse("task", "Invalid 'task': this server pools for 'embed' and 'classify'.")
    rest = {name: body[name] for name in POOLING_FIELDS if name in body and name != "task"}
    return PoolingRequest(parse_embeddings(rest), task)


def parse_classify(body: Mapping[str, Any]) -> ClassifyRequest:
    """A body of POST /classify. Raises ApiError 400."""
    if body.get("labels") is not None:
        message = "Invalid 'labels': texts get the labels of the model's checkpoint, which /v1/models lists."
        refuse("labels", message, "unsupported_parameter")
    _require_one_way(body)
    name_others(body, (*CLASSIFY_FIELDS, *ONE_WAY))
    inputs, single = _inputs(body)
    truncate = read_whole(body, "truncate_prompt_tokens", least=-1)
    return ClassifyRequest(read_text(body, "model"), inputs, single, truncate, _is_raw(body))


def parse_rerank(body: Mapping[str, Any], *, returns: bool) -> RerankRequest:
    """A body of POST /v1/rerank or /v2/rerank. returns: whether documents are returned where nothing says.
    Raises ApiError 400."""
    _require_one_way(body)
    name_others(body, (*RERANK_FIELDS, *ONE_WAY))
    query = _document(missing("query") if body.get("query") is None else body["query"], "query")
    check_length("query", len(query), "string", 1)
    documents = _documents(body, "documents")
    top_n = read_whole(body, "top_n", least=1) or len(documents)
    shown = read_flag(body, "return_documents")
    per_document = read_whole(body, "max_tokens_per_doc", least=1)
    truncate = read_whole(body, "truncate_prompt_tokens", least=-1)
    return RerankRequest(
        read_text(body, "model"),
        query,
        documents,
        min(top_n, len(documents)),
        returns if shown is None else shown,
        read_text(body, "instruction") or "",
        per_document or truncate,
        bool(per_document),
        _is_raw(body),
    )


def parse_score(body: Mapping[str, Any]) -> ScoreRequest:
    """A body of POST /score: one text and one, one and several, or pairs. Raises ApiError 400."""
    _require_one_way(body)
    one, two = max(SCORE_PAIRS, key=lambda names: sum(body.get(name) is not None for name in names))
    name_others(body, (*SCORE_FIELDS, *ONE_WAY, one, two))
    firsts, seconds = _documents(body, one), _documents(body, two)
    if len(firsts) == 1:
        firsts *= len(seconds)
    if len(firsts) != len(seconds):
        message = (
            f"Invalid '{two}': {len(seconds)} texts for the {len(firsts)} of '{one}'; give as many, or one."
        )
        refuse(two, message)
    return ScoreRequest(
        read_text(body, "model"),
        tuple(zip(firsts, seconds, strict=True)),
        two,
        not isinstance(body[two], list),
        read_text(body, "instruction") or "",
        read_whole(body, "truncate_prompt_tokens", least=-1),
        _is_raw(body),
    )


# ------------------------------------------------------------------------------------------------------------
# Fields


def _inputs(body: Mapping[str, Any]) -> tuple[tuple[Input, ...], bool]:
    """The four official forms: a text, texts, token ids, lists of token ids; and whether it is one input. A
    text in a list may be an object that has it as `text`, which is Jina's form."""
    value = body.get("input")
    if value is None:
        missing("input")
    if isinstance(value, str):
        return (_input(value, "input"),), True
    if not isinstance(value, list):
        mistyped("input", "a string or an array", value)
    check_length("input", len(value), "array", 1, None if _is_ids(value) else MAX_INPUTS)
    if _is_ids(value):
        return (_input(value, "input"),), True
    return tuple(_input(each, f"input[{index}]") for index, each in enumerate(value)), False


def _input(value: Any, path: str) -> Input:
    if isinstance(value, str):
        check_length(path, len(value), "string", 1)
        return value
    if isinstance(value, dict):
        unread(value, ("text",), path)
        text: str = member(value, "text", filled_text, path)
        return text
    if not isinstance(value, list):
        mistyped(path, "a string, an object with a text or an array of token ids", value)
    check_length(path, len(value), "array", 1, MAX_TOKENS)
    for index, each in enumerate(value):
        if type(each) is not int:
            mistyped(f"{path}[{index}]", "an integer", each)
        if not 0 <= each < INT32:
            refuse(f"{path}[{index}]", f"Invalid '{path}[{index}]': not a token id.")
    return tuple(value)


def _is_ids(value: Sequence[Any]) -> bool:
    return bool(value) and type(value[0]) is int


def _documents(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """One document, or a list of them."""
    value = body.get(name)
    if value is None:
        missing(name)
    several = [value] if isinstance(value, str | dict) else value
    if not isinstance(several, list):
        mistyped(name, "an array", value)
    check_length(name, len(several), "array", 1, MAX_INPUTS)
    several_paths = (f"{name}[{index}]" if several is value else name for index in range(len(several)))
    return tuple(map(_document, several, several_paths))


def _document(value: Any, path: str) -> str:
    """A text, or an object that has one as `text`, or in the parts of its `content`."""
    if isinstance(value, dict) and value.get("text") is None and value.get("content") is not None:
        unread(value, ("content",), path)
        return text_of_parts(value["content"], f"{path}.content")
    if isinstance(value, dict):
        unread(value, ("text",), path)
        value, path = value.get("text"), f"{path}.text"
        if value is None:
            missing(path)
    if not isinstance(value, str):
        mistyped(path, "a string or an object with a text", value)
    return value


def text_of_parts(value: Any, path: str) -> str:
    """The text of a list of parts, which are texts alone. Raises ApiError 400."""
    if not isinstance(value, list):
        mistyped(path, "an array", value)
    check_length(path, len(value), "array", 1)
    found = []
    for index, part in enumerate(value):
        where = f"{path}[{index}]"
        if not isinstance(part, dict) or part.get("type") != "text":
            refuse(
                f"{where}.type", f"Invalid '{where}.type': the models of this server take parts of 'text'."
            )
        found.append(member(part, "text", filled_text, where))
    return "\n".join(found)


def filled_text(value: Any, path: str) -> str:
    """A text that is not empty. Raises ApiError 400."""
    if not isinstance(value, str):
        mistyped(path, "a string", value)
    check_length(path, len(value), "string", 1)
    return value


def _format(body: Mapping[str, Any]) -> Format:
    """What `encoding_format` says, or `embedding_type`, as clients of Jina call it."""
    given = {name: body[name] for name in ("encoding_format", "embedding_type") if body.get(name) is not None}
    for name, value in given.items():
        if value not in ("float", "base64"):
            refuse(name, f"Invalid '{name}': expected 'float' or 'base64'.")
    if len({*given.values()}) > 1:
        message = "'encoding_format' and 'embedding_type' do not say the same; give one of them."
        refuse("embedding_type", message, "mutually_exclusive_parameters")
    return "base64" if "base64" in given.values() else "float"


def _require_one_way(body: Mapping[str, Any]) -> None:
    for name, (only, why) in ONE_WAY.items():
        value = body.get(name)
        if value is not None and value != only:
            message = f"Invalid '{name}': only {json.dumps(only)} is served, because {why}."
            refuse(name, message, "unsupported_parameter")


def _norm(body: Mapping[str, Any]) -> tuple[str, bool] | None:
    given = [(name, value) for name in NORMS if (value := read_flag(body, name)) is not None]
    if len(given) > 1:
        message = f"'{given[0][0]}' and '{given[1][0]}' say the same thing; give one of them."
        refuse(given[1][0], message, "mutually_exclusive_parameters")
    return given[0] if given else None


def _is_raw(body: Mapping[str, Any]) -> bool:
    return read_flag(body, "use_activation") is False


def _purpose(body: Mapping[str, Any]) -> tuple[str, str] | None:
    given = [
        (name, value) for name in ("prompt_name", "input_type", "task") if (value := read_text(body, name))
    ]
    if len(given) > 1:
        message = f"'{given[0][0]}' and '{given[1][0]}' say the same thing; give one of them."
        refuse(given[1][0], message, "mutually_exclusive_parameters")
    return given[0] if given else None


def read_text(body: Mapping[str, Any], name: str) -> str | None:
    """A field that is a text, if it is there. Raises ApiError 400."""
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        mistyped(name, "a string", value)
    return value


def read_flag(body: Mapping[str, Any], name: str) -> bool | None:
    """A field that is true or false, if it is there. Raises ApiError 400."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        mistyped(name, "a boolean", value)
    return value


def read_whole(body: Mapping[str, Any], name: str, *, least: int) -> int | None:
    """A field that is a positive whole number, or -1 where that is `least`, if it is there. Raises ApiError
    400."""
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int:
        mistyped(name, "an integer", value)
    if value < least or value == 0 or value >= INT32:
        refuse(name, f"Invalid '{name}': expected {'-1 or ' if least < 0 else ''}a positive integer.")
    return value
