"""Which experts each token gets: those that its router chose, or those that the layer before predicted (003).

A prediction is made of what the layer before knows when its own experts are about to run, so that weights can travel
while those run. The first layer with experts has none before it and takes its router's choice.

Legend: H hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from engines.dispatch import Prediction, Routing
from engines.errors import EngineError
from engines.prediction import (
    EstimatorPredictor,
    ExpertPredictor,
    GuessRules,
    HybridPredictor,
    KnownState,
    RouterPredictor,
    Source,
    next_routers,
)
from engines.profile import Learnt
from engines.techniques.context import NOTHING, Asks, BuildContext, LayerInput
from results.records import Record


class RouterParameters(Record):
    """Has no parameters."""

    kind: Literal["router"] = "router"

    @property
    def learns(self) -> frozenset[Learnt]:
        return frozenset()

    @property
    def lossless(self) -> bool:
        return True

    def build(self, context: BuildContext) -> RoutersChoice:
        return RoutersChoice()


class RoutersChoice:
    asks = NOTHING

    def executed(self, seen: LayerInput) -> Routing:
        return seen.routing

    def predict(self, seen: LayerInput) -> Prediction | None:
        return None


class PredictedParameters(Record):
    """predictor: who guesses. source: what the next router is shown, the quasi-hidden state or this layer's input.

    executes: the prediction with its weights, or the router's choice, to which the prediction is a hint.
    speculate_prefill: predict while prompts are read too, and scored texts; else all experts are fetched there, and the
    router's choice is executed.
    """

    kind: Literal["predicted"] = "predicted"
    predictor: Literal["router", "estimator", "hybrid"] = "router"
    source: Source = "q"
    executes: Literal["prediction", "router"] = "prediction"
    speculate_prefill: bool = False

    @property
    def learns(self) -> frozenset[Learnt]:
        """Of a profile."""
        if self.predictor == "router" and self.source == "s":
            return frozenset()
        return frozenset({"default vectors"} if self.predictor == "router" else {"default vectors", "estimator"})

    @property
    def lossless(self) -> bool:
        return self.executes == "router"

    def problem(self) -> str | None:
        """Why a parameter would have no effect, or None."""
        if self.predictor != "router" and self.source != "q":
            return f'source = "{self.source}" is what a router is shown; predictor {self.predictor} reads q; remove it'
        return None

    def build(self, context: BuildContext) -> PredictedRoute:
        if context.foretells is not None:
            return ToldRoute(context.foretells, self.executes == "prediction", self.speculate_prefill)
        return PredictedRoute(self._predictor(context), self.executes == "prediction", self.speculate_prefill)

    def _predictor(self, context: BuildContext) -> ExpertPredictor:
        if context.model is None:
            raise EngineError("a prediction asks the model's own norms and routers; build the technique with its model")
        routers = next_routers(context.model.config, context.model.weights)
        if not self.learns:
            return RouterPredictor(routers, self.source)
        profile = context.profile
        if profile is None or profile.default_vectors_EH is None:
            raise EngineError("predictions need default vectors; `joulebench calibrate` finds them")
        device = next(iter(routers.values())).router.weight_EH.device
        vectors_EH = {layer: vectors.to(device) for layer, vectors in profile.default_vectors_EH.items()}
        router = RouterPredictor(routers, self.source, vectors_EH)
        if self.predictor == "router":
            return router
        if profile.estimator is None or profile.predictions is None:
            raise EngineError(
                f"predictor {self.predictor} needs an estimator; `joulebench calibrate --estimator` trains one"
            )
        estimator = EstimatorPredictor(routers, vectors_EH, profile.estimator.to(device))
        if self.predictor == "estimator":
            return estimator
        return HybridPredictor(router, estimator, frozenset(profile.predictions.estimated_layers))


class PredictedRoute:
    asks = Asks(hidden_state=True)

    def __init__(self, predictor: ExpertPredictor | None, executes_prediction: bool, speculates_prefill: bool) -> None:
        """predictor: None of a route that is told its predictions."""
        self._predictor = predictor
        self._executes_prediction = executes_prediction
        self._speculates_prefill = speculates_prefill

    @property
    def hangs_on_phase(self) -> bool:
        """Whether the same token gets other experts in a prefill than in decoding."""
        return self._executes_prediction and not self._speculates_prefill

    def executed(self, seen: LayerInput) -> Routing:
        return seen.predicted if self._executes_prediction and seen.predicted is not None else seen.routing

    def predict(self, seen: LayerInput) -> Prediction | None:
        if seen.phase == "prefill" and not self._speculates_prefill:
            return None
        return self._guess(seen)

    def rules(self, layers: Sequence[int]) -> GuessRules | None:
        """How decoded tokens' guesses are made in these layers and in no other; None where this must be asked."""
        if self._predictor is None:
            return None
        found = {layer: rule for layer in layers if (rule := self._predictor.rule(layer)) is not None}
        return GuessRules(found, self._executes_prediction) if len(found) == len(layers) - 1 else None

    def _guess(self, seen: LayerInput) -> Prediction | None:
        assert self._predictor is not None
        if seen.hidden_state is None:
            assert seen.guess is not None or self._predictor.rule(seen.layer) is None  # it was made in the step
            return seen.guess
        return self._predictor.predict(KnownState(seen.layer, seen.routing, seen.hidden_state))


class ToldRoute(PredictedRoute):
    """Whoever knows the routing tells the predictions too: there is no state to guess from."""

    asks = NOTHING

    def __init__(
        self, foretells: Callable[[int], Prediction | None], executes_prediction: bool, speculates_prefill: bool
    ) -> None:
        super().__init__(None, executes_prediction, speculates_prefill)
        self._foretells = foretells

    def _guess(self, seen: LayerInput) -> Prediction | None:
        return self._foretells(seen.layer)
