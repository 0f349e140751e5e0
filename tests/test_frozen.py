"""What calibration froze is kept with the run and told on its page, beside what each technique does."""

from __future__ import annotations

from pathlib import Path

from harness.catalog import TECHNIQUES
from results.expert_heat import ExpertHeat
from results.report.arms import arms_of
from results.report.frozen import frozen_of
from results.report.html import html_text
from results.store import Store
from tests.command import joulebench
from tests.plans import BOOLQ, DROPLESS, raw_plan, write_plan
from tests.run_builders import cell


def test_capacities_graphs_and_places_are_told_layer_by_layer() -> None:
    cells = (cell("c1"), cell("c2"))
    heat = ExpertHeat(
        layers=(1, 3),
        chosen=((4, 3, 2, 1),) * 2,
        capacities=((64, 32, 32, 16), (32, 32, 32, 32)),
        graphs=((1, 2, 1), (4,)),
        hot=((0, 1), ()),
    )
    (told,) = frozen_of(cells, {"c1": heat, "c2": ExpertHeat(layers=(1,), chosen=((1,),))}, arms_of(cells))
    assert told.layers == (
        ("layer 1", "64 rows × 1 expert, 32 rows × 2 experts, 16 rows × 1 expert; graphs of 2 (× 1), 1 (× 2);"
            " 2 on the NPU, 2 on the CPU"),
        ("layer 3", "32 rows × 4 experts; graphs of 4 (× 1); 0 on the NPU, 4 on the CPU"),
    )  # fmt: skip
    assert (told.n_more, told.decoding) == (0, "")


def test_layers_that_are_alike_share_a_line_and_a_deep_model_fills_no_page() -> None:
    """Of 40 layers the first 20 are alike but for layer 7; each of the others has capacities of its own."""
    rows = [(32, 16) if i == 7 or i >= 20 else (32, 32) for i in range(40)]
    capacities = tuple((a, b + 16 * (i - 20) if i >= 20 else b) for i, (a, b) in enumerate(rows))
    heat = ExpertHeat(layers=tuple(range(40)), chosen=((1, 1),) * 40, capacities=capacities)
    graphs = {"decode_graphs": "single", "decode_rows": 32}
    spelled = {"layout": graphs | {"kind": "tiers"}}
    cells = (cell("c1", technique_parameters=graphs), cell("c2", technique_parameters=spelled))
    told, other = frozen_of(cells, {"c1": heat, "c2": heat}, arms_of(cells))
    assert told.layers[:2] == (
        ("layers 0 to 6, 8 to 19, 21", "32 rows × 2 experts"),
        ("layers 7, 20", "32 rows × 1 expert, 16 rows × 1 expert"),
    )
    assert len(told.layers) == 12
    assert told.n_more == 40 - 20 - 2 - 10
    assert told.decoding == other.decoding == "a graph of 32 rows for each chosen expert"


def test_a_run_keeps_what_was_frozen_and_its_page_says_it(tmp_path: Path) -> None:
    """Tiers of 16 rows at least: of 32 experts, each has one of two capacities."""
    arms = [DROPLESS, {"name": "arm", "technique": {"name": "npumoe", "multiples": [8, 1]}}]
    plan = write_plan(tmp_path / "p.toml", raw_plan(engine=arms, workload=[BOOLQ]))
    done = joulebench("run", str(plan), "--out", str(tmp_path / "run"))
    assert done.code == 0, done.stderr
    with Store.view(tmp_path / "run") as store:
        data = store.data()
        own = {c.engine: data.load_heat(t.trial_id) for c in data.cells for t in data.trials if t.cell_id == c.cell_id}
        page = html_text(data)
    plain, tiers = own["dropless"], own["arm"]
    assert plain is not None
    assert tiers is not None
    assert (plain.capacities, plain.graphs, plain.hot) == (None, None, None)
    assert tiers.capacities is not None
    assert tiers.graphs is not None
    assert tiers.hot is not None
    n_experts = len(tiers.chosen[0])
    assert {len(row) for row in tiers.capacities} == {n_experts}
    assert {sum(row) for row in tiers.graphs} == {n_experts}, "every expert lies in one graph"
    assert all(rows % 16 == 0 for row in tiers.capacities for rows in row)
    assert page.count(f"prefill: {max(tiers.capacities[0])} rows × ") >= 1
    assert "decoding: a graph of 32 rows for each chosen expert" in page
    for name in ("dropless", "npumoe"):
        assert TECHNIQUES[name].what in page
