"""Threads of torch's OpenMP sleep between its products: the setting comes before torch, and a user's own stands."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SAY = "import os, sys, {module}; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"


def said(module: str, **settings: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    command = [sys.executable, "-c", SAY.format(module=module)]
    return subprocess.run(
        command, env=environment | settings, text=True, capture_output=True, check=True
    ).stdout.strip()


@pytest.mark.parametrize("module", ["harness.run_parts", "tests.benchmarks.timing", "workloads.lm_eval_bridge"])
def test_whoever_loads_torch_has_loaded_the_setting(module: str) -> None:
    value, has_torch = said(module).split()
    assert value == "0" or has_torch == "False"


def test_the_setting_comes_before_torch_and_a_users_own_stands() -> None:
    assert said("engines") == "0 False"
    assert said("engines", GOMP_SPINCOUNT="500") == "500 False"
    assert said("engines", OMP_WAIT_POLICY="active") == "None False"
    assert said("torch, engines") == "None True"  # too late: nothing is claimed
