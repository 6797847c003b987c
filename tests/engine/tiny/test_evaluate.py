"""The exit code of `antiphon eval-tiny`: a few dialogues are a look, enough of them are a verdict."""

from __future__ import annotations

import pytest

from engine.tiny import evaluate
from engine.tiny.dialogue import Dialogue
from engine.tiny.evaluate import FEWEST, THRESHOLD, Answer, main


def test_few_dialogues_are_no_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(asked: list[Dialogue]) -> list[Answer]:
        return [Answer("something else") for _ in asked]

    monkeypatch.setattr(evaluate, "local_asker", lambda checkpoint, greedy: wrong)
    assert main(["--skills", "greet", "--count", "5"]) == 0
    shown = capsys.readouterr().out
    assert "(0/5)" in shown and "5 dialogues per skill are too few to judge" in shown
    assert main(["--skills", "greet", "--count", str(FEWEST)]) == 1
    assert "below the threshold: greet" in capsys.readouterr().out


def test_one_wrong_answer_does_not_miss_the_threshold() -> None:
    assert 1 - 1 / FEWEST >= THRESHOLD
