"""NVIDIA's own energy counter, read through NVML without Zeus in between, and its power sensor beside it.

The counter (mJ since the driver was loaded, Volta and later) ticks about every 100 ms: a window of ten ticks is the
shortest that counts. Power samples are taken with every reading of it, as components `gpuN power`: where they disagree
with the counter, the note of the trace says so. GPUs without the counter give power samples alone.

All GPUs of the host are read, whatever CUDA_VISIBLE_DEVICES says: another job's energy on a shared machine is in the
total, and each GPU is also a component. A GPU that MIG splits counts for all its instances together: no joule of it
belongs to one of them, and it is refused.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from devices.base import Channel, Clock, DeviceError, MeterUnavailableError, TransientDeviceError
from devices.gpu_programs import programs_of_others
from devices.meters.cross_check import compare
from devices.meters.losable import LosableMeter
from devices.meters.polled import METHODS, Array
from devices.nvidia_gpu import J_PER_MJ, W_PER_MW, NvidiaGpu, nvml_errors
from devices.nvidia_throttle import is_slowed, reasons_of, summary
from results.records import Method, PowerTrace
from results.rest import POWER_BESIDE

TICK_S = 0.1
"""Of the energy counter."""
RELATIVE_ACCURACY = 0.05 / math.sqrt(3)
"""NVIDIA states a power reading to within 5 % (manual of nvmlDeviceGetPowerUsage): uniform, as one sigma."""

log = logging.getLogger(__name__)


class NvmlMeter(LosableMeter):
    """All NVIDIA GPUs of the host: `gpuN`, and `gpuN power` where there is a counter to be checked."""

    name = "nvml"

    def __init__(self, interval_s: float, clock: Clock) -> None:
        super().__init__(interval_s, clock)
        self.method: Method = "counter"
        self._gpus: Sequence[NvidiaGpu] = ()
        self._is_initialised = False
        self._reasons_seen: frozenset[str] = frozenset()

    def open(self) -> None:
        try:
            self._gpus = self._connected()
            counts = all(gpu.has_counter for gpu in self._gpus)
            self.method = "counter" if counts else "integrated power"
            self.channels = _channels(self._gpus)
            self.read_now()
        except DeviceError as error:
            self.close()
            raise MeterUnavailableError(str(error)) from error
        self._is_lost = self._are_handles_old = False

    def reopen(self) -> None:
        """All that was there before must be there again, under the same numbers."""
        self._shut_down()
        try:
            gpus = self._connected()
            self._refuse_others(gpus)
            self._read(gpus)
        except DeviceError as error:
            raise MeterUnavailableError(str(error)) from error
        self._gpus = gpus

    def _connected(self) -> Sequence[NvidiaGpu]:
        """All GPUs, each of which can be measured."""
        with nvml_errors(MeterUnavailableError, "; is an NVIDIA GPU with its driver here?"):
            import pynvml

            pynvml.nvmlInit()
            self._is_initialised = True
            gpus = [NvidiaGpu(i) for i in range(pynvml.nvmlDeviceGetCount())]
            _refuse_split(gpus)
            _refuse_silent(gpus)
            return gpus

    def _refuse_others(self, gpus: Sequence[NvidiaGpu]) -> None:
        before, now = (", ".join(c.component for c in found) for found in (self.channels, _channels(gpus)))
        remedy = "totals would not be of the same GPUs. See nvidia-smi -L and the kernel's log (Xid)"
        if now != before:
            raise MeterUnavailableError(f"NVML: {before} were measured, and now {now} are there; {remedy}")
        for old, new in zip(self._gpus, gpus, strict=True):
            if old.uuid != new.uuid:
                raise MeterUnavailableError(f"NVML: GPU {old.index} was {old.uuid} and is now {new.uuid}; {remedy}")

    def method_of(self, channel: Channel) -> Method:
        return METHODS[channel.kind]

    def start(self) -> None:
        self._reasons_seen = frozenset()
        super().start()

    def read_now(self) -> Sequence[float]:
        """One value a channel, then a mask of clock event reasons a GPU (nan where it cannot be read)."""
        return self._read(self._gpus)

    def _read(self, gpus: Sequence[NvidiaGpu]) -> Sequence[float]:
        with nvml_errors(
            TransientDeviceError,
            ": a GPU could not be read; was it lost or reset? See nvidia-smi and the kernel's log (Xid)",
        ):
            values = [value for gpu in gpus for value in self._values(gpu)]
            return values + [gpu.event_reasons() for gpu in gpus]

    def _values(self, gpu: NvidiaGpu) -> list[float]:
        import pynvml

        if self.method != "counter":
            return [gpu.power_w()]
        energy_j = gpu.energy_j()
        if not gpu.has_power:
            return [energy_j]
        try:
            return [energy_j, gpu.power_w()]
        except pynvml.NVMLError:
            # The counter answered: only the check beside it is missing, and its energy gets a reason.
            return [energy_j, math.nan]

    def traces(self, times_s: Array, values: Array) -> Sequence[PowerTrace]:
        """With notes: what slowed a GPU, and whether its power samples agree with its counter."""
        found = {t.component: t for t in super().traces(times_s, values)}
        # Closer readings, before the window, would count more than their time.
        _, first = np.unique(np.floor(times_s / self._interval_s), return_index=True)
        for gpu, masks in zip(self._gpus, values[first, len(self.channels) :].T, strict=True):
            component = f"gpu{gpu.index}"
            seen = (reasons_of(int(m)) for m in masks if not math.isnan(m))
            self._reasons_seen = self._reasons_seen.union(*seen)
            notes = [summary(masks)]
            beside = found.get(component + POWER_BESIDE)
            if beside is not None:
                comparison = compare(found[component], beside)
                notes.append(str(comparison))
                if comparison.disagrees:
                    log.warning("NVML: %s", comparison)
            found[component] = replace(found[component], note="; ".join(notes))
        return list(found.values())

    def is_throttled(self) -> bool | None:
        """Whether heat or a fault slowed a GPU in the last window or does so now; None where none of them tells.

        A GPU at its power cap runs as its owner set it: that stands in the note, and taints no trial.
        """
        masks: list[float] = []
        with suppress(DeviceError), nvml_errors(DeviceError, ""):
            masks = [mask for gpu in self._gpus if not math.isnan(mask := gpu.event_reasons())]
        if not masks:
            return None
        return is_slowed(self._reasons_seen.union(*(reasons_of(int(m)) for m in masks)))

    def power_limits(self) -> tuple[str, ...] | None:
        """Of each GPU, in words; None where one cannot be read."""
        limits_w: dict[int, float | None] = {}
        with suppress(DeviceError), nvml_errors(DeviceError, ""):
            limits_w = {gpu.index: gpu.power_limit_w() for gpu in self._gpus}
        known = tuple(f"gpu{i}: {limit_w:g} W" for i, limit_w in limits_w.items() if limit_w is not None)
        return known if known and len(known) == len(self._gpus) else None

    def others(self) -> tuple[str, ...] | None:
        """Programs besides ours on the GPUs, in words; None where it cannot be told."""
        found: dict[int, frozenset[int] | None] = {}
        with suppress(DeviceError), nvml_errors(DeviceError, ""):
            found = {gpu.index: gpu.process_ids() for gpu in self._gpus}
        known = {index: process_ids for index, process_ids in found.items() if process_ids is not None}
        return programs_of_others(known) if known else None

    def close(self) -> None:
        super().close()
        self._gpus = ()
        self._shut_down()

    def _shut_down(self) -> None:
        if self._is_initialised:
            import pynvml

            self._is_initialised = False
            # Of a driver that went away there is nothing left to shut down.
            with suppress(DeviceError), nvml_errors(DeviceError, ""):
                pynvml.nvmlShutdown()


def _refuse_split(gpus: Sequence[NvidiaGpu]) -> None:
    if not gpus:
        raise MeterUnavailableError("NVML: the driver is loaded but lists no GPU")
    split = [gpu.index for gpu in gpus if gpu.is_split()]
    if split:
        raise MeterUnavailableError(
            f"NVML: GPU {', '.join(map(str, split))} is split by MIG, and its counter is of all instances together:"
            f" no joule of it belongs to one of them; end MIG (sudo nvidia-smi -i {split[0]} -mig 0), or measure on"
            " a GPU that is not split"
        )


def _refuse_silent(gpus: Sequence[NvidiaGpu]) -> None:
    silent = [gpu.index for gpu in gpus if not gpu.has_counter and not gpu.has_power]
    if silent:
        raise MeterUnavailableError(
            f"NVML: GPU {silent[0]}: energy and power are both Not Supported by it or its driver"
            " (a Jetson has no NVML power: its rails are in sysfs)"
        )


def _channels(gpus: Sequence[NvidiaGpu]) -> tuple[Channel, ...]:
    """Counters with power beside them. Where one GPU does not count, power of all: methods are not added up."""
    counts = all(gpu.has_counter for gpu in gpus)
    return tuple(channel for gpu in gpus for channel in _channels_of(gpu, counts))


def _channels_of(gpu: NvidiaGpu, counts: bool) -> list[Channel]:
    """In the order in which `read` gives their values."""
    counter = Channel(
        f"gpu{gpu.index}",
        "counter",
        TICK_S,
        J_PER_MJ,
        relative_accuracy=RELATIVE_ACCURACY,
        max_power_w=gpu.max_power_w,
        computes="gpu",
        hardware_id=gpu.uuid,
    )
    if counts and not gpu.has_power:
        return [counter]
    period_s, averaged_s = gpu.power_period_s, gpu.power_averaged_s
    power = replace(counter, kind="power", update_period_s=period_s, averaged_s=averaged_s, resolution=W_PER_MW)
    if not counts:
        return [power]
    return [counter, replace(power, component=f"gpu{gpu.index}{POWER_BESIDE}", additive=False)]
