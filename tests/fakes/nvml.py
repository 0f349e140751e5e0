"""Processes that see an NVML library of ours: `nvml.c`, compiled once, found where the driver's would be."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from tests.fakes.libraries import compile_library, run_python, write_state

SET_STATE = """
import os, pathlib
def set_state(**state):
    text = "".join(f"{k} {v}\\n" for k, v in state.items())
    beside = pathlib.Path(os.environ["FAKE_NVML"] + ".new")
    beside.write_text(text)
    beside.replace(os.environ["FAKE_NVML"])  # half a state would be another
"""


class FakeNvml:
    """A folder with the library and the file of its state."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._state = folder / "state"
        compile_library(Path(__file__).with_suffix(".c"), folder / "libnvidia-ml.so.1")

    def run(self, code: str, **state: float) -> Any:
        """The value that the code gives to `answer`. It can change the state while it runs: `set_state(energy=15)`."""
        write_state(self._state, state)
        return run_python(
            SET_STATE + textwrap.dedent(code), {"LD_LIBRARY_PATH": str(self._folder), "FAKE_NVML": str(self._state)}
        )
