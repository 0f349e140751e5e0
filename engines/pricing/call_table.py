"""The calls of a plan as a price reads them: what is gathered for them, which follow each other, whose tokens they are.

Legend: R rows of a plan, S segments, C calls, K kinds of calls, T tokens.
"""

from __future__ import annotations

import numpy as np

from devices.base import Unit
from engines.calls import Calls, Integers
from engines.dispatch import DispatchPlan

MANY = 8
"""Calls of a kind after which it pays to look at them together."""


class CallTable:
    """The calls of a plan as lists. kind_C: index into their kinds."""

    def __init__(self, calls: Calls) -> None:
        self._calls, n = calls, len(calls)
        if n == len(calls.expert_S):
            self.rows_C: list[int] = calls.rows_S.tolist()
            self._valid_C: list[int] = calls.valid_S.tolist()
            self.n_experts_C = [1] * n
        else:
            self.rows_C = np.add.reduceat(calls.rows_S, calls.starts_C).tolist() if n else []
            self._valid_C = np.add.reduceat(calls.valid_S, calls.starts_C).tolist() if n else []
            self.n_experts_C = (calls.ends_C - calls.starts_C).tolist()
        self.kind_C: list[int] = [0] * n if calls.kind_C is None else calls.kind_C.tolist()
        self.loads_C: list[int] = self.n_experts_C if calls.weight_loads_C is None else calls.weight_loads_C.tolist()

    def gathered(self) -> tuple[int, int, int]:
        """Valid rows of static shapes, of others, and rows of padding that are filled. Slices share their rows."""
        kinds = self._calls.kinds
        rows_K, valid_K = [0] * len(kinds), [0] * len(kinds)
        if len(kinds) == 1:
            rows_K, valid_K = [sum(self.rows_C)], [sum(self._valid_C)]
        elif self._calls.kind_C is not None and len(self.rows_C) > MANY:
            # Whole numbers, exact in floating point.
            rows_K = np.bincount(self._calls.kind_C, self.rows_C, len(kinds)).astype(int).tolist()
            valid_K = np.bincount(self._calls.kind_C, self._valid_C, len(kinds)).astype(int).tolist()
        else:
            for number, n_rows, n_valid in zip(self.kind_C, self.rows_C, self._valid_C, strict=True):
                rows_K[number] += n_rows
                valid_K[number] += n_valid
        valid_static = valid_dynamic = padded = 0
        for kind, n_rows, n_valid in zip(kinds, rows_K, valid_K, strict=True):
            if not kind.is_first_slice:
                continue
            if kind.static:
                valid_static += n_valid
            else:
                valid_dynamic += n_valid
            if not kind.skips_padding:
                padded += n_rows - n_valid
        return valid_static, valid_dynamic, padded

    def runs(self) -> list[tuple[int, int, bool]]:
        """First and end of calls that stand one after another, and whether they are of one kind; all calls together
        where kinds change often."""
        n, kind_C = len(self.rows_C), self._calls.kind_C
        if n == 0:
            return []
        edges = [] if kind_C is None else (np.flatnonzero(kind_C[1:] != kind_C[:-1]) + 1).tolist()
        if MANY * len(edges) >= n:
            return [(0, n, not edges)]
        return [(first, end, True) for first, end in zip([0, *edges], [*edges, n], strict=True)]

    def spans(self) -> dict[Unit, tuple[Integers, Integers]]:
        """The rows of each unit's calls: first and end."""
        calls = self._calls
        first_C, rows_C = calls.first_row_S[calls.starts_C], np.array(self.rows_C, dtype=np.int64)
        kind_C = np.array(self.kind_C, dtype=np.int64)
        units = list(dict.fromkeys(kind.unit for kind in calls.kinds))
        unit_C = np.array([units.index(kind.unit) for kind in calls.kinds], dtype=np.int64)[kind_C]
        unit_C[rows_C == 0] = -1
        order_C = unit_C.argsort(kind="stable")
        first_C, end_C, unit_C = first_C[order_C], (first_C + rows_C)[order_C], unit_C[order_C]
        edges = unit_C.searchsorted(np.arange(len(units) + 1)).tolist()
        return {
            unit: (first_C[begin:end], end_C[begin:end])
            for unit, begin, end in zip(units, edges, edges[1:], strict=False)
        }

    def units(self) -> list[Unit]:
        """Of calls with rows, in their order."""
        kinds = self._calls.kinds
        numbers = dict.fromkeys(number for number, n in zip(self.kind_C, self.rows_C, strict=True) if n)
        return list(dict.fromkeys(kinds[number].unit for number in numbers))


def tokens_of_units(plan: DispatchPlan, table: CallTable) -> dict[Unit, int]:
    """How many tokens each unit computes for."""
    units = table.units()
    if plan.n_tokens == 1 or len(units) == 1:
        return dict.fromkeys(units, plan.n_tokens)
    token_R = plan.token_R.cpu().numpy()
    spans, known = table.spans(), dict[tuple[bytes, bytes], int]()
    found: dict[Unit, int] = {}
    for unit in units:
        first_C, end_C = spans[unit]
        key = first_C.tobytes(), end_C.tobytes()
        if key not in known:
            n = len(token_R) + 1
            change_R = np.bincount(first_C, minlength=n) - np.bincount(end_C, minlength=n)
            is_there_T = np.zeros(plan.n_tokens + 1, dtype=np.bool_)
            is_there_T[token_R[change_R[:-1].cumsum() > 0]] = True  # padding: the last
            known[key] = int(is_there_T[:-1].sum())
        found[unit] = known[key]
    return found
