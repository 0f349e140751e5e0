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
from devices.meters.cross_check import compare
from devices.meters.polled import METHODS, Array, PolledMeter
from devices.nvidia_gpu import J_PER_MJ, W_PER_MW, NvidiaGpu, nvml_errors
from devices.nvidia_throttle import is_slowed, reasons_of, summary
from devices.reconnect import Reconnection
from results.energy import POWER_BESIDE
from results.records import Method, PowerTrace

TICK_S = 0.1
"""Of the energy counter."""
MAX_GPU_POWER_W = 5e3
"""Of one board: several times what the largest may draw."""
RELATIVE_ACCURACY = 0.05 / math.sqrt(3)
"""NVIDIA states a power reading to within 5 % (manual of nvmlDeviceGetPowerUsage): uniform, as one sigma."""

log = logging.getLogger(__name__)


class NvmlMeter(PolledMeter):
    """All NVIDIA GPUs of the host: `gpuN`, and `gpuN power` where there is a counter to be checked."""

    name = "nvml"

    def __init__(self, interval_s: float, clock: Clock) -> None:
        super().__init__(interval_s, clock)
        self.method: Method = "counter"
        self._gpus: list[NvidiaGpu] = []
        self._is_initialised = False
        self._is_lost = False
        self._components: tuple[str, ...] = ()
        """Of the first time it was open: a GPU that is not there any more is missing in every total."""
        self._reconnection = Reconnection(clock)
        self._reasons_seen: frozenset[str] = frozenset()

    def open(self) -> None:
        try:
            with nvml_errors(MeterUnavailableError, "; is an NVIDIA GPU with its driver here?"):
                import pynvml

                pynvml.nvmlInit()
                self._is_initialised = True
                self._gpus = [NvidiaGpu(i) for i in range(pynvml.nvmlDeviceGetCount())]
                self._refuse_split()
                self._choose_channels()
            self.read()
        except DeviceError as error:
            self.close()
            raise MeterUnavailableError(str(error)) from error
        self._is_lost = False

    def _reopen(self) -> None:
        """All that was there before must be there again. Raises `MeterUnavailableError`."""
        self.close()
        self.open()
        components = tuple(channel.component for channel in self.channels)
        if components != self._components:
            self.close()
            self._is_lost = True
            raise MeterUnavailableError(
                f"NVML: {', '.join(self._components)} were measured, and now {', '.join(components)} are there;"
                " totals would not be of the same GPUs. See nvidia-smi -L and the kernel's log (Xid)"
            )

    def _refuse_split(self) -> None:
        if not self._gpus:
            raise MeterUnavailableError("NVML: the driver is loaded but lists no GPU")
        split = [gpu.index for gpu in self._gpus if gpu.is_split()]
        if split:
            raise MeterUnavailableError(
                f"NVML: GPU {', '.join(map(str, split))} is split by MIG, and its counter is of all instances together:"
                f" no joule of it belongs to one of them; end MIG (sudo nvidia-smi -i {split[0]} -mig 0), or measure on"
                " a GPU that is not split"
            )

    def _choose_channels(self) -> None:
        """Counters with power beside them. Where one GPU does not count, power of all: methods are not added up."""
        silent = [gpu.index for gpu in self._gpus if not gpu.has_counter and not gpu.has_power]
        if silent:
            raise MeterUnavailableError(
                f"NVML: GPU {silent[0]}: energy and power are both Not Supported by it or its driver"
                " (a Jetson has no NVML power: its rails are in sysfs)"
            )
        counts = all(gpu.has_counter for gpu in self._gpus)
        self.method = "counter" if counts else "integrated power"
        self.channels = tuple(channel for gpu in self._gpus for channel in _channels(gpu, counts))

    def method_of(self, channel: Channel) -> Method:
        return METHODS[channel.kind]

    def start(self) -> None:
        """A GPU that was lost in the window before is waited for: its handle does not come back to life."""
        if self._is_lost:
            self._reconnection.reopen(self._reopen, "the GPUs")
        self._components = tuple(channel.component for channel in self.channels)
        self._reasons_seen = frozenset()
        super().start()

    def read(self) -> Sequence[float]:
        """One value a channel, then a mask of clock event reasons a GPU (nan where it cannot be read)."""
        try:
            with nvml_errors(
                TransientDeviceError,
                ": a GPU could not be read; was it lost or reset? See nvidia-smi and the kernel's log (Xid)",
            ):
                values = [value for gpu in self._gpus for value in self._values(gpu)]
                return values + [gpu.event_reasons() for gpu in self._gpus]
        except TransientDeviceError:
            self._is_lost = True
            raise

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

    def close(self) -> None:
        super().close()
        self._gpus = []
        if self._is_initialised:
            import pynvml

            self._is_initialised = False
            # Of a driver that went away there is nothing left to shut down.
            with suppress(DeviceError), nvml_errors(DeviceError, ""):
                pynvml.nvmlShutdown()


def _channels(gpu: NvidiaGpu, counts: bool) -> list[Channel]:
    """In the order in which `read` gives their values."""
    counter = Channel(
        f"gpu{gpu.index}",
        "counter",
        TICK_S,
        J_PER_MJ,
        relative_accuracy=RELATIVE_ACCURACY,
        max_power_w=MAX_GPU_POWER_W,
        computes="gpu",
    )
    if counts and not gpu.has_power:
        return [counter]
    power = replace(counter, kind="power", update_period_s=gpu.power_period_s, resolution=W_PER_MW)
    if not counts:
        return [power]
    return [counter, replace(power, component=f"gpu{gpu.index}{POWER_BESIDE}", additive=False)]
