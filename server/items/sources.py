"""The sources that a model was shown in a conversation, by the numbers under which it was shown them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from server.items.private_half import PrivateItem, private_of


@dataclass(frozen=True, slots=True)
class Source:
    """Something that can be cited: a page of the web, or a passage of a file.

    url: of the page; of a passage, what tells it from others. title: of the page, or the name of the file.
    file_id: None for a page.
    """

    number: int
    url: str
    title: str
    file_id: str | None = None


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
            self._know(Source(said["number"], said["url"], said["title"], said.get("file_id")))
        for said in (private_of(item) or {}).get("container_files", ()):
            self.files[said["path"]] = (said["container_id"], said["file_id"])

    def get(self, number: int) -> Source | None:
        """The source of a number."""
        return self._by_number.get(number)

    def of(self, url: str, title: str, file_id: str | None = None) -> Source:
        """The source that a URL is: one that is known, or a new one with the next number."""
        if (known := self._by_url.get(url)) is not None:
            return known
        return self._know(Source(max(self._by_number, default=0) + 1, url, title, file_id))

    def urls(self) -> list[str]:
        """The URLs of all pages."""
        return [url for url, source in self._by_url.items() if source.file_id is None]

    @property
    def has_files(self) -> bool:
        """Whether any source is a passage of a file."""
        return any(source.file_id is not None for source in self._by_number.values())

    def dump(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The sources and the files as private halves say them."""
        files = [
            {"path": path, "container_id": container, "file_id": file}
            for path, (container, file) in self.files.items()
        ]
        return [asdict(source) for source in self._by_number.values()], files

    def _know(self, source: Source) -> Source:
        self._by_number[source.number] = source
        self._by_url[source.url] = source
        return source
