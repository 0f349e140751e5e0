"""What only a Mac can tell: whether Core ML computes what the interpreter does, and where. No Mac has run it yet."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.coreml.interpreter import Interpreter
from engines.coreml.macos import MacPredictor
from engines.coreml.manifest import GraphFunction, PackagePlan, read_manifest
from engines.coreml.package_reading import read_package
from tests.command import joulebench

pytestmark = [
    pytest.mark.macos,
    pytest.mark.skipif(platform.system() != "Darwin", reason=f"Core ML needs macOS; this is {platform.system()}"),
]
MODEL = "bundled:tiny-qwen3-moe"
RELATIVE = 12 * 2.0**-11
"""Of the largest value: a graph is a chain of at most 12 operations, each rounded to fp16 by 2^-11 at most
(`tests.test_coreml_model`). The oracle rounds nothing."""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mac") / "packages"
    done = joulebench(
        "coreml", "convert", MODEL, "--profile", MODEL, "--chunk", "64", "--context", "256", "--out", str(folder)
    )
    assert done.code == 0, done.stderr
    return folder


def of_first_layer(folder: Path) -> list[tuple[PackagePlan, GraphFunction]]:
    return [(p, f) for p in read_manifest(folder).packages if p.layer == 0 for f in p.functions]


def inputs_of(folder: Path, package: PackagePlan, function: GraphFunction) -> Mapping[str, Any]:
    (read,) = (f for f in read_package(folder / package.path).functions if f.name == function.name)
    draw = np.random.default_rng(0)
    return {
        name: (0.1 * draw.standard_normal([int(n or 1) for n in kind.shape])).astype(np.float16)
        for name, kind in read.inputs.items()
    }


@pytest.mark.parametrize("stateful", [False, True])
def test_core_ml_computes_what_the_interpreter_does(packages: Path, stateful: bool) -> None:
    mac, oracle = MacPredictor(packages), Interpreter(packages, "float32")
    failed = []
    for package, function in of_first_layer(packages):
        if function.stateful is not stateful:
            continue
        given = inputs_of(packages, package, function)
        states = [one.new_state(package, function.name, "cpu_and_ne") if stateful else None for one in (mac, oracle)]
        found = mac.predict(package, function.name, given, states[0], "cpu_and_ne")
        expected = oracle.predict(package, function.name, given, states[1], "cpu_and_ne")
        assert set(expected) <= set(found)
        for name, value in expected.items():
            error = np.abs(found[name].astype(np.float32) - value).max() / np.abs(value).max()
            if not error <= RELATIVE:
                failed.append(f"{package.path} {function.name} {name}: {error:.3g}")
    assert not failed


def test_a_state_goes_from_one_function_to_the_other(packages: Path) -> None:
    """A prefill's state serves decoding: both functions are of one package. Two chains of roundings, one after the
    other."""
    package = next(p for p, _ in of_first_layer(packages) if p.role == "attention")
    prefill, decode = sorted((f for f in package.functions if f.stateful), key=lambda f: -f.rows)
    answers = []
    for predictor in (MacPredictor(packages), Interpreter(packages, "float32")):
        state = predictor.new_state(package, prefill.name, "cpu_and_ne")
        for function in (prefill, decode):
            given = inputs_of(packages, package, function)
            y = predictor.predict(package, function.name, given, state, "cpu_and_ne")["y"]
        answers.append(y.astype(np.float32))
    found, expected = answers
    assert np.abs(found - expected).max() <= 2 * RELATIVE * np.abs(expected).max()


def test_experts_and_attention_are_placed_on_the_neural_engine(packages: Path) -> None:
    mac = MacPredictor(packages)
    elsewhere = {}
    for package, function in of_first_layer(packages):
        placed = mac.placement(package, function.name, "cpu_and_ne")
        assert placed is not None
        if set(placed.operations) != {"ane"}:
            elsewhere[f"{package.path} {function.name}"] = dict(placed.operations)
    assert not elsewhere


def test_zeus_sees_the_load() -> None:
    done = joulebench("doctor", "--seconds", "5", "--json")
    assert '"zeus sees the load"' in done.stdout
