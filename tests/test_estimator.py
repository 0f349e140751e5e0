"""The network that guesses the next layer's logits: its equation, its lessons, and the tokens it is judged by."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from engines.dispatch import Routing
from engines.errors import EngineError
from engines.estimator import Estimator, EstimatorRecipe, divergence, estimator_shapes, train_estimator
from engines.model.architecture import RouterConfig
from engines.model.checkpoints import load_checkpoint
from engines.model.router import choose, router_logits
from engines.model.transformer import Transformer
from engines.prediction import EstimatorPredictor, KnownState, next_routers
from engines.prediction_accuracy import foreseen, parted, recall
from engines.techniques.context import HiddenState
from tests.fakes.families import CASES, write_family
from tests.test_prediction import BUNDLED, kept, prompt, routing

# --- the tokens it is judged by --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_tokens", "run"), [(8, 1), (17, 2), (400, 50), (1100, 64)])
def test_every_eighth_run_of_tokens_is_held_back(n_tokens: int, run: int) -> None:
    """Of all that is known of a token, in every layer: nothing is lost, and nothing stands on both sides."""
    number_T1 = torch.arange(n_tokens)[:, None]
    state = HiddenState(number_T1.float(), number_T1.float() + 0.5, -number_T1.float())
    states = {layer: KnownState(layer, Routing(number_T1 % 5, number_T1 / n_tokens, 5), state) for layer in (1, 4)}
    expected = [n for n in range(n_tokens) if n // run % 8 == 7]
    learnt, back = parted(states)
    for layer in (1, 4):
        assert back[layer].state.residual_TH[:, 0].tolist() == expected
        assert learnt[layer].state.residual_TH[:, 0].tolist() == [n for n in range(n_tokens) if n not in expected]
        for side in (learnt[layer], back[layer]):
            assert side.layer == layer
            n_T1 = side.state.residual_TH
            assert torch.equal(side.state.router_input_TH, n_T1 + 0.5)
            assert torch.equal(side.state.shared_TH, -n_T1)  # type: ignore[arg-type]
            assert torch.equal(side.routing.expert_ids_TK, n_T1.long() % 5)
            assert torch.equal(side.routing.weights_TK, n_T1.long() / n_tokens)
            assert side.routing.n_experts == 5


def test_too_few_tokens_to_learn_and_judge_by_say_so() -> None:
    state = HiddenState(torch.zeros(7, 2), torch.zeros(7, 2), None)
    with pytest.raises(EngineError, match="needs 8 tokens to learn from and to be judged by, got 7"):
        parted({0: KnownState(0, routing([[0]] * 7, [[1.0]] * 7), state)})


def test_an_estimator_is_not_chosen_for_what_it_knows_by_heart() -> None:
    """Few tokens: after layer 1 it recalls more of what it learnt than the router does, and less of what was held back
    from it. After the others it recalls more of both."""
    model = Transformer(load_checkpoint(BUNDLED, torch.float32))
    profile, states = kept(model, prompt(256, seed=9), chunk=256)
    recipe = EstimatorRecipe(width=128, expansion=4, n_steps=100)
    found = foreseen(profile, model, {"calibration": states}, recipe)
    by = {(row.predictor, row.layer, row.data): row.recall for row in found.accuracies}
    for layer, of_back in ((1, True), (2, False), (3, True)):
        assert by["estimator", layer, "calibration"] > by["router q", layer, "calibration"]
        assert (by["estimator", layer, "held back"] > by["router q", layer, "held back"]) == of_back
    assert found.estimated_layers == (0, 2)
    for layer, chosen in ((1, "estimator"), (2, "router q"), (3, "estimator")):
        assert by["hybrid", layer, "held back"] == by[chosen, layer, "held back"]
    assert found.origin is not None
    assert found.origin.n_tokens == 256 - 32
    n_by_data = {row.data: row.n_tokens for row in found.accuracies}
    assert n_by_data == {"calibration": 256 - 32, "held back": 32}


# --- the estimator ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_layers", "hidden", "n_experts", "width", "expansion", "millions"),
    [(24, 2880, 32, 720, 2, 4.19), (48, 2048, 128, 1024, 7, 16.96)],
    ids=["GPT-OSS-20B", "Qwen3-30B-A3B"],
)
def test_widths_that_give_the_sizes_which_the_source_reports(
    n_layers: int, hidden: int, n_experts: int, width: int, expansion: int, millions: float
) -> None:
    """The last layer has none after it. A + pos + B + C + norm + head, by hand."""
    shapes = estimator_shapes(n_layers - 1, hidden, n_experts, width, expansion)
    n = sum(math.prod(shape) for shape in shapes.values())
    assert n == width * (hidden + (n_layers - 1) + 2 * expansion * width + 2 + n_experts)
    assert round(n / 1e6, 2) == millions
    made = Estimator(
        tuple(range(n_layers - 1)), **{name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    )
    assert made.n_parameters == n


def test_an_estimators_logits_are_its_equation() -> None:
    """z = A q + pos[l]; z + C SiLU(B z); LayerNorm; head: in numpy, of one state and layer after the other."""
    generator = torch.Generator().manual_seed(3)
    shapes = estimator_shapes(2, 6, 4, 3, 2)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    estimator, state_NH = Estimator((1, 4), **drawn), torch.randn(5, 6, generator=generator)
    own = {name: tensor.double().numpy() for name, tensor in drawn.items()}
    for row, layer in enumerate((1, 4)):
        for state, logits in zip(state_NH.double().numpy(), estimator.logits(state_NH, layer), strict=True):
            z = own["reduce_WH"] @ state + own["position_PW"][row]
            inner = own["widen_VW"] @ z
            z = z + own["narrow_WV"] @ (inner / (1 + np.exp(-inner)))
            z = (z - z.mean()) / np.sqrt(z.var() + 1e-5) * own["norm_W"] + own["norm_bias_W"]
            np.testing.assert_allclose(logits.numpy(), own["head_EW"] @ z, rtol=1e-4, atol=1e-5)
    for name, rounded in estimator.at_16_bits.tensors().items():
        is_matrix = name in ("reduce_WH", "widen_VW", "narrow_WV", "head_EW")
        np.testing.assert_array_equal(rounded, own[name].astype(np.float16 if is_matrix else np.float32))
    every = estimator.logits_of_all(torch.stack([state_NH, state_NH]))
    torch.testing.assert_close(every, torch.stack([estimator.logits(state_NH, layer) for layer in (1, 4)]))


def softmax_kl(p: np.ndarray, q: np.ndarray) -> float:
    p, q = (np.exp(x) / np.exp(x).sum() for x in (p, q))
    return float(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))


def sigmoids_kl(p: np.ndarray, q: np.ndarray) -> float:
    p, q = (1 / (1 + np.exp(-x)) for x in (p, q))
    return float(sum(a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b)) for a, b in zip(p, q, strict=True)))


def with_level(p: np.ndarray, q: np.ndarray) -> float:
    return softmax_kl(p, q) + (math.log(np.exp(p).sum()) - math.log(np.exp(q).sum())) ** 2


@pytest.mark.parametrize(
    ("scoring", "by_hand"),
    [
        ("softmax", softmax_kl),
        ("softmax of chosen", softmax_kl),
        ("sigmoid", sigmoids_kl),
        ("sigmoid of chosen", sigmoids_kl),
        ("sparsemixer", with_level),
    ],
)
def test_divergence_is_of_what_the_router_makes_of_its_logits(
    scoring: str, by_hand: Callable[[np.ndarray, np.ndarray], float]
) -> None:
    generator = torch.Generator().manual_seed(1)
    own, guess = torch.randn(2, 7, 5, generator=generator, dtype=torch.float64)
    config = RouterConfig(scoring=scoring, top_k=2)  # type: ignore[arg-type]
    expected = np.mean([by_hand(a, b) for a, b in zip(own.numpy(), guess.numpy(), strict=True)])
    assert float(divergence(own, guess, config)) == pytest.approx(expected)
    assert float(divergence(own, own, config)) == pytest.approx(0, abs=1e-12)


SMALL = EstimatorRecipe(width=24, n_steps=400, n_tokens=64, peak_rate=1e-2)


def taught(scoring: str = "softmax", recipe: EstimatorRecipe = SMALL) -> tuple[Estimator, Tensor, Tensor, RouterConfig]:
    """Two layers whose routers read directions of their own; 300 tokens to learn from, 100 others."""
    generator = torch.Generator().manual_seed(2)
    state_PNH, gate_PEH = torch.randn(2, 400, 12, generator=generator), torch.randn(2, 6, 12, generator=generator)
    logits_PNE = state_PNH @ gate_PEH.mT
    config = RouterConfig(scoring=scoring, top_k=2)  # type: ignore[arg-type]
    estimator = train_estimator((0, 1), state_PNH[:, :300], logits_PNE[:, :300], config, recipe)
    return estimator, state_PNH[:, 300:], logits_PNE[:, 300:], config


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sparsemixer"])
def test_an_estimator_learns_what_routers_choose(scoring: str) -> None:
    """Of six experts two: chance recalls a third. The two layers' routers differ, so that positions are needed."""
    estimator, state_PNH, logits_PNE, config = taught(scoring)
    for row in range(2):
        true = choose(logits_PNE[row], None, config)
        assert recall(true, choose(estimator.logits(state_PNH[row], row), None, config)) > 0.85


def test_an_estimator_is_the_same_again_by_its_seed() -> None:
    (one, *_), (same, *_), (other, *_) = taught(), taught(), taught(recipe=SMALL.model_copy(update={"seed": 1}))
    assert all(torch.equal(a, b) for a, b in zip(one.tensors().values(), same.tensors().values(), strict=True))
    assert not torch.equal(one.head_EW, other.head_EW)


def test_training_that_runs_away_says_so() -> None:
    state_PNH, logits_PNE = torch.ones(1, 4, 3), torch.full((1, 4, 2), float("inf"))
    with pytest.raises(EngineError, match=r"step 0: the loss is nan; lower peak_rate"):
        train_estimator((0,), state_PNH, logits_PNE, RouterConfig(scoring="softmax", top_k=1), SMALL)
    with pytest.raises(EngineError, match="tokens to learn from"):
        train_estimator((0,), state_PNH[:, :0], logits_PNE[:, :0], RouterConfig(scoring="softmax", top_k=1), SMALL)


@pytest.mark.parametrize("case", ["phi-moe", "deepseek-v3", "deepseek-v2-groups", "gpt-oss", "llama4-top2"])
def test_a_guess_at_logits_is_chosen_from_as_the_router_does(case: str, tmp_path: Path) -> None:
    """Corrections, groups and weights of a family: an estimator that gives a router's logits gives its routing."""
    write_family(tmp_path, CASES[case])
    model = Transformer(load_checkpoint(str(tmp_path), torch.float32))
    profile, states = kept(model, prompt(20))
    routers, vectors_EH = next_routers(model.config, model.weights), profile.default_vectors_EH
    assert vectors_EH is not None

    class Knows(Estimator):
        def logits(self, state_NH: Tensor, layer: int) -> Tensor:
            return router_logits(states[routers[layer].layer].state.router_input_TH, routers[layer].router)

    nothing = torch.empty(0)
    predictor = EstimatorPredictor(routers, vectors_EH, Knows((), *[nothing] * 7))
    for layer, router in routers.items():
        found, true = predictor.predict(states[layer]), states[router.layer].routing
        assert found is not None
        assert torch.equal(found.routing.expert_ids_TK, true.expert_ids_TK)
        torch.testing.assert_close(found.routing.weights_TK, true.weights_TK)
