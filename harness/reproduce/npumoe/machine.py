"""Single operations of NPUMoE's machine on its sheet: launches of experts (Table 5), attention (Table 8), and products
of one matrix (Fig. 7).

Legend: G experts of a launch, C rows of each, M rows of a product.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from devices.models.operation import Operation, operation_joules, operation_seconds
from devices.models.sheet import Sheet, load_sheet
from engines.pricing.published_shapes import PHI_3_5_MOE as PHI

KERNEL_ROWS = 512
"""Of Table 8's attention, which it does not print: the static shape of Fig. 20, as in the sheet's fit."""
FIG_7_ROWS = (64, 128, 256, 512, 1024)
FIG_7_TREND = "the source's gain is reduced at 64 rows, and ours is largest there"
"""By the sheet's two lines, of which the NPU's has the dearer launch and both have nearly the same price of a row."""


class Cost(NamedTuple):
    seconds: float
    joules: float


@cache
def m2_ultra() -> Sheet:
    return load_sheet("m2-ultra")


def cost(operation: Operation) -> Cost:
    seconds = operation_seconds(m2_ultra(), operation)
    spent = operation_joules(m2_ultra(), operation, seconds)
    return Cost(seconds, sum(joules for joules in spent.values() if joules is not None))


def launch_per_row(group: int, capacity: int) -> Cost:
    """Seconds and joules of a row, where every row holds a token, as Table 5 counts."""
    weights = PHI.expert_weights * group
    whole = cost(
        Operation(
            "expert FFN",
            "npu",
            "expert_ffn",
            flops=2.0 * weights * capacity,
            weight_bytes=float(weights * PHI.bytes_per_value),
        )
    )
    n_rows = group * capacity
    return Cost(whole.seconds / n_rows, whole.joules / n_rows)


def attention(unit: str) -> Cost:
    """Table 8's kernel."""
    projections = 2.0 * KERNEL_ROWS * PHI.attention_weights
    scores = 4.0 * KERNEL_ROWS * KERNEL_ROWS * PHI.n_heads * PHI.head_dim
    weight_bytes = float(PHI.attention_weights * PHI.bytes_per_value)
    return cost(Operation("attention", unit, "attention", flops=projections + scores, weight_bytes=weight_bytes))


def cpu_over_npu(n_rows: int) -> float:
    """Time of the up projection of an expert: M x 4096 x 6400."""
    weights = PHI.hidden * PHI.expert_width
    cpu, npu = (
        cost(
            Operation(
                "product",
                unit,
                "expert_ffn",
                flops=2.0 * n_rows * weights,
                weight_bytes=float(weights * PHI.bytes_per_value),
            )
        )
        for unit in ("cpu", "npu")
    )
    return cpu.seconds / npu.seconds
