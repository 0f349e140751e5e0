"""Products whose inputs are rounded: to int8 or bf16 where a plan asks for it, to 24 bits where bytes meet nibbles."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from engines.dispatch import Routing
from engines.kernels import native, tables
from engines.model.experts import ExpertWeights, GatedWeights, execute, widened_linear
from engines.model.quantised import rounded_to_int8, store
from engines.techniques.presets import dropless
from tests.kernel_forms import ROUNDED, STORED, needs_bf16, needs_compiler, random, relative_error, rounds
from tests.techniques import seen

pytestmark = pytest.mark.numbers


def rounded_by_hand(x: Tensor) -> Tensor:
    """Block by block, value by value, in double but for what is defined in fp32: 127 over the largest, and products
    with that."""
    blocks = []
    for block in x.split(32, dim=-1):
        largest = block.abs().amax(dim=-1, keepdim=True)
        levels = (block * (torch.full_like(largest, 127) / largest)).double()
        whole = torch.where(levels - levels.floor() == 0.5, 2 * (levels / 2).round(), levels.round())
        blocks.append(whole * largest.double() / 127)
    return torch.cat(blocks, dim=-1)


@needs_compiler
@rounds
@pytest.mark.parametrize("n_rows", [*range(1, 10), 16, 17, 25, 33, 150])
def test_linear_of_int8_arithmetic_is_the_product_of_rounded_inputs(form: str, n_rows: int) -> None:
    x, weight, bias = random(n_rows, 384), ROUNDED[form](random(130, 384, seed=5) / 384**0.5), random(130, seed=6)
    expected = rounded_by_hand(x) @ weight.to(torch.float32).double().T + bias
    assert relative_error(native.linear(x, weight, bias), expected) < 1e-6
    plain = x.double() @ weight.to(torch.float32).double().T + bias
    assert relative_error(native.linear(x, weight, bias), plain) > 1e-3, "inputs were not rounded"


@needs_compiler
@pytest.mark.parametrize("width", [1, 7, 31, 32, 33, 64, 100, 300])
def test_int8_arithmetic_of_widths_that_fill_no_register_loses_no_column(width: int) -> None:
    weight = ROUNDED["int8"](random(9, width, seed=5))
    for n_rows in (1, 2, 8, 20, 40):
        x = random(n_rows, width)
        expected = rounded_by_hand(x) @ weight.to(torch.float32).double().T
        assert relative_error(native.linear(x, weight), expected) < 1e-6


@needs_compiler
@pytest.mark.parametrize("width", [64, 192, 320])
@pytest.mark.parametrize("form", ["int4-g32", "int4-g64"])
def test_int8_arithmetic_of_nibbles_that_fill_half_a_register_loses_no_column(form: str, width: int) -> None:
    weight = ROUNDED[form](random(9, width, seed=5))
    for n_rows in (1, 5, 20):
        x = random(n_rows, width)
        expected = rounded_by_hand(x) @ weight.to(torch.float32).double().T
        assert relative_error(native.linear(x, weight), expected) < 1e-6


@needs_compiler
@pytest.mark.parametrize("form", ["int4 g32", "int4 g64"])
@pytest.mark.parametrize("width", [64, 192, 320, 1024])
@pytest.mark.parametrize("n_rows", [*range(1, 9), 20])
def test_nibbles_in_fp32_arithmetic_lose_no_more_than_half_a_step_of_24_bits_beside_an_outlier(
    n_rows: int, width: int, form: str
) -> None:
    """The bound of inputs that share an exponent, in blocks of 32 whose numbers lie far apart, plus that of fp32 sums.

    A step is 2^-22 of the power of two below the largest, and a sum of a row is good to 2^-23 of its magnitudes for
    each of the few additions that one lane makes.
    """
    weight = STORED[form](random(9, width, seed=5))
    for size in (1.0, 1e-30, 1e30):
        x = random(n_rows, width) * size
        x[:, 5::32] *= 10 ** random(1, x[:, 5::32].shape[1], seed=7).mul(2).clamp(-4, 4)
        x[0, :32] = 0
        w = weight.to(torch.float32).double().abs()
        step = torch.stack([b.abs().amax(-1) for b in x.double().split(32, dim=-1)], -1) * 2.0**-22 * 1.0079
        of_step = step.repeat_interleave(32, -1) / 2 @ w.T
        of_sums = x.double().abs() @ w.T * 2.0**-23 * 8
        error = (native.linear(x, weight).double() - x.double() @ weight.to(torch.float32).double().T).abs()
        assert bool((error <= of_step + of_sums).all())


@needs_compiler
@pytest.mark.parametrize("n_rows", [*range(1, 9), 20])
def test_nibbles_in_fp32_arithmetic_take_large_small_and_missing_numbers(n_rows: int) -> None:
    for sign in (1.0, -1.0):
        weight = STORED["int4 g32"](torch.full((5, 512), sign))
        for value in (3.0, -3.0, 1.9999999, 2.0, 1e35, 1e-28):
            found = native.linear(torch.full((n_rows, 512), value), weight)
            torch.testing.assert_close(found, torch.full((n_rows, 5), sign * value * 512), rtol=1e-5, atol=0)
    weight = STORED["int4 g32"](random(6, 128, seed=5))
    for odd in (float("nan"), float("inf"), -float("inf")):
        x = random(n_rows, 128)
        x[n_rows // 2, 40] = odd
        missing = native.linear(x, weight).isfinite().logical_not().any(dim=1)
        assert missing.tolist() == [row == n_rows // 2 for row in range(n_rows)]


def bf16_by_hand(x: Tensor) -> Tensor:
    """The nearer of the two numbers of 8 significant bits that lie about it, of equally near ones the even one."""
    mantissa, exponent = torch.frexp(x.double())
    return torch.ldexp((mantissa * 256).round(), exponent - 8)  # torch rounds halves to even


@needs_bf16
@pytest.mark.parametrize("n_rows", [*range(1, 10), 16, 17, 25, 33, 150])
@pytest.mark.parametrize("width", [1, 2, 31, 33, 64, 100, 257, 384])
def test_linear_of_bf16_arithmetic_is_the_product_of_inputs_rounded_to_bf16(width: int, n_rows: int) -> None:
    """Widths that fill no pair, no register and no tile's depth among them."""
    x, weight, bias = random(n_rows, width), store(random(130, width, seed=5), "bf16", "bf16"), random(130, seed=6)
    assert tables.reads(weight)
    expected = bf16_by_hand(x) @ weight.to(torch.float32).double().T
    assert relative_error(native.linear(x, weight), expected) < 1e-6
    assert relative_error(native.linear(x, weight, bias), expected + bias) < 1e-6
    plain = x.double() @ weight.to(torch.float32).double().T
    assert relative_error(native.linear(x, weight), plain) > 1e-4, "inputs were not rounded"


@needs_bf16
def test_bf16_arithmetic_carries_on_what_is_no_number_and_keeps_what_lies_halfway_even() -> None:
    """1 + 2^-8 lies between 1 and 1 + 2^-7, and 1 + 3 * 2^-8 between that and 1 + 2^-6."""
    weight = store(torch.eye(64), "bf16", "bf16")
    for n_rows in (2, 20):
        x = torch.ones(n_rows, 64)
        x[0, :4] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3e38])
        found = native.linear(x, weight)
        assert found[0, :4].tolist() == [1, 1 + 2**-6, -1, float(torch.tensor(3e38).bfloat16())]
        for odd in (float("nan"), float("inf")):
            x[1, 5] = odd
            assert not native.linear(x, weight)[1].isfinite().any()


def test_bf16_arithmetic_on_torch_alone_is_that_of_rounded_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "why_not_bf16", lambda: "not here")
    x, weight = random(5, 100), store(random(7, 100, seed=5), "bf16", "bf16")
    assert not tables.reads(weight)
    expected = bf16_by_hand(x) @ weight.to(torch.float32).double().T
    assert relative_error(widened_linear(x, weight), expected) < 1e-6


@needs_compiler
@rounds
def test_int8_arithmetic_of_extreme_weights_and_inputs_does_not_wrap(form: str) -> None:
    """All weights and inputs at their largest, of either sign: sums of pairs and blocks are the largest there are."""
    for sign in (1.0, -1.0):
        weight = ROUNDED[form](torch.full((5, 512), sign))
        for n_rows in (1, 3, 40):
            found = native.linear(torch.full((n_rows, 512), 3.0), weight)
            torch.testing.assert_close(found, torch.full((n_rows, 5), sign * 3 * 512))


@needs_compiler
@rounds
def test_int8_arithmetic_takes_zeros_tiny_and_missing_numbers(form: str) -> None:
    weight = ROUNDED[form](random(6, 128, seed=5))
    for n_rows in (2, 20):
        x = random(n_rows, 128)
        x[0, :64], x[1, 32:64] = 0, 1e-38
        expected = torch.where(x.abs() > 1e-37, x, 0)
        expected = torch.cat([rounded_to_int8(block) for block in expected.split(32, dim=-1)], dim=-1).double()
        assert relative_error(native.linear(x, weight), expected @ weight.to(torch.float32).double().T) < 1e-6
        for odd in (float("nan"), float("inf")):
            x[1, 40] = odd
            assert native.linear(x, weight).isnan().any(dim=1).tolist() == [False, True] + [False] * (n_rows - 2)


@needs_compiler
@rounds
@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("n_tokens", [1, 3, 9, 200])
def test_experts_of_int8_arithmetic_round_what_goes_into_each_product(
    form: str, n_threads: int, n_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside torch, which rounds with the definition of `test_quantised`: near a tie the two may be a level apart."""
    inner = 130 if form == "int8" else 256
    matrices = [
        [ROUNDED[form](m) for m in (random(inner, 256, seed=e) / 16, random(inner, 256, seed=10 + e) / 16)]
        + [ROUNDED[form](random(256, inner, seed=20 + e) / 11)]
        for e in range(3)
    ]
    experts = ExpertWeights(tuple(GatedWeights(*one) for one in matrices))
    hidden, weights = random(n_tokens, 256), random(n_tokens, 2, seed=8).abs()
    routing = Routing(torch.tensor([[0, 2], [2, 1]])[torch.arange(n_tokens) % 2], weights, 3)
    plan = dropless().plan(seen(routing))
    torch.set_num_threads(n_threads)
    found = execute(plan, hidden, experts)
    monkeypatch.setattr(tables, "serves", lambda *tensors: False)
    by_torch = execute(plan, hidden, ExpertWeights(tuple(GatedWeights(*one) for one in matrices)))
    assert relative_error(found, by_torch.double()) < 3e-4
    plain = [[replace(m, arithmetic="fp32") for m in one] for one in matrices]
    unrounded = execute(plan, hidden, ExpertWeights(tuple(GatedWeights(*one) for one in plain)))
    assert relative_error(found, unrounded.double()) > 2e-3, "inputs were not rounded"


@needs_compiler
@pytest.mark.parametrize("form", ["fp32", *ROUNDED, pytest.param("bf16", marks=needs_bf16)])
def test_a_call_of_few_rows_beside_a_large_one_gives_the_bits_that_it_gives_alone(form: str) -> None:
    """Both go by the kernels of few rows, and the large one by others; one thread and two."""
    forms = ROUNDED | {"fp32": partial(store, form="fp32"), "bf16": partial(store, form="bf16", arithmetic="bf16")}
    matrices = [forms[form](random(256, 256, seed=seed) / 16) for seed in range(6)]
    table = tables.expert_table([(gate, up, down) for gate, up, down in (matrices[:3], matrices[3:])])
    assert table is not None
    hidden = random(150, 256)
    for n in range(1, 9):
        tokens, weights = torch.cat([torch.arange(n), torch.arange(150)]), random(n + 150, seed=8).abs()
        one = native.mix(hidden, table, (1,), (n,), tokens[:n], weights[:n])
        large = native.mix(hidden, table, (0,), (150,), tokens[n:], weights[n:])
        torch.set_num_threads(1 + n % 2)
        both = native.mix(hidden, table, (1, 0), (n, 150), tokens, weights)
        assert torch.equal(native.mix(hidden, table, (1, 0), (n, 150), tokens, weights, made=(0, 1)), one)
        assert relative_error(both, one.double() + large.double()) < 1e-6
