"""Where Core ML puts the operations of the graphs that a window ran, as its `MLComputePlan` reports it.

A Mac's counters give joules of its Neural Engine (ANE), whatever used it. They are a model's only as far as its graphs
lie there: a trial whose experts never did is marked, and so is one of which Core ML tells nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from pydantic import Field

from results.records import Record
from results.units import format_share

ANE = "ane"
EXPERTS_NOT_ON_ANE = "experts not on the ANE"
"""The mark of a trial whose graphs of experts had no operation there."""
PLACEMENT_NOT_TOLD = "placement not told"
"""The mark of a trial of which Core ML did not say where its graphs of experts lie."""


class GraphPlacement(Record):
    """One function of a package: a graph that was predicted in the window."""

    package: str
    function: str
    role: str
    """attention, experts, shared or dense."""
    predictions: int = Field(ge=1)
    """In the window."""
    operations: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """By the unit that Core ML prefers (ane, cpu, gpu): kind and name of each operation. Empty: not told."""
    cost_on_ane: float | None = Field(None, ge=0, le=1)
    """Of the graph's cost, as Core ML estimates it, the part of operations on the ANE. None: not told."""
    reason: str | None = None
    """Why nothing is told."""

    @property
    def n_by_unit(self) -> Mapping[str, int]:
        return {unit: len(names) for unit, names in self.operations.items()}

    @property
    def ane_share(self) -> float | None:
        """Of its operations; None where nothing is told."""
        whole = sum(self.n_by_unit.values())
        return self.n_by_unit.get(ANE, 0) / whole if whole else None


def placement_marks(placement: Sequence[GraphPlacement]) -> tuple[str, ...]:
    """By the graphs of experts; by all graphs of a technique that has none of experts. No graph: no mark."""
    held = [graph for graph in placement if graph.role == "experts"] or placement
    shares = [graph.ane_share for graph in held if graph.ane_share is not None]
    if any(shares) or not held:
        return ()
    return (EXPERTS_NOT_ON_ANE if len(shares) == len(held) else PLACEMENT_NOT_TOLD,)


def ane_operations_share(placement: Sequence[GraphPlacement]) -> float | None:
    """Of all operations of these graphs, each graph as often as it was predicted. None where nothing is told."""
    known = [graph for graph in placement if graph.ane_share is not None]
    whole = sum(graph.predictions * sum(graph.n_by_unit.values()) for graph in known)
    on_ane = sum(graph.predictions * graph.n_by_unit.get(ANE, 0) for graph in known)
    return on_ane / whole if whole else None


def placement_words(placement: Sequence[GraphPlacement]) -> str:
    """ "48 graphs, operations: 300 on ane, 12 on cpu; of what ran, on the ANE: attention 91%, experts 100%"."""
    counted: Counter[str] = Counter()
    for graph in placement:
        counted.update(graph.n_by_unit)
    graphs = f"{len(placement)} graph{'s' if len(placement) != 1 else ''}"
    untold = [graph for graph in placement if graph.ane_share is None]
    if not counted:
        reasons = "; ".join(dict.fromkeys(filter(None, (graph.reason for graph in untold))))
        return f"{graphs}, and it does not say where{f' ({reasons})' if reasons else ''}"
    units = ", ".join(f"{n} on {unit}" for unit, n in sorted(counted.items()))
    shares = []
    for role in dict.fromkeys(graph.role for graph in placement):
        share = ane_operations_share([graph for graph in placement if graph.role == role])
        shares.append(f"{role} {'not told' if share is None else format_share(share)}")
    told = f"{graphs}, operations: {units}; of what ran, on the ANE: {', '.join(shares)}"
    return f"{told}; {len(untold)} of the graphs not told" if untold else told
