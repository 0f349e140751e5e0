"""AMD's library amdsmi as far as Zeus asks it about power and energy: two GPUs, energies that grow with the clock.

Environment of the process: FAKE_AMD_COUNTER is "good", or "tenfold" for an accumulator that counts twenty times too
fast, as some do. When `is_lost` is set, every reading fails.
"""

from __future__ import annotations

import os
import time
from enum import Enum
from typing import Any

WATTS = (120, 250)
COUNTER_RESOLUTION_UJ = 15.259
_STARTED_S = time.monotonic()
is_lost = False


class AmdSmiException(Exception):  # noqa: N818 (AMD's name)
    """Base of the library's errors."""


class AmdSmiLibraryException(AmdSmiException):
    """An error of the C library behind it, by code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code

    def get_error_code(self) -> int:
        return self.code

    def get_error_info(self) -> str:
        return "AMDSMI_STATUS_NOT_FOUND - Not found"


class AmdSmiInitFlags(Enum):
    INIT_AMD_GPUS = 2


def amdsmi_init(flags: AmdSmiInitFlags) -> None:
    """There is nothing to set up."""


def amdsmi_shut_down() -> None:
    """There is nothing to give back."""


def amdsmi_get_processor_handles() -> list[int]:
    return list(range(len(WATTS)))


def amdsmi_get_gpu_enumeration_info(handle: int) -> dict[str, int]:
    return {"hip_id": handle}


def amdsmi_get_gpu_asic_info(handle: int) -> dict[str, str]:
    return {"market_name": "AMD Instinct MI300X"}


def amdsmi_get_power_info(handle: int) -> dict[str, Any]:
    return {"current_socket_power": WATTS[handle], "average_socket_power": "N/A"}


def amdsmi_get_energy_count(handle: int) -> dict[str, float]:
    passed_s = time.monotonic() - _STARTED_S
    if is_lost:
        raise AmdSmiLibraryException(31)
    times_too_fast = 20 if os.environ["FAKE_AMD_COUNTER"] == "tenfold" else 1
    energy_uj = 1e9 + WATTS[handle] * passed_s * 1e6 * times_too_fast
    return {"energy_accumulator": int(energy_uj / COUNTER_RESOLUTION_UJ), "counter_resolution": COUNTER_RESOLUTION_UJ}
