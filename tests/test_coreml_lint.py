"""What would leave the Neural Engine: a package for each rule that breaks it, and one beside it that does not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from engines.coreml.eligibility import RULES, Rule
from engines.coreml.lint import lint, lint_folder
from engines.coreml.package_reading import Function, Package, TensorType, read_package
from engines.errors import ProblemsError
from tests.command import joulebench
from tests.coreml_packages import Made, weights, write_multifunction, write_package

pytest.importorskip("coremltools", reason="the extra coreml is not installed")

GOOD_SHAPE = (1, 64, 1, 32)
GOOD = [(GOOD_SHAPE, "fp16")]
BY_NAME = {rule.name: rule for rule in RULES}


def conv(mb: Any, x: Any, n_in: int = 64, n_out: int = 64, **options: Any) -> Any:
    return mb.conv(x=x, weight=weights(n_out, n_in, 1, 1), **options)


def dequantized(bits: int, scale_shape: tuple[int, ...]) -> Callable[..., Any]:
    from coremltools.converters.mil.mil import types

    held = types.np_int4_dtype if bits == 4 else np.int8

    def computes(mb: Any, x: Any) -> Any:
        data = np.ones((64, 64, 1, 1), dtype=np.int8).astype(held)
        weight = mb.constexpr_blockwise_shift_scale(data=data, scale=np.ones(scale_shape, dtype=np.float16))
        return mb.conv(x=x, weight=weight)

    return computes


def palette(mb: Any, x: Any, *states: Any) -> Any:
    from coremltools.converters.mil.mil import types

    indices = np.ones((64, 64, 1, 1), dtype=np.uint8).astype(types.np_uint4_dtype)
    y = mb.conv(x=x, weight=mb.constexpr_lut_to_dense(indices=indices, lut=weights(1, 1, 1, 1, 16, 1)))
    return mb.add(x=y, y=mb.read_state(input=states[0])) if states else y


def with_state(mb: Any, x: Any, state: Any) -> Any:
    return mb.mul(x=x, y=mb.reduce_sum(x=mb.read_state(input=state), keep_dims=False))


PAIRS: dict[str, tuple[Made, Made]] = {
    "dtype": (
        Made([(GOOD_SHAPE, "fp32")], lambda mb, x: mb.relu(x=x)),
        Made(GOOD, lambda mb, x: mb.relu(x=x)),
    ),
    "axis": (
        Made([((1, 65568), "fp16")], lambda mb, x: mb.relu(x=x)),
        Made([((1, 65536), "fp16")], lambda mb, x: mb.relu(x=x)),
    ),
    "last-axis": (
        Made([((1, 64, 1, 48), "fp16")], lambda mb, x: mb.relu(x=x)),
        Made([((1, 64, 1, 96), "fp16")], lambda mb, x: mb.relu(x=x)),
    ),
    "multiple": (
        Made(GOOD, lambda mb, x: conv(mb, x, n_out=40)),
        Made(GOOD, lambda mb, x: conv(mb, x, n_out=48)),
    ),
    "matmul": (
        Made([((1, 32, 64), "fp16")], lambda mb, x: mb.matmul(x=x, y=weights(64, 32))),
        Made([((1, 32, 64), "fp16"), ((1, 64, 32), "fp16")], lambda mb, x, y: mb.matmul(x=x, y=y)),
    ),
    "reduction": (
        Made([((1, 128, 1, 160), "fp16")], lambda mb, x: mb.reduce_sum(x=x, axes=[1, 3], keep_dims=True)),
        Made([((1, 128, 1, 128), "fp16")], lambda mb, x: mb.reduce_sum(x=x, axes=[1, -1], keep_dims=True)),
    ),
    "gather": (
        Made([*GOOD, ((8,), "int32")], lambda mb, x, at: mb.gather(x=x, indices=at, axis=1)),
        Made(GOOD, lambda mb, x: mb.slice_by_index(x=x, begin=[0, 0, 0, 0], end=[1, 32, 1, 32])),
    ),
    "indexing": (
        Made([*GOOD, ((4,), "int32")], lambda mb, x, at: mb.slice_by_size(x=x, begin=at, size=[1, 32, 1, 32])),
        Made(GOOD, lambda mb, x: mb.slice_by_size(x=x, begin=[0, 1, 0, 0], size=[1, 32, 1, 32])),
    ),
    "topk": (
        Made(GOOD, lambda mb, x: mb.topk(x=x, k=8, axis=1)),
        Made(GOOD, lambda mb, x: mb.reduce_max(x=x, axes=[1], keep_dims=True)),
    ),
    "topk-3-4": (
        Made(GOOD, lambda mb, x: mb.topk(x=x, k=4, axis=1)),
        Made(GOOD, lambda mb, x: mb.topk(x=x, k=5, axis=1)),
    ),
    "comparison": (
        Made(GOOD, lambda mb, x: mb.cast(x=mb.greater(x=x, y=np.float16(0)), dtype="fp16")),
        Made(GOOD, lambda mb, x: mb.maximum(x=x, y=np.float16(0))),
    ),
    "layer-norm": (
        Made([((1, 32, 64), "fp16")], lambda mb, x: mb.layer_norm(x=x, axes=[2])),
        Made([((1, 32, 64), "fp16")], lambda mb, x: mb.rsqrt(x=mb.reduce_mean(x=x, axes=[2], keep_dims=True))),
    ),
    "dilated": (
        Made(GOOD, lambda mb, x: mb.conv(x=x, weight=weights(64, 64, 1, 2), dilations=[1, 2], pad_type="same")),
        Made(GOOD, lambda mb, x: mb.conv(x=x, weight=weights(64, 64, 1, 2), dilations=[1, 1], pad_type="same")),
    ),
    "dynamic": (
        Made([*GOOD, ((4,), "int32")], lambda mb, x, to: mb.reshape(x=x, shape=to)),
        Made(GOOD, lambda mb, x: mb.reshape(x=x, shape=[1, 32, 1, 64])),
    ),
    "integer-weights": (
        Made(GOOD, dequantized(4, (64, 1, 1, 1))),
        Made(GOOD, dequantized(8, (64, 1, 1, 1))),
    ),
    "int8": (
        Made(GOOD, dequantized(8, (64, 1, 1, 1))),
        Made(GOOD, conv),
    ),
    "palette": (
        Made(GOOD, palette, states=[GOOD_SHAPE]),
        Made(GOOD, palette),
    ),
    "state-size": (
        Made(GOOD, with_state, states=[(1, 2, 64, 48)]),
        Made(GOOD, with_state, states=[(1, 2, 32, 64)]),
    ),
    "stateful-decode": (
        Made([((1, 64, 1, 1), "fp16")], with_state, states=[(1, 2, 32, 64)]),
        Made(GOOD, with_state, states=[(1, 2, 32, 64)]),
    ),
}  # fmt: skip


def rules_of(folder: Path) -> set[str]:
    return {one.rule.name for one in lint_folder(folder).findings}


@pytest.mark.parametrize("rule", PAIRS)
def test_a_rule_fires_where_it_is_broken_and_not_beside_it(rule: str, tmp_path: Path) -> None:
    breaks, keeps = PAIRS[rule]
    assert rule in rules_of(write_package(tmp_path / "breaks.mlpackage", breaks))
    assert rule not in rules_of(write_package(tmp_path / "keeps.mlpackage", keeps))


def test_every_rule_has_a_pair_or_a_test_of_its_own() -> None:
    elsewhere = {"custom", "names", "rank", "range", "enumerated", "weights", "graphs"}
    assert set(PAIRS) | elsewhere == set(BY_NAME)
    for rule in RULES:
        assert sum(check is not None for check in (rule.of_operation, rule.of_function, rule.of_folder)) == 1


def test_int8_with_blocks_is_no_int8_per_channel(tmp_path: Path) -> None:
    found = rules_of(write_package(tmp_path / "a.mlpackage", Made(GOOD, dequantized(8, (64, 2, 1, 1)))))
    assert "integer-weights" in found
    assert "int8" not in found


def change_relu(path: Path, change: Callable[[Any], None]) -> None:
    """Into what coremltools does not write, but another converter may."""
    from coremltools.models.utils import load_spec

    spec = load_spec(str(path))
    block = spec.mlProgram.functions["main"].block_specializations["CoreML8"]
    (relu,) = (op for op in block.operations if op.type == "relu")
    change(relu)
    (file,) = path.rglob("model.mlmodel")
    file.write_bytes(spec.SerializeToString())


def test_a_custom_operator_leaves(tmp_path: Path) -> None:
    path = write_package(tmp_path / "a.mlpackage", Made(GOOD, lambda mb, x: mb.relu(x=x)))
    assert "custom" not in rules_of(path)
    change_relu(path, lambda relu: setattr(relu, "type", "custom_layer"))
    assert "custom" in rules_of(path)


def test_a_name_is_bound_once(tmp_path: Path) -> None:
    path = write_package(tmp_path / "a.mlpackage", Made(GOOD, lambda mb, x: mb.relu(x=conv(mb, x), name="y")))
    assert "names" not in rules_of(path)
    change_relu(path, lambda relu: setattr(relu.outputs[0], "name", "conv_0"))
    assert "names" in rules_of(path)


def test_six_axes_leave(tmp_path: Path) -> None:
    path = write_package(tmp_path / "a.mlpackage", Made([((1, 1, 1, 2, 32), "fp16")], lambda mb, x: mb.relu(x=x)))
    assert "rank" not in rules_of(path)
    change_relu(path, lambda relu: relu.outputs[0].type.tensorType.dimensions.add(constant={"size": 32}))
    assert "rank" in rules_of(path)


@pytest.mark.parametrize(
    ("shape", "with_norm", "expected"),
    [
        ("range", False, {"range", "dynamic"}),
        ("enumerated", True, {"enumerated"}),
        ("enumerated", False, set()),
        ("fixed", True, set()),
    ],
)
def test_flexible_shapes(shape: str, with_norm: bool, expected: set[str], tmp_path: Path) -> None:
    import coremltools as ct
    import torch

    layer = torch.nn.LayerNorm(64) if with_norm else torch.nn.ReLU()
    traced = torch.jit.trace(layer.eval(), torch.zeros(32, 64))
    shapes = {
        "range": (ct.RangeDim(32, 64), 64),
        "enumerated": ct.EnumeratedShapes(shapes=[(32, 64), (64, 64)]),
        "fixed": (32, 64),
    }
    inputs = [ct.TensorType(name="x", shape=shapes[shape], dtype=np.float16)]
    model = ct.convert(traced, inputs=inputs, minimum_deployment_target=ct.target.iOS18, skip_model_load=True)
    model.save(str(tmp_path / "a.mlpackage"))
    assert rules_of(tmp_path) & {"range", "dynamic", "enumerated"} == expected


def test_weights_of_a_graph_are_counted_once_however_often_they_are_named(tmp_path: Path) -> None:
    kept = weights(64, 64, 1, 1)

    def twice(mb: Any, x: Any) -> Any:
        once = mb.const(val=kept)
        return mb.conv(x=mb.conv(x=x, weight=once), weight=once)

    (function,) = read_package(write_package(tmp_path / "a.mlpackage", Made(GOOD, twice))).functions
    assert function.weight_bytes == 64 * 64 * 2


@pytest.mark.parametrize(("n_bytes", "fires"), [(1_288_490_190, True), (8 * 150 * 2**20, False)])
def test_a_graph_beyond_the_weight_limit_is_told(n_bytes: int, fires: bool) -> None:
    """Eight experts of 150 MiB fit (source 000); one byte more than 1.2 GiB does not."""
    heavy = Function("main", blobs={("weights/weight.bin", 64): n_bytes})
    found = lint([Package(Path("a.mlpackage"), (heavy,))], Path()).findings
    assert ("weights" in {one.rule.name for one in found}) is fires


@pytest.mark.parametrize(("n_functions", "fires"), [(60, True), (59, False)])
def test_graphs_of_all_packages_count(n_functions: int, fires: bool) -> None:
    """Two packages: 120 graphs are more than about 119, 118 are not."""
    functions = tuple(Function(f"f{i}") for i in range(n_functions))
    linted = lint([Package(Path(f"{name}.mlpackage"), functions) for name in "ab"], Path())
    assert linted.n_graphs == 2 * n_functions
    assert {one.rule.name for one in linted.findings} == ({"graphs"} if fires else set())


def test_a_process_holds_one_kind_of_attention() -> None:
    """80 graphs with states and 60 without in one package: it holds 80, which is below about 119."""
    states = {"key_cache": TensorType("float16", (1, 32, 1, 32))}
    functions = (*(Function(f"s{i}", states=states) for i in range(80)), *(Function(f"f{i}") for i in range(60)))
    linted = lint([Package(Path("a.mlpackage"), functions)], Path())
    assert (linted.n_graphs, linted.n_held) == (140, 80)
    assert linted.findings == ()


def test_every_function_of_a_package_is_read(tmp_path: Path) -> None:
    good = write_package(tmp_path / "good.mlpackage", Made(GOOD, conv))
    bad = write_package(tmp_path / "bad.mlpackage", Made(GOOD, lambda mb, x: mb.topk(x=conv(mb, x), k=3, axis=1)))
    (tmp_path / "both").mkdir()
    write_multifunction(tmp_path / "both" / "a.mlpackage", {"good": good, "bad": bad})
    linted = lint_folder(tmp_path / "both")
    assert linted.n_graphs == 2
    assert {(one.function, one.rule.name) for one in linted.findings if one.rule.name == "topk-3-4"} == {
        ("bad", "topk-3-4")
    }
    first, second = read_package(tmp_path / "both" / "a.mlpackage").functions
    assert first.blobs.keys() & second.blobs.keys()  # the same weights lie in one place


# --- the command -----------------------------------------------------------------------------------------------------


def test_findings_end_with_1_and_a_clean_package_with_0(tmp_path: Path) -> None:
    write_package(tmp_path / "bad.mlpackage", PAIRS["topk-3-4"][0])
    done = joulebench("coreml", "lint", str(tmp_path), "--csv", str(tmp_path / "found.csv"))
    assert done.code == 1
    assert "bad.mlpackage" in done.stdout
    table = pd.read_csv(tmp_path / "found.csv")
    row = table[table["rule"] == "topk-3-4"].iloc[0]
    assert (row["function"], row["type"], row["found"], row["source"]) == (
        "main", "topk", "k = 4", BY_NAME["topk-3-4"].origin,
    )  # fmt: skip
    shutil.rmtree(tmp_path / "bad.mlpackage")
    write_package(tmp_path / "good.mlpackage", Made(GOOD, conv))
    done = joulebench("coreml", "lint", str(tmp_path), "--json")
    assert (done.code, json.loads(done.stdout)) == (0, [])


def test_a_note_fails_nothing(tmp_path: Path) -> None:
    write_package(tmp_path / "int8.mlpackage", PAIRS["int8"][0])
    done = joulebench("coreml", "lint", str(tmp_path), "--json")
    assert [(row["rule"], row["effect"]) for row in json.loads(done.stdout)] == [("int8", "unclear")]
    assert done.code == 0


def test_a_table_that_counts_notes_does_not_call_them_findings(tmp_path: Path) -> None:
    write_package(tmp_path / "int8.mlpackage", PAIRS["int8"][0])
    done = joulebench("coreml", "lint", str(tmp_path))
    table = done.stdout.split("The rules behind them")[1].split("packages,")[0]
    assert "found" in table.split()
    assert "findings" not in table
    assert "0 findings, 1 notes" in " ".join(done.stdout.split())


def test_what_cannot_be_read_ends_with_2_and_a_line_each(tmp_path: Path) -> None:
    whole = write_package(tmp_path / "whole.mlpackage", Made(GOOD, conv))
    shutil.copytree(whole, tmp_path / "cut.mlpackage")
    (cut,) = (tmp_path / "cut.mlpackage").rglob("model.mlmodel")
    cut.write_bytes(cut.read_bytes()[:-100])
    shutil.copytree(whole, tmp_path / "light.mlpackage")
    (light,) = (tmp_path / "light.mlpackage").rglob("weight.bin")
    light.unlink()
    (tmp_path / "empty.mlpackage").mkdir()
    done = joulebench("coreml", "lint", str(tmp_path))
    assert done.code == 2
    assert len(done.problems) == 3
    for name, problem in zip(("cut", "empty", "light"), done.problems, strict=True):
        assert problem.startswith(f"error: {tmp_path}/{name}.mlpackage: ")


@pytest.mark.parametrize("name", ["absent", "bare"])
def test_a_folder_without_packages_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    with pytest.raises(ProblemsError, match=r"name one that `joulebench coreml convert` wrote"):
        lint_folder(tmp_path / name)


def test_what_is_unfinished_is_not_read(tmp_path: Path) -> None:
    write_package(tmp_path / "good.mlpackage", Made(GOOD, conv))
    (tmp_path / ".next.mlpackage").mkdir()
    assert lint_folder(tmp_path).n_packages == 1


def test_rules_say_where_they_come_from() -> None:
    for rule in RULES:
        assert isinstance(rule, Rule)
        assert rule.origin.startswith(("reported, untried by us", "000, ", "MIL's own form"))


def test_the_page_says_every_rule_as_it_is() -> None:
    page = (Path(__file__).parents[1] / "docs" / "coreml.md").read_text(encoding="utf-8")
    told = [line for line in page.splitlines() if line.startswith("| `") and line.count("|") == 6]
    assert told == [f"| `{r.name}` | {r.says} | {r.effect} | {r.origin} | {r.remedy} |" for r in RULES]
