"""The calls of a plan as a price reads them: what is gathered for them, which follow each other, whose tokens they are.

Legend: R rows of a plan, S segments, C calls, K kinds of calls, U units, T tokens.
"""

from __future__ import annotations

from operator import itemgetter

import numpy as np

from devices.base import Unit
from engines.calls import Calls, Integers
from engines.dispatch import DispatchPlan


class CallTable:
    """The columns of a plan's calls. kind_C: index into their kinds."""

    def __init__(self, calls: Calls) -> None:
        self._calls, n = calls, len(calls)
        if n == len(calls.expert_S):
            self.rows_C, self._valid_C, self.n_experts_C = calls.rows_S, calls.valid_S, np.ones(n, dtype=np.int64)
        else:
            self.rows_C = np.add.reduceat(calls.rows_S, calls.starts_C) if n else calls.starts_C
            self._valid_C = np.add.reduceat(calls.valid_S, calls.starts_C) if n else calls.starts_C
            self.n_experts_C = calls.ends_C - calls.starts_C
        self.kind_C = np.zeros(n, dtype=np.int64) if calls.kind_C is None else calls.kind_C
        self.loads_C = self.n_experts_C if calls.weight_loads_C is None else calls.weight_loads_C

    def gathered(self) -> tuple[int, int, int]:
        """Valid rows of static shapes, of others, and rows of padding that are filled. Slices share their rows."""
        kinds = self._calls.kinds
        if len(kinds) == 1:
            rows_K, valid_K = [int(self.rows_C.sum())], [int(self._valid_C.sum())]
        else:
            # Whole numbers, exact in floating point.
            rows_K = np.bincount(self.kind_C, self.rows_C, len(kinds)).astype(int).tolist()
            valid_K = np.bincount(self.kind_C, self._valid_C, len(kinds)).astype(int).tolist()
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

    def spans(self) -> dict[Unit, tuple[Integers, Integers]]:
        """The rows of each unit's calls: first and end."""
        calls = self._calls
        first_C, rows_C = calls.first_row_S[calls.starts_C], self.rows_C
        units = list(dict.fromkeys(kind.unit for kind in calls.kinds))
        unit_C = np.array([units.index(kind.unit) for kind in calls.kinds], dtype=np.int64)[self.kind_C]
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
        kinds, number_C = self._calls.kinds, self.kind_C[self.rows_C > 0]
        return list(dict.fromkeys(kinds[number].unit for number in places_of(number_C, len(kinds))))


def places_of(number_C: Integers, n_numbers: int) -> dict[int, int]:
    """Of each number that is there, where it stands first; in the order of these."""
    first_K = np.full(n_numbers, -1)
    first_K[number_C[::-1]] = np.arange(len(number_C))[::-1]  # assigned backwards, the first stands
    return dict(sorted(((n, place) for n, place in enumerate(first_K.tolist()) if place >= 0), key=itemgetter(1)))


def tokens_of_units(plan: DispatchPlan, table: CallTable) -> dict[Unit, int]:
    """How many tokens each unit computes for."""
    units = table.units()
    if plan.n_tokens == 1 or len(units) == 1:
        return dict.fromkeys(units, plan.n_tokens)
    token_R = plan.token_R.cpu().numpy()
    if plan.calls.is_one_after_another:
        return _tokens_of_whole(plan, table, units, token_R)
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


def _tokens_of_whole(plan: DispatchPlan, table: CallTable, units: list[Unit], token_R: Integers) -> dict[Unit, int]:
    """The same where each row is computed once, and rows stand in the order of the calls."""
    unit_K = np.array([units.index(kind.unit) if kind.unit in units else 0 for kind in plan.calls.kinds])
    is_there_UT = np.zeros((len(units), plan.n_tokens + 1), dtype=np.bool_)
    is_there_UT[unit_K[table.kind_C].repeat(table.rows_C), token_R] = True  # padding: the last
    return dict(zip(units, is_there_UT[:, :-1].sum(1).tolist(), strict=True))
