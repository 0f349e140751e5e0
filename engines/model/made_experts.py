"""Experts in another form than the checkpoint's, in a file of this process: mapped, so that they cost no memory of it.

The file has no name once it is open: it ends with the last expert that is read from it, however the process ends. It
lies where the system keeps temporary files (TMPDIR); where that is memory (tmpfs), it takes memory of the machine.

Legend: I expert width, H hidden.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from typing import BinaryIO

import torch
from torch import Tensor

from engines.errors import EngineError
from engines.model.experts import GatedWeights
from engines.model.quantised import Matrix
from engines.model.tensor_files import mapped
from results.units import told_apart

ALIGNMENT = 64
"""Bytes at which a tensor begins: a cache line, and what the kernels' widest loads ask."""


def tensors_of(expert: GatedWeights) -> tuple[Tensor, ...]:
    """Of its three matrices, in order, and then its biases: a plain matrix is one tensor, a narrow one its values and
    its scales, if it has some."""
    found: list[Tensor] = []
    for matrix in (expert.gate_IH, expert.up_IH, expert.down_HI):
        if isinstance(matrix, Tensor):
            found.append(matrix)
        else:
            found += [matrix.values, matrix.scales] if matrix.scales.shape[-1] else [matrix.values]
    biases = (expert.gate_bias_I, expert.up_bias_I, expert.down_bias_H)
    return *found, *(bias for bias in biases if bias is not None)


def with_tensors(expert: GatedWeights, tensors: Iterable[Tensor]) -> GatedWeights:
    """The same expert, out of other tensors of their types and shapes, as `tensors_of` orders them."""
    left = iter(tensors)

    def matrix(like: Matrix) -> Matrix:
        if isinstance(like, Tensor):
            return next(left)
        return replace(like, values=next(left), scales=next(left) if like.scales.shape[-1] else like.scales)

    def bias(like: Tensor | None) -> Tensor | None:
        return None if like is None else next(left)

    return GatedWeights(
        matrix(expert.gate_IH),
        matrix(expert.up_IH),
        matrix(expert.down_HI),
        bias(expert.gate_bias_I),
        bias(expert.up_bias_I),
        bias(expert.down_bias_H),
    )


class MadeExperts:
    """One file a layer, so that what was read of one can be given back whole."""

    def __init__(self, n_experts: int) -> None:
        """n_experts: of all layers, so that what has no room is told with the first."""
        self._n_left = n_experts

    def kept(self, experts: Iterable[GatedWeights]) -> tuple[GatedWeights, ...]:
        """Takes them one by one, and holds none. Raises `EngineError` where no file can be written."""
        places: list[list[int]] = []
        like: GatedWeights | None = None
        try:
            with tempfile.TemporaryFile(prefix="joulebench-experts-") as file:
                for expert in experts:
                    # One for all: many small ones keep the allocator from giving back what it narrowed in.
                    if like is None:
                        like = without_values(expert)
                        self._check_room(like)
                    places.append([_written(file, tensor) for tensor in tensors_of(expert)])
                file.flush()
                whole = mapped(file.fileno())
        except OSError as error:
            raise EngineError(
                f"experts in another form than the checkpoint's are kept in a file in {tempfile.gettempdir()}, and it"
                f" cannot be written ({error.strerror or error}); give it room, or set TMPDIR to a folder that has it"
            ) from error
        assert like is not None  # a layer with experts has some
        self._n_left -= len(places)
        return tuple(with_tensors(like, _views(whole, tensors_of(like), begins)) for begins in places)

    def _check_room(self, like: GatedWeights) -> None:
        """Raises `EngineError` where the experts that are still to come do not fit on the disk."""
        one = sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors_of(like))
        free_bytes = shutil.disk_usage(tempfile.gettempdir()).free
        if self._n_left * one > free_bytes:
            needed, free = told_apart(self._n_left * one, free_bytes)
            raise EngineError(
                f"experts in another form than the checkpoint's are kept in a file in {tempfile.gettempdir()}: they"
                f" need {needed} there, and {free} are free; give it room, or set TMPDIR to a folder that has it"
            )


def without_values(expert: GatedWeights) -> GatedWeights:
    """Its types and shapes, without values."""
    return with_tensors(expert, [torch.empty_like(tensor, device="meta") for tensor in tensors_of(expert)])


def _written(file: BinaryIO, tensor: Tensor) -> int:
    """Where in the file it begins."""
    file.write(bytes(-file.tell() % ALIGNMENT))
    begin = file.tell()
    file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return begin


def _views(whole: Tensor, like: Iterable[Tensor], begins: Iterable[int]) -> list[Tensor]:
    return [
        whole[begin : begin + one.nbytes].view(one.dtype).view(one.shape)
        for one, begin in zip(like, begins, strict=True)
    ]
