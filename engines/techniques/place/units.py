"""Places that know no load: one unit for all experts, or all experts in slices on several.

Source of the slices: the Neuron guide (004), logical cores of two physical ones ("LNC2"), N cores here:

    hidden        [B, H/N] @ [H/N, I], sums of gate and up added on all cores, [B, I] @ [I, H/N]
    intermediate  [B, H] @ [H, I/N] @ [I/N, H], results added
    blocks        calls dealt in turn, each core's results of all tokens added at the end

Where sums are added (`Summed`) is said for hidden; for the others here the first core.

Legend: B rows of a call, E experts, H model width, I expert width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from devices.base import Unit
from engines.calls import Integers, Width
from engines.errors import EngineError
from engines.techniques.base import Layout, Piece, Place, Share, Summed
from engines.techniques.context import NOTHING, BuildContext, LayerInput
from results.records import Record


class OneUnitParameters(Record):
    kind: Literal["one_unit"] = "one_unit"
    unit: Literal["cpu", "gpu", "npu"] = "cpu"
    naive_launch: bool = False
    """Launched by a runtime that decides by itself where a graph goes, which costs time (000, Core ML naive)."""

    @property
    def units(self) -> tuple[Unit, ...]:
        return (self.unit,)

    def build(self, context: BuildContext, layout: Layout) -> Fixed:
        return Fixed(Share((Piece(self.unit, None, self.naive_launch),)))


class ShardsParameters(Record):
    kind: Literal["shards"] = "shards"
    shard: Literal["hidden", "intermediate", "blocks"] = "intermediate"
    """Each core computes a slice of the model width or of the intermediate dimension of every call, or some calls."""
    cores: int = Field(default=2, ge=1, le=64)

    @property
    def units(self) -> tuple[Unit, ...]:
        return tuple(f"core:{core}" for core in range(self.cores))

    def too_many(self, hidden: int, inner: int) -> str | None:
        """Why an expert of these widths has no slice for each core, or None."""
        columns = hidden if self.shard == "hidden" else inner
        if self.shard == "blocks" or self.cores <= columns:
            return None
        return f"{self.cores} cores cannot share {columns} columns of an expert"

    def build(self, context: BuildContext, layout: Layout) -> Fixed:
        if context.sizes is None:
            raise EngineError("shards of experts need a model with experts")
        hidden, inner = context.sizes.hidden, context.sizes.expert_width
        sent = context.exchanged_sizes or context.sizes
        if self.shard == "blocks":
            whole = tuple(Piece(unit, overlaps=True) for unit in self.units)
            return Fixed(Share(whole, dealt=True, summed=Summed("reduce", sent.hidden, "token")))
        columns = hidden if self.shard == "hidden" else inner
        reason = self.too_many(hidden, inner)
        if reason is not None:
            raise EngineError(reason)
        parts = list(zip(self.units, slices(columns, self.cores), strict=True))
        if self.shard == "hidden":
            pieces = tuple(Piece(unit, hidden=part, overlaps=True) for unit, part in parts)
            return Fixed(Share(pieces, summed=Summed("all_reduce", 2 * sent.expert_width, "row")))
        pieces = tuple(Piece(unit, part, overlaps=True) for unit, part in parts)
        return Fixed(Share(pieces, summed=Summed("reduce", sent.hidden, "row")))


def slices(width: int, n: int) -> list[Width]:
    """n slices of so many columns, as even as can be."""
    ends = [width * (i + 1) // n for i in range(n)]
    return [Width(first, end) for first, end in zip([0, *ends], ends, strict=False)]


class Fixed:
    """The same shares for every layer and load."""

    asks = NOTHING

    def __init__(self, *shares: Share) -> None:
        self._shares = shares

    def shares(self, seen: LayerInput, load_E: Integers) -> Sequence[Share]:
        return self._shares

    def decode_shares(self, layer: int) -> Sequence[Share] | None:
        return self._shares


class DecodesOn:
    """One share of all experts in decoding; another place in prefill."""

    def __init__(self, decode: Share, prefill: Place) -> None:
        self.asks = prefill.asks
        self.prefill = prefill
        self._decode = (decode,)

    def shares(self, seen: LayerInput, load_E: Integers) -> Sequence[Share]:
        return self.prefill.shares(seen, load_E) if seen.phase == "prefill" else self._decode

    def decode_shares(self, layer: int) -> Sequence[Share] | None:
        return self._decode
