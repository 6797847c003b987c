"""Citations in a text that is being written: markers become links, and no part of a marker is shown."""

from __future__ import annotations

import itertools
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import Delta, Done, Text, TokenLogprob
from server.items import Source, Sources, with_private
from server.runs.events import Assembler, fold
from server.runs.events.citations import CitationReader, FileLinks, link
from tests.support import wire

TIDES = {"number": 1, "url": "https://bay.example/tides_(new)?a=1", "title": "Tides"}
MOON = {"number": 12, "url": "http://127.0.0.1:8080/moon", "title": "Moon"}
SEARCH = with_private(
    {"id": "ws_1", "type": "web_search_call", "status": "completed", "action": {"type": "search"}},
    {"output": "", "sources": [TIDES, MOON]},
)
SOURCES = Sources([SEARCH])
BAY = "([bay.example](https://bay.example/tides_%28new%29?a=1))"
MOON_LINK = "([127.0.0.1:8080](http://127.0.0.1:8080/moon))"


def read(*pieces: str) -> str:
    """What a text becomes, sources in angle brackets."""
    reader = CitationReader(SOURCES)
    found = [each for piece in pieces for each in reader.feed(piece)]
    return "".join(f"<{each.number}>" if isinstance(each, Source) else each for each in found) + reader.rest()


@pytest.mark.parametrize(
    ("text", "becomes"),
    [
        ("High【1】.", "High<1>."),
        ("High【1】【12】", "High<1><12>"),
        ("High【1, 12】 and 【12、1】", "High<1><12> and <12><1>"),
        ("High【1†L3-L5】", "High<1>"),
        ("High【9】.", "High."),
        ("High【9,1】.", "High<1>."),
        ("【note】【】【1 2】【1", "【note】【】【1 2】【1"),
        ("【【1】】", "【<1>】"),
        ("【12345】", "【12345】"),
        ("【1†" + "x" * 40 + "】", "【1†" + "x" * 40 + "】"),
        ("[1] (1)", "[1] (1)"),
    ],
)
def test_markers_are_read(text: str, becomes: str) -> None:
    assert read(text) == becomes
    assert read(*text) == becomes, "in whatever pieces the text comes"


@given(st.text("ab 【】†1290,、\n", max_size=60), st.lists(st.integers(0, 60), max_size=8))
def test_it_does_not_matter_how_a_text_is_cut(text: str, cuts: list[int]) -> None:
    ends = sorted({*(cut for cut in cuts if cut < len(text)), len(text)})
    pieces = [text[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    assert read(*pieces) == read(text)


def test_no_part_of_a_marker_is_shown() -> None:
    reader = CitationReader(SOURCES)
    assert [reader.feed(piece) for piece in ("tide ", "【", "1", "2")] == [["tide "], [], [], []]
    assert reader.feed("】.") == [Source(**MOON), "."]
    assert link(Source(**TIDES)) == BAY


def test_a_link_stays_one_whatever_its_source_is_called() -> None:
    hostile = Source(1, "https://a.example/x](javascript:1)<b> '`\\", "T")
    assert link(hostile) == "([a.example](https://a.example/x%5D%28javascript:1%29%3Cb%3E%20%27%60%5C))"


def logprob(token: str) -> TokenLogprob:
    return TokenLogprob(0, token, token.encode(), -1.0)


def events(*deltas: Delta, **settings: Any) -> tuple[Assembler, list[dict[str, Any]]]:
    assembler = Assembler(b"secret", context=[SEARCH], **settings)
    drafts = [draft for delta in deltas for draft in assembler.feed([delta])]
    return assembler, orjson.loads(orjson.dumps(drafts))  # log probabilities are encoded


def test_a_citation_is_an_annotation_over_its_link() -> None:
    assembler, drafts = events(Text("Flut 🌊【1"), Text("】 und【12】."), Done("stop"))
    (item,) = wire.check_items(drafts)
    part = item["content"][0]
    assert part["text"] == f"Flut 🌊 {BAY} und {MOON_LINK}."
    assert [part["text"][note["start_index"] : note["end_index"]] for note in part["annotations"]] == [
        BAY, MOON_LINK,
    ]  # fmt: skip
    assert [(note["url"], note["title"]) for note in part["annotations"]] == [
        (TIDES["url"], "Tides"), (MOON["url"], "Moon"),
    ]  # fmt: skip
    added = [draft for draft in drafts if draft["type"] == "response.output_text.annotation.added"]
    assert [draft["annotation"] for draft in added] == part["annotations"]
    assert [draft["annotation_index"] for draft in added] == [0, 1]
    assert fold(drafts) == (assembler.output, set())
    names = [draft["type"].removeprefix("response.output_text.") for draft in drafts]
    assert names.index("done") > max(n for n, name in enumerate(names) if name == "annotation.added")
    for draft in drafts:
        assert "【" not in str(draft)


def test_log_probabilities_come_with_the_text_that_their_tokens_become() -> None:
    said = (Text(token, (logprob(token),)) for token in ("a", "【", "1", "】", " b", "【9", "】", "c"))
    _, drafts = events(*said, Done("stop"), logprobs=True)
    part = wire.check_items(drafts)[0]["content"][0]
    deltas = [draft for draft in drafts if draft["type"] == "response.output_text.delta"]
    assert [(draft["delta"], [entry["token"] for entry in draft["logprobs"]]) for draft in deltas] == [
        ("a", ["a"]), (f" {BAY}", ["【", "1", "】"]), (" b", [" b"]), ("c", ["【9", "】", "c"]),
    ]  # fmt: skip
    assert part["text"] == f"a {BAY} bc" and len(part["logprobs"]) == 8


def test_a_stream_that_ends_in_a_marker_says_what_was_held_back() -> None:
    for end in ([Done("stop")], [Done("length")], []):
        assembler, drafts = events(Text("High 【1"), *end)
        drafts += assembler.interrupt()
        assert wire.check_items(drafts)[0]["content"][0]["text"] == "High 【1"


def test_what_a_cut_stream_has_said_is_read_back() -> None:
    _, drafts = events(Text("a【1】 b"))
    output, unfinished = fold(drafts)
    going_on = Assembler(b"secret", context=[SEARCH], output=output, unfinished=unfinished)
    drafts += going_on.interrupt()
    assert wire.check_items(drafts)[0]["content"][0]["annotations"][0]["start_index"] == 2


def test_without_sources_and_under_a_shape_texts_are_left_alone() -> None:
    deltas = (Text("a【1"), Text("】"), Done("stop"))
    plain = Assembler(b"secret")
    untouched = [plain.feed([delta]) for delta in deltas][-1]
    assert plain.output[0]["content"][0]["text"] == "a【1】" and untouched
    shaped, _ = events(*deltas, cites=False)
    assert shaped.output[0]["content"][0]["text"] == "a【1】"


BOOK = Sources()
BOOK.of("file-1#0-1", "tides.md", "file-1")
BOOK.of("https://bay.example/", "Bay")


def read_book(*pieces: str) -> str:
    """What a text becomes that may cite a passage of a file (1) and a page of the web (2)."""
    reader = CitationReader(BOOK)
    found = [each for piece in pieces for each in reader.feed(piece)]
    return "".join(f"<{each.number}>" if isinstance(each, Source) else each for each in found) + reader.rest()


@pytest.mark.parametrize(
    ("text", "becomes"),
    [
        ("High 【1】.", "High<1>."),
        ("High  【1】 【1】 and so on ", "High<1><1> and so on "),
        ("High 【2】 or low 【1,2】.", "High <2> or low<1><2>."),
        ("High 【9】.", "High ."),
    ],
)
@given(cuts=st.lists(st.integers(0, 30), max_size=4))
def test_a_marker_of_a_file_goes_with_the_spaces_before_it(text: str, becomes: str, cuts: list[int]) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert read_book(*(text[a:b] for a, b in itertools.pairwise(places))) == becomes


NAMES = ("x y.bin", "a(b).txt", "a.txt", "a", "d/(1) é.csv", 'q"t.txt', "p)q", "my_file.csv", "o(p")
FILES = {name: ("cntr_1", f"cfile_{number}") for number, name in enumerate(NAMES)}


def cited(*pieces: str) -> list[tuple[str, str]]:
    """What is cited in a text: the place in it, and the file."""
    links, text = FileLinks(FILES), "".join(pieces)
    found = [each for piece in pieces for each in links.feed(piece)] + links.feed("", last=True)
    by_id = {ids[1]: name for name, ids in FILES.items()}
    for each in found:
        assert each["filename"] == by_id[each["file_id"]].rpartition("/")[2]
    return [(text[each["start_index"] : each["end_index"]], by_id[each["file_id"]]) for each in found]


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("[f](sandbox:/mnt/data/x y.bin)", [("x y.bin", "x y.bin")]),
        ("[f](sandbox:/mnt/data/x%20y.bin)", [("x%20y.bin", "x y.bin")]),
        ("[f](<sandbox:/mnt/data/x y.bin>)!", [("x y.bin", "x y.bin")]),
        ("[f](sandbox:/mnt/data/a(b).txt)", [("a(b).txt", "a(b).txt")]),
        ("(see [f](sandbox:/mnt/data/a(b).txt))", [("a(b).txt", "a(b).txt")]),
        (r"[f](sandbox:/mnt/data/a\(b\).txt)", [(r"a\(b\).txt", "a(b).txt")]),
        (r"[f](sandbox:/mnt/data/p\)q)", [(r"p\)q", "p)q")]),
        (r"[f](sandbox:/mnt/data/my\_file.csv)", [(r"my\_file.csv", "my_file.csv")]),
        ("[f](sandbox:/mnt/data/d/(1) %C3%A9.csv 'the (1)')", [("d/(1) %C3%A9.csv", "d/(1) é.csv")]),
        ('[f](sandbox:/mnt/data/a.txt "a smile :)")', [("a.txt", "a.txt")]),
        ('[f](sandbox:/mnt/data/q"t.txt)', [('q"t.txt', 'q"t.txt')]),
        ("[f](sandbox:/mnt/data/a.txt and more)", [("a.txt", "a.txt")]),
        (r"[f](sandbox:/mnt/data/o\(p)", [(r"o\(p", "o(p")]),
        ("[f](sandbox:/mnt/data/x\ny.bin)", []),
        ("sandbox:/mnt/data/a(b).txt and (sandbox:/mnt/data/a.txt)", [("a(b).txt",) * 2, ("a.txt",) * 2]),
        ("sandbox:/mnt/data/a(new)", [("a", "a")]),
        ("`sandbox:/mnt/data/a.txt`", [("a.txt", "a.txt")]),
        ("[f](sandbox:/mnt/data/no [g](sandbox:/mnt/data/x y.bin)", [("x y.bin", "x y.bin")]),
        ("[f](sandbox:/mnt/data/x " + "y" * 3000 + ") sandbox:/mnt/data/a", [("a", "a")]),
        ("sandbox:/mnt/data/x y.bin", []),
        ("sandbox:/mnt/data", []),
    ],
)
def test_links_to_files_are_found(text: str, places: list[tuple[str, str]]) -> None:
    wanted = [(f"sandbox:/mnt/data/{place}", name) for place, name in places]
    assert cited(text) == wanted
    assert cited(*text) == wanted, "in whatever pieces the text comes"


@given(
    st.lists(st.sampled_from([*'[]()<>\\ \n"sx', "](", "sandbox:/mnt/data/", "%20", *NAMES]), max_size=25),
    st.data(),
)
def test_it_does_not_matter_how_a_text_with_links_is_cut(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    ends = sorted({*cuts, len(text)})
    whole = cited(text)
    assert cited(*(text[begin:end] for begin, end in zip([0, *ends], ends, strict=False))) == whole
    assert cited(*text) == whole
