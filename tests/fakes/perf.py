"""A machine with energy events and cycle counters: `perf.c` before libc, and the PMU's folder in sysfs."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from tests.fakes.libraries import compile_library, run_python, stepped_code, write_state

EVENTS = {"energy-cores": 1, "energy-pkg": 2, "energy-ram": 3, "energy-psys": 5}
"""By perf's names, as on Intel; the fake gives event E the power watts * E / 2."""


class FakePerf:
    """A folder with the library, the file of its state, and the event sources."""

    def __init__(self, folder: Path) -> None:
        self._library = folder / "perf.so"
        self._state = folder / "state"
        self.sources = folder / "event_source"
        compile_library(Path(__file__).with_suffix(".c"), self._library)
        self._write_power_pmu("0")

    def _write_power_pmu(self, cpumask: str) -> None:
        events = self.sources / "power" / "events"
        events.mkdir(parents=True)
        (events.parent / "type").write_text("18\n")
        (events.parent / "cpumask").write_text(f"{cpumask}\n")
        for name, number in EVENTS.items():
            (events / name).write_text(f"event=0x{number:02x}\n")
            (events / f"{name}.scale").write_text("2.3283064365386962890625e-10\n")
            (events / f"{name}.unit").write_text("Joules\n")

    def run_stepped(self, code: str, **state: float) -> Any:
        """Its time, and that of the counters, is `time_by_steps`: no pause of the machine is in it."""
        return self.run(stepped_code("FAKE_PERF_NOW_S") + textwrap.dedent(code), **state)

    def run(self, code: str, **state: float) -> Any:
        write_state(self._state, state)
        return run_python(code, {"LD_PRELOAD": str(self._library), "FAKE_PERF": str(self._state)})
