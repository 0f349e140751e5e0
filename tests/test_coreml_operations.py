"""Each operation of our graphs, as the interpreter computes it, against torch's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engines.coreml.operations import OPERATIONS, computed
from engines.errors import EngineError

X = np.random.default_rng(1).standard_normal((1, 6, 1, 8)).astype(np.float32) * 3
Y = np.random.default_rng(2).standard_normal((1, 6, 1, 8)).astype(np.float32)
W = np.random.default_rng(3).standard_normal((4, 6, 1, 1)).astype(np.float32)
B = np.random.default_rng(4).standard_normal(4).astype(np.float32)
Q = np.random.default_rng(5).standard_normal((2, 3, 4, 5)).astype(np.float32)
K = np.random.default_rng(6).standard_normal((2, 1, 4, 7)).astype(np.float32)
HALF = np.random.default_rng(7).integers(-127, 128, (4, 6, 1, 1)).astype(np.int8)
BLOCKS = np.random.default_rng(8).random((4, 2, 1, 1)).astype(np.float32)
x, y, w, b, q, k = map(torch.from_numpy, (X, Y, W, B, Q, K))

CASES: Mapping[str, list[tuple[dict[str, Any], Callable[[], Tensor | tuple[Tensor, ...]]]]] = {
    "abs": [({"x": X}, lambda: x.abs())],
    "add": [({"x": X, "y": Y}, lambda: x + y)],
    "clip": [({"x": X, "alpha": -1.5, "beta": 2.0}, lambda: x.clamp(-1.5, 2.0))],
    "concat": [({"values": [X, Y], "axis": 3}, lambda: torch.cat([x, y], 3))],
    "constexpr_blockwise_shift_scale": [
        (
            {"data": HALF, "scale": BLOCKS},
            lambda: torch.from_numpy(HALF).float() * torch.from_numpy(BLOCKS).repeat_interleave(3, dim=1),
        )
    ],
    "conv": [
        ({"x": X, "weight": W}, lambda: F.conv2d(x, w)),
        ({"x": X, "weight": W, "bias": B, "strides": [1, 1], "groups": 1}, lambda: F.conv2d(x, w, b)),
    ],
    "gelu": [({"x": X, "mode": "TANH_APPROXIMATION"}, lambda: F.gelu(x, approximate="tanh"))],
    "identity": [({"x": X}, lambda: x)],
    "matmul": [
        ({"x": Q, "y": K, "transpose_x": True}, lambda: q.mT @ k),
        ({"x": K, "y": Q @ np.ones((5, 7), np.float32), "transpose_y": True}, lambda: k @ (q @ torch.ones(5, 7)).mT),
    ],
    "maximum": [({"x": X, "y": Y}, lambda: torch.maximum(x, y))],
    "minimum": [({"x": X, "y": Y}, lambda: torch.minimum(x, y))],
    "mul": [({"x": X, "y": Y}, lambda: x * y)],
    "real_div": [({"x": X, "y": Y}, lambda: x / y)],
    "reduce_max": [({"x": X, "axes": [1], "keep_dims": True}, lambda: x.amax(1, keepdim=True))],
    "reduce_mean": [({"x": Q, "axes": [2], "keep_dims": True}, lambda: q.mean(2, keepdim=True))],
    "reshape": [({"x": X, "shape": [1, 2, 3, 8]}, lambda: x.reshape(1, 2, 3, 8))],
    "rsqrt": [({"x": np.abs(X), "epsilon": 0.0}, lambda: x.abs().rsqrt())],
    "sigmoid": [({"x": 40 * X}, lambda: torch.sigmoid(40 * x))],
    "silu": [({"x": 40 * X}, lambda: F.silu(40 * x))],
    "slice_by_size": [({"x": X, "begin": [0, 2, 0, 0], "size": [1, 3, 1, 8]}, lambda: x[:, 2:5])],
    "softmax": [
        ({"x": Q * 30, "axis": -1}, lambda: (q * 30).softmax(-1)),
        ({"x": Q * 1e4, "axis": -1}, lambda: (q * 1e4).softmax(-1)),
    ],
    "split": [({"x": X, "num_splits": 2, "axis": 3}, lambda: torch.split(x, 4, 3))],
    "sub": [({"x": X, "y": Y}, lambda: x - y)],
    "tanh": [({"x": X}, lambda: x.tanh())],
}


def test_every_operation_has_a_case() -> None:
    assert CASES.keys() == OPERATIONS.keys()


@pytest.mark.parametrize("name", CASES)
def test_as_torch(name: str) -> None:
    for given, of_torch in CASES[name]:
        found, wanted = computed(name, given), of_torch()
        pairs = zip(found, wanted, strict=True) if isinstance(wanted, tuple) else [(found, wanted)]
        for own, theirs in pairs:
            assert own.shape == tuple(theirs.shape)  # type: ignore[union-attr]
            np.testing.assert_allclose(own, theirs.numpy(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("topk", {"x": X}, "topk"),
        ("conv", {"x": X, "weight": np.ones((4, 6, 1, 3), np.float32)}, "not 1x1"),
        ("conv", {"x": X, "weight": W, "strides": [2, 2]}, "strides"),
        ("conv", {"x": X, "weight": W, "groups": 2}, "groups"),
        ("gelu", {"x": X, "mode": "EXACT"}, "EXACT"),
        ("concat", {"values": [X], "axis": 1, "interleave": True}, "interleaves"),
    ],
)
def test_what_ours_do_not_ask_for_is_refused(name: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineError, match=said):
        computed(name, given)
