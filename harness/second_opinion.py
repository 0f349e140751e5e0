"""What nvidia-smi says of the GPUs under load, against NVML's own readings at that moment.

Both ask the same driver, each through code of its own: where they differ, one of them looks at another GPU, takes one
figure for another, or errs in its unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from devices.base import Clock, DeviceError, Meter
from devices.meters.cross_check import COVERAGE
from devices.nvidia_gpu import AVERAGED_S
from devices.nvidia_smi import SmiReport, read_nvidia_smi
from results.records import PowerTrace
from results.rest import POWER_BESIDE
from results.self_tests import Check

NVML = "nvml"


class Look(NamedTuple):
    """A report of nvidia-smi, or why there is none, and the time in which it was made."""

    from_s: float
    to_s: float
    report: SmiReport | str


def look_with_nvidia_smi(meters: Sequence[Meter], clock: Clock) -> Look | None:
    """None where NVML is not among the meters: there is nothing to compare it with."""
    if not any(meter.name == NVML for meter in meters):
        return None
    from_s = clock.now_s()
    try:
        report: SmiReport | str = read_nvidia_smi()
    except DeviceError as error:
        report = str(error)
    return Look(from_s, clock.now_s(), report)


def nvidia_smi_checks(look: Look | None, traces: Sequence[PowerTrace]) -> Iterator[Check]:
    """One a GPU. Its power must lie within NVML's of that time, give or take the gain that both state.

    Drivers tell the mean of the last second, so that second counts too.
    """
    if look is None:
        return
    if isinstance(look.report, str):
        yield Check(name="nvidia-smi", ok=None, found=look.report)
        return
    watts = {t.component.removesuffix(POWER_BESIDE): t for t in traces if t.meter == NVML and t.kind == "power"}
    if watts and len(watts) != len(look.report.gpus):
        yield Check(
            name="nvidia-smi",
            ok=False,
            found=f"it lists {len(look.report.gpus)} GPUs, NVML {len(watts)}",
            remedy="a GPU was lost, or one of them sees a container's part: compare nvidia-smi -L",
        )
        return
    for i, gpu in enumerate(look.report.gpus):
        trace = watts.get(f"gpu{i}")
        if trace is not None and gpu.power_w is not None:
            yield _compared(f"gpu{i}", gpu.power_w, trace, look)


def _compared(name: str, smi_w: float, trace: PowerTrace, look: Look) -> Check:
    then = (trace.times_s >= look.from_s - AVERAGED_S) & (trace.times_s <= look.to_s)
    seen_w = trace.values[then]
    if not len(seen_w):
        return Check(name=f"nvidia-smi and nvml about {name}", ok=None, found="NVML has no reading of that time")
    gain = COVERAGE * (trace.relative_accuracy or 0.0)
    low_w, high_w = float(seen_w.min()) * (1 - gain), float(seen_w.max()) * (1 + gain)
    agrees = low_w <= smi_w <= high_w
    return Check(
        name=f"nvidia-smi and nvml about {name}",
        ok=agrees,
        found=f"{smi_w:.4g} W, and {seen_w.min():.4g} to {seen_w.max():.4g} W; {low_w:.4g} to {high_w:.4g} W allowed",
        remedy=None if agrees else "they do not see the same GPU, or not the same figure; trust neither before a third",
    )
