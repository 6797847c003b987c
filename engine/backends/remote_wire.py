"""Writes and reads what goes between an engine's process and the servers before it, over a Unix socket.

A message is a JSON array on a line, its first element the word that says what it is; requests and their token
ids are written as they are, so that nothing is lost on the way that an engine in the process would be told.
Nothing that is read can be more than a value: whoever may write to the socket can have no code run.
"""

from __future__ import annotations

import math
from array import array
from base64 import b64decode, b64encode
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from itertools import chain
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np
import orjson
from numpy.typing import NDArray

from engine.step import RowLogprobs, RowOutput
from engine.types import (
    ConstraintError,
    DeadlineExceeded,
    Done,
    EngineDead,
    EngineError,
    EngineUnavailable,
    GenerateRequest,
    MediaSpan,
    Picture,
    PromptTooLong,
    QueueFull,
    RenderError,
    RequestError,
    RequestFailed,
    Timing,
)

if TYPE_CHECKING:
    from engine.pooling import TextInput
    from engine.speech import Window

T = TypeVar("T")


# ------------------------------------------------------------------------------------------------------------
# Messages


def message(word: str, *parts: object) -> bytes:
    """One message. Dataclasses become objects, sets and tuples arrays, arrays of C ints base64."""
    return orjson.dumps((word, *parts), default=_plain, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"


def read_line(line: bytes) -> list[Any]:
    """The array of a message."""
    parts: list[Any] = orjson.loads(line)
    return parts


def _plain(value: object) -> object:
    if isinstance(value, array):
        return ints_text(value)
    if isinstance(value, Collection):
        return list(value)
    raise TypeError(f"{type(value).__name__} cannot be sent")


def ints_text(ids: Sequence[int]) -> str:
    """Token ids as text: four bytes each, in base64, which is written and read at once."""
    return b64encode(ids if isinstance(ids, array) else array("i", ids)).decode()


def read_ints(text: str) -> array[int]:
    """The token ids of `ints_text`."""
    return array("i", b64decode(text))


def read(kind: type[T], value: Any) -> T:
    """A value of a type from what JSON has left of it: of a dataclass, a tuple, a set, a mapping, a union of
    one of these with None, or something that JSON has itself."""
    return cast(T, _read(kind, value))


def _read(kind: Any, value: Any) -> Any:
    if value is None or kind is Any:
        return value
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        options = [option for option in get_args(kind) if option is not NoneType]
        return _read(options[0], value) if len(options) == 1 else value
    if is_dataclass(kind):
        hints = _hints(cast(type, kind))
        return cast(Any, kind)(**{name: _read(hints[name], each) for name, each in value.items()})
    if origin is tuple:
        of = get_args(kind)
        if len(of) == 2 and of[1] is Ellipsis:
            return tuple(value) if of[0] in _ITSELF else tuple(_read(of[0], each) for each in value)
        return tuple(_read(each, one) for each, one in zip(of, value, strict=True))
    if origin is frozenset:
        return frozenset(value)
    return value


_ITSELF = (int, str, float, bool)


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)


# ------------------------------------------------------------------------------------------------------------
# Requests


def request_form(request: GenerateRequest, *, pixels: bool = True) -> dict[str, Any]:
    """A request as it is sent. What only whoever reads the tokens needs stays where they are read. pixels:
    whether its images go along, or only which ones they are."""
    bare = replace(request, prompt_ids=(), prefix=(), prefix_logprobs=(), media=())
    form = {field.name: getattr(bare, field.name) for field in fields(bare)}
    form["media"] = [_media_form(span, pixels) for span in request.media]
    return form | {"prompt_ids": ints_text(request.prompt_ids), "prefix": ints_text(request.flat_prefix)}


def _media_form(span: MediaSpan, pixels: bool) -> dict[str, Any]:
    picture = span.picture
    return {
        "offset": span.offset,
        "length": span.length,
        "content_hash": b64encode(span.content_hash).decode(),
        "png": b64encode(picture.png if pixels else b"").decode(),
        "digest": b64encode(picture.digest).decode(),
        "options": picture.options,
        "places": ints_text(span.places),
        "grid": span.grid,
        "alone": span.alone,
    }


def _read_media(form: Mapping[str, Any]) -> MediaSpan:
    options = tuple((name, value) for name, value in form["options"])
    return MediaSpan(
        form["offset"],
        form["length"],
        b64decode(form["content_hash"]),
        Picture(b64decode(form["png"]), b64decode(form["digest"]), options),
        tuple(read_ints(form["places"])),
        None if form["grid"] is None else tuple(form["grid"]),
        form["alone"],
    )


def read_request(form: Mapping[str, Any]) -> GenerateRequest:
    """The request of `request_form`; its prefix is one piece."""
    prefix = tuple(read_ints(form["prefix"]))
    bare = read(GenerateRequest, {**form, "prompt_ids": (), "prefix": (), "media": ()})
    return replace(
        bare,
        prompt_ids=read_ints(form["prompt_ids"]),
        prefix=(prefix,) if prefix else (),
        media=tuple(map(_read_media, form["media"])),
    )


# ------------------------------------------------------------------------------------------------------------
# Outputs


def merged(outputs: Sequence[RowOutput]) -> RowOutput:
    """Several outputs of one request as one."""
    if len(outputs) == 1:
        return outputs[0]
    first, last = outputs[0], outputs[-1]
    return first._replace(
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        logprobs=tuple(row for output in outputs for row in output.logprobs),
        finish=last.finish,
        error=last.error,
    )


def output_message(handle: int, output: RowOutput) -> bytes:
    """What one request has got. Most have nothing but tokens."""
    more: dict[str, Any] = {}
    if output.finish is not None:
        more["finish"] = (output.finish.reason, output.finish.stop)
    if output.error is not None:
        more["error"] = error_form(output.error)
    if output.logprobs:
        more["logprobs"] = output.logprobs
    if output.cached_tokens is not None:
        more["cached_tokens"] = output.cached_tokens
    if output.prompt_logprobs is not None:
        more["prompt_logprobs"] = _scores_form(output.prompt_logprobs)
    if output.timing is not None:
        more["timing"] = output.timing
    return message("output", handle, output.token_ids, *([more] if more else []))


def read_output(parts: Sequence[Any]) -> RowOutput:
    """The output of `output_message`, of what stands behind its word. Scores of its prompt are `Scores`."""
    handle, token_ids, *rest = parts
    if not rest:
        return RowOutput(handle, tuple(token_ids))
    more = rest[0]
    finish, error, scored = more.get("finish"), more.get("error"), more.get("prompt_logprobs")
    return RowOutput(
        handle,
        tuple(token_ids),
        finish=None if finish is None else Done(*finish),
        logprobs=tuple(map(_row, more.get("logprobs", ()))),
        error=None if error is None else read_error(error),
        cached_tokens=more.get("cached_tokens"),
        prompt_logprobs=None if scored is None else Scores(*scored),
        timing=read(Timing, more.get("timing")),
    )


@dataclass(frozen=True, slots=True)
class Scores(Collection[RowLogprobs]):
    """The scores of a prompt, as they came: whoever goes through them reads them. Those of a long prompt take
    a second, which the loop that they come to has not got.

    num_rows: of them. num_top: of each row, how many best ids it has. ids, logprobs: of each row its own one,
    then the best.
    """

    num_rows: int
    num_top: str
    ids: str
    logprobs: str

    def __len__(self) -> int:
        return self.num_rows

    def __iter__(self) -> Iterator[RowLogprobs]:
        ids, values = read_ints(self.ids).tolist(), array("d", b64decode(self.logprobs)).tolist()
        at = 0
        for count in read_ints(self.num_top):
            end = at + 1 + count
            yield RowLogprobs(ids[at], values[at], tuple(ids[at + 1 : end]), tuple(values[at + 1 : end]))
            at = end

    def __contains__(self, row: object) -> bool:
        return any(row == each for each in self)


def _scores_form(rows: Collection[RowLogprobs]) -> tuple[int, str, str, str]:
    """What `Scores` are made of: text that is written and read at once."""
    ids = chain.from_iterable((row.token_id, *row.top_ids) for row in rows)
    values = chain.from_iterable((row.logprob, *row.top_logprobs) for row in rows)
    num_top = ints_text([len(row.top_ids) for row in rows])
    return len(rows), num_top, ints_text(array("i", ids)), b64encode(array("d", values)).decode()


def _row(form: Mapping[str, Any]) -> RowLogprobs:
    top = tuple(map(_logprob, form["top_logprobs"]))
    return RowLogprobs(form["token_id"], _logprob(form["logprob"]), tuple(form["top_ids"]), top)


def _logprob(value: float | None) -> float:
    """JSON has no infinity: a token that a mask bans is written as null."""
    return -math.inf if value is None else value


# ------------------------------------------------------------------------------------------------------------
# Pooling


def text_form(text: TextInput) -> dict[str, Any]:
    """A tokenized text as it is sent."""
    types = None if text.types is None else _array_text(text.types, np.int32)
    ids = _array_text(text.ids, np.int32)
    return {"ids": ids, "types": types, "num_prompt": text.num_prompt, "raw": text.raw}


def read_text(form: Mapping[str, Any]) -> TextInput:
    """The text of `text_form`."""
    from engine.pooling import TextInput  # what it needs is loaded by those alone who have such models

    types = None if form["types"] is None else np.frombuffer(b64decode(form["types"]), np.int32)
    ids = np.frombuffer(b64decode(form["ids"]), np.int32)
    return TextInput(ids, types, form["num_prompt"], form["raw"])


def floats_text(vector: NDArray[np.float32]) -> str:
    """The very bits of a vector, as text."""
    return _array_text(vector, np.float32)


def read_floats(text: str) -> NDArray[np.float32]:
    """The vector of `floats_text`."""
    return np.frombuffer(b64decode(text), np.float32)


def _array_text(values: NDArray[Any], kind: type[np.generic]) -> str:
    return b64encode(np.ascontiguousarray(values, kind).tobytes()).decode()


# ------------------------------------------------------------------------------------------------------------
# Speech


def window_form(window: Window) -> dict[str, Any]:
    """A window of sound as it is sent."""
    form = {field.name: getattr(window, field.name) for field in fields(window)}
    return form | {"samples": b64encode(window.samples).decode()}


def read_window(form: Mapping[str, Any]) -> Window:
    """The window of `window_form`."""
    from engine.speech import Window

    return read(Window, {**form, "samples": b64decode(form["samples"])})


# ------------------------------------------------------------------------------------------------------------
# Errors

_ERRORS: Mapping[str, type[EngineError]] = {
    kind.__name__: kind
    for kind in (
        *(ConstraintError, DeadlineExceeded, EngineDead, EngineUnavailable, PromptTooLong, QueueFull),
        *(RenderError, RequestError, RequestFailed),
    )
}

Form = dict[str, Any]


def error_form(error: EngineError) -> Form:
    """An engine's error as it is sent."""
    known = type(error).__name__ in _ERRORS
    form: Form = {"type": type(error).__name__ if known else "RequestFailed", "args": [str(error)]}
    match error:
        case PromptTooLong():
            form["args"] = [error.num_tokens, error.limit, error.at_least]
        case ConstraintError():
            form |= {"args": [error.reason], "given": {"tool": error.tool, "place": error.place}}
        case QueueFull():
            form["given"] = {"retry_after_s": error.retry_after_s}
        case RenderError():
            pass
        case RequestError():
            form["given"] = {"param": error.param}
    return form


def read_error(form: Mapping[str, Any]) -> EngineError:
    """The error of `error_form`."""
    return _ERRORS[form["type"]](*form["args"], **form.get("given", {}))
