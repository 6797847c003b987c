"""Parses and checks the bodies of /v1/embeddings, /v1/rerank, /v1/score, /v1/classify and /pooling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from server.ignored import unread
from server.schema import check_length, missing, mistyped, refuse, shorten

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
EMBEDDING_EXTENSIONS = ("input_type", "task", "prompt_name", "truncate_prompt_tokens")
RERANK_FIELDS = (
    *("model", "query", "documents", "top_n", "return_documents", "max_tokens_per_doc", "instruction"),
    "truncate_prompt_tokens",
)
SCORE_FIELDS = ("model", "text_1", "text_2", "queries", "documents", "instruction", "truncate_prompt_tokens")
CLASSIFY_FIELDS = ("model", "input", "truncate_prompt_tokens")
POOLING_FIELDS = (*EMBEDDING_FIELDS, *EMBEDDING_EXTENSIONS)


@dataclass(frozen=True, slots=True)
class EmbeddingsRequest:
    """single: the input was one text, so its path has no index. dimensions: None for the model's own.
    purpose: what `input_type`, `task` or `prompt_name` says, and the field. truncate: as `cut_of` takes it.
    user: for whom the client asks.
    """

    model: str | None
    inputs: tuple[Input, ...]
    single: bool
    encoding_format: Format = "float"
    dimensions: int | None = None
    purpose: tuple[str, str] | None = None
    truncate: int | None = None
    user: str | None = None

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
    """Texts to be given labels."""

    model: str | None
    inputs: tuple[Input, ...]
    single: bool
    truncate: int | None = None


@dataclass(frozen=True, slots=True)
class RerankRequest:
    """Documents to be put in order by a query. truncate_field: where `truncate` comes from."""

    model: str | None
    query: str
    documents: tuple[str, ...]
    top_n: int
    return_documents: bool
    instruction: str = ""
    truncate: int | None = None
    truncate_field: str = "truncate_prompt_tokens"
    per_document: bool = False  # truncate counts tokens of the document, not of the pair


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Pairs of texts to be scored. field: of the second texts; single: there is one of them."""

    model: str | None
    pairs: tuple[tuple[str, str], ...]
    field: str
    single: bool
    instruction: str = ""
    truncate: int | None = None


def parse_embeddings(body: Mapping[str, Any]) -> EmbeddingsRequest:
    """A body of POST /v1/embeddings, which has no unknown fields. Raises ApiError 400."""
    known = (*EMBEDDING_FIELDS, *EMBEDDING_EXTENSIONS)
    for name in body:
        if name not in known:
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
        read_whole(body, "truncate_prompt_tokens", least=-1),
        user,
    )


def parse_pooling(body: Mapping[str, Any]) -> PoolingRequest:
    """A body of POST /pooling. Raises ApiError 400."""
    unread(body, POOLING_FIELDS)
    task = body.get("task")
    if task not in (None, "embed", "classify"):
        refuse("task", "Invalid 'task': this server pools for 'embed' and 'classify'.")
    rest = {name: body[name] for name in POOLING_FIELDS if name in body and name != "task"}
    return PoolingRequest(parse_embeddings(rest), task)


def parse_classify(body: Mapping[str, Any]) -> ClassifyRequest:
    """A body of POST /classify. Raises ApiError 400."""
    unread(body, CLASSIFY_FIELDS)
    inputs, single = _inputs(body)
    truncate = read_whole(body, "truncate_prompt_tokens", least=-1)
    return ClassifyRequest(read_text(body, "model"), inputs, single, truncate)


def parse_rerank(body: Mapping[str, Any], *, returns: bool) -> RerankRequest:
    """A body of POST /v1/rerank or /v2/rerank. returns: whether documents are returned where nothing says.
    Raises ApiError 400."""
    unread(body, RERANK_FIELDS)
    query = _required_text(body, "query")
    documents = _documents(body, "documents")
    top_n = read_whole(body, "top_n", least=1) or len(documents)
    shown = body.get("return_documents")
    if shown is not None and not isinstance(shown, bool):
        mistyped("return_documents", "a boolean", shown)
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
        "max_tokens_per_doc" if per_document else "truncate_prompt_tokens",
        bool(per_document),
    )


def parse_score(body: Mapping[str, Any]) -> ScoreRequest:
    """A body of POST /score: one text and one, one and several, or pairs. Raises ApiError 400."""
    unread(body, SCORE_FIELDS)
    one = "queries" if body.get("queries") is not None else "text_1"
    two = "documents" if body.get("documents") is not None else "text_2"
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
        isinstance(body[two], str),
        read_text(body, "instruction") or "",
        read_whole(body, "truncate_prompt_tokens", least=-1),
    )


# ------------------------------------------------------------------------------------------------------------
# Fields


def _inputs(body: Mapping[str, Any]) -> tuple[tuple[Input, ...], bool]:
    """The four official forms: a text, texts, token ids, lists of token ids; and whether it is one input."""
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
    if not isinstance(value, list):
        mistyped(path, "a string or an array of token ids", value)
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
    """A text, texts, or objects that have one as `text`."""
    value = body.get(name)
    if value is None:
        missing(name)
    several = [value] if isinstance(value, str) else value
    if not isinstance(several, list):
        mistyped(name, "an array", value)
    check_length(name, len(several), "array", 1, MAX_INPUTS)
    found = []
    for index, each in enumerate(several):
        path = f"{name}[{index}]"
        if isinstance(each, dict):
            unread(each, ("text",), path)
            each, path = each.get("text"), f"{path}.text"
            if each is None:
                missing(path)
        if not isinstance(each, str):
            mistyped(path, "a string or an object with a text", each)
        found.append(each)
    return tuple(found)


def _format(body: Mapping[str, Any]) -> Format:
    value = body.get("encoding_format")
    if value not in (None, "float", "base64"):
        refuse("encoding_format", "Invalid 'encoding_format': expected 'float' or 'base64'.")
    return "base64" if value == "base64" else "float"


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


def _required_text(body: Mapping[str, Any], name: str) -> str:
    value = read_text(body, name)
    if value is None:
        missing(name)
    check_length(name, len(value), "string", 1)
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
