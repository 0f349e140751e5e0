"""How good predictions are, layer by layer: recall@k, rank alignment, cosine similarity (003 §3.3, §4.1).

States are kept while prompts are read, for default vectors are known only when all have been; predictions are made
afterwards, of the same states.

Legend: T tokens of a step, N tokens kept, P layers whose next one is predicted, H hidden, W width of the estimator, E
experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engines.dispatch import Routing
from engines.errors import EngineError
from engines.estimator import Estimator, EstimatorRecipe, train_estimator
from engines.foretold import foretold
from engines.model.router import router_logits
from engines.model.transformer import Transformer
from engines.observers import SparseLayerStep
from engines.prediction import (
    EstimatorPredictor,
    ExpertPredictor,
    HybridPredictor,
    KnownState,
    NextRouter,
    RouterPredictor,
    next_routers,
    quasi_hidden,
)
from engines.profile import DataName, EstimatorOrigin, LayerAccuracy, PredictorName, Profile
from engines.techniques.context import HiddenState

HELD_BACK = 8
"""Of so many tokens of calibration one is kept from the estimator: a hybrid chooses by what it recalls of those."""
RUN = 64
"""Tokens that stand together on one side: neighbours hang together."""
MOST_BYTES = 1 << 32
"""Of the states that are kept at once: 5,461 tokens of Qwen3-30B-A3B."""


class StateKeeper:
    """A layer observer that keeps every n-th token's state of all sparse layers, on the host."""

    def __init__(self, every: int = 1) -> None:
        self.every = every
        self._n_seen: dict[int, int] = {}
        self._kept: dict[int, list[KnownState]] = {}

    def layer(self, seen: SparseLayerStep) -> None:
        before = self._n_seen.get(seen.layer, 0)
        self._n_seen[seen.layer] = before + len(seen.residual_TH)
        own = slice(-before % self.every, None, self.every)

        def kept(tensor: Tensor) -> Tensor:
            return tensor[own].cpu().clone()

        routing = Routing(kept(seen.routing.expert_ids_TK), kept(seen.routing.weights_TK), seen.routing.n_experts)
        shared_TH = None if seen.shared_output_TH is None else kept(seen.shared_output_TH)
        state = HiddenState(kept(seen.residual_TH), kept(seen.router_input_TH), shared_TH)
        self._kept.setdefault(seen.layer, []).append(KnownState(seen.layer, routing, state))

    def states(self) -> dict[int, KnownState]:
        """By layer, the tokens of all steps one after another; empty where none were seen."""
        return {layer: _joined(states) for layer, states in sorted(self._kept.items())}


def keep_every(n_tokens: int, n_layers: int, hidden: int, has_shared: bool) -> int:
    """Which n-th tokens are kept, so that their states stay within `MOST_BYTES`."""
    return max(1, -(-n_tokens * n_layers * hidden * 4 * (3 if has_shared else 2) // MOST_BYTES))


class LearningRows(NamedTuple):
    """What an estimator learns from. layers: of each P the layer that knows."""

    layers: tuple[int, ...]
    state_PNH: Tensor
    logits_PNE: Tensor


@torch.no_grad()
def learning_rows(
    states: Mapping[int, KnownState], routers: Mapping[int, NextRouter], vectors_EH: Mapping[int, Tensor]
) -> LearningRows:
    """The quasi-hidden states, and the logits of the routers that they stand for. On the CPU."""
    layers = tuple(routers)
    return LearningRows(
        layers,
        torch.stack([quasi_hidden(states[layer], vectors_EH[layer], routers[layer]) for layer in layers]),
        torch.stack(
            [router_logits(states[router.layer].state.router_input_TH, router.router) for router in routers.values()]
        ),
    )


@torch.inference_mode()
def accuracies(
    predictors: Mapping[PredictorName, ExpertPredictor],
    states: Mapping[int, KnownState],
    routers: Mapping[int, NextRouter],
    vectors_EH: Mapping[int, Tensor],
    data: DataName,
) -> Iterator[LayerAccuracy]:
    """Of each predictor and layer. A prediction sees the true routing of the layer before."""
    for name, predictor in predictors.items():
        for layer, router in routers.items():
            known, ahead = states[layer], states[router.layer]
            prediction = predictor.predict(known)
            assert prediction is not None  # a layer with a router after it
            predicted = prediction.routing
            shown_NH = None
            if name == "router q":
                shown_NH = quasi_hidden(known, vectors_EH[layer], router)
            elif name == "router s":
                shown_NH = known.state.router_input_TH
            yield LayerAccuracy(
                predictor=name,
                data=data,
                layer=router.layer,
                n_tokens=len(ahead.state.residual_TH),
                recall=recall(ahead.routing, predicted),
                rank_alignment=rank_alignment(ahead.routing, predicted),
                cosine=None if shown_NH is None else cosine(shown_NH, ahead.state.router_input_TH),
            )


def recall(true: Routing, predicted: Routing) -> float:
    """recall@k: the mean over tokens."""
    return foretold(true, predicted).recalled / true.expert_ids_TK.numel()


def rank_alignment(true: Routing, predicted: Routing) -> tuple[float, ...]:
    """Of each rank; of equal weights the lower expert index ranks first."""
    found = foretold(true, predicted)
    return tuple(n / found.tokens for n in found.aligned_K)


def cosine(one_NH: Tensor, other_NH: Tensor) -> float:
    return float(F.cosine_similarity(one_NH.double(), other_NH.double(), dim=-1).mean())


def parted(states: Mapping[int, KnownState]) -> tuple[dict[int, KnownState], dict[int, KnownState]]:
    """What an estimator learns from, and the tokens that are held back from it: a run of every prompt that is long
    enough. Raises `EngineError`."""
    n_tokens = len(next(iter(states.values())).state.residual_TH)
    if n_tokens < HELD_BACK:
        raise EngineError(f"an estimator needs {HELD_BACK} tokens to learn from and to be judged by, got {n_tokens}")
    run = min(RUN, n_tokens // HELD_BACK)
    is_back_N = torch.arange(n_tokens) // run % HELD_BACK == HELD_BACK - 1
    learnt, back = (
        {layer: _of_tokens(own, kept_N) for layer, own in states.items()} for kept_N in (~is_back_N, is_back_N)
    )
    return learnt, back


def _of_tokens(known: KnownState, kept_N: Tensor) -> KnownState:
    routing, (residual_TH, router_input_TH, shared_TH) = known.routing, known.state
    chosen = Routing(routing.expert_ids_TK[kept_N], routing.weights_TK[kept_N], routing.n_experts)
    shared_TH = None if shared_TH is None else shared_TH[kept_N]
    return KnownState(known.layer, chosen, HiddenState(residual_TH[kept_N], router_input_TH[kept_N], shared_TH))


def estimated_layers(rows: Sequence[LayerAccuracy], routers: Mapping[int, NextRouter]) -> frozenset[int]:
    """Layers after which a hybrid asks the estimator: of the tokens that were held back from it, its recall is above
    the router's."""
    found = {(row.predictor, row.layer): row.recall for row in rows if row.data == "held back"}
    return frozenset(
        layer for layer, router in routers.items() if found["estimator", router.layer] > found["router q", router.layer]
    )


def _joined(states: Sequence[KnownState]) -> KnownState:
    first = states[0]
    routing = Routing(
        torch.cat([one.routing.expert_ids_TK for one in states]),
        torch.cat([one.routing.weights_TK for one in states]),
        first.routing.n_experts,
    )
    shared = [one.state.shared_TH for one in states if one.state.shared_TH is not None]
    state = HiddenState(
        torch.cat([one.state.residual_TH for one in states]),
        torch.cat([one.state.router_input_TH for one in states]),
        torch.cat(shared) if shared else None,
    )
    return KnownState(first.layer, routing, state)


class Foreseen(NamedTuple):
    """origin, estimator: None without a recipe. estimated_layers: see `ProfiledPredictions`."""

    accuracies: tuple[LayerAccuracy, ...]
    estimator: Estimator | None
    origin: EstimatorOrigin | None
    estimated_layers: tuple[int, ...]


def foreseen(
    profile: Profile,
    model: Transformer,
    states: Mapping[DataName, Mapping[int, KnownState]],
    recipe: EstimatorRecipe | None = None,
    on_step: Callable[[], object] = lambda: None,
) -> Foreseen:
    """How well each predictor does on the states of calibration and held-out tokens.

    Where a recipe is given, an estimator is trained on the former but for those that are held back, of which there are
    rows of their own. profile: with default vectors. model: on the CPU. on_step: told after each training step.
    Raises `EngineError`.
    """
    routers, vectors_EH, moe = next_routers(model.config, model.weights), profile.default_vectors_EH, model.config.moe
    if vectors_EH is None or moe is None:
        raise EngineError("predictions need default vectors, and the profile was counted without them")
    predictors: dict[PredictorName, ExpertPredictor] = {
        "router q": RouterPredictor(routers, "q", vectors_EH),
        "router s": RouterPredictor(routers, "s"),
    }
    estimator, origin, chosen = None, None, frozenset[int]()
    if recipe is not None:
        learnt, back = parted(states["calibration"])
        states = {**states, "calibration": learnt, "held back": back}
        rows = learning_rows(learnt, routers, vectors_EH)
        estimator = train_estimator(*rows, moe.router, recipe, on_step)
        origin = EstimatorOrigin(
            recipe=recipe,
            width=len(estimator.norm_W),
            n_parameters=estimator.n_parameters,
            n_tokens=rows.state_PNH.shape[1],
        )
        predictors["estimator"] = EstimatorPredictor(routers, vectors_EH, estimator)

    def measured(of: Mapping[PredictorName, ExpertPredictor]) -> list[LayerAccuracy]:
        return [row for data, own in states.items() if own for row in accuracies(of, own, routers, vectors_EH, data)]

    found = measured(predictors)
    if estimator is not None:
        chosen = estimated_layers(found, routers)
        found += measured({"hybrid": HybridPredictor(predictors["router q"], predictors["estimator"], chosen)})
    return Foreseen(tuple(found), estimator, origin, tuple(sorted(chosen)))
