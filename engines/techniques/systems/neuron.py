"""The systems of the Neuron guide (source 004): static shapes, and experts over processes."""

from __future__ import annotations

from engines.techniques.choices import Choices
from engines.techniques.layout.blocks import BlocksParameters
from engines.techniques.layout.capacity import CapacityParameters
from engines.techniques.layout.exact import ExactParameters
from engines.techniques.layout.loads import AllExpertsParameters, SelectiveParameters
from engines.techniques.place.ranks import (
    EplbParameters,
    ExpertParallelParameters,
    TensorParallelParameters,
    TpEpParameters,
)
from engines.techniques.systems.preset import ON_CPU, Preset

_SOURCE = "004 Neuron MoE guide"
SYSTEMS = (
    Preset(
        "blockwise",
        "blocks of equal rows, one expert each; nothing dropped",
        f"{_SOURCE}, blockwise",
        Choices(ON_CPU, BlocksParameters(), decode=SelectiveParameters()),
    ),
    Preset(
        "dropping",
        "a capacity factor; later tokens overflow, surviving weights add up to 1 where the router's do",
        f"{_SOURCE}, dropping",
        Choices(ON_CPU, CapacityParameters()),
    ),
    Preset(
        "selective",
        "loads the unique experts of a step, or all where most are needed",
        f"{_SOURCE}, selective loading",
        Choices(ON_CPU, SelectiveParameters()),
    ),
    Preset(
        "all-experts",
        "every expert computes every token",
        f"{_SOURCE}, all-experts",
        Choices(ON_CPU, AllExpertsParameters()),
    ),
    Preset(
        "tensor-parallel",
        "every expert in slices over processes, results added",
        f"{_SOURCE}, tensor parallelism",
        Choices(TensorParallelParameters(), ExactParameters()),
    ),
    Preset(
        "expert-parallel",
        "experts dealt to processes; rows travel to them and back",
        f"{_SOURCE}, expert parallelism",
        Choices(ExpertParallelParameters(), ExactParameters()),
    ),
    Preset(
        "tp-ep",
        "experts dealt to groups of processes, in slices inside a group",
        f"{_SOURCE}, combined TP and EP",
        Choices(TpEpParameters(), ExactParameters()),
    ),
    Preset(
        "eplb",
        "experts dealt to processes by their load, busy ones in several",
        f"{_SOURCE}, EPLB; DeepSeek's packing",
        Choices(EplbParameters(), ExactParameters()),
    ),
)
