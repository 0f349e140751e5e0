"""The rules by which an operation stays on the Apple Neural Engine (ANE), as others reported them.

One table holds them all. None was tried by us: no Mac has run this. Each rule says where it comes from:

    000, Fig. 4     the support table of source 000 (NPUMoE), and its text where a section is named
    reported        by users of Core ML; the number is an issue of apple/coremltools where one is known

A rule is a check of one subject (an operation, a function, all functions of a folder), and gives what it found in words
or None. Effects: "leaves" the ANE, "slow" on it, "fails" (does not compile, crashes, or computes wrongly), "unclear"
(reports disagree). The last is a note: it fails no check.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from engines.coreml.package_reading import Function, Operation, all_types, axes_of
from engines.techniques.layout.tiers import GRAPH_BYTES
from results.units import GIB

Effect = Literal["leaves", "slow", "fails", "unclear"]
FIGURE_4 = "000, Fig. 4"
SHAPES_000 = "000, section 3.2"
REPORTED = "reported, untried by us"

MOST_RANK, MOST_AXIS, DEEPEST, LAST_AXIS_BYTES, MULTIPLE, STATE_MULTIPLE, MOST_GRAPHS = (
    5,
    65_536,
    16_384,
    64,
    16,
    32,
    119,
)
BAD_TOP_K = (3, 4)
INPUT = "input"
"""Kind of the operation that stands for an input of a function: its shape is checked as one that was computed."""

CONVOLUTIONS = {"conv", "conv_transpose"}
PRODUCTS = {"matmul", "linear"}
ACTIVATIONS = {
    "relu", "relu6", "gelu", "sigmoid", "silu", "tanh", "softplus", "softplus_parametric", "softsign", "elu",
    "leaky_relu", "clamped_relu", "prelu", "sigmoid_hard", "scaled_tanh", "linear_activation", "thresholded_relu",
    "erf", "softmax",
}  # fmt: skip
ELEMENT_WISE = {
    "add", "sub", "mul", "real_div", "maximum", "minimum", "pow", "sqrt", "rsqrt", "exp", "exp2", "log", "abs",
    "square", "clip", "inverse", "sign", "threshold", "sin", "cos",
}  # fmt: skip
REDUCTIONS = {
    "reduce_sum", "reduce_mean", "reduce_max", "reduce_min", "reduce_prod", "reduce_l1_norm", "reduce_l2_norm",
    "reduce_log_sum", "reduce_log_sum_exp", "reduce_sum_square", "softmax", "layer_norm", "l2_norm", "cumsum",
}  # fmt: skip
GATHERS = {
    "gather", "gather_along_axis", "gather_nd", "scatter", "scatter_along_axis", "scatter_nd", "torch_tensor_assign",
}  # fmt: skip
TOP_K = {"topk", "argsort", "reduce_argmax", "reduce_argmin"}
COMPARISONS = {"greater", "greater_equal", "less", "less_equal", "equal", "not_equal"}
CUSTOM = {"custom_layer", "custom"}
SLICES = {"slice_by_index", "slice_by_size", "slice_update"}
STATES = {"read_state", "write_state", "coreml_update_state"}
COMPRESSED = "constexpr_"
LISTED = (
    CONVOLUTIONS | PRODUCTS | ACTIVATIONS | ELEMENT_WISE | REDUCTIONS | GATHERS | TOP_K | COMPARISONS | CUSTOM | STATES
    | {INPUT, "layer_norm"}
)  # fmt: skip
"""Operations that a source says something about. Lint counts the others, and says that nobody does."""

OperationCheck = Callable[[Operation, Function], str | None]
FunctionCheck = Callable[[Function], str | None]
FolderCheck = Callable[[Sequence[Function]], str | None]


class Rule(NamedTuple):
    name: str
    says: str
    effect: Effect
    origin: str
    remedy: str
    of_operation: OperationCheck | None = None
    of_function: FunctionCheck | None = None
    of_folder: FolderCheck | None = None


def _dtype(operation: Operation, function: Function) -> str | None:
    if operation.kind == INPUT or operation.kind.startswith(COMPRESSED):
        return None
    return next((str(t) for t in all_types(function, operation) if t.dtype not in ("float16", "string")), None)


def _rank(operation: Operation, function: Function) -> str | None:
    return next((f"rank {len(t.shape)}" for t in all_types(function, operation) if len(t.shape) > MOST_RANK), None)


def _axis(operation: Operation, function: Function) -> str | None:
    large = (n for t in all_types(function, operation) for n in t.shape if n is not None and n > MOST_AXIS)
    return next((f"an axis of {n}" for n in large), None)


def _last_axis(operation: Operation, function: Function) -> str | None:
    if operation.kind.startswith(COMPRESSED):
        return None
    for one in operation.outputs.values():
        last = one.shape[-1] if one.shape else None
        if last is not None and (last * one.item_bytes) % LAST_AXIS_BYTES:
            return f"{one}: {last * one.item_bytes:g} bytes"
    return None


def _multiple(operation: Operation, function: Function) -> str | None:
    """Channels and positions of a convolution; the two axes of a product."""
    if operation.kind not in CONVOLUTIONS | PRODUCTS:
        return None
    given = [t for name in ("x", "y") for t in function.of(operation, name)] + list(operation.outputs.values())
    if operation.kind in CONVOLUTIONS:
        axes = [(t, n) for t in given for n in (t.shape[1], t.shape[-1])]
        axes += [(t, n) for t in function.of(operation, "weight") for n in t.shape[:2]]
    else:
        axes = [(t, n) for t in (*given, *function.of(operation, "weight")) for n in t.shape[-2:]]
    return next((f"{t}: an axis of {n}" for t, n in axes if n is not None and n % MULTIPLE), None)


def _product_of_constant(operation: Operation, function: Function) -> str | None:
    if operation.kind == "linear":
        return "linear"
    if operation.kind == "matmul" and any(function.is_constant(operation, side) for side in ("x", "y")):
        return "matmul with a constant"
    return None


def _reduction(operation: Operation, function: Function) -> str | None:
    given = function.of(operation, "x")
    if operation.kind not in REDUCTIONS or not given:
        return None
    shape = given[0].shape
    named = next((p for p in ("axes", "axis") if operation.inputs.get(p)), None)
    axes = axes_of(None if named is None else function.value(operation, named), len(shape))
    depth = math.prod(shape[axis] or 1 for axis in axes)
    return f"{depth} deep" if depth > DEEPEST else None


def _gather(operation: Operation, function: Function) -> str | None:
    if operation.kind not in GATHERS:
        return None
    return "constant indices" if function.is_constant(operation, "indices") else "indices that are computed"


def _indexing(operation: Operation, function: Function) -> str | None:
    if operation.kind not in SLICES:
        return None
    moving = [p for p in ("begin", "end", "size") if not function.is_constant(operation, p)]
    return f"a computed {' and '.join(moving)}" if moving else None


def _top_k(operation: Operation, function: Function) -> str | None:
    return operation.kind if operation.kind in TOP_K else None


def _top_3_or_4(operation: Operation, function: Function) -> str | None:
    k = function.value(operation, "k") if operation.kind == "topk" else None
    return f"k = {k}" if k in BAD_TOP_K else None


def _one_of(kinds: set[str]) -> OperationCheck:
    return lambda operation, function: operation.kind if operation.kind in kinds else None


def _dilated(operation: Operation, function: Function) -> str | None:
    given = function.value(operation, "dilations") if operation.kind in CONVOLUTIONS else None
    return f"dilations {list(given)}" if given and any(n > 1 for n in given) else None


def _unknown_size(operation: Operation, function: Function) -> str | None:
    if "enumerated" in function.flexible.values() and "range" not in function.flexible.values():
        return None  # each of its shapes is fixed
    return next((str(t) for t in operation.outputs.values() if None in t.shape), None)


def _bits_of(operation: Operation, function: Function, *parameters: str) -> int | None:
    given = [t for p in parameters for t in function.of(operation, p)]
    return round(8 * given[0].item_bytes) if given else None


def _narrow_weights(operation: Operation, function: Function) -> tuple[int, bool] | None:
    """Bits of the integers of a compressed weight, and whether there is one scale for each output channel."""
    if operation.kind == "constexpr_affine_dequantize":
        bits = _bits_of(operation, function, "quantized_data")
        scale = function.of(operation, "scale")
        return None if bits is None else (bits, bool(scale and scale[0].shape))
    if operation.kind != "constexpr_blockwise_shift_scale":
        return None
    bits = _bits_of(operation, function, "data")
    scale, data = function.of(operation, "scale"), function.of(operation, "data")
    if bits is None or not scale or not data:
        return None
    return bits, scale[0].shape[:1] == data[0].shape[:1] and all(n == 1 for n in scale[0].shape[1:])


def _integer_weights(operation: Operation, function: Function) -> str | None:
    found = _narrow_weights(operation, function)
    if found is None or found == (8, True):
        return None
    return f"int{found[0]}, {'one scale a channel' if found[1] else 'scales of blocks or of the whole'}"


def _int8_per_channel(operation: Operation, function: Function) -> str | None:
    return "int8, one scale a channel" if _narrow_weights(operation, function) == (8, True) else None


def _palette(operation: Operation, function: Function) -> str | None:
    if operation.kind != "constexpr_lut_to_dense" or not function.states:
        return None
    bits = _bits_of(operation, function, "indices")
    if bits == 8 and (table := function.of(operation, "lut")) and len(table[0].shape) == 1:
        bits = round(math.log2(table[0].shape[0] or 1))  # older packages keep packed indices as bytes
    return f"palette of {bits} bits, {len(function.states)} states"


def _range(function: Function) -> str | None:
    return _named(name for name, kind in function.flexible.items() if kind == "range")


def _enumerated(function: Function) -> str | None:
    if not any(o.kind == "layer_norm" for o in function.operations):
        return None
    return _named(name for name, kind in function.flexible.items() if kind == "enumerated")


def _named(found: Any) -> str | None:
    names = list(found)
    return f"input {', '.join(names)}" if names else None


def _twice(function: Function) -> str | None:
    return ", ".join(sorted(function.bound_twice)) or None


def _state_size(function: Function) -> str | None:
    for name, kind in function.states.items():
        for n in kind.shape[-2:]:
            if n is not None and n > 1 and n % STATE_MULTIPLE:
                return f"state {name} {kind}: an axis of {n}"
    return None


def _stateful_decode(function: Function) -> str | None:
    hidden = [t for t in function.inputs.values() if t.dtype == "float16" and len(t.shape) == 4]
    one_position = hidden and all(t.shape[2:] == (1, 1) or t.shape[:2] == (1, 1) for t in hidden)
    return f"{len(function.states)} states, one position" if function.states and one_position else None


def _weights(function: Function) -> str | None:
    n = function.weight_bytes
    return f"{n / GIB:.3g} GiB of weights" if n > GRAPH_BYTES else None


def _graphs(functions: Sequence[Function]) -> str | None:
    return f"{len(functions)} graphs" if len(functions) > MOST_GRAPHS else None


RULES: tuple[Rule, ...] = (
    Rule("dtype", "everything is fp16", "leaves", REPORTED,
         "declare inputs fp16, convert with compute_precision FLOAT16; leave counts and masks to the host",
         of_operation=_dtype),
    Rule("rank", f"at most {MOST_RANK} axes", "leaves", REPORTED, "merge axes: (B, C, 1, S)", of_operation=_rank),
    Rule("axis", f"no axis above {MOST_AXIS}", "leaves", REPORTED,
         "split the axis, as heads of a vocabulary are split", of_operation=_axis),
    Rule("last-axis", f"the last axis fills whole {LAST_AXIS_BYTES} bytes", "leaves", REPORTED,
         "put positions last and pad them: a multiple of 32 in fp16", of_operation=_last_axis),
    Rule("multiple", f"channels and positions are multiples of {MULTIPLE}", "slow", SHAPES_000,
         f"pad the axis: tiers and chunks in multiples of {MULTIPLE}", of_operation=_multiple),
    Rule("matmul", "weights are 1x1 convolutions", "slow", REPORTED + "; 000, section 3.2",
         "write the product as a 1x1 convolution over (B, C, 1, S): reported to be three times as fast",
         of_operation=_product_of_constant),
    Rule("reduction", f"reductions are at most {DEEPEST} deep", "leaves", REPORTED,
         "reduce in two steps", of_operation=_reduction),
    Rule("gather", "no gather and no scatter", "leaves", FIGURE_4 + "; for computed indices reported too",
         "gather and scatter on the host, around the graph", of_operation=_gather),
    Rule("indexing", "no computed place of a slice", "leaves", FIGURE_4,
         "write with a mask, or keep the place on the host", of_operation=_indexing),
    Rule("topk", "no choice of the largest", "leaves", FIGURE_4,
         "choose experts on the host", of_operation=_top_k),
    Rule("topk-3-4", "no topk with k = 3 or 4", "leaves", REPORTED,
         "choose experts on the host, or take k = 5 and leave out the rest", of_operation=_top_3_or_4),
    Rule("comparison", "no comparisons", "leaves", FIGURE_4,
         "pass masks as inputs, made on the host", of_operation=_one_of(COMPARISONS)),
    Rule("layer-norm", "no layer norm", "leaves", FIGURE_4,
         "norm on the host, or spell it out: mean, square, rsqrt", of_operation=_one_of({"layer_norm"})),
    Rule("dilated", "no dilated convolution", "leaves", FIGURE_4, "spread the kernel with zeros",
         of_operation=_dilated),
    Rule("custom", "no custom operator", "leaves", FIGURE_4, "write it with operations of MIL",
         of_operation=_one_of(CUSTOM)),
    Rule("dynamic", "no size that a prediction decides", "leaves", FIGURE_4,
         "convert one function a shape (multifunction shares the weights)", of_operation=_unknown_size),
    Rule("range", "inputs have fixed shapes", "leaves", REPORTED,
         "convert one function a shape (multifunction shares the weights)", of_function=_range),
    Rule("enumerated", "no layer norm beside enumerated shapes", "leaves", REPORTED,
         "one function a shape, or norm on the host", of_function=_enumerated),
    Rule("integer-weights", "weights are fp16, or int8 with a scale a channel", "leaves", REPORTED + " (seen on an M4)",
         "keep fp16, which is the default, or int8 per channel", of_operation=_integer_weights),
    Rule("int8", "int8 with a scale a channel", "unclear", REPORTED,
         "one report calls it safe, another saw int8 constants on the CPU of an M4: look at the placement on your Mac",
         of_operation=_int8_per_channel),
    Rule("palette", "no palettes beside states", "fails", REPORTED + " (coremltools 2716, 2688)",
         "fp16, or the stateless variant: 4 bits crashed after 100 to 200 predictions, or were wrong",
         of_operation=_palette),
    Rule("state-size", f"the last two axes of a state are multiples of {STATE_MULTIPLE}", "fails",
         REPORTED + " (coremltools 2631)", f"pad the state to {STATE_MULTIPLE}", of_function=_state_size),
    Rule("stateful-decode", "no state where one position is decoded", "fails", REPORTED + " (error -14)",
         "take the stateless variant for decoding", of_function=_stateful_decode),
    Rule("names", "a name is bound once", "fails", "MIL's own form: a value is defined once",
         "rename one: a Mac may refuse the package, or take the wrong value", of_function=_twice),
    Rule("weights", f"at most 1.2 GiB of weights a graph ({GRAPH_BYTES} bytes)", "leaves",
         "000, section 4.2 (an M2 Ultra)", "smaller groups", of_function=_weights),
    Rule("graphs", f"about {MOST_GRAPHS} graphs a process", "fails", REPORTED,
         "larger groups, or load a layer's graphs when it is their turn", of_folder=_graphs),
)  # fmt: skip
