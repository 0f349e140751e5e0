"""Zeus: counters of Apple Silicon, AMD and NVIDIA GPUs and of RAPL, whichever it finds on this machine.

Zeus counts in mJ everywhere. It answers "no such device" by an error of its own and, for single figures, by None: both
mean "no meter", never 0 J. Its GPU counters tick about every 100 ms, like NVML's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

from devices.base import Channel, Clock, DeviceError, MeterUnavailableError
from devices.meters.polled import PolledMeter

J_PER_MJ = 1e-3
GPU_TICK_S = 0.1
SOC_TICK_S = 0.05
RAPL_TICK_S = 1e-3
_INSIDE_ANOTHER = ("gpu_sram",)
"""Apple's figures that another contains."""


class ZeusMeter(PolledMeter):
    """Everything Zeus can count on this host."""

    name = "zeus"
    method = "counter"

    def __init__(self, interval_s: float, clock: Clock) -> None:
        super().__init__(interval_s, clock)
        self._counters: list[Callable[[], float | None]] = []

    def open(self) -> None:
        from zeus.exception import ZeusBaseError

        missing = []
        for probe in (self._open_soc, self._open_gpus, self._open_cpus):
            try:
                probe()
            except ZeusBaseError as error:
                missing.append(str(error))
        if not self._counters:
            raise MeterUnavailableError("Zeus finds no counter here: " + "; ".join(missing))

    def _add(self, channel: Channel, counter_mj: Callable[[], float | None]) -> None:
        """A counter that answers None now is not there."""
        if counter_mj() is not None:
            self.channels = (*self.channels, channel)
            self._counters.append(counter_mj)

    def _open_soc(self) -> None:
        from zeus.device import get_soc

        soc = get_soc()

        def counter(field: str) -> Callable[[], float | None]:
            return lambda: asdict(soc.get_total_energy_consumption())[field]

        for field, value in asdict(soc.get_total_energy_consumption()).items():
            if field.endswith("_mj") and isinstance(value, int | float):
                component = field.removesuffix("_total_mj").removesuffix("_mj")
                additive = component not in _INSIDE_ANOTHER
                self._add(Channel(component, "counter", SOC_TICK_S, J_PER_MJ, additive=additive), counter(field))

    def _open_gpus(self) -> None:
        from zeus.device import get_gpus

        gpus = get_gpus()

        def counter(index: int) -> Callable[[], float | None]:
            return lambda: gpus.get_total_energy_consumption(index)

        for i in range(len(gpus)):
            self._add(Channel(f"gpu{i}", "counter", GPU_TICK_S, J_PER_MJ), counter(i))

    def _open_cpus(self) -> None:
        from zeus.device import get_cpus

        cpus = get_cpus()

        def counter(index: int, field: str) -> Callable[[], float | None]:
            return lambda: getattr(cpus.get_total_energy_consumption(index), field)

        for i in range(len(cpus.cpus)):
            self._add(Channel(f"cpu{i}", "counter", RAPL_TICK_S, J_PER_MJ), counter(i, "cpu_mj"))
            self._add(Channel(f"dram{i}", "counter", RAPL_TICK_S, J_PER_MJ), counter(i, "dram_mj"))

    def read(self) -> Sequence[float]:
        from zeus.exception import ZeusBaseError

        try:
            values_mj = [counter() for counter in self._counters]
        except ZeusBaseError as error:
            raise DeviceError(f"Zeus: a counter could not be read ({error})") from error
        lost = [c.component for c, v in zip(self.channels, values_mj, strict=True) if v is None]
        if lost:
            raise DeviceError(f"Zeus: {', '.join(lost)} stopped answering; None is not 0 J")
        return [v * J_PER_MJ for v in values_mj if v is not None]
