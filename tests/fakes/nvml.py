"""Processes that see an NVML library of ours: `nvml.c`, compiled once, found where the driver's would be."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from tests import command
from tests.fakes.libraries import READINGS_OF, ROOT, compile_library, printing, run_python, stepped_code, write_state
from tests.fakes.stepped_clock import BEGUN_S

LOADED = """
import ctypes, os
assert "libnvidia-ml" not in open("/proc/self/maps").read(), "this machine's own NVML is loaded, and would be read"
ctypes.CDLL({library!r})  # the loader gives it to whoever asks for its name from now on
for name in [name for name in os.environ if name.endswith("_VISIBLE_DEVICES")]:
    del os.environ[name]
"""

STEPPED = stepped_code("FAKE_NVML_NOW_S")

SET_STATE = """
import os, pathlib
def set_state(**state):
    text = "".join(f"{k} {v}\\n" for k, v in state.items())
    beside = pathlib.Path(os.environ["FAKE_NVML"] + ".new")
    beside.write_text(text)
    beside.replace(os.environ["FAKE_NVML"])  # half a state would be another
"""


NAME = "libnvidia-ml.so.1"


class FakeNvml:
    """A folder with the library and the file of its state."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._state = folder / "state"
        self._library = folder / NAME
        compile_library(Path(__file__).with_suffix(".c"), self._library, f"-Wl,-soname,{NAME}")

    def run(self, code: str, **state: float) -> Any:
        """The value that the code gives to `answer`. It can change the state while it runs: `set_state(energy=15)`.

        In a forked process, to which the library is given before anything asks for it. Its time is `time_by_steps`.
        """
        write_state(self._state, state)
        script = printing(LOADED.format(library=str(self._library)) + STEPPED + SET_STATE + textwrap.dedent(code))
        ended = command.run_python(script, cwd=ROOT, variables={"FAKE_NVML": str(self._state)})
        assert ended.code == 0, ended.stderr
        return json.loads(ended.stdout.splitlines()[-1])

    def run_fresh(self, code: str, **state: float) -> Any:
        """The same in a new process, whose loader looks for the library."""
        write_state(self._state, state)
        return run_python(
            SET_STATE + textwrap.dedent(code), {"LD_LIBRARY_PATH": str(self._folder), "FAKE_NVML": str(self._state)}
        )


def in_step_code(meter: str, seconds: float, **state: float) -> str:
    """A window as `libraries.window_code` has it, of readings each 50 ms on a clock that the library is told.

    The meter reads in step with it, however long the machine holds the process up. state: at second 0.
    """
    module, _, name = meter.rpartition(".")
    return READINGS_OF + textwrap.dedent(
        f"""
        import numpy as np
        from devices.clock import MonotonicClock
        from {module} import {name}
        meter = {name}(0.05, MonotonicClock())
        meter.open()
        times_s, rows = np.arange(0.0, {seconds} + 1.0, 0.05), []
        for passed_s in times_s:
            set_state(now_s={BEGUN_S} + passed_s, **{state!r})
            rows.append(meter.read())
        answer = readings_of(meter, meter.traces(times_s, np.asarray(rows)), 0.45, 0.45 + {seconds})
        """
    )
