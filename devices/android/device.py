"""A phone as a device of the harness: its battery and its rails as meters, its state, its cores, programs on it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from devices.android.battery import BatteryMeter
from devices.android.gates import why_not_ready
from devices.android.perfetto_rails import RailMeter
from devices.android.processes import (
    WORK_FOLDER,
    PhoneProcess,
    ProcessResult,
    phone_cpu_seconds,
    start_process,
)
from devices.android.server import ServerAddress, server_address
from devices.android.shell import RECONNECT_S, Phone
from devices.android.simpleperf import PhoneCycles
from devices.android.state import PhoneFacts, PhoneState, parse_battery, read_facts, read_state, read_watched_state
from devices.android.topology import Topology, read_topology
from devices.base import Clock, DeviceError
from devices.conditions import host_environment
from devices.cpu_cycles import CpuCycles
from devices.device_lock import DeviceLock
from devices.gated_phone import GatedPhone, unit_of
from devices.gates import CountdownListener, Gates
from results.core_lists import core_words
from results.cpu_time import CpuSeconds
from results.environments import Conditions, Environment
from results.printable import with_colon

log = logging.getLogger(__name__)

MeterName = Literal["battery", "rails"]


def lock_of(phone: Phone, state_folder: Path, address: ServerAddress | None = None) -> DeviceLock:
    """Of a phone that was reached: it has a name by USB and another for each of its addresses in the network. One that
    says nothing of itself goes by its name, and each server knows its own phones."""
    name, unit = f"adb:{phone.serial}", unit_of(phone.own_serial())
    host, port = address or server_address()
    return DeviceLock(state_folder, name, f"{name} {host}:{port}" if unit is None else f"phone {unit}")


class AndroidDevice(GatedPhone[PhoneFacts]):
    """`adb:SERIAL`, `adb:HOST:PORT`, or `adb:` for the only phone. `facts` and `topology` are there once it is open."""

    def __init__(
        self,
        name: str,
        interval_s: float,
        clock: Clock,
        gates: Gates | None = None,
        on_wait: CountdownListener | None = None,
        address: ServerAddress | None = None,
        meter_names: Sequence[MeterName] = ("battery",),
        state_folder: Path | None = None,
    ) -> None:
        """state_folder: where the lock of each phone is; None: the phone is not locked."""
        super().__init__(name, interval_s, clock, gates, on_wait)
        self.phone = Phone(name, address)
        self._meter_names = tuple(meter_names)
        self._processes: list[PhoneProcess] = []
        self._cycles = PhoneCycles(self.phone)
        self.reconnect_s = RECONNECT_S
        """How long a trial waits for a phone or a server that went away, before it is one more that failed."""
        self._topology: Topology | None = None
        self._address = address
        self._state_folder = state_folder
        self._lock: DeviceLock | None = None

    def open(self) -> None:
        """Finds the phone, waits at the gates, and opens its meters. Raises `DeviceError`."""
        self.phone.reach()
        if self._state_folder is not None:
            self._lock = lock_of(self.phone, self._state_folder, self._address)
            self._lock.take()
        self._facts = read_facts(self.phone)
        try:
            self._topology = read_topology(self.phone)
        except ValueError as error:
            raise DeviceError(f"{with_colon(self.name)} {error}; is this an Android phone?") from error
        for cap in self._topology.caps:
            log.warning("%s: %s", self.name, cap)
        self.wait_until_ready()
        battery = self.state().battery
        if self._reads_battery and battery is not None and battery.powered_by:
            log.warning(
                "%s: %s is on line, though the battery discharges: joules leave out what it carries; trials are marked",
                self.name,
                " and ".join(battery.powered_by),
            )
        for name in self._meter_names:
            build = BatteryMeter if name == "battery" else RailMeter
            meter = build(self.phone, self._interval_s, self._clock)
            self.meters.append(meter)
            meter.open()

    @property
    def _reads_battery(self) -> bool:
        return "battery" in self._meter_names

    def await_link(self) -> None:
        """Also refuses another phone that has its address by now. Raises `DeviceError`."""
        self.phone.reach(self.reconnect_s)

    def why_not_ready(self) -> str | None:
        battery = parse_battery(self.phone.read("dumpsys battery") or "")
        return why_not_ready(battery, self._gates, self._reads_battery)

    @property
    def topology(self) -> Topology:
        if self._topology is None:
            raise DeviceError(f"{self.name} is not open; open it first")
        return self._topology

    def environment(self) -> Environment:
        """The phone; Python and packages are those of the host, which runs the harness."""
        facts, topology = self.facts, self.topology
        if facts.memory_bytes is None:
            raise DeviceError(f"{with_colon(self.name)} /proc/meminfo shows no MemTotal; is this an Android phone?")
        soc = facts.soc or topology.hardware or "SoC unknown"
        n_cores = topology.n_cores + len(topology.offline)
        build = facts.build and f"build {facts.build}"
        return host_environment().model_copy(
            update={
                "os": ", ".join(filter(None, (f"Android {facts.android}", build, facts.kernel))),
                "machine": facts.abi,
                "cpu_model": f"{facts.model}, {soc}: {topology}",
                "n_cores": n_cores,
                "n_threads": n_cores,
                "memory_bytes": facts.memory_bytes,
                "unit": unit_of(facts.serial),
            }
        )

    def state(self) -> PhoneState:
        """All that can be read of the phone's state now: also brightness, airplane mode, thermal status."""
        return read_state(self.phone)

    def conditions(self) -> Conditions:
        """The state in the harness' words. The temperature is the battery's: every phone has it, and it gates."""
        return self._in_words(self.state())

    def watched_state(self) -> Conditions:
        """What of it may change in a window. Raises `DeviceError`."""
        running = [process for process in self._processes if process.is_running]
        state = read_watched_state(self.phone)
        for process in running:
            if state.online and process.is_running:
                process.saw_online(state.online)
        return self._in_words(state)

    def _in_words(self, state: PhoneState) -> Conditions:
        at_s = self._clock.now_s()
        battery = state.battery
        return Conditions(
            at_s=at_s,
            load_average_1m=state.load_average_1m,
            cpu_frequency_mhz=state.cpu_frequency_mhz,
            temperature_c=battery.temperature_c if battery else None,
            battery_percent=battery.percent if battery else None,
            charging=battery.is_charging if battery else None,
            boot_id=state.boot_id,
            suspended_s=state.suspended_s,
            throttled=None if state.thermal_status is None else state.thermal_status > 0,
            thermal_status=state.thermal_status,
            frequency_caps=state.frequency_caps,
            cores_online=core_words(state.online) or None,
            screen_on=state.screen_on,
            screen_brightness=state.brightness,
            airplane_mode=state.airplane_mode,
        )

    def cpu_seconds(self) -> CpuSeconds | None:
        """Ours are the programs started here. What reads the battery counts as foreign, as it should."""
        return phone_cpu_seconds(self.phone, self._processes)

    def cpu_cycles(self) -> CpuCycles:
        """Of the programs started here that run: since the first call, from each call to the next.

        Raises `TransientDeviceError`.
        """
        return self._cycles.read([p.pid for p in self._processes if p.is_running])

    def push(self, local: Path, remote: str) -> None:
        self.phone.push(local, remote)

    def pull(self, remote: str, local: Path) -> None:
        self.phone.pull(remote, local)

    def start_program(
        self,
        arguments: Sequence[str],
        cores: Iterable[int] | None = None,
        folder: str = WORK_FOLDER,
        environment: Mapping[str, str] | None = None,
    ) -> PhoneProcess:
        """Starts a program, on the given cores only where some are given. Raises `DeviceError`."""
        process = start_process(self.phone, arguments, cores, folder, environment)
        self._processes.append(process)
        return process

    def run_program(
        self, arguments: Sequence[str], timeout_s: float, cores: Iterable[int] | None = None, folder: str = WORK_FOLDER
    ) -> ProcessResult:
        """Runs a program to its end. Raises `TransientDeviceError` at the limit, after killing it."""
        return self.start_program(arguments, cores, folder).wait(timeout_s)

    def close(self) -> None:
        for process in self._processes:
            if process.is_running:
                with suppress(DeviceError):  # of a phone that is gone, whose shell was hung up on
                    process.kill()
        self._processes.clear()
        self._cycles.close()
        super().close()
        if self._lock is not None:
            self._lock.release()
