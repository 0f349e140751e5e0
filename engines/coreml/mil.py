"""Graphs written with coremltools: one program a package, its functions sharing their weights.

Everything is fp16 from the first to the last value, so that no pass has to change types, and every shape is fixed.
Linear layers are 1x1 convolutions over (1, C, 1, S), as the Neural Engine wants them. What it does not compute is
not here: no gather, scatter, top-k or layer norm; rows are gathered, and scattered, by the host.

A key or value goes into a state by a product with a matrix of zeros and ones that the host gives: a place that depends
on the input would be a dynamic index. The product is exact.

Legend: H hidden, N query heads, M key/value heads, G query heads of a key/value head, D features of a head, P pairs of
turned features, T tokens of the chunk, S positions, O outputs and I inputs of a matrix.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from engines.coreml.contents import (
    INT4_BLOCK,
    MASKED,
    Array,
    AttentionContent,
    Content,
    ExpertsContent,
    GatedContent,
    HeadNorm,
    LinearContent,
)
from engines.coreml.manifest import GraphFunction, PackagePlan, Weights
from engines.coreml.planned import ALIGN
from engines.coreml.toolkit import load_coremltools
from engines.errors import EngineError
from engines.model.architecture import GatedUnit

SMALLEST = 2.0**-14
"""The smallest normal fp16: what a norm divides by is no less."""


class MilConverter:
    """A `Converter`."""

    def __init__(self) -> None:
        """Raises `EngineError`."""
        self._tools = load_coremltools()
        self.version = f"coremltools {self._tools.__version__}"

    def write(self, plan: PackagePlan, content: Content, weights: Weights, path: Path) -> None:
        from coremltools.converters.mil import mil
        from coremltools.converters.mil.converter import mil_convert

        target = self._tools.target.iOS18
        program = mil.Program()
        kept: dict[str, tuple[Any, Any]] = {}
        for function in plan.functions:
            build = _Graph(function, weights, kept)
            inputs = build.inputs(content)
            with mil.Function(inputs, opset_version=target) as made:
                made.set_outputs(build.outputs(content, made.inputs))
            program.add_function(function.name, made)
        program.default_function_name = plan.default_function
        program.skip_all_passes = True
        no_passes = self._tools.PassPipeline.EMPTY
        program.export_as_multifunction = True
        with _without_passes():
            model = mil_convert(
                program,
                convert_to="mlprogram",
                convert_from="milinternal",
                specification_version=target,
                compute_units=self._tools.ComputeUnit.CPU_ONLY,
                skip_model_load=True,
                package_dir=str(path),
                pass_pipeline=no_passes,
            )
            del model
        if not path.is_dir():
            raise EngineError(f"{path}: {self.version} wrote no package")


@contextmanager
def _without_passes() -> Iterator[None]:
    """Those of the front and the back end are left out too. All of them do nothing here, and before and behind each
    coremltools checks the whole program; its writer checks it once more. No bars of progress either."""
    from coremltools.converters.mil.mil.passes.pass_pipeline import PassPipelineManager

    before, level = PassPipelineManager.__dict__["apply_pipeline"], logging.getLogger("coremltools").level
    PassPipelineManager.apply_pipeline = staticmethod(lambda program, pipeline: None)
    try:
        yield
    finally:
        PassPipelineManager.apply_pipeline = before
        logging.getLogger("coremltools").setLevel(level)


class _Graph:
    """One function of a package: its inputs, and its operations in coremltools' builder."""

    def __init__(self, function: GraphFunction, weights: Weights, kept: dict[str, tuple[Any, Any]]) -> None:
        """kept: narrow matrices of the package's other functions, by name, which share them."""
        from coremltools.converters.mil import Builder
        from coremltools.converters.mil.mil import types

        self._mb: Any = Builder
        self._types: Any = types
        self._function = function
        self._weights = weights
        self._kept = kept

    def inputs(self, content: Content) -> dict[str, Any]:
        function = self._function
        if isinstance(content, ExpertsContent):
            first = next(iter(content.units.values()))
            n_rows = function.rows * max(len(function.experts), 1)
            return {"x": self._placeholder(1, first.gate.weight_OI.shape[1], 1, n_rows)}
        assert function.past is not None  # attention has positions
        rows, past = function.rows, function.past
        inputs = {"x": self._placeholder(1, content.query.weight_OI.shape[1], 1, rows)}
        if content.n_pairs:
            inputs |= {name: self._placeholder(1, 1, content.n_pairs, rows) for name in ("cos", "sin")}
        n_kept = content.n_kv_heads * content.head_dim
        if function.stateful:
            inputs["mask"] = self._placeholder(1, 1, rows, past)
            inputs["place"] = self._placeholder(1, 1, rows, past)
            inputs["keep"] = self._placeholder(1, 1, 1, past)
            shape = (1, n_kept, 1, past)
            for name in ("key_cache", "value_cache"):
                inputs[name] = self._mb.state_tensor_placeholder(shape=shape, dtype=self._types.fp16)
        else:
            inputs["mask"] = self._placeholder(1, 1, rows, past + rows)
            inputs |= {name: self._placeholder(1, n_kept, 1, past) for name in ("past_key", "past_value")}
        return inputs

    def _placeholder(self, *shape: int) -> Any:
        return self._mb.placeholder(shape=shape, dtype=self._types.fp16)

    def outputs(self, content: Content, inputs: dict[str, Any]) -> list[Any]:
        if isinstance(content, ExpertsContent):
            return [self._experts(content, inputs["x"])]
        return self._attention(content, inputs)

    # --- gated units --------------------------------------------------------------------------------------------------

    def _experts(self, content: ExpertsContent, x: Any) -> Any:
        experts, rows = self._function.experts or (0,), self._function.rows
        if len(experts) == 1:
            return self._gated(content.units[experts[0]], content.unit, x, experts[0], "y")
        parts = self._mb.split(x=x, num_splits=len(experts), axis=3)
        assert all(part.shape[3] == rows for part in parts)
        own = [
            self._gated(content.units[expert], content.unit, part, expert)
            for expert, part in zip(experts, parts, strict=True)
        ]
        return self._mb.concat(values=own, axis=3, name="y")

    def _gated(self, weights: GatedContent, unit: GatedUnit, x: Any, expert: int, name: str | None = None) -> Any:
        gate = self._linear(weights.gate, x, f"expert_{expert}_gate")
        up = self._linear(weights.up, x, f"expert_{expert}_up")
        return self._linear(weights.down, self._joined(gate, up, unit), f"expert_{expert}_down", name)

    def _joined(self, gate: Any, up: Any, unit: GatedUnit) -> Any:
        mb = self._mb
        if unit.limit is not None:
            # There is no lower limit of a gate: fp16's own is.
            gate = mb.minimum(x=gate, y=np.float16(unit.limit))
            up = mb.clip(x=up, alpha=np.float16(-unit.limit), beta=np.float16(unit.limit))
        if unit.alpha is not None:
            active = mb.mul(x=gate, y=mb.sigmoid(x=mb.mul(x=gate, y=np.float16(unit.alpha))))
            return mb.mul(x=active, y=mb.add(x=up, y=np.float16(1)))
        active = mb.silu(x=gate) if unit.activation == "silu" else mb.gelu(x=gate, mode="TANH_APPROXIMATION")
        return mb.mul(x=active, y=up)

    def _linear(self, linear: LinearContent, x: Any, name: str, out: str | None = None) -> Any:
        """A 1x1 convolution. Constants of one name are one weight in all functions of the package."""
        more = {} if linear.bias_O is None else {"bias": self._const(f"{name}_bias", linear.bias_O)}
        named = {} if out is None else {"name": out}
        return self._mb.conv(x=x, weight=self._matrix(f"{name}_weight", linear.weight_OI), **more, **named)

    def _const(self, name: str, value: Any) -> Any:
        made = self._mb.const(val=_narrow(value), name=name)
        made.op.weight_id = name
        return made

    def _matrix(self, name: str, weight_OI: Array) -> Any:
        weight = weight_OI[:, :, None, None]
        if self._weights == "float16":
            return self._const(name, weight)
        if name not in self._kept:
            self._kept[name] = quantised(weight_OI, self._weights)
        data, scale = self._kept[name]
        held = []
        for part, value in (("data", data), ("scale", scale)):
            if part == "data" and self._weights == "int4":
                value = value.astype(self._types.np_int4_dtype)
            const = self._mb.const(val=value[:, :, None, None], name=f"{name}_{part}")
            const.op.weight_id = f"{name}_{part}"
            held.append(const)
        return self._mb.constexpr_blockwise_shift_scale(data=held[0], scale=held[1], name=name)

    # --- attention ----------------------------------------------------------------------------------------------------

    def _attention(self, content: AttentionContent, inputs: dict[str, Any]) -> list[Any]:
        mb, function = self._mb, self._function
        rows, past = function.rows, function.past
        assert past is not None  # attention has positions
        x = inputs["x"]
        query, key, value = (
            self._linear(linear, x, name)
            for name, linear in (("query", content.query), ("key", content.key), ("value", content.value))
        )
        n_heads, n_kv, width = content.n_heads, content.n_kv_heads, content.head_dim
        query = self._turned(query, content.query_norm, n_heads, content, inputs, "query_norm_weight")
        key = self._turned(key, content.key_norm, n_kv, content, inputs, "key_norm_weight")
        query = mb.mul(x=query, y=np.float16(content.scale))
        key_new = mb.reshape(x=key, shape=(1, n_kv * width, 1, rows), name="key")
        value_new = self._clipped(value, content.clip)
        if function.stateful:
            keys = self._stored(inputs["key_cache"], key_new, inputs, past)
            values = self._stored(inputs["value_cache"], value_new, inputs, past)
            seen, more = past, []
        else:
            keys = mb.concat(values=[inputs["past_key"], key_new], axis=3)
            values = mb.concat(values=[inputs["past_value"], value_new], axis=3)
            seen = past + rows
            value_new = mb.identity(x=value_new, name="value")
            more = [key_new, value_new]
        group = n_heads // n_kv
        query = mb.reshape(x=query, shape=(n_kv, group, width, rows))
        keys = mb.reshape(x=keys, shape=(n_kv, 1, width, seen))
        values = mb.reshape(x=values, shape=(n_kv, 1, width, seen))
        scores = mb.matmul(x=query, y=keys, transpose_x=True)
        if content.softcap is not None:
            capped = mb.tanh(x=mb.mul(x=scores, y=np.float16(1 / content.softcap)))
            scores = mb.mul(x=capped, y=np.float16(content.softcap))
        scores = mb.add(x=scores, y=inputs["mask"])
        if content.sinks_N is not None:
            # One column is the sink; those behind it fill the last axis and count for nothing.
            sink = np.full((n_kv, group, rows, ALIGN), MASKED)
            sink[..., :1] = content.sinks_N.reshape(n_kv, group, 1, 1)
            scores = mb.concat(values=[scores, self._mb.const(val=_narrow(sink))], axis=3)
        weights = mb.softmax(x=scores, axis=-1)
        if content.sinks_N is not None:
            weights = mb.slice_by_size(x=weights, begin=[0, 0, 0, 0], size=[n_kv, group, rows, seen])
        mixed = mb.matmul(x=values, y=weights, transpose_y=True)
        mixed = mb.reshape(x=mixed, shape=(1, n_heads * width, 1, rows))
        return [self._linear(content.out, mixed, "out", "y"), *more]

    def _clipped(self, x: Any, limit: float | None) -> Any:
        return x if limit is None else self._mb.clip(x=x, alpha=np.float16(-limit), beta=np.float16(limit))

    def _turned(
        self,
        x: Any,
        norm: HeadNorm | None,
        n_heads: int,
        content: AttentionContent,
        inputs: dict[str, Any],
        name: str,
    ) -> Any:
        """(1, heads * D, 1, T) as (1, heads, D, T), normed and turned."""
        rows, width = self._function.rows, content.head_dim
        if norm is not None and norm.over_all:
            x = self._normed(x, norm, 1, (1, n_heads * width, 1, 1), name)
        x = self._mb.reshape(x=self._clipped(x, content.clip), shape=(1, n_heads, width, rows))
        steps: list[Callable[[Any], Any]] = []
        if norm is not None and not norm.over_all:
            own = norm
            steps.append(lambda x: self._normed(x, own, 2, (1, 1, width, 1), name))
        if content.n_pairs:
            steps.append(lambda x: self._rotated(x, content, n_heads, inputs))
        for step in reversed(steps) if content.norm_after else steps:
            x = step(x)
        return x

    def _rotated(self, x: Any, content: AttentionContent, n_heads: int, inputs: dict[str, Any]) -> Any:
        mb, pairs, rows = self._mb, content.n_pairs, self._function.rows

        def part(first: int, n: int) -> Any:
            return mb.slice_by_size(x=x, begin=[0, 0, first, 0], size=[1, n_heads, n, rows])

        first, second, cos, sin = part(0, pairs), part(pairs, pairs), inputs["cos"], inputs["sin"]
        turned = [
            mb.sub(x=mb.mul(x=first, y=cos), y=mb.mul(x=second, y=sin)),
            mb.add(x=mb.mul(x=second, y=cos), y=mb.mul(x=first, y=sin)),
        ]
        rest = content.head_dim - 2 * pairs
        return mb.concat(values=[*turned, part(2 * pairs, rest)] if rest else turned, axis=2)

    def _normed(self, x: Any, norm: HeadNorm, axis: int, shape: tuple[int, ...], name: str) -> Any:
        """x / sqrt(mean(x^2) + eps), of x over its largest, so that no square leaves fp16."""
        mb = self._mb
        largest = mb.reduce_max(x=mb.abs(x=x), axes=[axis], keep_dims=True)
        largest = mb.maximum(x=largest, y=np.float16(SMALLEST))
        small = mb.real_div(x=x, y=largest)
        mean = mb.reduce_mean(x=mb.mul(x=small, y=small), axes=[axis], keep_dims=True)
        root = mb.real_div(x=np.float16(math.sqrt(norm.eps)), y=largest)
        mean = mb.add(x=mean, y=mb.mul(x=root, y=root))
        normed = mb.mul(x=small, y=mb.rsqrt(x=mean, epsilon=np.float16(0)))
        return normed if norm.weight is None else mb.mul(x=normed, y=self._const(name, norm.weight.reshape(shape)))

    def _stored(self, state: Any, new: Any, inputs: dict[str, Any], past: int) -> Any:
        """The state with the chunk's columns where `place` puts them; `keep` is zero there and where nothing is."""
        mb, rows = self._mb, self._function.rows
        n_kept = new.shape[1]
        placed = mb.matmul(x=mb.reshape(x=new, shape=(1, 1, n_kept, rows)), y=inputs["place"])
        kept = mb.mul(x=mb.read_state(input=state), y=inputs["keep"])
        whole = mb.add(x=kept, y=mb.reshape(x=placed, shape=(1, n_kept, 1, past)))
        return mb.coreml_update_state(state=state, value=whole)


def _narrow(value: Any) -> Any:
    """fp16, in C order as the file holds it."""
    return np.ascontiguousarray(value, dtype=np.float16)


def quantised(weight_OI: Array, weights: Weights) -> tuple[Any, Any]:
    """(whole numbers, fp16 scales [out, blocks]): symmetric, of each row (int8) or of each block of 32 columns (int4).
    A row whose width does not divide into blocks has one scale."""
    n_rows, n_columns = weight_OI.shape
    block, most = (n_columns, 127) if weights == "int8" else (INT4_BLOCK, 7)
    if n_columns % block:
        block = n_columns
    blocks = weight_OI.astype(np.float32).reshape(n_rows, n_columns // block, block)
    largest = np.abs(blocks).max(axis=2)
    scale = np.maximum(largest / most, SMALLEST).astype(np.float16)
    data = np.clip(np.rint(blocks / scale.astype(np.float32)[:, :, None]), -most, most)
    return data.reshape(n_rows, n_columns).astype(np.int8), scale
