"""A machine on virtual time whose idle and loaded power are known, with simulated meters, for the doctor to examine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from devices.base import Channel, Unit
from harness.doctor import examine
from harness.loads import RunningLoad
from results.cpu_time import CpuSeconds
from results.environments import Conditions
from results.records import Method, PowerTrace, TraceKind
from results.self_tests import SelfTest
from tests.fakes.machine import FakeDevice, FakeMachine
from tests.fakes.waveforms import StepPower, counter_trace, trace

IDLE_W, LOAD_W = 40.0, 200.0
SECONDS = 10.0
INTERVAL_S = 0.05


class Machine(FakeMachine):
    """Draws `watts` while time passes, and remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.watts = IDLE_W
        self.edges_s, self.history_w = [self.time_s - 5.0], [IDLE_W]

    def sleep_until_s(self, at_s: float) -> None:
        self.edges_s.append(self.time_s)
        self.history_w.append(self.watts)
        self.time_s = max(self.time_s, at_s)

    @property
    def power(self) -> StepPower:
        # As now, also a little later: a counter is read past the window.
        return StepPower(np.array([*self.edges_s, self.time_s + 5.0]), np.array(self.history_w))

    @contextmanager
    def load(self) -> Iterator[RunningLoad]:
        self.watts = LOAD_W
        yield RunningLoad("a load of 160 W", ("cpu",))
        self.watts = IDLE_W


class Meter:
    """A simulated instrument. gain: what it reads per watt; swing_w: added and taken in turns of 0.5 s."""

    def __init__(
        self,
        machine: Machine,
        kind: TraceKind = "power",
        update_s: float = 0.0,
        name: str = "meter",
        gain: float = 1.0,
        offset_w: float = 0.0,
        swing_w: float = 0.0,
        computes: Unit = "cpu",
        relative_accuracy: float = 0.0,
    ) -> None:
        self.name = name
        self.method: Method = "counter" if kind == "counter" else "integrated power"
        self.channels: tuple[Channel, ...] = (Channel("package", kind, update_s, computes=computes),)
        self._machine, self._kind, self._update_s = machine, kind, update_s
        self._gain, self._offset_w, self._swing_w = gain, offset_w, swing_w
        self._relative_accuracy = relative_accuracy
        self._start_s = 0.0

    def open(self) -> None:
        """Nothing to acquire."""

    def start(self) -> None:
        self._start_s = self._machine.now_s()

    def mark(self) -> None:
        """Not fresh."""

    def stop(self) -> Sequence[PowerTrace]:
        power, start_s, end_s = self._machine.power, self._start_s, self._machine.now_s()
        power = StepPower(power.edges_s, self._gain * power.watts + self._offset_w)
        # Off the grid of the stretches, as a real sampler's readings are.
        at_s = np.arange(start_s - 0.223, end_s + 0.3, INTERVAL_S)
        if self._kind == "counter":
            found = counter_trace(power, at_s, self._update_s, phase_s=0.03)
        else:
            in_turns = np.where(np.floor((at_s - start_s) / 0.5) % 2 == 0, 1.0, -1.0)
            found = trace("power", at_s, power.power_w(at_s) + self._swing_w * in_turns, INTERVAL_S)
        return [
            replace(
                found,
                meter=self.name,
                component="package",
                sample_interval_s=INTERVAL_S,
                relative_accuracy=self._relative_accuracy,
            )
        ]

    def close(self) -> None:
        """Nothing was acquired."""


class Device(FakeDevice):
    def __init__(self, machine: Machine, *meters: Meter) -> None:
        super().__init__(machine, meters)  # type: ignore[arg-type]
        self.busy_cores, self.own_cores = 0.0, 0.004
        self.temperature_c: float | None = 50.0
        self.more_conditions: dict[str, object] = {}

    def cpu_seconds(self) -> CpuSeconds | None:
        t = self._machine.time_s
        return CpuSeconds(busy_s=(self.busy_cores + self.own_cores) * t, ours_s=self.own_cores * t, available_s=2 * t)

    def conditions(self) -> Conditions:
        return super().conditions().model_copy(update={"temperature_c": self.temperature_c, **self.more_conditions})


def examined(device: Device, refusals: dict[str, str] | None = None) -> SelfTest:
    machine = device._machine
    assert isinstance(machine, Machine)
    return examine(device, machine, machine.load, SECONDS, refusals or {}, INTERVAL_S, lambda stage: None)
