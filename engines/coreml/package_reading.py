"""What a saved Core ML package holds: its functions, their operations and the shapes between them. Reads no weights.

A package is read as its specification (a protocol buffer), as coremltools writes it: layers of 3 GB are read in
milliseconds. Functions of one package share their weights: bytes that two of them name are one range of a file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from engines.coreml.toolkit import load_coremltools
from engines.errors import EngineError

SUFFIX = ".mlpackage"
BITS = {
    "BOOL": 8, "STRING": 0, "FLOAT16": 16, "FLOAT32": 32, "FLOAT64": 64, "BFLOAT16": 16,
    "INT4": 4, "INT8": 8, "INT16": 16, "INT32": 32, "INT64": 64,
    "UINT1": 1, "UINT2": 2, "UINT3": 3, "UINT4": 4, "UINT6": 6,
    "UINT8": 8, "UINT16": 16, "UINT32": 32, "UINT64": 64, "FLOAT8E4M3FN": 8, "FLOAT8E5M2": 8,
}  # fmt: skip
"""Of an element, by Core ML's name of its type."""
Flexibility = Literal["fixed", "enumerated", "range"]


class TensorType(NamedTuple):
    """dtype: in lower case. shape: None for a size that only a prediction decides."""

    dtype: str
    shape: tuple[int | None, ...]

    @property
    def item_bytes(self) -> float:
        return BITS.get(self.dtype.upper(), 0) / 8

    @property
    def n_bytes(self) -> int | None:
        return None if None in self.shape else math.ceil(math.prod(map(int, map(_known, self.shape))) * self.item_bytes)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join('?' if n is None else str(n) for n in self.shape)}]"


@dataclass(frozen=True)
class Operation:
    """One that computes; constants are none. inputs: names of what it takes. outputs: with their types."""

    kind: str
    name: str
    inputs: Mapping[str, tuple[str, ...]]
    outputs: Mapping[str, TensorType]


@dataclass
class Function:
    """One graph. types: of everything that has a name in it, constants too. values: of constants that are small."""

    name: str
    inputs: dict[str, TensorType] = field(default_factory=dict)
    states: dict[str, TensorType] = field(default_factory=dict)
    flexible: dict[str, Flexibility] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    types: dict[str, TensorType] = field(default_factory=dict)
    constants: set[str] = field(default_factory=set)
    values: dict[str, Any] = field(default_factory=dict)
    blobs: dict[tuple[str, int], int] = field(default_factory=dict)
    """Bytes of a weight, by its file and its place in it."""
    bound_twice: set[str] = field(default_factory=set)
    """Names that two operations give."""

    @property
    def weight_bytes(self) -> int:
        return sum(self.blobs.values())

    def of(self, operation: Operation, parameter: str) -> list[TensorType]:
        return [self.types[name] for name in operation.inputs.get(parameter, ()) if name in self.types]

    def is_constant(self, operation: Operation, parameter: str) -> bool:
        """Of a parameter that is given."""
        return all(name in self.constants for name in operation.inputs.get(parameter, ()))

    def value(self, operation: Operation, parameter: str) -> Any:
        """Of a small constant: a number, a text, or a list of them; None where it is neither."""
        names = operation.inputs.get(parameter, ())
        return self.values.get(names[0]) if len(names) == 1 else None


class Package(NamedTuple):
    """path: as found. functions: at least one."""

    path: Path
    functions: tuple[Function, ...]


def packages_below(folder: Path) -> list[Path]:
    """Every package of a folder, or the folder itself where it is one. Names with a dot before them are unfinished."""
    if folder.suffix == SUFFIX:
        return [folder]
    found = (path for path in sorted(folder.rglob(f"*{SUFFIX}")) if path.is_dir())
    return [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]


def read_package(path: Path) -> Package:
    """Raises `EngineError` where it is none, cannot be read, or holds no ML program."""
    load_coremltools()
    from coremltools.models.utils import load_spec
    from google.protobuf.message import DecodeError

    try:
        specification = load_spec(str(path))
    except (OSError, RuntimeError, ValueError, KeyError, AttributeError, DecodeError) as error:
        raise EngineError(f"{path}: cannot be read as a package ({error or type(error).__name__})") from error
    if specification.WhichOneof("Type") != "mlProgram" or not specification.mlProgram.functions:
        kind = specification.WhichOneof("Type") or "nothing"
        raise EngineError(f"{path}: holds no ML program but {kind}; convert to an ML program (iOS 15 or newer)")
    program = specification.mlProgram
    functions = tuple(_function(name, program.functions[name], specification) for name in sorted(program.functions))
    for file in {file for function in functions for file, _ in function.blobs}:
        weights = _weights_file(path, file)
        if not weights.is_file():
            raise EngineError(f"{path}: its weights are missing ({weights}); convert it again")
        needed = max(place + n for function in functions for (own, place), n in function.blobs.items() if own == file)
        if weights.stat().st_size < needed:
            raise EngineError(
                f"{path}: its weights are cut off ({weights} has {weights.stat().st_size} of at least {needed} bytes);"
                " convert it again"
            )
    return Package(path, functions)


def _weights_file(path: Path, named: str) -> Path:
    """named: `@model_path/weights/weight.bin`, from the folder of the specification."""
    return next(path.glob("Data/*/"), path) / named.removeprefix("@model_path/")


def _function(name: str, given: Any, specification: Any) -> Function:
    found = Function(name)
    for one in given.inputs:
        of_state = one.type.WhichOneof("type") == "stateType"
        kind = _tensor_type(one.type.stateType.wrappedType if of_state else one.type)
        if kind is not None:
            (found.states if of_state else found.inputs)[one.name] = kind
            found.types[one.name] = kind
    found.flexible = _flexibilities(name, specification)
    _read_block(found, given.block_specializations[given.opset])
    return found


def _flexibilities(name: str, specification: Any) -> dict[str, Flexibility]:
    described = specification.description
    inputs = next((f.input for f in described.functions if f.name == name), described.input)
    words: dict[str | None, Flexibility] = {"enumeratedShapes": "enumerated", "shapeRange": "range"}
    return {
        one.name: words.get(one.type.multiArrayType.WhichOneof("ShapeFlexibility"), "fixed")
        for one in inputs
        if one.type.WhichOneof("Type") == "multiArrayType"
    }


def _read_block(found: Function, block: Any) -> None:
    for given in block.operations:
        outputs = {one.name: kind for one in given.outputs if (kind := _tensor_type(one.type)) is not None}
        found.bound_twice |= outputs.keys() & found.types.keys()
        found.types |= outputs
        inputs: dict[str, tuple[str, ...]] = {}
        for parameter, argument in given.inputs.items():
            inputs[parameter] = tuple(_bound(found, b, f"{given.type}.{parameter}") for b in argument.arguments)
        if given.type == "const" or given.type.startswith("constexpr_"):
            found.constants |= set(outputs)
        for attribute, value in given.attributes.items():
            _note_value(found, value, next(iter(outputs), "") if attribute == "val" else "")
        if given.type != "const":
            named = next(
                (v.immediateValue.tensor.strings.values for k, v in given.attributes.items() if k == "name"), ()
            )
            name = next(iter(named), None) or next(iter(outputs), given.type)
            # Attributes of a compressed weight (older packages) are its inputs in newer ones.
            for attribute, value in given.attributes.items():
                if given.type.startswith("constexpr_") and attribute != "name" and attribute not in inputs:
                    key = f"{name}.{attribute}"
                    _note_value(found, value, key)
                    if (kind := _tensor_type(value.type)) is not None:
                        found.types[key] = kind
                    found.constants.add(key)
                    inputs[attribute] = (key,)
            found.operations.append(Operation(given.type, name, inputs, outputs))
        for inner in given.blocks:
            _read_block(found, inner)


def _bound(found: Function, binding: Any, where: str) -> str:
    """The name of what is bound; of a value that stands in its place, a name of our own."""
    if binding.WhichOneof("binding") == "name":
        return str(binding.name)
    name = f"{where}#{len(found.types)}"
    _note_value(found, binding.value, name)
    if (kind := _tensor_type(binding.value.type)) is not None:
        found.types[name] = kind
    found.constants.add(name)
    return name


def _note_value(found: Function, value: Any, name: str) -> None:
    """Keeps a small constant under a name, and the place and size of a large one."""
    if value.WhichOneof("value") == "blobFileValue":
        kind = _tensor_type(value.type)
        key = (value.blobFileValue.fileName, value.blobFileValue.offset)
        found.blobs[key] = 0 if kind is None or kind.n_bytes is None else kind.n_bytes
        return
    held = value.immediateValue.tensor
    which = held.WhichOneof("value")
    if not name or which is None or which == "bytes":
        return
    values = list(getattr(held, which).values)
    is_scalar = not value.type.tensorType.dimensions
    found.values[name] = values[0] if is_scalar and values else values


def _tensor_type(given: Any) -> TensorType | None:
    if given.WhichOneof("type") != "tensorType":
        return None
    from coremltools.proto import MIL_pb2

    of = given.tensorType
    shape = tuple(d.constant.size if d.WhichOneof("dimension") == "constant" else None for d in of.dimensions)
    return TensorType(MIL_pb2.DataType.Name(of.dataType).lower(), shape)


def _known(size: int | None) -> int:
    assert size is not None
    return size


def all_types(function: Function, operation: Operation) -> Iterator[TensorType]:
    """Of what an operation takes that is computed, and of what it gives."""
    for names in operation.inputs.values():
        yield from (function.types[n] for n in names if n in function.types and n not in function.constants)
    yield from operation.outputs.values()


def axes_of(given: Any, rank: int) -> Sequence[int]:
    """Of a reduction. given: a number or a list, negative from the end; None: all axes."""
    if given is None:
        return range(rank)
    return [axis % rank for axis in ([given] if isinstance(given, int) else given) if rank]
