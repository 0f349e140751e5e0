"""One capacity for all experts.

Sources: NPUMoE (000), Table 2 and §5.7: "base" has one fixed shape, Core ML naive one that holds every load. The Neuron
guide (004): dropping with a capacity factor, C = min(T, ceil(T K cf / E)). Which pairs go (those of later tokens) is
read in its reference code, and that the weights of the others are made to add up again where the router's are
(`normalize_top_k_affinities`), and else stay as they are.

Rules that the sources leave open, as built here:
- `of = "chunk"` freezes the shape on the prefill chunk, for short chunks and decoding too; `of = "tokens"` follows the
  step, as a compiler's bucket of that length does.
- `rows = "max"` is the largest load of the step, so its shape follows the routing: what naive Core ML had compiled is
  not said, and for a naive launch a graph of that size is taken to be there. It decodes with the largest graph that
  the request's prefill launched in the layer (`decode_graphs = "same"`, as Table 2 has it), or one of one row.
- Every expert is launched in prefill (`launch = "all"`); in decoding, those that have tokens.

Legend: T tokens, K experts per token, E experts, S segments, L layers with experts.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from engines.calls import Integers
from engines.decode_layout import DecodeLayout
from engines.errors import EngineError
from engines.residency import Booleans
from engines.techniques.base import Overflow, Rows
from engines.techniques.context import NOTHING, Asks, BuildContext, LayerInput
from engines.techniques.layout.exact import one_call_each
from results.records import Record


class CapacityParameters(Record):
    needs_profile: ClassVar[bool] = False

    kind: Literal["capacity"] = "capacity"
    factor: float = Field(default=1.25, gt=0, le=1e6)
    """Rows are this multiple of the mean load T K / E."""
    rows: int | Literal["max"] | None = None
    """In place of `factor`: a number, or as many as the busiest expert of the step has."""
    of: Literal["tokens", "chunk"] = "tokens"
    align: int = Field(default=1, ge=1, le=4096)
    launch: Literal["all", "active"] = "all"
    decode_graphs: Literal["same", "single"] = "same"
    """Under rows = "max": the prefill's graph or one of one row. A capacity other than that is the same anyway."""
    overflow: Overflow = "order"
    renormalise_survivors: bool | Literal["model"] = "model"
    """Whether what is left of a token's weights is scaled to their sum before the drop; "model": where the router makes
    its weights add up."""

    @model_validator(mode="after")
    def _holds_what_it_must(self) -> CapacityParameters:
        if isinstance(self.rows, int) and not 1 <= self.rows <= 2**31:
            raise ValueError(f"rows {self.rows} must be 1 to 2147483648")
        if self.rows != "max" and self.overflow == "none":
            raise ValueError(
                'overflow = "none" needs rows = "max": any other capacity may be too small; say which pairs go, with'
                ' overflow = "order" or "saliency"'
            )
        return self

    @property
    def static(self) -> bool:
        return self.rows != "max"

    @property
    def lossless(self) -> bool:
        return self.rows == "max"

    def build(self, context: BuildContext) -> Capacity:
        return Capacity(self, context)


class Capacity:
    skips_padding = False

    def __init__(self, parameters: CapacityParameters, context: BuildContext) -> None:
        self._parameters = parameters
        self.static = parameters.static
        self._chunk = context.chunk
        self._top_k = context.sizes.top_k if context.sizes is not None else 1
        self.overflow: Overflow = "none" if parameters.rows == "max" else parameters.overflow
        self.may_overflow = not self._holds_all_of_a_chunk(context)
        self.renormalise = _renormalises(parameters, context)
        self.keeps_graphs = parameters.rows == "max" and parameters.decode_graphs == "same"
        self.asks = Asks(counts=True) if self.keeps_graphs else NOTHING

    def rows(self, seen: LayerInput, load_E: Integers, own_E: Booleans | None = None) -> Rows:
        n_tokens, top_k = seen.routing.expert_ids_TK.shape
        is_all = self._parameters.launch == "all" and seen.phase == "prefill"
        expert_S = np.arange(len(load_E)) if is_all else load_E.nonzero()[0]
        busiest = int(load_E.max(initial=0))
        if self.keeps_graphs and seen.phase == "decode":
            size = self.kept_rows(seen, busiest)
        else:
            size = self.capacity(n_tokens, top_k, len(load_E), busiest)
        return one_call_each(expert_S, np.full(len(expert_S), size), load_E)

    def kept_rows(self, seen: LayerInput, busiest: int = 1) -> int:
        """Of every call of a decode step that takes the prefill's graphs. busiest: the largest load of the step."""
        if seen.counts is None:
            raise EngineError("decoding with the prefill's graphs needs the counts of the request; show them")
        return rounded_up(max(busiest, int(seen.counts.busiest_L[seen.layer])), self._parameters.align)

    def capacity(self, n_tokens: int, top_k: int, n_experts: int, busiest: int) -> int:
        """Rows of every call. busiest: the largest load of the step."""
        parameters = self._parameters
        if parameters.rows == "max":
            return rounded_up(max(busiest, 1), parameters.align)
        if parameters.rows is not None:
            return rounded_up(parameters.rows, parameters.align)
        of = n_tokens if parameters.of == "tokens" else self._chunk
        # str is the shortest decimal that is this float: what was written. A product of floats may cross a row.
        rows = math.ceil(Fraction(str(parameters.factor)) * of * top_k / n_experts)
        return rounded_up(min(of, rows), parameters.align)

    def _holds_all_of_a_chunk(self, context: BuildContext) -> bool:
        """Whether an expert has a row for each token of any chunk, and so for all that may choose it."""
        if self._parameters.rows == "max" or context.sizes is None:
            return self._parameters.rows == "max"
        # Under a factor the rows are min(T, ceil(T K cf / E)): of all T at once, or of none.
        return self.capacity(self._chunk, self._top_k, context.sizes.n_experts, self._chunk) >= self._chunk

    def decode_layout(self, layer: int, n_experts: int) -> DecodeLayout | None:
        if self.keeps_graphs:
            return None
        return DecodeLayout((self.capacity(1, self._top_k, n_experts, busiest=1),) * n_experts)


def _renormalises(parameters: CapacityParameters, context: BuildContext) -> bool:
    if parameters.renormalise_survivors != "model":
        return parameters.renormalise_survivors
    moe = None if context.model is None else context.model.config.moe
    return moe is None or moe.router.weights_add_up  # without a model there are no weights


def rounded_up(rows: int | Fraction, align: int) -> int:
    return math.ceil(Fraction(rows) / align) * align
