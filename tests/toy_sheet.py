"""Hardware sheets with round numbers, and a plan, so that prices can be worked out by hand."""

from __future__ import annotations

from devices.models.sheet import Sheet, parse_sheet
from engines.calls import CallKind, Calls, ExpertCall
from engines.dispatch import DispatchPlan


def figure(value: float) -> str:
    return f'{{ value = {value!r}, kind = "assumed", origin = "test" }}'


def host(more: str = "", few: str = "", kernels: str = "") -> Sheet:
    """A CPU alone. more: tables; few: of expert_ffn's line; kernels: beside it."""
    return parse_sheet(
        f"""
name = "host"
description = "round numbers"
source = "hand"
{more}
[units.cpu.kernels]
expert_ffn = {{ s_per_flop = {figure(1.0)}{few} }}
attention = {{ s_per_flop = {figure(1.0)} }}
norm = {{ s_per_moved_byte = {figure(1.0)} }}
{kernels}
""",
        "host",
    )


def plan_of_rows(*rows: int) -> DispatchPlan:
    """A call of each expert, with so many rows."""
    import torch

    starts = [sum(rows[:i]) for i in range(len(rows))]
    calls = Calls.of(
        ExpertCall((e,), (n,), (n,), first, CallKind()) for e, (n, first) in enumerate(zip(rows, starts, strict=True))
    )
    return DispatchPlan(sum(rows), torch.arange(sum(rows)), torch.ones(sum(rows)), calls, sum(rows), 0)


TOY_TOML = f"""
name = "toy"
description = "round numbers"
source = "hand"
graph_bytes_limit = {figure(10000)}

[memory]
comm_w = {figure(1.0)}
relative_accuracy = {figure(0.1)}

[units.cpu]
busy_w = {figure(8.0)}
relative_accuracy = {figure(0.02)}
[units.cpu.kernels]
attention = {{ s_per_flop = {figure(1e-3)} }}
expert_ffn = {{ s_per_flop = {figure(2e-3)} }}
router = {{ s_per_flop = {figure(1e-2)} }}
gather_dynamic = {{ s_per_moved_byte = {figure(0.02)} }}
gather_static = {{ s_per_moved_byte = {figure(0.01)} }}
padding = {{ s_per_moved_byte = {figure(0.005)} }}
scatter = {{ s_per_moved_byte = {figure(0.1)} }}
residual = {{ s_per_moved_byte = {figure(0.05)} }}
norm = {{ s_per_moved_byte = {figure(0.001)} }}
lm_head = {{ s_per_flop = {figure(1e-3)} }}

[units.npu]
busy_w = {figure(0.5)}
j_per_flop = {figure(1e-3)}
relative_accuracy = {figure(0.05)}
[units.npu.kernels]
attention = {{ s_per_launch = {figure(0.25)}, s_per_flop = {figure(1e-4)} }}
expert_ffn = {{ s_per_launch = {figure(0.5)}, s_per_weight_byte = {figure(1e-3)}, s_per_flop = {figure(1e-4)} }}
"""


def toy_sheet() -> Sheet:
    return parse_sheet(TOY_TOML, "toy")
