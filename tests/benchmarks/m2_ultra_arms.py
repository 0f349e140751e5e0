"""The arms of 000-npumoe on its machine: a routing's counts, the calls that each arm makes of them, and their price.

The source publishes no routing, so two stand for it: one where every expert has the same load, and one that is skewed.
The arms are Table 2's and §5.8's, with shapes of §5.1: of a chunk of B tokens the four most popular experts have
`high` = 2 BK/E rows and the twelve others `low` = BK/E (64 and 32 at chunk 256). Experts are numbered by popularity.

Legend: B tokens of a chunk, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from devices.base import Unit
from devices.models.operation import Operation
from devices.models.sheet import Sheet, load_sheet
from devices.models.timeline import Timeline
from engines.calls import CallKind, Calls, ExpertCall
from engines.dispatch import DispatchPlan
from engines.pricing.priced_step import PricedStep
from engines.pricing.published_shapes import PHI_3_5_MOE as PHI
from engines.pricing.schedule import lm_head, operations
from harness.reproduce.npumoe.grid import STATED

SHEET = load_sheet("m2-ultra")
AS_TABLE_4 = load_sheet("m2-ultra-table4")
ALIGNMENT = 16
N_HOT = 4
SMALLEST_CAPACITY = 32
GRID = STATED

Counts = Sequence[int]
"""Pairs of each expert in one chunk."""
ROUTINGS = ("balanced", "skewed")


def mean_load(chunk: int) -> int:
    return chunk * PHI.top_k // PHI.n_experts


def chunk_counts(routing: str, prompt: int, chunk: int) -> list[Counts]:
    """Of every chunk of a prompt. Skewed: two different experts a token, expert e drawn with weight 1 / sqrt(e + 1)."""
    if routing == "balanced":
        return [[mean_load(chunk)] * PHI.n_experts for _ in range(0, prompt, chunk)]
    popularity_E = torch.arange(1, PHI.n_experts + 1, dtype=torch.float64) ** -0.5
    generator = torch.Generator().manual_seed(1)
    drawn = [
        torch.multinomial(popularity_E.expand(chunk, -1), PHI.top_k, generator=generator)
        for _ in range(0, prompt, chunk)
    ]
    return [torch.bincount(ids_BK.reshape(-1), minlength=PHI.n_experts).tolist() for ids_BK in drawn]


def imbalance(counts: Iterable[Counts]) -> float:
    """Of the busiest expert's load over the mean load: r_l of §4.1, over all chunks."""
    total_E = [sum(column) for column in zip(*counts, strict=True)]
    return max(total_E) * len(total_E) / sum(total_E)


# --- the calls of an arm ---------------------------------------------------------------------------------------------


def exact(counts: Counts) -> Iterator[ExpertCall]:
    """One call an expert that has tokens, with exactly its rows."""
    return (ExpertCall((e,), (n,), (n,), first_row=0) for e, n in enumerate(counts) if n)


def frozen(counts: Counts, capacities: Sequence[int], group_size: int) -> Iterator[ExpertCall]:
    """Graphs of `group_size` experts in order of popularity, each expert with its capacity; the rest is dropped."""
    for first in range(0, len(counts), group_size):
        group = range(first, first + group_size)
        if any(counts[e] for e in group):
            rows = tuple(capacities[e] for e in group)
            valid = tuple(min(counts[e], capacities[e]) for e in group)
            yield ExpertCall(tuple(group), rows, valid, first_row=0, kind=CallKind(static=True))


def tiers(chunk: int) -> list[int]:
    low = mean_load(chunk)
    return [2 * low] * N_HOT + [low] * (PHI.n_experts - N_HOT)


def whole_capacity(every: Iterable[Counts]) -> int:
    """The smallest aligned capacity at which nothing of a prompt is dropped."""
    most = max(max(counts) for counts in every)
    return -(-most // ALIGNMENT) * ALIGNMENT


def plan(n_tokens: int, calls: Iterable[ExpertCall]) -> DispatchPlan:
    """A plan to be priced, not computed: its rows have no tokens."""
    calls = tuple(calls)
    n_rows = sum(call.n_rows for call in calls)
    routed = n_tokens * PHI.top_k
    dropped = routed - sum(sum(call.valid_per_expert) for call in calls)
    return DispatchPlan(n_tokens, torch.zeros(n_rows), torch.zeros(n_rows), Calls.of(calls), routed, dropped)


@dataclass(frozen=True)
class Arm:
    """A row of the comparison. calls: of one chunk's counts, given the chunk's tokens and the counts of all chunks."""

    name: str
    attention: Unit
    experts: Unit
    calls: Callable[[Counts, int, Sequence[Counts]], Iterable[ExpertCall]]
    is_naive: bool = False

    def placed(self, calls: Iterable[ExpertCall]) -> Iterator[ExpertCall]:
        """On the arm's unit, launched as it launches."""
        for call in calls:
            yield replace(call, kind=replace(call.kind, unit=self.experts, naive_launch=self.is_naive))


def tiers_of_one(counts: Counts, chunk: int, every: Sequence[Counts]) -> Iterator[ExpertCall]:
    return frozen(counts, tiers(chunk), 1)


def tiers_in_groups(counts: Counts, chunk: int, every: Sequence[Counts]) -> Iterator[ExpertCall]:
    return frozen(counts, tiers(chunk), N_HOT)


CPU = Arm("Core ML CPU", "cpu", "cpu", lambda counts, chunk, every: exact(counts))
NAIVE = Arm(
    "Core ML naive",
    "cpu",
    "npu",
    lambda counts, chunk, every: frozen(counts, [whole_capacity(every)] * PHI.n_experts, 1),
    is_naive=True,
)
ANEMLL = Arm("ANEMLL", "npu", "cpu", CPU.calls)
GPU = Arm("GPU", "gpu", "gpu", CPU.calls)
BASE = Arm(
    "base",
    "npu",
    "npu",
    lambda counts, chunk, every: frozen(counts, [2 * mean_load(chunk)] * PHI.n_experts, 1),
)
T = Arm("T", "npu", "npu", tiers_of_one)
TG = Arm("TG", "npu", "npu", tiers_in_groups)
TWO_GROUPS = Arm(
    "two groups of 8",
    "npu",
    "npu",
    lambda counts, chunk, every: frozen(counts, [mean_load(chunk)] * PHI.n_experts, 8),
)
"""What Table 4's NPUMoE column comes from: 530.91 ms are four chunks of two 8x32 launches of Table 5."""
ARMS = (CPU, NAIVE, ANEMLL, GPU, BASE, T, TG)


# --- their price -----------------------------------------------------------------------------------------------------


def step_operations(arm: Arm, step: PricedStep, calls: Iterable[ExpertCall], sheet: Sheet) -> Iterator[Operation]:
    """All 32 layers: the calls of one stand for each."""
    limit = sheet.graph_bytes_limit
    placed = plan(step.n_tokens, arm.placed(calls))
    yield from operations(step, [placed], PHI, arm.attention, limit.value if limit is not None else None)


def prefill(arm: Arm, every: Sequence[Counts], chunk: int, sheet: Sheet = SHEET) -> Timeline:
    """A whole prefill, to the first token's logits."""
    timeline = Timeline(sheet)
    for i, counts in enumerate(every, 1):
        timeline.run(step_operations(arm, PricedStep(chunk, i * chunk), arm.calls(counts, chunk, every), sheet))
    timeline.run([lm_head(1, PHI)])
    return timeline


def decode_step(arm: Arm, calls: Iterable[ExpertCall], kv_length: int, sheet: Sheet = SHEET) -> Timeline:
    """One token after a prompt."""
    timeline = Timeline(sheet)
    timeline.run(step_operations(arm, PricedStep(1, kv_length), calls, sheet))
    timeline.run([lm_head(1, PHI)])
    return timeline


def one_row_calls() -> list[ExpertCall]:
    return list(exact([1] * PHI.top_k))


def single_graphs(capacity: int = SMALLEST_CAPACITY) -> list[ExpertCall]:
    """One graph for each chosen expert."""
    return list(frozen([1] * PHI.top_k, [capacity] * PHI.top_k, 1))


def same_graphs() -> list[ExpertCall]:
    """The prefill's graphs of four: the chosen experts lie in different ones."""
    chosen = [1, *[0] * (N_HOT - 1)] * PHI.top_k
    return list(frozen(chosen, [SMALLEST_CAPACITY] * len(chosen), N_HOT))


def total_j(timeline: Timeline) -> float:
    return sum(timeline.energy_j(component) for component in timeline.sheet.components)


def seconds_of(timeline: Timeline, name: str) -> float:
    return sum(seconds for (operation, _), seconds in timeline.seconds_by_operation().items() if operation == name)
