"""A powercap tree like Linux's under /sys/class/powercap: flat folders, one a zone, with the same three files."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

WRAP_UJ = 262_143_328_850
"""What Intel servers state in max_energy_range_uj."""
RENEWAL_S = 1e-3


class Powercap:
    """Zones with constant power. Between `__enter__` and `__exit__` their counters follow the clock."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._zones: list[tuple[Path, float, float, int]] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._count, daemon=True)
        root.mkdir(parents=True, exist_ok=True)
        # The control type itself stands beside its zones, and counts nothing.
        (root / "intel-rapl").mkdir()

    def add(self, zone: str, name: str, watts: float, start_uj: float = 0.0, wrap_uj: int = WRAP_UJ) -> Path:
        folder = self.root / zone
        folder.mkdir()
        (folder / "name").write_text(f"{name}\n")
        (folder / "max_energy_range_uj").write_text(f"{wrap_uj}\n")
        self._zones.append((folder / "energy_uj", watts, start_uj, wrap_uj))
        self._renew(0.0)
        return folder

    def unplug(self, zone: str) -> None:
        """The zone's folder goes, as when a CPU or memory is taken off line."""
        with self._lock:
            shutil.rmtree(self.root / zone)

    def __enter__(self) -> Powercap:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _count(self) -> None:
        started_s = time.monotonic()
        while not self._stop.wait(RENEWAL_S):
            self._renew(time.monotonic() - started_s)

    def _renew(self, passed_s: float) -> None:
        """sysfs never shows half a number: write beside, then rename."""
        with self._lock:
            for path, watts, start_uj, wrap_uj in self._zones:
                if path.parent.is_dir():
                    beside = path.with_suffix(".new")
                    beside.write_text(f"{int(start_uj + watts * passed_s * 1e6) % wrap_uj}\n")
                    beside.replace(path)
