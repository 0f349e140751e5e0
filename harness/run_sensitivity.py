"""Which constants of a sheet the conclusions of a stored run hang on: its operations priced again, no new run.

A conclusion is which arm answers a workload in the least time, or with the fewest joules, on one modelled device. What
each arm decided stays as it ran: which unit took what, and what was fetched. One trial of each arm is looked at, for a
modelled trial comes out the same every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from harness.conclusions import (
    COLUMNS,
    FACTORS,
    Effect,
    conclusion_words,
    effect_on,
    effect_records,
    flip_words,
    leads_chart,
    near_the_first,
)
from harness.terminal import EXIT_BAD_PLAN, EXIT_NOT_WRITTEN, fail
from results.cells import trials_of, usable
from results.records import MODEL_PREFIX
from results.report.arms import arms_of
from results.report.csv import csv_text
from results.report.files import replace_text
from results.report.plain_pages import frame, write_plain_pages

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

    from devices.models.sheet import Sheet
    from results.records import PowerTrace
    from results.runs import RunData
    from results.trials import Trial

CSV, PAGE = "sensitivity.csv", "sensitivity.html"
TITLE = "What do the conclusions of this run hang on?"
SECONDS, JOULES = "time of a request", "joules of a request"
METRICS: Final = (SECONDS, JOULES)


class Priced(NamedTuple):
    """A trial at the prices of a sheet. joules: None where the sheet does not state them."""

    seconds: float
    joules: float | None

    def cost(self, metric: str) -> float | None:
        return self.seconds if metric == SECONDS else self.joules


class Asked(NamedTuple):
    """What arms of one device answered. arms: the trial of each, with its raw records."""

    device: str
    workload: str
    arms: Mapping[str, tuple[Trial, Mapping[str, Sequence[PowerTrace]]]]

    @property
    def where(self) -> str:
        return f"{self.device}, {self.workload}"


def run_effects(run: RunData, say: Callable[[str], object]) -> list[Effect]:
    """Of all modelled devices of a run; none where one arm stands alone. Raises `DeviceError`, `TraceFileError`."""
    from devices.models.variations import constants, varied
    from harness.sheets import sheets_now

    found: list[Effect] = []
    now = sheets_now(run)
    for asked in _asked(run):
        if asked.device not in now or len(asked.arms) < 2:
            continue
        sheet = now[asked.device].load()
        costs = _costs(asked, sheet, list(asked.arms))
        near = {metric: near_the_first(own) for metric, own in costs.items() if own}
        names = list(dict.fromkeys(name for own in near.values() for name in own))
        if len(names) < 2:
            continue
        for constant in constants(sheet):
            if constant.is_of_joules and not near.get(JOULES):
                continue  # nobody's joules are known
            say(f"{asked.where}: {constant.name}")
            for factor in FACTORS:
                changed = _costs(asked, varied(sheet, constant, factor), names)
                for metric, own in near.items():
                    if constant.is_of_joules and metric == SECONDS:
                        continue
                    before = {name: costs[metric][name] for name in own}
                    after = {name: cost for name, cost in changed[metric].items() if name in own}
                    found.append(effect_on(asked.where, metric, constant.name, factor, before, after))
    return found


def _asked(run: RunData) -> Iterator[Asked]:
    from devices.models.operations import operations_of

    arms, trials = arms_of(run.cells), trials_of(run)
    places = dict.fromkeys((cell.device, cell.workload) for cell in run.cells if cell.device.startswith(MODEL_PREFIX))
    for device, workload in places:
        own = {}
        for cell in run.cells:
            if (cell.device, cell.workload) != (device, workload):
                continue
            trial = next((t for t in usable(trials[cell.cell_id]) if t.completions), None)
            parts = {} if trial is None else run.load_parts(trial.trial_id)
            if trial is not None and operations_of(parts) is not None:
                own[arms[cell.cell_id].name] = (trial, parts)
        yield Asked(device, workload, own)


def _costs(asked: Asked, sheet: Sheet, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """By metric and arm."""
    priced = {name: _priced(*asked.arms[name], sheet) for name in names}
    return {
        metric: {name: cost for name, one in priced.items() if (cost := one.cost(metric)) is not None}
        for metric in METRICS
    }


def _priced(trial: Trial, parts: Mapping[str, Sequence[PowerTrace]], sheet: Sheet) -> Priced:
    from devices.models.repricing import repriced
    from results.derivation import energies_of

    new, again = repriced(trial, parts, sheet)
    assert new.window_start_s is not None
    assert new.window_end_s is not None
    n = len(new.completions)
    readings = energies_of(new.completions, again, (new.window_start_s, new.window_end_s)).readings
    joules = next((one.energy_j for one in readings if one.phase == "all" and one.component == "total"), None)
    return Priced(sum(one.e2e_s for one in new.completions) / n, None if joules is None else joules / n)


def write_sensitivity(found: Sequence[Effect], folder: Path) -> list[Path]:
    """CSV and page. Raises `OSError`."""
    import pandas as pd

    replace_text(folder / CSV, csv_text(pd.DataFrame(list(effect_records(found)), columns=list(COLUMNS))))
    return [folder / CSV, *write_plain_pages("harness", {PAGE: ("sensitivity.html.j2", context(found))}, folder)]


def context(found: Sequence[Effect]) -> dict[str, Any]:
    charts: list[tuple[str, dict[str, Any]]] = []
    places = []
    for where in dict.fromkeys(one.where for one in found):
        told = []
        for metric in METRICS:
            own = [one for one in found if (one.where, one.metric) == (where, metric)]
            if not own:
                continue
            chart = ""
            if own[0].lead_before is not None:
                chart = f"leads-{len(charts)}"
                charts.append((chart, leads_chart(own)))
            told.append((conclusion_words(own), flip_words(own), chart))
        places.append((where, told))
    return {**frame(TITLE, charts), "places": places}


def show_sensitivity(directory: Path, out: Path, console: Console) -> None:
    """Writes both, and says on the console which conclusions flip. Ends with an error where a run cannot be priced."""
    from devices.base import DeviceError
    from results.store import Store, StoreError
    from results.trace_files import TraceFileError

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    try:
        with Store.view(directory) as store:
            run = store.data()
            if not any(cell.device.startswith(MODEL_PREFIX) for cell in run.cells):
                fail(
                    "--sensitivity: no device of this run has a hardware sheet, so no constant can change",
                    EXIT_BAD_PLAN,
                )
            found = run_effects(run, say)
        files = write_sensitivity(found, out)
    except (DeviceError, StoreError, TraceFileError) as error:
        fail(f"--sensitivity: {error}", EXIT_BAD_PLAN)
    except OSError as error:
        fail(f"{out}: cannot be written ({error.strerror or error}); name another folder with --out", EXIT_NOT_WRITTEN)
    for one in found:
        if one.flips:
            say(one.words)
    if not found:
        say("No two arms of a modelled device are near each other.")
    elif not any(one.flips for one in found):
        say("No conclusion flips when one constant changes by a fifth.")
    for file in files:
        say(str(file))
