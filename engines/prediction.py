"""Guesses the next layer's experts from what the current layer knows before its own experts have run (003 §3, §6).

In a pre-norm block r_l, the residual after attention, is what the experts of layer l add to, and s_l = LN_l(r_l) is
what its router reads. The quasi-hidden state is a guess at the next router's input:

    d_l = sum of g_e d_{l,e} over the experts that layer l executes         q_l = LN_{l+1}(r_l + d_l)

d_{l,e} is the default vector: what expert e gave on average (`engines.profile`). Shared experts run for every token
and their weights always lie at hand, so they are computed first and their true output is added to r_l: a guess costs
nothing there. Layer l + 1 is the next layer with experts; a dense layer between them is not guessed.

Legend: T tokens, H hidden, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from engines.dispatch import Prediction, Routing
from engines.errors import EngineError
from engines.estimator import Estimator
from engines.model.architecture import ModelConfig, RouterConfig
from engines.model.norms import NormWeights
from engines.model.router import RouterWeights, choose, route
from engines.model.weights import ModelWeights, SparseWeights
from engines.techniques.context import HiddenState

Source = Literal["q", "s"]
"""What the next router is shown: the quasi-hidden state, or this layer's own router input."""


class KnownState(NamedTuple):
    """What layer l knows when its experts are about to run. routing: the experts that it executes, with their weights;
    state: r_l and s_l, and what the shared experts made of s_l."""

    layer: int
    routing: Routing
    state: HiddenState


class ExpertPredictor(Protocol):
    """Guesses from the state of one layer; keeps nothing between calls."""

    def predict(self, known: KnownState) -> Prediction | None:
        """Of the next sparse layer; None after the last one."""
        ...

    def rule(self, layer: int) -> GuessRule | None:
        """How `predict` guesses there; None after the last sparse layer, and where it must be asked."""
        ...


@dataclass(frozen=True)
class NextRouter:
    """The router of the next sparse layer, with the norm before it. weights_input: see `ExpertWeights`."""

    layer: int
    norm: NormWeights
    router: RouterWeights
    config: RouterConfig
    weights_input: bool


@dataclass(frozen=True, eq=False)
class GuessRule:
    """How a layer guesses, said beforehand, so that a decode step need not ask between router and experts.

    router: of the layer that is guessed for. vectors_EH: the default vectors of the layer that knows, for the
    quasi-hidden state; None: what its own router reads is shown. estimator: in the router's place."""

    router: NextRouter
    vectors_EH: Tensor | None = None
    estimator: Estimator | None = None


@dataclass(frozen=True, eq=False)
class GuessRules:
    """of_layer: by the layer that knows. are_executed: each layer executes what was guessed for it, and not what its
    router chooses."""

    of_layer: Mapping[int, GuessRule]
    are_executed: bool


def why_not(config: ModelConfig) -> str | None:
    """Why the experts of a model cannot be predicted; None where they can."""
    if config.moe is None:
        return "a dense model has no experts to predict"
    if len(config.moe.sparse_layers) < 2:
        return "prediction needs two layers of experts, and the model has one"
    if config.names.after_mlp_norm is not None:
        return "the model's layers have a norm after their experts, and prediction needs pre-norm blocks"
    return None


def next_routers(config: ModelConfig, weights: ModelWeights) -> dict[int, NextRouter]:
    """By the sparse layer that comes before. Raises `EngineError` for a model whose experts cannot be predicted."""
    if (reason := why_not(config)) is not None:
        raise EngineError(reason)
    moe = config.moe
    assert moe is not None  # `why_not` tells dense models
    found: dict[int, NextRouter] = {}
    for layer, following in pairwise(sorted(moe.sparse_layers)):
        mlp, ahead = weights.layers[following].mlp, weights.layers[following]
        assert isinstance(mlp, SparseWeights)  # the config says so
        found[layer] = NextRouter(following, ahead.mlp_norm, mlp.router, moe.router, moe.weights_input)
    return found


def quasi_hidden(known: KnownState, vectors_EH: Tensor, router: NextRouter) -> Tensor:
    """q_TH. vectors_EH: the default vectors of the layer that knows."""
    ids_TK, weights_TK = known.routing.expert_ids_TK, known.routing.weights_TK
    chosen_TKH = vectors_EH[ids_TK]
    # Where the weight goes into an expert, its default vector has it already.
    default_TH = chosen_TKH.sum(1) if router.weights_input else (weights_TK[..., None] * chosen_TKH).sum(1)
    guess_TH = known.state.residual_TH + default_TH.to(known.state.residual_TH.dtype)
    if known.state.shared_TH is not None:
        guess_TH = guess_TH + known.state.shared_TH
    return router.norm(guess_TH)


class RouterPredictor:
    """The next layer's own router, shown a guess at its input."""

    def __init__(
        self, routers: Mapping[int, NextRouter], source: Source, vectors_EH: Mapping[int, Tensor] | None = None
    ) -> None:
        """vectors_EH: default vectors by layer, on the device of the states; source "s" needs none."""
        self._routers, self._source, self._vectors_EH = routers, source, vectors_EH
        if source == "q" and vectors_EH is None:
            raise EngineError("the quasi-hidden state needs default vectors; `joulebench calibrate` finds them")

    def predict(self, known: KnownState) -> Prediction | None:
        router = self._routers.get(known.layer)
        if router is None:
            return None
        shown_TH = known.state.router_input_TH
        if self._source == "q" and self._vectors_EH is not None:
            shown_TH = quasi_hidden(known, self._vectors_EH[known.layer], router)
        return Prediction(router.layer, route(shown_TH, router.router, router.config), shown_TH)

    def rule(self, layer: int) -> GuessRule | None:
        router = self._routers.get(layer)
        if router is None:
            return None
        if self._source == "q" and self._vectors_EH is not None:
            return GuessRule(router, self._vectors_EH[layer])
        return GuessRule(router)


class EstimatorPredictor:
    """A trained network in the router's place, shown the quasi-hidden state."""

    def __init__(
        self, routers: Mapping[int, NextRouter], vectors_EH: Mapping[int, Tensor], estimator: Estimator
    ) -> None:
        """estimator: it guesses with its matrices at 16 bits, whoever computes."""
        self._routers, self._vectors_EH, self._estimator = routers, vectors_EH, estimator.at_16_bits

    def predict(self, known: KnownState) -> Prediction | None:
        router = self._routers.get(known.layer)
        if router is None:
            return None
        state_TH = quasi_hidden(known, self._vectors_EH[known.layer], router)
        logits_TE = self._estimator.logits(state_TH, known.layer)
        return Prediction(router.layer, choose(logits_TE, router.router.correction_E, router.config), state_TH)

    def rule(self, layer: int) -> GuessRule | None:
        router = self._routers.get(layer)
        return None if router is None else GuessRule(router, self._vectors_EH[layer], self._estimator)


class HybridPredictor:
    """For each layer one of two."""

    def __init__(self, router: ExpertPredictor, estimator: ExpertPredictor, estimated_layers: frozenset[int]) -> None:
        """estimated_layers: those whose next one the estimator guesses."""
        self._router, self._estimator, self._estimated_layers = router, estimator, estimated_layers

    def predict(self, known: KnownState) -> Prediction | None:
        return self._of(known.layer).predict(known)

    def rule(self, layer: int) -> GuessRule | None:
        return self._of(layer).rule(layer)

    def _of(self, layer: int) -> ExpertPredictor:
        return self._estimator if layer in self._estimated_layers else self._router
