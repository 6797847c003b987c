"""`python -m tests.gpu.run`: the GPU tests, then the table of figures, in at most eight minutes.

Owns: the order, the time, and the exit status. It needs torch, Triton, transformers, numpy and pytest, and no
network. Without a GPU it says so and fails.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch

SUITES = ("tests/engine/kernels/triton/test_kernels.py", "tests/gpu/test_device.py")


def main() -> int:
    """Run what is asked for; 0 when all tests passed and every figure was taken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=480, help="stop beginning anything new after these")
    parser.add_argument("--only", nargs="*", help="of: tests, kernels, fp8, peer, and the models' sizes")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU", file=sys.stderr)
        return 1
    from tests.gpu import figures

    end: float = time.monotonic() + args.seconds
    failed, taken = [], []

    def left() -> float:
        return end - time.monotonic()

    def take(name: str, source: Iterable[figures.Figure]) -> None:
        """Take figures as they come; what breaks is told, and the rest goes on."""
        if (args.only is not None and name not in args.only) or left() < 15:
            return
        try:
            for figure in source:
                taken.append(figure)
                print(figure.line(), flush=True)
        except Exception:
            traceback.print_exc()
            failed.append(name)
        gc.collect()
        torch.cuda.empty_cache()

    if args.only is None or "tests" in args.only:
        import pytest

        options = ["-q", "--noconftest", "-c", "/dev/null", "--rootdir", ".", "-p", "no:cacheprovider"]
        if pytest.main([*options, *SUITES]) != 0:
            failed.append("tests")
    limits = figures.ceilings()
    free, whole = torch.cuda.mem_get_info()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {free >> 30} of {whole >> 30} GiB free"
    )
    print(f"copy {limits.bandwidth / 1e12:.2f} TB/s, bf16 product {limits.arithmetic / 1e12:.0f} TFLOP/s")
    for size in figures.GOALS:
        take(size, figures.of_model(size, limits, left))
    take("fp8", figures.of_eight_bits("qwen3-8b", limits, left))
    take("peer", figures.peer("qwen3-0.6b"))
    take("kernels", figures.of_kernels(limits))
    print(f"\n{'=' * 100}")
    print("\n".join(figure.line() for figure in taken))
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(figure) for figure in taken], indent=1))
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
