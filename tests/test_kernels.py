from __future__ import annotations

import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engines.dispatch import Routing
from engines.kernels import compile as compiling
from engines.kernels import native, tables
from engines.model.architecture import RouterConfig
from engines.model.experts import ExpertWeights, GatedWeights, execute, widened_rows
from engines.model.norms import row_norms
from engines.model.router import RouterWeights, choose, route, router_logits
from engines.oracle import mix_experts
from engines.techniques.presets import dropless
from tests.cases import marked
from tests.kernel_forms import STORED, needs_compiler, random, relative_error, stored
from tests.techniques import seen

pytestmark = pytest.mark.numbers


@needs_compiler
@stored
@pytest.mark.parametrize("n_rows", [*range(1, 10), 16, 17, 25, 150])
def test_linear_is_the_product_with_the_widened_matrix(form: str, n_rows: int) -> None:
    """A few rows, panels of sixteen and of eight, blocks of panels; 384 columns are widened in two goes."""
    x, weight, bias = random(n_rows, 384), STORED[form](random(130, 384, seed=5) / 384**0.5), random(130, seed=6)
    assert tables.serves(x, bias)
    assert tables.reads(weight)
    expected = x.double() @ weight.to(torch.float32).double().T + bias
    assert relative_error(native.linear(x, weight, bias), expected) < 1e-6
    assert relative_error(native.linear(x, weight), expected - bias) < 1e-6


@needs_compiler
@stored
@pytest.mark.parametrize("n_rows", [*range(1, 10), 16, 24])
def test_products_of_rows_that_share_their_places_in_a_cache_are_the_oracles(form: str, n_rows: int) -> None:
    """Rows of floats lie 4 KB apart: inputs of several tokens are then laid out otherwise."""
    x, weight = random(n_rows, 1024), STORED[form](random(29, 1024, seed=5) / 32)
    assert relative_error(native.linear(x, weight), x.double() @ weight.to(torch.float32).double().T) < 1e-6


@needs_compiler
@pytest.mark.parametrize("form", STORED)
def test_rows_are_those_of_the_widened_matrix(form: str) -> None:
    weight = STORED[form](random(130, 384, seed=5) / 384**0.5)
    row_T = torch.tensor([129, 0, 7, 7, *range(100)])
    assert torch.equal(native.rows(weight, row_T), weight.to(torch.float32)[row_T])
    assert torch.equal(native.rows(weight, row_T, 48**0.5), weight.to(torch.float32)[row_T] * 48**0.5)


@needs_compiler
@pytest.mark.parametrize("n_rows", [1, 7, 8, 9, 300])
@pytest.mark.parametrize("form", ["fp32", "bf16"])
def test_what_a_gate_lets_through_is_the_sigmoid_of_its_product(form: str, n_rows: int) -> None:
    """From closed to open: products lie between -60 and 60."""
    shared, x, gate = random(n_rows, 200), 20 * random(n_rows, 130, seed=4), STORED[form](random(1, 130, seed=5) / 11)
    expected = shared.double() * torch.sigmoid(x.double() @ gate.double().T)
    torch.testing.assert_close(native.gated(shared, x, gate).double(), expected, atol=1e-6, rtol=2e-5)


@needs_compiler
@pytest.mark.parametrize("row", [-1, 130])
def test_a_row_that_a_matrix_lacks_is_refused_as_by_torch(row: int) -> None:
    embedding_LH = random(130, 64)
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(IndexError):
            widened_rows(embedding_LH, torch.tensor([0, row]), dtype)
    with pytest.raises(IndexError, match=f"130 rows has no row {row}$"):
        native.rows(embedding_LH, torch.tensor([0, row]))


@needs_compiler
@pytest.mark.parametrize("n", [1, 7, 16, 17, 100, 40_000])
def test_the_largest_number_is_that_of_torch_and_the_first_of_several(n: int) -> None:
    for seed in range(20):
        x = random(n, seed=seed).round()  # many are equal
        assert native.largest(x) == tuple(found.item() for found in x.max(dim=-1))
        x[torch.randint(n, (1,), generator=torch.Generator().manual_seed(seed))] = math.nan
        assert math.isnan(native.largest(x)[0])
    for all_of in (-math.inf, math.inf):
        assert native.largest(torch.full((n,), all_of)) == (all_of, 0)


@needs_compiler
@pytest.mark.parametrize("form", ["fp32", "bf16", "fp16", "int8", "fp8"])
@pytest.mark.parametrize("width", [1, 7, 8, 15, 33, 100, 300])
def test_widths_that_fill_no_register_lose_no_column(form: str, width: int) -> None:
    weight = STORED[form](random(9, width, seed=5))
    for n_rows in (1, 2, 8, 20):
        x = random(n_rows, width)
        expected = x.double() @ weight.to(torch.float32).double().T
        assert relative_error(native.linear(x, weight), expected) < 1e-6


@needs_compiler
@pytest.mark.parametrize("form", ["fp32", "bf16", "fp16", "int8", "fp8"])
@pytest.mark.parametrize("width", [7, 15, 31, 100, 130, 131])
def test_how_rows_are_shared_out_changes_no_bit_where_columns_fill_no_register(form: str, width: int) -> None:
    """Four of 41 rows are read together, but for the last; fewer rows are read otherwise."""
    weight = random(41, width, seed=5) / width**0.5
    whole = STORED[form](weight)
    for n_tokens in (*range(1, 9), 20):
        x = random(n_tokens, width)
        expected = native.linear(x, whole)
        for n_rows in (1, 2, 3, 6, 9, 13):
            assert torch.equal(native.linear(x, STORED[form](weight[:n_rows].contiguous())), expected[:, :n_rows])


def experts_stored(form: str) -> tuple[ExpertWeights, ExpertWeights]:
    """Their 130 inner rows fill no tile."""
    inner = 192 if form.startswith(("int4 g32", "int4 g64", "mxfp4")) else 256 if form == "int4 g128" else 130
    return experts_of(form, 256, inner)


def experts_of(form: str, hidden: int, inner: int) -> tuple[ExpertWeights, ExpertWeights]:
    """Five experts in a form, and as floats."""
    stored = [
        [STORED[form](random(inner, hidden, seed=e + first) / hidden**0.5) for first in (0, 10)]
        + [STORED[form](random(hidden, inner, seed=20 + e) / inner**0.5)]
        for e in range(5)
    ]
    widened = [[matrix.to(torch.float32) for matrix in one] for one in stored]
    return ExpertWeights(tuple(GatedWeights(*one) for one in stored)), ExpertWeights(
        tuple(GatedWeights(*one) for one in widened)
    )


@needs_compiler
@stored
@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("n_tokens", [1, 3, 10, 200])
def test_sum_of_experts_is_the_oracles(form: str, n_threads: int, n_tokens: int) -> None:
    """The single token of decoding, calls of a few rows, with one of nine among them, and calls of many beside few."""
    experts, widened = experts_stored(form)
    assert experts.table is not None
    hidden, weights = random(n_tokens, 256), random(n_tokens, 2, seed=8).abs()
    ids = torch.stack([torch.arange(n_tokens) % 4, torch.where(torch.arange(n_tokens) % 20 > 0, 4, 2)], dim=1)
    ids[ids[:, 0] == 2, 1] = 4
    routing = Routing(ids, weights, 5)
    plan = dropless().plan(seen(routing))
    torch.set_num_threads(n_threads)
    found = execute(plan, hidden, experts)
    assert relative_error(found, mix_experts(hidden, routing, widened).double()) < 2e-6


@needs_compiler
@stored
@pytest.mark.parametrize(("width", "inner"), [(1024, 128), (128, 1024)])
@pytest.mark.parametrize("n_tokens", [2, 7, 100])
def test_experts_whose_rows_share_their_places_in_a_cache_are_the_oracles(
    form: str, width: int, inner: int, n_tokens: int
) -> None:
    """Rows of floats lie 4 KB apart. Calls of a few rows alone, and beside calls of many."""
    experts, widened = experts_of(form, width, inner)
    assert experts.table is not None
    hidden, weights = random(n_tokens, width), random(n_tokens, 2, seed=8).abs()
    first = torch.where(torch.arange(n_tokens) % 25 > 4, 4, torch.arange(n_tokens) % 25 % 4)
    routing = Routing(torch.stack([first, (first + 1) % 5], dim=1), weights, 5)
    found = execute(dropless().plan(seen(routing)), hidden, experts)
    assert relative_error(found, mix_experts(hidden, routing, widened).double()) < 2e-6


@needs_compiler
@pytest.mark.parametrize("form", marked(STORED, pytest.mark.slow, but=STORED.keys() - {"int4 g64", "int4 g128"}))
def test_calls_of_any_size_beside_a_large_one_are_the_oracles(form: str) -> None:
    """Up to eight rows go by the kernels of few rows, more of them by panels of all sizes."""
    experts, widened = experts_stored(form)
    assert experts.table is not None
    hidden, all_of_it = random(150, 256), torch.ones(150, 1)
    of_1, of_3 = (
        mix_experts(hidden, Routing(torch.full((150, 1), expert), all_of_it, 5), widened).double() for expert in (1, 3)
    )
    torch.set_num_threads(2)
    for n in range(1, 41):
        tokens, weights = torch.cat([torch.arange(n), torch.arange(150)]), random(n + 150, seed=8).abs()
        found = native.mix(hidden, experts.table, (3, 1), (n, 150), tokens, weights)
        expected = weights[n:, None] * of_1
        expected[:n] += weights[:n, None] * of_3[:n]
        assert relative_error(found, expected) < 2e-6, n


@needs_compiler
@stored
@pytest.mark.parametrize("n_padding", [1, 6, 7, 30])
def test_padding_rows_reach_no_token(form: str, n_padding: int) -> None:
    """Where all calls are of eight rows at most, and where not; of several tokens, and of one."""
    experts, widened = experts_stored(form)
    assert experts.table is not None
    tokens, weights = torch.tensor([2, 0] + [-1] * n_padding), torch.tensor([0.5, 2.0] + [0.0] * n_padding)
    hidden = random(3, 256)
    found = native.mix(hidden, experts.table, (3,), (2 + n_padding,), tokens, weights)
    routing = Routing(torch.full((3, 1), 3), torch.tensor([[2.0], [0.0], [0.5]]), 5)
    assert relative_error(found, mix_experts(hidden, routing, widened).double()) < 2e-6
    assert torch.equal(found[1], torch.zeros(256))
    tokens, weights = torch.tensor([-1, 0] + [-1] * n_padding), torch.tensor([0.0, 2.0] + [0.0] * n_padding)
    of_one = native.mix(hidden[:1], experts.table, (4, 3), (1, 1 + n_padding), tokens, weights)
    routing = Routing(torch.tensor([[3]]), torch.tensor([[2.0]]), 5)
    assert relative_error(of_one, mix_experts(hidden[:1], routing, widened).double()) < 2e-6


@needs_compiler
@stored
@pytest.mark.parametrize("rows", [(2,), (3, 1), (1, 8)])
def test_the_only_token_may_have_several_rows_of_an_expert(form: str, rows: tuple[int, ...]) -> None:
    experts, widened = experts_stored(form)
    assert experts.table is not None
    calls, n_rows = (3, 1)[: len(rows)], sum(rows)
    hidden, weights = random(1, 256), torch.arange(1, n_rows + 1) / n_rows
    found = native.mix(hidden, experts.table, calls, rows, torch.zeros(n_rows, dtype=torch.int64), weights)
    of_calls = [part.sum().item() for part in weights.split(rows)]
    routing = Routing(torch.tensor([calls]), torch.tensor([of_calls]), 5)
    assert relative_error(found, mix_experts(hidden, routing, widened).double()) < 2e-6


@needs_compiler
@pytest.mark.parametrize("of_chosen", [False, True])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("n_tokens", [1, 8, 9, 40])
def test_tokens_are_routed_as_by_torch_however_many_at_once(of_chosen: bool, normalise: bool, n_tokens: int) -> None:
    """Two experts whose scores are the same are among the best."""
    hidden, weight, bias = random(40, 64), random(12, 64, seed=5) / 4, random(12, seed=6)
    weight[7], bias[7] = weight[3], bias[3]
    hidden += weight[3]
    config = RouterConfig("softmax of chosen" if of_chosen else "softmax", 3, normalise, scale=1.5)
    router = RouterWeights(weight, bias)
    by_torch = choose(router_logits(hidden, router), None, config)
    ours = [route(rows, router, config) for rows in hidden.split(n_tokens)]
    assert torch.equal(torch.cat([one.expert_ids_TK for one in ours]), by_torch.expert_ids_TK)
    torch.testing.assert_close(torch.cat([one.weights_TK for one in ours]), by_torch.weights_TK)
    assert (by_torch.expert_ids_TK == 7).any()


@needs_compiler
@pytest.mark.parametrize("shape", [(1, 1024), (16, 1, 64), (3, 7)])
def test_rms_norm_is_torchs(shape: tuple[int, ...]) -> None:
    x, weight = random(*shape), random(shape[-1], seed=5)
    expected = F.rms_norm(x.double(), weight.shape, weight.double(), 1e-3)
    assert relative_error(native.rms_norm(x, weight, 1e-3), expected) < 1e-6


@needs_compiler
@pytest.mark.parametrize("shape", [(1, 7), (3, 40000), (512, 1024)])
def test_sums_are_torchs_to_the_last_bit(shape: tuple[int, int]) -> None:
    a, b = random(*shape), random(*shape, seed=4)
    assert torch.equal(native.add(a, b), a + b)


@needs_compiler
@pytest.mark.parametrize("shape", [(1, 4096), (192, 448), (64, 1408), (3, 40000), (0, 8)])
def test_norms_of_rows_are_torchs_to_the_last_bit_and_wake_none_of_its_threads(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which torch wakes for more than 32767 values. A single row that has more is asked for alone."""
    norm, asked = torch.linalg.vector_norm, []

    def counted(x: Tensor, **given: Any) -> Tensor:
        asked.append(tuple(x.shape))
        return norm(x, **given)

    x_TH = random(*shape)
    expected = norm(x_TH, dim=-1)
    monkeypatch.setattr(torch.linalg, "vector_norm", counted)
    assert torch.equal(row_norms(x_TH), expected)
    assert all(n_rows <= 1 or n_rows * width < 32768 for n_rows, width in asked)
    assert sum(n_rows for n_rows, _ in asked) == shape[0]


@needs_compiler
def test_callers_at_the_same_time_do_not_mix_their_results() -> None:
    torch.set_num_threads(2)
    weight = random(2000, 128)
    inputs = [random(1, 128, seed=seed) for seed in range(4)]
    expected = [x @ weight.T for x in inputs]

    def repeat(which: int) -> float:
        return max(relative_error(native.linear(inputs[which], weight), expected[which].double()) for _ in range(200))

    with ThreadPoolExecutor(4) as threads:
        assert max(threads.map(repeat, range(4))) < 1e-6


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
    assert not tables.serves(x.double())
    assert not tables.serves(random(64, 2).T)
    assert not tables.reads(random(64, 4).T)
    assert not tables.reads(torch.ones(4, 64, dtype=torch.float64))


@pytest.mark.slow
@needs_compiler
def test_source_compiles_without_a_warning(tmp_path: Path) -> None:
    command = ["c++", *compiling.flags(), "-shared", "-Wall", "-Wextra", "-Werror", *map(str, compiling.SOURCES), "-o"]
    done = subprocess.run([*command, str(tmp_path / "k.so")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
