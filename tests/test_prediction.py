"""Predictions of the next layer's experts: the quasi-hidden state, the estimator, and what is said of both."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engines.dispatch import Prediction, Routing
from engines.errors import EngineError
from engines.model.architecture import RouterConfig
from engines.model.checkpoints import load_checkpoint
from engines.model.norms import NormWeights
from engines.model.router import RouterWeights, route
from engines.model.transformer import Transformer
from engines.observers import SparseLayerStep
from engines.prediction import (
    HybridPredictor,
    KnownState,
    NextRouter,
    RouterPredictor,
    next_routers,
    quasi_hidden,
)
from engines.prediction_accuracy import (
    MOST_BYTES,
    StateKeeper,
    accuracies,
    estimated_layers,
    keep_every,
    rank_alignment,
    recall,
)
from engines.profile import LayerAccuracy, Profile
from engines.profiling import profile_of
from engines.techniques.context import HiddenState
from tests.fakes.families import CASES, write_family

BUNDLED = "bundled:tiny-qwen3-moe"
SPARSE = [
    "mixtral", "olmoe", "qwen2-moe", "qwen2-moe-some-dense", "phi-moe", "deepseek-v2-groups", "deepseek-v3",
    "glm4-moe", "gpt-oss", "llama4-top2",
]  # fmt: skip


def kept(
    model: Transformer, *prompts: list[int], chunk: int = 8, every: int = 1
) -> tuple[Profile, dict[int, KnownState]]:
    keeper = StateKeeper(every)
    profile = profile_of(model, model.new_cache(), prompts, chunk, True, also=keeper)
    return profile, keeper.states()


def prompt(n: int, seed: int = 5) -> list[int]:
    return torch.randint(0, 2048, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def routing(ids: list[list[int]], weights: list[list[float]], n_experts: int = 8) -> Routing:
    return Routing(torch.tensor(ids), torch.tensor(weights), n_experts)


# --- the quasi-hidden state ------------------------------------------------------------------------------------------


def silence_attention(folder: Path) -> None:
    """Attention that adds nothing, so that a layer's input is what the layer before gave."""
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name in tensors:
            if ".self_attn.o_proj." in name:
                tensors[name] = torch.zeros_like(tensors[name])
        save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("case", SPARSE)
def test_where_default_vectors_are_the_truth_a_prediction_is_too(case: str, tmp_path: Path) -> None:
    """The average over one token is that token's own; with silent attention, q_l is the next router's input itself.

    So it is of shared experts too, and of experts whose weight goes into them.
    """
    write_family(tmp_path, CASES[case])
    silence_attention(tmp_path)
    model = Transformer(load_checkpoint(str(tmp_path), torch.float32))
    profile, states = kept(model, [77])
    vectors_EH, routers = profile.default_vectors_EH, next_routers(model.config, model.weights)
    assert vectors_EH is not None
    assert routers
    for layer, router in routers.items():
        true = states[router.layer]
        torch.testing.assert_close(
            quasi_hidden(states[layer], vectors_EH[layer], router), true.state.router_input_TH, atol=2e-5, rtol=1e-4
        )
        found = RouterPredictor(routers, "q", vectors_EH).predict(states[layer])
        assert found is not None
        assert found.layer == router.layer
        assert torch.equal(found.routing.expert_ids_TK, true.routing.expert_ids_TK)
        torch.testing.assert_close(found.routing.weights_TK, true.routing.weights_TK, atol=1e-4, rtol=1e-3)


def test_a_state_and_its_prediction_are_what_plain_loops_give() -> None:
    """The bundled model: averages, sums, RMS norm, softmax and choice in numpy, token by token."""
    model = Transformer(load_checkpoint(BUNDLED, torch.float32))
    profile, states = kept(model, prompt(40), prompt(9, seed=6), chunk=16)
    vectors_EH, routers = profile.default_vectors_EH, next_routers(model.config, model.weights)
    assert vectors_EH is not None
    assert {layer: router.layer for layer, router in routers.items()} == {0: 1, 1: 2, 2: 3}
    rows = list(
        accuracies({"router q": RouterPredictor(routers, "q", vectors_EH)}, states, routers, vectors_EH, "calibration")
    )
    for layer, row in zip(routers, rows, strict=True):
        norm_H = model.weights.layers[layer + 1].mlp_norm.weight.double().numpy()
        gate_EH = routers[layer].router.weight_EH.double().numpy()
        state, ahead = states[layer], states[layer + 1]
        hits, same, cosines = 0, [0, 0], []
        for token in range(49):
            guess_H = state.state.residual_TH[token].double().numpy().copy()
            for expert, weight in zip(
                state.routing.expert_ids_TK[token].tolist(), state.routing.weights_TK[token].tolist(), strict=True
            ):
                guess_H += weight * vectors_EH[layer][expert].double().numpy()
            q_H = guess_H / math.sqrt(np.mean(guess_H**2) + 1e-6) * norm_H
            scores_E = np.exp(gate_EH @ q_H)
            told = sorted(range(16), key=lambda e, s=scores_E: -s[e])[:2]
            ids, weights = ahead.routing.expert_ids_TK[token].tolist(), ahead.routing.weights_TK[token].tolist()
            true = [e for _, e in sorted(zip(weights, ids, strict=True), reverse=True)]
            hits += len({*told} & {*true})
            same = [n + (a == b) for n, a, b in zip(same, told, true, strict=True)]
            s_H = ahead.state.router_input_TH[token].double().numpy()
            cosines.append(q_H @ s_H / np.linalg.norm(q_H) / np.linalg.norm(s_H))
        assert (row.layer, row.n_tokens) == (layer + 1, 49)
        assert row.recall == pytest.approx(hits / 98)
        assert row.rank_alignment == pytest.approx([n / 49 for n in same])
        assert row.cosine == pytest.approx(np.mean(cosines), rel=1e-5)


def test_the_plain_source_is_this_layers_router_input() -> None:
    model = Transformer(load_checkpoint(BUNDLED, torch.float32))
    profile, states = kept(model, prompt(30))
    routers, vectors_EH = next_routers(model.config, model.weights), profile.default_vectors_EH
    assert vectors_EH is not None
    rows = list(accuracies({"router s": RouterPredictor(routers, "s")}, states, routers, vectors_EH, "held out"))
    for row in rows:
        one, other = states[row.layer - 1].state.router_input_TH, states[row.layer].state.router_input_TH
        logits = one.double() @ routers[row.layer - 1].router.weight_EH.double().T
        true = states[row.layer].routing.expert_ids_TK
        n_hits = sum(len({*a} & {*b}) for a, b in zip(logits.topk(2).indices.tolist(), true.tolist(), strict=True))
        assert row.recall == pytest.approx(n_hits / 60)
        by_hand = [float(a @ b / a.norm() / b.norm()) for a, b in zip(one.double(), other.double(), strict=True)]
        assert row.cosine == pytest.approx(sum(by_hand) / 30)
        assert row.data == "held out"


def test_nothing_is_predicted_after_the_last_layer_and_of_models_that_cannot_be_told(tmp_path: Path) -> None:
    model = Transformer(load_checkpoint(BUNDLED, torch.float32))
    _, states = kept(model, prompt(4))
    routers = next_routers(model.config, model.weights)
    assert RouterPredictor(routers, "s").predict(states[3]) is None
    with pytest.raises(EngineError, match="needs default vectors"):
        RouterPredictor(routers, "q")
    for case, reason in (("gemma2", "a dense model"), ("llama4", None)):
        write_family(tmp_path / case, CASES[case])
        other = Transformer(load_checkpoint(str(tmp_path / case), torch.float32))
        if reason is not None:
            with pytest.raises(EngineError, match=reason):
                next_routers(other.config, other.weights)
        else:  # every second layer has experts
            assert {layer: router.layer for layer, router in next_routers(other.config, other.weights).items()} == {
                1: 3
            }


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_recall_and_ranks_of_hand_made_choices() -> None:
    """Two tokens of three experts: 2 of 3 told, then 1 of 3. Ranks go by weight, whatever the order of ids."""
    true = routing([[4, 1, 6], [0, 2, 3]], [[0.2, 0.7, 0.1], [0.5, 0.3, 0.2]])
    told = routing([[1, 6, 5], [3, 7, 0]], [[0.6, 0.1, 0.3], [0.5, 0.3, 0.2]])
    assert recall(true, told) == pytest.approx((2 / 3 + 2 / 3) / 2)
    # True ranks: 1 4 6 and 0 2 3; told ranks: 1 5 6 and 3 7 0.
    assert rank_alignment(true, told) == pytest.approx((0.5, 0.0, 0.5))


def test_of_equal_weights_the_lower_index_ranks_first() -> None:
    assert rank_alignment(routing([[5, 2]], [[0.5, 0.5]]), routing([[2, 5]], [[0.5, 0.5]])) == (1.0, 1.0)


def test_every_nth_token_is_kept_over_the_edges_of_chunks() -> None:
    model = Transformer(load_checkpoint(BUNDLED, torch.float32))
    _, whole = kept(model, prompt(23), prompt(7, seed=1))
    _, some = kept(model, prompt(23), prompt(7, seed=1), chunk=5, every=3)
    for layer, state in some.items():
        torch.testing.assert_close(state.state.residual_TH, whole[layer].state.residual_TH[::3], atol=1e-4, rtol=1e-4)
        assert torch.equal(state.routing.expert_ids_TK, whole[layer].routing.expert_ids_TK[::3])


@pytest.mark.parametrize("n_tokens", [1, 10_000, 5_000_000])
def test_states_that_are_kept_fit(n_tokens: int) -> None:
    """48 layers of 2048 features, two states a token in fp32."""
    every = keep_every(n_tokens, 48, 2048, has_shared=False)
    n_bytes = n_tokens / every * 48 * 2048 * 8
    assert n_bytes <= MOST_BYTES
    assert every == 1 or n_tokens / (every - 1) * 48 * 2048 * 8 > MOST_BYTES


def test_a_hybrid_asks_the_estimator_where_it_recalls_more() -> None:
    model = Transformer(load_checkpoint(BUNDLED, torch.float32))
    routers = next_routers(model.config, model.weights)
    recalls = {1: (0.6, 0.8), 2: (0.9, 0.7), 3: (0.5, 0.5)}
    rows = [
        LayerAccuracy(
            predictor=name, data=data, layer=layer, n_tokens=1, recall=value if data == "held back" else 1 - value,
            rank_alignment=(1.0,), cosine=None,
        )
        for layer, pair in recalls.items()
        for name, value in zip(("router q", "estimator"), pair, strict=True)
        for data in ("calibration", "held back", "held out")
    ]  # fmt: skip
    assert estimated_layers(rows, routers) == {0}

    class Says:
        def __init__(self, expert: int) -> None:
            self._routing = routing([[expert]], [[1.0]])

        def predict(self, known: KnownState) -> Prediction | None:
            return Prediction(known.layer + 1, self._routing)

        def rule(self, layer: int) -> None: ...

    hybrid = HybridPredictor(Says(1), Says(2), frozenset({0}))
    nothing = torch.empty(1, 0)
    told = [
        hybrid.predict(KnownState(layer, routing([[0]], [[1.0]]), HiddenState(nothing, nothing, None)))
        for layer in (0, 1)
    ]
    assert [int(one.routing.expert_ids_TK) for one in told if one is not None] == [2, 1]


def test_predictions_keep_the_scale_of_the_residual() -> None:
    """By hand: r = (3, 4), experts add 0.5 (2, 0) + 0.25 (0, 4), shared ones (0, 1): (4, 6), RMS sqrt(26)."""
    norm, weights = NormWeights(torch.ones(2), None, 0.0), RouterWeights(torch.eye(2))
    config = RouterConfig(scoring="softmax", top_k=1)
    router = NextRouter(1, norm, weights, config, weights_input=False)
    residual, shared = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 1.0]])
    known = KnownState(0, routing([[0, 1]], [[0.5, 0.25]], 2), HiddenState(residual, torch.zeros(1, 2), shared))
    vectors_EH = torch.tensor([[2.0, 0.0], [0.0, 4.0]])
    expected = torch.tensor([[4.0, 6.0]]) / math.sqrt(26)
    torch.testing.assert_close(quasi_hidden(known, vectors_EH, router), expected)
    found = RouterPredictor({0: router}, "q", {0: vectors_EH}).predict(known)
    assert found is not None
    assert found.routing.expert_ids_TK.tolist() == [[1]]
    assert torch.equal(found.routing.weights_TK, route(expected, router.router, router.config).weights_TK)
    into = quasi_hidden(known, vectors_EH, NextRouter(1, norm, weights, config, weights_input=True))
    torch.testing.assert_close(into, torch.tensor([[5.0, 9.0]]) / math.sqrt(53))


def test_observers_see_the_state_that_experts_add_to(tmp_path: Path) -> None:
    """The next layer's is, with silent attention, this one's and all that its experts gave."""
    write_family(tmp_path, CASES["qwen2-moe"])
    silence_attention(tmp_path)
    model = Transformer(load_checkpoint(str(tmp_path), torch.float32))
    seen: list[SparseLayerStep] = []

    class Looks:
        def layer(self, step: SparseLayerStep) -> None:
            seen.append(step)

    profile_of(model, model.new_cache(), [prompt(12)], 12, also=Looks())
    for one, following in pairwise(seen):
        assert one.shared_output_TH is not None
        torch.testing.assert_close(following.residual_TH, one.residual_TH + one.expert_output_TH + one.shared_output_TH)
