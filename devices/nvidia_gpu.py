"""One NVIDIA GPU behind NVML: its energy counter, its power, why it is slowed. Units are SI from here on.

Calls raise `pynvml.NVMLError`, or what a binding raises that does not fit its driver: `nvml_errors` turns both into
ours. What a GPU does not offer shows at the first call, as NVMLError_NotSupported.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from devices.base import DeviceError
from devices.boundary import library_errors
from results.printable import printable

log = logging.getLogger(__name__)

J_PER_MJ = 1e-3
W_PER_MW = 1e-3
RENEWED_S = 0.1
"""The power sensor renews its value about every 100 ms (A100 and H100 look a quarter of the time)."""
MAX_GPU_POWER_W = 4e3
"""Of one board that states no limit: several times what the largest may draw, and less than 2^32 - 1 uW, which a driver
shows that has no reading."""
OVER_LIMIT = 3.0
"""Times its highest limit: a board draws no more for as long as a reading takes."""
AVERAGED_S = 1.0
"""nvmlDeviceGetPowerUsage on Ampere and later, but not on GA100, is the mean of the last second (its manual), renewed
as often as an instant."""
GA100 = (8, 0)
"""The compute capability of A100, A30 and A800: of the architecture Ampere too, and read at an instant."""


@contextmanager
def nvml_errors(error_type: type[DeviceError], words: str) -> Iterator[None]:
    """Raises `error_type` for whatever goes wrong behind NVML. words: behind what it says, with the remedy."""
    with library_errors("NVML", "pynvml", error_type):
        import pynvml

        try:
            yield
        except pynvml.NVMLError as error:
            raise error_type(f"NVML: {error}{words}") from error


def uuid_of(handle: Any) -> str | None:
    """Of the board behind a handle of pynvml; None where it does not tell."""
    import pynvml

    try:
        return str(pynvml.nvmlDeviceGetUUID(handle))
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
        return None


def names_and_driver() -> tuple[tuple[str, ...] | None, str | None]:
    """Names of all NVIDIA GPUs here, in the order of their numbers, and the driver's version; None where not told."""
    try:
        with nvml_errors(DeviceError, ""):
            import pynvml

            pynvml.nvmlInit()
            try:
                handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
                names = tuple(printable(str(pynvml.nvmlDeviceGetName(handle))) for handle in handles)
                return names or None, str(pynvml.nvmlSystemGetDriverVersion()) if names else None
            finally:
                pynvml.nvmlShutdown()
    except DeviceError as error:
        log.info("names of GPUs: %s", error)
        return None, None


def max_power_w_of(handle: Any) -> float:
    """More cannot flow into it."""
    import pynvml

    try:
        _, limit_mw = pynvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
    except pynvml.NVMLError:
        return MAX_GPU_POWER_W
    return min(OVER_LIMIT * limit_mw * W_PER_MW, MAX_GPU_POWER_W) if limit_mw > 0 else MAX_GPU_POWER_W


class NvidiaGpu:
    """What a meter wants of a GPU. `power_period_s` says how often its power is renewed."""

    def __init__(self, index: int) -> None:
        import pynvml

        self.index = index
        self._handle: Any = pynvml.nvmlDeviceGetHandleByIndex(index)
        self.uuid = uuid_of(self._handle)
        self.max_power_w = max_power_w_of(self._handle)
        self._is_instant = self._has_instant_power()
        self._is_averaged = self._averages_power()
        self.has_counter = self._offers(pynvml.nvmlDeviceGetTotalEnergyConsumption)
        self.has_power = self._is_instant or self._offers(pynvml.nvmlDeviceGetPowerUsage)
        self._reasons_call = self._newest_reasons_call()

    @property
    def power_period_s(self) -> float:
        return AVERAGED_S if self._is_averaged is None else RENEWED_S

    @property
    def power_averaged_s(self) -> float | None:
        """Of the time before it that a power reading is the mean of; None of an instant, and where nobody says."""
        return AVERAGED_S if self._is_averaged else None

    def _averages_power(self) -> bool | None:
        """Whether a reading of power is the mean of the last second; None where the driver does not tell which GPU it
        is: then it may be either."""
        import pynvml

        if self._is_instant:
            return False
        try:
            architecture = pynvml.nvmlDeviceGetArchitecture(self._handle)
            if architecture == pynvml.NVML_DEVICE_ARCH_UNKNOWN:
                return None
            if architecture != pynvml.NVML_DEVICE_ARCH_AMPERE:
                return bool(architecture > pynvml.NVML_DEVICE_ARCH_AMPERE)
            return bool(pynvml.nvmlDeviceGetCudaComputeCapability(self._handle) != GA100)
        except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
            return None

    def is_split(self) -> bool:
        """Whether MIG divides it into instances."""
        import pynvml

        try:
            current, _ = pynvml.nvmlDeviceGetMigMode(self._handle)
        except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
            return False
        return bool(current == pynvml.NVML_DEVICE_MIG_ENABLE)

    def energy_j(self) -> float:
        """Since the driver was loaded."""
        import pynvml

        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) * J_PER_MJ)

    def power_w(self) -> float:
        """Now, or of the last second where the driver has no instantaneous field."""
        import pynvml

        if self._is_instant:
            return self._instant_power_w()
        return float(pynvml.nvmlDeviceGetPowerUsage(self._handle) * W_PER_MW)

    def event_reasons(self) -> float:
        """Bit mask of `devices.nvidia_throttle`; nan where it cannot be read."""
        import pynvml

        if self._reasons_call is None:
            return math.nan
        try:
            return float(self._reasons_call(self._handle))
        except pynvml.NVMLError:
            return math.nan

    def power_limit_w(self) -> float | None:
        """That its owner set; None where it cannot be read. (What is enforced moves by itself on laptops.)"""
        import pynvml

        try:
            return float(pynvml.nvmlDeviceGetPowerManagementLimit(self._handle) * W_PER_MW)
        except pynvml.NVMLError:
            return None

    def process_ids(self) -> frozenset[int] | None:
        """Of programs that have it open to compute; None where it cannot be read."""
        import pynvml

        try:
            return frozenset(p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle))
        except pynvml.NVMLError:
            return None

    def _offers(self, call: Any) -> bool:
        """What else may go wrong than not to be there shows at the first reading."""
        import pynvml

        try:
            call(self._handle)
        except pynvml.NVMLError as error:
            return not isinstance(error, pynvml.NVMLError_NotSupported)
        return True

    def _instant_power_w(self) -> float:
        import pynvml

        [field] = pynvml.nvmlDeviceGetFieldValues(self._handle, [pynvml.NVML_FI_DEV_POWER_INSTANT])
        if field.nvmlReturn != pynvml.NVML_SUCCESS:
            raise pynvml.NVMLError(field.nvmlReturn)
        return float(field.value.uiVal * W_PER_MW)

    def _has_instant_power(self) -> bool:
        import pynvml

        try:
            self._instant_power_w()
        except pynvml.NVMLError:
            return False
        return True

    def _newest_reasons_call(self) -> Any:
        """The call was renamed in driver 535."""
        import pynvml

        for call in (
            pynvml.nvmlDeviceGetCurrentClocksEventReasons,
            pynvml.nvmlDeviceGetCurrentClocksThrottleReasons,
        ):
            try:
                call(self._handle)
            except (pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NotSupported):
                continue
            except pynvml.NVMLError:
                return call
            return call
        return None
