"""The doctor: what keeps a device from being measured well, and a self-test of its meters against a known load.

The meters run without a break over three stretches: idle, load, idle. From their traces follow

    noise              standard deviation of idle power over windows of ten updates
    sees the load      load power above idle by more than three times the noise
    update period      median distance of changes of the value, under load
    shortest window    max(10 updates, u / (p P)): P the load's power, u the uncertainty of the window from the load's
                       start to its end (its edges are steps of power, as in any trial), p the share asked for. Without
                       the gain error, which all windows share. u grows with the window at most as its root: the figure
                       errs to the long side for shorter windows, and a little to the short side for longer ones.
    agreement          two meters of one unit over the load, against two standard uncertainties, gain included; NVML's
                       power against nvidia-smi's, which is asked when the load has run for its time
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime
from typing import NamedTuple

import numpy as np

from devices.base import Clock, Device, Meter
from devices.state_watch import watched
from harness.agreement import agreements, not_compared
from harness.loads import RunningLoad
from harness.second_opinion import Look, look_with_nvidia_smi, nvidia_smi_checks
from harness.untried import untried_checks
from harness.windows import running_meters
from results.component_energy import MIN_UPDATES
from results.cpu_time import CpuSeconds, foreign_share
from results.derivation import energy_of_spans
from results.environments import Conditions
from results.records import EnergyReading, IdleBaseline, PowerTrace
from results.self_tests import Agreement, Check, MeterTest, SelfTest
from results.units import format_share

MAX_IDLE_FOREIGN_SHARE = 0.1
MAX_OWN_CPU_SHARE = 0.01
"""Of one core: what reading the meters may cost."""
LATE_S, MEDIAN_LATE_S = 5e-3, 1e-3
"""99 % of the readings within the first, the median within the second."""
SETTLE_S = 0.5
"""Between idle and load, and behind the load: clocks come down in it."""
LEAST_NOISE_WINDOW_S = 0.5
SEEN_NOISES = 3.0
HOT_C = 80.0
"""A CPU that idles above this has a load or no cooling."""

Load = Callable[[], AbstractContextManager[RunningLoad]]


class Stretches(NamedTuple):
    """(start, end) on the host's clock."""

    before: tuple[float, float]
    load: tuple[float, float]
    after: tuple[float, float]


class Measured(NamedTuple):
    """What the three stretches left behind."""

    traces: list[PowerTrace]
    stretches: Stretches
    load: RunningLoad
    conditions: list[Conditions]
    idle_cpu: tuple[CpuSeconds | None, CpuSeconds | None]
    smi: Look | None
    """Of nvidia-smi, under the load, behind its stretch."""


def examine(
    device: Device,
    clock: Clock,
    load: Load,
    seconds: float,
    refusals: dict[str, str],
    sample_interval_s: float,
    on_stage: Callable[[str], None],
) -> SelfTest:
    """Examines an opened device for three times `seconds`. Raises `DeviceError` where a meter or the device is lost.

    refusals: meters that did not open, and why. on_stage: told what happens.
    """
    measured = _measure(device, clock, load, seconds, on_stage)
    meters = tuple(_meter_test(meter, measured, sample_interval_s) for meter in device.meters)
    found = tuple(agreements(device.meters, measured.traces, measured.stretches.load))
    checks = [
        *_meter_checks(meters, refusals),
        *_condition_checks(measured.conditions, device.meters),
        *_cpu_checks(measured.idle_cpu, seconds),
        *_sampling_checks(measured, sample_interval_s),
        *_load_checks(meters),
        *(_agreement_check(a) for a in found),
        *(Check(name="two looks at one counter", ok=None, found=words) for words in not_compared(device.meters)),
        *nvidia_smi_checks(measured.smi, measured.traces),
        *untried_checks(environment := device.environment()),
    ]
    return SelfTest(
        device=device.name,
        made_at=now(),
        environment=environment,
        load=measured.load.words,
        checks=tuple(checks),
        meters=meters,
        agreements=found,
    )


def not_ready(device: str, reason: str) -> SelfTest:
    """Of a device that does not open."""
    return SelfTest(
        device=device, made_at=now(), environment=None, checks=(Check(name="opens", ok=False, found=reason),)
    )


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


# --- measuring -------------------------------------------------------------------------------------------------------


def _measure(device: Device, clock: Clock, load: Load, seconds: float, on_stage: Callable[[str], None]) -> Measured:
    def stretch(from_s: float, length_s: float) -> tuple[float, float]:
        clock.sleep_until_s(from_s + length_s)
        return from_s, clock.now_s()

    with watched(device) as conditions, running_meters(device.meters) as traces:
        on_stage(f"idle for {seconds:g} s")
        cpu_before = device.cpu_seconds()
        before = stretch(clock.now_s(), seconds)
        cpu_after = device.cpu_seconds()
        on_stage("starting the load")
        # A reading that is shown late, or interpolated to the next, belongs to no stretch.
        clock.sleep_until_s(before[1] + SETTLE_S)
        with load() as running:
            on_stage(f"{running.words} for {seconds:g} s")
            loaded = stretch(clock.now_s(), seconds)
            smi = look_with_nvidia_smi(device.meters, clock)
        ended_s = clock.now_s()
        on_stage(f"idle for {seconds:g} s")
        after = stretch(ended_s, seconds + SETTLE_S)
    stretches = Stretches(before, loaded, (after[0] + SETTLE_S, after[1]))
    return Measured(list(traces), stretches, running, conditions, (cpu_before, cpu_after), smi)


def _meter_test(meter: Meter, measured: Measured, sample_interval_s: float) -> MeterTest:
    own = [replace(t, relative_accuracy=0.0) for t in measured.traces if t.meter == meter.name]
    additive = [t for t in own if t.additive]
    update_s = max((t.update_period_s for t in additive), default=0.0)
    gains = [t.relative_accuracy or 0.0 for t in measured.traces if t.meter == meter.name and t.additive]
    seen = [s for t in additive if (s := seen_update_s(t, measured.stretches.load)) is not None]
    stretches = measured.stretches
    idle = IdleBaseline(
        meter=meter.name,
        component="total",
        before_w=_total(own, meter, stretches.before).average_power_w,
        after_w=_total(own, meter, stretches.after).average_power_w,
    )
    loaded = _total(own, meter, stretches.load)
    noise_w = _noise_w(own, meter, (stretches.before, stretches.after), update_s)
    found = MeterTest(
        meter=meter.name,
        method=meter.method,
        components=tuple(t.component for t in additive),
        note=next((t.note for t in own if t.note), None),
        stated_update_s=update_s,
        seen_update_s=max(seen, default=None),
        sample_interval_s=sample_interval_s,
        relative_accuracy=max(gains, default=0.0),
        idle_w=idle.power_w,
        load_w=loaded.average_power_w,
        noise_w=noise_w,
        reason=loaded.reason,
    )
    units = {c.computes for c in meter.channels if c.additive}
    if not units & {*measured.load.units}:
        return found.model_copy(update={"reason": "nothing that it sees was put under load"})
    if found.load_w is None or found.idle_w is None:
        return found
    sees = found.load_w - found.idle_w > max(SEEN_NOISES * (noise_w or 0.0), 0.01 * found.load_w)
    if not sees:
        return found.model_copy(update={"sees_load": False})
    return found.model_copy(
        update={
            "sees_load": True,
            "shortest_1_percent_s": shortest_window_s(loaded, update_s, 0.01),
            "shortest_5_percent_s": shortest_window_s(loaded, update_s, 0.05),
        }
    )


def _total(traces: Sequence[PowerTrace], meter: Meter, window: tuple[float, float]) -> EnergyReading:
    return energy_of_spans(traces, [window], meter.name)


def shortest_window_s(loaded: EnergyReading, update_s: float, share: float) -> float | None:
    """max(ten updates, u / (share P)), from the window over the load."""
    if not loaded.average_power_w or loaded.uncertainty_j is None:
        return None
    return max(MIN_UPDATES * update_s, loaded.uncertainty_j / (share * loaded.average_power_w))


def seen_update_s(trace: PowerTrace, window: tuple[float, float]) -> float | None:
    """Median distance of changes of the value; None below three changes."""
    inside = (trace.times_s >= window[0]) & (trace.times_s <= window[1])
    changed_s = trace.times_s[inside][1:][np.diff(trace.values[inside]) != 0]
    return float(np.median(np.diff(changed_s))) if len(changed_s) >= 3 else None


def _noise_w(
    traces: Sequence[PowerTrace], meter: Meter, stretches: Sequence[tuple[float, float]], update_s: float
) -> float | None:
    """Scatter of the mean power of short idle windows, within each stretch; None with fewer than three of them."""
    length_s = max(LEAST_NOISE_WINDOW_S, MIN_UPDATES * update_s)
    deviations: list[float] = []
    for start_s, end_s in stretches:
        n = int((end_s - start_s) / length_s)
        pieces = [(start_s + k * length_s, start_s + (k + 1) * length_s) for k in range(n)]
        watts = [w for piece in pieces if (w := _total(traces, meter, piece).average_power_w) is not None]
        if len(watts) >= 3:
            deviations.append(float(np.std(watts, ddof=1)))
    return float(np.sqrt(np.mean(np.square(deviations)))) if deviations else None


# --- checks ----------------------------------------------------------------------------------------------------------


def _meter_checks(meters: Sequence[MeterTest], refusals: dict[str, str]) -> Iterator[Check]:
    """What measures; where nothing does, also why each meter of the machine does not."""
    measuring = [m for m in meters if m.method not in ("modelled", "replayed")]
    if measuring:
        yield Check(name="meters", ok=True, found=", ".join(f"{m.meter} ({m.method})" for m in measuring))
        return
    remedy = "open one of the meters below, or name a watts_sheet of this machine"
    yield Check(name="meters", ok=False, found="nothing here measures energy", remedy=remedy)
    for name, reason in refusals.items():
        yield Check(name=f"no {name}", ok=None, found=reason)


def _condition_checks(conditions: Sequence[Conditions], meters: Sequence[Meter]) -> Iterator[Check]:
    charging = [c.charging for c in conditions if c.charging is not None]
    gauge = any(m.method == "battery gauge" for m in meters)
    if charging:
        words = "on a charger" if any(charging) else "on battery"
        remedy = "unplug it: the gauge does not see what the charger carries" if any(charging) and gauge else None
        yield Check(name="power source", ok=not (any(charging) and gauge), found=words, remedy=remedy)
    throttled = [c.throttled for c in conditions if c.throttled is not None]
    if throttled:
        yield Check(
            name="throttling",
            ok=not any(throttled),
            found=f"throttled{_thermal_words(conditions)}" if any(throttled) else "none",
            remedy="let it cool, or cool it better: speeds and joules of a throttled device are not its own"
            if any(throttled)
            else None,
        )
    yield from _limit_checks(conditions)
    start_c = conditions[0].temperature_c
    if start_c is not None:
        hot = start_c >= HOT_C
        yield Check(
            name="temperature",
            ok=not hot,
            found=f"{start_c:.0f} degC before the load",
            remedy=f"idle above {HOT_C:g} degC: look for a load or a dusty cooler" if hot else None,
        )
    yield from _phone_checks(conditions)


def _limit_checks(conditions: Sequence[Conditions]) -> Iterator[Check]:
    """Of what the owner lets processors do, and who else computes on the GPUs."""
    by_name = {
        "clock limits": [c.cpu_policy for c in conditions],
        "GPU power limits": [c.gpu_limits for c in conditions],
    }
    for name, seen in by_name.items():
        limits = dict.fromkeys(words for words in seen if words is not None)
        if limits:
            has_changed = len(limits) > 1
            yield Check(
                name=name,
                ok=not has_changed,
                found=" then ".join("; ".join(words) for words in limits),
                remedy="end what sets them (a power daemon, a charger that comes and goes)" if has_changed else None,
            )
    others = dict.fromkeys(words for c in conditions for words in c.gpu_others or ())
    if any(c.gpu_others is not None for c in conditions):
        remedy = "end them: they slow an engine down, and their joules are in every window" if others else None
        yield Check(name="others on the GPU", ok=not others, found=", ".join(others) or "none", remedy=remedy)


def _thermal_words(conditions: Sequence[Conditions]) -> str:
    worst = max((c.thermal_status for c in conditions if c.thermal_status is not None), default=None)
    return "" if worst is None else f" (thermal status {worst} of 6)"


def _phone_checks(conditions: Sequence[Conditions]) -> Iterator[Check]:
    """What slows a phone, or draws power beside the engine. A host does not tell these."""
    caps = dict.fromkeys(cap for c in conditions for cap in c.frequency_caps or ())
    if any(c.frequency_caps is not None for c in conditions):
        yield Check(
            name="frequency caps",
            ok=None if caps else True,
            found=", ".join(caps) or "none",
            remedy="slower than its sheet says; leave power saving, let it cool, or compare with the same caps only"
            if caps
            else None,
        )
    drawing = []
    brightness = dict.fromkeys(c.screen_brightness for c in conditions if c.screen_brightness is not None)
    if brightness:
        drawing.append(f"screen at {' then '.join(map(str, brightness))} of 255")
    if any(c.airplane_mode is False for c in conditions):
        drawing.append("airplane mode off")
    if drawing:
        restless = len(brightness) > 1 or "airplane mode off" in drawing
        yield Check(
            name="screen and radio",
            ok=None if restless else True,
            found=", ".join(drawing),
            remedy="for figures that can be compared: airplane mode with Wi-Fi on, a brightness that stays"
            if restless
            else None,
        )


def _cpu_checks(idle_cpu: tuple[CpuSeconds | None, CpuSeconds | None], seconds: float) -> Iterator[Check]:
    before, after = idle_cpu
    foreign = foreign_share(before, after)
    if foreign is None or before is None or after is None:
        yield Check(name="other processes", ok=None, found="the CPU time of others cannot be read here")
        return
    ours_s = after.ours_s - before.ours_s
    quiet = foreign <= MAX_IDLE_FOREIGN_SHARE
    yield Check(
        name="other processes",
        ok=quiet,
        found=f"they take {format_share(foreign)} of the CPU",
        remedy=None if quiet else "end them: they slow an engine down, and their joules are in every window",
    )
    own = ours_s / seconds
    if own == 0.0:
        return  # a phone: the loop that reads its battery counts as one of the others
    yield Check(
        name="cost of reading",
        ok=own <= MAX_OWN_CPU_SHARE,
        found=f"{100 * own:.2g} % of a core",
        remedy=None if own <= MAX_OWN_CPU_SHARE else "read less often: a longer protocol.sample_interval_s",
    )


def _sampling_checks(measured: Measured, sample_interval_s: float) -> Iterator[Check]:
    """How well readings keep their distance while the machine idles. Held values are thinned out: nothing to see."""
    start_s, end_s = measured.stretches.before
    traces = {t.meter: t for t in measured.traces if t.kind != "held" and t.sample_interval_s > 0}
    for meter, trace in traces.items():
        inside_s = trace.times_s[(trace.times_s >= start_s) & (trace.times_s <= end_s)]
        late_s = np.abs(np.diff(inside_s) - trace.sample_interval_s)
        if len(late_s) < MIN_UPDATES:
            continue
        median_s, most_s = float(np.median(late_s)), float(np.quantile(late_s, 0.99))
        steady = median_s <= MEDIAN_LATE_S and most_s <= LATE_S
        yield Check(
            name=f"readings of {meter}",
            ok=steady,
            found=f"every {1e3 * sample_interval_s:g} ms; off by {1e3 * median_s:.1f} ms (median),"
            f" {1e3 * most_s:.1f} ms (99 %)",
            remedy=None if steady else "the machine is too busy to read its meters on time; end what keeps it busy",
        )


def _load_checks(meters: Sequence[MeterTest]) -> Iterator[Check]:
    for meter in meters:
        if meter.sees_load is not None:
            power = f"idle {meter.idle_w or 0:.3g} W, load {meter.load_w or 0:.3g} W"
            yield Check(
                name=f"{meter.meter} sees the load",
                ok=meter.sees_load,
                found=power,
                remedy=None if meter.sees_load else "its power does not rise: is it the right meter, and its sign?",
            )
        elif meter.reason:
            yield Check(name=f"{meter.meter} sees the load", ok=None, found=meter.reason)


def _agreement_check(agreement: Agreement) -> Check:
    return Check(
        name=f"{' and '.join(agreement.meters)} agree about the {agreement.unit}",
        ok=agreement.agrees,
        found=f"{100 * agreement.difference:+.2g} %, {100 * agreement.allowed:.2g} % allowed",
        remedy=None if agreement.agrees else "one of them misses a part or counts one twice; compare their components",
    )
