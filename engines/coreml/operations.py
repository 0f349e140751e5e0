"""The MIL operations that our graphs are made of, in numpy: what a saved package computes, without a Mac.

In fp16 each operation takes fp16 values, computes in float64 (a product its sum too), and rounds what it gives to fp16
once. In fp32 nothing is rounded; constants are those of the package. An operation that is not here is an error and
never a guess.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.errors import EngineError

Values = NDArray[Any]
Given = Mapping[str, Any]
"""The operation's inputs by name: arrays, numbers, texts, or a list of arrays."""

EXP_IS_0 = -746.0
"""Below it exp is nearer to 0 than to the smallest float64."""


def computed(operation: str, given: Given) -> Values | list[Values]:
    """Unrounded, in the type of what is given.

    Raises `EngineError` for what is not one of our operations, or asks more than ours do.
    """
    if operation not in OPERATIONS:
        raise EngineError(f"operation {operation}: the interpreter knows {', '.join(sorted(OPERATIONS))}")
    return OPERATIONS[operation](given)


def _convolution(given: Given) -> Values:
    """1x1, over (1, C, 1, S)."""
    x, weight = given["x"], given["weight"]
    unusual = [
        name
        for name, plain in (("strides", 1), ("dilations", 1), ("groups", 1), ("pad", 0))
        if name in given and any(number != plain for number in _whole(given[name]))
    ]
    if weight.shape[2:] != (1, 1) or unusual:
        raise EngineError(
            f"conv of a kernel {weight.shape[2:]}{' with ' if unusual else ''}{' '.join(unusual)}: not 1x1"
        )
    out = np.matmul(weight[:, :, 0, 0], x.reshape(*x.shape[:2], -1)).reshape(x.shape[0], -1, *x.shape[2:])
    biased: Values = out if given.get("bias") is None else out + given["bias"][:, None, None]
    return biased


def _product(given: Given) -> Values:
    x, y = given["x"], given["y"]
    x = np.swapaxes(x, -1, -2) if given.get("transpose_x") else x
    y = np.swapaxes(y, -1, -2) if given.get("transpose_y") else y
    product: Values = np.matmul(x, y)
    return product


def _split(given: Given) -> list[Values]:
    return list(np.split(given["x"], int(given["num_splits"]), axis=int(given["axis"])))


def _concat(given: Given) -> Values:
    if given.get("interleave"):
        raise EngineError("concat interleaves, and none of our graphs does")
    return np.concatenate(given["values"], axis=int(given["axis"]))


def _slice(given: Given) -> Values:
    places = tuple(slice(b, b + n) for b, n in zip(_whole(given["begin"]), _whole(given["size"]), strict=True))
    found: Values = given["x"][places]
    return found


def _softmax(given: Given) -> Values:
    x, axis = given["x"], int(given["axis"])
    below = x - x.max(axis=axis, keepdims=True)
    # Of what is masked exp is 0, which it takes ten times as long to find as a number.
    powers = np.exp(below, where=~(below < EXP_IS_0), out=np.zeros_like(below))
    shares: Values = powers / powers.sum(axis=axis, keepdims=True)
    return shares


def _sigmoid(x: Values) -> Values:
    with np.errstate(over="ignore"):  # exp of a large negative: 1 / inf is 0, as it should be
        return 1 / (1 + np.exp(-x))


def _gelu(given: Given) -> Values:
    x = given["x"]
    if given.get("mode") != "TANH_APPROXIMATION":
        raise EngineError(f"gelu in mode {given.get('mode')}: ours is TANH_APPROXIMATION")
    found: Values = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return found


def _reduced(how: Callable[..., Values]) -> Callable[[Given], Values]:
    return lambda given: how(given["x"], axis=tuple(_whole(given["axes"])), keepdims=bool(given["keep_dims"]))


def _dequantised(given: Given) -> Values:
    """constexpr_blockwise_shift_scale: each scale is of a block of equal length on each axis."""
    data, scale = given["data"].astype(np.float32), given["scale"]
    if given.get("offset") is not None:
        raise EngineError("constexpr_blockwise_shift_scale has an offset, and ours have none")
    for axis, (n, n_scales) in enumerate(zip(data.shape, scale.shape, strict=True)):
        scale = np.repeat(scale, n // n_scales, axis=axis)
    found: Values = data * scale
    return found


def plain(value: Any) -> Any:
    """Whole numbers and yes or no as Python's own, which operations would make of them each time."""
    return value.tolist() if isinstance(value, np.ndarray) and value.dtype.kind in "iub" and value.ndim < 2 else value


def _whole(numbers: Any) -> Sequence[int]:
    if isinstance(numbers, list):
        return numbers
    found: list[int] = np.asarray(numbers).reshape(-1).astype(int).tolist()
    return found


OPERATIONS: Mapping[str, Callable[[Given], Values | list[Values]]] = {
    "abs": lambda given: np.abs(given["x"]),
    "add": lambda given: given["x"] + given["y"],
    "clip": lambda given: np.clip(given["x"], given["alpha"], given["beta"]),
    "concat": _concat,
    "constexpr_blockwise_shift_scale": _dequantised,
    "conv": _convolution,
    "gelu": _gelu,
    "identity": lambda given: given["x"],
    "matmul": _product,
    "maximum": lambda given: np.maximum(given["x"], given["y"]),
    "minimum": lambda given: np.minimum(given["x"], given["y"]),
    "mul": lambda given: given["x"] * given["y"],
    "real_div": lambda given: given["x"] / given["y"],
    "reduce_max": _reduced(np.max),
    "reduce_mean": _reduced(np.mean),
    "reshape": lambda given: given["x"].reshape(_whole(given["shape"])),
    "rsqrt": lambda given: 1 / np.sqrt(given["x"] + given["epsilon"]),
    "sigmoid": lambda given: _sigmoid(given["x"]),
    "silu": lambda given: given["x"] * _sigmoid(given["x"]),
    "slice_by_size": _slice,
    "softmax": _softmax,
    "split": _split,
    "sub": lambda given: given["x"] - given["y"],
    "tanh": lambda given: np.tanh(given["x"]),
}
"""Beside them graphs read and update their state, which `engines.coreml.interpreter` keeps."""

MOVES = frozenset({"concat", "identity", "reshape", "slice_by_size", "split"})
"""What they give is among what they are given: nothing to round."""
