"""The collector of what is ignored, and its header."""

from __future__ import annotations

import asyncio
from urllib.parse import unquote

from hypothesis import given
from hypothesis import strategies as st

from server.ignored import MAX_HEADER_BYTES, MAX_PATH, MORE, Ignored, collecting, ignore, unread

NAME = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=300).filter(MORE.__ne__)


@given(st.lists(NAME, max_size=60))
def test_the_header_is_bounded_and_ascii_and_says_where_names_are_left_out(names: list[str]) -> None:
    found = Ignored()
    for name in names:
        found.add(name)
    value = found.header()
    assert value.isascii() and len(value) <= MAX_HEADER_BYTES and (value.isprintable() or not value)
    told = value.split(",") if value else []
    whole = not told or told[-1] != MORE
    wanted = list(dict.fromkeys(n if len(n) <= MAX_PATH else n[:MAX_PATH] + MORE for n in names))
    shown = [unquote(name) for name in (told if whole else told[:-1])]
    assert shown == wanted[: len(shown)]
    assert len(shown) == len(wanted) if whole else len(shown) < len(wanted)


def test_a_path_stands_in_the_header_as_it_is_written() -> None:
    with collecting() as found:
        ignore("messages[2].content[0].foo")
        unread({"a,b": 1, "known": 2, "absent": None}, ("known",), "text")
        unread({"top": 1}, ())
    assert found.header() == "messages[2].content[0].foo,text.a%2Cb,top"


def test_a_name_of_which_there_is_too_much_is_not_lost() -> None:
    found = Ignored()
    for number in range(100_000):
        found.add(f"name_{number}")
    assert found.header().startswith("name_0,name_1,") and found.header().endswith(f",{MORE}")


async def test_two_requests_at_once_are_told_apart_and_threads_belong_to_theirs() -> None:
    async def request(name: str) -> str:
        with collecting() as found:
            await asyncio.to_thread(ignore, name)
            await asyncio.sleep(0)
            return found.header()

    assert await asyncio.gather(request("a"), request("b")) == ["a", "b"]
    ignore("outside of a request nobody is told")
