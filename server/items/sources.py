"""The sources that a model was shown in a conversation, by the numbers under which it was shown them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from server.items.private_half import PrivateItem, private_of


@dataclass(frozen=True, slots=True)
class Source:
    """Something on the web that can be cited."""

    number: int
    url: str
    title: str


class Sources:
    """The sources of a conversation. Private halves say them, as `sources`; a URL keeps its number. files: of
    containers, which private halves say as `container_files`."""

    def __init__(self, items: Iterable[Mapping[str, Any]] = ()) -> None:
        self._by_number: dict[int, Source] = {}
        self._by_url: dict[str, Source] = {}
        self.files: dict[str, tuple[str, str]] = {}  # ids of the container and the file, by path
        for item in items:
            if isinstance(item, PrivateItem):  # of thousands few are
                self.add(item)

    def __bool__(self) -> bool:
        return bool(self._by_number)

    def add(self, item: Mapping[str, Any]) -> None:
        """Take in the sources of an item."""
        for said in (private_of(item) or {}).get("sources", ()):
            self._know(Source(said["number"], said["url"], said["title"]))
        for said in (private_of(item) or {}).get("container_files", ()):
            self.files[said["path"]] = (said["container_id"], said["file_id"])

    def get(self, number: int) -> Source | None:
        """The source of a number."""
        return self._by_number.get(number)

    def of(self, url: str, title: str) -> Source:
        """The source that a URL is: one that is known, or a new one with the next number."""
        if (known := self._by_url.get(url)) is not None:
            return known
        return self._know(Source(max(self._by_number, default=0) + 1, url, title))

    def urls(self) -> list[str]:
        """The URLs of all sources."""
        return [*self._by_url]

    def _know(self, source: Source) -> Source:
        self._by_number[source.number] = source
        self._by_url[source.url] = source
        return source
