"""An iPhone as a device of the harness: its battery and its energy gauge as meters, its state, apps started on it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from devices.base import Clock, DeviceError, Meter
from devices.conditions import host_environment
from devices.device_lock import DeviceLock
from devices.gated_phone import GatedPhone, unit_of
from devices.gates import CountdownListener, Gates, Lasting, too_hot_or_empty
from devices.ios.app_console import AppRun, run_app
from devices.ios.battery import RECONNECT_S, BatteryMeter
from devices.ios.energy_gauge import EnergyGaugeMeter
from devices.ios.phone import Phone
from devices.ios.state import BatteryState, PhoneFacts, told_state
from devices.ios.tunneld import TUNNELD, TunneldAddress
from results.cpu_time import CpuSeconds
from results.environments import Conditions, Environment
from results.printable import with_colon

log = logging.getLogger(__name__)

MeterName = Literal["battery", "energy gauge"]


def why_not_ready(battery: BatteryState | None, gates: Gates, reads_battery: bool) -> str | None:
    """What keeps the phone from being measured, with the remedy; None where nothing does.

    reads_battery: whether joules come from the battery. The energy gauge does not mind a cable.
    """
    if battery is None:
        return Lasting("it shows no battery; is it an iPhone or an iPad?")
    if reads_battery and battery.is_charging is None:
        return Lasting(
            "it does not say whether it charges, and a charger would hide the load from the battery's gauge; take it"
            " off every cable and charging pad, and restart it"
        )
    if reads_battery and battery.is_charging:
        return (
            "a charger carries the load, and the battery's gauge does not see it; take it off every cable and charging"
            " pad, and reach it over Wi-Fi (tunneld finds it there)"
        )
    if reads_battery and battery.current_a is not None and battery.current_a >= 0:
        return (
            f"its battery tells {battery.current_a * 1e3:+.4g} mA, not a negative one: its gauge has"
            " shown nothing new since the charger went (up to a minute), or a charging pad or battery case is on it"
        )
    return too_hot_or_empty(battery.temperature_c, battery.percent, gates, battery.is_charging)


def lock_of(phone: Phone, state_folder: Path) -> DeviceLock:
    """Of a phone that was reached."""
    return DeviceLock(state_folder, f"ios:{phone.udid}")


class IosDevice(GatedPhone[PhoneFacts]):
    """`ios:UDID`, or `ios:` for the only phone. `facts` are there once it is open."""

    def __init__(
        self,
        name: str,
        interval_s: float,
        clock: Clock,
        gates: Gates | None = None,
        on_wait: CountdownListener | None = None,
        app: str | None = None,
        meter_names: Sequence[MeterName] = ("battery",),
        tunneld: TunneldAddress = TUNNELD,
        state_folder: Path | None = None,
    ) -> None:
        """app: whose energy the gauge follows. state_folder: where its lock is; None: it is not locked."""
        if "energy gauge" in meter_names and app is None:
            raise DeviceError(f"{with_colon(name)} the energy gauge follows one app; name it by its bundle identifier")
        super().__init__(name, interval_s, clock, gates, on_wait)
        self.phone = Phone(name, tunneld)
        if "battery" in meter_names:
            self.watch_every_s = None  # it sees the state with every reading
        self._app = app
        self._meter_names = tuple(meter_names)
        self._state_folder = state_folder
        self._lock: DeviceLock | None = None
        self._left_running: set[str] = set()
        """Apps whose link broke while they ran: they still draw power."""

    def open(self) -> None:
        """Finds the phone, waits at the gates, starts the app where it does not run, and opens the meters.

        Raises `DeviceError`.
        """
        self.phone.reach()
        if self._state_folder is not None:
            self._lock = lock_of(self.phone, self._state_folder)
            self._lock.take()
        self._facts = self.phone.facts()
        log.info("%s: %s, %s, through %s", self.name, self._facts.model, self._facts.os, self.phone.way)
        self.wait_until_ready()
        if self._app is not None and self.phone.find_process(self._app) is None:
            self.phone.launch(self._app)
        for name in self._meter_names:
            meter = self._build_meter(name)
            self.meters.append(meter)
            meter.open()

    def _build_meter(self, name: MeterName) -> Meter:
        if name == "battery":
            return BatteryMeter(self.phone, self._interval_s, self._clock)
        assert self._app is not None
        return EnergyGaugeMeter(self.phone, self._app, self._interval_s, self._clock)

    def await_link(self) -> None:
        self.phone.reach(RECONNECT_S)

    def _wait_at_gates(self) -> None:
        for app in [*self._left_running]:
            self.phone.end(app)
            self._left_running.discard(app)
        super()._wait_at_gates()

    def why_not_ready(self) -> str | None:
        return why_not_ready(self.phone.battery(), self._gates, "battery" in self._meter_names)

    def environment(self) -> Environment:
        """The phone; Python and packages are those of the host, which runs the harness."""
        facts = self.facts
        return host_environment().model_copy(
            update={
                "os": facts.os,
                "machine": facts.architecture or "arm64",
                "cpu_model": facts.model,
                "n_cores": facts.n_cores,
                "n_threads": facts.n_cores,
                # No service tells it.
                "memory_bytes": None,
                "unit": unit_of(facts.udid),
            }
        )

    def conditions(self) -> Conditions:
        """The temperature is the battery's. Neither the clock of the cores nor throttling is told."""
        at_s = self._clock.now_s()
        return told_state(at_s, self.phone.battery())

    def watched_state(self) -> Conditions:
        """Where the battery is not the meter: the gauge of an app does not see it."""
        return self.conditions()

    def cpu_seconds(self) -> CpuSeconds | None:
        """Not read: the instruments' own sampling would load the phone."""
        return None

    def run_app(self, app: str, arguments: Sequence[str], last_words: Sequence[str], limit_s: float) -> AppRun:
        """Starts an installed app anew, reads its console until it says one of the last words, and ends it.

        Raises `TransientDeviceError` where it does not say any in time, or is gone before; the app is ended then too.
        """
        self._left_running.add(app)
        ran = run_app(self.phone, app, arguments, last_words, limit_s, self._clock)
        self._left_running.discard(app)
        return ran

    def close(self) -> None:
        super().close()
        self.phone.close()
        if self._lock is not None:
            self._lock.release()
