"""A powercap tree like Linux's under /sys/class/powercap: flat folders, one a zone, with the same three files."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import ClassVar

from devices.clock import MonotonicClock
from tests.fakes.stepped_clock import SteppedClock

WRAP_UJ = 262_143_328_850
"""What Intel servers state in max_energy_range_uj."""
RENEWAL_S = 1e-3


class Powercap:
    """Zones with constant power. Between `__enter__` and `__exit__` their counters follow the clock.

    renewal_s: how often; values are those of the tick, as a slow counter shows them. Who reads by `clock` sees the last
    tick, also where the machine held up the thread that renews the files.
    """

    by_steps: ClassVar[SteppedClock | None] = None
    """Where time is stepped, counters follow each step, and no thread is needed."""

    def __init__(self, root: Path, renewal_s: float = RENEWAL_S) -> None:
        self.root = root
        self._renewal_s = renewal_s
        self._files: dict[Path, int] = {}
        self._frozen: set[Path] = set()
        self._lost_s: dict[Path, float] = {}
        self._zones: list[tuple[Path, float, float, int]] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._count, daemon=True)
        self._started_s: float | None = None
        self.clock = _RenewingClock(self)
        root.mkdir(parents=True, exist_ok=True)
        # The control type itself stands beside its zones, and counts nothing.
        (root / "intel-rapl").mkdir()

    def add(self, zone: str, name: str, watts: float, start_uj: float = 0.0, wrap_uj: int = WRAP_UJ) -> Path:
        folder = self.root / zone
        folder.mkdir()
        (folder / "name").write_text(f"{name}\n")
        (folder / "max_energy_range_uj").write_text(f"{wrap_uj}\n")
        # Kept open: an unplugged zone goes on counting, where nobody sees it.
        self._files[folder / "energy_uj"] = os.open(folder / "energy_uj", os.O_WRONLY | os.O_CREAT, 0o644)
        self._zones.append((folder / "energy_uj", watts, start_uj, wrap_uj))
        self._write(0.0)
        return folder

    def unplug(self, zone: str) -> None:
        """The zone's folder goes, as when a CPU or memory is taken off line."""
        with self._lock:
            shutil.rmtree(self.root / zone)

    def freeze(self, zone: str) -> None:
        """The zone's counter keeps its value from now on."""
        with self._lock:
            self._frozen.add(self.root / zone / "energy_uj")

    def resume(self, zone: str, after_s: float) -> None:
        """It counts again, from the value it kept: what flowed in the meantime is lost."""
        path = self.root / zone / "energy_uj"
        with self._lock:
            self._frozen.discard(path)
            self._lost_s[path] = self._lost_s.get(path, 0.0) + after_s

    def __enter__(self) -> Powercap:
        self._started_s = time.monotonic()
        if self.by_steps is None:
            self._thread.start()
        else:
            self.by_steps.each_step.append(self.renew)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._started_s = None

    def renew(self) -> None:
        """All counters that count show the tick before now."""
        with self._lock:
            if self._started_s is not None:
                self.show(time.monotonic() - self._started_s)

    def show(self, passed_s: float) -> None:
        """The counters as they are after so many seconds."""
        self._write(passed_s // self._renewal_s * self._renewal_s)

    def _count(self) -> None:
        while not self._stop.wait(RENEWAL_S):
            self.renew()

    def _write(self, passed_s: float) -> None:
        """Always as many digits, written at once: sysfs never shows half a number, and renaming takes milliseconds."""
        for path, watts, start_uj, wrap_uj in self._zones:
            if path not in self._frozen:
                counted_s = passed_s - self._lost_s.get(path, 0.0)
                os.pwrite(self._files[path], b"%012d\n" % (int(start_uj + watts * counted_s * 1e6) % wrap_uj), 0)


class _RenewingClock(MonotonicClock):
    """A reading that is stamped before and behind finds what the counters hold in between."""

    def __init__(self, tree: Powercap) -> None:
        self._tree = tree

    def now_s(self) -> float:
        now_s = super().now_s()
        self._tree.renew()
        return now_s
