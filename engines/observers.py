"""What may be watched while a step is computed: for calibration, expert predictors, and whoever asks what a router saw.

Legend: T rows of the step, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from engines.dispatch import DispatchPlan, Routing


@dataclass(frozen=True)
class SparseLayerStep:
    """What one sparse layer did with the rows of one step. Nothing writes to these tensors later: they may be kept."""

    layer: int
    phase: Literal["prefill", "decode"]
    attention_norm_T: Tensor
    """L2 norm of the attention block's output, before the residual is added: the saliency of 000 §3.2."""
    router_input_TH: Tensor
    """The normed hidden state, which the experts read too."""
    routing: Routing
    """The router's choice, before a technique plans it."""
    expert_output_TH: Tensor
    """Weighted sum of the routed experts as the technique had them computed, without shared experts."""
    residual_TH: Tensor
    """What the layer's experts add to: the hidden state after attention, before the norm."""
    shared_output_TH: Tensor | None = None
    """Of the experts that every token passes through; None where there are none."""


class LayerObserver(Protocol):
    """Told of each sparse layer of each step, in order, as soon as its experts are done."""

    def layer(self, seen: SparseLayerStep) -> None: ...


StepPhase = Literal["prefill", "decode", "again"]


class StepObserver(Protocol):
    """Hears of every forward chunk of a request once it is computed, in order; not of calibration.

    n_tokens: tokens of the chunk. kv_length: tokens in the cache after it. plans: one per layer, None for dense ones.
    phase: "again" of tokens that LongRoPE turns anew in the middle of an answer.
    """

    def step(self, n_tokens: int, kv_length: int, phase: StepPhase, plans: Sequence[DispatchPlan | None]) -> None: ...
