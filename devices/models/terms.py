"""Which term of its price an operation's seconds come from: what would have to be faster.

launches      launching, also by a framework that chooses the unit itself
weights       reading weights, where a price has a line for them
activations   moving activations, where a price has a line for them
arithmetic    FLOPs: a line for them, or a roofline whose arithmetic is the slower side
memory        a roofline whose memory is the slower side, or the bandwidth that all units share
latency       of a link, for each thing that is sent
bytes         of a link
"""

from __future__ import annotations

from typing import Final, Literal

from devices.models.figures import Roofline
from devices.models.operation import (
    TRANSFER,
    Operation,
    link_of,
    naive_launch_seconds,
    operation_seconds,
    price_of,
)
from devices.models.sheet import Sheet

FLOAT_NOISE: Final = 1e-12
Term = Literal["launches", "weights", "activations", "arithmetic", "memory", "latency", "bytes"]


def term_seconds(sheet: Sheet, operation: Operation) -> dict[Term, float]:
    """Those that are above 0; they add up to `operation_seconds`. Raises `DeviceError` where the sheet cannot price
    it."""
    whole_s = operation_seconds(sheet, operation)
    found: dict[Term, float]
    if operation.kernel == TRANSFER:
        latency_s = link_of(sheet, operation).seconds(operation.launches, 0.0)
        found = {"latency": latency_s, "bytes": whole_s - latency_s}
    else:
        price, launches = price_of(sheet, operation), operation.launches
        amounts = operation.weight_bytes, operation.moved_bytes, operation.flops
        if isinstance(price, Roofline):
            memory_s, compute_s = price.sides_s(launches, *amounts)
            side: Term = "memory" if memory_s >= compute_s else "arithmetic"
            work_s = max(memory_s, compute_s)
            found = {"launches": price.seconds(launches, *amounts) - work_s, side: work_s}
        else:
            weight_bytes, moved_bytes, flops = amounts
            found = {
                "launches": price.seconds(launches, 0.0, 0.0, 0.0),
                "weights": price.seconds(0, weight_bytes, 0.0, 0.0),
                "activations": price.seconds(0, 0.0, moved_bytes, 0.0),
                "arithmetic": price.seconds(0, 0.0, 0.0, flops),
            }
        found["launches"] += naive_launch_seconds(sheet, operation)
        if whole_s > (1 + FLOAT_NOISE) * sum(found.values()):
            found = {"memory": whole_s}
    return {term: seconds for term, seconds in found.items() if seconds > 0}
