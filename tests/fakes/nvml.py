"""Processes that see an NVML library of ours: `nvml.c`, compiled once, found where the driver's would be."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).with_suffix(".c")


class FakeNvml:
    """A folder with the library and the file of its state."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler to build the fake NVML library with")
        self._folder = folder
        self._state = folder / "state"
        library = folder / "libnvidia-ml.so.1"
        subprocess.run([compiler, "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, SOURCE], check=True)

    def run(self, code: str, **state: float) -> Any:
        """The value that the code gives to `answer`, run in a process of its own (a library once loaded stays loaded).

        The code can change the state while it runs: `set_state(energy=15)`.
        """
        self._state.write_text("".join(f"{key} {value}\n" for key, value in state.items()))
        script = (
            "import json, os, pathlib\n"
            "def set_state(**state):\n"
            "    text = ''.join(f'{k} {v}\\n' for k, v in state.items())\n"
            "    pathlib.Path(os.environ['FAKE_NVML']).write_text(text)\n"
            f"{textwrap.dedent(code)}\n"
            "print(json.dumps(answer))\n"
        )
        environment = os.environ | {"LD_LIBRARY_PATH": str(self._folder), "FAKE_NVML": str(self._state)}
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        ended = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=ROOT,
            env=environment,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)
