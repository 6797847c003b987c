"""Compiles `kernels.cpp` for this machine, once, and offers its functions without copying their arguments.

The compiled library is kept in the user's cache folder. The structures of the C++ code are mirrored here.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.step import DrawPlan
from engine.user_cache import user_cache

log = logging.getLogger("antiphon.engine")

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=fast", "-fopenmp", "-fPIC")
COMPILERS = ("g++", "c++")  # what Clang makes asks for an OpenMP of its own, which torch has not
COMPILE_S = 120.0
DIGEST_SIZE = 32  # bytes

PANEL = 64  # as in kernels.cpp
GROUP = 32
STRIP = 32  # numbers of a row that always lie side by side, as in vectors.h: a head is whole strips
MOST_DIM = 256  # of a head
MOST_CONTENDERS = 8  # of a draw

_pointer, _int = ctypes.c_void_p, ctypes.c_int64


def _structure(name: str, **fields: Any) -> Any:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


Map = _structure(
    "Map",
    weight=_pointer,
    scale=_pointer,
    bias=_pointer,
    kind=_int,
    inputs=_int,
    outputs=_int,
    panels=_int,
    gated=_int,
    adapters=_pointer,
)
LowRank = _structure("LowRank", down=_pointer, up=_pointer, used=_pointer, rank=_int)
Cache = _structure(
    "Cache",
    keys=_pointer,
    values=_pointer,
    block_stride=_int,
    head_stride=_int,
    block_size=_int,
    kv_heads=_int,
    head_dim=_int,
    in_bytes=_int,
)
Batch = _structure(
    "Batch",
    query_start=_pointer,
    positions=_pointer,
    slot_offsets=_pointer,
    sequences=_int,
    tokens=_int,
)
Group = _structure("Group", tables=_pointer, slot_blocks=_pointer, width=_int, window=_int)
Layer = _structure(
    "Layer",
    attention_norm=_pointer,
    qk_norm=_pointer,
    mlp_norm=_pointer,
    qkv=Map,
    o=Map,
    gate_up=Map,
    down=Map,
    cache=Cache,
    group=_int,
)
Scoring = _structure("Scoring", sinks=_pointer, scale=ctypes.c_float, softcap=ctypes.c_float)
Decoder = _structure(
    "Decoder",
    layers=ctypes.POINTER(Layer),
    embedding=_pointer,
    final_norm=_pointer,
    cosines=_pointer,
    sines=_pointer,
    head=Map,
    num_layers=_int,
    hidden=_int,
    middle=_int,
    heads=_int,
    most_ranks=_int,
    is_bf16=_int,
    scoring=Scoring,
    eps=ctypes.c_float,
)
Step = _structure(
    "Step",
    groups=ctypes.POINTER(Group),
    token_ids=_pointer,
    embedded=_pointer,
    logits_at=_pointer,
    wanted=_int,
    logits=_pointer,
    progress=_pointer,
    adapters=_pointer,
    alone=_int,
)
Attention = _structure(
    "Attention",
    queries=_pointer,
    keys=_pointer,
    values=_pointer,
    out=_pointer,
    heads=_int,
    is_bf16=_int,
    alone=_int,
    scoring=Scoring,
)
Draw = _structure(
    "Draw",
    scores=_pointer,
    stride=_int,
    rows=_int,
    vocabulary=_int,
    temperatures=_pointer,
    top_p=_pointer,
    min_p=_pointer,
    top_k=_pointer,
    noise=_pointer,
    draw_index=_pointer,
    mask_of=_pointer,
    masks=_pointer,
    mask_width=_int,
    bias_rows=_pointer,
    bias_ids=_pointer,
    bias_values=_pointer,
    biases=_int,
)
DRAWN = np.dtype(
    [("peak", np.float32), ("best", np.float32)]
    + [(name, np.int64) for name in ("best_id", "count")]
    + [("ids", np.int64, MOST_CONTENDERS), ("scores", np.float32, MOST_CONTENDERS)]
)


@dataclass(frozen=True, slots=True)
class Library:
    """The functions of `kernels.cpp`; each runs on as many threads as torch has, without Python's lock."""

    _functions: Any
    together: int = 0
    """Inputs of bfloat16 weights that have a scale together as whole numbers; 0: these weights are multiplied
    as they are, because the processor has instructions for that, or none for whole numbers."""

    def forward(self, decoder: Any, batch: Any, step: Any) -> None:
        """A whole step of a decoder; see `kernels.cpp`."""
        self._functions.antiphon_forward(_at(decoder), _at(batch), _at(step), torch.get_num_threads())

    def attend(self, attention: Any, cache: Any, batch: Any, group: Any) -> None:
        """One layer's attention, and what its tokens keep; see `kernels.cpp`."""
        self._functions.antiphon_attend(
            _at(attention), _at(cache), _at(batch), _at(group), torch.get_num_threads()
        )

    def product(
        self, maps: Any, begins: NDArray[np.int64], x: Tensor, residual: Tensor | None, out: Tensor
    ) -> None:
        """x [T, inputs], of which the rows `begins[i]` to `begins[i + 1]` by the i-th of these `Map`s of one
        shape, which are an array of ctypes, plus `residual`, into out [T, outputs]; all contiguous, of one
        type."""
        self._functions.antiphon_product(
            maps,
            begins.ctypes.data,
            len(begins) - 1,
            x.dtype is torch.bfloat16,
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )

    def norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """x [..., H], normed by its root mean square and multiplied by weight [H] f32, into out; both
        contiguous and of one type."""
        self._functions.antiphon_norm(
            x.data_ptr(),
            weight.data_ptr(),
            eps,
            x.dtype is torch.bfloat16,
            x.numel() // len(weight),
            len(weight),
            out.data_ptr(),
            torch.get_num_threads(),
        )

    def draw(
        self,
        scores: NDArray[np.float32],
        plan: DrawPlan,
        mask_of: NDArray[np.int64],
        masks: NDArray[np.int32],
    ) -> NDArray[np.void]:
        """What may be drawn for each row of scores [R, V], which are contiguous; `DRAWN` [R], see `draws.h`.
        Penalties are in the scores already. The plan's bias is added during the call and taken away again.
        `mask_of` [R]: the row of masks, or -1."""
        out = np.empty(len(scores), DRAWN)
        draw = Draw(
            scores=scores.ctypes.data,
            stride=scores.strides[0] // scores.itemsize,
            rows=len(scores),
            vocabulary=scores.shape[1],
            temperatures=plan.temperature.ctypes.data,
            top_p=plan.top_p.ctypes.data,
            min_p=plan.min_p.ctypes.data,
            top_k=plan.top_k.ctypes.data,
            noise=plan.noise.ctypes.data,
            draw_index=plan.draw_index.ctypes.data,
            mask_of=mask_of.ctypes.data,
            masks=masks.ctypes.data,
            mask_width=masks.shape[1],
            bias_rows=plan.bias_rows.ctypes.data,
            bias_ids=plan.bias_ids.ctypes.data,
            bias_values=plan.bias_values.ctypes.data,
            biases=len(plan.bias_rows),
        )
        self._functions.antiphon_draw(_at(draw), out.ctypes.data, torch.get_num_threads())
        return out

    def read(self, memory: Tensor) -> None:
        """Read memory once, as quickly as it can be read."""
        self._functions.antiphon_read(memory.data_ptr(), memory.nbytes, torch.get_num_threads())

    def pack(self, weight: Tensor, order: Tensor, out: Tensor, pair: int) -> None:
        """weight [outputs, inputs] into panels, `order` [panels * PANEL] of its rows (-1: zeros)."""
        self._functions.antiphon_pack(
            weight.data_ptr(),
            order.data_ptr(),
            len(order) // PANEL,
            weight.shape[1],
            weight.itemsize,
            pair,
            out.data_ptr(),
            torch.get_num_threads(),
        )

    def pack_whole(self, weight: Tensor, order: Tensor, out: Tensor, scale: Tensor) -> None:
        """The same of bfloat16 as whole numbers; scale [panels, blocks of `together` inputs, PANEL]."""
        self._functions.antiphon_pack_whole(
            weight.data_ptr(),
            order.data_ptr(),
            len(order) // PANEL,
            weight.shape[1],
            out.data_ptr(),
            scale.data_ptr(),
            torch.get_num_threads(),
        )


def _at(structure: Any) -> Any:
    return ctypes.byref(structure)


# ------------------------------------------------------------------------------------------------------------
# Building it


@lru_cache
def open_library() -> Library | None:
    """The library for this machine, compiled now if it never was; None, with the reason logged, where it
    cannot be had, or without a word where it is not `worth_building`.
    """
    if not worth_building():
        return None
    try:
        return build()
    except (OSError, ValueError, AttributeError, subprocess.SubprocessError) as error:
        said = " ".join(str(getattr(error, "stderr", None) or error).split())
        log.warning(
            "no kernels for this CPU, which are up to twice as fast as torch's operations; a C++ compiler "
            "makes them at the first start (for instance g++, from your system's packages): %s",
            said[:300],
        )
        return None


def worth_building() -> bool:
    """Where it was seen to be the faster way: Linux on x86-64 with AVX2."""
    return sys.platform == "linux" and platform.machine() == "x86_64" and "avx2" in _processor_flags()


def build(march: str = "native") -> Library:
    """The library for a processor of this kind (as compilers name them), from where it is kept if it is.

    Raises OSError or SubprocessError when there is no compiler, or it fails; AttributeError when what it made
    lacks a function; ValueError for a CXX with a quote that has no end.
    """
    compiler = shlex.split(os.environ.get("CXX", "")) or [*filter(shutil.which, COMPILERS)][:1]
    if not compiler:
        raise FileNotFoundError(f"none of {', '.join(COMPILERS)} was found")
    command, openmp = [*compiler, *FLAGS, f"-march={march}"], _openmp()
    sources = sorted([SOURCE, *SOURCE.parent.glob("*.h")])
    # all that the result depends on
    parts = [path.read_bytes() for path in sources]
    parts.append(repr((command, openmp, sorted(_processor_flags()))).encode())
    name, folder = f"kernels-{hashlib.sha256(b''.join(parts)).hexdigest()[:20]}.so", user_cache()
    if folder is not None:
        with suppress(OSError):  # it was never made; what a fall of the machine left in pieces is made anew
            if _is_whole(folder / name):
                return _load(folder / name)
    began = time.perf_counter()
    log.info("compiling kernels for this CPU, once for this machine; that takes up to a minute")
    with tempfile.TemporaryDirectory(prefix="antiphon-kernels-", dir=folder) as temporary:
        compiled, linked = Path(temporary) / "kernels.o", Path(temporary) / "kernels.so"
        _call([*command, "-c", "-o", str(compiled), str(SOURCE)])
        # with the OpenMP that torch has loaded: of two, each would keep its own threads awake
        _call([*compiler, "-shared", "-o", str(linked), str(compiled), openmp])
        _seal(linked)
        library = _load(linked)  # what is loaded stays, also without its file
        if folder is not None:
            linked.replace(folder / name)
    where = "not kept" if folder is None else f"kept as {folder / name}"
    log.info("kernels for this CPU compiled in %.1f s, %s", time.perf_counter() - began, where)
    return library


def _seal(path: Path) -> None:
    """Append a library's digest to it, which its loader does not look at."""
    digest = hashlib.sha256(path.read_bytes()).digest()
    with path.open("ab") as file:
        file.write(digest)


def _is_whole(path: Path) -> bool:
    """Whether a library is as it was sealed: a part of one ends the process by a signal when it is loaded."""
    content = path.read_bytes()
    return hashlib.sha256(content[:-DIGEST_SIZE]).digest() == content[-DIGEST_SIZE:]


def _call(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=COMPILE_S)


def _openmp() -> str:
    """The OpenMP runtime of this process, which torch brought."""
    with open("/proc/self/maps") as file:
        loaded = {line.rstrip().split(maxsplit=5)[-1] for line in file if "omp" in line}
    found = sorted(path for path in loaded if Path(path).name.startswith(("libgomp", "libiomp", "libomp")))
    if not found:
        raise FileNotFoundError("torch has loaded no OpenMP runtime")
    return found[0]


def _processor_flags() -> Sequence[str]:
    """What Linux says that this processor can do."""
    try:
        with open("/proc/cpuinfo") as file:
            return next((line.split() for line in file if line.startswith("flags")), [])
    except OSError:
        return []


def _load(path: Path) -> Library:
    functions = ctypes.CDLL(str(path))
    threads = ctypes.c_int
    functions.antiphon_forward.argtypes = [_pointer, _pointer, _pointer, threads]
    functions.antiphon_attend.argtypes = [_pointer, _pointer, _pointer, _pointer, threads]
    functions.antiphon_product.argtypes = [
        *(_pointer, _pointer, _int),
        *(threads, _pointer, _pointer, _pointer),
        threads,
    ]
    functions.antiphon_draw.argtypes = [_pointer, _pointer, threads]
    functions.antiphon_pack.argtypes = [_pointer, _pointer, _int, _int, _int, _int, _pointer, threads]
    functions.antiphon_pack_whole.argtypes = [_pointer, _pointer, _int, _int, _pointer, _pointer, threads]
    functions.antiphon_norm.argtypes = [
        *(_pointer, _pointer, ctypes.c_float),
        *(threads, _int, _int),
        *(_pointer, threads),
    ]
    functions.antiphon_read.argtypes = [_pointer, _int, threads]
    functions.antiphon_read.restype = ctypes.c_uint32
    for name in ("forward", "attend", "product", "norm", "draw", "pack", "pack_whole"):
        getattr(functions, f"antiphon_{name}").restype = None
    functions.antiphon_together.restype = _int
    return Library(functions, functions.antiphon_together())
