"""Which experts' weights a decode step loads: selective loading against all experts."""

from __future__ import annotations

from typing import NamedTuple

from engines.techniques.layout.loads import SelectiveParameters
from harness.reproduce.neuron.plans import drawn_alike, in_turn, planned, weight_loads_of

N_DRAWS = 20
BATCHES = (1, 2, 4, 8, 16, 32, 64)


class Chooses(NamedTuple):
    """A model as the guide has it: E experts, K of them a token."""

    n_experts: int
    top_k: int


MODELS = {
    "DeepSeek": Chooses(256, 8),
    "GPT-OSS": Chooses(128, 8),
    "Llama 4": Chooses(16, 1),
}
"""The guide gives GPT-OSS the top 8 of 128; the published model has the top 4."""


def most_loads(model: Chooses, batch: int) -> int:
    """Of tokens that share no expert, as long as there are others."""
    return loads(model, batch, "most")


def mean_loads(model: Chooses, batch: int) -> float:
    """Of choices that are drawn, all experts alike. The switch to all experts is off."""
    return sum(loads(model, batch, seed) for seed in range(N_DRAWS)) / N_DRAWS


def loads(model: Chooses, batch: int, drawing: int | str) -> int:
    if isinstance(drawing, int):
        routing = drawn_alike(batch, model.n_experts, model.top_k, drawing)
    else:
        routing = in_turn(batch, model.n_experts, model.top_k)
    return weight_loads_of(planned("selective", routing, "decode", switch_alpha=NEVER))


NEVER = 1e6
"""An alpha at which selective loading never switches."""


def takes_all(model: Chooses, batch: int, alpha: float) -> bool:
    """Whether a plan of the preset computes every expert with every token at that alpha."""
    routing = in_turn(batch, model.n_experts, model.top_k)
    plan = planned("selective", routing, "decode", switch_alpha=alpha)
    return plan.counters().computed_rows == batch * model.n_experts


def switch_alpha() -> float:
    """The preset's own."""
    return SelectiveParameters().switch_alpha


def loads_at_the_switch() -> int:
    """Of DeepSeek at batch 32, drawn choices: 256 pairs, so all are loaded though fewer are needed."""
    model = MODELS["DeepSeek"]
    routing = drawn_alike(32, model.n_experts, model.top_k)
    return weight_loads_of(planned("selective", routing, "decode"))
