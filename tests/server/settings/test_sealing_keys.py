"""The operator's keys that seal: what is taken, and that a refusal shows no key."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.config import Config, ConfigError, load, shown
from server.settings import read_sealing_key_file, read_sealing_keys

ONE, TWO = "0f" * 64, "AB" * 64


def test_keys_are_read_in_their_order(tmp_path: Path) -> None:
    assert read_sealing_keys([ONE, TWO]) == (b"\x0f" * 64, b"\xab" * 64)
    file = tmp_path / "keys"
    file.write_text(f"# the new one\n {ONE}\n\n{TWO}\n")
    assert read_sealing_key_file(file) == read_sealing_keys([ONE, TWO])
    assert Config(sealing_key=(TWO,)).sealing_keys() == (b"\xab" * 64,)
    assert Config(sealing_key_file=file).sealing_keys() == read_sealing_keys([ONE, TWO])
    assert Config().sealing_keys() == ()


@pytest.mark.parametrize(
    ("written", "says"),
    [
        (ONE[:-2], "key 1: expected 128 hexadecimal digits"),
        (f"{ONE}\n{TWO}00", "key 2: expected 128"),
        ("g" * 128, "expected 128"),
        (f"{ONE}\n{ONE.upper()}", "twice"),
        ("# none\n", "holds no key"),
        (b"\xff\xfe", "no UTF-8 text"),
        (None, "No such file"),
    ],
)
def test_a_file_that_holds_something_else_is_refused(
    tmp_path: Path, written: str | bytes | None, says: str
) -> None:
    file = tmp_path / "keys"
    if written is not None:
        file.write_bytes(written.encode() if isinstance(written, str) else written)
    with pytest.raises(ValueError, match=says) as refused:
        read_sealing_key_file(file)
    assert str(file) in str(refused.value) and ONE[:-2] not in str(refused.value).lower()


def test_a_setting_is_refused_by_its_name_and_never_shown(tmp_path: Path) -> None:
    flags = {"data": str(tmp_path)}
    with pytest.raises(
        ConfigError, match=r"sealing_key \(environment ANTIPHON_SEALING_KEY\): key 2"
    ) as refused:
        load(flags, {"ANTIPHON_SEALING_KEY": f"{ONE},{TWO[1:]}"})
    assert TWO[1:] not in str(refused.value)
    both = {**flags, "sealing_key_file": str(tmp_path / "keys")}
    with pytest.raises(ConfigError, match="keep one of the two"):
        load(both, {"ANTIPHON_SEALING_KEY": ONE})
    config = load(flags, {"ANTIPHON_SEALING_KEY": f"{ONE}, {TWO}"}).config
    assert len(config.sealing_keys()) == 2
    for told in (repr(config), str(config.dumped()), shown(config.sealing_key)):
        assert ONE not in told
