"""An engine whose answers vary between repeats, from its first request to the table of changes.

24 samples, 5 repeats. The reference is always right. The other arm is right in 4 of 5 repeats of 6 samples, each time
in another repeat, and always right elsewhere: 114 of 120 answers.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import pytest

from engines.base import PhaseListener
from harness.matrix import CellPlan
from harness.opening import open_run
from harness.plan import build_plan
from harness.runner import Runner
from harness.session import PreparedCell
from results import tables
from results.accuracy_energy import accuracy_energy
from results.answers import answered_samples
from results.compare import MCNEMAR_CLUSTERED
from results.records import Completion, Request, Sample, Score
from results.report.arms import arms_of
from results.report.html import page_context
from results.report.samples import sample_panels
from results.runs import RunData
from results.store import Store
from tests.fakes.machine import FakeBench, FakeEngine, FakeWorkload
from tests.plans import DROPLESS, FAST, TIERS, raw_plan
from tests.test_runner import Heard

N, N_REPEATS, N_UNSTEADY = 24, 5, 6


class UnsteadyEngine(FakeEngine):
    """Answers sample i wrongly in repeat i, where i is below `N_UNSTEADY`, while it is the arm that varies."""

    varies = False
    repeat = 0

    def run(self, request: Request, on_phase: PhaseListener) -> Completion:
        done = super().run(request, on_phase)
        i = int(request.sample_id[1:])
        is_wrong = self.varies and i < N_UNSTEADY and i % N_REPEATS == self.repeat
        return done.model_copy(update={"text": "wrong"}) if is_wrong else done


class ManySamples(FakeWorkload):
    def score(self, requests: Sequence[Request], completions: Sequence[Completion]) -> Sequence[Score]:
        own = super().score(requests, completions)
        return [*own, Score(metric="acc", value=sum(s.value for s in own) / len(own), stderr=0.01, n=len(own))]


def requests() -> tuple[Request, ...]:
    return tuple(
        Request(request_id=f"s{i}#0", sample_id=f"s{i}", kind="generate", prompt_ids=(1, 2), max_new_tokens=2)
        for i in range(N)
    )


class UnsteadyBench(FakeBench):
    def __init__(self) -> None:
        super().__init__()
        self.engine: UnsteadyEngine = UnsteadyEngine(self.machine, self.fake_device)
        self.fake_workload = ManySamples()

    def arm(self, plan: CellPlan) -> PreparedCell:
        self.engine.repeat = self.order.count(plan.cell.engine)
        self.order.append(plan.cell.engine)
        self.engine.varies = plan.cell.engine == "tiers"
        return PreparedCell(
            plan.cell.cell_id, self.engine, self.fake_workload, self.fake_device, self.machine, requests()
        )

    def requests(self, plan: CellPlan) -> Sequence[Request]:
        return requests()


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    folder = tmp_path_factory.mktemp("unsteady") / "run"
    plan, bench = (
        build_plan(raw_plan(engine=[DROPLESS, TIERS], protocol=FAST | {"repeats": N_REPEATS})),
        UnsteadyBench(),
    )
    with open_run(plan, folder, False, bench) as store:
        Runner(plan, store, bench, Heard()).run()
    with Store.view(folder) as store:
        data = store.data()
    asked = tuple(Sample(sample_id=r.sample_id, question="?", expected="itself") for r in requests())
    samples = {(c.workload, c.model): asked for c in data.cells}
    return RunData(data.info, data.cells, data.trials, lambda trial_id: (), samples=samples)


@pytest.fixture(scope="module")
def change(measured: RunData) -> pd.Series:
    frame = accuracy_energy(measured, tables.tidy(measured))
    return frame[(frame["engine"] == "tiers") & (frame["quantity"] == "acc")].iloc[0]


def test_the_change_is_that_of_the_accuracies_beside_it(change: pd.Series) -> None:
    assert (change["value"], change["change"]) == (pytest.approx(0.95), pytest.approx(-0.05))
    assert change["change_percent"] == pytest.approx(-5)


def test_a_sample_that_is_right_in_4_of_5_repeats_is_not_lost(change: pd.Series) -> None:
    assert (change["n_answers"], change["n_answers_changed"], change["n_pairs"]) == (120, 6, 24)
    # Six samples of one repeat each, all one way: 2 / 2^6. Bonett and Price by hand over 120 answers:
    # -6 / 122 -+ 1.959964 sqrt((8 - 36 / 122) / 122 / 122).
    assert change["p"] == pytest.approx(2 / 64)
    assert (change["change_low"], change["change_high"]) == pytest.approx((-0.0937739, -0.0045868), abs=1e-6)
    assert change["test"] == MCNEMAR_CLUSTERED


def test_the_page_counts_answers_and_names_no_sample_lost(measured: RunData) -> None:
    (table,) = page_context(measured)["accuracy_tables"]
    assert table.rows[1].scores[0].change.below[1] == "p = 0.031, 6 of 120 answers to 24 samples changed"
    (panel,) = sample_panels(answered_samples(measured), arms_of(measured.cells))
    unsteady = next(s for s in panel["samples"] if s["id"] == "s0")
    assert [a["scores"] for a in unsteady["answers"]] == [[("acc", "right")], [("acc", "right in 4 of 5")]]
    assert not any(answer["wrong"] for answer in unsteady["answers"])
    # A fifth by the verdicts; what is said in the first repeat differs, too.
    assert unsteady["disagreement"] == pytest.approx(0.2 + 0.5)
