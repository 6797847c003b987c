"""From `antiphon serve` to a first answered request, with the shipped model: `python -m benchmarks.start`.

The first start makes a new data folder; the others find it. Each is a process of its own, imports included.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    from collections.abc import Iterator

ANTIPHON = str(Path(sys.executable).with_name("antiphon"))
ROUNDS = 5


@contextmanager
def serving(data: Path, *args: str) -> Iterator[str]:
    """A server in a process of its own; the URL that it says it listens on."""
    env = {**os.environ, "ANTIPHON_DATA": str(data)}
    command = [ANTIPHON, "serve", "--port", "0", *args]
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                found = re.search(r"http://127\.0\.0\.1:\d+", line)
                if found:
                    yield found.group()
                    return
            raise RuntimeError("the server ended before it listened")
        finally:
            process.terminate()
            process.wait(20)


def first_answer(data: Path, *args: str) -> float:
    """Seconds from the process's start to the whole answer of its first request."""
    began = time.perf_counter()
    with serving(data, *args) as url, httpx.Client(base_url=url, timeout=60) as client:
        while client.get("/ready").status_code != 200:
            time.sleep(0.02)
        reply = client.post("/v1/responses", json={"input": "Hello!"})
        reply.raise_for_status()
        return time.perf_counter() - began


def main() -> None:
    """Print the first start and the median of the later ones."""
    with tempfile.TemporaryDirectory() as folder:
        first = first_answer(Path(folder))
        later = [first_answer(Path(folder)) for _ in range(ROUNDS)]
    print(f"first start, new data folder: {first:.2f} s to the first answer")
    print(f"later starts: median {statistics.median(later):.2f} s, worst {max(later):.2f} s of {ROUNDS}")


if __name__ == "__main__":
    main()
