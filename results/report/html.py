"""One self-contained HTML page of a run: which arm to take, and folded below it all figures; no request leaves it.

The first screen needs no script. The charting library is inlined once for the charts below, which are drawn when their
fold is opened. The page's policy (CSP) forbids every network access and every script but its own four, by their hashes:
text from a run cannot become code even if escaping failed.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from results.cells import CONTENDED, NO_ERROR, data_sources, mark_words, usable, without_figures
from results.environments import Environment
from results.meter_units import unlike_unit_notes
from results.operations import extrapolation_notes
from results.printable import on_page
from results.records import MODEL_PREFIX, Cell, Method
from results.rederivation import derivation_notes
from results.report import figures
from results.report.accuracy import accuracy_tables
from results.report.arms import Arm, arms_of
from results.report.asked_figures import asked_figures
from results.report.chart_library import chart_library
from results.report.charts import CONFIG
from results.report.endurance_pictures import endurance_pictures
from results.report.figure_tables import asked_of, figure_tables
from results.report.figures import Chart
from results.report.files import replace_text
from results.report.first_screen import device_screens
from results.report.foretold import foretold_of
from results.report.frozen import frozen_of
from results.report.heat_pictures import heat_pictures
from results.report.operation_tables import operation_tables
from results.report.page_units import PageUnits
from results.report.picture import symbol
from results.report.plan_text import toml_text
from results.report.resource_pictures import resource_pictures
from results.report.samples import BROWSE_SAMPLES, sample_panels
from results.report.self_test import self_test_lines
from results.report.step_timelines import step_timelines
from results.roads import build_words, placement_notes, road_notes
from results.run_frames import RunFrames
from results.run_notes import run_notes
from results.runs import RunData, RunInfo, shown_value
from results.same_requests import unlike_notes
from results.sittings import sitting_notes
from results.stop_reached import not_reached
from results.trial_traces import lost_trace_notes, meter_notes
from results.trials import Failure, Trial
from results.units import format_bytes, format_share

if TYPE_CHECKING:
    from jinja2 import Template

METHOD_WORDS: dict[Method, str] = {
    "counter": "read from an energy counter of the hardware",
    "integrated power": "power readings of the hardware, integrated over time",
    "battery gauge": "read from the battery's gauge: the whole device, screen and radios included",
    "relative gauge": "a relative gauge in units of its own: no joules",
    "modelled": "modelled, not measured",
    "replayed": "replayed from a recorded trace, not measured in this run",
    "measured": "measured",
    "derived": "derived",
    "missing": "missing",
}

NOT_TOLD = "not told by the device"
AGAIN = "its device, a meter or a server was lost; it was measured again since, and is not counted as failed"
LOST = "its device, a meter or a server was lost: `joulebench {} --resume` measures it again where the plan needs it"
MOST_APART = 5
"""Trials of a cell that are left out for the same: more have one row together."""

DRAW_CHARTS = """
const page = JSON.parse(document.getElementById("charts").textContent);
function draw(place) {
  const spec = page.specs[place.id];
  delete page.specs[place.id];
  if (!spec) return;
  vegaEmbed(place, spec, {mode: "vega-lite", renderer: "svg", actions: false, ast: true, config: page.config})
    .catch((error) => { place.textContent = "This chart could not be drawn: " + error.message; throw error; });
}
for (const fold of document.querySelectorAll("details")) {
  const open = () => { if (fold.open) fold.querySelectorAll(".chart").forEach(draw); };
  fold.addEventListener("toggle", open);
  open();
}
// Printed folds are open: their charts are drawn before.
addEventListener("beforeprint", () => document.querySelectorAll(".chart").forEach(draw));
"""
SORT_TABLES = (Path(__file__).parent / "sort_tables.js").read_text(encoding="utf-8")


def write_html(run: RunData, path: Path, derived: RunFrames | None = None) -> None:
    """Writes the page of a run; it appears whole or not at all. derived: the run's frames, where they are there."""
    replace_text(path, html_text(run, derived))


def html_text(run: RunData, derived: RunFrames | None = None) -> str:
    return template().render(page_context(run, derived))


@cache
def template() -> Template:
    """Compiled once in a process, which takes longer than to fill it."""
    from jinja2 import Environment as Templates
    from jinja2 import PackageLoader, StrictUndefined

    templates = Templates(
        loader=PackageLoader("results", "report"),
        autoescape=True,
        finalize=on_page,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return templates.get_template("report.html.j2")


def page_context(run: RunData, derived: RunFrames | None = None) -> dict[str, Any]:
    """Everything that the template shows, as text and records."""
    derived = derived or RunFrames(run)
    frame, compared = derived.tidy, derived.compared
    arms, units = arms_of(run.cells), PageUnits(frame, derived.standings)
    sections = {
        "energy": figures.energy_figures(run, frame, arms, units),
        "power": figures.power_figures(run, arms),
    }
    numbered = {name: _numbered(name, found) for name, found in sections.items()}
    panels = sample_panels(derived.answered, arms)
    specs = {id_: figure.spec for found in numbered.values() for id_, figure in found if figure.spec is not None}
    return {
        "info": run.info,
        "counts": _counts(run.trials),
        "method_sentences": method_sentences(run, frame),
        "warnings": [*warnings_of(run), *extrapolation_notes(derived.operations)],
        "screens": device_screens(run, frame, derived.standings, units),
        "asked_pictures": asked_figures(derived.asked_tables),
        "endurance": endurance_pictures(derived.endurance, arms),
        "arms": list(dict.fromkeys(arms.values())),
        "symbol": symbol,
        "asked": asked_of(run, arms),
        "figure_tables": figure_tables(run, frame, arms, units),
        "accuracy_tables": accuracy_tables(run, compared, arms, units),
        "figures": numbered,
        "heat_pictures": heat_pictures(run, derived.heats, derived.overlaps, arms),
        "step_timelines": step_timelines(run, arms),
        "frozen": frozen_of(run.cells, derived.heats, arms),
        "foretold": foretold_of(run.cells, derived.heats, arms),
        "resource_pictures": resource_pictures(derived.resources, arms),
        "operation_tables": operation_tables(derived.operations, arms),
        "failed": _failures(run, arms),
        "left_out": _left_out(run, arms),
        "machines": _machines(run),
        "inputs": [(i.name, shown_value(i.value), i.value) for i in run.info.inputs],
        "self_tests": _self_tests(run),
        "plan_text": toml_text(run.info.plan),
        "charts_json": json_in_script({"config": CONFIG, "specs": specs}),
        "library": chart_library() if specs else "",
        "draw_charts": DRAW_CHARTS if specs else "",
        "samples_json": json_in_script(panels) if panels else "",
        "browse_samples": BROWSE_SAMPLES,
        "sort_tables": SORT_TABLES,
        "script_hashes": [script_hash(s) for s in _scripts(has_charts=bool(specs), has_samples=bool(panels))],
    }


def _scripts(has_charts: bool, has_samples: bool) -> Iterator[str]:
    """Every script that the page runs."""
    if has_charts:
        yield chart_library()
        yield DRAW_CHARTS
    if has_samples:
        yield BROWSE_SAMPLES
    yield SORT_TABLES


def json_in_script(value: Any) -> str:
    """JSON that no HTML parser mistakes for markup: <, > and & as \\u escapes, as well as JavaScript's line ends."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def script_hash(script: str) -> str:
    """CSP source of an inline script: 'sha256-...'."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def machine_rows(environment: Environment) -> list[tuple[str, str]]:
    n_cores, memory_bytes = environment.n_cores, environment.memory_bytes
    return [
        ("processor", environment.cpu_model),
        ("cores", NOT_TOLD if n_cores is None else f"{n_cores}, {environment.n_threads} threads if none are asked"),
        ("memory", NOT_TOLD if memory_bytes is None else format_bytes(memory_bytes)),
        *([("GPU", ", ".join(environment.gpus))] if environment.gpus else []),
        *([("GPU driver", environment.gpu_driver)] if environment.gpu_driver else []),
        ("system", f"{environment.os}, {environment.machine}"),
        ("Python", environment.python),
        ("joulebench", environment.joulebench),
        *([("arithmetic", build_words(environment.build))] if environment.build is not None else []),
    ]


def _numbered(section: str, found: Sequence[Chart]) -> list[tuple[str, Chart]]:
    return [(f"chart-{section.replace('_', '-')}-{n}", figure) for n, figure in enumerate(found, start=1)]


def _counts(trials: Sequence[Trial]) -> dict[str, int | str]:
    return {
        "all": len(trials),
        "ok": len(usable(trials)),
        "failed": sum(t.has_failed for t in trials),
        "without": without_figures(trials),
        "marked": sum(t.status == "ok" and bool(t.marks) for t in trials),
        "retried": sum(t.attempts > 1 for t in trials),
    }


def method_sentences(run: RunData, frame: pd.DataFrame) -> list[tuple[str, str]]:
    """(device, how its time and energy came to be)."""
    found = []
    notes = meter_notes(run)
    for device, rows in frame.groupby("device", sort=False):
        time_rows = rows[(rows["metric"] == "e2e") & (rows["method"] != "missing")]
        times = list(time_rows["method"].unique())
        energy_rows = rows[(rows["metric"] == "energy") & (rows["method"] != "missing")]
        ways = list(dict.fromkeys(zip(energy_rows["method"], energy_rows["meter"], strict=True)))
        energy = [
            f"{METHOD_WORDS[method]} ({'; '.join(filter(None, [meter, notes.get((str(device), meter))]))})"
            for method, meter in ways
        ]
        time_text = f"Time is {' and '.join(times)}. " if times else "No trial gave a time. "
        energy_text = f"Energy is {'; '.join(energy)}." if energy else "Energy is missing; the tables say why."
        found.append((str(device), time_text + energy_text))
    return found


def warnings_of(run: RunData) -> list[str]:
    """What a reader must know before believing a number."""
    found = []
    for note in dict.fromkeys(c.model_note for c in run.cells if c.model_note):
        models = dict.fromkeys(c.model for c in run.cells if c.model_note == note)
        found.append(f"{', '.join(models)}: {note}.")
    samples = [w for w, source in data_sources(run).items() if source == "sample"]
    if samples:
        found.append(f"{', '.join(samples)}: only the few items that come with the program, not the data set.")
    found += unlike_notes(run) + road_notes(run) + placement_notes(run) + run_notes(run) + sitting_notes(run)
    found += not_reached(run)
    return found + unlike_unit_notes(run) + lost_trace_notes(run) + derivation_notes(run)


def _failures(run: RunData, arms: dict[str, Arm]) -> list[tuple[Cell, Arm, Failure, list[int], str]]:
    """(cell, arm, failure, numbers of trials that failed so, what follows); an error is said once a cell, and once more
    of trials that were measured again."""
    found: dict[tuple[str, str, str], tuple[Cell, Arm, Failure, list[int], str]] = {}
    replaced = {trial.trial_id for trial in run.replaced}
    for cell, arm, trial in _with_cells(run.cells, (*run.trials, *run.replaced), arms):
        if trial.has_failed:
            failure = trial.failure or Failure(kind="stable", error=NO_ERROR)
            follows = AGAIN if trial.trial_id in replaced else _what_follows(failure, trial, run.info)
            key = (cell.cell_id, failure.error, AGAIN if trial.trial_id in replaced else "")
            numbers = {*(found[key][3] if key in found else []), trial.repeat + 1}
            found[key] = (cell, arm, failure, sorted(numbers), follows)
    return list(found.values())


def _what_follows(failure: Failure, trial: Trial, info: RunInfo) -> str:
    lost = LOST.format("fleet start" if info.is_of_fleet else "run")
    if failure.kind == "transient":
        given_up = f"given up after {trial.attempts} attempt{'s' if trial.attempts != 1 else ''}"
        return f"transient: {given_up}{'; ' + lost if trial.is_lost else ''}"
    return lost if trial.is_lost else "stable: not retried; it fails again until its cause is changed"


def _left_out(run: RunData, arms: dict[str, Arm]) -> list[tuple[Cell, Arm, str, str]]:
    """(cell, arm, which trials, why). Many of a cell with the same marks have one row: rounds of endurance."""
    found: dict[tuple[str, tuple[str, ...]], list[tuple[Cell, Arm, Trial]]] = {}
    for one in _with_cells(run.cells, run.trials, arms):
        if one[2].status == "ok" and one[2].marks:
            found.setdefault((one[0].cell_id, one[2].marks), []).append(one)
    rows = []
    for (_, marks), own in found.items():
        if len(own) <= MOST_APART:
            rows += [(c, a, f"trial {t.repeat + 1}, {t.trial_id}", mark_words(t)) for c, a, t in own]
            continue
        trials = [trial for _, _, trial in own]
        numbers = sorted(t.repeat + 1 for t in trials)
        share = max((t.foreign_cpu_share or 0.0 for t in trials), default=0.0)
        others = (
            f"; other processes took up to {format_share(share)} of the CPU" if CONTENDED in marks and share else ""
        )
        which = f"{len(trials)} trials, from trial {numbers[0]} to {numbers[-1]}; each is in trials.csv"
        rows.append((*own[0][:2], which, ", ".join(marks) + others))
    return rows


def _machines(run: RunData) -> list[tuple[list[str], list[tuple[str, str]], dict[str, str]]]:
    """(devices, what the machine is, packages) of each distinct environment."""
    found: list[tuple[list[str], Environment]] = []
    for device, environment in run.info.environments.items():
        same = next((devices for devices, known in found if known == environment), None)
        if same is None:
            found.append(([device], environment))
        else:
            same.append(device)
    return [(devices, machine_rows(environment), environment.packages) for devices, environment in found]


def _self_tests(run: RunData) -> list[tuple[str, list[str]]]:
    """(device, what its last self-test before the run found) of each device that can have one."""
    devices = dict.fromkeys(cell.device for cell in run.cells)
    return [
        (device, self_test_lines(run.info.self_tests[device]) if device in run.info.self_tests else [])
        for device in devices
        if not device.startswith(MODEL_PREFIX)
    ]


def _with_cells(
    own_cells: Iterable[Cell], trials: Iterable[Trial], arms: dict[str, Arm]
) -> Iterable[tuple[Cell, Arm, Trial]]:
    cells = {cell.cell_id: cell for cell in own_cells}
    for trial in trials:
        yield cells[trial.cell_id], arms[trial.cell_id], trial
