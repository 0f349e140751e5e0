"""Tensors as views of safetensors files, each mapped once and read-only.

A mapped page belongs to the page cache: it costs no memory of the process, and the kernel takes it back when memory is
short. `safetensors.safe_open` maps a file privately and writable, which Linux counts as memory that the process may yet
want: under a limit of private memory, or for a file beyond physical memory, that fails.

The format (https://huggingface.co/docs/safetensors): eight bytes of little-endian length, a JSON header of that length
that says each tensor's dtype, shape and place, the bytes of all tensors, each byte in one of them. A file that breaks
this may hold other weights than were meant, and is refused.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from engines.errors import EngineError

Shape = tuple[int, ...]
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""What the safetensors library takes too."""
MAX_DIMENSIONS = 64
"""What torch can compute with."""
LARGEST_SIZE = 2**63 - 1
CHECKED_AT_ONCE = 1 << 20
FAULTED_AROUND = 1 << 21
"""Around a page that is read Linux maps what it holds in one piece of memory: up to a huge page."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_MAPPED: WeakKeyDictionary[mmap.mmap, int] = WeakKeyDictionary()
"""Where each file that is mapped begins in memory."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """A file that is there whole or not at all. Raises `OSError`, which safetensors itself does not."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path, metadata=dict(metadata))
    except SafetensorError as error:
        if (found := re.search(r"os error (\d+)", str(error))) is None:
            raise OSError(f"{path}: {error}") from error
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: bytes begin .. end - 1 of the file."""

    dtype: torch.dtype
    shape: Shape
    begin: int
    end: int


class TensorFile:
    """One file. Its header is read at once; it is mapped with the first tensor and stays so while any tensor lives."""

    def __init__(self, path: Path) -> None:
        """Raises `EngineError` where the header or the file's size does not hold what the format asks."""
        self.path = path
        self.places = _read_header(path)

    def read(self, name: str) -> Tensor:
        """A view of the file; whoever writes to it dies."""
        place = self.places[name]
        taken = self._bytes[place.begin : place.end]
        # Writers align tensors; the format does not ask it of them, and the kernels ask it of us.
        aligned = taken if place.begin % place.dtype.itemsize == 0 else taken.clone()
        return aligned.view(place.dtype).view(place.shape)

    def release(self, name: str) -> None:
        """Gives the pages of a tensor back. Reading it again fetches them again, from the page cache if still there."""
        place = self.places[name]
        begin = place.begin - place.begin % mmap.PAGESIZE
        self._mapping.madvise(mmap.MADV_DONTNEED, begin, place.end - begin)

    @cached_property
    def _mapping(self) -> mmap.mmap:
        try:
            with self.path.open("rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise EngineError(f"{self.path}: cannot be mapped ({error}); check the file") from error

    @cached_property
    def _bytes(self) -> Tensor:
        return _as_tensor(self._mapping)


def mapped(descriptor: int) -> Tensor:
    """The bytes of an open file, which stays mapped while they live. Raises `OSError`."""
    return _as_tensor(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))


def _as_tensor(mapping: mmap.mmap) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        found = torch.frombuffer(mapping, dtype=torch.uint8)
    _MAPPED[mapping] = found.data_ptr()
    return found


def is_mapped(tensor: Tensor) -> bool:
    """Whether it is a view of a file that this module mapped."""
    return _mapping_of(tensor) is not None


def give_back(tensor: Tensor) -> None:
    """Takes the pages of a view of a file out of the process, and those beside it that came with them; reading fetches
    them again. Other tensors are left alone."""
    found = _mapping_of(tensor)
    if found is not None:
        mapping, begin = found
        first = max(begin - FAULTED_AROUND, 0)
        first -= first % mmap.PAGESIZE
        end = min(begin + tensor.nbytes + FAULTED_AROUND, len(mapping))
        mapping.madvise(mmap.MADV_DONTNEED, first, end - first)


def _mapping_of(tensor: Tensor) -> tuple[mmap.mmap, int] | None:
    """The mapping that holds it whole, and where in it the tensor begins."""
    address, n_bytes = tensor.data_ptr(), tensor.nbytes
    for mapping, start in list(_MAPPED.items()):
        if tensor.is_contiguous() and start <= address and address + n_bytes <= start + len(mapping):
            return mapping, address - start
    return None


def is_finite(tensor: Tensor) -> bool:
    """Whether there is neither NaN nor infinity: in one pass and without a copy, for extremes carry a NaN along."""
    if tensor.dtype is torch.float8_e4m3fn:
        # No infinities; NaN is all ones but for the sign. There is no arithmetic on this type to find them with.
        pieces = torch.split(tensor.view(torch.uint8).flatten(), CHECKED_AT_ONCE)
        return not any(bool((piece & 127 == 127).any()) for piece in pieces)
    low, high = tensor.aminmax()
    return math.isfinite(low) and math.isfinite(high)


# --- the header ------------------------------------------------------------------------------------------------------


def _read_header(path: Path) -> dict[str, Place]:
    try:
        n_bytes = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            body = LENGTH_BYTES + length
            if n_bytes < LENGTH_BYTES or length > MAX_HEADER_BYTES or body > n_bytes:
                raise _damaged(path, f"a header of {length} bytes in a file of {n_bytes}")
            header = json.loads(file.read(length), object_pairs_hook=_each_once)
    except OSError as error:
        raise EngineError(f"{path}: cannot be read ({error}); check the file") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise _damaged(path, f"header is a {type(header).__name__}")
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not _are_texts(metadata):
        raise _damaged(path, f"__metadata__ is {metadata!r:.80}, not texts by name")
    places = {name: _place(path, name, entry, body, n_bytes) for name, entry in header.items()}
    _check_every_byte_is_of_one(path, places, body, n_bytes)
    return places


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises `ValueError` for a name that stands twice, of which JSON as Python reads it keeps the last."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"{name!r:.80} stands twice")
            seen.add(name)
    return found


def _are_texts(metadata: Any) -> bool:
    return isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())


def _check_every_byte_is_of_one(path: Path, places: dict[str, Place], body: int, n_bytes: int) -> None:
    """Raises `EngineError` where tensors overlap, or bytes belong to none."""
    before, end = "the header", body
    for name, place in sorted(places.items(), key=lambda item: (item[1].begin, item[1].end)):
        if place.begin < end:
            raise _damaged(path, f"tensor {name!r} begins {end - place.begin} bytes before {before} ends")
        if place.begin > end:
            raise _damaged(path, f"{place.begin - end} bytes between {before} and tensor {name!r} belong to none")
        before, end = f"tensor {name!r}", place.end
    if end < n_bytes:
        raise _damaged(path, f"{n_bytes - end} bytes after {before} belong to no tensor")


def _place(path: Path, name: str, entry: Any, body: int, n_bytes: int) -> Place:
    keys = entry.keys() if isinstance(entry, dict) else ()
    if set(keys) != {"dtype", "shape", "data_offsets"}:
        raise _damaged(path, f"tensor {name!r} is described by {entry!r:.80}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise _damaged(path, f"tensor {name!r} has shape {shape!r:.80} and offsets {offsets!r:.80}")
    if not isinstance(entry["dtype"], str):
        raise _damaged(path, f"tensor {name!r} has dtype {entry['dtype']!r:.80}")
    if entry["dtype"] not in DTYPES:
        raise EngineError(
            f"{path}: tensor {name!r} holds {entry['dtype']!r:.40}, which this engine does not read; there is "
            f"{', '.join(DTYPES)}"
        )
    # An empty tensor has strides too, and torch multiplies them all.
    if len(shape) > MAX_DIMENSIONS or math.prod(max(size, 1) for size in shape) > LARGEST_SIZE:
        raise _damaged(path, f"tensor {name!r} has shape {shape!r:.80}, beyond any tensor")
    dtype, (begin, end) = DTYPES[entry["dtype"]], offsets
    if end - begin != math.prod(shape) * dtype.itemsize or body + end > n_bytes:
        raise _damaged(
            path,
            f"tensor {name!r} of {entry['dtype']} {shape} at bytes {begin} to {end} of a body of {n_bytes - body}",
        )
    return Place(dtype, tuple(shape), body + begin, body + end)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _damaged(path: Path, found: str) -> EngineError:
    return EngineError(f"{path}: truncated or not safetensors ({found}); fetch the file again")
