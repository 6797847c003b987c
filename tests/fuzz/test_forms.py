"""The short form of the fuzzer of forms."""

from __future__ import annotations

import os
import random
from pathlib import Path

from tests.fuzz.forms import fuzz

SEED = int(os.environ.get("ANTIPHON_FUZZ_SEED", random.SystemRandom().randrange(1 << 30)))


async def test_no_form_fails_as_the_servers_fault_or_leaves_anything(tmp_path: Path) -> None:
    print(f"ANTIPHON_FUZZ_SEED={SEED}")
    found = await fuzz(tmp_path, SEED, 300)
    assert found.wrong == []
    assert found.replies.total() == 300
    assert found.replies[200] and found.codes["invalid_form"] > 20
