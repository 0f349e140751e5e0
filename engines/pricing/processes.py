"""What processes of one machine repeat of attention, where one unit stands in for all of them.

tokens are dealt    each process reads all weights, for tokens of its own
split               a decoded token of large attention: each computes its heads, and nothing is repeated
else                each computes all of it
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from devices.base import Unit
from devices.models.operation import Operation
from devices.models.sheet import Sheet
from engines.dispatch import DispatchPlan
from engines.pricing.model_shape import ModelShape
from engines.pricing.steps import same
from engines.techniques.over_ranks import passed_values, splits_attention


class Repeats(NamedTuple):
    """How often weights are read, and work is done."""

    weights: int = 1
    work: int = 1


ONCE = Repeats()


def repeats(
    plans: Iterable[DispatchPlan | None], is_one_decoded: bool, shape: ModelShape, unit: Unit, sheet: Sheet | None
) -> Repeats:
    """Of a step with these plans. is_one_decoded: of one token, which is decoded. unit: of attention."""
    exchanges = next((plan.exchanges for plan in plans if plan is not None), ())
    if sheet is None or not exchanges:
        return ONCE
    ranks = exchanges[0].units
    n = sum(own != unit == sheet.computing(own) for own in ranks)
    kinds = {exchange.kind for exchange in exchanges}
    if n > 1 and "all_gather" in kinds:
        return Repeats(weights=n)
    attention_bytes = 0.0 if shape.latent is not None else shape.attention_bytes
    n_passed = passed_values(shape.n_heads, shape.n_kv_heads, shape.head_dim, shape.hidden)
    is_split = is_one_decoded and splits_attention(len(ranks), shape.n_kv_heads, attention_bytes, n_passed)
    return ONCE if n <= 1 or is_split or "all_reduce" not in kinds else Repeats(n, n)


def repeated(operations: Sequence[Operation], found: Repeats) -> Sequence[Operation]:
    if found == ONCE:
        return operations
    return [
        same(
            replace(
                one,
                weight_bytes=found.weights * one.weight_bytes,
                flops=found.work * one.flops,
                moved_bytes=found.work * one.moved_bytes,
            )
        )
        for one in operations
    ]
