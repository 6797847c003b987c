"""Reads the files that messages and outputs of tools name, for models that read text.

The words that a file becomes are the private half of its item (`server.items.file_texts`): they are made
once, when the item comes in, and stored with it. So later turns and resumed runs show the model the same
text, whatever becomes of the file or of the parsers.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from server.config import THREADED_BYTES
from server.errors import ApiError
from server.input_files.sources import SOON, FoundFile, RequestFiles, in_time, not_read
from server.items import FILE_PARTS, Item, input_files_of, with_file_texts
from server.schema import refuse, shorten
from server.threads import begin_large_request
from storage import Storage
from tools import Document, Egress, ReadersBusy, ReadingLimits, UnreadableDocument, read_document

MAX_FILES = 32
"""In one request."""

MAX_CHARS = 4_000_000
"""Of the text of all files of one request together: more than any context has room for."""

LIMITS = ReadingLimits(max_chars=MAX_CHARS)

KEPT_CHARS = 16_000_000
"""Of files read before, the latest ones: clients that keep a conversation themselves send its files with
every turn. Each owner's are looked for alone: how long an answer takes tells nothing of what others sent."""

ENTRY_CHARS = 500
"""What is counted of each besides its text, its name and its address."""

Key = tuple[str, str, str, str | None]
"""Owner, digest of the bytes, name, and URL of a file that was read."""

_PAGES = {"pptx": "slide", "xlsx": "sheet"}
_LINE_ENDS = r"\n\f\x85\u2028\u2029"
_FORGED = re.compile(
    rf"([{_LINE_ENDS}][^\S{_LINE_ENDS}]*\\*)\[(?=(?:end of )?file:|(?:page|slide|sheet) \d+\])", re.IGNORECASE
)
"""The beginning of a line that reads as one of those that `words` writes."""


class InputFiles:
    """The files in items, as texts. egress: which addresses may be reached for `file_url`."""

    def __init__(self, storage: Storage, egress: Egress) -> None:
        self._storage, self._egress = storage, egress
        self._known: OrderedDict[Key, str] = OrderedDict()
        self._num_chars = 0

    async def read(
        self, owner: str, items: Sequence[Item], *, param: str = "input", paths: Iterable[str] | None = None
    ) -> list[Item]:
        """Normalised items, of which those with files hold what these say; one whose files were read
        before stays as it is. paths: of the files, in their order, where they are not those of items in
        `param`.

        Raises ApiError: 404 for an unknown `file_id`; 400 for what is not one file, cannot be fetched or
        read, or is too large; 429 where too many files of the owner wait to be read; 503 where one could not
        be read at this moment, or all of them not in time.
        """
        named = None if paths is None else [*paths]
        reading = self._read(owner, items, param, iter(named) if named else None)
        return await in_time(reading, "files", named[0] if named else param)

    async def _read(
        self, owner: str, items: Sequence[Item], param: str, named: Iterator[str] | None
    ) -> list[Item]:
        sources = RequestFiles(self._storage, self._egress, owner)
        done, num_files, num_chars = list(items), 0, 0
        for index, item in enumerate(items):
            texts: dict[int, str] = {}
            for position, part in input_files_of(item):
                path = next(named) if named else f"{param}[{index}].{FILE_PARTS[item['type']]}[{position}]"
                num_files += 1
                if num_files > MAX_FILES:
                    refuse(path, f"Invalid '{path}': a request may have at most {MAX_FILES} files.")
                texts[position] = await self._text(part, sources, owner, path)
                num_chars += len(texts[position])
                if num_chars > MAX_CHARS:
                    message = (
                        f"Invalid '{path}': the files of a request may have {MAX_CHARS} characters of text."
                    )
                    refuse(path, message, "file_too_large")
            if texts:
                done[index] = with_file_texts(item, texts)
        if num_chars > THREADED_BYTES:
            begin_large_request()
        return done

    async def _text(self, part: Mapping[str, Any], sources: RequestFiles, owner: str, path: str) -> str:
        source = await sources.find(part, path)
        key = (owner, source.digest, source.filename, source.url)
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            return known
        try:
            document = await read_document(
                source.content, source.filename, url=source.url, owner=owner, limits=LIMITS
            )
        except UnreadableDocument as why:
            _refuse(why, source, path)
        text = words(document, source.filename)
        if key not in self._known:  # else another request has read it meanwhile
            self._known[key] = text
            self._num_chars += _num_chars(key, text)
        while self._num_chars > KEPT_CHARS:
            self._num_chars -= _num_chars(*self._known.popitem(last=False))
        return text


def words(document: Document, filename: str) -> str:
    """A file in a prompt: its name, its text, and before each page its number. Neither the text nor the name
    can write such a line: a backslash stands before its bracket."""
    noun = _PAGES.get(document.kind, "page")
    name = shorten("".join(char for char in filename if char.isprintable()), 255)
    name = re.sub(r"[\[\]]", r"\\\g<0>", name)
    lines = [f"[file: {name}]"]
    for page in document.pages:
        if page.number is not None:
            lines.append(f"[{noun} {page.number}]")
        lines.append(_FORGED.sub(r"\1\\[", f"\n{page.shown(noun)}")[1:])
    return "\n".join([*lines, f"[end of file: {name}]"])


def _num_chars(key: Key, text: str) -> int:
    """What is counted of a file that was read."""
    _, _, filename, url = key
    return len(text) + len(filename) + len(url or "") + ENTRY_CHARS


def _refuse(why: UnreadableDocument, source: FoundFile, path: str) -> NoReturn:
    message = f"The file '{shorten(source.filename)}' cannot be read. {why.message}"
    if isinstance(why, ReadersBusy) and why.own:
        raise ApiError(429, message, code="rate_limit_exceeded", param=path, headers=SOON)
    match why.code:
        case "unsupported_file":
            refuse(path, message, "unsupported_file")
        case "invalid_file":
            refuse(path, message, "invalid_file")
        case "too_large":
            refuse(path, message, "file_too_large")
        case "server_error":
            raise not_read(message, path)
