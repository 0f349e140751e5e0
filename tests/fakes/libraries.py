"""C libraries that stand in for a driver or before libc, and Python processes that run on top of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def compile_library(source: Path, library: Path, *options: str) -> None:
    """Skips the test where there is no C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip(f"no C compiler to build {source.name} with")
    built = [compiler, "-O1", "-Wall", "-Werror", "-shared", "-fPIC", *options, "-o", library, source, "-ldl"]
    subprocess.run(built, check=True)


def run_python(code: str, environment: Mapping[str, str]) -> Any:
    """The value that the code gives to `answer`, from a process of its own (a library once loaded stays loaded)."""
    script = printing(code)
    # GPUs that this machine hides or shows are not those of the fake.
    own = {key: value for key, value in os.environ.items() if not key.endswith("_VISIBLE_DEVICES")}
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=own | dict(environment),
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def printing(code: str) -> str:
    """With what the code gives to `answer` as its last line."""
    return f"import json\n{textwrap.dedent(code)}\nprint(json.dumps(answer))\n"


def stepped_code(variable: str) -> str:
    """Its time is `time_by_steps`, which a library is told by that variable."""
    return textwrap.dedent(
        f"""
        import os
        from tests.fakes.stepped_clock import stepped
        time_by_steps = stepped()
        def tell():
            os.environ["{variable}"] = repr(time_by_steps.now_s())
        time_by_steps.each_step.append(tell)
        tell()
        """
    )


def write_state(path: Path, state: Mapping[str, float]) -> None:
    path.write_text("".join(f"{key} {value}\n" for key, value in state.items()))


READINGS_OF = """
from results.energy import energy_between
def readings_of(meter, traces, start_s, end_s):
    components = ["total", *(t.component for t in traces)]
    readings = [energy_between(traces, [(start_s, end_s)], "all", meter.name, c) for c in components]
    return {
        "readings": {r.component: r.model_dump() for r in readings},
        "kinds": {t.component: t.kind for t in traces},
        "additive": {t.component: t.additive for t in traces},
        "notes": {t.component: t.note for t in traces},
        "n_readings": len(traces[0].times_s),
    }
"""


def window_code(meter: str, seconds: float = 1.2, meanwhile: str = "") -> str:
    """A window of a meter such as `devices.meters.nvml.NvmlMeter`. meanwhile: what happens in its middle.

    answer: readings, kinds, methods and notes by component ("total" too), values of each trace; or the error of `stop`
    by its name (a transient one by that of its kind) and message.
    """
    module, _, name = meter.rpartition(".")
    return READINGS_OF + textwrap.dedent(
        f"""
        import time
        from devices.base import DeviceError, TransientDeviceError
        from devices.clock import MonotonicClock
        from {module} import {name}
        clock = MonotonicClock()
        meter = {name}(0.05, clock)
        meter.open()
        meter.start()
        start_s = clock.now_s()
        clock.sleep_until_s(start_s + {seconds} / 2)
        {meanwhile}
        clock.sleep_until_s(start_s + {seconds})
        end_s = clock.now_s()
        try:
            answer = readings_of(meter, meter.stop(), start_s, end_s)
        except DeviceError as error:
            kind = TransientDeviceError if isinstance(error, TransientDeviceError) else type(error)
            answer = [kind.__name__, str(error)]
        """
    )


def open_code(meter: str) -> str:
    """answer: "opened", or the reason why not."""
    module, _, name = meter.rpartition(".")
    return textwrap.dedent(
        f"""
        from devices.base import MeterUnavailableError
        from devices.clock import MonotonicClock
        from {module} import {name}
        try:
            {name}(0.05, MonotonicClock()).open()
            answer = "opened"
        except MeterUnavailableError as error:
            answer = str(error)
        """
    )


def watts(answer: Any) -> dict[str, float]:
    """Mean power by component, of those with energy."""
    return {
        component: r["energy_j"] / r["duration_s"]
        for component, r in answer["readings"].items()
        if r["energy_j"] is not None
    }
