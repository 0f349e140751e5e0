"""The plans that a technique makes of routing which nobody computes: step by step, layer by layer, as an engine asks.

The same code in the same order as in a run: what lies where, what was chosen so far and what was predicted are kept and
shown by `engines.shown`. Attention is not computed, so no token is more salient than another: of those that overflow,
later ones go.

Legend: L layers with experts, T tokens, E experts, K experts per token, X numbers drawn for a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from engines.calls import Integers
from engines.decode_layout import DecodeLayout
from engines.dispatch import DispatchPlan, Prediction, Routing
from engines.pricing.alike import Interchange, SharedPlans, shared_plans
from engines.pricing.priced_step import PricedStep
from engines.pricing.routing_sources import RoutingSource
from engines.profile import Profile
from engines.shown import Shown
from engines.techniques.base import Technique
from engines.techniques.composed import ComposedTechnique
from engines.techniques.context import NOTHING, ChunkPhase, ModelSizes


class PlayedStep(NamedTuple):
    """One forward chunk. plans: of all layers of the model, None of a dense one."""

    step: PricedStep
    phase: ChunkPhase
    plans: tuple[DispatchPlan | None, ...]


class Foresight:
    """Predictions with a stated recall, in the place of a predictor.

    Each expert that the next layer's router chooses is among the predicted with a probability of `recall`; in the place
    of one that is not stands another that the router does not choose, all of those alike.
    """

    def __init__(self, recall: float, sizes: ModelSizes, seed: int = 0) -> None:
        self._recall, self._sizes, self._seed = recall, sizes, seed
        self.restart()
        self._true_LTK: Sequence[Integers] | Integers = ()
        self._told_LTK: Integers | None = None
        self._recalled_L: list[int] | None = None
        self._first = sizes.n_layers - sizes.n_sparse_layers

    def restart(self) -> None:
        """As before the first step: what is predicted is drawn anew, the same."""
        self._random = np.random.default_rng((self._seed, 0x70726564))

    def start_step(self, ids_LTK: Integers) -> None:
        """What the routers of this step choose."""
        self._true_LTK, self._told_LTK, self._recalled_L = ids_LTK, None, None

    def __call__(self, layer: int) -> Prediction | None:
        """After a layer, of the next one with experts; None after the last. Asked for all layers of a step or none."""
        ahead = layer + 1 - self._first
        if ahead >= len(self._true_LTK):
            return None
        return Prediction(layer + 1, routing_of(self._told_once()[ahead - 1], self._sizes.n_experts))

    def recalled(self, layer: int) -> int | None:
        """How many of the pairs that this layer's router chooses are predicted; None of the first, of which nothing
        is."""
        if layer <= self._first:
            return None
        if self._recalled_L is None:
            told_LTK = self._told_once()
            is_told_LTK = (np.asarray(self._true_LTK)[1:, :, :, None] == told_LTK[:, :, None, :]).any(-1)
            self._recalled_L = is_told_LTK.sum((1, 2)).tolist()
        return self._recalled_L[layer - self._first - 1]

    def _told_once(self) -> Integers:
        if self._told_LTK is None:
            self._told_LTK = self._told(np.asarray(self._true_LTK)[1:])
        return self._told_LTK

    def _told(self, true_LTK: Integers) -> Integers:
        """Of all layers of a step at once."""
        (n_layers, n_tokens, top_k), n_experts = true_LTK.shape, self._sizes.n_experts
        drawn_LX = self._random.random((n_layers, n_tokens * (n_experts + top_k)))
        keys_LTE = drawn_LX[:, : n_tokens * n_experts].reshape(n_layers, n_tokens, n_experts)
        is_told_LTK = drawn_LX[:, n_tokens * n_experts :].reshape(true_LTK.shape) < self._recall
        np.put_along_axis(keys_LTE, true_LTK, 2.0, axis=-1)
        others_LTK = np.argsort(keys_LTE, axis=-1)[..., :top_k]
        # With few experts there may be fewer others than wanted: those places stay true.
        is_told_LTK |= np.take_along_axis(keys_LTE, others_LTK, axis=-1) == 2.0
        told_LTK: Integers = np.where(is_told_LTK, true_LTK, others_LTK)
        return told_LTK


def routing_of(ids_TK: Integers, n_experts: int) -> Routing:
    """With equal weights: what a plan costs does not hang on them."""
    return Routing(torch.from_numpy(ids_TK), _equal_weights(*ids_TK.shape), n_experts)


@lru_cache(maxsize=64)
def _equal_weights(n_tokens: int, top_k: int) -> torch.Tensor:
    """[T, K]. Nobody writes to them."""
    return torch.full((n_tokens, top_k), 1 / top_k)


def profile_of_source(source: RoutingSource, sizes: ModelSizes, n_tokens: int, n_prompts: int) -> Profile:
    """How often each expert is chosen by tokens that no run is told. Raises `EngineError`."""
    ids_LTK = source.ids_LTK(sizes, n_tokens, "calibration")
    first = sizes.n_layers - sizes.n_sparse_layers
    counts = {
        first + layer: tuple(np.bincount(ids_TK.reshape(-1), minlength=sizes.n_experts).tolist())
        for layer, ids_TK in enumerate(ids_LTK)
    }
    return Profile(counts, sizes.top_k, n_prompts)


def played_steps(
    technique: Technique,
    shown: Shown,
    sequences: Sequence[Integers],
    sizes: ModelSizes,
    chunk: int,
    n_prompt: int,
    foresight: Foresight | None = None,
    own_predictions: bool = True,
    all_arrived: Callable[[], bool] | None = None,
    any_order: bool = False,
    interchange: Interchange = lambda units: False,
) -> Iterator[PlayedStep]:
    """One request for each sequence, together: prompts one after another in chunks, then a token of each in each step.

    shown: keeps what the technique asks for, from request to request. sequences: ids_LTK of each, the first n_prompt
    tokens of which are its prompt; all of the same length. own_predictions: whether each plan has what was predicted
    for its own token; else it may have that of another, of which as much came true.
    all_arrived: whether nothing is on its way that single experts wait for: then tokens whose plans cost alike have the
    same one; None: each has its own. any_order, interchange: then, as of `ComposedTechnique.alike_tokens`.
    """
    shown.start_request()
    token_plans = TokenPlans(technique, None if own_predictions else foresight)
    n_left = n_prompt * len(sequences)
    for ids_LTK in sequences:
        for first in range(0, n_prompt, chunk):
            end = min(first + chunk, n_prompt)
            n_left -= end - first
            plans = _planned(technique, shown, ids_LTK[:, first:end], "prefill", n_left, sizes, foresight, token_plans)
            yield PlayedStep(PricedStep(end - first, end), "prefill", plans)
    alike = None
    if all_arrived is not None and len(sequences) == 1:
        n_dense = sizes.n_layers - sizes.n_sparse_layers
        alike = shared_plans(technique, shown.residency, sequences[0][:, n_prompt:], n_dense, any_order, interchange)
    for token in range(n_prompt, sequences[0].shape[1]):
        ids_LTK = np.concatenate([one[:, token : token + 1] for one in sequences], axis=1)
        # The first step may fetch what the others find.
        shares = alike is not None and token > n_prompt and all_arrived is not None and all_arrived()
        others = alike if shares else None
        if others is not None:
            others.start_token(token - n_prompt)
        plans = _planned(technique, shown, ids_LTK, "decode", 0, sizes, foresight, token_plans, others)
        yield PlayedStep(PricedStep(len(sequences), token + 1, "decode", len(sequences)), "decode", plans)


def dense_steps(n_layers: int, batch: int, chunk: int, n_prompt: int, n_decode: int) -> Iterator[PlayedStep]:
    """The same steps of a model without experts."""
    plans = (None,) * n_layers
    for _ in range(batch):
        for first in range(0, n_prompt, chunk):
            end = min(first + chunk, n_prompt)
            yield PlayedStep(PricedStep(end - first, end), "prefill", plans)
    for token in range(n_prompt, n_prompt + n_decode):
        yield PlayedStep(PricedStep(batch, token + 1, "decode", batch), "decode", plans)


class TokenPlans:
    """Plans of one decoded token that are the same for every token, by what the technique says of them before."""

    def __init__(self, technique: Technique, foresight: Foresight | None = None) -> None:
        """foresight: of this step, where plans that differ in nothing but what was predicted count as the same."""
        self._technique, self._foresight = technique, foresight
        self._says_all = technique.asks == NOTHING
        self._of: dict[DecodeLayout, DispatchPlan] = {}
        self._of_layer: dict[tuple[int, int | None], DispatchPlan] = {}
        """Of those that weights travel for, by how many experts of the layer were predicted."""
        self._layouts: dict[int, DecodeLayout | None] = {}

    def known(self, layer: int) -> DispatchPlan | None:
        """None where there is none yet, or where experts matter."""
        said = self._said(layer)
        return None if said is None else self._of_layer.get((layer, self._recalled(layer))) or self._of.get(said)

    def keep(self, layer: int, plan: DispatchPlan) -> None:
        """Weights that travel one by one hang on which experts they are; in a buffer, on their number."""
        said = self._said(layer)
        if said is None:
            return
        if plan.transfers.as_one or self._foresight is not None:
            self._of_layer[layer, self._recalled(layer)] = plan
        elif not len(plan.transfers):
            self._of[said] = plan

    def _recalled(self, layer: int) -> int | None:
        return None if self._foresight is None else self._foresight.recalled(layer)

    def _said(self, layer: int) -> DecodeLayout | None:
        if layer not in self._layouts:
            said = self._said_before(layer)
            is_alike = said is not None and said.group_of_E is None and len(set(said.rows_E or ())) <= 1
            self._layouts[layer] = said if is_alike else None
        return self._layouts[layer]

    def _said_before(self, layer: int) -> DecodeLayout | None:
        technique = self._technique
        if self._foresight is not None:
            return technique.told_layout(layer) if isinstance(technique, ComposedTechnique) else None
        return technique.decode_layout(layer) if self._says_all else None


def _planned(
    technique: Technique,
    shown: Shown,
    ids_LTK: Integers,
    phase: ChunkPhase,
    n_left: int,
    sizes: ModelSizes,
    foresight: Foresight | None,
    token_plans: TokenPlans,
    others: SharedPlans | None = None,
) -> tuple[DispatchPlan | None, ...]:
    """others: plans of tokens that cost alike."""
    shown.start_step(n_left)
    if foresight is not None:
        foresight.start_step(ids_LTK)
    n_tokens = ids_LTK.shape[1]
    is_token = phase == "decode" and n_tokens == 1
    saliency_T = torch.ones(n_tokens) if technique.needs_saliency else None
    n_dense = sizes.n_layers - sizes.n_sparse_layers
    plans: list[DispatchPlan | None] = [None] * n_dense
    ids_LTK, is_reused = np.ascontiguousarray(ids_LTK), False
    for layer, ids_TK in enumerate(ids_LTK, n_dense):
        plan = token_plans.known(layer) if is_token else None
        if plan is None and others is not None and (plan := others.known(layer)) is not None:
            shown.passed(layer, ids_TK)
        if plan is not None:
            is_reused = True
        else:
            if is_reused and foresight is not None and (told := foresight(layer - 1)) is not None:
                shown.foretell(told)  # the plan before speaks of another token
            routing = routing_of(ids_TK, sizes.n_experts)
            seen = shown.layer(layer, phase, routing, saliency_T, None)
            plan = technique.plan(seen)
            shown.ran(seen, plan)
            if is_token:
                token_plans.keep(layer, plan)
            if others is not None:
                others.keep(layer, plan)
            is_reused = False
        plans.append(plan)
    return tuple(plans)
