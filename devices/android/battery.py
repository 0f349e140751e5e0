"""The battery of a phone as a power meter: current times voltage, read by a loop on the phone.

Where the current comes from, best first:

    sysfs    /sys/class/power_supply/{battery,bms,...}/current_now: no process for a sample; often denied to the shell
    service  `cmd battery get -f current_now` (Android 15 and newer): some 30 ms of the phone's CPU a sample, so every
             200 ms; the voltage from `dumpsys battery`
    perfetto the battery's HAL, read every 100 ms by the phone's tracer (Android 11 and newer); the voltage from
             `dumpsys battery` beside it
    counter  the charge counter of `dumpsys battery`: coulombs left, in steps of one or a few mAh; for long windows

What is measured is the whole phone: screen, radio and all. Two properties of the gauge rule the uncertainty: how often
it renews its value, which is observed, and its gain, which no phone states.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from devices.android.battery_shell import (
    CHARGER_LOOK_S,
    NOT_A_BATTERY,
    POWER_SUPPLY,
    SED_CHARGER,
    TAKE_CHARGER,
    charger_nodes,
    look_at_chargers,
    read_voltage,
)
from devices.android.calibration import MIN_SAMPLES, Calibration, calibrate, volt_per_unit_of
from devices.android.device_clock import steady_stamps
from devices.android.gauge_loop import GaugeLog, GaugeLoop, loop_script
from devices.android.perfetto import MIN_POLL_S, PIECE_S
from devices.android.perfetto_battery import PERFETTO_SOURCE, PerfettoGauge, offers_battery
from devices.android.raw_gauge import METER, METHOD, GaugeKind, energy_of, power_of, raw_traces
from devices.android.shell import RECONNECT_S, Phone
from devices.base import (
    Channel,
    Clock,
    DeviceError,
    InterruptedWindowError,
    MeterUnavailableError,
    TransientDeviceError,
)
from devices.gauges import MAX_POWER_W, observed_update_period_s
from devices.pieces import joined_by_component
from results.environments import Conditions
from results.records import PowerTrace

log = logging.getLogger(__name__)

COMPONENT = "battery"
SERVICE_PERIOD_S = 0.2
COUNTER_PERIOD_S = 1.0
CALIBRATION_S = 3.0
RELATIVE_ACCURACY = 0.02 / math.sqrt(3)
"""Not stated by phone makers. Fuel-gauge ICs state 1 % to 2 % of the reading, sense resistor included: uniform within
2 %, as one sigma."""
_VOLTAGE_READS = 8
"""Service readings for each reading of the voltage, which moves slowly and costs a process more."""


@dataclass(frozen=True)
class GaugeSource:
    """One way to the battery's current. read: shell that sets c (raw current or charge) and v (raw voltage)."""

    name: str
    kind: GaugeKind
    read: str
    period_s: float
    through_perfetto: bool = False
    """No shell reads it: Perfetto does."""


def find_sources(phone: Phone, interval_s: float) -> list[GaugeSource]:
    """What this phone offers, best first. Raises `DeviceError`."""
    look = look_at_chargers(charger_nodes(phone), max(1, round(CHARGER_LOOK_S / interval_s)))
    sources = [
        GaugeSource(
            f"{folder}/current_now",
            "current",
            f"c=; v=; read -r c <{folder}/current_now; read -r v <{folder}/voltage_now\n{look}",
            interval_s,
        )
        for folder in _readable_nodes(phone)
    ]
    now = phone.read("cmd battery get -f current_now")
    if now is not None and now.strip().lstrip("-").isdigit():
        sources.append(
            GaugeSource(
                "cmd battery current_now",
                "current",
                "c=$(cmd battery get -f current_now); " + read_voltage(_VOLTAGE_READS),
                max(interval_s, SERVICE_PERIOD_S),
            )
        )
    if offers_battery(phone):
        sources.append(GaugeSource(PERFETTO_SOURCE, "current", "", max(interval_s, MIN_POLL_S), through_perfetto=True))
    if "Charge counter: " in (phone.read("dumpsys battery") or ""):
        sources.append(
            GaugeSource(
                "dumpsys battery charge counter",
                "charge",
                f"d=$(dumpsys battery | sed -n '{SED_CHARGER};s/^  Charge counter: //p;s/^  voltage: //p')\n"
                f"{TAKE_CHARGER}\n"
                "c=${d%%[!0-9]*}; v=${d#*[!0-9]}; v=${v%%[!0-9]*}",
                max(interval_s, COUNTER_PERIOD_S),
            )
        )
    return sources


def _readable_nodes(phone: Phone) -> list[str]:
    """Folders of batteries whose current and voltage the shell may read; the one called `battery` first."""
    files = phone.read_files(f"{POWER_SUPPLY}/*/{name}" for name in ("current_now", "voltage_now", "type"))
    folders = {path.rpartition("/")[0] for path in files}
    batteries = [
        folder
        for folder in folders
        if f"{folder}/current_now" in files
        and f"{folder}/voltage_now" in files
        and files.get(f"{folder}/type", "Battery").strip() in ("Battery", "BMS", "Unknown")
        and not folder.rpartition("/")[2].startswith(NOT_A_BATTERY)
    ]
    order = {"battery": 0, "bms": 1}
    return sorted(batteries, key=lambda folder: (order.get(folder.rpartition("/")[2], 2), folder))


class BatteryMeter:
    """Power from the battery of a phone that discharges."""

    name = METER
    method = METHOD

    def __init__(self, phone: Phone, interval_s: float, clock: Clock, reconnect_s: float = RECONNECT_S) -> None:
        self.channels: tuple[Channel, ...] = ()
        self._phone = phone
        self._interval_s = interval_s
        self._clock = clock
        self._reconnect_s = reconnect_s
        self._source: GaugeSource | None = None
        self._calibration: Calibration | None = None
        self._loop: GaugeLoop | PerfettoGauge | None = None
        self._raw: tuple[PowerTrace, ...] = ()
        self._is_running = False
        self._begun_s = 0.0
        self._pieces: list[tuple[PowerTrace, PowerTrace]] = []
        """Raw readings of this window that a broken link, or the length of a trace, has ended."""
        self._broken: list[str] = []
        """Why readings of this window are missing."""
        self._states: list[Conditions] = []

    def open(self) -> None:
        """Takes the first source that reads as a discharging battery, and prefers one that was seen to update.

        Some seconds: sign, unit and update period are decided from readings. The phone must be on battery.
        """
        refusals = []
        quiet: tuple[GaugeSource, Calibration | None, Channel] | None = None
        for source in find_sources(self._phone, self._interval_s):
            try:
                calibration, channel = self._try(source)
            except TransientDeviceError:
                raise
            except DeviceError as error:
                log.info("%s: battery: %s: %s", self._phone.name, source.name, error)
                refusals.append(f"{source.name}: {error}")
                continue
            if source.kind == "current" and channel.update_period_s < CALIBRATION_S / 3:
                self._use(source, calibration, channel)
                return
            quiet = quiet or (source, calibration, channel)
        if quiet is None:
            why = "; ".join(refusals) or f"the shell may read nothing under {POWER_SUPPLY}"
            raise MeterUnavailableError(
                f"battery: no reading of the current: {why}"
                " (a phone may hide it: Android 15 has it in `cmd battery`, a rooted or userdebug phone in sysfs)"
            )
        log.warning(
            "%s: battery: %s has not been seen to update in %g s: windows may have no energy",
            self._phone.name,
            quiet[0].name,
            CALIBRATION_S,
        )
        self._use(*quiet)

    def _try(self, source: GaugeSource) -> tuple[Calibration | None, Channel]:
        """What a few seconds of a source say. Raises `DeviceError` where it is no discharging battery."""
        seconds = CALIBRATION_S if source.kind == "charge" else max(CALIBRATION_S, 2 * MIN_SAMPLES * source.period_s)
        loop = self._reader(source)
        try:
            loop.start()
            self._clock.sleep_until_s(self._clock.now_s() + seconds)
            readings = loop.stop()
        finally:
            # After Ctrl-C the reader's thread would keep the program from ending.
            loop.cancel()
        if source.kind == "charge":
            if not len(readings.voltage) or not np.isfinite(readings.current * readings.voltage).all():
                raise DeviceError("the charge counter or the voltage is no number")
            volt_per_unit_of(float(np.median(readings.voltage)))
            return None, Channel(
                COMPONENT,
                "counter",
                relative_accuracy=RELATIVE_ACCURACY,
                max_power_w=MAX_POWER_W,
                note=source.name,
            )
        calibration = calibrate(readings.current, readings.voltage)
        stamps = steady_stamps(readings.wall_s, readings.uptime_s)
        channel = Channel(
            COMPONENT,
            "held",
            update_period_s=observed_update_period_s(stamps.times_s, readings.current),
            relative_accuracy=RELATIVE_ACCURACY,
            note=f"{source.name}: {calibration}",
        )
        return calibration, channel

    def _reader(self, source: GaugeSource) -> GaugeLoop | PerfettoGauge:
        if source.through_perfetto:
            return PerfettoGauge(self._phone, source.period_s, self._clock)
        return GaugeLoop(self._phone, loop_script(source.read, source.period_s), self._clock, source.period_s)

    def _use(self, source: GaugeSource, calibration: Calibration | None, channel: Channel) -> None:
        self._source, self._calibration, self.channels = source, calibration, (channel,)
        log.info(
            "%s: battery: %s, a new value every %.0f ms", self._phone.name, channel.note, channel.update_period_s * 1e3
        )

    def start(self) -> None:
        """Begins a window. A phone that went away is waited for, up to a limit. Raises `TransientDeviceError`."""
        if self._source is None:
            raise DeviceError("meter battery is not open; open it first")
        if self._loop is not None:
            raise DeviceError("meter battery is already running; stop it before another window starts")
        source = self._source
        self._pieces.clear()
        self._broken.clear()
        self._states.clear()
        loop = self._phone.reached(lambda: self._reader(source), self._reconnect_s)
        # Known before it starts: Ctrl-C on the way is followed by `stop`.
        self._loop = loop
        try:
            loop.start()
        except DeviceError:
            self._loop = None
            raise
        self._begun_s, self._is_running = self._clock.now_s(), True

    def tend(self) -> str | None:
        """Begins again where the link broke. A trace of Perfetto is asked for in time, while the next one runs."""
        if not self._is_running or self._source is None:
            return None
        try:
            if self._loop is not None and self._loop.lost is not None:
                log.warning("%s: battery: %s; what was read until then is kept", self._phone.name, self._loop.lost)
                self._broken.append(str(self._loop.lost))
                loop, self._loop = self._loop, None
                self._keep(loop)
            if self._loop is None:
                self._phone.reach()
                self._loop = self._started(self._source)
            elif self._source.through_perfetto and self._clock.now_s() - self._begun_s > PIECE_S:
                ended, self._loop = self._loop, self._started(self._source)
                self._take(ended, self._source)
        except DeviceError as error:
            return str(error)
        return None

    def _started(self, source: GaugeSource) -> GaugeLoop | PerfettoGauge:
        loop = self._reader(source)
        try:
            loop.start()
        except BaseException:
            # After Ctrl-C, too: its thread would keep the program from ending.
            loop.cancel()
            raise
        self._begun_s = self._clock.now_s()
        return loop

    def _keep(self, loop: GaugeLoop | PerfettoGauge) -> None:
        assert self._source is not None
        loop.cancel()
        readings = loop.received()
        if readings is None or not len(readings.wall_s):
            return
        self._note_chargers(readings)
        try:
            self._pieces.append(raw_traces(readings, self._source.kind, self._source.period_s))
        except DeviceError as error:
            log.warning("%s: battery: %d readings are lost: %s", self._phone.name, len(readings.wall_s), error)

    def mark(self) -> None:
        """The gauge renews its value when it likes."""

    def stop(self) -> Sequence[PowerTrace]:
        """Ends a window. Raises `InterruptedWindowError` where the phone or the link was lost in it."""
        if self._source is None or not (self._is_running or self._loop is not None):
            raise DeviceError("meter battery is not running; start it first")
        self._is_running = False
        if self._loop is None:
            self._broken.append("it did not come back")
            raise self._interrupted()
        [channel] = self.channels
        # What happened last is shown by the next value.
        self._clock.sleep_until_s(self._clock.now_s() + min(channel.update_period_s, 1.0) + self._source.period_s)
        loop, self._loop = self._loop, None
        self._take(loop, self._source)
        if self._broken:
            raise self._interrupted()
        return self._traces()

    def _take(self, loop: GaugeLoop | PerfettoGauge, source: GaugeSource) -> None:
        """All of a piece, or of one that was lost what there is."""
        try:
            readings = loop.stop()
            self._note_chargers(readings)
            self._pieces.append(raw_traces(readings, source.kind, source.period_s))
        except TransientDeviceError as error:
            self._keep(loop)
            self._broken.append(str(error))

    def _note_chargers(self, readings: GaugeLog) -> None:
        self._states += [Conditions(at_s=at_s, charging=is_on) for at_s, is_on in readings.chargers]

    def states(self) -> Sequence[Conditions]:
        """When a charger came and went: what reads the gauge sees it between two looks at the phone's whole state."""
        return self._states

    def _interrupted(self) -> InterruptedWindowError:
        """With what was read before, and behind the break."""
        return InterruptedWindowError(f"battery: {'; '.join(self._broken)}", self._traces() if self._pieces else ())

    def _traces(self) -> Sequence[PowerTrace]:
        self._raw = tuple(joined_by_component(self._pieces))
        self._pieces.clear()
        [channel] = self.channels
        if self._calibration is None:
            return [energy_of(self._raw, channel)]
        return [power_of(self._raw, self._calibration, channel)]

    def raw_traces(self) -> Sequence[PowerTrace]:
        """The last window's readings, before sign and unit."""
        return self._raw

    def close(self) -> None:
        self._is_running = False
        if self._loop is not None:
            loop, self._loop = self._loop, None
            with suppress(DeviceError):
                loop.cancel()
