"""The exit code of `antiphon eval-tiny`: a few dialogues are a look, enough of them are a verdict."""

from __future__ import annotations

import pytest

from engine.tiny import evaluate
from engine.tiny.dialogue import Dialogue
from engine.tiny.evaluate import FEWEST, SKILLS, THRESHOLD, UNTRAINED, Answer, main


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


def test_what_the_weights_were_not_trained_on_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[list[str]] = []

    def score(ask: object, skills: list[str], count: int, show: int) -> dict[str, float]:
        scored.append(skills)
        return dict.fromkeys(skills, 1.0)

    monkeypatch.setattr(evaluate, "local_asker", lambda checkpoint, greedy: None)
    monkeypatch.setattr(evaluate, "evaluate", score)
    assert main([]) == main(["--skills", *UNTRAINED]) == 0
    assert scored == [[skill for skill in (*SKILLS, "everyday") if skill not in UNTRAINED], [*UNTRAINED]]


def test_a_look_says_what_it_looks_at_and_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        evaluate, "local_asker", lambda checkpoint, greedy: lambda asked: [Answer("x")] * len(asked)
    )
    monkeypatch.setattr(evaluate, "LINE_S", 0.0)
    assert main(["--skills", "greet", "decline", "--count", "5"]) == 0
    told = capsys.readouterr()
    head, *rows, mean, verdict = told.out.splitlines()
    assert "5 held-out dialogues of each skill" in head and len(rows) == 2
    assert mean.startswith("all of them") and f"give --count {FEWEST} or more" in verdict
    assert "greet: 0 of 5 turns" in told.err
    with pytest.raises(SystemExit):
        main(["--count", "0"])


def test_a_server_that_is_not_there_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--skills", "greet", "--count", "1", "--base-url", "http://127.0.0.1:9/v1"]) == 2
    assert capsys.readouterr().err.startswith("antiphon: http://127.0.0.1:9/v1: ")
