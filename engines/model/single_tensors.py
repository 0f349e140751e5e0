"""A tensor of a checkpoint as it stays in memory: read by its name, and made into the form that was asked for."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engines.errors import EngineError
from engines.model.architecture import ModelConfig
from engines.model.large_pages import LargePages
from engines.model.mxfp4 import PackedBlocks, unpack_mxfp4
from engines.model.norms import NormWeights
from engines.model.quantised import (
    PLAIN_DTYPES,
    Arithmetic,
    Form,
    Matrix,
    Room,
    check_width,
    mxfp4_from_blocks,
    store,
)

SCALES_OF_BLOCKS = "_scale_inv"
"""Behind the name of a projection in FP8."""

Shape = tuple[int, ...]
Part = tuple[slice, ...]
"""Of a tensor, by dimension from the first on."""


class ReadsTensors(Protocol):
    """Gives a tensor that has the shape, or a part of it: maybe as a view of a file, whose other parts stay unread."""

    def __call__(self, name: str, shape: Shape, part: Part = ()) -> Tensor: ...


class SingleTensors:
    """Of one model. read: gives those of its files. room: for what stays. plain: the form of what is never narrowed."""

    def __init__(self, config: ModelConfig, read: ReadsTensors, dtype: torch.dtype, arithmetic: Arithmetic) -> None:
        """dtype: of the plain form. arithmetic: of products with matrices."""
        self._config, self._arithmetic = config, arithmetic
        self.read = read
        self.room = LargePages()
        self.plain: Form = next(form for form, own in PLAIN_DTYPES.items() if own is dtype)

    def matrix(self, name: str, form: Form, *shape: int) -> Matrix:
        return self.held(name, self.read(name, shape), form)

    def projection(
        self, name: str, form: Form | None, *shape: int, part: Part = (), room: Room | None = None
    ) -> Matrix:
        return self.held(name, self.projected(name, *shape, part=part), form, room=room)

    def projected(self, name: str, *shape: int, part: Part = ()) -> Tensor:
        """A projection inside a layer: these, and only these, may be stored in FP8 with a scale for each block. Files
        leave some of them wide (`modules_to_not_convert`), which have no scale."""
        weight = self.read(name, shape, part)
        if self._config.fp8_block is None or not (weight.is_meta or weight.dtype is torch.float8_e4m3fn):
            return weight
        rows, columns = self._config.fp8_block
        grid = (-(-shape[0] // rows), -(-shape[1] // columns))
        scale = self.read(name + SCALES_OF_BLOCKS, grid).float()
        if weight.is_meta:
            return weight  # only names and shapes are asked for: 45 000 products of nothing would take half a minute
        scale = scale.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(columns, 1)[:, : shape[1]]
        return weight.float() * scale[part]

    def held(
        self,
        name: str,
        weight: Tensor | PackedBlocks,
        form: Form | None,
        arithmetic: Arithmetic | None = None,
        room: Room | None = None,
    ) -> Matrix:
        """A matrix, or the part of one that is called `name`, as it stays in memory. Row-major, as kernels want it.
        form: None for the file's. arithmetic: None for the one that was asked for. room: None for what stays."""
        room = room or self.room
        if form is None:
            assert isinstance(weight, Tensor)  # packed ones are made into another form
            return weight
        try:
            check_width(weight.shape[-1], form)
            if isinstance(weight, PackedBlocks):
                if weight.blocks.is_meta:
                    return torch.empty(weight.shape, device="meta")
                if form == "mxfp4":
                    return mxfp4_from_blocks(weight, room)
                weight = unpack_mxfp4(weight.blocks, weight.scales)
            if weight.is_meta:
                return weight
            held = store(weight, form, arithmetic or self._arithmetic, room)
        except EngineError as error:
            raise EngineError(f"tensor {name!r}: {error}") from error
        if not isinstance(held, Tensor) or held.is_contiguous():
            return held
        return room(held.shape, held.dtype).copy_(held)

    def held_plain(self, name: str, weight: Tensor) -> Tensor:
        """For what is never quantised."""
        held = self.held(name, weight, self.plain, "fp32")
        assert isinstance(held, Tensor)  # every plain form is one
        return held

    def vector(self, name: str, *shape: int) -> Tensor:
        return self.read(name, shape).float()

    def norm(self, name: str) -> NormWeights:
        """A norm over the hidden state, of the model's kind."""
        norm, hidden = self._config.norm, self._config.hidden
        weight = self.vector(name + ".weight", hidden)
        bias = self.vector(name + ".bias", hidden) if norm.kind == "layer" else None
        return NormWeights(1.0 + weight if norm.from_one else weight, bias, norm.eps)

    def rms(self, name: str, width: int, eps: float) -> NormWeights:
        return NormWeights(self.vector(name + ".weight", width), None, eps)
