"""A row a pair: one call for each expert that has tokens, with exactly its rows. Shapes follow the routing.

Legend: E experts, S segments (the rows of one expert in one call).
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from engines.calls import Integers
from engines.decode_layout import PLAIN, DecodeLayout
from engines.residency import Booleans
from engines.techniques.base import Overflow, Rows
from engines.techniques.context import NOTHING, BuildContext, LayerInput
from results.records import Record


class ExactParameters(Record):
    """Has no parameters: nothing is dropped, and nothing padded."""

    static: ClassVar[bool] = False
    needs_profile: ClassVar[bool] = False

    kind: Literal["exact"] = "exact"

    @property
    def lossless(self) -> bool:
        return True

    def build(self, context: BuildContext) -> Exact:
        return Exact()


class Exact:
    asks = NOTHING
    static = False
    overflow: Overflow = "none"
    may_overflow = False
    renormalise = False
    skips_padding = False

    def rows(self, seen: LayerInput, load_E: Integers, own_E: Booleans | None = None) -> Rows:
        return exact_rows(load_E)

    def decode_layout(self, layer: int, n_experts: int) -> DecodeLayout | None:
        return PLAIN


def exact_rows(load_E: Integers) -> Rows:
    """One call an expert that has pairs, by index."""
    expert_S = load_E.nonzero()[0]
    load_S = load_E[expert_S]
    return Rows(expert_S, load_S, load_S, np.arange(len(expert_S)), load_E)


def one_call_each(expert_S: Integers, rows_S: Integers, load_E: Integers) -> Rows:
    """A call an expert with rows of its own number; pairs beyond them overflow."""
    kept_E = np.zeros_like(load_E)
    kept_E[expert_S] = np.minimum(load_E[expert_S], rows_S)
    return Rows(expert_S, rows_S, kept_E[expert_S], np.arange(len(expert_S)), kept_E)
