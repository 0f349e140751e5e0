"""This machine, with the meters that the plan names or, for `auto`, the first that opens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from devices.base import Clock, DeviceError, Meter, MeterUnavailableError, Unit, sees_all_cpus
from devices.boundary import library_errors
from devices.conditions import cpu_throttle_events, host_conditions, host_environment, host_power
from devices.cpu_cycles import CpuCycles, CycleCounter
from devices.cpu_seconds import host_cpu_seconds, usable_cpus
from devices.nvidia_gpu import names_and_driver
from devices.peak_memory import PeakMemory, peak_memory, reset_peak_memory
from results.cpu_time import CpuSeconds
from results.environments import Conditions, Environment

log = logging.getLogger(__name__)

POWER_WATCH_S = 1.0
"""Between two looks at the power source of a machine with a battery, in a window."""
AUTO_ORDER = ("nvml", "rapl", "perf", "jetson", "zeus", "hwmon", "battery", "modelled")
"""A counter of what computes before one of more than that, and a model last: it always opens."""


def open_meter(name: str, meter: Meter) -> None:
    """Opens a meter of this machine. Raises `DeviceError`, whatever its files hold or its library makes of them."""
    with library_errors(name, "its reader", MeterUnavailableError):
        meter.open()


@runtime_checkable
class SeesThrottling(Protocol):
    """A meter that knows whether what it measures was slowed down in the last window, or is now."""

    def is_throttled(self) -> bool | None: ...


@runtime_checkable
class SeesGpus(Protocol):
    """A meter that knows how far its GPUs are limited, and who else has them open."""

    def power_limits(self) -> tuple[str, ...] | None: ...
    def others(self) -> tuple[str, ...] | None: ...


class Host:
    """Linux or macOS. `meters` holds those that opened."""

    def __init__(
        self,
        name: str,
        meter_names: Sequence[str],
        constructors: Mapping[str, Callable[[], Meter]],
        clock: Clock,
        computes: Unit = "cpu",
    ) -> None:
        """computes: the unit on which this host's engine runs. The energy of an idle GPU says nothing about a CPU."""
        self.name = name
        self.meters: list[Meter] = []
        self._meter_names = meter_names
        self._constructors = constructors
        self._clock = clock
        self._computes = computes
        self._throttle_events: int | None = None
        self._has_battery = False
        # Asked for before there is an engine: OpenMP may bind the thread that asks to a single CPU later.
        self._cpus = usable_cpus()
        self._cycles = CycleCounter()
        self._no_cycles: str | None = "CPU cycles: the host is not open"

    def open(self) -> None:
        """Opens the meters. A meter named in the plan must open; `auto` goes on to the next.

        A meter that is open already is not opened twice (`auto` beside the name of the first): its joules would be
        counted twice.
        """
        try:
            for wanted in self._meter_names:
                if wanted == "auto":
                    meter = self._first_that_opens()
                else:
                    meter = self._constructors[wanted]()
                    open_meter(wanted, meter)
                if meter.name in {m.name for m in self.meters}:
                    meter.close()
                else:
                    self.meters.append(meter)
        except DeviceError:
            self.close()
            raise
        self._throttle_events = cpu_throttle_events()
        self._has_battery = host_power(self._clock.now_s()).battery_percent is not None
        self._no_cycles = None
        try:
            self._cycles.open()
        except MeterUnavailableError as error:
            self._no_cycles = str(error)
            log.info("%s", error)

    def _first_that_opens(self) -> Meter:
        refusals = []
        for name in (n for n in AUTO_ORDER if n in self._constructors):
            meter = self._constructors[name]()
            try:
                open_meter(name, meter)
            except MeterUnavailableError as error:
                log.info("meter %s: %s", name, error)
                refusals.append(f"{name}: {error}")
                continue
            if any(channel.computes == self._computes for channel in meter.channels):
                return meter
            meter.close()
            seen = ", ".join(channel.component for channel in meter.channels)
            refusals.append(f"{name}: it sees {seen}, and the engine computes on the {self._computes}")
            log.info("meter %s", refusals[-1])
        raise DeviceError("no meter opens on this host: " + "; ".join(refusals))

    def environment(self) -> Environment:
        """With its GPUs, where the engine computes on one or a meter sees one."""
        found = host_environment()
        seen = {self._computes, *(channel.computes for meter in self.meters for channel in meter.channels)}
        if "gpu" not in seen:
            return found
        gpus, driver = names_and_driver()
        return found.model_copy(update={"gpus": gpus, "gpu_driver": driver})

    def conditions(self) -> Conditions:
        """The state now; throttled also where something was slowed down since the last look."""
        state = host_conditions(self._clock.now_s(), self._throttled())
        gpus = next((meter for meter in self.meters if isinstance(meter, SeesGpus)), None)
        if gpus is None:
            return state
        return state.model_copy(update={"gpu_limits": gpus.power_limits(), "gpu_others": gpus.others()})

    @property
    def watch_every_s(self) -> float | None:
        """None on a machine without a battery: its power source cannot change."""
        return POWER_WATCH_S if self._has_battery else None

    def watched_state(self) -> Conditions:
        return host_power(self._clock.now_s())

    def _throttled(self) -> bool | None:
        before, self._throttle_events = self._throttle_events, cpu_throttle_events()
        known: list[bool] = []
        if before is not None and self._throttle_events is not None:
            known.append(self._throttle_events > before)
        for meter in self.meters:
            if isinstance(meter, SeesThrottling) and (is_throttled := meter.is_throttled()) is not None:
                known.append(is_throttled)
        return any(known) if known else None

    def cpu_cycles(self) -> CpuCycles:
        """Of this process and its children since the host was opened, or why they are not known."""
        return CpuCycles(None, self._no_cycles) if self._no_cycles else self._cycles.read()

    def reset_peak_memory(self) -> PeakMemory | None:
        return reset_peak_memory()

    def peak_memory(self) -> PeakMemory:
        return peak_memory()

    def cpu_seconds(self) -> CpuSeconds | None:
        """Of the CPUs that this process might use when the host was made; also of all, where a meter sees them all."""
        return host_cpu_seconds(self._cpus, with_machine=any(map(sees_all_cpus, self.meters)))

    def close(self) -> None:
        for meter in self.meters:
            meter.close()
        self.meters.clear()
        self._cycles.close()
