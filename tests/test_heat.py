"""What routers chose in a window: counted whole and outside of any token's time, kept, and told in figures."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import engines.heat
from engines.base import PhaseEvent
from engines.heat import HeatCounts
from engines.model.checkpoints import Checkpoint, load_checkpoint
from engines.observers import SparseLayerStep
from engines.oracle import OracleParameters
from engines.reference import ReferenceEngine
from engines.techniques.presets import DroplessParameters
from harness.opening import open_run
from harness.plan import build_plan
from harness.run_parts import RunParts
from harness.runner import Runner
from results.database import DATABASE
from results.expert_heat import ExpertHeat, LayerForetold
from results.heat import experts_of, heat_of_cells, layers_of
from results.popularity import imbalance, overlap_at_k, popularity
from results.records import Phase, Request
from results.store import Store, StoreError
from results.trace_files import WINDOW
from results.trials import Trial
from tests.heats import heat_of, run_of
from tests.plans import BOOLQ, DROPLESS, HERE, HOST, M2_ULTRA, MODEL, NPUMOE, raw_plan
from tests.run_builders import cell, failed, generation, trial
from tests.store_checks import INFO, POWER
from tests.techniques import NpumoeT
from tests.test_runner import Heard
from tests.test_store_damage import before_seals

HEAT = ExpertHeat(layers=(0, 2), chosen=((3, 1, 0), (2, 2, 0)), profiled=((1, 1, 1), (3, 0, 0)))


# --- the arithmetic --------------------------------------------------------------------------------------------------


def test_imbalance_popularity_and_overlap_by_hand() -> None:
    assert imbalance((30, 10, 0, 0)) == 3.0
    assert imbalance((5, 5, 5, 5)) == 1.0
    assert imbalance((0, 0)) is None
    assert popularity((1, 9, 4, 9)) == (1, 3, 2, 0)
    assert overlap_at_k((9, 8, 7, 1), (1, 9, 8, 7), 3) == 2 / 3
    assert overlap_at_k((9, 8, 7, 1), (1, 9, 8, 7), 1) == 0.0


@pytest.mark.parametrize(
    "change",
    [
        {"layers": (0,)},
        {"chosen": ((1, 2), (1, 2, 3))},
        {"profiled": ((1, 1, 1),)},
        {"chosen": ((-1,), (1,))},
        {"decoded": ((0, 2, 0), (0, 0, 0))},
        {"decoded": ((0, 0), (0, 0))},
    ],
)
def test_a_matrix_that_is_none_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expert"):
        ExpertHeat.model_validate(HEAT.model_dump() | change)


# --- the counting ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return load_checkpoint(MODEL, torch.float32)


def asked(n_prompt: int = 40, n_new: int = 6, seed: int = 1) -> Request:
    ids = torch.randint(4, 2000, (n_prompt,), generator=torch.Generator().manual_seed(seed)).tolist()
    return generation(f"s{seed}", ids, n_new)


def unheard(event: PhaseEvent, at_s: float) -> None:
    """Not looked at."""


class Choices:
    """A layer observer that counts pair by pair: all, and those of decoding."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[int, int]] = Counter()
        self.decoded: Counter[tuple[int, int]] = Counter()

    def layer(self, seen: SparseLayerStep) -> None:
        pairs = [(seen.layer, e) for chosen in seen.routing.expert_ids_TK.tolist() for e in chosen]
        self.counts.update(pairs)
        if seen.phase == "decode":
            self.decoded.update(pairs)


def as_counter(heat: ExpertHeat | None, phase: Phase = "all") -> Counter[tuple[int, int]]:
    assert heat is not None
    pairs = ((layer, row) for layer, row in zip(heat.layers, heat.of(phase) or (), strict=True))
    return Counter({(layer, e): n for layer, row in pairs for e, n in enumerate(row) if n})


@pytest.mark.parametrize("arm", ["dropless", "oracle", "narrow tiers"])
@pytest.mark.parametrize("most_held", [1 << 22, 20])
def test_every_choice_is_counted_whatever_a_technique_drops(
    checkpoint: Checkpoint, arm: str, most_held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks that end inside a prompt, and decoding; beside a count pair by pair of what an observer is told."""
    monkeypatch.setattr(engines.heat, "MOST_HELD_PAIRS", most_held)
    parameters: Any = {"dropless": DroplessParameters(), "oracle": OracleParameters()}.get(arm)
    if parameters is None:
        parameters = NpumoeT(multiples=(0.5, 0.25), align=1)

    def counted(observed: bool) -> tuple[ExpertHeat | None, Choices, int]:
        engine = ReferenceEngine(checkpoint, parameters, prefill_chunk=16)
        if engine.needs_calibration:
            engine.calibrate([asked(seed=9).prompt_ids])
        choices = Choices()
        engine.layer_observer = choices if observed else None
        for request in (asked(), asked(23, 3, 2)):
            engine.run(request, unheard)
        return engine.take_heat(), choices, engine.take_counters().routed_pairs

    heat, choices, routed = counted(observed=True)
    assert as_counter(heat) == choices.counts
    assert as_counter(heat, "decode") == choices.decoded
    assert as_counter(heat, "prefill") == choices.counts - choices.decoded
    assert as_counter(heat).total() == routed == (40 + 5 + 23 + 2) * 2 * 4
    assert choices.decoded.total() == (5 + 2) * 2 * 4
    unwatched, _, _ = counted(observed=False)
    assert unwatched == heat


def test_a_window_begins_with_nothing_and_a_batch_counts_all_of_its_requests(checkpoint: Checkpoint) -> None:
    engine = ReferenceEngine(checkpoint, DroplessParameters(), prefill_chunk=16)
    assert engine.take_heat() is None
    apart: Counter[tuple[int, int]] = Counter()
    requests = [asked(), asked(23, 3, 2)]
    for request in requests:
        engine.run(request, unheard)
        apart += as_counter(engine.take_heat())
    engine.run_batch(requests, unheard)
    assert as_counter(engine.take_heat()) == apart
    assert engine.take_heat() is None


def test_what_shows_distributions_is_not_counted(checkpoint: Checkpoint) -> None:
    engine = ReferenceEngine(checkpoint, DroplessParameters())
    engine.run(asked(), unheard)
    shown = asked().model_copy(update={"kind": "loglikelihood", "continuation_ids": (5, 6), "max_new_tokens": 0})
    engine.show_log_probabilities(shown, lambda _: None)
    assert as_counter(engine.take_heat()).total() == engine.take_counters().routed_pairs


def test_choices_are_counted_after_the_last_stamp_of_their_request(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    count = HeatCounts.count

    def noted(self: HeatCounts) -> None:
        happened.append("count")
        count(self)

    monkeypatch.setattr(HeatCounts, "count", noted)
    engine = ReferenceEngine(checkpoint, DroplessParameters(), prefill_chunk=16)
    engine.run(asked(), lambda event, at_s: happened.append(event))
    assert happened == ["request start", "prefill end", "request end", "count"]


# --- the store -------------------------------------------------------------------------------------------------------


def heated(trial_id: str, heat: ExpertHeat | None, **changes: Any) -> Trial:
    return trial(trial_id=trial_id, **changes).model_copy(update={"heat": heat})


def test_heat_comes_back_with_its_trial_and_is_no_part_of_its_record(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run", INFO, [cell("c1")]) as store:
        store.add_trial(heated("t1", HEAT, repeat=0), {WINDOW: [POWER]})
        store.add_trial(heated("t2", None, repeat=1), {})
        store.add_trial(failed(trial_id="t3", repeat=2), {})
    with Store.view(tmp_path / "run") as store:
        run = store.data()
        assert [run.load_heat(t.trial_id) for t in run.trials] == [HEAT, None, None]
        assert [t.heat for t in run.trials] == [None] * 3
    assert run.load_heat(run.trials[0].trial_id) == HEAT, "as traces can be read when the store is closed"
    with sqlite3.connect(tmp_path / "run" / DATABASE) as db:
        (record,) = db.execute("SELECT record FROM trial WHERE trial_id = 't1'").fetchone()
    assert "chosen" not in record


def test_a_trial_that_is_not_committed_leaves_no_heat(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run", INFO, [cell("c1")]) as store:
        store.add_trial(heated("t1", HEAT), {})
        with pytest.raises(StoreError, match="never replaced"):
            store.add_trial(heated("t2", HEAT), {})
        assert (store.heat("t1"), store.heat("t2")) == (HEAT, None)


def test_a_run_from_before_heat_was_kept_has_none_and_takes_it_from_now_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with Store.create(folder, INFO, [cell("c1")]) as store:
        store.add_trial(heated("t1", None, repeat=0), {})
    before_seals(folder)
    with sqlite3.connect(folder / DATABASE) as db:
        db.execute("DROP TABLE heat")
        db.execute("UPDATE meta SET value = '4' WHERE key = 'schema_version'")
    with Store.view(folder) as store:
        assert store.data().load_heat("t1") is None
    with Store.open(folder) as store:
        store.add_trial(heated("t2", HEAT, repeat=1), {})
        assert (store.heat("t1"), store.heat("t2")) == (None, HEAT)


def test_a_damaged_matrix_names_the_file(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run", INFO, [cell("c1")]) as store:
        store.add_trial(heated("t1", HEAT), {})
    with sqlite3.connect(tmp_path / "run" / DATABASE) as db:
        db.execute('UPDATE heat SET record = \'{"layers": [0], "chosen": []}\'')
    with Store.view(tmp_path / "run") as store, pytest.raises(StoreError, match=DATABASE):
        store.heat("t1")


# --- figures ---------------------------------------------------------------------------------------------------------


def test_cells_add_up_their_trials_marked_ones_too() -> None:
    first, second = heat_of((1, 2), (3, 0)), heat_of((10, 20), (30, 0))
    run = run_of(
        {
            "c1": [(first, {}), (second, {}), (heat_of((100, 0), (0, 100)), {"marks": ("charging",)}), (None, {})],
            "c2": [(None, {})],
        },
        [cell("c1"), cell("c2")],
    )
    found = heat_of_cells(run)
    assert found == {"c1": heat_of((111, 22), (33, 100)).model_copy(update={"windows": 3})}
    layers, experts = layers_of(run, found), experts_of(run, found)
    assert layers[["windows", "chosen", "method"]].values.tolist() == [[3, 133, "measured"]] * 2
    assert experts[["windows", "chosen", "method"]].values.tolist() == [[3, n, "measured"] for n in (111, 22, 33, 100)]


def test_a_heat_is_stored_without_the_number_of_its_windows() -> None:
    assert set(json.loads(heat_of((1, 2)).model_dump_json())) == {
        *("layers", "chosen", "decoded", "profiled", "capacities", "graphs", "hot", "foretold")
    }


def test_layers_tell_how_unevenly_a_router_chose_and_did_before() -> None:
    """12 of a mean of 6, nothing of a third; and 9 of a mean of 5."""
    run = run_of(
        {
            "c1": [(heat_of((12, 6, 0), (6, 6, 6), profiled=((9, 3, 3), (5, 5, 5))), {})],
            "c2": [(heat_of((12, 6, 0)), {})],
        },
        [cell("c1"), cell("c2", workload="boolq")],
    )
    table = layers_of(run, heat_of_cells(run))
    assert table[["cell", "layer", "chosen", "imbalance", "never_chosen"]].values.tolist() == [
        ["c1", 0, 18, 2.0, 1],
        ["c1", 1, 18, 1.0, 0],
        ["c2", 0, 18, 2.0, 1],
    ]
    assert table["profiled_imbalance"].tolist()[:2] == [1.8, 1.0]
    assert table["profiled_imbalance"].isna().tolist() == [False, False, True]
    assert list(layers_of(run, {}).columns) == list(table.columns)


def test_what_was_foretold_is_added_up_over_windows_and_stands_beside_its_layer() -> None:
    """Two windows of 10 and 30 tokens, two experts each: 12 and 30 of 20 and 60 recalled. States of the first only."""

    def told(n: int, hits: int, ranks: tuple[int, ...], alike: float | None) -> LayerForetold:
        compared = {} if alike is None else {"cosine_tokens": n, "cosine_sum": alike}
        return LayerForetold(tokens=n, recalled=hits, aligned=ranks, profiled_cosine_q=0.5, **compared)  # type: ignore[arg-type]

    one, two = (
        heat_of((1, 2), (3, 0)).model_copy(update={"foretold": (None, told(n, hits, ranks, alike))})
        for n, hits, ranks, alike in ((10, 12, (8, 2), 7.5), (30, 30, (18, 6), None))
    )
    run = run_of({"c1": [(one, {}), (two, {})], "c2": [(heat_of((1, 2)), {})]}, [cell("c1"), cell("c2")])
    table = layers_of(run, heat_of_cells(run))
    assert table["predicted_tokens"].tolist() == [pd.NA, 40, pd.NA]
    assert table["recall"].tolist()[1] == 42 / 80
    assert table["rank_alignment"].tolist()[1] == "0.6500 0.2000"
    assert table["profiled_cosine_q"].tolist()[1] == 0.5
    assert (table["cosine"].tolist()[1], table["cosine_tokens"].tolist()[1]) == (0.75, 10)
    assert table[["recall", "rank_alignment", "profiled_cosine_s"]].isna().values.tolist() == [
        [True] * 3, [False, False, True], [True] * 3
    ]  # fmt: skip


@pytest.mark.parametrize(("recalled", "aligned"), [(21, (1, 1)), (3, (11, 0)), (3, (-1, 0))])
def test_more_right_predictions_than_predictions_are_refused(recalled: int, aligned: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="more was predicted right than was predicted"):
        LayerForetold(tokens=10, recalled=recalled, aligned=aligned)


def test_a_real_run_keeps_the_heat_of_every_arm(tmp_path: Path) -> None:
    """The oracle chooses what dropless chooses, a modelled device what the host does; tiers keep what they learnt."""
    tiers = {"name": "tiers", "technique": {"name": "npumoe-t", "multiples": [8.0]}}
    oracle = {"name": "oracle", "technique": {"name": "oracle"}}
    arms = [arm | HERE for arm in (DROPLESS, oracle, tiers)] + [NPUMOE]
    plan = build_plan(raw_plan(engine=arms, device=[HOST, M2_ULTRA], workload=[BOOLQ]))
    bench = RunParts(plan.protocol)
    with open_run(plan, tmp_path / "run", False, bench) as store:
        Runner(plan, store, bench, Heard()).run()
        run = store.data()
        heats = {c.engine: heat_of_cells(run)[c.cell_id] for c in run.cells}
        routed = {t.cell_id: t.counters.routed_pairs for t in run.trials if t.counters is not None}
        assert [sum(map(sum, heat_of_cells(run)[c.cell_id].chosen)) for c in run.cells] == [
            routed[c.cell_id] for c in run.cells
        ]
    bench.close()
    assert heats["dropless"].profiled is None
    assert heats["oracle"].chosen == heats["dropless"].chosen
    profiled = heats["tiers"].profiled
    assert profiled is not None
    assert profiled == heats["npumoe"].profiled
    assert len({sum(row) for row in profiled}) == 1
    assert profiled != heats["tiers"].chosen
