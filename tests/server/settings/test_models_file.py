"""`models.toml`: names, aliases and versions of several models, and what cannot be said there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from server.cli.commands import main
from server.config import Config, ConfigError, load
from server.model_registry import build_others
from server.settings import read_entries

TWO = """
[[models]]
name = "chat"
version = "2025-08-01"
path = "/models/old"
max_model_len = 4096
kv_cache_bytes = "64M"

[[models]]
name = "chat"
version = "2025-10-01"
path = "/models/new"
aliases = ["gpt-4o"]
"""


def written(folder: Path, text: str, name: str = "models.toml") -> Config:
    (folder / name).write_text(text)
    return load({"data": str(folder)}, {}).config


def test_a_bare_name_means_the_latest_version_and_each_version_has_two_names(tmp_path: Path) -> None:
    named = written(tmp_path, TWO).entries.named()
    assert named == {
        "chat": "chat-2025-10-01",
        "chat-2025-08-01": "chat-2025-08-01",
        "chat@2025-08-01": "chat-2025-08-01",
        "chat-2025-10-01": "chat-2025-10-01",
        "chat@2025-10-01": "chat-2025-10-01",
        "gpt-4o": "chat-2025-10-01",
    }
    tenth = [{"name": "m", "version": version, "engine": "scripted"} for version in ("v9", "9.2", "9.10")]
    assert read_entries(tenth, {}).named()["m"] == "m-9.10"


def test_an_entry_has_settings_of_its_own(tmp_path: Path) -> None:
    config = written(tmp_path, TWO)
    old, new = (config.of_entry(entry) for entry in config.entries)
    assert (old.max_model_len, new.max_model_len) == (4096, None)
    assert (old.kv_cache_bytes, old.model, old.served_model_name) == (
        64 << 20,
        "/models/old",
        ("chat-2025-08-01",),
    )
    assert Config(**old.dumped()) == old.model_copy(update={"models": Config(**old.dumped()).models})
    assert not config.serves_own_model
    assert config.model_copy(update={"model": "other"}).serves_own_model


@pytest.mark.parametrize(
    ("use", "described"),
    [
        ("embedding", {"architectures": ["BertModel"]}),
        ("rerank", {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "fits"}}),
        ("classification", {"architectures": ["BertForSequenceClassification"]}),
        ("speech", {"model_type": "whisper"}),
    ],
)
def test_a_model_that_generates_nothing_is_all_that_its_process_has(
    tmp_path: Path, use: str, described: dict[str, Any]
) -> None:
    (tmp_path / "antiphon.toml").write_text(
        'speech_model = ["/models/ear"]\nrerank_model = ["/models/rank"]\n'
    )
    model = tmp_path / "vec"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(described))
    config = written(tmp_path, f'[[models]]\nname = "vec"\npath = "{model}"\nuse = "{use}"\n')
    child = Config(**config.of_entry(config.entries.models[0]).dumped())
    assert len(build_others(child)) == 1
    assert config.serves_own_model, "it generates nothing, so the shipped model does"


def test_antiphon_toml_may_list_them_too_and_models_may_be_a_path(tmp_path: Path) -> None:
    config = written(tmp_path, TWO, "antiphon.toml")
    assert [entry.id for entry in config.entries] == ["chat-2025-08-01", "chat-2025-10-01"]
    (tmp_path / "other.toml").write_text(TWO)
    with pytest.raises(ConfigError, match=r"other.toml and \[\[models\]\] in .* keep one of them"):
        load({"data": str(tmp_path), "models": str(tmp_path / "other.toml")}, {})
    (tmp_path / "antiphon.toml").write_text(f'models = "{tmp_path}/other.toml"')
    assert len(load({"data": str(tmp_path)}, {}).config.entries) == 2


def test_a_secret_may_come_from_the_environment(tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text(
        '[[models]]\nname = "far"\nengine = "upstream"\npath = "/tokenizer"\n'
        'upstream = ["http://127.0.0.1:1"]\nupstream_api_key = { env = "FAR_KEY" }\n'
    )
    config = load({"data": str(tmp_path)}, {"FAR_KEY": "sk-far"}).config
    key = config.of_entry(config.entries.models[0]).upstream_api_key
    assert key is not None and key.get_secret_value() == "sk-far"
    assert "sk-far" not in repr(config.entries)


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ('name = "a"', "which model\\? Give path"),
        ('path = "x"', "models.0.name: it must be given"),
        (
            'name = "a"\npaht = "x"',
            r"models.toml, line 3: models.0.paht: no setting of a model; did you mean 'path'\?",
        ),
        ('nmae = "a"\npath = "x"', r"line 2: models.0.nmae: no setting of a model; did you mean 'name'\?"),
        ('name = "a"\nengine = "scripted"\nmax_modl_len = 5', "did you mean 'max_model_len'"),
        ('name = "a"\nengine = "scripted"\nalias = ["b"]', "did you mean 'aliases'"),
        ('name = "a"\nengine = "scripted"\nmax_model_len = -1', r"line 4: max_model_len: .* \(model a\)"),
        ('name = "a"\nengine = "scripted"\nport = 5', "models.0.port: no setting of a model"),
        ('name = "a"\nengine = "scripted"\nfallback = ["b"]', "leads to 'b', which is no model"),
        (
            'name = "a"\nengine = "scripted"\naliases = ["a"]\n[[models]]\nname = "a"\npath = "x"',
            "two models",
        ),
        ('name = "a"\nengine = "scripted"\npin = true\nidle_s = 5', "pin or idle_s"),
        ('name = "a"\nengine = "scripted"\ncanary = { to = "a" }', "give percent or owners"),
        ('name = "a"\nengine = "scripted"\nuse = "rerank"', "engine scripted cannot be one"),
        ('name = "a"\nengine = "upstream"\npath = "x"\nchild = true', "computes elsewhere already"),
        (
            'name = "a"\npath = "x"\nchild = false\n[[models]]\nname = "b"\npath = "y"\nchild = false',
            "of a and b",
        ),
        (
            'name = "a"\nengine = "scripted"\ndefault = true\n[[models]]\nname = "b"\nengine = "scripted"\n'
            "default = true",
            "more than one model is the default",
        ),
        ('name = "a"\nversion = "1"\npath = "x"\n[[models]]\nname = "a"\npath = "y"', "several versions"),
        (
            'name = "a"\npath = "x"\n[[models]]\nname = "b"\npath = "y"\n'
            '[models.canary]\nto = "a"\nprecent = 5',
            r"line 9: models.1.canary.precent: it is not known here; did you mean 'percent'\?",
        ),
        ('name = "a"\nversion = "../1"\npath = "x"', "is no version"),
    ],
)
def test_what_cannot_be_said_is_refused_in_one_line(tmp_path: Path, table: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as refused:
        written(tmp_path, f"[[models]]\n{table}\n")
    assert "\n" not in str(refused.value)


def test_a_file_without_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="each model is a table"):
        written(tmp_path, "port = 5\n")
    with pytest.raises(ConfigError, match="there is no file"):
        load({"data": str(tmp_path), "models": str(tmp_path / "none.toml")}, {})


def test_two_models_by_flags_are_refused_and_pointed_to_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--data", str(tmp_path), "--model", "A", "--model", "B"])
    assert "models.toml" in capsys.readouterr().err
