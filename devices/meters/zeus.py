"""Zeus: counters of Apple Silicon, AMD and NVIDIA GPUs and of RAPL, whichever it finds on this machine.

Zeus counts in mJ everywhere. It answers "no such device" by an error of its own and, for single figures, by None: both
mean "no meter", never 0 J. Its GPU counters tick about every 100 ms, like NVML's. Where it does not trust an AMD
counter (some err tenfold), or a GPU has none, its power readings are integrated instead.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from devices.base import Channel, Clock, DeviceError, GoneError, MeterUnavailableError, TransientDeviceError
from devices.boundary import library_errors
from devices.meters.losable import LosableMeter
from devices.meters.nvml import RELATIVE_ACCURACY
from devices.meters.polled import METHODS
from devices.meters.rapl import MAX_POWER_W, UNSTATED_GAIN, max_power_w_of
from devices.nvidia_gpu import AVERAGED_S, MAX_GPU_POWER_W, uuid_of
from devices.nvidia_gpu import max_power_w_of as max_gpu_power_w_of
from devices.rapl_packages import repeated_zones
from results.records import Method

J_PER_MJ = W_PER_MW = 1e-3
GPU_TICK_S = 0.1
SOC_TICK_S = 0.05
RAPL_TICK_S = 1e-3
MAX_SOC_POWER_W = 1e3
"""Of a whole chip: several times what the largest draws."""
_SOC_PARTS = {"cpu_total_mj": "cpu", "cpu_energy_mj": "cpu", "gpu_energy_mj": "gpu"}
"""Zeus' names of what we call by one name; other fields only lose their unit."""
_SOC_WHOLE = "total_energy_mj"
"""Jetson: the whole board, its parts included."""
_APPLE_ADDITIVE = ("cpu_total_mj", "dram_mj", "gpu_mj", "ane_mj")
"""The parts of Apple's chip; the other figures (clusters, their managers, gpu_sram) lie inside one of them."""

log = logging.getLogger(__name__)


class _Source(NamedTuple):
    """Figures that one call of Zeus gives together, and their channels, in the same order."""

    read: Callable[[], Sequence[float | None]]
    """In mJ (counter) or mW (power)."""
    channels: tuple[Channel, ...]


class ZeusMeter(LosableMeter):
    """Everything Zeus can count on this host."""

    name = "zeus"

    def __init__(self, interval_s: float, clock: Clock) -> None:
        super().__init__(interval_s, clock)
        self.method: Method = "counter"
        self._sources: Sequence[_Source] = ()

    def open(self) -> None:
        self._sources, missing = _found(fresh=False)
        self.channels = _channels(self._sources)
        if not self.channels:
            raise MeterUnavailableError("Zeus finds no counter here: " + "; ".join(missing))
        for reason in missing:
            log.info("Zeus: %s", reason)
        self.method = next((METHODS[c.kind] for c in self.channels if c.additive), "counter")
        self._is_lost = self._are_handles_old = False

    def reopen(self) -> None:
        """All of it must be there again, or totals differ."""
        sources, missing = _found(fresh=True)
        channels = _channels(sources)
        if [replace(c, hardware_id=None) for c in channels] != [replace(c, hardware_id=None) for c in self.channels]:
            raise MeterUnavailableError(
                f"Zeus: {_named(self.channels)} were measured, and now {_named(channels)} are there:"
                f" {'; '.join(missing)}"
            )
        for old, new in zip(self.channels, channels, strict=True):
            if old.hardware_id != new.hardware_id:
                raise MeterUnavailableError(
                    f"Zeus: {old.component} was {old.hardware_id} and is now {new.hardware_id}; totals would not be of"
                    " the same GPUs"
                )
        self._read(sources)
        self._sources = sources

    def method_of(self, channel: Channel) -> Method:
        return METHODS[channel.kind]

    def read_now(self) -> Sequence[float]:
        return self._read(self._sources)

    def _read(self, sources: Sequence[_Source]) -> Sequence[float]:
        with zeus_errors(TransientDeviceError, "Zeus: a counter could not be read; was the device lost? "):
            values = [value for source in sources for value in source.read()]
        lost = [c.component for c, v in zip(self.channels, values, strict=True) if v is None]
        if lost:
            raise GoneError(f"Zeus: {', '.join(lost)} stopped answering; None is not 0 J")
        return [v * J_PER_MJ for v in values if v is not None]


@contextmanager
def zeus_errors(error_type: type[DeviceError], words: str) -> Iterator[None]:
    """Raises `error_type` for whatever Zeus and the libraries behind it raise. words: before what they say."""
    with library_errors(words.rstrip(": "), "its library", error_type):
        from zeus.exception import ZeusBaseError

        try:
            yield
        except ZeusBaseError as error:
            raise error_type(f"{words}{error}") from error


def _found(fresh: bool) -> tuple[Sequence[_Source], list[str]]:
    """(what Zeus reads, what was not found and why). fresh: with new handles."""
    sources: list[_Source] = []
    missing = []
    for name, probe in (("SoC", _soc_sources), ("GPU", partial(_gpu_sources, fresh=fresh)), ("CPU", _cpu_sources)):
        try:
            with zeus_errors(MeterUnavailableError, f"{name}: "):
                sources += probe()
        except MeterUnavailableError as error:
            missing.append(str(error))
    return sources, missing


def _channels(sources: Sequence[_Source]) -> tuple[Channel, ...]:
    return tuple(channel for source in sources for channel in source.channels)


def _named(channels: Sequence[Channel]) -> str:
    return ", ".join(channel.component for channel in channels) or "nothing"


def _soc_sources() -> list[_Source]:
    """Apple Silicon and Jetson. Raises Zeus' error where the machine is neither."""
    from zeus.device import get_soc

    soc = get_soc()
    by_field = soc_channels(asdict(soc.get_total_energy_consumption()))

    def read() -> list[float | None]:
        now_mj = asdict(soc.get_total_energy_consumption())
        return [now_mj[field] for field in by_field]

    return [_Source(read, tuple(by_field.values()))]


def _gpu_sources(fresh: bool) -> list[_Source]:
    """Counters and power are not added up: where one GPU does not count, all are read by their power.

    fresh: with new handles; Zeus keeps those of GPUs that were lost.
    """
    from zeus.device import get_gpus
    from zeus.device.gpu import NVIDIAGPUs

    _refuse_names()
    gpus = get_gpus()
    if fresh:
        gpus = type(gpus)()
    calls = [_supported(gpus, i, gpus.get_total_energy_consumption) for i in range(len(gpus))]
    kind: Literal["counter", "power"] = "counter"
    averaged: set[int] = set()
    if None in calls:
        kind = "power"
        calls = [_supported(gpus, i, gpus.get_instant_power_usage) for i in range(len(gpus))]
        averaged = {i for i, call in enumerate(calls) if call is None}
        calls = [call or _supported(gpus, i, gpus.get_average_power_usage) for i, call in enumerate(calls)]
    is_nvidia = isinstance(gpus, NVIDIAGPUs)
    if is_nvidia:
        _refuse_doubtful_order()
    sources = []
    for i, call in enumerate(calls):
        if call is None:
            log.warning("Zeus: GPU %d shows neither energy nor power by itself and is left out", i)
            continue
        channel = Channel(
            f"gpu{i}",
            kind,
            GPU_TICK_S,
            J_PER_MJ if kind == "counter" else W_PER_MW,
            relative_accuracy=RELATIVE_ACCURACY if is_nvidia else 0.0,
            max_power_w=max_gpu_power_w_of(gpus.gpus[i].handle) if is_nvidia else MAX_GPU_POWER_W,
            note=None if is_nvidia else UNSTATED_GAIN,
            computes="gpu",
            hardware_id=uuid_of(gpus.gpus[i].handle) if is_nvidia else None,
            # AMD does not say of how long a time its average is.
            averaged_s=AVERAGED_S if is_nvidia and i in averaged else None,
        )
        sources.append(_Source(call, (channel,)))
    return sources


def _refuse_names() -> None:
    """Zeus takes numbers alone. Raises `MeterUnavailableError` for what CUDA also takes, with the remedy.

    A number that stands there twice would be counted twice.
    """
    for variable in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        names = os.environ.get(variable, "").split(",")
        if any(names) and not all(name.strip().isdigit() for name in names):
            raise MeterUnavailableError(
                f"GPU: {variable}={os.environ[variable][:80]} names GPUs, and Zeus takes their numbers alone (such as"
                f" {variable}=0,1, with CUDA_DEVICE_ORDER=PCI_BUS_ID); or measure with nvml, which reads all GPUs"
            )
        if any(names) and len({int(name) for name in names}) < len(names):
            raise MeterUnavailableError(
                f"GPU: {variable}={os.environ[variable][:80]} names a GPU twice: Zeus would count it twice, and"
                " programs see none of them; name each once"
            )


def _refuse_doubtful_order() -> None:
    """Raises `MeterUnavailableError` where CUDA's numbers may be those of other GPUs than NVML's, which Zeus reads.

    CUDA counts from the fastest GPU, unless it is told to count as NVML does, in the order of the bus.
    """
    import pynvml

    asked = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    n_gpus = pynvml.nvmlDeviceGetCount()
    if not asked or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len(asked.split(",")) == n_gpus:
        return
    models = {str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i))) for i in range(n_gpus)}
    if len(models) > 1:
        raise MeterUnavailableError(
            f"GPU: CUDA_VISIBLE_DEVICES={asked[:80]} counts from the fastest GPU, and Zeus in the order of the bus:"
            f" with {' and '.join(sorted(models))} here its joules may be of another GPU than the one that computes;"
            " set CUDA_DEVICE_ORDER=PCI_BUS_ID, which makes both count alike, or measure with nvml, which reads all"
        )


def _supported(gpus: Any, index: int, getter: Callable[[int], float]) -> Callable[[], Sequence[float]] | None:
    """The getter, where this GPU offers it (the second chiplet of an MI250 offers none)."""
    from zeus.device.gpu import ZeusGPUNotSupportedError

    try:
        getter(index)
    except ZeusGPUNotSupportedError as error:
        log.info("Zeus: GPU %d of %d: %s", index, len(gpus), error)
        return None
    return lambda: [getter(index)]


def _cpu_sources() -> list[_Source]:
    """RAPL. Zeus lists every top zone as a CPU, also the platform's (psys), which contains the packages."""
    from zeus.device import get_cpus

    cpus = get_cpus()
    zones = [cpu.rapl_file.name if hasattr(cpu, "rapl_file") else "package" for cpu in cpus.cpus]
    sources = []
    for i, (cpu, zone, is_repeated) in enumerate(zip(cpus.cpus, zones, repeated_zones(zones), strict=True)):
        if is_repeated:
            continue
        limit_w = max_power_w_of(Path(cpu.rapl_file.path)) if hasattr(cpu, "rapl_file") else MAX_POWER_W
        counter = Channel(
            f"cpu{i}", "counter", RAPL_TICK_S, J_PER_MJ, max_power_w=limit_w, note=f"{zone}; {UNSTATED_GAIN}"
        )
        by_field = {
            "cpu_mj": replace(counter, additive=zone.startswith("package")),
            "dram_mj": replace(counter, component=f"dram{i}", max_power_w=MAX_POWER_W, note=UNSTATED_GAIN),
        }
        first = cpus.get_total_energy_consumption(i)
        fields = [field for field in by_field if getattr(first, field) is not None]

        def read(i: int = i, fields: Sequence[str] = tuple(fields)) -> list[float | None]:
            now = cpus.get_total_energy_consumption(i)
            return [getattr(now, field) for field in fields]

        sources.append(_Source(read, tuple(by_field[field] for field in fields)))
    return sources


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
            can_rest=field.startswith(("ane", "gpu")),
            max_power_w=MAX_SOC_POWER_W,
            note=UNSTATED_GAIN,
            computes="npu" if field.startswith("ane") else "gpu" if field.startswith("gpu") else "cpu",
        )
        for field in fields
    }
