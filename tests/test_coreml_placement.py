"""Where Core ML placed what a trial ran: kept with the trial, told in tables, and marked where no expert was there.

No Mac: coremltools runs as it is, above a fake of the compiled module that talks to Core ML.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from engines.base import Engine
from engines.coreml.macos import MacPredictor
from engines.coreml.manifest import read_manifest
from engines.errors import EngineError
from engines.external import gate
from engines.external.base import Answer
from engines.external.gate import N_TOKENS, answers_of
from results.cells import answering, usable
from results.graph_placement import (
    EXPERTS_NOT_ON_ANE,
    PLACEMENT_NOT_TOLD,
    GraphPlacement,
    ane_operations_share,
    placement_marks,
    placement_words,
)
from results.records import Request
from results.report.csv import write_csv
from results.report.html import write_html
from results.store import Store
from results.trials import Trial
from tests.coreml import BUNDLED, converted
from tests.fakes.core_ml import FakeCoreMl, Places
from tests.profiles import trials

pytest.importorskip("coremltools", reason="reads and writes packages (pip install joulebench[coreml])")

ANE = {
    "name": "ane",
    "runs": "coreml",
    "technique": {"name": "npumoe-tg"},
    "profile": BUNDLED,
    "prefill_chunk": 64,
    "context": 128,
}
LENGTHS = {"name": "fixed_lengths", "prompt_tokens": 40, "new_tokens": 2, "limit": 1}
COLD = {"repeats": 1, "warmup": 0, "idle_s": 0, "max_foreign_cpu_share": 1.0}


def all_on(unit: str | None) -> Places:
    return lambda package, kind: unit


def experts_on(unit: str | None) -> Places:
    """Attention on the ANE."""
    return lambda package, kind: unit if "experts" in package else "ane"


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all tests here: graphs are converted once."""
    return tmp_path_factory.mktemp("state")


@pytest.fixture(autouse=True)
def _own_state(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(state))


@pytest.fixture(autouse=True)
def _short_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers take most of a trial here. The first test asks for whole ones."""
    monkeypatch.setattr(gate, "N_TOKENS", 2)


@contextmanager
def telling_the_gate(fake: FakeCoreMl) -> Iterator[None]:
    """The gate's questions lie between two events of their own."""

    def told(engine: Engine, requests: Sequence[Request]) -> list[Answer]:
        fake.events.append(("gate", "", ""))
        found = answers_of(engine, requests)
        fake.events.append(("gate", "", ""))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gate, "answers_of", told)
        yield


def one_trial(folder: Path, fake: FakeCoreMl, **engine: Any) -> Trial:
    """As it was read back from the store."""
    model = {"source": BUNDLED, "dtype": "float16"}
    own = {key: value for key, value in {**ANE, **engine}.items() if value is not None}
    with fake.installed(), telling_the_gate(fake):
        (found,) = trials(folder, model=model, engine=[own], workload=[LENGTHS], protocol=COLD)
    return found


def in_the_window(fake: FakeCoreMl) -> list[tuple[str, str]]:
    """Package and function of each prediction after all loads; each load predicts once itself."""
    kinds = [what for what, *_ in fake.events]
    if "gate" in kinds:
        first, last = (i for i, kind in enumerate(kinds) if kind == "gate")
        assert set(kinds[first + 1 : last]) == {"predict"}
        del kinds[first : last + 1], fake.events[first : last + 1]
    n_loading = 2 * kinds.count("load")
    assert kinds[:n_loading] == ["load", "predict"] * kinds.count("load"), "a graph is loaded, and predicts once"
    return [(package, function) for what, package, function in fake.events[n_loading:] if what == "predict"]


def tables(folder: Path) -> Path:
    """CSV files and page of the run."""
    with Store.view(folder) as store:
        run = store.data()
        write_csv(run, folder)
        write_html(run, folder / "report.html")
    return folder


@pytest.mark.parametrize("variant", [pytest.param("stateless", marks=pytest.mark.slow), "stateful"])
def test_each_graph_that_ran_is_kept_with_the_unit_of_each_operation(
    tmp_path: Path, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "N_TOKENS", N_TOKENS)
    fake = FakeCoreMl(lambda package, kind: "cpu" if kind == "softmax" else "ane")
    trial = one_trial(tmp_path / "run", fake, attention=variant)
    assert trial.status == "ok", trial.failure
    assert trial.marks == ()
    ran = in_the_window(fake)
    assert sum(graph.predictions for graph in trial.placement) == len(ran)
    for graph in trial.placement:
        # Constants are placed nowhere; the softmax is the only operation of attention that the fake keeps away.
        assert set(graph.operations) == ({"ane", "cpu"} if graph.role == "attention" else {"ane"})
        if graph.role == "attention":
            (softmax,) = graph.operations["cpu"]
            assert softmax.startswith("softmax ")
            assert graph.function.startswith(variant)
        assert graph.cost_on_ane == 1.0  # only convolutions have a cost
    tables(tmp_path / "run")
    table = pd.read_csv(tmp_path / "run" / "placement.csv")
    assert set(table["unit"]) == {"ane", "cpu"}
    assert table.drop_duplicates(["package", "function"])["predictions"].sum() == len(ran)
    share = pd.read_csv(tmp_path / "run" / "trials.csv")["ane_operations_share"]
    assert share.tolist() == pytest.approx([ane_operations_share(trial.placement)])
    assert "of what ran, on the ANE: attention 9" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize(
    ("places", "mark"),
    [
        (experts_on("ane"), None),
        (experts_on("cpu"), EXPERTS_NOT_ON_ANE),
        (experts_on("gpu"), EXPERTS_NOT_ON_ANE),
        (experts_on(None), PLACEMENT_NOT_TOLD),
    ],
)
def test_a_trial_whose_experts_were_never_on_the_ane_is_in_no_mean(
    places: Places, mark: str | None, tmp_path: Path
) -> None:
    trial = one_trial(tmp_path / "run", FakeCoreMl(places))
    assert trial.status == "ok", trial.failure
    assert trial.marks == (() if mark is None else (mark,))
    assert usable([trial]) == ([trial] if mark is None else [])
    assert answering([trial]) == [trial], "where a graph lay changes no answer"
    if mark is not None:
        assert mark in (tables(tmp_path / "run") / "report.html").read_text()


def test_experts_of_the_cpu_are_no_graphs_and_attention_decides(tmp_path: Path) -> None:
    on_cpu = one_trial(tmp_path / "cpu", FakeCoreMl(all_on("cpu")), technique={"name": "anemll"}, profile=None)
    assert on_cpu.marks == (EXPERTS_NOT_ON_ANE,)
    on_ane = one_trial(tmp_path / "ane", FakeCoreMl(all_on("ane")), technique={"name": "anemll"}, profile=None)
    assert on_ane.marks == ()


def test_a_plan_that_core_ml_cannot_give_costs_no_trial(tmp_path: Path) -> None:
    fake = FakeCoreMl(all_on("ane"))
    fake.no_plans = True
    trial = one_trial(tmp_path / "run", fake)
    assert trial.status == "ok", trial.failure
    assert trial.marks == (PLACEMENT_NOT_TOLD,)
    assert all("no compute plan (no plan)" in str(graph.reason) for graph in trial.placement)


# --- before the window -----------------------------------------------------------------------------------------------


def test_no_window_compiles_a_graph_or_has_its_first_prediction_also_without_a_warmup(tmp_path: Path) -> None:
    fake = FakeCoreMl(all_on("ane"))
    trial = one_trial(tmp_path / "run", fake)
    assert trial.status == "ok", trial.failure
    ran = in_the_window(fake)
    assert len(ran) == sum(graph.predictions for graph in trial.placement) > 0
    kinds = [what for what, *_ in fake.events]
    last = len(kinds) - kinds[::-1].index("predict")
    assert "plan" not in kinds[:last], "placement is asked after the window"
    loaded = {(package, function) for what, package, function in fake.events if what == "load"}
    assert set(ran) < loaded
    assert not any(function.startswith("stateful") for _, function in loaded), "a process holds what it may call"


def test_workloads_and_arms_of_the_same_packages_share_their_graphs(tmp_path: Path) -> None:
    alone, together = FakeCoreMl(all_on("ane")), FakeCoreMl(all_on("ane"))
    one_trial(tmp_path / "alone", alone)
    with together.installed():
        found = trials(
            tmp_path / "together",
            model={"source": BUNDLED, "dtype": "float16"},
            engine=[ANE, {**ANE, "name": "one thread", "threads": 1}],
            workload=[LENGTHS, {**LENGTHS, "label": "longer", "prompt_tokens": 70}],
            protocol=COLD,
        )
    assert [trial.status for trial in found] == ["ok"] * 4
    loads = [Counter(event for event in fake.events if event[0] == "load") for fake in (alone, together)]
    assert len(loads[0]) > 0
    assert loads[1] == loads[0]


def test_more_graphs_than_are_reported_to_fit_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.coreml.engine.MOST_GRAPHS", 1)
    trial = one_trial(tmp_path / "run", FakeCoreMl(all_on("ane")))
    assert trial.status == "ok", trial.failure
    assert any(
        "graphs of all arms, and about 1 are reported to fit: give each arm a run" in note for note in trial.notes
    )
    fake = FakeCoreMl(all_on("ane"))
    fake.refuses = "layer-003/experts-1"
    trial = one_trial(tmp_path / "full", fake)
    assert trial.failure is not None
    assert "about 1 graphs are reported to fit in a process, and this one holds" in trial.failure.error


def test_a_graph_that_does_not_compile_is_told_before_any_window(tmp_path: Path) -> None:
    """coremltools warns of it, and goes on with a model that cannot predict."""
    fake = FakeCoreMl(all_on("ane"))
    fake.refuses = "layer-001/experts-1"
    trial = one_trial(tmp_path / "run", fake)
    assert trial.status == "failed"
    assert trial.failure is not None
    assert "layer-001/experts-1.mlpackage" in trial.failure.error
    assert "Core ML does not load it" in trial.failure.error
    assert "error code: -14" in trial.failure.error
    assert in_the_window(fake) == []


def test_a_core_ml_older_than_the_package_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fakes.core_ml.IOS_18", 8)
    packages = converted("anemll", tmp_path / "packages", attention="stateless")
    (package, *_) = read_manifest(packages.folder).packages
    with FakeCoreMl(all_on("ane")).installed():
        predictor = MacPredictor(packages.folder)
        with pytest.raises(EngineError, match="older than the package"):
            predictor.load(package, package.default_function, "cpu_and_ne")


# --- arithmetic ------------------------------------------------------------------------------------------------------


def graph(role: str, predictions: int = 1, reason: str | None = None, **operations: int) -> GraphPlacement:
    told = {unit: tuple(f"conv {i}" for i in range(n)) for unit, n in operations.items()}
    return GraphPlacement(package="p", function="f", role=role, predictions=predictions, operations=told, reason=reason)


def test_shares_weigh_each_graph_by_its_predictions() -> None:
    """3 predictions of 4 operations there, one of 8 with 2 there: (12 + 2) / (12 + 8)."""
    told = [graph("experts", 3, ane=4), graph("attention", 1, ane=2, cpu=6), graph("shared", 5, reason="lost")]
    assert ane_operations_share(told) == 0.7
    assert placement_words(told) == (
        "3 graphs, operations: 6 on ane, 6 on cpu; of what ran, on the ANE: experts 100 %, attention 25 %, shared not"
        " told; 1 of the graphs not told"
    )
    assert ane_operations_share([graph("experts", reason="lost")]) is None
    assert placement_words([graph("experts", reason="lost")]) == "1 graph, and it does not say where (lost)"


@pytest.mark.parametrize(
    ("placement", "marks"),
    [
        ([], ()),
        ([graph("experts", ane=1, cpu=9)], ()),
        ([graph("experts", cpu=9), graph("experts", ane=1)], ()),
        ([graph("experts", cpu=9), graph("attention", ane=9)], (EXPERTS_NOT_ON_ANE,)),
        ([graph("experts", cpu=9), graph("experts")], (PLACEMENT_NOT_TOLD,)),
        ([graph("attention", cpu=9)], (EXPERTS_NOT_ON_ANE,)),
    ],
)
def test_marks_follow_from_the_graphs_of_experts(placement: list[GraphPlacement], marks: tuple[str, ...]) -> None:
    assert placement_marks(placement) == marks
