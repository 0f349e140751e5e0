"""Threads of torch's OpenMP sleep between its products: the setting comes before torch, and a user's own stands."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import engines

PASSED_ON = (
    "import engines, subprocess, sys; ask = [sys.executable, '-c', {ask!r}]; "
    "print(subprocess.run(ask, env={environment}, text=True, capture_output=True, check=True).stdout.strip())"
)
SAY = "import os, sys, {module}; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"


def said(module: str, **settings: str) -> str:
    return printed(SAY.format(module=module), **settings)


def printed(code: str, **settings: str) -> str:
    unset = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", engines.IS_OURS)
    environment = {k: v for k, v in os.environ.items() if k not in unset}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env=environment | settings, text=True, capture_output=True, check=True
    ).stdout.strip()


@pytest.mark.parametrize("module", ["harness.run_parts", "tests.benchmarks.timing", "workloads.lm_eval_bridge"])
def test_whoever_loads_torch_has_loaded_the_setting(module: str) -> None:
    value, has_torch = said(module).split()
    assert value == engines.FEW_LOOKS or has_torch == "False"


def test_the_setting_comes_before_torch_and_a_users_own_stands() -> None:
    assert said("engines") == f"{engines.FEW_LOOKS} False"
    assert said("engines", GOMP_SPINCOUNT="500") == "500 False"
    assert said("engines", OMP_WAIT_POLICY="active") == "None False"
    assert said("torch, engines") == "None True"  # too late: nothing is claimed


def test_our_setting_is_not_for_programs_of_others_and_a_users_is() -> None:
    ask = "import os; print(os.environ.get('GOMP_SPINCOUNT'))"
    to_others = PASSED_ON.format(ask=ask, environment="engines.environment_for_others()")
    assert printed(to_others) == "None"
    assert printed(to_others, GOMP_SPINCOUNT="500") == "500"
    through_one_of_ours = PASSED_ON.format(ask=to_others, environment="None")
    assert printed(through_one_of_ours) == "None"
    assert printed(through_one_of_ours, GOMP_SPINCOUNT="500") == "500"
