"""How tests of kernels hold weights, and what they need."""

from __future__ import annotations

import shutil
from functools import partial

import pytest
import torch
from torch import Tensor

from engines.kernels import tables
from engines.model.quantised import quantise_fp8, quantise_int4, quantise_int8, quantise_mxfp4, store

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler: torch computes everything")
needs_bf16 = pytest.mark.skipif(tables.why_not_bf16() is not None, reason=f"no bf16 here: {tables.why_not_bf16()}")
needs_byte_attention = pytest.mark.skipif(
    tables.why_no_byte_attention() is not None, reason=f"no attention by bytes here: {tables.why_no_byte_attention()}"
)

STORED = {
    "fp32": lambda w: w,
    "bf16": lambda w: w.bfloat16(),
    "fp16": lambda w: w.half(),
    "int8": quantise_int8,
    "fp8": quantise_fp8,
    "int4 g32": lambda w: quantise_int4(w, 32),
    "int4 g64": lambda w: quantise_int4(w, 64),
    "int4 g128": lambda w: quantise_int4(w, 128),
    "mxfp4": quantise_mxfp4,
}
stored = pytest.mark.parametrize("form", STORED)
ROUNDED = {form: partial(store, form=form, arithmetic="int8") for form in ("int8", "int4-g32", "int4-g64", "int4-g128")}
"""Forms whose products may round their inputs."""
rounds = pytest.mark.parametrize("form", ROUNDED)


def random(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())
