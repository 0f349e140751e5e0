"""One MoE block by operation: measured on this host, and modelled on an M2 Ultra, in the form of 000's Table 4.

python -m tests.benchmarks.moe_block

Four chunks of 256 tokens through one layer, as Table 4 has it: 16 experts, top 2, skewed routing. Measured: hidden 512
and width 800, an eighth of Phi-3.5-MoE's in each direction, in fp32 on one thread, operations one by one in torch (the
kernels of a real run gather, compute and scatter in one call). Modelled: Phi-3.5-MoE's own size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from devices.models.sheet import load_sheet
from devices.models.timeline import Timeline
from engines.dispatch import DispatchPlan, Routing
from engines.model.architecture import RouterConfig
from engines.model.experts import ExpertWeights, GatedWeights, gated_ffn
from engines.model.router import RouterWeights, route
from engines.pricing.priced_step import PricedStep
from engines.pricing.published_shapes import PHI_3_5_MOE as PHI
from engines.pricing.schedule import operations
from engines.pricing.shapes import sizes_of
from engines.profile import Profile
from engines.techniques.base import Technique
from engines.techniques.context import BuildContext, LayerInput
from engines.techniques.presets import preset_parameters
from tests.benchmarks.measurement import Measurement, measured, write_page
from tests.benchmarks.timing import Turns, timed

HIDDEN, WIDTH, CHUNK, N_CHUNKS, N_TURNS = PHI.hidden // 8, PHI.expert_width // 8, 256, 4, 9
ARMS = ("coreml-cpu", "coreml-naive", "anemll", "npumoe-base", "npumoe-t", "npumoe-tg", "npumoe")
OPERATIONS = ("router", "gather", "padding", "expert FFN", "scatter", "residual")


def skewed_router() -> RouterWeights:
    """Random, with a bias that makes expert e's share about 1 / sqrt(e + 1) of the first's."""
    generator = torch.Generator().manual_seed(1)
    weight_EH = torch.randn(PHI.n_experts, HIDDEN, generator=generator) / HIDDEN**0.5
    return RouterWeights(weight_EH, -0.5 * torch.arange(1, PHI.n_experts + 1).log())


def random_experts() -> ExpertWeights:
    generator = torch.Generator().manual_seed(2)

    def matrix(rows: int, columns: int) -> Tensor:
        values: Tensor = torch.randn(rows, columns, generator=generator)
        return values.mul(columns**-0.5)

    every = (
        GatedWeights(matrix(WIDTH, HIDDEN), matrix(WIDTH, HIDDEN), matrix(HIDDEN, WIDTH)) for _ in range(PHI.n_experts)
    )
    return ExpertWeights(tuple(every))


class Block:
    """The operations of one block, each its own piece of work."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.experts, self.router = random_experts(), skewed_router()
        self.config = RouterConfig(scoring="softmax", top_k=PHI.top_k, normalise=True)
        self.chunks = torch.randn(N_CHUNKS, CHUNK, HIDDEN, generator=generator)
        self.routings = [self.routed(hidden_TH) for hidden_TH in self.chunks]
        counts = sum(routing.tokens_per_expert_E() for routing in self.routings)
        assert isinstance(counts, Tensor)
        self.profile = Profile({0: tuple(counts.tolist())}, PHI.top_k, 1)

    def routed(self, hidden_TH: Tensor) -> Routing:
        return route(hidden_TH, self.router, self.config)

    def technique(self, name: str) -> Technique:
        return preset_parameters(name).model_validate({}).build(BuildContext(CHUNK, sizes_of(PHI), self.profile))

    def plans(self, technique: Technique) -> list[DispatchPlan]:
        return [
            technique.plan(LayerInput(0, "prefill", routing, hidden_TH.norm(dim=-1)))
            for routing, hidden_TH in zip(self.routings, self.chunks, strict=True)
        ]


def measured_seconds(block: Block, plans: list[DispatchPlan]) -> dict[str, float]:
    """Of all chunks, by operation: medians of the turns, quiet ones where there are enough."""
    turns = {operation: Turns() for operation in OPERATIONS}
    for _ in range(N_TURNS):
        for operation, work in _works(block, plans).items():
            found = timed(work)
            turns[operation].add(found.seconds, found.is_quiet)
    return {operation: own.figure(N_TURNS // 3).median for operation, own in turns.items()}


def _works(block: Block, plans: list[DispatchPlan]) -> dict[str, Callable[[], object]]:
    valid = [plan.token_R >= 0 for plan in plans]
    rows = [hidden_TH[plan.token_R.clamp_min(0)] for plan, hidden_TH in zip(plans, block.chunks, strict=True)]
    outputs = [torch.zeros(CHUNK, HIDDEN) for _ in plans]

    def ffn() -> None:
        for plan, rows_RH in zip(plans, rows, strict=True):
            calls = plan.calls
            for expert, first, n in zip(
                calls.expert_S.tolist(), calls.first_row_S.tolist(), calls.rows_S.tolist(), strict=True
            ):
                gated_ffn(rows_RH[first : first + n], block.experts.experts[expert])

    return {
        "router": lambda: [block.routed(hidden_TH) for hidden_TH in block.chunks],
        "gather": lambda: [
            hidden_TH[plan.token_R[is_valid]]
            for plan, hidden_TH, is_valid in zip(plans, block.chunks, valid, strict=True)
        ],
        "padding": lambda: [
            F.pad(rows_RH[: int(is_valid.sum())], (0, 0, 0, int((~is_valid).sum())))
            for rows_RH, is_valid in zip(rows, valid, strict=True)
            if not is_valid.all()
        ],
        "expert FFN": ffn,
        "scatter": lambda: [
            out_TH.zero_().index_add_(0, plan.token_R[is_valid], rows_RH[is_valid] * plan.weight_R[is_valid, None])
            for plan, out_TH, rows_RH, is_valid in zip(plans, outputs, rows, valid, strict=True)
        ],
        "residual": lambda: [hidden_TH + out_TH for hidden_TH, out_TH in zip(block.chunks, outputs, strict=True)],
    }


def modelled_seconds(plans: list[DispatchPlan], backbone: str) -> Mapping[str, float]:
    """Of one layer of the sheet's machine, over all chunks."""
    sheet = load_sheet("m2-ultra")
    limit = sheet.graph_bytes_limit
    timeline = Timeline(sheet)
    for number, plan in enumerate(plans, 1):
        step = PricedStep(CHUNK, number * CHUNK)
        timeline.run(operations(step, [plan], PHI, backbone, limit.value if limit is not None else None))
    found: dict[str, float] = {}
    for (operation, _), seconds in timeline.seconds_by_operation().items():
        found[operation] = found.get(operation, 0.0) + seconds / PHI.n_layers
    return found


def rows_of(block: Block, name: str) -> list[Measurement]:
    plans = block.plans(block.technique(name))
    here = measured_seconds(block, plans)
    there = modelled_seconds(plans, preset_parameters(name).model_validate({}).backbone)
    found = []
    for where, seconds in (("measured here", here), ("modelled there", there)):
        conditions = f"{name}, {where}"
        own = {operation: 1e3 * seconds.get(operation, 0.0) for operation in OPERATIONS}
        found += [measured(operation, ms, "ms", conditions) for operation, ms in own.items()]
        found.append(measured("all six", sum(own.values()), "ms", conditions))
    return found


def table(found: list[Measurement], where: str) -> str:
    """Operations down, arms across, in ms, as Table 4."""
    cells = {(m.metric, m.conditions.split(",")[0]): m.ours for m in found if m.conditions.endswith(where)}
    lines = [f"| {where}, ms | {' | '.join(ARMS)} |", "|---" * (1 + len(ARMS)) + "|"]
    for operation in (*OPERATIONS, "all six"):
        lines.append(f"| {operation} | {' | '.join(f'{cells[operation, arm]:.3g}' for arm in ARMS)} |")
    return "\n".join(lines)


REMARKS = """Four chunks of 256 tokens through one layer: 16 experts, top 2, skewed routing. The busiest expert has
{imbalance:.2f} times the mean load; tiers drop {dropped:.1f} % of a chunk's pairs. Measured: a block of an eighth of
Phi-3.5-MoE's size in each direction, fp32, one thread, operations one by one in torch. Modelled: Phi-3.5-MoE's block on
the sheet `m2-ultra`. On this host every technique computes on the CPU: it shows how work shifts, not what an NPU gains.

{here}

{there}

Every figure:"""


def main() -> None:
    torch.set_num_threads(1)
    block = Block()
    with torch.inference_mode():
        found = [row for name in ARMS for row in rows_of(block, name)]
    imbalance = block.profile.imbalance(0)
    dropped = median(100 * plan.dropped_pairs / plan.routed_pairs for plan in block.plans(block.technique("npumoe-tg")))
    remarks = REMARKS.format(
        imbalance=imbalance,
        dropped=dropped,
        here=table(found, "measured here"),
        there=table(found, "modelled there"),
    )
    write_page("moe-block", "One MoE block", found, remarks)


if __name__ == "__main__":
    main()
