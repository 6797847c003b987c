"""What a server warns of at its start, and what it refuses before it loads anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine import LoadError, LocalEngine, PoolingEngine, SpeechEngine, packaged_folder
from server.config import Config, load
from server.process.lifecycle import ServerLifecycle
from server.process.serve import _banner, _Process
from tests.support.running import running_app


@pytest.mark.parametrize(
    ("settings", "keyed", "named"),
    [
        ({"trusted_proxy": ("127.0.0.1",)}, False, "trusted_proxy"),
        ({"allowed_host": ("chat.example",)}, False, "allowed_host"),
        ({"trusted_proxy": ("127.0.0.1",)}, True, None),
        ({}, False, None),
    ],
)
def test_a_server_without_keys_that_others_are_led_to_warns(
    caplog: pytest.LogCaptureFixture, settings: dict[str, Any], keyed: bool, named: str | None
) -> None:
    _Process(Config(**settings), 0.0, None)._warn(keyed=keyed)
    told = [line for line in caplog.messages if "leads others to this server" in line]
    assert [line.split()[0] for line in told] == ([named] if named else [])


@pytest.mark.parametrize(
    ("settings", "models", "told"),
    [
        ({"MODEL": "HERE/none"}, "", "none is not a folder"),
        ({"MODEL": "HERE/empty"}, "", "empty has no config.json"),
        ({"DRAFT_MODEL": "HERE/none"}, "", "none is not a folder"),
        ({"LORA": "terse=HERE/none"}, "", "the adapter 'terse' is not served: .*none is not a folder"),
        ({"RERANK_MODEL": "HERE/empty"}, "", "empty has no config.json"),
        ({"SPEECH_MODEL": f"hears={packaged_folder('antiphon-tiny')}"}, "", "a model of the type 'qwen3'"),
        ({"ENGINE": "upstream", "UPSTREAM": "http://127.0.0.1:1", "MODEL": "HERE/none"}, "", "not a folder"),
        ({}, 'name = "chat"\npath = "HERE/none"', "none is not a folder"),
        ({}, 'name = "ranks"\npath = "HERE/empty"\nuse = "rerank"\nchild = false', "empty has no config"),
    ],
    ids=["model", "no model", "draft", "adapter", "rerank", "speech", "upstream", "default", "entry"],
)
async def test_a_wrong_path_is_told_before_any_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], models: str, told: str
) -> None:
    def load_of(engine: object) -> None:
        pytest.fail(f"{engine} was to be loaded")

    for kind in (LocalEngine, PoolingEngine, SpeechEngine):
        monkeypatch.setattr(kind, "start", load_of)
    (tmp_path / "empty").mkdir()
    if models:
        (tmp_path / "models.toml").write_text("[[models]]\n" + models.replace("HERE", str(tmp_path)))
    env = {f"ANTIPHON_{name}": value.replace("HERE", str(tmp_path)) for name, value in settings.items()}
    life = ServerLifecycle(load({"data": str(tmp_path)}, env).config)
    try:
        with pytest.raises(LoadError, match=told):
            await life.start()
    finally:
        await life.close()


@pytest.mark.parametrize(
    ("db", "told"),
    [
        ("", ""),
        ("postgresql+asyncpg://ann:sesame@db-1/antiphon", "postgresql+asyncpg://ann:***@db-1/antiphon"),
    ],
)
async def test_the_start_names_a_database_that_is_elsewhere(tmp_path: Path, db: str, told: str) -> None:
    async with running_app(tmp_path) as server:
        config = server.life.config
        server.life.config = config.model_copy(update={"db": db or config.db})
        said = _banner(server.life, "http://127.0.0.1:8000", 1.0, keyed=False).splitlines()
        server.life.config = config
    assert f"Data: {tmp_path}" in said
    assert [line for line in said if line.startswith("Database:")] == ([f"Database: {told}"] if told else [])
