"""Guesses at the next layer's experts that are made inside of a decode step: what `engines.prediction` says of them, as
the kernels take it, and what they guessed.

Legend: P (in the room: G) layers that are guessed for, E experts, K experts per token, H hidden, W width of the
estimator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

from engines.dispatch import Prediction, Routing
from engines.estimator import NORM_EPS, Estimator
from engines.kernels.decoder import StepRoom
from engines.kernels.guesses import EstimatorMatrices, GuessTable, LayerEstimator, LayerGuess
from engines.kernels.tables import serves
from engines.model.router import kernel_router

if TYPE_CHECKING:
    from engines.prediction import GuessRule, GuessRules


class GuessedStep:
    """What the layers of one step guessed."""

    def __init__(self, table: GuessTable, room: StepRoom, n_experts: int) -> None:
        self._table, self._room, self._n_experts = table, room, n_experts

    def for_layer(self, layer: int) -> Routing | None:
        """What was guessed for it."""
        row = self._table.row_of.get(layer)
        return None if row is None else self._row(row)

    def executed(self, layer: int) -> Routing | None:
        """What it executed in the place of its router's choice."""
        return self.for_layer(layer) if self._table.are_executed else None

    def made_in(self, layer: int) -> Prediction | None:
        """What it guessed, for a later layer."""
        row = self._table.made_in.get(layer)
        return None if row is None else Prediction(self._table.layers[row], self._row(row))

    def _row(self, row: int) -> Routing:
        ids_PK, weights_PK = self._room.guessed_GK
        return Routing(ids_PK[row : row + 1], weights_PK[row : row + 1], self._n_experts)


def kernel_guesses(rules: GuessRules, sparse_layers: Sequence[int], n_layers: int) -> GuessTable | None:
    """None where the kernels do not know one of the norms, routers or vectors."""
    found: list[LayerGuess | None] = [None] * n_layers
    matrices_of = cache(_matrices)
    for layer in sparse_layers[:-1]:
        rule = rules.of_layer.get(layer)
        guess = None if rule is None else _kernel_guess(layer, rule, matrices_of)
        if guess is None or not guess.is_read:
            return None
        found[layer] = guess
    return GuessTable(found, rules.are_executed)


def _kernel_guess(
    layer: int, rule: GuessRule, matrices_of: Callable[[Estimator], EstimatorMatrices | None]
) -> LayerGuess | None:
    ahead = rule.router
    router = kernel_router(ahead.router, ahead.config)
    if router is None or ahead.norm.bias is not None or ahead.weights_input:
        return None
    shows_own = rule.vectors_EH is None
    estimator = None
    if (own := rule.estimator) is not None:
        matrices = matrices_of(own)
        if matrices is None:
            return None
        position_W = own.position_PW[own.layers.index(layer)]
        estimator = LayerEstimator(matrices, position_W, own.norm_W, own.norm_bias_W, NORM_EPS)
    norm_H = None if shows_own else ahead.norm.weight
    return LayerGuess(ahead.layer, router, norm_H, rule.vectors_EH, estimator, ahead.norm.eps)


def _matrices(estimator: Estimator) -> EstimatorMatrices | None:
    return EstimatorMatrices(estimator.matrices) if serves(*estimator.matrices) else None
