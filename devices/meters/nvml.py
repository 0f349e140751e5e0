"""NVIDIA's own energy counter, read through NVML without Zeus in between.

The counter (mJ since the driver was loaded, Volta and later) ticks about every 100 ms: a window of ten ticks is the
shortest that counts. GPUs without the counter give power samples instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from devices.base import Channel, Clock, DeviceError, MeterUnavailableError
from devices.meters.polled import PolledMeter
from results.records import Method, TraceKind

COUNTER_TICK_S = 0.1
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
            raise MeterUnavailableError("NVML: the driver is loaded but lists no GPU")
        counts = self._has_counter()
        kind: TraceKind = "counter" if counts else "power"
        step = J_PER_MJ if counts else W_PER_MW
        self.method = "counter" if counts else "integrated power"
        self.channels = tuple(
            Channel(component=f"gpu{i}", kind=kind, update_period_s=COUNTER_TICK_S, resolution=step)
            for i in range(len(self._gpus))
        )

    def _has_counter(self) -> bool:
        import pynvml

        try:
            for gpu in self._gpus:
                pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
        except pynvml.NVMLError_NotSupported:
            return False
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
