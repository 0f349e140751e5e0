"""`joulebench report --rederive`: figures derived anew from raw records, what changed, and what cannot be."""

from __future__ import annotations

import json
import re
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from results.answers import answered_samples
from results.cpu_time import CPU_TIME, CpuSeconds, WattsSheet
from results.derivation import arithmetic_digest, energies_of
from results.records import PowerTrace
from results.rederivation import derivation_notes, rederived
from results.sealed_rows import COLUMNS, seal_of
from results.store import DATABASE, Store
from results.trials import Trial
from tests.command import joulebench
from tests.run_builders import cell, completion, reading, run, trial

WINDOW_S = (0.0, 4.0)
OLD = "0123456789abcdef"


def counter(watts: float, component: str = "package", from_s: float = 0.0, end_s: float = 4.0) -> PowerTrace:
    times_s = np.linspace(from_s, end_s, 401)
    joules = watts * (times_s - from_s)
    return PowerTrace("m", component, "counter", "modelled", times_s, joules, 0.01, relative_accuracy=0.1)


def measured(cell_id: str, repeat: int, watts: float, **changes: Any) -> Trial:
    """A trial of 4 s whose stored joules are those of so many watts."""
    done = [completion("s", 0.0, token_times_s=(1.0, 4.0))]
    found = energies_of(done, {"window": [counter(watts)]}, WINDOW_S)
    return trial(cell_id, repeat, completions=done, energy=found.readings, idle=found.idle, **changes)


def stored_run(folder: Path, *trials: tuple[Trial, dict[str, list[PowerTrace]]]) -> Path:
    cells = [cell(c) for c in dict.fromkeys(t.cell_id for t, _ in trials)]
    with Store.create(folder, run(cells, []).info, cells) as store:
        for one, traces in trials:
            store.add_trial(one, traces)
    return folder


def changed_row(folder: Path, trial_id: str, change: dict[str, Any]) -> None:
    """Another record in the place of a trial's; a field whose value is None is taken out."""
    with sqlite3.connect(folder / DATABASE) as db:
        (record,) = db.execute("SELECT record FROM trial WHERE trial_id = ?", (trial_id,)).fetchone()
        kept = {k: v for k, v in (json.loads(record) | change).items() if v is not None}
        db.execute("UPDATE trial SET record = ? WHERE trial_id = ?", (json.dumps(kept), trial_id))
        found = db.execute(f"SELECT {', '.join(COLUMNS['trial'])} FROM trial WHERE trial_id = ?", (trial_id,))
        db.execute("UPDATE trial SET seal = ? WHERE trial_id = ?", (seal_of(found.fetchone()), trial_id))


def test_joules_that_other_code_derived_come_out_anew(tmp_path: Path) -> None:
    """Stored: 4 s at 3 W. The readings say 5 W, and 2 W before and after the window."""
    one = measured("c1", 0, watts=3.0, derived_by=OLD)
    idle = [counter(2.0, end_s=1.0)]
    folder = stored_run(tmp_path / "run", (one, {"window": [counter(5.0)], "idle before": idle, "idle after": idle}))
    with Store.view(folder) as store:
        found = rederived(store.data())
    changes = {change.metric: change for change in found.changes}
    whole = changes["energy, all, m, modelled"]
    assert (whole.cell, whole.unit) == ("label of c1", "J")
    assert (whole.stored, whole.now) == (pytest.approx(12.0), pytest.approx(20.0))
    net = changes["net_energy_per_token, all, m, modelled"]
    assert (net.stored, net.now) == (None, pytest.approx((20 - 2 * 4) / 6)), "4 tokens read, 2 said"
    assert not any(metric.startswith(("ttft", "e2e", "energy_uncertainty")) for metric in changes)
    assert (found.n_derived, found.n_changed, found.kept) == (1, 1, ())
    assert found.run.trials[0].derived_by == arithmetic_digest()


def test_what_comes_out_the_same_is_no_change(tmp_path: Path) -> None:
    one = measured("c1", 0, watts=5.0)
    with Store.view(stored_run(tmp_path / "run", (one, {"window": [counter(5.0)]}))) as store:
        found = rederived(store.data())
    assert (found.changes, found.n_derived, found.n_changed) == ((), 1, 0)


def test_components_are_derived_again_too(tmp_path: Path) -> None:
    """Their sum stays 12 J: 8 + 4 was stored, 4 + 8 is read."""
    done = [completion("s", 0.0, token_times_s=(1.0, 4.0))]
    before = energies_of(done, {"window": [counter(2.0, "cpu"), counter(1.0, "gpu")]}, WINDOW_S)
    one = trial(completions=done, energy=before.readings)
    now = {"window": [counter(1.0, "cpu"), counter(2.0, "gpu")]}
    with Store.view(stored_run(tmp_path / "run", (one, now))) as store:
        changes = {c.metric: (c.stored, c.now) for c in rederived(store.data()).changes}
    assert changes["energy of cpu, m, modelled"] == (pytest.approx(8.0), pytest.approx(4.0))
    assert changes["energy of gpu, m, modelled"] == (pytest.approx(4.0), pytest.approx(8.0))
    assert "energy, all, m, modelled" not in changes


def test_without_its_traces_a_trial_keeps_what_was_stored_and_is_marked(tmp_path: Path) -> None:
    lost, never, there = (measured("c1", i, watts=3.0, derived_by=OLD) for i in range(3))
    raw = {"window": [counter(5.0)]}
    folder = stored_run(tmp_path / "run", (lost, raw), (never, {}), (there, raw))
    (folder / "traces" / f"{lost.trial_id}.parquet").unlink()
    done = joulebench("report", str(folder), "--rederive", "--out", str(tmp_path / "tables"))
    assert done.code == 0, done.stderr
    said = re.sub(r"\s+", " ", done.stdout)
    assert "1 trial derived again from their raw records: 1 of them changed" in said
    assert re.search(r"stored figures stay: label of c1, trial 1: trace file .*? is missing not", said), said
    assert "its stored figures stay: label of c1, trial 2: the trial has no trace file" in said
    told = "2 of 3 trials were derived by another version of joulebench; they could not be derived again."
    assert told in said, "not that --rederive, which this is, derives them again"
    lines = (tmp_path / "tables" / "trials.csv").read_text().splitlines()
    ran = "when it ran"
    rows = [tuple(line.rsplit(",", 2)[1:]) for line in lines]
    assert rows == [("derived", "derived_by"), (ran, OLD), (ran, OLD), ("again", arithmetic_digest())]
    page = (tmp_path / "tables" / "report.html").read_text()
    assert "the traces of 2 of 3 trials are lost" in page


def test_that_none_could_be_derived_again_is_a_failure(tmp_path: Path) -> None:
    one = measured("c1", 0, watts=3.0)
    folder = stored_run(tmp_path / "run", (one, {"window": [counter(3.0)]}))
    (folder / "traces" / f"{one.trial_id}.parquet").unlink()
    done = joulebench("report", str(folder), "--rederive", "--out", str(tmp_path / "tables"))
    assert done.code == 6, done.stderr
    assert "none of the 1 trials that have joules could be derived again" in done.stderr
    assert "nothing changed" not in done.stdout
    assert (tmp_path / "tables" / "report.html").is_file(), "the tables of what is stored"


def test_a_run_from_before_the_digest_was_kept_is_derived_again_all_the_same(tmp_path: Path) -> None:
    one = measured("c1", 0, watts=5.0)
    folder = stored_run(tmp_path / "run", (one, {"window": [counter(5.0)]}))
    changed_row(folder, one.trial_id, {"derived_by": None})
    with Store.view(folder) as store:
        data = store.data()
        assert data.trials[0].derived_by is None
        assert len(derivation_notes(data)) == 1
        found = rederived(data)
    assert (found.changes, found.n_derived) == ((), 1)
    assert derivation_notes(found.run) == []


def test_modelled_joules_follow_from_cpu_time_and_the_sheet_that_are_kept(tmp_path: Path) -> None:
    """Stored: 4 s at 3 W. Kept: a core busy for half of the time, 10 W a core and 1 W besides."""
    one = measured("c1", 0, watts=3.0)
    sheet = WattsSheet(name="s", active_w_per_core=10.0, idle_w=1.0, relative_accuracy=0.1, origin="a test")
    stored = counter(3.0)
    raw = replace(stored, component=CPU_TIME, kind="raw", values=stored.times_s / 2, basis=sheet.model_dump_json())
    folder = stored_run(tmp_path / "run", (one, {"window": [stored], "window, raw": [raw]}))
    with Store.view(folder) as store:
        found = rederived(store.data())
        (answer,) = answered_samples(found.run)[0].answers
    (whole,) = (c for c in found.changes if c.metric == "energy, all, m, modelled")
    assert (whole.stored, whole.now) == (pytest.approx(12.0), pytest.approx((1 + 10 / 2) * 4))
    assert answer.energy_j == whole.now, "samples of the new report say the same"


def test_a_watts_sheet_that_cannot_be_read_leaves_the_stored_joules(tmp_path: Path) -> None:
    raw = replace(counter(3.0), component=CPU_TIME, kind="raw", basis="{}")
    one = measured("c1", 0, watts=3.0)
    folder = stored_run(tmp_path / "run", (one, {"window": [counter(5.0)], "window, raw": [raw]}))
    with Store.view(folder) as store:
        found = rederived(store.data())
    assert (found.n_derived, found.changes, found.run.trials[0].energy) == (0, (), one.energy)
    assert "watts sheet cannot be read" in found.kept[0]


def test_the_share_of_others_follows_from_the_cpu_time_at_the_windows_edges(tmp_path: Path) -> None:
    """8 s of 2 cores: 5 s were busy, 4 s of them ours."""
    before = CpuSeconds(busy_s=100.0, ours_s=10.0, available_s=1000.0)
    after = CpuSeconds(busy_s=105.0, ours_s=14.0, available_s=1008.0)
    one = trial(foreign_cpu_share=0.5, cpu_before=before, cpu_after=after)
    with Store.view(stored_run(tmp_path / "run", (one, {}))) as store:
        found = rederived(store.data())
    (change,) = found.changes
    assert (change.metric, change.stored, change.now) == ("CPU time of others", 50.0, pytest.approx(12.5))


def test_a_trial_without_meters_has_nothing_to_derive(tmp_path: Path) -> None:
    with Store.view(stored_run(tmp_path / "run", (trial(), {}))) as store:
        found = rederived(store.data())
    assert (found.changes, found.n_derived, found.kept) == ((), 0, ())


def test_joules_that_no_longer_come_out_are_told_as_none(tmp_path: Path) -> None:
    """Stored by other code: joules. The readings begin behind the window's start."""
    one = trial(completions=[completion("s", 0.0, token_times_s=(1.0, 4.0))], energy=(reading(meter="m"),))
    folder = stored_run(tmp_path / "run", (one, {"window": [counter(5.0, from_s=2.0)]}))
    done = joulebench("report", str(folder), "--rederive", "--json")
    assert done.code == 0, done.stderr
    found = json.loads(done.stdout)["rederived"]
    assert (found["derived"], found["changed"], found["kept"]) == (1, 1, [])
    (whole,) = (c for c in found["changes"] if c["metric"] == "energy, all, m, counter")
    assert (whole["stored"], whole["now"]) == (6.0, None)


def test_a_gauge_in_step_with_requests_is_told_though_the_run_did_not_and_a_note_of_before_goes(tmp_path: Path) -> None:
    """12 requests of 20 s, of which a gauge saw an instant each; and a counter, of which a note said the same."""
    starts_s = np.arange(12) * 20.0
    done = [completion("s", s, token_times_s=(s + 1.0, s + 20.0)) for s in starts_s.tolist()]
    at_s = np.arange(-36.0, 260.0, 20.0)
    gauge = PowerTrace(
        "g", "total", "held", "battery gauge", at_s, 5.0 + 0.01 * (np.arange(len(at_s)) % 7), 0.5,
        update_period_s=20.0, relative_accuracy=0.0,
    )  # fmt: skip
    stale = "energy of m: it renews its value every 20 s, and met requests nearly in step: what stood there"
    ends = {"completions": done, "window_start_s": 0.0, "window_end_s": 240.0}
    silent = trial("c1", 0, energy=(), notes=("kept",), **ends)
    told = trial("c2", 0, energy=(), notes=(stale, "kept"), **ends)
    steady = counter(5.0, "total", -1.0, 241.0)
    folder = stored_run(tmp_path / "run", (silent, {"window": [gauge]}), (told, {"window": [steady]}))
    with Store.view(folder) as store:
        notes = {t.cell_id: t.notes for t in rederived(store.data()).run.trials}
    assert notes["c2"] == ("kept",)
    kept, added = notes["c1"]
    assert kept == "kept"
    assert added.startswith("energy of g: it renews its value every 20 s, and met requests nearly in step")
