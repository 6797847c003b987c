"""KV on disk behind a whole engine: its answers are those of one without, whatever happens to the disk."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import shutil
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine import LoadError, LocalEngine, core
from engine.backends import local
from engine.core import loop as loops
from engine.core import tiering
from engine.core.kv_cache import BlockKey, KVCache
from engine.core.tiering import Tiering
from engine.kernels.cpu import open_library
from engine.step import LayerGroup
from engine.tiers import DiskTier, rates
from engine.tiers import disk as disks
from tests.support.kv_traces import Trace, answer, ask, flood, slow_arithmetic

Find = Callable[[str], Path]
Make = Callable[..., Awaitable[LocalEngine]]
LONG = tuple(b"What does the cat say when the dog is away, and why does it say so?")  # 4 blocks of 16


@pytest.fixture(autouse=True)
def worthwhile() -> Iterator[None]:
    with slow_arithmetic():
        yield


@pytest.fixture
def folder(checkpoint: Find) -> Path:
    return checkpoint("qwen3")


@pytest.fixture
async def make(folder: Path, tmp_path: Path) -> AsyncIterator[Make]:
    """Engines on one folder for what is saved; all are checked and closed."""
    made: list[LocalEngine] = []

    async def one(model: Path = folder, **settings: Any) -> LocalEngine:
        fields = {"num_blocks": 40, "num_threads": 1, "kv_disk_folder": tmp_path / "kv", "max_num_seqs": 8}
        engine = LocalEngine(model, **{**fields, **settings})
        made.append(engine)
        await engine.start()
        return engine

    yield one
    for engine in made:
        if not engine._closed:
            await engine.settled()
            engine.check_integrity()
            await engine.close()


async def test_what_was_evicted_comes_back_from_disk(make: Make) -> None:
    engine, plain = await make(), await make(kv_disk_bytes=0)
    first, _ = await answer(engine, ask(LONG))
    await flood(engine)
    going_on = ask((*LONG, *first, 33, 34))
    expected, none = await answer(plain, going_on)
    found, cached = await answer(engine, going_on)
    assert (found, cached, none) == (expected, 64, 0)
    stats = engine.stats().tier
    assert (stats.state, stats.restored_tokens_total, stats.loading) == ("on", 64, 0)
    assert engine.stats().hit_tokens == {"pool": 0, "disk": 64}
    await answer(engine, going_on)
    assert engine.stats().hit_tokens == {"pool": 64, "disk": 64} and engine.stats().prefix_hits_total == 128
    assert stats.saved_seconds_total > 0 and plain.stats().tier.state == "off"


async def test_what_is_on_disk_is_found_after_a_restart(make: Make) -> None:
    engine = await make()
    first, _ = await answer(engine, ask(LONG))
    await engine.close()
    again = await make()
    assert await again.saved_names() == {"r"}
    assert (await answer(again, ask((*LONG, *first, 33))))[1] == 64


@pytest.mark.parametrize("name", ["mistral", "qwen2-windows", "gemma2"])
async def test_windows_are_restored_with_what_they_reach(make: Make, checkpoint: Find, name: str) -> None:
    model = checkpoint(name)
    engine, plain = await make(model), await make(model, kv_disk_bytes=0)
    prompt = tuple(LONG * 2)
    first, _ = await answer(engine, ask(prompt))
    await engine.close()
    again = await make(model)
    going_on = ask((*prompt, *first, 33, 34))
    expected, _ = await answer(plain, going_on)
    assert await answer(again, going_on) == (expected, 128)
    earlier = ask((*prompt[:70], 33, 34))  # its window is not there, so it is computed
    assert (await answer(again, earlier))[0] == (await answer(plain, earlier))[0]


async def test_int8_comes_back_close_by(make: Make) -> None:
    engine = await make(kv_tier_dtype="int8")
    assert "exact_resume" not in engine.info.capabilities
    first, _ = await answer(engine, ask(LONG))
    await flood(engine)
    assert (await answer(engine, ask((*LONG, *first, 33))))[1] == 64
    exact = await make()
    assert (await answer(exact, ask((*LONG, *first, 33))))[1] == 0, "what is rounded is never read as exact"


async def test_bytes_of_the_pool_come_back_as_they_were(make: Make, checkpoint: Find) -> None:
    model = checkpoint("qwen3-64")
    if open_library() is None:
        pytest.skip("no kernels on this machine")
    kept = {"kv_cache_dtype": "int8"}
    engine, plain = await make(model, **kept), await make(model, kv_disk_bytes=0, **kept)
    first, _ = await answer(engine, ask(LONG))
    await engine.close()
    again = await make(model, **kept)
    going_on = ask((*LONG, *first, 33, 34))
    assert await answer(again, going_on) == ((await answer(plain, going_on))[0], 64)
    await again.close()
    exact = await make(model)
    assert (await answer(exact, going_on))[1] == 0, "what is rounded is never read as exact"


async def test_owners_salts_and_other_settings_share_nothing(make: Make) -> None:
    engine = await make()
    await answer(engine, ask(LONG, owner="a"))
    await engine.close()
    again = await make()
    for fields in ({"owner": "b"}, {"owner": "a", "cache_salt": "s"}):
        assert (await answer(again, ask((*LONG, 33), saved_as=None, **fields)))[1] == 0
    other = await make(block_size=8)
    assert (await answer(other, ask((*LONG, 33), owner="a")))[1] == 0
    assert (await answer(again, ask((*LONG, 33), owner="a")))[1] == 64


async def test_what_was_computed_under_another_configuration_is_computed_again(
    make: Make, folder: Path, tmp_path: Path
) -> None:
    """The weights are the same, and keys would be rotated otherwise."""

    def altered(name: str, **fields: Any) -> Path:
        model = tmp_path / name
        shutil.copytree(folder, model)
        config = json.loads((model / "config.json").read_text()) | fields
        (model / "config.json").write_text(json.dumps(config, sort_keys=True, indent=1))
        return model

    engine = await make()
    first, _ = await answer(engine, ask(LONG))
    await engine.close()
    going_on = ask((*LONG, *first, 33, 34), saved_as=None)
    same, other = altered("same", transformers_version="9"), altered("other", rope_theta=123.0)
    rotated, plain = await make(other), await make(other, kv_disk_bytes=0)
    assert await answer(rotated, going_on) == await answer(plain, going_on)
    assert rotated.info.fingerprint == engine.info.fingerprint, "a run that was interrupted can go on"
    assert (await answer(await make(same), going_on))[1] == 64


async def test_several_that_begin_alike_wait_for_one_read(make: Make) -> None:
    engine = await make()
    first, _ = await answer(engine, ask(LONG))
    await engine.close()
    again = await make()
    results = await asyncio.gather(*(answer(again, ask((*LONG, *first, 40 + i))) for i in range(5)))
    assert [cached for _, cached in results] == [64] * 5
    assert again.stats().tier.restored_tokens_total == 64
    assert again.stats().hit_tokens == {"pool": 4 * 64, "disk": 64}


async def test_save_names_what_has_ended_already(make: Make) -> None:
    engine = await make()
    request = ask(LONG, saved_as=None)
    tokens, _ = await answer(engine, request)
    assert await engine.saved_names() == frozenset()
    engine.save("late", request, tokens)
    assert await engine.saved_names() == {"late"}
    await flood(engine)
    assert (await answer(engine, ask((*LONG, *tokens, 33), saved_as=None)))[1] == 64


async def test_forgetting_removes_it_and_what_runs_does_not_save_it_again(make: Make) -> None:
    engine = await make()
    await answer(engine, ask(LONG, owner="a"))
    await answer(engine, ask(LONG, owner="b", saved_as="other"))
    running = asyncio.create_task(answer(engine, ask((50, *LONG), 60, saved_as="going")))
    while not engine.stats().running:
        await asyncio.sleep(0)
    engine.forget(["r", "going"])
    await running
    assert await engine.saved_names() == {"other"}
    engine.forget_owner("b")
    assert await engine.saved_names() == frozenset()
    assert engine.stats().tier.disk_bytes == 0
    assert engine.stats().tier.evictions["forgotten"] == 8


async def test_an_aborted_request_leaves_no_block_behind(make: Make) -> None:
    engine = await make()
    await answer(engine, ask(LONG))
    await flood(engine)
    tier = engine._loop.tiering
    assert tier is not None
    gate = threading.Event()
    read = tier.disk._read
    tier.disk._read = lambda *args: gate.wait(30) and read(*args)  # type: ignore[method-assign,return-value,func-returns-value]
    waiting = [asyncio.create_task(answer(engine, ask((*LONG, 33)))) for _ in range(3)]
    while engine.stats().tier.loading < 3:
        await asyncio.sleep(0)
    waiting[0].cancel()
    waiting[1].cancel()
    async with asyncio.timeout(30):
        while engine.stats().tier.loading > 1:
            await asyncio.sleep(0)
    engine.check_integrity()
    gate.set()
    assert (await waiting[2])[0]
    await engine.settled()
    engine.check_integrity()
    assert engine.stats().tier.loading == 0 and engine.stats().kv_blocks_used == 0
    hits = engine.stats().hit_tokens
    assert sum(hits.values()) == engine.stats().prefix_hits_total == 64, "of the one that was not aborted"


async def test_a_disk_that_hangs_is_left_alone_and_nobody_waits_long(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, plain = await make(), await make(kv_disk_bytes=0)
    await answer(engine, ask(LONG))
    await flood(engine)
    monkeypatch.setattr(rates.Rates, "compute_s", lambda *_: 0.01)
    tier = engine._loop.tiering
    assert tier is not None
    gate = threading.Event()
    monkeypatch.setattr(disks, "open_private", lambda *_: gate.wait(60) or pytest.fail("it hung"))
    began = time.monotonic()
    got = await answer(engine, ask((*LONG, 33)))
    assert got == (await answer(plain, ask((*LONG, 33))))
    assert time.monotonic() - began < 20
    stats = engine.stats().tier
    assert stats.state == "slow" and stats.restores_refused == {"late": 1}
    await engine.settled()
    engine.check_integrity()
    assert engine.stats().kv_blocks_used == 0, "the hanging read holds no blocks"
    gate.set()


async def test_an_engine_that_waits_wakes_up_for_what_is_late(make: Make) -> None:
    engine = await make()
    tier = engine._loop.tiering
    assert tier is not None
    late: Any = SimpleNamespace(deadline=time.monotonic() - 1.0)  # it passed after the last look
    with engine._loop.lock:
        tier._loading[7] = late
        assert tier.next_deadline == late.deadline == engine._loop.scheduler.next_deadline
        del tier._loading[7]
        assert tier.next_deadline is None


async def test_what_is_read_more_slowly_than_computed_is_computed(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await make()
    await answer(engine, ask(LONG))
    await flood(engine)
    monkeypatch.setattr(rates.Rates, "read_s", lambda *_: 1e9)
    assert (await answer(engine, ask((*LONG, *LONG), saved_as="x")))[1] == 0
    assert engine.stats().tier.restores_refused == {"slower": 1}
    assert engine.stats().tier.saves_refused == {"slower": 1}


async def test_a_slow_spell_of_the_disk_passes(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as nothing is read, only a measurement can tell that it is over."""
    engine = await make()
    await answer(engine, ask(LONG))
    await flood(engine)
    tier = engine._loop.tiering
    assert tier is not None
    disk = tier.disk
    monkeypatch.setattr(rates.Rates, "read_s", lambda self, _: 1e9 if self.bytes_per_s < 100 else 1e-9)
    for asked, refused in (
        (ask((*LONG, 33), saved_as=None), lambda: engine.stats().tier.restores_refused),
        (ask((50, *LONG, *LONG), saved_as="x"), lambda: engine.stats().tier.saves_refused),
    ):
        disk.rates.read(1 << 20, 1e6, anew=True)
        assert (await answer(engine, asked))[1] == 0 and refused() == {"slower": 1}
        disk._measure_at = 0.0
        disk.call(disk._upkeep)
        await engine.saved()
        assert disk.rates.bytes_per_s > 100
        await flood(engine)
    assert (await answer(engine, ask((*LONG, 33), saved_as=None)))[1] == 64


async def test_what_computes_in_a_moment_is_not_saved(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await make()
    await answer(engine, ask(LONG))
    monkeypatch.setattr(tiering, "LEAST_S", 1e9)
    await answer(engine, ask((*LONG, *LONG), saved_as="more"))
    assert await engine.saved_names() == {"r", "more"}, "what is there stays for it"
    assert engine.stats().tier.blocks == 4 and engine.stats().tier.saves_refused == {"small": 1}
    engine.forget(["r"])
    assert await engine.saved_names() == {"more"} and engine.stats().tier.blocks == 4


async def test_a_flipped_bit_never_gives_another_answer(make: Make, tmp_path: Path) -> None:
    engine, plain = await make(), await make(kv_disk_bytes=0)
    request = ask((*LONG, 33, 34))
    expected, _ = await answer(plain, request)
    rng = random.Random(0)
    damaged = 0
    for _ in range(24):
        await answer(engine, ask(LONG))
        await engine.saved()
        (path,) = (tmp_path / "kv").rglob("*.kv")
        data = bytearray(path.read_bytes())
        data[rng.choice([rng.randrange(len(data)), rng.randrange(700)])] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        await flood(engine, 6)
        got, cached = await answer(engine, request)
        assert got == expected
        damaged += cached < 64
        engine.forget(["r"])
        await engine.saved()
    assert damaged > 5


async def test_pins_give_way_to_whoever_runs(make: Make) -> None:
    """Prompts that are restored side by side need more blocks than there are."""
    engine = await make(num_blocks=34)
    prompts = [(60 + i, *LONG * 3) for i in range(4)]
    for i, prompt in enumerate(prompts):
        await answer(engine, ask(prompt, 2, saved_as=f"r{i}"))
    await engine.saved()
    plain = await make(kv_disk_bytes=0)
    for _ in range(3):
        got = await asyncio.gather(*(answer(engine, ask((*p, 33), 60, saved_as=None)) for p in prompts))
        want = await asyncio.gather(*(answer(plain, ask((*p, 33), 60, saved_as=None)) for p in prompts))
        assert [tokens for tokens, _ in got] == [tokens for tokens, _ in want]
        engine.check_integrity()


async def test_what_is_another_databases_is_left_alone(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder that is nobody's yet, as those from before are, becomes that of the first who asks."""
    caplog.set_level(logging.INFO)
    for database in (None, "a" * 32, "a" * 32):
        engine = await make(kv_disk_database=database)
        await answer(engine, ask(LONG))
        await engine.saved()
        assert await engine.saved_names() == {"r"} and engine.stats().tier.state == "on"
    told = [text for text in caplog.messages if text.startswith("saved KV on disk: ")]
    assert len(told) == 3 and " GiB" not in told[1].partition(";")[0], "a few blocks are not 0.0 GiB"
    files = {path: path.stat() for path in (tmp_path / "kv").rglob("*") if path.is_file()}
    other = await make(kv_disk_database="b" * 32)
    tokens, _ = await answer(other, ask(LONG))
    assert tokens and await other.saved_names() == frozenset()
    other.forget(["r"])
    other.forget_owner("o")
    await other.saved()
    tier = other.stats().tier
    assert (tier.state, tier.disk_bytes_limit) == ("foreign", 0) and "kv_disk_folder" in tier.why
    assert [text for text in caplog.messages if "another database" in text] == [
        f"KV is not saved on disk: {tier.why}"
    ]
    assert {path: path.stat() for path in (tmp_path / "kv").rglob("*") if path.is_file()} == files


async def test_why_nothing_is_saved_is_told(make: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    cases: tuple[tuple[dict[str, Any], str, str], ...] = (
        ({"kv_disk_bytes": 0}, "off", "kv_disk_bytes is 0"),
        ({"prefix_caching": False}, "off", "prefix_caching is false"),
        ({"kv_disk_folder": tmp_path / "file"}, "failed", "File exists"),
    )
    for settings, state, why in cases:
        tier = (await make(**settings)).stats().tier
        assert tier.state == state and why in tier.why


async def test_a_disk_without_room_is_told_at_the_start(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(DiskTier, "_free", lambda _: 4096)
    await make(kv_disk_bytes=10 << 30)
    [record] = [record for record in caplog.records if "saved KV on disk: " in record.getMessage()]
    assert record.levelname == "WARNING"
    assert "its disk has room for 2 KiB of the 10 GiB that kv_disk_bytes allows" in record.getMessage()


async def test_two_engines_on_one_folder_read_what_the_other_wrote(make: Make) -> None:
    one, other = await make(), await make()
    tokens, _ = await answer(one, ask(LONG))
    await one.saved()
    assert await other.saved_names() == {"r"}
    assert (await answer(other, ask((*LONG, *tokens, 33), saved_as="s")))[1] == 64
    await other.saved()
    other.forget(["r", "s"])
    await other.saved()
    assert await one.saved_names() == frozenset() and one.stats().tier.disk_bytes == 0


async def test_closing_while_it_saves_does_not_last(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "SAVING_S", 0.1)
    engine = await make()
    tier = engine._loop.tiering
    assert tier is not None
    gate = threading.Event()
    tier.disk._store = lambda *_: gate.wait(60)  # type: ignore[method-assign,assignment]
    await answer(engine, ask(LONG))
    began = time.monotonic()
    await engine.close()
    assert time.monotonic() - began < 10
    gate.set()


@pytest.mark.parametrize("given_up", [False, True])
async def test_closing_while_it_loads_ends_the_threads_of_the_disk(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given_up: bool
) -> None:
    """The disk's threads are there before the model counts as loaded; given_up: nobody waits for that."""
    built, gate = threading.Event(), threading.Event()
    build, before = core.build_loop, set(threading.enumerate())

    def held(*args: Any, **fields: Any) -> core.EngineLoop:
        loop = build(*args, **fields)
        built.set()
        assert gate.wait(60)
        return loop

    def left() -> list[str]:
        new = set(threading.enumerate()) - before
        return [thread.name for thread in new if thread.name.startswith(("kv-", "engine"))]

    monkeypatch.setattr(core, "build_loop", held)
    engine = LocalEngine(folder, num_blocks=40, num_threads=1, kv_disk_folder=tmp_path / "kv")
    starting = asyncio.create_task(engine.start())
    await asyncio.to_thread(built.wait, 60)
    assert {"kv-copy", "kv-write", "kv-read"} <= set(left())
    if given_up:
        starting.cancel()
    await engine.close()
    gate.set()
    await asyncio.gather(starting, return_exceptions=True)
    async with asyncio.timeout(20):
        while left():
            await asyncio.sleep(0.01)


async def test_a_draft_model_that_cannot_be_loaded_leaves_no_threads_of_the_disk(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threading.enumerate())
    monkeypatch.setattr(loops, "open_assistant", lambda *_, **__: pytest.fail("no such model"))
    settings: dict[str, Any] = {"num_blocks": 40, "num_threads": 1, "kv_disk_folder": tmp_path / "kv"}
    engine = LocalEngine(folder, draft_model=folder, **settings)
    with pytest.raises(LoadError, match="no such model"):
        await engine.start()
    await engine.close()
    assert not [t.name for t in set(threading.enumerate()) - before if t.name.startswith("kv-")]


KILLED = """
import asyncio, sys
from pathlib import Path
from engine import LocalEngine
from engine.core import tiering
from engine.tiers import rates
from tests.support.kv_traces import answer, ask

tiering.LEAST_S = 0.0
rates.Rates.compute_s = lambda _, begin, end: float(end - begin)

async def main():
    engine = LocalEngine(Path(sys.argv[1]), num_blocks=40, num_threads=1, kv_disk_folder=Path(sys.argv[2]))
    await engine.start()
    prompt = tuple(map(int, sys.argv[3].split(",")))
    print("begin", flush=True)
    for turn in range(1000):
        tokens, _ = await answer(engine, ask(prompt, saved_as=f"turn {turn}"))
        prompt = (*prompt, *tokens)[:300] if len(prompt) < 290 else (turn % 60 + 33, *prompt[1:100])

asyncio.run(main())
"""


@pytest.mark.long
async def test_what_a_killed_process_left_is_whole_or_not_there(
    make: Make, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, rng = await make(kv_disk_bytes=0), random.Random(0)
    for _ in range(3):
        numbers = ",".join(map(str, LONG))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", KILLED, str(folder), str(tmp_path / "kv"), numbers),
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None and await process.stdout.readline() == b"begin\n"
        wanted = rng.randint(1, 12)
        while process.returncode is None and len(list((tmp_path / "kv").rglob("*.kv"))) < wanted:
            await asyncio.sleep(0.002)
        process.kill()
        await process.wait()
        engine = await make()
        prompt = LONG
        for _ in range(6):
            got, _ = await answer(engine, ask(prompt, saved_as=None))
            assert got == (await answer(plain, ask(prompt, saved_as=None)))[0]
            prompt = (*prompt, *got)
        assert engine.stats().tier.restored_tokens_total >= 64 and engine.stats().tier.restores_refused == {}
        for name in await engine.saved_names():
            engine.forget([name])
        with monkeypatch.context() as patch:
            patch.setattr("engine.tiers.shelf.YOUNG_S", -1.0)  # blocks that were killed before their name
            assert await engine.saved_names() == frozenset() and engine.stats().tier.disk_bytes == 0
        await engine.close()


@pytest.mark.parametrize("full", [True, False], ids=["full attention too", "windows only"])
def test_how_far_a_prompt_can_be_restored_is_found_in_one_look_at_each_block(full: bool) -> None:
    """The engine's thread looks, under its lock, at as many blocks as the context has."""
    drawn, size, looks = random.Random(3), 4, 0
    windows: list[int | None] = [None, 17, 30] if full else [17, 30]
    groups = [LayerGroup((at,), 1, 8, window) for at, window in enumerate(windows)]
    chain = [BlockKey(bytes([at]), b"", b"") for at in range(200)]
    on_disk: list[int] = []

    def groups_of(digest: bytes) -> int:
        nonlocal looks
        looks += 1
        return on_disk[digest[0]]

    kv = KVCache(groups, [1] * len(groups), size, 1, size * len(chain))
    found = Tiering(kv, cast(DiskTier, SimpleNamespace(groups_of=groups_of)), lambda _: None)

    def can_go_on(count: int, num_hit: int) -> bool:
        return all(
            on_disk[at] >> g & 1
            for g, group in enumerate(groups)
            for at in range(num_hit if group.window is None else kv.first_live(group, count * size), count)
        )

    for share in (0.0, 0.5, 0.9, 0.97, 1.0) * 8:
        on_disk[:] = [sum((drawn.random() < share) << g for g in range(len(groups))) for _ in chain]
        if full and share < 1.0:
            on_disk[:] = [has | 1 for has in on_disk]
        for num_hit in (0, 150):
            looks, limit = 0, drawn.randint(190, 200)
            count = found._num_restorable(chain, num_hit, limit)
            assert looks <= len(groups) * limit
            expected = next((at for at in range(limit, num_hit, -1) if can_go_on(at, num_hit)), num_hit)
            assert max(count, num_hit) == expected


# -- random traces -------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(8))
async def test_random_traces_answer_as_without_a_disk(folder: Path, tmp_path: Path, seed: int) -> None:
    trace = Trace(folder, tmp_path / "kv", random.Random(seed), deterministic=seed % 2 == 1)
    assert await trace.run() == []
    assert trace.num_restored > 0
