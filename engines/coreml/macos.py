"""macOS's own Core ML, through coremltools: a `Predictor` that runs packages on the units of a Mac.

Written from coremltools 9.0's interface (`models/model.py`, `models/compute_plan.py`); no Mac has run it yet. Names
used: `MLModel(path, compute_units=, function_name=)`, `predict(inputs, state=)`, `make_state()`,
`get_compiled_model_path()`, `MLComputePlan.load_from_path(path, compute_units=)`, `model_structure.program.functions`,
`block.operations`, `get_compute_device_usage_for_mlprogram_operation`, `get_estimated_cost_for_mlprogram_operation`.
A model that Core ML does not compile is no error of `MLModel`: it warns, and has no `__proxy__`.
"""

from __future__ import annotations

import platform
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from engines.coreml.manifest import PackagePlan
from engines.coreml.predictor import ComputeUnits, Named, Placement, package_path
from engines.coreml.toolkit import load_coremltools
from engines.errors import EngineError

LEAST_MACOS = 15
"""Multifunction packages and states (iOS 18's opset)."""
DEVICE_NAMES = {
    "MLCPUComputeDevice": "cpu",
    "MLGPUComputeDevice": "gpu",
    "MLNeuralEngineComputeDevice": "ane",
}


def why_no_core_ml() -> str | None:
    """Why packages cannot run on this machine's own Core ML; None where they can."""
    if platform.system() != "Darwin":
        return (
            f'Core ML runs on macOS, and this is {platform.system()}; predictor = "interpreter" computes the same'
            " numbers here, and its times say nothing of a Mac"
        )
    version = platform.mac_ver()[0]
    if not version.split(".")[0].isdigit() or int(version.split(".")[0]) < LEAST_MACOS:
        return f"these packages need macOS {LEAST_MACOS} or later, and this is {version or 'of no known version'}"
    return None


_LOADED: weakref.WeakValueDictionary[tuple[Path, str, ComputeUnits], Any] = weakref.WeakValueDictionary()
"""Graphs of this process. Arms and workloads that ask for the same one share it."""


class MacPredictor:
    """A `Predictor`. Functions are compiled when they are loaded, and kept as long as a predictor holds them."""

    is_a_mac = True
    name = "Core ML"
    dtype: type[np.float16] | type[np.float32] = np.float16

    def __init__(self, folder: Path) -> None:
        """Raises `EngineError`."""
        if (reason := why_no_core_ml()) is not None:
            raise EngineError(reason)
        self._tools = load_coremltools()
        self._folder = folder
        self._models: dict[tuple[str, str, ComputeUnits], Any] = {}
        self._plans: dict[tuple[str, ComputeUnits], Any] = {}

    def load(self, package: PackagePlan, function: str, units: ComputeUnits) -> None:
        """Predicts zeros too: a first prediction takes longer than those after it."""
        if self._place(package, function, units) in _LOADED:
            self._model(package, function, units)
            return
        described = self._model(package, function, units).get_spec().description
        own = next(one for one in described.functions if one.name == function)
        zeros = {one.name: np.zeros(tuple(one.type.multiArrayType.shape), self.dtype) for one in own.input}
        state = self.new_state(package, function, units) if len(own.state) else None
        self.predict(package, function, zeros, state, units)

    def n_held(self) -> int:
        return len(_LOADED)

    def predict(
        self, package: PackagePlan, function: str, given: Named, state: object | None, units: ComputeUnits
    ) -> Named:
        model = self._model(package, function, units)
        try:
            found: dict[str, Any] = model.predict(dict(given)) if state is None else model.predict(dict(given), state)
        except Exception as error:
            raise EngineError(f"{package.path}, {function}: Core ML: {error}") from error
        return found

    def new_state(self, package: PackagePlan, function: str, units: ComputeUnits) -> object:
        try:
            return self._model(package, function, units).make_state()
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"{package.path}, {function}: no state ({error})") from error

    def placement(self, package: PackagePlan, function: str, units: ComputeUnits) -> Placement | None:
        try:
            return self._placement(self._compute_plan(package, function, units), function)
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"{package.path}, {function}: no compute plan ({error})") from error

    def _placement(self, plan: Any, function: str) -> Placement | None:
        program = plan.model_structure.program
        if program is None or function not in program.functions:
            return None
        operations: dict[str, list[str]] = defaultdict(list)
        costs: Counter[str] = Counter()
        for operation in _operations(program.functions[function].block):
            usage = plan.get_compute_device_usage_for_mlprogram_operation(operation)
            if usage is None:
                continue  # constants are placed nowhere
            device = type(usage.preferred_compute_device).__name__
            unit = DEVICE_NAMES.get(device, device)
            operations[unit].append(" ".join([operation.operator_name, *(one.name for one in operation.outputs)]))
            cost = plan.get_estimated_cost_for_mlprogram_operation(operation)
            if cost is not None:
                costs[unit] += cost.weight
        whole = sum(costs.values())
        told = {unit: tuple(names) for unit, names in operations.items()}
        return Placement(told, min(costs["ane"] / whole, 1.0) if whole else None)

    def _model(self, package: PackagePlan, function: str, units: ComputeUnits) -> Any:
        key = package.path, function, units
        if key not in self._models:
            place = self._place(package, function, units)
            made = _LOADED.get(place)
            if made is None:
                made = _LOADED[place] = self._loaded(package, function, units)
            self._models[key] = made
        return self._models[key]

    def _place(self, package: PackagePlan, function: str, units: ComputeUnits) -> tuple[Path, str, ComputeUnits]:
        return package_path(self._folder, package).resolve(), function, units

    def _loaded(self, package: PackagePlan, function: str, units: ComputeUnits) -> Any:
        path = package_path(self._folder, package)
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                made = self._tools.models.MLModel(str(path), compute_units=self._units(units), function_name=function)
        except Exception as error:
            raise EngineError(f"{path}, {function}: Core ML does not load it ({error})") from error
        if made.__proxy__ is None:
            reason = "; ".join(str(one.message) for one in said) or "this Core ML is older than the package"
            raise EngineError(f"{path}, {function}: Core ML does not load it ({reason})")
        return made

    def _compute_plan(self, package: PackagePlan, function: str, units: ComputeUnits) -> Any:
        """Of the compiled package, which holds all its functions."""
        key = package.path, units
        if key not in self._plans:
            from coremltools.models.compute_plan import MLComputePlan

            compiled = self._model(package, function, units).get_compiled_model_path()
            self._plans[key] = MLComputePlan.load_from_path(compiled, compute_units=self._units(units))
        return self._plans[key]

    def _units(self, units: ComputeUnits) -> Any:
        known = self._tools.ComputeUnit
        return known.CPU_AND_NE if units == "cpu_and_ne" else known.ALL


def _operations(block: Any) -> Iterator[Any]:
    for operation in block.operations:
        yield operation
        for inner in operation.blocks:
            yield from _operations(inner)
