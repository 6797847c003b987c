"""Tables of `antiphon.toml` that are read as a whole, such as `[mcp]`.

A value that is a secret is not written into the file but comes from a variable of the environment or from a
file of its own.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from server.masking import bare

T = TypeVar("T", bound="SettingsTable")


def _address(value: str) -> str:
    if not value.startswith(("http://", "https://")):
        raise ValueError(f"{bare(value)!r} is no address: give http://HOST or https://HOST")
    return value


def header_value(value: str) -> str:
    """The value, where a header can have it. Raises ValueError, which does not repeat it."""
    if not (value.isascii() and value.isprintable() and value == value.strip()):
        raise ValueError("a header's value is printable ASCII")
    return value


def _header_text(value: str) -> str:
    return header_value(value.strip())  # a file of Windows leaves a CR at its end


HeaderText = Annotated[str, AfterValidator(_header_text)]
"""What is sent in a header, without blanks around it."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])(?:iB)?", re.IGNORECASE)


def _bytes(value: Any) -> Any:
    """A number of bytes may be written with K, M, G or T, which multiply it by 1024 once, twice and so on."""
    if not isinstance(value, str) or re.fullmatch(r"\s*-?\d+\s*", value):
        return value
    if (written := _SIZE.fullmatch(value.strip())) is None:
        raise ValueError(f"{value!r} is no number of bytes, such as 4096, 64K, 2M, 4G or 1T")
    number, suffix = written.groups()
    try:
        return int(float(number) * 1024 ** ("KMGT".index(suffix.upper()) + 1))
    except OverflowError:
        raise ValueError("it is more bytes than can be counted") from None


Bytes = Annotated[int, BeforeValidator(_bytes)]
"""A number of bytes, also written as 64K, 2M, 4G or 1T."""

_NUMBER = re.compile(r"\s*[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?\s*", re.IGNORECASE)
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
"""Seconds of each unit in which a time is written."""


def _seconds(value: Any) -> Any:
    """A number of seconds may be written in minutes, hours, days or weeks."""
    if not isinstance(value, str) or _NUMBER.fullmatch(value):
        return value
    if (written := _SPAN.fullmatch(value.strip())) is None:
        raise ValueError(f"{value!r} is no time, such as 90, 30s, 5m, 12h, 7d or 2w")
    return float(written[1]) * UNITS_S[written[2]]


Seconds = Annotated[float, BeforeValidator(_seconds), Field(allow_inf_nan=False)]
"""A number of seconds, also written as 30s, 5m, 12h, 7d or 2w."""

Address = Annotated[str, AfterValidator(_address)]
"""A server's, with its scheme."""


class SettingsTable(BaseModel):
    """A table, or one within it, its secrets read."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


def read_table(shape: type[T], name: str, table: Any, env: Mapping[str, str]) -> T:
    """The table of this name as it stands in the file, with `{ env = "NAME" }` and `{ file = "PATH" }` in
    place of a text replaced by what is there. Raises ValueError, which names the place."""
    try:
        return shape.model_validate(_resolved(table, env, name))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join([name, *map(str, first["loc"])])
        told = first["msg"].removeprefix("Value error, ")
        if first["type"] == "missing":
            told = "it must be given"
        elif first["type"] == "extra_forbidden":
            *within, stranger = first["loc"]
            meant = nearest(str(stranger), _names_in(shape, within))
            told = f"it is not known here{f'; did you mean {meant!r}?' if meant else ''}"
        raise ValueError(f"{place}: {told}") from None


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known word that a misspelt one most likely means; None where none is near. cutoff: how like it must
    be, from 0 to 1."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), None)


def _names_in(shape: Any, place: Sequence[str | int]) -> Sequence[str]:
    """The names that a table within a table may have. place: as pydantic says where an error is."""
    parts = list(_parts(shape))
    tables = [each for each in (shape, *parts) if isinstance(each, type) and issubclass(each, SettingsTable)]
    if not place:
        return [name for table in tables for name in table.model_fields]
    step = str(place[0])
    named = [table.model_fields[step].annotation for table in tables if step in table.model_fields]
    # What has no such field is a mapping or a list, whose values are all of one kind.
    return [name for part in named or parts for name in _names_in(part, place[1:])]


def _parts(shape: Any) -> Iterator[Any]:
    for part in get_args(shape):
        yield part
        yield from _parts(part)


def _resolved(value: Any, env: Mapping[str, str], path: str) -> Any:
    """A value of the file with what its secrets refer to. path: where it stands, for the ValueError."""
    if isinstance(value, dict) and value.keys() in ({"env"}, {"file"}) and _is_text(value):
        ((kind, name),) = value.items()
        if kind == "env":
            if name not in env:
                raise ValueError(f"{path}: there is no variable {name!r} in the environment")
            return env[name]
        try:
            return Path(os.path.expanduser(name)).read_text("utf-8").strip()
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from None
    if isinstance(value, dict):
        return {key: _resolved(part, env, f"{path}.{key}") for key, part in value.items()}
    return value


def _is_text(value: Mapping[str, Any]) -> bool:
    return all(isinstance(part, str) for part in value.values())
