"""Reads a checkpoint's tensors by name, one at a time, from safetensors files.

It also computes the checkpoint's fingerprint.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors import safe_open as _safe_open
from torch import Tensor

from engine.model_folder import known_folder, read_config, read_json
from engine.types import LoadError

safe_open: Any = _safe_open  # a Rust class without annotations

INDEX = "model.safetensors.index.json"

BLOCKS = "_blocks"
"""How the name of a matrix of four-bit floats ends, two of which are a byte; bfloat16 computes them."""

_WHOLE = 64 << 20  # files up to this many bytes are hashed whole
_SAMPLE = 1 << 16  # of larger ones: this many bytes at each of `_SAMPLES` evenly spaced offsets
_SAMPLES = 64


class Checkpoint:
    """The tensors of one folder of safetensors files, single or sharded.

    Raises LoadError when the folder holds none, when one cannot be read, or when its index names a file that
    is not there.
    """

    def __init__(self, folder: Path, files: Sequence[Path] | None = None, *, within: str = "") -> None:
        """`files` of the folder; None: those of its model. within: what the names of the tensors begin with
        where they stand in a larger model; a checkpoint of the inner model alone is read as if they did."""
        self.folder = folder
        self.files = files or _safetensors_files(folder)
        self._handles = {path: _opened(path) for path in self.files}
        self._where = {name: path for path, handle in self._handles.items() for name in handle.keys()}  # noqa: SIM118
        self._prefix = "" if any(name.startswith(within) for name in self._where) else within
        self._where = {self._prefix + name: path for name, path in self._where.items()}
        self._unread = set(self._where)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def names(self) -> list[str]:
        """Of all tensors."""
        return list(self._where)

    def take(self, name: str) -> Tensor:
        """Read one tensor in the dtype it is stored in, and mark it as used."""
        path = self._where.get(name)
        if path is None:
            raise LoadError(f"{self.folder} has no tensor {name!r}")
        self._unread.discard(name)
        tensor: Tensor = self._handles[path].get_tensor(name.removeprefix(self._prefix))
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor, without reading it."""
        stored = name.removeprefix(self._prefix)
        return tuple(self._handles[self._where[name]].get_slice(stored).get_shape())

    def unread(self) -> list[str]:
        """Names of tensors that were not read: a loader that leaves some has misunderstood the model."""
        return sorted(self._unread)

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors together."""
        return sum(_elements(self.shape(name)) for name in self._where)

    @property
    def dtype(self) -> torch.dtype:
        """The stored dtype that holds the most elements."""
        sizes: dict[str, int] = {}
        for name, path in self._where.items():
            part = self._handles[path].get_slice(name.removeprefix(self._prefix))
            kind = part.get_dtype()
            if kind == "U8" and name.endswith(BLOCKS):
                kind = "BF16"
            sizes[kind] = sizes.get(kind, 0) + _elements(tuple(part.get_shape()))
        largest = max(sizes, key=lambda dtype: sizes[dtype])
        known = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        known["F8_E4M3"] = torch.bfloat16  # no type to compute in: its numbers times their scales are
        if largest not in known:
            raise LoadError(f"{self.folder} stores its weights as {largest}, which this engine does not read")
        return known[largest]

    def fingerprint(self) -> bytes:
        """16 bytes that name these weights, the same for every copy of the folder.

        Small files are hashed whole; of large ones the header (names, shapes, offsets) and evenly spaced
        samples.
        """
        digest = hashlib.blake2b(digest_size=16)
        for path in self.files:
            size = path.stat().st_size
            digest.update(struct.pack("<Q", size))
            with path.open("rb") as file:
                if size <= _WHOLE:
                    digest.update(file.read())
                    continue
                (header,) = struct.unpack("<Q", file.read(8))
                digest.update(file.read(header))
                for i in range(_SAMPLES):
                    file.seek(8 + header + (size - 8 - header - _SAMPLE) * i // (_SAMPLES - 1))
                    digest.update(file.read(_SAMPLE))
        return digest.digest()


def require_finite(name: str, tensor: Tensor) -> None:
    """Raises LoadError for a tensor with a number that is infinite or none: every logit would be NaN."""
    # the fastest pass that a NaN gets through; `isfinite` of each number takes ten times as long
    if tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise LoadError(f"{name} has weights that are not finite in {dtype}")


def _elements(shape: Iterable[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def require_headers(model: str | Path) -> None:
    """Raises LoadError for a path that leads to a folder whose config.json, or the headers of whose weights,
    cannot be read. The weights are not, and what is to be downloaded first may have both."""
    if (folder := known_folder(model)) is not None:
        read_config(folder)
        Checkpoint(folder)


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{path} cannot be read: {error}") from error


def _safetensors_files(folder: Path) -> list[Path]:
    index = read_json(folder, INDEX)
    if index is not None:
        where = index.get("weight_map")
        if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
            raise LoadError(f"{folder / INDEX} has no usable 'weight_map'")
        files = [folder / name for name in sorted(set(where.values()))]
        missing = [path.name for path in files if not path.exists()]
        if missing:
            raise LoadError(f"{folder} lacks {missing[0]}, which its index names")
        return files
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        others = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
        found = f", but {others[0]}, which is not read: load it by transformers" if others else ""
        how = ", and save_pretrained writes it in that format" if others else ""
        raise LoadError(f"{folder} holds no .safetensors file{found}{how}")
    return files
