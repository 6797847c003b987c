"""Which of the CPU's own kernels a machine can build and run."""

from __future__ import annotations

import os
import shutil

import pytest

from engine.kernels.cpu import library

# Kinds of processors, as compilers name them, and what a machine must have that runs what is built for one:
# this machine's own, which may have tiles; bfloat16 products in registers; 512 bits without them; AVX2 alone.
PROCESSORS = {
    "native": "avx2",
    "cooperlake": "avx512_bf16",
    "skylake-avx512": "avx512bw",
    "haswell": "avx2",
}


def need_kernels(march: str = "native") -> None:
    """Skip the test where there is nothing to build, nothing to build by, or no such processor; else they
    must be there.
    """
    compiler = os.environ.get("CXX") or any(map(shutil.which, library.COMPILERS))
    if not (library.worth_building() and compiler):
        pytest.skip("no kernels on this machine")
    if PROCESSORS[march] not in library._processor_flags():
        pytest.skip(f"this machine cannot run what is built for {march}")
    assert library.open_library() is not None
