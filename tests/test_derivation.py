"""One road from raw records to joules: tables, samples and requests say the same of the same time."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from results import tables
from results.answers import answered_samples
from results.derivation import ARITHMETIC, energies_of, not_alone
from results.records import Completion, PowerTrace, TraceKind
from results.trial_tables import request_frames
from tests.run_builders import cell, completion, run, trial

ROOT = Path(__file__).parents[1]
FLOORS = ("harness", "engines", "workloads", "devices", "results")
INTEGRATES = {
    "energy_between",
    "MeterEnergy",
    "ComponentEnergy",
    "idle_baseline",
    "p90_power",
    "cumulative",
    "energy_at",
    "trapezoid",
    "trapz",
    "simpson",
}
"""Names that turn readings into joules or into a window's power."""


def sources() -> Iterator[tuple[str, ast.Module]]:
    for floor in FLOORS:
        for path in (ROOT / floor).rglob("*.py"):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def test_nothing_but_the_derivation_integrates() -> None:
    own = {f"results/{module}.py" for module in ARITHMETIC}
    found = [
        f"{path}: {name}"
        for path, tree in sources()
        if path not in own
        for node in ast.walk(tree)
        for name in (
            [node.attr]
            if isinstance(node, ast.Attribute)
            else [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom)
            else []
        )
        if name in INTEGRATES
    ]
    assert not found


def imported(module: str, seen: set[str]) -> set[str]:
    """Modules of `results` that one needs, itself among them."""
    if module not in seen:
        seen.add(module)
        tree = ast.parse((ROOT / "results" / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
        names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        for name in names:
            if name.startswith("results."):
                imported(name.removeprefix("results."), seen)
    return seen


def test_the_digest_is_of_every_module_that_decides_joules() -> None:
    words = {"records", "latencies", "units", "printable", "trace_files", "report.files"}
    assert imported("derivation", set()) - words == set(ARITHMETIC)


# --- the same time, the same joules ----------------------------------------------------------------------------------


def joules(times_s: list[float], values: list[float], kind: TraceKind, start_s: float, end_s: float) -> float:
    """Straight lines between readings, one after the other: of watts the area, of a counter the difference."""
    at = {t: float(np.interp(t, times_s, values)) for t in (start_s, end_s)}
    if kind == "counter":
        return at[end_s] - at[start_s]
    inside = [start_s, *(t for t in times_s if start_s < t < end_s), end_s]
    heights = [float(np.interp(t, times_s, values)) for t in inside]
    return sum((b - a) * (y + z) / 2 for a, b, y, z in zip(inside, inside[1:], heights, heights[1:], strict=False))


@given(
    kind=st.sampled_from(("power", "counter")),
    watts=st.lists(st.floats(1, 200), min_size=40, max_size=40),
    start=st.integers(0, 10),
    first=st.integers(11, 25),
    last=st.integers(26, 39),
)
def test_table_sample_and_request_say_the_same_joules_of_the_same_time(
    kind: TraceKind, watts: list[float], start: int, first: int, last: int
) -> None:
    times_s = [0.05 * i for i in range(40)]
    values = watts if kind == "power" else [0.0, *np.cumsum(0.05 * np.asarray(watts[1:])).tolist()]
    made = PowerTrace(
        meter="m",
        component="package",
        kind=kind,
        method="modelled",
        times_s=np.asarray(times_s),
        values=np.asarray(values),
        sample_interval_s=0.05,
        relative_accuracy=0.1,
    )
    start_s, first_s, end_s = (times_s[i] for i in (start, first, last))
    done = completion("s", start_s, token_times_s=(first_s, end_s))
    found = energies_of([done], {"window": [made]}, (start_s, end_s))
    one = trial(completions=[done], energy=found.readings, idle=found.idle)
    data = run([cell()], [one], {one.trial_id: (made,)})

    frame = tables.energy(data)
    whole = frame[(frame["metric"] == "energy") & (frame["phase"] == "all")].iloc[0]
    relative = frame[(frame["metric"] == "energy_uncertainty") & (frame["phase"] == "all")].iloc[0]
    (answer,) = answered_samples(data)[0].answers
    (row,) = next(request_frames(data)).to_dict("records")
    assert whole["mean"] == pytest.approx(joules(times_s, values, kind, start_s, end_s), rel=1e-9)
    assert answer.energy_j == row["energy_j"] == whole["mean"]
    assert answer.energy_uncertainty_j == pytest.approx(row["energy_uncertainty_j"], rel=1e-12)
    assert relative["mean"] == pytest.approx(100 * row["energy_uncertainty_j"] / row["energy_j"], rel=1e-12)


def test_sample_and_request_say_alike_of_which_requests_joules_cannot_be_told() -> None:
    """p and q in one batch, r while they run, s alone."""

    def lasting(name: str, start_s: float, end_s: float) -> Completion:
        return completion(name, start_s, token_times_s=(start_s + 0.5, end_s))

    requests = [lasting("p", 0.0, 3.0), lasting("q", 0.0, 2.5), lasting("r", 1.0, 2.0), lasting("s", 3.0, 4.0)]
    meter = PowerTrace(
        meter="m",
        component="package",
        kind="power",
        method="modelled",
        times_s=np.linspace(0, 4, 401),
        values=np.full(401, 5.0),
        sample_interval_s=0.01,
    )
    found = energies_of(requests, {"window": [meter]}, (0.0, 4.0))
    one = trial(completions=requests, energy=found.readings)
    data = run([cell()], [one], {one.trial_id: (meter,)})
    by_request = {r["sample_id"]: r for r in next(request_frames(data)).to_dict("records")}
    by_sample = {a.sample.sample_id: a.answers[0] for a in answered_samples(data)}
    assert set(not_alone(requests)) == {"p-r", "q-r", "r-r"}
    assert by_request["s"]["energy_j"] == by_sample["s"].energy_j == pytest.approx(5.0)
    for name in "pqr":
        assert by_sample[name].energy_j is None
        assert by_sample[name].energy_reason == by_request[name]["energy_reason"]
    assert "in a batch of 2" in by_request["p"]["energy_reason"]
