"""A model for speech behind the socket of the engine's process."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from engine import (
    DeadlineExceeded,
    EngineDead,
    EngineHost,
    EngineLine,
    RemoteSpeech,
    SpeechConfig,
    SpeechEngine,
    Window,
)
from tests.support.speech_checkpoints import make_whisper, tone


async def test_speech_behind_the_socket(tmp_path: Path) -> None:
    """The same texts, errors and figures, over two lives of the engine's process."""
    folder, path = make_whisper(tmp_path / "m"), tmp_path / "s"
    line = EngineLine(path)
    speech = RemoteSpeech(line, 0, num_servers=2, max_waiting=4)
    window = Window(tone(2.0).tobytes(), prompt="the ant", temperatures=(0.0, 0.6), words=True, seed=3)
    for life in range(2):
        engine = SpeechEngine(SpeechConfig(folder, num_threads=1))
        info = await engine.start()
        host = EngineHost(path, None, [engine])
        await host.start()
        if not life:
            assert await speech.start() == info == speech.info
        assert await speech.read(window, owner="ann") == await engine.read(window)
        with pytest.raises(DeadlineExceeded):
            await speech.read(window, deadline=time.monotonic() - 1)
        asking = asyncio.create_task(speech.read(window))
        while not engine.stats().windows_waiting:
            await asyncio.sleep(0.001)
        asking.cancel()
        while engine.stats().windows_waiting:  # it is dropped there, too
            await asyncio.sleep(0.001)
        async with asyncio.timeout(5):
            while speech.stats() != engine.stats():
                await asyncio.sleep(0.01)
        await host.close()
        await engine.close()
    await speech.close()
    with pytest.raises(EngineDead):
        await speech.read(window)
