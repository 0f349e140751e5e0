"""Whether repeats ended because a metric was known as well as the plan's `stop` asks, or because there were enough."""

from __future__ import annotations

import statistics
from typing import Any, Final

from results.cells import trials_of, usable
from results.records import MODEL_PREFIX
from results.runs import RunData
from results.trials import Trial

METRIC: Final = "e2e_s"
WIDTH, MOST_REPEATS = 0.05, 20
"""Of a `stop` that does not say them."""
MOST_TOLD = 3


def trial_value(trial: Trial, metric: str) -> float | None:
    """A trial's value of a stopping metric: the mean over its requests, or the window's energy."""
    if metric == "energy_j":
        return next((r.energy_j for r in trial.energy if r.phase == "all" and r.component == "total"), None)
    values = [v for c in trial.completions if (v := getattr(c, metric)) is not None]
    return statistics.fmean(values) if values else None


def not_reached(run: RunData) -> list[str]:
    """A sentence where cells were repeated as often as the plan allows, and are not known as well as it asks."""
    from results.statistics import relative_width, summarise  # numpy, which the schema of plans need not wait for

    stop: Any = (run.info.plan.get("protocol") or {}).get("stop")
    if not isinstance(stop, dict) or "minutes" in stop:
        return []
    metric, asked = stop.get("metric", METRIC), stop.get("relative_width", WIDTH)
    most = stop.get("max_repeats", MOST_REPEATS)
    trials, found = trials_of(run), []
    for cell in run.cells:
        own = trials[cell.cell_id]
        if cell.device.startswith(MODEL_PREFIX) or len(own) < most:
            continue
        values = [value for trial in usable(own) if (value := trial_value(trial, metric)) is not None]
        width = relative_width(summarise(values)) if values else None
        if width is None or width > asked:
            known = "no interval" if width is None else f"± {100 * width:.3g} %"
            name = f"{cell.engine} · {cell.workload} · {cell.device}"
            found.append(f"{name} ({known if values else 'no trial has it'})")
    if not found:
        return []
    more = f" and {len(found) - MOST_TOLD} more" if len(found) > MOST_TOLD else ""
    return [
        f"protocol.stop asked for {metric} to ± {100 * asked:g} %, and {most} repeats did not reach that:"
        f" {'; '.join(found[:MOST_TOLD])}{more}."
    ]
