"""Power rails of a phone (ODPM, on-device power monitor) as energy counters, through Perfetto.

The PMICs of a Pixel 6 and newer, and of some other phones, meter their own outputs: joules since boot of each rail,
with the time of the reading. They are inside of the battery: display, modem, CPU clusters, GPU, memory apart. What has
no rail is in none of them (the PMIC's own losses, parts that are not metered), so their sum is below the battery's.

A rail may feed another: a buck regulator called LLDO, MLDO or HLDO supplies the linear regulators behind it (L12M_...).
Where such a regulator is metered, the linear ones are shown and not summed.

Any rail may be switched off: a display, a modem, cores that nothing runs on. But a rail of cores that has counted in
every window so far, idle ones too, has stopped where it stands still all through one: something always runs.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from devices.android.device_clock import clock_note
from devices.android.gauge_loop import GaugeLog, on_host_clock
from devices.android.perfetto import MIN_POLL_S, PIECE_S, Config, PerfettoTrace, phone_stamps, short_trace
from devices.android.perfetto_trace import PowerLog, RailReadings
from devices.android.shell import RECONNECT_S, Phone
from devices.base import (
    Channel,
    Clock,
    DeviceError,
    InterruptedWindowError,
    MeterUnavailableError,
    TransientDeviceError,
    Unit,
)
from devices.gauges import MAX_POWER_W, observed_update_period_s
from devices.pieces import joined_by_component
from results.liveness import at_rest
from results.records import Method, PowerTrace

Array = NDArray[np.float64]

METER = "rails"
METHOD: Method = "counter"
RELATIVE_ACCURACY = 0.05 / math.sqrt(3)
"""No maker states it. Shunts are good to 1 %, current sensing inside of a regulator is not: uniform within 5 %."""
STAMP_S = 1e-3
"""The HAL's stamps are milliseconds, cut."""
ENERGY_STEP_J = 1e-6
_FEEDS_OTHERS = re.compile(r"[HLM]LDO\d*$")
_IS_LINEAR = re.compile(r"^L\d+[A-Z]?(_|$)")

log = logging.getLogger(__name__)


def find_rails(phone: Phone, clock: Clock) -> tuple[RailReadings, ...]:
    """What a second of a trace shows. Raises `MeterUnavailableError` with the reason where it shows none."""
    rails = short_trace(phone, Config(rails=True), clock).rails
    if not rails:
        raise MeterUnavailableError(
            "rails: the power-stats HAL of this phone shows no power rails (a Pixel 6 or newer does, few others);"
            ' its battery is measured: meters = ["battery"]'
        )
    if not any(len(rail.boot_s) for rail in rails):
        raise MeterUnavailableError(
            f"rails: {len(rails)} are named ({rails[0].name}, ...) and none has a reading; restart the phone"
        )
    return rails


def rail_channels(rails: Sequence[RailReadings]) -> tuple[Channel, ...]:
    """One a rail, by its name; of two with one name the second gets a number."""
    feeders = [rail.name for rail in rails if _FEEDS_OTHERS.search(rail.name)]
    channels: list[Channel] = []
    for rail in rails:
        n_before = sum(rail.name == other.name for other in rails[: len(channels)])
        fed = bool(feeders) and _IS_LINEAR.match(rail.name) is not None
        channels.append(
            Channel(
                f"{rail.name} #{n_before + 1}" if n_before else rail.name,
                "counter",
                update_period_s=STAMP_S,
                resolution=ENERGY_STEP_J,
                relative_accuracy=RELATIVE_ACCURACY,
                additive=not fed,
                can_rest=True,
                max_power_w=MAX_POWER_W,
                computes=_computes(rail),
                note=(rail.subsystem or "no subsystem named") + (f"; fed by {' or '.join(feeders)}" if fed else ""),
            )
        )
    return tuple(channels)


def _computes(rail: RailReadings) -> Unit:
    words = f"{rail.name} {rail.subsystem}".upper()
    return "gpu" if "G3D" in words or "GPU" in words else "npu" if "TPU" in words or "NPU" in words else "cpu"


class RailMeter:
    """All rails that a phone shows."""

    name = METER
    method: Method = METHOD

    def __init__(self, phone: Phone, interval_s: float, clock: Clock, reconnect_s: float = RECONNECT_S) -> None:
        self.channels: tuple[Channel, ...] = ()
        self._phone = phone
        self._clock = clock
        self._reconnect_s = reconnect_s
        self._config = Config(rails=True, poll_s=max(interval_s, MIN_POLL_S))
        self._trace: PerfettoTrace | None = None
        self._is_running = False
        self._begun_s = 0.0
        self._pieces: list[list[PowerTrace]] = []
        """Of this window: traces that were asked for before its end."""
        self._broken: list[str] = []
        """Why readings of this window are missing."""
        self._has_lived: set[str] = set()
        """Components that have counted in a window; `_still`: that did not in the last one; `_rests`: that did not at
        times, and went on."""
        self._still: set[str] = set()
        self._rests: set[str] = set()

    def open(self) -> None:
        """Raises `MeterUnavailableError`: no perfetto, none that the shell may use, or no rails."""
        rails = find_rails(self._phone, self._clock)
        self.channels = rail_channels(rails)
        told = ", ".join(f"{rail.name} ({rail.subsystem})" for rail in rails)
        log.info("%s: rails: %s", self._phone.name, told)

    def start(self) -> None:
        """Begins a window. A phone that went away is waited for, up to a limit. Raises `TransientDeviceError`."""
        if not self.channels:
            raise DeviceError("meter rails is not open; open it first")
        if self._trace is not None:
            raise DeviceError("meter rails is already running; stop it before another window starts")
        self._pieces.clear()
        self._broken.clear()
        trace = self._phone.reached(lambda: PerfettoTrace(self._phone, self._config, self._clock), self._reconnect_s)
        # Known before it starts: Ctrl-C on the way is followed by `stop`.
        self._trace = trace
        try:
            trace.start()
        except DeviceError:
            self._trace = None
            raise
        self._begun_s, self._is_running = self._clock.now_s(), True

    def tend(self) -> str | None:
        """Begins again where the link broke; and asks for the trace in time, while the next one runs."""
        if not self._is_running:
            return None
        try:
            if self._trace is not None and self._trace.lost is not None:
                lost_s = self._clock.now_s() - self._begun_s
                log.warning(
                    "%s: rails: %s; the trace of the last %.0f s is lost", self._phone.name, self._trace.lost, lost_s
                )
                self._broken.append(f"{self._trace.lost}, and the trace of the last {lost_s:.0f} s with it")
                trace, self._trace = self._trace, None
                trace.cancel()
            if self._trace is None:
                self._phone.reach()
                self._trace = self._started()
            elif self._clock.now_s() - self._begun_s > PIECE_S:
                ended, self._trace = self._trace, self._started()
                self._take(ended)
        except DeviceError as error:
            return str(error)
        return None

    def _started(self) -> PerfettoTrace:
        trace = PerfettoTrace(self._phone, self._config, self._clock)
        try:
            trace.start()
        except BaseException:
            # After Ctrl-C, too: its thread would keep the program from ending.
            trace.cancel()
            raise
        self._begun_s = self._clock.now_s()
        return trace

    def _take(self, trace: PerfettoTrace) -> None:
        try:
            self._pieces.append(rail_traces(*trace.stop(), self.channels, self._config.poll_s))
        except TransientDeviceError as error:
            self._broken.append(str(error))

    def mark(self) -> None:
        """Perfetto reads when it likes."""

    def stop(self) -> Sequence[PowerTrace]:
        """Ends a window. Raises `InterruptedWindowError` where the phone, the link or perfetto was lost in it."""
        if not (self._is_running or self._trace is not None):
            raise DeviceError("meter rails is not running; start it first")
        self._is_running = False
        if self._trace is None:
            self._broken.append("it did not come back")
            raise self._interrupted()
        # The reading behind the window's end.
        self._clock.sleep_until_s(self._clock.now_s() + 2 * self._config.poll_s)
        trace, self._trace = self._trace, None
        self._take(trace)
        if self._broken:
            raise self._interrupted()
        return self._traces()

    def _interrupted(self) -> InterruptedWindowError:
        """With what was traced before and behind the break: the counters go on meanwhile."""
        return InterruptedWindowError(f"rails: {'; '.join(self._broken)}", self._traces())

    def _traces(self) -> Sequence[PowerTrace]:
        pieces, self._pieces = self._pieces, []
        return [self._remembered(trace) for trace in joined_by_component(pieces)]

    def _remembered(self, trace: PowerTrace) -> PowerTrace:
        """With what the windows before have shown: that it lived, and that it does not rest."""
        name = trace.component
        if at_rest(trace):
            self._still.add(name)
            has_lived = name in self._has_lived
            is_core = "CPU" in f"{name} {trace.note}".upper()
            return replace(trace, has_lived=has_lived, can_rest=not (is_core and has_lived and name not in self._rests))
        if len(trace.values):
            self._rests |= self._still & {name}
            self._still.discard(name)
            self._has_lived.add(name)
        return trace

    def close(self) -> None:
        self._is_running = False
        if self._trace is not None:
            trace, self._trace = self._trace, None
            trace.cancel()


def rail_traces(power: PowerLog, beside: GaugeLog, channels: Sequence[Channel], poll_s: float) -> list[PowerTrace]:
    """Joules of each rail on the host's clock. A rail that the trace does not show has no readings: no energy."""
    found = {c.component: rail for c, rail in zip(rail_channels(power.rails), power.rails, strict=True)}
    readings = [found.get(channel.component) for channel in channels]
    boot_s = np.concatenate([rail.boot_s for rail in readings if rail is not None] or [np.array([])])
    wall_s, uptime_s = phone_stamps(boot_s, power)
    nothing = np.full(len(boot_s), np.nan)
    host_s, clock, which = on_host_clock(GaugeLog(wall_s, uptime_s, nothing, nothing, beside.bursts))
    left_out = f"{power.n_incomplete} readings were incomplete: left out" if power.n_incomplete else None
    traces = []
    first = 0
    for channel, rail in zip(channels, readings, strict=True):
        n = 0 if rail is None else len(rail.boot_s)
        rail_s = host_s[first : first + n]
        first += n
        usable = np.diff(rail_s, prepend=-np.inf) > 0
        energy_j = np.array([]) if rail is None else rail.energy_j[usable]
        noted = replace(channel, note=f"{channel.note}; {clock_note(clock, which)}")
        own = _rail_trace(noted, rail, rail_s[usable], energy_j, poll_s, clock.uncertainty_s, left_out)
        traces.append(own)
    return traces


def _rail_trace(
    channel: Channel,
    rail: RailReadings | None,
    times_s: Array,
    energy_j: Array,
    poll_s: float,
    clock_s: float,
    left_out: str | None,
) -> PowerTrace:
    """times_s [n]: the readings' stamps on the host's clock, each of them off by up to clock_s.

    So a value is of some time within STAMP_S + 2 clock_s. Its time is set to the end of that: then it is as a counter's
    that is renewed so often. A value that has only the trace's stamp may also be as old as the HAL's update.
    """
    seen_s = float(np.median(np.diff(times_s))) if len(times_s) > 1 else 0.0
    stamped = rail is None or rail.stamped
    cut_s = STAMP_S if stamped else 0.0
    stamper = "its HAL" if stamped else "perfetto"
    read = replace(
        channel,
        update_period_s=cut_s + 2 * clock_s + (0.0 if stamped else observed_update_period_s(times_s, energy_j)),
        note=f"{channel.note}; a reading every {seen_s * 1e3:.0f} ms, stamped by {stamper}",
    )
    return read.trace(METER, METHOD, times_s + cut_s + clock_s, energy_j, poll_s, left_out=left_out)
