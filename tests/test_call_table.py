"""Columns of a plan's calls, held against calls that are read one by one."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from devices.base import Unit
from engines.calls import CallKind, Calls, ExpertCall, Width
from engines.dispatch import DispatchPlan
from engines.pricing.call_table import CallTable, places_of, tokens_of_units

UNITS: tuple[Unit, ...] = ("gpu", "cpu", "ndp:0")
N_TOKENS = 5


@given(st.lists(st.integers(0, 4), max_size=12))
def test_each_number_stands_where_it_is_first(numbers: list[int]) -> None:
    found = places_of(np.array(numbers, dtype=np.int64), 5)
    assert list(found.items()) == [(n, numbers.index(n)) for n in dict.fromkeys(numbers)]


@given(st.lists(st.tuples(st.sampled_from(UNITS), st.integers(0, 3)), min_size=1, max_size=8), st.booleans(), st.data())
def test_a_unit_computes_for_the_tokens_of_its_rows(
    called: list[tuple[Unit, int]], in_slices: bool, data: st.DataObject
) -> None:
    """in_slices: all rows again on another unit."""
    ends = np.cumsum([n for _, n in called]).tolist()
    calls = [
        ExpertCall((e,), (n,), (n,), end - n, CallKind(unit, width=Width(0, 4) if in_slices else None))
        for e, ((unit, n), end) in enumerate(zip(called, ends, strict=True))
    ]
    if in_slices:
        again = CallKind("ndp:1", width=Width(4, 8))
        calls += [ExpertCall(c.experts, c.rows_per_expert, c.valid_per_expert, c.first_row, again) for c in calls]
    row_tokens = data.draw(st.lists(st.integers(-1, N_TOKENS - 1), min_size=ends[-1], max_size=ends[-1]))
    token_R, weight_R = torch.tensor(row_tokens, dtype=torch.int64), torch.ones(ends[-1])
    plan = DispatchPlan(N_TOKENS, token_R, weight_R, Calls.of(calls), ends[-1], 0)
    one_by_one: dict[Unit, set[int]] = {}
    for call in calls:
        if call.n_rows:
            own = row_tokens[call.first_row : call.first_row + call.n_rows]
            one_by_one.setdefault(call.unit, set()).update(t for t in own if t >= 0)
    expected = {unit: len(tokens) for unit, tokens in one_by_one.items()}
    if len(expected) == 1:
        expected = dict.fromkeys(expected, N_TOKENS)  # whoever computes alone has all tokens
    assert tokens_of_units(plan, CallTable(plan.calls)) == expected
