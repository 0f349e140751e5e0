"""The library behind Zeus on a Mac, on a machine that is none: an M4's figures that grow with the clock, in mJ.

Figures that a chip does not have are None: this one has no cluster managers and no GPU SRAM. It fails, as the real one
does, by a RuntimeError: FAKE_APPLE_FAILS holds its words.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass

WATTS = {"cpu_total": 9.0, "dram": 1.5, "gpu": 20.0, "ane": 4.0}
_STARTED_S = time.monotonic()
# Zeus asks the interpreter whether it runs on a Mac before it asks this library anything.
sys.platform = "darwin"


@dataclass
class AppleEnergyMetrics:
    cpu_total_mj: int | None
    dram_mj: int | None
    gpu_mj: int | None
    ane_mj: int | None
    efficiency_cores_mj: list[int] | None
    performance_cores_mj: list[int] | None
    efficiency_cluster_mj: list[int] | None = None
    performance_cluster_mj: list[int] | None = None
    efficiency_core_manager_mj: int | None = None
    performance_core_manager_mj: int | None = None
    gpu_sram_mj: int | None = None


class AppleEnergyMonitor:
    """Counts since it was made."""

    def get_cumulative_energy(self) -> AppleEnergyMetrics:
        if words := os.environ.get("FAKE_APPLE_FAILS"):
            raise RuntimeError(words)
        passed_s = time.monotonic() - _STARTED_S
        millijoule = {part: int(watts * passed_s * 1e3) for part, watts in WATTS.items()}
        return AppleEnergyMetrics(
            cpu_total_mj=millijoule["cpu_total"],
            dram_mj=millijoule["dram"],
            gpu_mj=millijoule["gpu"],
            ane_mj=millijoule["ane"],
            efficiency_cores_mj=[1, 2, 3, 4],
            performance_cores_mj=[5, 6, 7, 8],
        )
