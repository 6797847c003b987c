"""From how many tokens on a prompt is compacted, and which texts one message tells."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine import ScriptedEngine
from server.items import ABANDONED, COMPACTION, Compacted, compacted, with_private
from server.limits import Caps
from server.model_registry import ServedModel
from server.prompting import to_messages
from server.runs.planning.compaction import effective_threshold


def item(content: Any) -> dict[str, Any]:
    return with_private({"type": COMPACTION, "id": "cmp_1", "encrypted_content": "x"}, content)


@pytest.mark.parametrize(
    ("asked", "cap", "effective"),
    [(0, None, 6000), (1000, None, 1000), (7500, None, 7000), (0, 500, 500), (1000, 4000, 1000)],
)
def test_a_threshold_leaves_room_for_an_answer(asked: int, cap: int | None, effective: int) -> None:
    engine = ScriptedEngine(max_model_len=8000)
    caps = replace(Caps(), prompt_tokens=cap)
    served = ServedModel("m", engine, engine.info, 0, "m", caps=caps)
    assert effective_threshold(asked, served) == effective


def test_one_message_stands_for_what_was_before() -> None:
    said = {"type": "message", "role": "user", "id": "m", "content": [{"type": "input_text", "text": "old"}]}
    content = Compacted(systems=["Be calm."], summary="It rains.", users=["hi", "and?"], num_users=2)
    system, told = to_messages([said, item(content.dump())])
    assert system == {"role": "system", "content": "Be calm."} and told["role"] == "user"
    assert told["content"].endswith("Summary:\nIt rains.\n\nThe user said:\n- hi\n- and?")
    tail = [{"role": "user", "content": "now"}]
    assert to_messages([said, item(Compacted(messages=tail).dump())]) == tail
    assert [each["content"] for each in to_messages([said, item(ABANDONED)])] == ["old"]


def test_what_a_compaction_stands_for_comes_back() -> None:
    content = Compacted(summary="s", users=["u"], num_users=1)
    assert compacted(item(content.dump())) == content
    assert compacted(item(ABANDONED)) is None and compacted({"type": "message"}) is None
