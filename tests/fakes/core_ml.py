"""macOS's Core ML as coremltools 9.0 sees it: the classes of its compiled module `libcoremlpython`, in Python.

Everything of coremltools above them runs as it is. Predictions are the interpreter's, of the package's own file; where
an operation lies is what a test says. Loads and predictions are noted in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import pytest

from engines.coreml.interpreter import InterpretedState, Interpreter

Places = Callable[[str, str], str | None]
"""The unit (ane, cpu, gpu) of an operation, by the path of its package and its kind; None: Core ML does not tell."""
IOS_18 = 9
"""Specification version of the packages that we write."""


@cache
def _interpreter() -> Interpreter:
    """Of all fakes: it reads a package once, by its whole path. None is changed once it ran."""
    return Interpreter(Path("/"))


class FakeCoreMl:
    """events: ("load" or "predict" or "plan", package, function), as they came. refuses: packages that do not compile,
    by a part of their path."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.events: list[tuple[str, str, str]] = []
        self.refuses: str | None = None
        self.no_plans = False
        self._patched: pytest.MonkeyPatch | None = None

    @contextmanager
    def installed(self) -> Iterator[FakeCoreMl]:
        with pytest.MonkeyPatch.context() as patch:
            _install(self, patch)
            yield self


def _install(fake: FakeCoreMl, patch: pytest.MonkeyPatch) -> None:
    from coremltools.models import compute_device, compute_plan, model

    class Device:
        pass

    kinds = {
        "ane": ("_MLNeuralEngineComputeDeviceProxy", compute_device.MLNeuralEngineComputeDevice),
        "gpu": ("_MLGPUComputeDeviceProxy", compute_device.MLGPUComputeDevice),
        "cpu": ("_MLCPUComputeDeviceProxy", compute_device.MLCPUComputeDevice),
    }
    for proxy, _ in kinds.values():
        patch.setattr(compute_device, proxy, Device)

    class ComputePlanProxy:
        def __init__(self, package: Path) -> None:
            self._package = package
            self.model_structure = compute_plan.MLModelStructure(None, _program(compute_plan, package), None)

        def get_compute_device_usage_for_mlprogram_operation(self, operation: Any) -> Any:
            unit = fake.places(str(self._package), operation.operator_name)
            if unit is None or operation.operator_name == "const":
                return None
            device = kinds[unit][1](Device())
            return compute_plan.MLComputePlanDeviceUsage(device, [device])

        def get_estimated_cost_for_mlprogram_operation(self, operation: Any) -> Any:
            return compute_plan.MLComputePlanCost(0.5) if operation.operator_name == "conv" else None

    class ModelProxy:
        def __init__(self, path: str, units: str, function: str, hints: Any, asset: Any) -> None:
            package = Path(path)
            if fake.refuses is not None and fake.refuses in path:
                raise RuntimeError("Error compiling model: error code: -14")
            self._package, self._asked = package, (SimpleNamespace(path=path), function)
            _interpreter().load(*self._asked, "cpu_and_ne")
            fake.events.append(("load", package.name, function))

        @staticmethod
        def maximum_supported_specification_version() -> int:
            return IOS_18

        @staticmethod
        def get_compute_plan(path: str, units: str) -> Any:
            if fake.no_plans:
                raise RuntimeError("no plan")
            package = Path(path.removesuffix("c"))
            fake.events.append(("plan", package.name, ""))
            return compute_plan.MLComputePlan(ComputePlanProxy(package))

        def get_compiled_model_path(self) -> str:
            return f"{self._package}c"

        def newState(self) -> InterpretedState:
            return _interpreter().new_state(*self._asked, "cpu_and_ne")

        def predict(self, given: dict[str, Any], state: InterpretedState | None) -> dict[str, Any]:
            package, function = self._asked
            fake.events.append(("predict", self._package.name, function))
            return _interpreter().predict(package, function, given, state, "cpu_and_ne")

    patch.setattr(model, "_MLModelProxy", ModelProxy)
    patch.setattr(compute_plan, "_MLModelProxy", ModelProxy)
    patch.setattr(compute_plan, "_MLComputePlanProxy", ComputePlanProxy)
    patch.setattr(model, "_is_macos", lambda: True)
    patch.setattr(model, "_macos_version", lambda: (15, 5))
    patch.setattr("engines.coreml.macos._LOADED", WeakValueDictionary())  # none of the fakes before
    mac = SimpleNamespace(system=lambda: "Darwin", mac_ver=lambda: ("15.5", ("", "", ""), "arm64"))
    patch.setattr("engines.coreml.macos.platform", mac)


def _program(plan: Any, package: Path) -> Any:
    """The structure of a package, as `MLModelStructure` tells it, constants among its operations."""
    from coremltools.models.utils import load_spec

    functions = {}
    for name, function in load_spec(str(package)).mlProgram.functions.items():
        block = function.block_specializations[function.opset]
        operations = [
            plan.MLModelStructureProgramOperation(
                inputs={},
                operator_name=one.type,
                outputs=[
                    plan.MLModelStructureProgramNamedValueType(output.name, plan.MLModelStructureProgramValueType())
                    for output in one.outputs
                ],
                blocks=[],
                __proxy__=None,
            )
            for one in block.operations
        ]
        body = plan.MLModelStructureProgramBlock(inputs=[], operations=operations, output_names=list(block.outputs))
        functions[name] = plan.MLModelStructureProgramFunction(inputs=[], block=body)
    return plan.MLModelStructureProgram(functions)
