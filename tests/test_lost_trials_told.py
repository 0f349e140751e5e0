"""What tables and pages tell of trials that were measured again, and of pairs of two sittings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from results.history.comparison import Side, compare, told_of
from results.report.caveats import caveats_of
from results.report.html import html_text, page_context
from results.runs import Input
from results.sittings import sitting_notes
from results.store import Store
from results.trial_tables import trials as trial_table
from tests.fakes.machine import FakeBench
from tests.run_builders import cell, trial
from tests.test_lost_trials import lost_at
from tests.test_runner import planned, run


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two arms in three rounds: the first's trial of round 2 was lost, and of round 3 both."""
    folder = tmp_path_factory.mktemp("resumed") / "run"
    plan = planned({"repeats": 3, "retries": 0})
    run(plan, lost_at(6, 7, 8), folder)
    run(plan, FakeBench(), folder, resume=True)
    return folder


def test_tables_count_a_lost_trial_and_its_successor_once_and_tell_both(resumed: Path) -> None:
    with Store.view(resumed) as store:
        data = store.data()
    table = trial_table(data)
    assert list(table["status"]) == ["ok"] * 6
    by_place = table.set_index(["engine", "repeat"])
    assert by_place["replaces"].notna().sum() == 3
    for trial_of in data.replaced:
        (row,) = [r for _, r in table.iterrows() if (r["cell"], r["repeat"]) == (trial_of.cell_id, trial_of.repeat)]
        assert row["replaces"] == f"{trial_of.trial_id}: unplugged"
        assert row["sitting"] == 1
    assert data.remarks == (
        "3 trials of host failed because it, a meter or a server was lost. They were measured again when the run"
        " was gone on with; what failed is in no count.",
    )


def test_the_page_shows_what_failed_and_counts_what_stands(resumed: Path) -> None:
    with Store.view(resumed) as store:
        data = store.data()
    context = page_context(data)
    assert (context["counts"]["all"], context["counts"]["ok"], context["counts"]["failed"]) == (6, 6, 0)
    told = {(c.engine, tuple(numbers)): follows for c, _, _, numbers, follows in context["failed"]}
    assert told.keys() == {("dropless", (2, 3)), ("tiers", (3,))}
    assert all("it was measured again since" in follows for follows in told.values())
    page = html_text(data)
    assert "unplugged" in page
    assert "3 trials of host failed because it, a meter or a server was lost." in page


def test_a_failure_that_still_stands_says_that_a_resume_measures_it(tmp_path: Path) -> None:
    """That of a fleet's run too, which `joulebench run` refuses."""
    run(planned({"retries": 0}), lost_at(0), tmp_path / "run")
    with Store.view(tmp_path / "run") as store:
        data = store.data()
    workers = data.info.model_copy(update={"inputs": (Input(name="nice value, worker of host", value="0"),)})
    for command, one in (("run", data), ("fleet start", replace(data, info=workers))):
        ((*_, follows),) = page_context(one)["failed"]
        assert follows.startswith("transient: given up after 1 attempt; its device, a meter or a server was lost:")
        assert f"`joulebench {command} --resume` measures it again" in follows


APART = (
    "in 1 of 3 repeats (trial 2) the arms were not measured in one sitting, as the run was broken off or the device"
    " lost in between. What changed meanwhile, as heat, is in the difference of these pairs. Where two arms have more"
    " than one such pair, no interval of times or joules is over them."
)


def test_pairs_of_two_sittings_are_told_and_others_are_not(resumed: Path) -> None:
    with Store.view(resumed) as store:
        data = store.data()
    (note,) = sitting_notes(data)
    assert note == f"{data.cells[0].workload} on host: {APART}"
    one, other = (Side(c.engine, told_of(data), c.engine) for c in data.cells)
    assert note in compare(one, other, frozenset()).notes
    (caveat,) = [c.text for c in caveats_of(data, "host") if "sittings" in c.text]
    assert caveat == "arms were measured in different sittings"
    whole = replace(data, trials=tuple(t.model_copy(update={"sitting": 0}) for t in data.trials))
    assert sitting_notes(whole) == []
    assert not [c for c in caveats_of(whole, "host") if "sittings" in c.text]
    arms = [c.cell_id for c in data.cells]
    alone = replace(data, cells=data.cells[:1], trials=tuple(t for t in data.trials if t.cell_id == arms[0]))
    assert sitting_notes(alone) == []


def test_the_same_arm_on_two_devices_and_modelled_machines_are_no_pairs_of_sittings() -> None:
    from tests.run_builders import run as run_of

    cells = [cell("c1"), cell("c2", device="adb:X"), cell("c3", engine="other")]
    ok = [trial("c1", 0), trial("c2", 0, sitting=1), trial("c3", 0, sitting=1, time_method="modelled")]
    assert sitting_notes(run_of(cells, ok)) == []


def test_pairs_that_were_each_measured_in_one_sitting_are_not_told_of_others(resumed: Path) -> None:
    """Two models, the second of which was measured a sitting later with both arms."""
    with Store.view(resumed) as store:
        data = store.data()
    later = {c.cell_id: c.model_copy(update={"cell_id": f"{c.cell_id}-later", "model": "later"}) for c in data.cells}
    first = [t.model_copy(update={"sitting": 0}) for t in data.trials]
    second = [t.model_copy(update={"sitting": 1, "cell_id": later[t.cell_id].cell_id}) for t in data.trials]
    both = replace(data, cells=(*data.cells, *later.values()), trials=(*first, *second))
    one, other = (Side(c.engine, told_of(both), c.engine) for c in data.cells)
    found = compare(one, other, frozenset())
    alone = compare(*(Side(c.engine, told_of(data), c.engine) for c in data.cells), frozenset())
    assert len(found.rows) == 2 * len(alone.rows) > 0
    assert not [note for note in found.notes if "sitting" in note]
    assert sitting_notes(both) == []
    (moved, *rest) = both.trials
    apart = replace(both, trials=(moved.model_copy(update={"sitting": 2}), *rest))
    (note,) = sitting_notes(apart)
    assert note.startswith(f"{data.cells[0].workload} on host, {data.cells[0].model}: in 1 of 3 repeats")
