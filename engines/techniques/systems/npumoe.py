"""The systems of NPUMoE (source 000): its ablations, and the baselines of its Table 2."""

from __future__ import annotations

from engines.techniques.choices import Choices
from engines.techniques.layout.capacity import CapacityParameters
from engines.techniques.layout.exact import ExactParameters
from engines.techniques.layout.tiers import TiersParameters
from engines.techniques.place.residency import ByCostParameters
from engines.techniques.place.units import OneUnitParameters
from engines.techniques.systems.preset import ON_CPU, ON_GPU, ON_NPU, Preset

_SOURCE = "000 NPUMoE"
_WHERE = ("unit", "naive_launch", "backbone")
"""What parts the systems of Table 2."""
SYSTEMS = (
    Preset("coreml-cpu", "all on the CPU", f"{_SOURCE}, Table 2", Choices(ON_CPU, ExactParameters()), _WHERE),
    Preset(
        "coreml-naive",
        "a graph an expert on the NPU, as large as the busiest needs, in decoding too; Core ML decides",
        f"{_SOURCE}, Table 2",
        Choices(
            OneUnitParameters(unit="npu", naive_launch=True),
            CapacityParameters(rows="max", overflow="none", renormalise_survivors=False),
        ),
        _WHERE,
    ),
    Preset(
        "anemll",
        "attention on the NPU, experts on the CPU",
        f"{_SOURCE}, Table 2",
        Choices(ON_CPU, ExactParameters(), "npu"),
        _WHERE,
    ),
    Preset("gpu", "all on the GPU", f"{_SOURCE}, Table 8", Choices(ON_GPU, ExactParameters(), "gpu"), _WHERE),
    Preset(
        "npumoe-base",
        "one fixed shape for every expert on the NPU, overflow pruned by saliency",
        f"{_SOURCE}, §5.7",
        Choices(
            ON_NPU,
            CapacityParameters(factor=2.0, of="chunk", align=16, overflow="saliency", renormalise_survivors=False),
            "npu",
        ),
    ),
    Preset(
        "npumoe-t",
        "calibrated static capacity tiers, overflow pruned by saliency",
        f"{_SOURCE}, §4.1",
        Choices(ON_NPU, TiersParameters(), "npu"),
        fixed=("grouped", "group_size", "graph_bytes"),
    ),
    Preset(
        "npumoe-tg",
        "tiers, and experts of one tier share a graph",
        f"{_SOURCE}, §4.2",
        Choices(ON_NPU, TiersParameters(grouped=True), "npu"),
        fixed=("grouped",),
    ),
    Preset(
        "npumoe",
        "tiers in graphs, hot ones on the NPU, cold ones on the CPU",
        f"{_SOURCE}, §4.3",
        Choices(ByCostParameters(), TiersParameters(grouped=True), "npu"),
    ),
)
