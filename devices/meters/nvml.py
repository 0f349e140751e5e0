"""NVIDIA's own energy counter, read through NVML without Zeus in between.

The counter (mJ since the driver was loaded, Volta and later) ticks about every 100 ms: a window of ten ticks is the
shortest that counts. GPUs without the counter give power samples instead. All GPUs of the host are read, whatever
CUDA_VISIBLE_DEVICES says: another job's energy on a shared machine is in the total, and each GPU is also a component.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from devices.base import Channel, Clock, DeviceError, MeterUnavailableError
from devices.meters.polled import PolledMeter
from results.records import Method, TraceKind

TICK_S = 0.1
"""Of the counter, and of the power readings."""
RELATIVE_ACCURACY = 0.05 / math.sqrt(3)
"""NVIDIA states a power reading to within 5 % (manual of nvmlDeviceGetPowerUsage): uniform, as one sigma."""
J_PER_MJ = 1e-3
W_PER_MW = 1e-3


class NvmlMeter(PolledMeter):
    """All NVIDIA GPUs of the host, one channel each."""

    name = "nvml"

    def __init__(self, interval_s: float, clock: Clock) -> None:
        super().__init__(interval_s, clock)
        self.method: Method = "counter"
        self._gpus: list[Any] = []

    def open(self) -> None:
        import pynvml

        try:
            pynvml.nvmlInit()
            self._gpus = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as error:
            raise MeterUnavailableError(f"NVML: {error}; is an NVIDIA GPU with its driver here?") from error
        if not self._gpus:
            pynvml.nvmlShutdown()
            raise MeterUnavailableError("NVML: the driver is loaded but lists no GPU")
        counts = self._has_counter()
        kind: TraceKind = "counter" if counts else "power"
        step = J_PER_MJ if counts else W_PER_MW
        self.method = "counter" if counts else "integrated power"
        self.channels = tuple(
            Channel(
                component=f"gpu{i}",
                kind=kind,
                computes="gpu",
                update_period_s=TICK_S,
                resolution=step,
                relative_accuracy=RELATIVE_ACCURACY,
            )
            for i in range(len(self._gpus))
        )
        try:
            self.read()
        except DeviceError as error:
            self.close()
            raise MeterUnavailableError(f"{error} (a Jetson has no NVML power: its rails are in sysfs)") from error

    def _has_counter(self) -> bool:
        """Whether every GPU counts. What else may go wrong shows at the first reading."""
        import pynvml

        try:
            for gpu in self._gpus:
                pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
        except pynvml.NVMLError as error:
            return not isinstance(error, pynvml.NVMLError_NotSupported)
        return True

    def read(self) -> Sequence[float]:
        import pynvml

        try:
            if self.method == "counter":
                return [pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) * J_PER_MJ for gpu in self._gpus]
            return [pynvml.nvmlDeviceGetPowerUsage(gpu) * W_PER_MW for gpu in self._gpus]
        except pynvml.NVMLError as error:
            raise DeviceError(f"NVML: a GPU could not be read ({error}); was it lost or reset?") from error

    def close(self) -> None:
        super().close()
        if self._gpus:
            import pynvml

            pynvml.nvmlShutdown()
            self._gpus = []
