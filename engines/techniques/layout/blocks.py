"""Blocks of B rows, one expert each: nothing is dropped, every shape is one shape.

Source: the Neuron guide (004), "blockwise matrix multiplication". Pairs go to blocks of their expert, so expert e has
ceil(n_e / B); which block has which expert follows from the cumulative sum of these. Provisioned are

    sufficient    ceil(T K / B) + E - 1                                  (as the guide prints)
    tight         min(T K, ceil((T K - (E - 1)) / B) + E - 1)            (as its reference code has it)

Blocks that no expert needs are all padding: computed unless `skip_padding_blocks` (the guide's dynamic loop). Which
expert they would run is not said; here the last one, as in its reference code. Of a rank, E is the number of experts
that it holds: all pairs may come to it. `skip_weight_loads`: a block that follows one of the same expert finds its
weights loaded. `skip_padded_rows`: rows of padding, in blocks of padding only too, are not fetched; they are computed
still. All three skips are on by themselves, as the guide recommends.

`block_size = "intensity"` takes the smallest power of two from 64 on whose arithmetic intensity, B n_blocks / E FLOP
for a byte of bf16 weights, reaches `flop_per_byte` of the machine. A step of few pairs has blocks for all E experts or,
where they are tight, for its pairs: then B alone brings the intensity, and may be larger than the step.

Legend: T tokens, K experts per token, E experts, B rows of a block, S segments: one a block.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator

from engines.calls import Integers
from engines.decode_layout import DecodeLayout
from engines.residency import Booleans
from engines.techniques.base import Overflow, Rows
from engines.techniques.context import NOTHING, BuildContext, LayerInput
from results.records import Record

DEFAULT_BLOCK = 512
SMALLEST_BLOCK = 64
MOST_ROWS = 1 << 20
BlockCount = Literal["sufficient", "tight"]


class BlocksParameters(Record):
    static: ClassVar[bool] = True
    needs_profile: ClassVar[bool] = False

    kind: Literal["blocks"] = "blocks"
    block_size: int | Literal["intensity"] = DEFAULT_BLOCK
    flop_per_byte: float = Field(default=230.0, gt=0, le=1e5)
    """Of the machine, for "intensity": Trn2 does 667 TFLOP/s in bf16 over 2.9 TB/s."""
    block_count: BlockCount = "sufficient"
    skip_padding_blocks: bool = True
    skip_weight_loads: bool = True
    skip_padded_rows: bool = True

    @field_validator("block_size")
    @classmethod
    def _in_range(cls, size: int | str) -> int | str:
        if isinstance(size, int) and not 1 <= size <= MOST_ROWS:
            raise ValueError(f'block_size {size} must be 1 to {MOST_ROWS} rows, or "intensity"')
        return size

    @property
    def lossless(self) -> bool:
        return True

    def build(self, context: BuildContext) -> Blocks:
        return Blocks(self, context)


def n_blocks(n_pairs: int, n_experts: int, block_size: int, count: BlockCount) -> int:
    """Blocks that hold any routing of so many pairs."""
    if count == "sufficient":
        return -(-n_pairs // block_size) + n_experts - 1
    return min(n_pairs, -(-max(n_pairs - (n_experts - 1), 0) // block_size) + n_experts - 1)


def intensity(n_pairs: int, n_experts: int, block_size: int, count: BlockCount) -> float:
    """FLOP per byte of weights in bf16: two for each row and weight, over two bytes for each weight of all experts."""
    return block_size * n_blocks(n_pairs, n_experts, block_size, count) / n_experts


class Blocks:
    asks = NOTHING
    static = True
    overflow: Overflow = "none"
    may_overflow = False
    renormalise = False

    def __init__(self, parameters: BlocksParameters, context: BuildContext) -> None:
        self._parameters = parameters
        self.skips_padding = parameters.skip_padded_rows
        self._top_k = context.sizes.top_k if context.sizes is not None else 1

    def block_size(self, n_pairs: int, n_experts: int) -> int:
        """Rows of a block in a step of so many pairs."""
        parameters = self._parameters
        if parameters.block_size != "intensity":
            return parameters.block_size
        size = SMALLEST_BLOCK
        while (
            size < MOST_ROWS and intensity(n_pairs, n_experts, size, parameters.block_count) < parameters.flop_per_byte
        ):
            size *= 2
        return size

    def rows(self, seen: LayerInput, load_E: Integers, own_E: Booleans | None = None) -> Rows:
        n_tokens, top_k = seen.routing.expert_ids_TK.shape
        n_pairs, n_experts, parameters = n_tokens * top_k, len(load_E), self._parameters
        size = self.block_size(n_pairs, n_experts)
        needed_E = -(-load_E // size)
        expert_S = np.repeat(np.arange(n_experts), needed_E)
        # Of each block, its place among those of its expert.
        place_S = np.arange(len(expert_S)) - np.repeat(np.cumsum(needed_E) - needed_E, needed_E)
        valid_S = np.minimum(load_E[expert_S] - place_S * size, size)
        if not parameters.skip_padding_blocks:
            own = range(n_experts) if own_E is None else own_E.nonzero()[0].tolist()
            n_more = n_blocks(n_pairs, len(own), size, parameters.block_count) - len(expert_S)
            expert_S = np.append(expert_S, np.full(n_more, own[-1]))
            valid_S = np.append(valid_S, np.zeros(n_more, dtype=np.int64))
        rows_S, loads_S = np.full(len(expert_S), size), np.ones(len(expert_S), dtype=np.int64)
        if parameters.skip_weight_loads:
            loads_S[1:] = expert_S[1:] != expert_S[:-1]
        return Rows(expert_S, rows_S, valid_S, np.arange(len(expert_S)), load_E, loads_S)

    def decode_layout(self, layer: int, n_experts: int) -> DecodeLayout | None:
        n_pairs, parameters = self._top_k, self._parameters  # every chosen expert has a block
        size, n_padding = self.block_size(n_pairs, n_experts), 0
        if not parameters.skip_padding_blocks:
            n_padding = n_blocks(n_pairs, n_experts, size, parameters.block_count) - n_pairs
        return DecodeLayout((size,) * n_experts, n_padding_calls=n_padding)
