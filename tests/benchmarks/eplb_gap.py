"""How far greedy packing of experts is from the best packing, and what it makes of recorded routing.

python -m tests.benchmarks.eplb_gap

Small cases are held against all replications and all packings of them. Counted, so the same on every machine. Recorded
routing needs the data folder.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations_with_replacement
from math import comb

import numpy as np
import pytest

from engines.techniques.place.packing import Packed, flat, heaviest
from tests.benchmarks.measurement import Measurement, measured, write_page
from tests.played_traces import counted, gpt_oss_sequences
from tests.test_packing import optimum

NAME = "eplb-gap"
MOST_LOAD = 4
CASES = ((4, 2, 2), (4, 2, 3), (4, 3, 2), (4, 4, 2), (5, 2, 3), (5, 2, 4), (6, 2, 3), (6, 3, 2), (6, 2, 4))
"""Experts, ranks, slots of each."""
RANKS, SPARE = (2, 4, 8, 16), (0, 1, 2, 4)
"""Of the recorded routing; spare slots of each rank."""
EVERY = 10
"""Which n-th answer is judged; packing goes by the loads of the others."""


def gap_rows() -> Iterator[Measurement]:
    """Of all multisets of loads from 0 to `MOST_LOAD`, but those of no load at all."""
    for n_experts, n_ranks, slots in CASES:
        ratios = {}
        for load_E in combinations_with_replacement(range(MOST_LOAD + 1), n_experts):
            if any(load_E):
                ratios[load_E] = heaviest(load_E, flat(load_E, n_ranks, slots)) / optimum(load_E, n_ranks, slots)
        assert len(ratios) == comb(MOST_LOAD + n_experts, n_experts) - 1
        worst = max(ratios, key=lambda loads: (ratios[loads], loads))
        where = f"{n_experts} experts, {n_ranks} ranks of {slots} slots"
        note = f"loads {' '.join(map(str, worst))}: {ratios[worst]}"
        yield measured("worst of greedy over best", float(ratios[worst]), "", where, note=note)
        yield measured("mean of greedy over best", float(sum(ratios.values()) / len(ratios)), "", where)
        is_best = 100 * sum(ratio == 1 for ratio in ratios.values()) / len(ratios)
        yield measured("greedy is best", is_best, "%", where, note=f"of {len(ratios)} loads")


def in_runs(n_experts: int, n_ranks: int) -> Packed:
    """As `expert-parallel` deals them."""
    size = n_experts // n_ranks
    return tuple(tuple(range(r * size, (r + 1) * size)) for r in range(n_ranks))


def trace_rows() -> Iterator[Measurement]:
    """The busiest rank's tokens over the mean rank's, mean over layers, of answers that packing did not see."""
    sequences = gpt_oss_sequences()
    seen = counted([one for n, one in enumerate(sequences) if n % EVERY]).tokens_per_expert
    judged = counted(sequences[::EVERY]).tokens_per_expert
    for n_ranks in RANKS:
        size = 32 // n_ranks
        runs = [busiest(load_E, in_runs(32, n_ranks)) for load_E in judged.values()]
        yield skew("expert-parallel, in runs", n_ranks, runs)
        for spare in SPARE:
            packs = [flat(load_E, n_ranks, size + spare) for load_E in seen.values()]
            found = [busiest(load_E, pack) for load_E, pack in zip(judged.values(), packs, strict=True)]
            yield skew(f"eplb, {spare} spare slots", n_ranks, found)
            itself = [busiest(load_E, pack) for load_E, pack in zip(seen.values(), packs, strict=True)]
            yield skew(f"eplb, {spare} spare slots, of the loads that it packed by", n_ranks, itself)


def busiest(load_E: Sequence[int], ranks: Packed) -> float:
    return float(heaviest(load_E, ranks) * len(ranks) / Fraction(sum(load_E)))


def skew(name: str, n_ranks: int, found: Sequence[float]) -> Measurement:
    note = f"layers {min(found):.2f} to {max(found):.2f}"
    return measured("busiest rank over mean", float(np.mean(found)), "", f"{name}, {n_ranks} ranks", note=note)


def gap_table(rows: Sequence[Measurement]) -> str:
    lines = ["| | worst | at loads | mean | greedy is best |", "|---|---|---|---|---|"]
    for worst, mean, best in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        loads, _, exact = (worst.note or "").removeprefix("loads ").partition(": ")
        lines.append(f"| {worst.conditions} | {exact} | {loads} | {mean.ours:.4f} | {best.ours:.0f} % |")
    return "\n".join(lines)


def trace_table(rows: Sequence[Measurement]) -> str:
    cells: dict[str, list[str]] = {}
    for row in rows:
        name, _, _ = row.conditions.rpartition(", ")
        cells.setdefault(name, []).append(f"{row.ours:.2f} ({(row.note or '').removeprefix('layers ')})")
    lines = [f"| ranks | {' | '.join(map(str, RANKS))} |", "|" + "---|" * (1 + len(RANKS))]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(own)} |" for name, own in cells.items())])


REMARKS = """`eplb` packs greedily, as DeepSeek does: a spare slot goes to the expert with the most work a replica, then
the heaviest replica to the rank with the least work that has room. Below, the work of the busiest rank over that of the
best of all replications and all packings, for every multiset of loads from 0 to {most}:

{gaps}

Where each expert has one slot the worst is within 4/3 - 1 / (3 ranks), Graham's bound of the same rule without room to
mind. Spare slots make it worse: they go where the heaviest replica gets lightest, and replicas of one expert need not
fit the ranks. One expert with all the load and 8 slots on 4 ranks gets five replicas, so that a rank has two of them;
four would be best.

What it makes of the routing of gpt-oss-20b, 32 experts in each of 24 layers: the work of the busiest rank over the mean
rank's, mean over the layers (least to most). Packed by the counts of {n_others} recorded answers, judged by those of
{n_judged} others. 1 cannot be bettered:

{traces}

Every figure:"""


def main() -> None:
    try:
        traces = list(trace_rows())
        n_sequences = len(gpt_oss_sequences())
    except pytest.skip.Exception as absent:
        sys.exit(str(absent))
    gaps = list(gap_rows())
    n_judged = -(-n_sequences // EVERY)
    remarks = REMARKS.format(
        most=MOST_LOAD,
        gaps=gap_table(gaps),
        traces=trace_table(traces),
        n_others=n_sequences - n_judged,
        n_judged=n_judged,
    )
    write_page(NAME, "How far is greedy packing from the best?", [*gaps, *traces], remarks)


if __name__ == "__main__":
    main()
