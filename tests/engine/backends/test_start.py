"""A native family starts without the imports that cost seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[3]

ANSWER = """
import asyncio, json, sys
import engine
heavy = {"torch", "numpy", "tokenizers", "transformers"}
light = sorted({name.split(".")[0] for name in sys.modules} & heavy)
from engine import GenerateRequest, LocalEngine, SamplingParams
before = sorted({name.split(".")[0] for name in sys.modules} & {"torch", "transformers"})

async def main():
    local = LocalEngine(sys.argv[1], num_blocks=64)
    await local.start()
    request = GenerateRequest(id="a", prompt_ids=(1, 2, 3), sampling=SamplingParams(seed=1, max_tokens=3))
    async for chunk in local.generate(request):
        pass
    await local.close()

asyncio.run(main())
print(json.dumps([light, before, sorted(sys.modules)]))
"""


def test_a_native_family_starts_light(checkpoint: Callable[[str], Path]) -> None:
    command = [sys.executable, "-c", ANSWER, str(checkpoint("qwen3"))]
    done = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True, timeout=120)
    light, before, modules = json.loads(done.stdout)
    assert light == []  # the door itself
    assert before == []  # the engine, before it is started
    heavy = [
        name
        for name in modules
        if name.split(".")[0] in ("transformers", "triton")
        or name.startswith(("torch._dynamo", "torch._inductor", "llguidance"))
    ]
    assert heavy == []
