"""Reads citations out of an answer while it is written: `【3】` becomes a link to the third source.

A model is shown sources by their numbers and cites them by markers. Clients are shown a link in the place of
each, where the source is a page of the web; a marker of a passage of a file goes, with the spaces before it,
and an annotation says where it stood. Never is a part of a marker shown: what may become one is held back.
What comes out depends on the text and the sources alone, and not on how the text was cut into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from server.items import Source, Sources
from tools import host_of

# A note behind the numbers, as in `【3†L10-L14】`, says the place in the source; links have none.
_NOTE = r"(?:†[^【】\n]{0,32})?"
_MARKER = re.compile(rf"【(\d{{1,4}}(?:[,、] ?\d{{1,4}}){{0,7}}){_NOTE}】")
_BEGINNING = re.compile(rf"【[\d,、 ]{{0,40}}{_NOTE}\Z")

Annotation = dict[str, Any]

_ENCODED = str.maketrans({char: f"%{ord(char):02X}" for char in "()<>[]\"'`\\ "})
"""What would end a link in Markdown, or begin something else in it."""
_NO_HOST = re.compile(r"[^\w.:-]")


class CitationReader:
    """Finds the citations of one text."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._held = ""
        self._holds_spaces = sources.has_files  # a marker that goes may follow them

    def feed(self, text: str) -> list[str | Source]:
        """Take more of the text; returns what is certain of it by now: texts, and sources in the places of
        their markers. A number that is no source's is left out with its marker."""
        text, self._held = self._held + text, ""
        found: list[str | Source] = []
        plain: list[str] = []
        end = 0
        while (start := text.find("【", end)) >= 0:
            plain.append(text[end:start])
            if (marker := _MARKER.match(text, start)) is not None:
                numbers = map(int, re.findall(r"\d+", marker[1]))
                cited = [source for number in numbers if (source := self._sources.get(number)) is not None]
                if cited:
                    before = "".join(plain)
                    if cited[0].file_id is not None:
                        before = before.rstrip(" ")
                    found += [*filter(None, [before]), *cited]
                    plain.clear()
                end = marker.end()
            elif _BEGINNING.match(text, start) is not None:
                self._held, end = text[start:], len(text)
            else:
                plain.append("【")
                end = start + 1
        plain.append(text[end:])
        said = "".join(plain)
        if self._holds_spaces and said.endswith(" "):
            shown = said.rstrip(" ")
            self._held, said = said[len(shown) :] + self._held, shown
        return [*found, *filter(None, [said])]

    def rest(self) -> str:
        """The text that was held back and has become no marker."""
        held, self._held = self._held, ""
        return held


_ROOT = "sandbox:/mnt/data/"
_OPENING = re.compile(rf"(\]\()?(<)?{_ROOT}")
_BEGUN = re.compile(
    r"(?:\](?:\(<?)?|<)?" + "".join(f"(?:{char}" for char in _ROOT[:-1]) + ")?" * len(_ROOT[:-1]) + r"\Z"
)
_PLAIN = re.compile(r"[^\s()<>\[\]\"'`]*")
_TITLE = re.compile(r"\s+[\"'(]")
_ESCAPED = re.compile(r"\\([!-/:-@\[-`{-~])")
MAX_LINK = 2048
"""Characters of a link's path at most: each byte of one may be written by three."""


class FileLinks:
    """Finds the links to files of containers in one text, which stay as they are."""

    def __init__(self, files: Mapping[str, tuple[str, str]]) -> None:
        """files: ids of the container and the file, by path."""
        self._files = files
        self._held = ""
        self._start = 0  # of what is held, in code points

    def feed(self, text: str, *, last: bool = False) -> list[Annotation]:
        """Take more of the text, or its end; returns the annotations of the links that are whole by now."""
        text = self._held + text
        begun = None if last else _BEGUN.search(text)
        held, at = len(text) if begun is None else begun.start(), 0
        found = []
        while (opening := _OPENING.search(text, at)) is not None:
            ends = _ends(text, opening, last)
            if ends is None:
                held = opening.start()
                break
            at = opening.end()
            for end in ends:
                if (path := self._path(text[opening.end() : end])) is not None:
                    container_id, file_id = self._files[path]
                    found.append(
                        {
                            "type": "container_file_citation",
                            "container_id": container_id,
                            "file_id": file_id,
                            "filename": path.rpartition("/")[2],
                            "start_index": self._start + opening.end() - len(_ROOT),
                            "end_index": self._start + end,
                        }
                    )
                    at = end
                    break
        held = max(held, at)
        self._held = text[held:]
        self._start += held
        return found

    def _path(self, written: str) -> str | None:
        """The file that is meant, if there is one: names may be percent-encoded, and escaped for Markdown."""
        said = unquote(written), unquote(_ESCAPED.sub(r"\1", written))
        return next((path for path in said if path in self._files), None)


def _ends(text: str, opening: re.Match[str], last: bool) -> list[int] | None:
    """Where the path behind the opening of a link may end, in the order in which that is tried; None where
    only more of the text can tell. In a link of Markdown blanks belong to the path, because models write them
    there, and parentheses in pairs; a title may follow. last: no more text comes."""
    start, found = opening.end(), list[int]()
    most = start + MAX_LINK

    def is_known(end: int) -> bool:
        return last or end < len(text) or end == most

    closing = ">" if opening[2] else ")" if opening[1] else None
    if closing is not None:
        end = _run(text, start, most, f"{closing}\n", pairs=closing == ")", blanks=True)
        if not is_known(end):
            return None
        if end < most and text[end : end + 1] == closing:
            inner = text[start:end].rstrip()
            found.append(start + len(inner))
            if (title := _TITLE.search(inner)) is not None:
                found.append(start + title.start())
    end = _run(text, start, most, "<>[]\"'`", pairs=True, blanks=False)
    if not is_known(end):
        return None
    plain = _PLAIN.match(text, start, most)
    assert plain is not None, "it may be empty"
    return [*found, end, plain.end()]


def _run(text: str, start: int, most: int, stops: str, *, pairs: bool, blanks: bool) -> int:
    """The first character of `stops` that is not escaped, or the end of what there is. pairs: parentheses in
    pairs are run over, and a closing one by itself is not. blanks: they are run over, too."""
    depth, at, end = 0, start, min(most, len(text))
    while at < end:
        char = text[at]
        if pairs and char in "()":
            depth += 1 if char == "(" else -1
            if depth < 0:
                break
        elif char in stops or (char.isspace() and not blanks):
            break
        at += 2 if _ESCAPED.match(text, at) is not None else 1
    return min(at, end)


def link(source: Source) -> str:
    """The text that stands for a citation: a link in Markdown, in parentheses."""
    url = source.url.translate(_ENCODED)
    return f"([{_NO_HOST.sub('', host_of(source.url))}]({url}))"
