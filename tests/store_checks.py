"""A small run to store, and what tests of stores check and start."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from results.records import PowerTrace
from tests.fakes.waveforms import trace
from tests.run_builders import cell, run_info

ROOT = Path(__file__).parents[1]
INFO = run_info(plan={"name": "example", "nested": {"limit": None, "list": [1, 2.5, "x"]}}, plan_hash="5f2c9b")
CELLS = [cell("c2"), cell("c1")]
POWER = trace("power", [0.0, 0.5, 1.0], [5.0, 6.0, 7.0], 0.5, gaps_s=((0.1, 0.2), (0.3, 0.4)), note="n")


def assert_same_trace(got: PowerTrace, expected: PowerTrace) -> None:
    def described(one: PowerTrace) -> dict[str, Any]:
        return {k: v for k, v in asdict(one).items() if k not in ("times_s", "values")}

    assert described(got) == described(expected)
    np.testing.assert_array_equal(got.times_s, expected.times_s)
    np.testing.assert_array_equal(got.values, expected.values)


def in_new_process(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    preamble = """
        import os, sys
        from dataclasses import replace
        from pathlib import Path
        from results.records import Score
        from results.store import *
        from results.trace_files import WINDOW
        from tests.run_builders import trial
        from tests.store_checks import *
        """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(preamble) + textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )
