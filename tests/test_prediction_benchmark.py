"""The curve of answers against recall: its guesses have the recall that they are drawn for, and its arms run."""

from __future__ import annotations

import pytest
import torch

from engines.base import unheard
from engines.dispatch import Prediction, Routing
from engines.model.checkpoints import load_checkpoint
from engines.model.transformer import Transformer
from engines.prediction import KnownState, RouterPredictor, next_routers
from engines.reference import ReferenceEngine
from engines.techniques.context import LayerInput
from engines.techniques.presets import DroplessParameters
from results.records import Request
from tests.benchmarks.prediction_accuracy import ALL, COLUMNS, DECODED, KL, Arm, Mixed, Point, Speculating, table

N, E, K = 4000, 16, 2


class Nobody:
    def predict(self, known: KnownState) -> Prediction | None:
        return None

    def rule(self, layer: int) -> None: ...


def routing(n_tokens: int, seed: int) -> Routing:
    generator = torch.Generator().manual_seed(seed)
    ids_TK = torch.rand(n_tokens, E, generator=generator).argsort(-1)[:, :K]
    return Routing(ids_TK, torch.rand(n_tokens, K, generator=generator), E)


@pytest.mark.parametrize("share_true", [0.0, 0.4, 0.9, 1.0])
def test_drawn_guesses_recall_what_is_true_and_what_chance_finds(share_true: float) -> None:
    """p + (1 - p) K / E, within four standard deviations of so many tokens; the weights are the router's own."""
    route = Mixed(Arm("a", "drawn, in part true", Nobody(), share_true, draws=True), speculates_prefill=True)
    own = routing(N, 1)
    executed = route.executed(LayerInput(1, "prefill", own, predicted=routing(N, 2)))
    assert torch.equal(executed.weights_TK, own.weights_TK)
    assert all(len({*ids}) == K for ids in executed.expert_ids_TK.tolist())
    expected = share_true + (1 - share_true) * K / E
    spread = 4 * (0.25 / N) ** 0.5
    found = route.take_recall() / 100
    assert found == pytest.approx(expected, abs=spread if share_true < 1 else 0)
    pairs = zip(own.expert_ids_TK.tolist(), executed.expert_ids_TK.tolist(), strict=True)
    by_hand = sum(len({*a} & {*b}) for a, b in pairs)
    assert found == pytest.approx(by_hand / (N * K))


def test_others_take_the_prediction_with_its_weights_and_the_first_layer_routes_truly() -> None:
    route = Mixed(Arm("a", "q, in part true", Nobody(), 0.0), speculates_prefill=True)
    own, told = routing(5, 1), routing(5, 2)
    executed = route.executed(LayerInput(1, "prefill", own, predicted=told))
    assert torch.equal(executed.expert_ids_TK, told.expert_ids_TK)
    assert torch.equal(executed.weights_TK, told.weights_TK)
    assert route.executed(LayerInput(0, "prefill", own)) is own


def test_an_arm_runs_in_an_engine_and_decodes_on_its_guesses() -> None:
    """All true: the answer is the model's, and three layers of every token were guessed."""
    checkpoint = load_checkpoint("bundled:tiny-qwen3-moe", torch.float32)
    ids = tuple(range(20, 40))
    ask = Request(request_id="a", sample_id="a", kind="generate", prompt_ids=ids, max_new_tokens=4)
    model = Transformer(checkpoint)
    says_s = RouterPredictor(next_routers(model.config, model.weights), "s")
    own = ReferenceEngine(checkpoint, DroplessParameters(), 16).run(ask, unheard)
    true = Mixed(Arm("a", "drawn, in part true", says_s, 1.0, draws=True), speculates_prefill=True)
    engine = ReferenceEngine(checkpoint, Speculating(true), 16)
    assert engine.run(ask, unheard).token_ids == own.token_ids
    assert true.take_recall() == 100
    counters = engine.take_counters()
    assert counters.predicted == (20 + 3) * 3 * 2


def test_the_table_has_a_cell_for_each_measure() -> None:
    points = [Point("arm", "predicted", where, what, 80.0, 50.0, 2.0) for where, what in COLUMNS]
    lines = table(points).splitlines()
    assert [cell.strip() for cell in lines[2].split("|")[1:-1]] == [
        "arm", "80", *("50 ± 2" if what == KL else "50.0 ± 2.0" for _, what in COLUMNS)
    ]  # fmt: skip
    assert {where for where, _ in COLUMNS} == {ALL, DECODED}
