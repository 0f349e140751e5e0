"""Layers whose queries see a window: what they read and multiply, against closed forms and the model's own mask."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from devices.models.operation import Operation
from devices.models.sheet import Sheet
from engines.calls import CallKind
from engines.model.spans import Span
from engines.pricing.attention import attention_on
from engines.pricing.priced_step import PricedStep
from engines.pricing.schedule import operations
from engines.pricing.shapes import ModelShape
from engines.pricing.travels import Travels
from tests.test_priced_host import SHAPE, host, plan_of
from tests.toy_sheet import figure


def test_a_layer_that_sees_a_window_reads_and_multiplies_the_keys_of_its_window() -> None:
    """2 heads of 4 features, 4 FLOP a pair and feature; keys and values of one head, 4 bytes each. 3 queries behind 6
    keys see 4 each, from position 3 on: min(9, 3 - 1 + 4) keys, and 4 pairs each where scores stand apart. By twos
    they meet 5 keys, and 4 with the last alone. One decoded token of 9 reads 4; in blocks of 6, positions 6 to 8."""
    plan = plan_of(CallKind(), experts=(0, 1, 2))
    sliding, blocks = Span("sliding", 4), Span("chunked", 6)
    windowed = replace(SHAPE, spans=(sliding, None))

    def attentions(step: PricedStep, shape: ModelShape, sheet: Sheet | None) -> list[Operation]:
        found = operations(step, [plan], shape, "cpu", None, None if sheet is None else Travels(sheet))
        return [one for one in found if one.name == "attention"]

    on_npu = attention_on(PricedStep(3, 9), windowed, "npu", None, sliding)
    assert on_npu == attention_on(PricedStep(3, 9), windowed, "npu", None, None), (
        "a graph of fixed shape masks the rest"
    )
    apart = host(kernels=f"scores = {{ s_per_flop = {figure(1.0)}, s_per_moved_byte = {figure(1.0)} }}")
    n_projected = attentions(PricedStep(3, 9), SHAPE, None)[0].flops - 4 * 8 * 3 * 9
    dense = [one.flops - n_projected for one in attentions(PricedStep(3, 9), windowed, None)]
    assert dense == [4 * 8 * 3 * 6, 4 * 8 * 3 * 9]
    scores = [one for one in attentions(PricedStep(3, 9), windowed, apart) if one.kernel == "scores"]
    assert [one.flops for one in scores] == [4 * 8 * 3 * 4, 4 * 8 * (7 + 8 + 9)]
    assert [one.moved_bytes for one in scores] == [2 * 6 * 4 * 4, 2 * 9 * 4 * 4]
    assert PricedStep(3, 9).met_pairs(2, sliding) == 2 * 5 + 2 * 4
    assert [PricedStep(1, 9, "decode").n_keys(span) for span in (sliding, blocks, None)] == [4, 3, 9]
    assert PricedStep(2, 9, "decode", 2).met_pairs(8, sliding) == 2 * 4
    assert [PricedStep(1, n).n_keys(sliding) for n in (1, 3, 4, 5)] == [1, 3, 4, 4], "a window that is not full"


@settings(deadline=None, max_examples=60)
@given(
    n_own=st.integers(1, 20), n_past=st.integers(0, 30), tile=st.integers(1, 8), window=st.integers(1, 24),
    kind=st.sampled_from(["sliding", "chunked"]),
)  # fmt: skip
def test_pairs_within_a_window_are_those_of_its_mask(
    n_own: int, n_past: int, tile: int, window: int, kind: Literal["sliding", "chunked"]
) -> None:
    """The mask of the model itself; of a tile's rows the keys between the first and the last that any of them sees."""
    span, step = Span(kind, window), PricedStep(n_own, n_past + n_own)
    query_T1, key_S = np.arange(n_past, n_past + n_own)[:, None], np.arange(n_past + n_own)
    mask_TS = (key_S <= query_T1) & span.reaches(query_T1, key_S)
    assert step.n_keys(span) == np.ptp(np.flatnonzero(mask_TS.any(axis=0))) + 1
    rows = 1 if n_own == 1 else tile
    tiles = [mask_TS[begin : begin + rows].any(axis=0) for begin in range(0, n_own, rows)]
    assert step.met_pairs(tile, span) == sum(rows * int(np.ptp(np.flatnonzero(seen)) + 1) for seen in tiles)
    assert step.met_pairs(1, span) == mask_TS.sum()
