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


_FILE = re.compile(r"sandbox:/mnt/data/([^\s()<>\[\]\"'`]+)")
_FILE_BEGINNING = re.compile(r"s(?:a(?:n(?:d(?:b(?:o(?:x(?::[^\s()<>\[\]\"'`]*)?)?)?)?)?)?)?\Z")


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
        beginning = None if last else _FILE_BEGINNING.search(text)
        end = len(text) if beginning is None else beginning.start()
        found = []
        for link in _FILE.finditer(text, 0, end):
            path = unquote(link[1])
            if (ids := self._files.get(path)) is not None:
                found.append(
                    {
                        "type": "container_file_citation",
                        "container_id": ids[0],
                        "file_id": ids[1],
                        "filename": path.rpartition("/")[2],
                        "start_index": self._start + link.start(),
                        "end_index": self._start + link.end(),
                    }
                )
        self._held = text[end:]
        self._start += end
        return found


def link(source: Source) -> str:
    """The text that stands for a citation: a link in Markdown, in parentheses."""
    url = source.url.translate(_ENCODED)
    return f"([{_NO_HOST.sub('', host_of(source.url))}]({url}))"
