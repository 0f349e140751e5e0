"""The doctor on a Mac says what nobody has tried there; elsewhere it does not speak of it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import pytest

from harness.untried import UNTRIED_ON_A_MAC
from results.environments import Environment
from results.report.self_test import check_line
from results.self_tests import SelfTest
from tests.fakes.known_load import Device, Machine, Meter, examined


class Mac(Device):
    """As `platform` tells it there."""

    machine = "arm64"

    def environment(self) -> Environment:
        told = {"os": "Darwin 25.1.0", "machine": self.machine, "cpu_model": "arm"}
        return super().environment().model_copy(update=told)


class OldMac(Mac):
    machine = "x86_64"


def found_on(kind: type[Device]) -> SelfTest:
    machine = Machine()
    return examined(kind(machine, Meter(machine)))


def names_of(found: SelfTest) -> Sequence[str]:
    return [check.name for check in found.checks]


def test_a_mac_is_told_what_was_never_tried_there() -> None:
    found = found_on(Mac)
    assert set(UNTRIED_ON_A_MAC) <= set(names_of(found))
    assert found.verdict == "ready"  # notes: nothing of the machine is to be fixed
    told = "\n".join(map(check_line, found.checks))
    for part in ("Core ML execution", "Core ML placement", "Zeus's Apple counters"):
        assert f"{part}: never tried on a Mac" in told
    assert "python -m tests.mac.collect" in told
    assert "Neural Engine" not in names_of(found)


def test_a_mac_without_a_neural_engine_is_told() -> None:
    (check,) = (check for check in found_on(OldMac).checks if check.name == "Neural Engine")
    assert "x86_64" in check.found
    assert "arm64 Python" in str(check.remedy)


def test_linux_is_not_told() -> None:
    assert not set(UNTRIED_ON_A_MAC) & set(names_of(found_on(Device)))


def test_a_mac_without_coremltools_is_told_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "coremltools" else there(name))
    (check,) = (check for check in found_on(Mac).checks if check.name == "coremltools")
    assert "pip install" in str(check.remedy)
