"""Zeus: counters of Apple Silicon, AMD and NVIDIA GPUs and of RAPL, whichever it finds on this machine.

Zeus counts in mJ everywhere. It answers "no such device" by an error of its own and, for single figures, by None: both
mean "no meter", never 0 J. Its GPU counters tick about every 100 ms, like NVML's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from devices.base import Channel, Clock, DeviceError, MeterUnavailableError
from devices.meters.polled import PolledMeter

J_PER_MJ = 1e-3
GPU_TICK_S = 0.1
SOC_TICK_S = 0.05
RAPL_TICK_S = 1e-3
_SOC_PARTS = {"cpu_total_mj": "cpu", "cpu_energy_mj": "cpu", "gpu_energy_mj": "gpu"}
"""Zeus' names of what we call by one name; other fields only lose their unit."""
_SOC_WHOLE = "total_energy_mj"
"""Jetson: the whole board, its parts included."""
_APPLE_ADDITIVE = ("cpu_total_mj", "dram_mj", "gpu_mj", "ane_mj")
"""The parts of Apple's chip; the other figures (clusters, their managers, gpu_sram) lie inside one of them."""


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

        for field, channel in soc_channels(asdict(soc.get_total_energy_consumption())).items():
            self._add(channel, counter(field))

    def _open_gpus(self) -> None:
        from zeus.device import get_gpus

        gpus = get_gpus()

        def counter(index: int) -> Callable[[], float | None]:
            return lambda: gpus.get_total_energy_consumption(index)

        for i in range(len(gpus)):
            self._add(Channel(f"gpu{i}", "counter", GPU_TICK_S, J_PER_MJ, computes="gpu"), counter(i))

    def _open_cpus(self) -> None:
        from zeus.device import get_cpus

        cpus = get_cpus()

        def counter(index: int, field: str) -> Callable[[], float | None]:
            return lambda: getattr(cpus.get_total_energy_consumption(index), field)

        for i, cpu in enumerate(cpus.cpus):
            # Zeus lists every top zone as a CPU, also the platform's (psys), which contains the packages.
            zone = cpu.rapl_file.name if hasattr(cpu, "rapl_file") else "package"
            channel = Channel(
                f"cpu{i}", "counter", RAPL_TICK_S, J_PER_MJ, additive=zone.startswith("package"), note=zone
            )
            self._add(channel, counter(i, "cpu_mj"))
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


def soc_channels(energy_mj: Mapping[str, object]) -> dict[str, Channel]:
    """Field -> channel of a system on chip's single figures (lists are per core, None is absent)."""
    fields = [f for f, value in energy_mj.items() if f.endswith("_mj") and isinstance(value, int | float)]
    additive = (_SOC_WHOLE,) if _SOC_WHOLE in fields else (*_APPLE_ADDITIVE, *_SOC_PARTS)
    return {
        field: Channel(
            _SOC_PARTS.get(field, field.removesuffix("_mj")),
            "counter",
            SOC_TICK_S,
            J_PER_MJ,
            additive=field in additive,
            computes="npu" if field.startswith("ane") else "gpu" if field.startswith("gpu") else "cpu",
        )
        for field in fields
    }
