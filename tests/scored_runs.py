"""Small runs with scores of single samples and a reference arm, "exact"."""

from __future__ import annotations

from typing import Any

from results.counters import EngineCounters
from results.records import Cell, Score
from results.runs import RunData
from results.trials import Trial
from tests.run_builders import cell, completion, reading, run, trial


def arm(name: str, **changes: Any) -> Cell:
    return cell(name, engine=name, reference_id="exact", **changes)


def scored(
    cell_id: str, right: str, repeat: int = 0, joules: float = 6.0, metric: str = "acc", **changes: Any
) -> Trial:
    """One sample a digit; joules of the window, 8 tokens: 4 of the prompt, 4 generated."""
    values = [float(digit) for digit in right]
    mean = sum(values) / len(values)
    scores = (
        *(Score(metric=metric, value=v, sample_id=f"s{i}") for i, v in enumerate(values)),
        Score(metric=metric, value=mean, stderr=0.1, n=len(values)),
    )
    done = [completion("s0", 0.0, 4, (1.0 + repeat, 1.5 + repeat, 1.75 + repeat, 2.0 + repeat))]
    counters = EngineCounters(routed_pairs=200, dropped_pairs=3, computed_rows=400, padded_rows=100)
    fields: dict[str, Any] = {"scores": scores, "energy": (reading("all", joules),), "counters": counters}
    return trial(cell_id, repeat, completions=done, **(fields | changes))


def two_arms(right: str, other: str, **changes: Any) -> RunData:
    cells = [arm("exact"), arm("tiers", **changes)]
    trials = [scored("exact", right, i, 6.0 + 0.1 * i) for i in range(3)]
    trials += [scored("tiers", other, i, 3.0 + 0.2 * i) for i in range(3)]
    return run(cells, trials)
