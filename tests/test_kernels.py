from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engines.dispatch import Routing
from engines.experts import ExpertWeights
from engines.kernels import compile as compiling
from engines.kernels import native
from engines.kernels.native import Matrix
from engines.oracle import mix_experts
from engines.quantised import quantise_int4, quantise_int8

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler: torch computes everything")

STORED = {
    "fp32": lambda w: w,
    "bf16": lambda w: w.bfloat16(),
    "fp16": lambda w: w.half(),
    "int8": quantise_int8,
    "int4 g32": lambda w: quantise_int4(w, 32),
    "int4 g64": lambda w: quantise_int4(w, 64),
    "int4 g128": lambda w: quantise_int4(w, 128),
}
stored = pytest.mark.parametrize("form", STORED)


def random(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@needs_compiler
@stored
@pytest.mark.parametrize("n_rows", range(1, 9))
def test_linear_is_the_product_with_the_widened_matrix(form: str, n_rows: int) -> None:
    x, weight, bias = random(n_rows, 384), STORED[form](random(130, 384, seed=5) / 384**0.5), random(130, seed=6)
    assert native.serves(x, weight)
    expected = x.double() @ weight.to(torch.float32).double().T + bias
    assert relative_error(native.linear(x, weight, bias), expected) < 1e-6
    assert relative_error(native.linear(x, weight), expected - bias) < 1e-6


@needs_compiler
@pytest.mark.parametrize("form", ["fp32", "bf16", "fp16", "int8"])
@pytest.mark.parametrize("width", [1, 7, 8, 15, 33, 100])
def test_widths_that_fill_no_register_lose_no_column(form: str, width: int) -> None:
    weight = STORED[form](random(9, width, seed=5))
    for n_rows in (1, 2, 8):
        x = random(n_rows, width)
        expected = x.double() @ weight.to(torch.float32).double().T
        assert relative_error(native.linear(x, weight), expected) < 1e-6


@needs_compiler
@stored
@pytest.mark.parametrize("n_threads", [1, 2])
def test_sum_of_experts_is_the_oracles(form: str, n_threads: int) -> None:
    """Three tokens, calls of unequal size, one expert not called; and the single token that decoding has."""
    gate_up, down = random(5, 2 * 128, 256) / 16, random(5, 256, 128, seed=4) / 11
    stacks: tuple[Matrix, Matrix] = (STORED[form](gate_up), STORED[form](down))
    widened = ExpertWeights(*(stack.to(torch.float32) for stack in stacks))
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        hidden, ids, weights = random(3, 256), torch.tensor([[4, 0], [1, 4], [0, 4]]), random(3, 2, seed=8).abs()
        found = native.mix(
            hidden, *stacks, (0, 1, 4), (2, 1, 3), torch.tensor([0, 2, 1, 0, 1, 2]),
            torch.stack([weights[0, 1], weights[2, 0], weights[1, 0], weights[0, 0], weights[1, 1], weights[2, 1]]),
        )  # fmt: skip
        assert relative_error(found, mix_experts(hidden, Routing(ids, weights, 5), widened).double()) < 2e-6
        one = native.mix(hidden[:1], *stacks, (0, 4), (1, 1), torch.tensor([0, 0]), weights[0].flip(0).contiguous())
        expected = mix_experts(hidden[:1], Routing(ids[:1], weights[:1], 5), widened)
        assert relative_error(one, expected.double()) < 2e-6
    finally:
        torch.set_num_threads(before)


@needs_compiler
@pytest.mark.parametrize("n_seen", [1, 3, 8, 300])
@pytest.mark.parametrize("n_kv_heads", [1, 2, 6])
def test_attention_of_one_token_is_torchs(n_seen: int, n_kv_heads: int) -> None:
    """Keys and values are parts of a longer cache, as in decoding; scores reach far below the largest."""
    query, cache = 9 * random(6, 1, 64), random(2, n_kv_heads, 400, 64, seed=5)
    key, value = cache[0, :, 20 : 20 + n_seen], cache[1, :, 20 : 20 + n_seen]
    assert native.can_attend(query, key, value)
    expected = F.scaled_dot_product_attention(
        query[None].double(), key[None].double(), value[None].double(), scale=0.3, enable_gqa=True
    )[0]
    assert relative_error(native.attend(query, key, value, 0.3), expected) < 2e-6


@needs_compiler
@pytest.mark.parametrize("shape", [(1, 1024), (16, 1, 64), (3, 7)])
def test_rms_norm_is_torchs(shape: tuple[int, ...]) -> None:
    x, weight = random(*shape), random(shape[-1], seed=5)
    expected = F.rms_norm(x.double(), weight.shape, weight.double(), 1e-3)
    assert relative_error(native.rms_norm(x, weight, 1e-3), expected) < 1e-6


@needs_compiler
def test_callers_at_the_same_time_do_not_mix_their_results() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    weight = random(2000, 128)
    inputs = [random(1, 128, seed=seed) for seed in range(4)]
    expected = [x @ weight.T for x in inputs]

    def repeat(which: int) -> float:
        return max(relative_error(native.linear(inputs[which], weight), expected[which].double()) for _ in range(200))

    try:
        with ThreadPoolExecutor(4) as threads:
            assert max(threads.map(repeat, range(4))) < 1e-6
    finally:
        torch.set_num_threads(before)


@needs_compiler
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_forked_process_computes_although_its_threads_are_gone() -> None:
    script = (
        "import os, torch; from engines.kernels import native; torch.set_num_threads(2);"
        "w, x = torch.randn(2000, 128), torch.randn(1, 128); native.linear(x, w); child = os.fork();"
        "close = torch.allclose(native.linear(x, w), (w * x).sum(1)[None], atol=1e-3);"
        "os._exit(0 if close else 3) if child == 0 else None;"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) or not close)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0


@needs_compiler
def test_not_a_number_reaches_the_result() -> None:
    weight = random(4, 64)
    weight[2, 40] = float("nan")
    assert native.linear(random(1, 64), weight).isnan().tolist() == [[False, False, True, False]]


@needs_compiler
def test_layouts_that_the_kernels_do_not_read_are_left_to_torch() -> None:
    x = random(2, 64)
    assert not native.serves(x.double(), random(4, 64))
    assert not native.serves(random(64, 2).T, random(4, 64))
    assert not native.serves(x, random(64, 4).T)
    assert not native.serves(x, torch.ones(4, 64, dtype=torch.float64))


@needs_compiler
def test_kernels_are_built_once(tmp_path: Path) -> None:
    built = compiling.build(tmp_path)
    stamp = built.stat().st_mtime_ns
    assert compiling.build(tmp_path) == built
    assert built.stat().st_mtime_ns == stamp
    assert list(tmp_path.iterdir()) == [built]
    assert isinstance(compiling.load(built), ctypes.CDLL)


def test_machine_without_compiler_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(compiling.CompileError, match="no C\\+\\+ compiler found; install"):
        compiling.build(tmp_path)


def test_compiler_that_fails_is_named_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'narrow.cpp:1: error: too old' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(compiling.CompileError, match=r"c\+\+ failed on narrow.cpp: narrow.cpp:1: error: too old"):
        compiling.build(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@needs_compiler
def test_source_compiles_without_a_warning(tmp_path: Path) -> None:
    command = ["c++", *compiling.FLAGS, "-Wall", "-Wextra", "-Werror", str(compiling.SOURCE), "-o"]
    done = subprocess.run([*command, str(tmp_path / "k.so")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- formats ----------------------------------------------------------------------------------------------------------


def test_int8_is_off_by_at_most_half_a_step_and_keeps_the_largest() -> None:
    weight = random(20, 64)
    step = weight.abs().amax(dim=1, keepdim=True) / 127
    widened = quantise_int8(weight).to(torch.float32)
    assert ((widened - weight).abs() <= step / 2 * (1 + 1e-4)).all()
    torch.testing.assert_close(widened.abs().amax(dim=1), weight.abs().amax(dim=1))


@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_is_off_by_at_most_a_step_and_keeps_the_largest_of_each_group(group: int) -> None:
    weight = random(20, 256)
    grouped = weight.unflatten(1, (-1, group))
    step = grouped.abs().amax(dim=-1, keepdim=True) / 8
    widened = quantise_int4(weight, group).to(torch.float32).unflatten(1, (-1, group))  # type: ignore[arg-type]
    # Half a step, but for values beyond the highest level, 7 steps.
    assert ((widened - grouped).abs() <= torch.where(grouped.abs() > 7 * step, step, step / 2) * (1 + 1e-4)).all()
    torch.testing.assert_close(widened.abs().amax(dim=-1), grouped.abs().amax(dim=-1))


def test_matrix_of_zeros_stays_one() -> None:
    for quantised in (quantise_int8(torch.zeros(3, 64)), quantise_int4(torch.zeros(3, 64), 32)):
        assert torch.equal(quantised.to(torch.float32), torch.zeros(3, 64))


def test_bytes_are_those_of_the_format() -> None:
    weight = random(4, 16, 256)
    assert quantise_int8(weight).n_bytes == 4 * 16 * (256 + 4)
    assert quantise_int4(weight, 32).n_bytes == 4 * 16 * (256 // 2 + 4 * 8)


def test_expert_of_a_quantised_stack_is_that_expert() -> None:
    weight = random(4, 16, 256)
    for quantised in (quantise_int8(weight), quantise_int4(weight, 64)):
        assert quantised.shape == weight.shape
        assert torch.equal(quantised[2].to(torch.float32), quantised.to(torch.float32)[2])
        assert F.cosine_similarity(quantised[2].to(torch.float32), weight[2]).min() > 0.98


def test_width_that_does_not_fill_groups_is_refused() -> None:
    from engines.errors import EngineError

    with pytest.raises(EngineError, match="multiple of 64, not 96; use int8"):
        quantise_int4(random(4, 96), 32)
