"""Manuals as passages: what the shipped embedder is trained on.

`python -m benchmarks.manuals FOLDER OUT` reads what each folder within FOLDER has (one for each of Debian's
packages of documentation, as `dpkg-deb -x` unpacks it): HTML, plain text, info, manual pages and
dictionaries. OUT gets two texts a line of JSON, of every package equally many at most: what stands for a
passage, such as its heading or a sentence of it, and the passage. The packages of `benchmarks/manuals.txt`
were taken; the manuals that `benchmarks.file_search` asks about are not among them.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import random
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tools.documents.markup import markdown_of

MOST = 12_000
"""Passages of one package: no manual is most of what is learned."""

FILES = 1_500
"""Files that are read of one package, drawn by chance."""

SHORT, LONG = 20, 110
"""Words of a passage."""

MAX_BYTES = 400_000
"""Of a file; of a dictionary, which is one file, a hundred times as many."""

_COMMON = frozenset(
    re.findall("[a-z]+", "the of and to a in is that for it as with are be on by this or an from")
)
_MACRO = re.compile(r"^[.'].*$|\\[fF](?:\[[^]]*\]|\(..|.)|\\[&|^]|\\s[+-]?\d", re.M)
_SECTION = re.compile(r"^\.S[HS] *\"?([^\"\n]*)\"?$", re.M)
_LINK = re.compile(r"!?\[([^]]*)\]\([^)]*\)")
_SENTENCE = re.compile(r"(?<=[.?!])\s+(?=[A-Z])")

Pair = tuple[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes passages of manuals.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    packages = sorted(each for each in options.folder.iterdir() if each.is_dir())
    seen: set[bytes] = set()
    with ProcessPoolExecutor(2) as pool, options.out.open("w", encoding="utf-8") as out:
        for package, pairs in zip(packages, pool.map(read_package, packages), strict=True):
            count = 0
            for pair in pairs:
                known = hashlib.blake2b(pair[1].encode(), digest_size=8).digest()
                if known not in seen:
                    seen.add(known)
                    out.write(json.dumps(pair, ensure_ascii=False) + "\n")
                    count += 1
            print(f"{package.name}: {count}", flush=True)


def read_package(folder: Path) -> list[Pair]:
    """What stands for a passage, and the passage, of the files of a package."""
    chance = random.Random(folder.name)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    chance.shuffle(files)
    pairs: list[Pair] = []
    for path in files[:FILES]:
        if len(pairs) > 2 * MOST:
            break
        for heading, paragraphs in _sections(path):
            pairs += _pairs(heading, paragraphs, chance)
    chance.shuffle(pairs)
    return pairs[:MOST]


def _sections(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Headings, each with the paragraphs below it."""
    name = path.name.removesuffix(".gz").removesuffix(".dz")
    manual = "/man/man" in str(path)
    html = name.endswith((".html", ".htm", ".page"))
    if not (html or manual or re.search(r"\.(?:txt|info(?:-\d+)?|dict|rst|md|pod)$", name)):
        return
    data = path.read_bytes()
    if path.suffix in (".gz", ".dz"):
        data = gzip.decompress(data)
    title: str | None = None
    text = data[: MAX_BYTES * (100 if name.endswith(".dict") else 1)].decode("utf-8", "replace")
    if html:
        text, title = markdown_of(text)
        text = _LINK.sub(r"\1", text)
    elif manual:
        text = _MACRO.sub("", _SECTION.sub(r"\n\n# \1\n\n", text)).replace("\\-", "-")
        title = name.rpartition(".")[0]
    heading = title or ""
    paragraphs: list[str] = []
    for block in re.split(r"\n\s*\n", text):
        if block.startswith("#"):
            if paragraphs:
                yield heading, paragraphs
            told, _, rest = block.lstrip("# ").partition("\n")
            heading, paragraphs = f"{title}: {told}" if title and told not in title else told, []
            block = rest
        line = " ".join(block.split())
        if _is_prose(line):
            paragraphs.append(line)
    if paragraphs:
        yield heading, paragraphs


def _is_prose(text: str) -> bool:
    """Whether a paragraph is English, and neither a table nor code."""
    words = text.split()
    if len(words) < 6 or sum(map(str.isalpha, text)) < 0.7 * len(text):
        return False
    return sum(word.lower() in _COMMON for word in words) >= 0.12 * len(words)


def _pairs(heading: str, paragraphs: list[str], chance: random.Random) -> Iterator[Pair]:
    words = " ".join(paragraphs).split()
    at = 0
    while len(words) - at >= SHORT:
        size = chance.randint(SHORT, LONG)
        passage = " ".join(words[at : at + size])
        at += size
        sentences = [each for each in _SENTENCE.split(passage) if 5 <= len(each.split()) <= 30]
        short = heading
        if sentences and (not heading or chance.random() < 0.5):
            short = chance.choice(sentences)
        if short:
            yield short[:200], passage


if __name__ == "__main__":
    main()
