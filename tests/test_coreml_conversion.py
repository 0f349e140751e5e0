"""What a conversion says before any work, what it refuses, and what a folder of packages keeps."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engines.coreml.contents import Content, ExpertsContent, GatedContent, LinearContent, n_weight_bytes
from engines.coreml.conversion import Asked, Conversion, differences
from engines.coreml.manifest import MANIFEST, PLANNED, GraphFunction, PackagePlan, Weights, read_manifest
from engines.errors import EngineError
from engines.model.architecture import SWIGLU
from engines.model.checkpoints import Checkpoint
from engines.techniques.parameters import Composed
from engines.techniques.presets import preset_parameters
from harness.coreml_convert import convert_all
from tests.coreml import BUNDLED, NO_DIGEST, bundled_profile


class WritesFolders:
    """A `Converter` of another library: it writes what it was asked, and may fail as a disk does."""

    version = "folders 1.0"

    def __init__(self, full_after: int | None = None) -> None:
        self.written: list[str] = []
        self._full_after = full_after

    def write(self, plan: PackagePlan, content: Content, weights: Weights, path: Path) -> None:
        path.mkdir()
        with (path / "weight.bin").open("wb") as file:
            file.truncate(plan.weight_bytes)
        if self._full_after is not None and len(self.written) >= self._full_after:
            raise OSError(28, "No space left on device")
        self.written.append(plan.path)


def conversion(
    name: str, converter: WritesFolders | None = None, given: Mapping[str, Any] | None = None, **asked: Any
) -> Conversion:
    technique = preset_parameters(name)(**(given or {}))
    assert isinstance(technique, Composed)
    return Conversion(
        BUNDLED, Asked(technique, **{"chunk": 64, **asked}), bundled_profile(), NO_DIGEST, converter or WritesFolders()
    )


def sizes_of(found: Conversion, layer: int = 0) -> dict[tuple[int, ...], set[int]]:
    graphs: dict[tuple[int, ...], set[int]] = {}
    for package in found.packages:
        for function in package.functions:
            if package.layer == layer and function.kind == "experts":
                graphs.setdefault(function.experts, set()).add(function.rows)
    return graphs


# --- which graphs ----------------------------------------------------------------------------------------------------


def test_groups_are_graphs_of_one_tier_and_each_expert_decodes_alone() -> None:
    """16 experts, top 2, chunk 64: B K / E = 8 rows, tiers {16, 8, 4} rounded up to 16; a graph has 32, as those that
    decode."""
    graphs = sizes_of(conversion("npumoe-tg"))
    groups = [experts for experts in graphs if len(experts) > 1]
    assert sorted(expert for group in groups for expert in group) == list(range(16))
    assert all(len(group) == 4 and graphs[group] == {32} for group in groups)
    assert all(graphs[expert,] == {32} for expert in range(16))


def test_a_group_and_its_experts_share_a_package() -> None:
    found = [p for p in conversion("npumoe-tg").packages if p.role == "experts" and p.layer == 0]
    assert len(found) == 4
    for package in found:
        assert {f.experts for f in package.functions} == {package.experts, *((e,) for e in package.experts)}


def test_tiers_alone_are_graphs_of_an_expert() -> None:
    """Chunk 256: tiers of 64, 32 and 16 rows; each expert has a graph of 64 or 32, and the 32 of decoding."""
    graphs = sizes_of(conversion("npumoe-t", chunk=256))
    assert graphs.keys() == {(expert,) for expert in range(16)}
    assert all(rows <= {32, 64} and 32 in rows for rows in graphs.values())


def test_a_size_that_follows_the_routing_has_graphs_of_each_power_of_two() -> None:
    """Core ML naive: as many rows as the busiest expert, to the whole chunk."""
    found = conversion("coreml-naive", chunk=128)
    assert sizes_of(found) == {(expert,): {32, 64, 128} for expert in range(16)}
    assert {package.role for package in found.packages} == {"experts"}, "attention is the CPU's"


def test_attention_alone_where_experts_are_the_cpus() -> None:
    assert {package.role for package in conversion("anemll").packages} == {"attention"}


def test_no_graph_where_all_is_the_cpus() -> None:
    assert conversion("coreml-cpu").packages == ()


def test_decoding_with_the_prefills_graphs_has_no_others() -> None:
    assert all(len(experts) == 4 for experts in sizes_of(conversion("npumoe-tg", given={"decode_graphs": "same"})))


def test_weight_bytes_are_those_of_the_model() -> None:
    """Hidden 192, width 128, 4 layers of 16 experts, 4 + 2 heads of 64; two bytes a value."""
    experts = 4 * 16 * 3 * 192 * 128
    attention = 4 * (2 * 256 * 192 + 2 * 128 * 192)
    assert conversion("npumoe-tg").manifest.weight_bytes == 2 * (experts + attention)


def test_weight_bytes_of_narrow_forms() -> None:
    """int8: a byte a value, two a row. int4: half a byte, two for each 32 columns."""
    assert n_weight_bytes([(8, 64)], 0, "int8") == 8 * 64 + 8 * 2
    assert n_weight_bytes([(8, 64)], 0, "int4") == 8 * 32 + 8 * 2 * 2


# --- what is refused -------------------------------------------------------------------------------------------------


def test_all_that_is_in_the_way_is_told_at_once() -> None:
    technique = preset_parameters("npumoe-tg")()
    with pytest.raises(EngineError) as caught:
        Conversion(BUNDLED, Asked(technique, chunk=0, weights="int4"), None, NO_DIGEST, WritesFolders())
    said = str(caught.value)
    assert "chunk 0" in said
    assert "2716, 2688" in said
    assert "joulebench calibrate" in said


def test_more_positions_than_the_model_has_are_refused() -> None:
    with pytest.raises(EngineError, match="context 8193: bundled:tiny-qwen3-moe has 8192 positions"):
        conversion("npumoe-tg", context=8193)
    assert conversion("npumoe-tg", context=8192).manifest.context == 8192


@pytest.mark.parametrize(
    ("name", "said"), [("gpu", "a backbone on the gpu"), ("prefetch-hint", "do not travel"), ("ndp", "do not travel")]
)
def test_techniques_of_other_machines_are_refused(name: str, said: str) -> None:
    with pytest.raises(EngineError, match=said):
        conversion(name)


def test_int4_is_made_when_it_is_allowed() -> None:
    assert conversion("npumoe-tg", weights="int4", allow_int4_known_to_crash=True).manifest.weights == "int4"


def test_a_weight_beyond_fp16_is_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    matrix = checkpoint.weights.layers[1].mlp.experts.experts[3].up_IH  # type: ignore[union-attr]
    before = matrix[0, 0].clone()  # type: ignore[index]
    found = Conversion(
        BUNDLED, Asked(preset_parameters("npumoe-tg")(), 64), bundled_profile(), NO_DIGEST, WritesFolders(), checkpoint
    )
    (package,) = [p for p in found.packages if p.layer == 1 and 3 in p.experts]
    try:
        matrix[0, 0] = 7e4  # type: ignore[index]
        with pytest.raises(EngineError, match=r"layer 1, experts 3, up: a weight of 7e\+04 is beyond fp16"):
            found.convert(package, tmp_path)
    finally:
        matrix[0, 0] = before  # type: ignore[index]
    assert not list(tmp_path.rglob("*.mlpackage"))


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    from engines.model.checkpoints import load_checkpoint

    return load_checkpoint(BUNDLED, torch.float32)


# --- a folder --------------------------------------------------------------------------------------------------------


def test_a_disk_that_fills_leaves_whole_packages_alone_and_the_next_try_goes_on(tmp_path: Path) -> None:
    first = WritesFolders(full_after=3)
    with pytest.raises(OSError, match="No space"):
        convert_all(conversion("npumoe-tg", first), tmp_path / "out")
    assert sorted(
        p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").glob("*/*.mlpackage")
    ) == sorted(first.written)
    with pytest.raises(EngineError, match="not complete"):
        read_manifest(tmp_path / "out")
    second = WritesFolders()
    convert_all(found := conversion("npumoe-tg", second), tmp_path / "out")
    assert not set(first.written) & set(second.written)
    assert read_manifest(tmp_path / "out") == found.manifest
    assert not (tmp_path / "out" / PLANNED).exists()


def test_a_folder_of_another_conversion_is_left_alone(tmp_path: Path) -> None:
    convert_all(conversion("npumoe-tg"), tmp_path / "out")
    with pytest.raises(EngineError, match=r"another conversion \(chunk, packages differ\)"):
        convert_all(conversion("npumoe-tg", chunk=512), tmp_path / "out")


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("mine")
    with pytest.raises(EngineError, match="holds no conversion"):
        convert_all(conversion("npumoe-tg"), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["letter.txt"]


def test_a_manifest_that_is_none_is_told(tmp_path: Path) -> None:
    """Of an empty one "file: Invalid JSON: EOF while parsing a value" was all."""
    for content, what in ((b'{"format": 9}', "format: "), (b"", "Invalid JSON: "), (b"\xff\xfe", "Invalid JSON: ")):
        (tmp_path / MANIFEST).write_bytes(content)
        with pytest.raises(EngineError) as caught:
            read_manifest(tmp_path)
        told = f"{tmp_path / MANIFEST}: is damaged, or of another version of joulebench ({what}"
        assert str(caught.value).startswith(told)
        assert str(caught.value).endswith("); convert into another folder with `joulebench coreml convert`")


def test_packages_serve_whoever_wants_no_more_of_them() -> None:
    both, one = conversion("npumoe-tg").manifest, conversion("npumoe-tg", attention="stateless").manifest
    assert differences(both, one) == []
    assert differences(one, both) == ["functions of layer-000/attention.mlpackage"]
    assert "technique" in differences(conversion("npumoe").manifest, one)


def matrices_of_an_expert() -> list[NDArray[np.float16]]:
    random = np.random.default_rng(1)
    return [random.standard_normal((64, 64)).astype(np.float16) for _ in range(3)]


def one_expert(matrices: Sequence[NDArray[np.float16]]) -> tuple[PackagePlan, ExpertsContent]:
    """A package of it alone, for 16 rows."""
    unit = GatedContent(*(LinearContent(matrix) for matrix in matrices))
    function = GraphFunction(name="expert_0_16", kind="experts", experts=(0,), rows=16)
    plan = PackagePlan(
        path="layer-0/experts-0.mlpackage",
        layer=0,
        role="experts",
        experts=(0,),
        functions=(function,),
        weight_bytes=0,
    )
    return plan, ExpertsContent({0: unit}, SWIGLU)


def test_no_pass_of_coremltools_costs_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None may change a graph, and before and behind each the whole program is checked again."""
    pytest.importorskip("coremltools", reason="writes packages (pip install joulebench[coreml])")
    from coremltools.converters.mil.mil import Program

    from engines.coreml.mil import MilConverter

    checks, check = [], Program.validate
    monkeypatch.setattr(Program, "validate", lambda *of, **named: (checks.append(1), check(*of, **named)))
    MilConverter().write(*one_expert(matrices_of_an_expert()), "float16", tmp_path / "a.mlpackage")
    assert 1 <= len(checks) <= 4


class BothWays:
    """Writes the first package of each role with coremltools' pipelines of passes, and without; of others folders."""

    version = "both ways 1.0"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from engines.coreml.mil import MilConverter

        self.compared: set[str] = set()
        self._converter, self._monkeypatch = MilConverter(), monkeypatch

    def write(self, plan: PackagePlan, content: Content, weights: Weights, path: Path) -> None:
        if plan.role in self.compared:
            WritesFolders().write(plan, content, weights, path)
            return
        self._converter.write(plan, content, weights, path)
        with self._monkeypatch.context() as patched:
            patched.setattr("engines.coreml.mil._without_passes", nullcontext)
            other = path.with_name("with-passes.mlpackage")
            self._converter.write(plan, content, weights, other)
        for name in ("model.mlmodel", "weight.bin"):
            ours, theirs = ([file.read_bytes() for file in sorted(of.rglob(name))] for of in (path, other))
            assert len(ours) == 1
            assert ours == theirs, f"{plan.path}: {name}"
        shutil.rmtree(other)
        self.compared.add(plan.role)


@pytest.mark.parametrize("weights", ["float16", "int8"])
def test_passes_that_are_left_out_change_nothing(
    weights: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, programs and weights: of the roles that the bundled model has. With the passes that coremltools runs
    by itself it fails."""
    pytest.importorskip("coremltools", reason="writes packages (pip install joulebench[coreml])")
    both = BothWays(monkeypatch)
    convert_all(conversion("npumoe", both, weights=weights), tmp_path / "packages")
    assert both.compared == {"attention", "experts"}


# --- narrow weights --------------------------------------------------------------------------------------------------


@pytest.mark.numbers
@pytest.mark.parametrize(("weights", "most", "block"), [("int8", 127, 64), ("int4", 7, 32)])
def test_narrow_weights_are_whole_steps_of_their_scale(weights: Weights, most: int, block: int, tmp_path: Path) -> None:
    """The saved package's matrices, seen through what it computes of unit vectors: w rounded to a scale's steps."""
    pytest.importorskip("coremltools", reason="writes packages (pip install joulebench[coreml])")
    from engines.coreml.interpreter import read_package
    from engines.coreml.mil import MilConverter

    matrices = matrices_of_an_expert()
    plan, content = one_expert(matrices)
    MilConverter().write(plan, content, weights, tmp_path / "a.mlpackage")
    held = read_package(tmp_path / "a.mlpackage", np.float32)["expert_0_16"].constants
    for name, matrix in zip(("gate", "up", "down"), matrices, strict=True):
        wide = matrix.astype(np.float32).reshape(64, 64 // block, block)
        scale = (np.abs(wide).max(axis=2, keepdims=True) / most).astype(np.float16).astype(np.float32)
        wanted = (np.rint(wide / scale).clip(-most, most) * scale).reshape(64, 64)
        np.testing.assert_allclose(held[f"expert_0_{name}_weight"][:, :, 0, 0], wanted, rtol=0, atol=1e-6)
    n_bytes = sum(f.stat().st_size for f in (tmp_path / "a.mlpackage").rglob("weight.bin"))
    # 64 bytes of header, and 64 and some padding for each of 6 tensors.
    assert 0 <= n_bytes - n_weight_bytes([(64, 64)] * 3, 0, weights) < 64 + 6 * 128
