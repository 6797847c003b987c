"""A model that is not there: what is said of those that are."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.model_folder import MOST_NEIGHBOURS, find_folder, read_config
from engine.types import LoadError
from tests.support.permissions import barred


def put_model(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")


def test_a_model_is_found(tmp_path: Path) -> None:
    put_model(tmp_path / "tiny")
    assert find_folder(tmp_path / "tiny") == (tmp_path / "tiny").resolve()


def test_a_folder_that_is_not_there_names_the_models_that_are(tmp_path: Path) -> None:
    put_model(tmp_path / "Qwen3-0.6B")
    put_model(tmp_path / "meta" / "Llama-3")
    (tmp_path / "notes").mkdir()
    with pytest.raises(LoadError) as caught:
        find_folder(tmp_path / "Qwen3-0.6")
    told = f"{tmp_path / 'Qwen3-0.6'} is not a folder, nor a hub id of the form owner/name"
    assert str(caught.value) == f"{told}; {tmp_path} has the models Qwen3-0.6B, meta/Llama-3"


def test_a_folder_of_models_is_no_model_and_names_them(tmp_path: Path) -> None:
    put_model(tmp_path / "one")
    with pytest.raises(LoadError, match=r"has no config\.json; .* has the models one$"):
        read_config(tmp_path)


def test_a_file_is_told_from_nothing_and_many_models_are_not_all_named(tmp_path: Path) -> None:
    for number in range(MOST_NEIGHBOURS + 5):
        put_model(tmp_path / f"m{number:02}")
    (tmp_path / "weights.safetensors").write_bytes(b"")
    with pytest.raises(LoadError, match=r"is a file, nor") as caught:
        find_folder(tmp_path / "weights.safetensors")
    assert str(caught.value).endswith(f"m{MOST_NEIGHBOURS - 1:02}, and others")


def test_a_model_in_the_home_of_nobody_is_none() -> None:
    with pytest.raises(LoadError, match=r"^~nobody-of-this-name/model is not a folder"):
        find_folder("~nobody-of-this-name/model")


def test_a_model_that_may_not_be_looked_up_is_none(tmp_path: Path) -> None:
    put_model(tmp_path / "one")
    with barred(tmp_path), pytest.raises(LoadError, match=r"one is not a folder"):
        find_folder(tmp_path / "one")


def test_where_no_model_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"of the form owner/name$"):
        find_folder(tmp_path / "nothing" / "at" / "all")
    put_model(tmp_path / "elsewhere")
    with pytest.raises(LoadError, match=r"of the form owner/name$"):
        find_folder(tmp_path / "nothing" / "here")
