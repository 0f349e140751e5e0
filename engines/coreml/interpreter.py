"""A `Predictor` that runs saved packages in numpy: what they compute, and nothing of how fast.

A package is read back from its folder: operations from its model file, weights from its weight file. Nothing of the
model that it was made from is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from engines.coreml.halves import is_half, rounded, widened
from engines.coreml.manifest import PackagePlan
from engines.coreml.operations import MOVES, Values, computed, plain
from engines.coreml.predictor import ComputeUnits, Named, Placement, package_path
from engines.coreml.toolkit import load_coremltools
from engines.errors import EngineError

Arithmetic = Literal["float16", "float32"]

WIDE_BYTES = 256 * 2**20
"""Of constants that an interpreter keeps in float64: all of a small model. What is beyond is widened in each step."""


@dataclass(frozen=True)
class Step:
    """One operation. given: names of values, constants, or lists of either."""

    operation: str
    given: Mapping[str, Any]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class _Name:
    """Of a value that is computed, against a text that is a constant."""

    name: str


class _Ready(NamedTuple):
    """A step, with what does not change from one prediction to the next. named: inputs that are values, by the input's
    name. other: lists of values, and constants that are widened each time."""

    step: Step
    same: Mapping[str, Any]
    named: tuple[tuple[str, str], ...]
    other: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Function:
    """Of a package, as it was read back. Shapes by the name of the input, state or output."""

    inputs: Mapping[str, tuple[int, ...]]
    states: Mapping[str, tuple[int, ...]]
    steps: tuple[Step, ...]
    constants: Mapping[str, Any]
    outputs: tuple[str, ...]

    @cached_property
    def ready(self) -> list[_Ready]:
        return [self._ready(step) for step in self.steps]

    def _ready(self, step: Step) -> _Ready:
        same: dict[str, Any] = {}
        named: list[tuple[str, str]] = []
        other: list[tuple[str, Any]] = []
        for name, value in step.given.items():
            is_constant = not isinstance(value, _Name) or value.name in self.constants
            held = self.constants.get(value.name, value) if isinstance(value, _Name) else value
            if isinstance(held, list) or is_half(held):
                other.append((name, held))
            elif is_constant:
                same[name] = plain(held)
            else:
                named.append((name, value.name))
        return _Ready(step, same, tuple(named), tuple(other))


@dataclass
class InterpretedState:
    """By the name of the state."""

    values: dict[str, Values] = field(default_factory=dict)


class Interpreter:
    """A `Predictor`. Packages are read when they are first asked for, and kept."""

    is_a_mac = False

    def __init__(self, folder: Path, arithmetic: Arithmetic = "float16") -> None:
        """Raises `EngineError` where coremltools is not installed, which reads packages."""
        load_coremltools()
        from threadpoolctl import ThreadpoolController

        # Products this small wait longer for a second thread than they take, wherever another process computes.
        self._blas = ThreadpoolController().select(internal_api="openblas")
        self.name = f"interpreter ({arithmetic})"
        self.dtype: type[np.float16] | type[np.float32] = np.float16 if arithmetic == "float16" else np.float32
        self._folder = folder
        self._packages: dict[str, dict[str, Function]] = {}
        self._left_wide = WIDE_BYTES
        self.predictions = 0

    def load(self, package: PackagePlan, function: str, units: ComputeUnits) -> None:
        self._function(package, function)

    def n_held(self) -> int:
        return 0

    def predict(
        self, package: PackagePlan, function: str, given: Named, state: object | None, units: ComputeUnits
    ) -> Named:
        self.predictions += 1
        held = state.values if isinstance(state, InterpretedState) else {}
        with self._blas.limit(limits=1):
            return run(self._function(package, function), given, held, self.dtype)

    def new_state(self, package: PackagePlan, function: str, units: ComputeUnits) -> InterpretedState:
        found = self._function(package, function)
        return InterpretedState({name: np.zeros(shape, self.dtype) for name, shape in found.states.items()})

    def placement(self, package: PackagePlan, function: str, units: ComputeUnits) -> Placement | None:
        return None

    def _function(self, package: PackagePlan, name: str) -> Function:
        if package.path not in self._packages:
            read = read_package(package_path(self._folder, package), self.dtype)
            self._packages[package.path] = self._widened(read)
        functions = self._packages[package.path]
        if name not in functions:
            raise EngineError(f"{package.path}: no function {name}; it has {', '.join(functions)}")
        return functions[name]

    def _widened(self, functions: Mapping[str, Function]) -> dict[str, Function]:
        """With constants in float64, as operations would widen them in every prediction, as far as `WIDE_BYTES` go."""
        wide: dict[int, Values] = {}

        def kept(value: Any) -> Any:
            if id(value) not in wide and is_half(value) and value.size * 8 <= self._left_wide:
                wide[id(value)] = widened(value)
                self._left_wide -= value.size * 8
            return wide.get(id(value), value)

        return {
            name: replace(function, constants={one: kept(value) for one, value in function.constants.items()})
            for name, function in functions.items()
        }


def run(
    function: Function, given: Named, states: dict[str, Values], dtype: type[np.float16] | type[np.float32]
) -> dict[str, Values]:
    """One prediction. states: changed in place. Raises `EngineError` for other inputs than the function's."""
    if given.keys() != function.inputs.keys() or states.keys() != function.states.keys():
        raise EngineError(
            f"a function of inputs {', '.join(function.inputs)} and states {', '.join(function.states) or 'none'} was"
            f" given {', '.join(given)} and {', '.join(states) or 'none'}"
        )
    for name, value in given.items():
        if value.shape != function.inputs[name]:
            raise EngineError(f"input {name} has shape {value.shape}, and the graph takes {function.inputs[name]}")
    is_fp16 = dtype is np.float16
    values: dict[str, Any] = dict(function.constants)

    def wide(value: Any) -> Any:
        if isinstance(value, _Name):
            value = values[value.name]
        if isinstance(value, list):
            return [wide(one) for one in value]
        # In float64, so that what is rounded to fp16 does not hang on the order in which this processor adds.
        return widened(value) if is_half(value) else value

    with np.errstate(over="ignore"):  # beyond fp16 is infinity, as it is there
        for name, value in given.items():
            values[name] = widened(value.astype(dtype, copy=False)) if is_fp16 else value.astype(dtype)
        for step, same, named, other in function.ready:
            if step.operation == "read_state":
                values[step.outputs[0]] = wide(states[step.given["input"].name])
                continue
            if step.operation == "write_state":
                states[step.given["input"].name] = wide(step.given["data"])
                continue
            taken = {**same, **{name: values[held] for name, held in named}}
            for name, held in other:
                taken[name] = wide(held)
            made = computed(step.operation, taken)
            for name, one in zip(step.outputs, made if isinstance(made, list) else [made], strict=True):
                if not is_fp16:
                    values[name] = one.astype(dtype, copy=False)
                else:
                    # What is moved has been rounded, as all that float64 holds here.
                    values[name] = one if step.operation in MOVES and one.dtype == np.float64 else rounded(one)
        return {name: values[name].astype(dtype, copy=False) for name in function.outputs}


# --- reading a package ------------------------------------------------------------------------------------------------


def read_package(path: Path, dtype: type[np.float16] | type[np.float32]) -> dict[str, Function]:
    """All functions, their weights once. dtype: in which constants are kept; quantised ones are widened once.

    Raises `EngineError`: it is none, or damaged.
    """
    tools = load_coremltools()
    from coremltools.converters.mil.frontend.milproto.load import TranscriptionContext

    if not path.is_dir():
        raise EngineError(f"{path}: no package; convert it with `joulebench coreml convert`")
    try:
        spec = tools.models.utils.load_spec(str(path))
        functions = spec.mlProgram.functions
        context = TranscriptionContext(str(path / "Data" / "com.apple.CoreML" / "weights"))
        kept: dict[tuple[str, int], Any] = {}
        return {name: _read_function(function, context, kept, dtype) for name, function in functions.items()}
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(f"{path}: cannot be read ({type(error).__name__}: {error}); convert it again") from error


def _read_function(spec: Any, context: Any, kept: dict[tuple[str, int], Any], dtype: type) -> Function:
    block = spec.block_specializations[spec.opset]
    inputs: dict[str, tuple[int, ...]] = {}
    states: dict[str, tuple[int, ...]] = {}
    for one in spec.inputs:
        is_state = one.type.WhichOneof("type") == "stateType"
        tensor = one.type.stateType.wrappedType.tensorType if is_state else one.type.tensorType
        shape = tuple(int(d.constant.size) for d in tensor.dimensions)
        (states if is_state else inputs)[one.name] = shape
    constants: dict[str, Any] = {}
    steps = []
    bound = {*inputs, *states}
    for operation in block.operations:
        outputs = tuple(one.name for one in operation.outputs)
        if operation.type != "write_state" and (twice := bound & {*outputs}):
            raise EngineError(f"{', '.join(sorted(twice))}: bound twice in a graph, which Core ML may refuse")
        bound.update(outputs)
        given = {name: _bound(argument, context, kept) for name, argument in operation.inputs.items()}
        if operation.type == "const":
            constants[outputs[0]] = _as_kept(_value(operation.attributes["val"], context, kept), dtype)
        elif operation.type.startswith("constexpr_"):
            held = {name: constants[v.name] if isinstance(v, _Name) else v for name, v in given.items()}
            held = {n: v.astype(np.float32) if isinstance(v, np.ndarray) else v for n, v in held.items()}
            constants[outputs[0]] = _dequantised(operation.type, held, dtype)
        else:
            steps.append(Step(operation.type, given, outputs))
    return Function(inputs, states, tuple(steps), constants, tuple(block.outputs))


def _dequantised(operation: str, held: Mapping[str, Any], dtype: type) -> Values:
    made = computed(operation, held)
    assert isinstance(made, np.ndarray)  # one weight
    return made.astype(dtype)


def _as_kept(value: Any, dtype: type) -> Any:
    return value.astype(dtype, copy=False) if is_half(value) else value


def _bound(argument: Any, context: Any, kept: dict[tuple[str, int], Any]) -> Any:
    found = [
        _Name(one.name) if one.WhichOneof("binding") == "name" else _value(one.value, context, kept)
        for one in argument.arguments
    ]
    return found[0] if len(found) == 1 else found


def _value(spec: Any, context: Any, kept: dict[tuple[str, int], Any]) -> Any:
    """Functions that share a weight share it here too."""
    from coremltools.converters.mil.frontend.milproto.load import _load_value

    if spec.WhichOneof("value") != "blobFileValue":
        return _load_value(context, spec)
    place = spec.blobFileValue.fileName, int(spec.blobFileValue.offset)
    if place not in kept:
        kept[place] = _load_value(context, spec)
    return kept[place]
