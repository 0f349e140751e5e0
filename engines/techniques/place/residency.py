"""Hot graphs on the NPU, cold ones on the CPU with exact rows, by what calibration expects of them.

Source: NPUMoE (000) §4.3, the arm "all". It gives no threshold. As built here, a graph of G experts with capacity C
lies on the NPU where its launch there is expected to cost less than its experts' calls on the CPU:

    P(G) t_npu(G experts, G C rows) < sum_e P(e) t_cpu(1 expert, n_e / P(e) rows)

The costs t are seconds, or joules with `objective = "joules"`. Seconds are the default because §5.8 has this arm as the
fastest (1.09 times TG) and TG, which leaves all on the NPU, as the one of least energy.

n_e are the expected rows of expert e among the N = B K pairs of a chunk. Nothing is launched for experts without
tokens: P(e) = 1 - (1 - n_e / N)^N is the chance that e gets any, and P(G) that one of the graph does. A graph whose
experts calibration never saw costs nothing on either, and lies on the CPU, as does one above the unit's graph limit.

Costs are a modelled machine's. Residency is decided once, before the first request, as weights are constants of graphs.
Whether the CPU computes cold experts while the NPU computes hot graphs is not said: one after the other, or with
`overlap` at the same time, so that the experts of a layer take as long as the unit that takes longer. The rule of
residency is the same: it asks what each graph costs where it lies, and balances nothing.
In decoding with `decode_graphs = "single"` each chosen expert has a graph of its own on the NPU; another layout of
decode steps finds experts where they lie.

Legend: E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Literal

import numpy as np

from devices.base import DeviceError, Unit
from engines.calls import Integers
from engines.errors import EngineError
from engines.pricing.costs import sizes_of_named
from engines.techniques.base import Layout, Piece, Share
from engines.techniques.context import NOTHING, BuildContext, Costs, LayerInput, ModelSizes
from engines.techniques.layout.tiers import Tiers, expected_load
from engines.techniques.place.priced import PricedParameters


class ByCostParameters(PricedParameters):
    kind: Literal["by_cost"] = "by_cost"
    objective: Literal["seconds", "joules"] = "seconds"
    """What a graph shall cost least of."""
    overlap: bool = False
    """Whether the CPU computes its experts of a layer while the NPU computes its own, on a modelled machine."""

    @property
    def units(self) -> tuple[Unit, ...]:
        return ("npu", "cpu")

    def graph_sizes(self, context: BuildContext) -> ModelSizes | None:
        """The context's, with experts as large as those that are priced: a modelled machine prices its own."""
        if self.as_shape is None or context.costs is not None or context.sizes is None:
            return context.sizes
        return context.sizes._replace(expert_bytes=sizes_of_named(self.as_shape).expert_bytes)

    def problem_with(self, costs: Costs, travels: bool) -> str | None:
        try:
            for unit in self.units:
                self._cost(costs)(unit, 1, 1)
        except DeviceError as error:
            return str(error)
        return None

    def _cost(self, costs: Costs) -> Callable[[Unit, int, float], float]:
        """What a graph shall cost least of: of a unit, experts and rows."""
        return costs.call_s if self.objective == "seconds" else costs.call_j

    def build(self, context: BuildContext, layout: Layout) -> ByCost:
        if not isinstance(layout, Tiers):
            raise EngineError("a place by cost needs a layout of tiers, whose graphs it places")
        if context.sizes is None or context.profile is None:
            raise EngineError("a place by cost needs a profile of a model with experts")
        profile, cost = context.profile, self._cost(self.costs(context))
        hot: dict[int, list[bool]] = {}
        for layer in profile.tokens_per_expert:
            load = expected_load(profile.relative_load(layer), context.chunk, profile.top_k)
            capacity, n_pairs = layout.capacities(layer), context.chunk * profile.top_k
            hot[layer] = [False] * len(load)
            for experts in layout.graphs(layer).experts:
                if not any(load[e] for e in experts):
                    continue
                chance_of_any = chance_of_a_call(sum(load[e] for e in experts), n_pairs)
                on_npu = chance_of_any * cost("npu", len(experts), sum(capacity[e] for e in experts))
                chances = [(e, chance_of_a_call(load[e], n_pairs)) for e in experts if load[e]]
                on_cpu = sum(chance * cost("cpu", 1, float(load[e]) / chance) for e, chance in chances)
                for expert in experts:
                    hot[layer][expert] = on_npu < on_cpu
        hot_E = {layer: np.array(is_hot) for layer, is_hot in hot.items()}
        return ByCost(hot_E, self.overlap)


def chance_of_a_call(expected_rows: float | Fraction, n_pairs: int) -> float:
    """That at least one of so many pairs goes where so many are expected, each by itself."""
    share = min(float(expected_rows) / n_pairs, 1.0)
    return 1.0 if share == 1.0 else -math.expm1(n_pairs * math.log1p(-share))


class ByCost:
    asks = NOTHING

    def __init__(self, hot_E: Mapping[int, np.ndarray], overlap: bool) -> None:
        """hot_E: of each layer, whether the expert lies on the NPU."""
        npu, cpu = ((Piece(unit, overlaps=overlap),) for unit in ("npu", "cpu"))
        self._hot_E = hot_E
        self._shares = {
            layer: (Share(npu, is_hot_E), Share(cpu, ~is_hot_E, exact=True)) for layer, is_hot_E in hot_E.items()
        }

    def hot_experts(self, layer: int) -> tuple[int, ...]:
        """Those on the NPU."""
        return tuple(self._hot_E[layer].nonzero()[0].tolist())

    def shares(self, seen: LayerInput, load_E: Integers) -> Sequence[Share]:
        return self._shares[seen.layer]

    def decode_shares(self, layer: int) -> Sequence[Share]:
        return self._shares[layer]
