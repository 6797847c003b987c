"""Keys that seal, in storage: one for each number, whoever makes it."""

from __future__ import annotations

import asyncio

from storage import SealingKey, Storage, open_storage
from tests.support.postgres import Postgres


def key(number: int, first: bytes = b"a") -> SealingKey:
    return SealingKey(number, first * 64, created_at=number)


async def test_keys_come_back_in_their_order(storage: Storage) -> None:
    assert await storage.sealing_keys() == ()
    assert await storage.add_sealing_key(key(1))
    assert await storage.add_sealing_key(key(2))
    assert await storage.sealing_keys() == (key(1), key(2))


async def test_a_number_is_given_once(storage: Storage) -> None:
    assert await storage.add_sealing_key(key(1))
    assert not await storage.add_sealing_key(key(1, b"b"))
    assert await storage.sealing_keys() == (key(1),)


async def test_of_two_processes_one_makes_the_key(postgres: Postgres) -> None:
    url = await postgres.fresh()
    both = [await open_storage(url, runner=name) for name in ("one", "two")]
    for number in range(1, 9):
        made = await asyncio.gather(
            *(each.add_sealing_key(key(number, bytes([65 + at]))) for at, each in enumerate(both))
        )
        assert sorted(made) == [False, True]
        first, second = [await each.sealing_keys() for each in both]
        assert first == second and first[-1].secret[0] == 65 + made.index(True)
    for each in both:
        await each.close()


def test_a_key_is_never_printed() -> None:
    assert "aaaa" not in repr(key(1)) and "secret" not in repr(key(1))
