"""Small Core ML packages, written with the builder of coremltools: what tests of `joulebench coreml` read back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Made(NamedTuple):
    """A graph: its inputs by shape (and type), its states, and what it computes of the builder and its inputs."""

    inputs: Sequence[tuple[tuple[int, ...], str]]
    computes: Callable[..., Any]
    states: Sequence[tuple[int, ...]] = ()


def weights(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float16)


def program_of(made: Made) -> Any:
    logging.getLogger("coremltools").setLevel(logging.ERROR)
    import coremltools as ct
    from coremltools.converters.mil import Builder
    from coremltools.converters.mil.mil import types

    kinds = {"fp16": types.fp16, "fp32": types.fp32, "int32": types.int32}
    specs = [Builder.TensorSpec(shape, dtype=kinds[kind]) for shape, kind in made.inputs]
    specs += [Builder.StateTensorSpec(shape, dtype=types.fp16) for shape in made.states]
    names = ", ".join(f"x{i}" for i in range(len(specs)))
    # The builder takes the names of inputs from the function that it decorates.
    function = eval(f"lambda {names}: computes(mb, {names})", {"computes": made.computes, "mb": Builder})
    return Builder.program(input_specs=specs, opset_version=ct.target.iOS18)(function)


def write_package(path: Path, made: Made) -> Path:
    """As built: no pass of the converter changes it."""
    import coremltools as ct

    model = ct.convert(
        program_of(made),
        convert_to="mlprogram",
        minimum_deployment_target=ct.target.iOS18,
        pass_pipeline=ct.PassPipeline.EMPTY,
        skip_model_load=True,
    )
    model.save(str(path))
    return path


def write_multifunction(path: Path, functions: Mapping[str, Path]) -> Path:
    """One package of several, each as a function."""
    import coremltools as ct

    described = ct.utils.MultiFunctionDescriptor()
    for name, one in functions.items():
        described.add_function(str(one), src_function_name="main", target_function_name=name)
    described.default_function_name = next(iter(functions))
    ct.utils.save_multifunction(described, str(path))
    return path
