"""Formats against their definitions, bit by bit; that the kernels read them is `test_kernels`' claim."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engines.errors import EngineError
from engines.model import quantised
from engines.model.mxfp4 import PackedBlocks
from engines.model.quantised import (
    FORMS,
    Int4Group,
    QuantisedMatrix,
    mxfp4_from_blocks,
    quantise_fp8,
    quantise_int4,
    quantise_int8,
    quantise_mxfp4,
    store,
)

pytestmark = pytest.mark.numbers

NARROW = [form for form in FORMS if not form.startswith(("fp32", "bf16", "fp16"))]
every_narrow_form = pytest.mark.parametrize("form", NARROW)
every_group = pytest.mark.parametrize("group", get_args(Int4Group))


def random(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def narrow(weight: Tensor, form: quantised.Form) -> QuantisedMatrix:
    matrix = store(weight, form)
    assert isinstance(matrix, QuantisedMatrix)
    return matrix


def small_float(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """A float of few bits by IEEE 754's rules, without infinities."""
    mantissa = code & ((1 << mantissa_bits) - 1)
    exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
    sign = -1.0 if code >> (mantissa_bits + exponent_bits) else 1.0
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


E4M3 = {code: small_float(code, 4, 3, 7) for code in range(127)}  # 127 is NaN; the rest are their negatives
E2M1 = {code: small_float(code, 2, 1, 1) for code in range(8)}


def nearest(value: float, table: dict[int, float]) -> float:
    """With the sign of the value; of two equally near ones that of even mantissa, which is that of even code."""
    code = min(table, key=lambda c: (abs(table[c] - abs(value)), c % 2))
    return math.copysign(table[code], value)


# --- values -----------------------------------------------------------------------------------------------------------


def test_int8_is_off_by_at_most_half_a_step_and_keeps_the_largest() -> None:
    weight = random(20, 64)
    step = weight.abs().amax(dim=1, keepdim=True) / 127
    widened = quantise_int8(weight).to(torch.float32)
    assert ((widened - weight).abs() <= step / 2 * (1 + 1e-4)).all()
    torch.testing.assert_close(widened.abs().amax(dim=1), weight.abs().amax(dim=1))


@every_group
def test_int4_is_off_by_at_most_a_step_and_keeps_the_largest_of_each_group(group: Int4Group) -> None:
    weight = random(20, 256)
    grouped = weight.unflatten(1, (-1, group))
    step = grouped.abs().amax(dim=-1, keepdim=True) / 8
    widened = quantise_int4(weight, group).to(torch.float32).unflatten(1, (-1, group))
    # Half a step, but for values beyond the highest level, 7 steps.
    assert ((widened - grouped).abs() <= torch.where(grouped.abs() > 7 * step, step, step / 2) * (1 + 1e-4)).all()
    torch.testing.assert_close(widened.abs().amax(dim=-1), grouped.abs().amax(dim=-1))


def test_fp8_takes_the_nearest_e4m3_value_and_the_largest_becomes_448() -> None:
    weight = random(6, 70) * torch.logspace(-20, 20, 6)[:, None]
    # Half a step between 16 and 18, a subnormal, half the least subnormal; the scale of this row is 1.
    weight[2, :4] = torch.tensor([448.0, 17.0, 3 * 2.0**-9, 2.0**-10])
    weight[2, 4:] = weight[2, 4:].clamp(-400, 400)
    matrix = quantise_fp8(weight)
    scales = weight.abs().amax(dim=1) / 448
    torch.testing.assert_close(matrix.scales, scales, rtol=1e-6, atol=0)
    assert matrix.scales[2] == 1
    expected = [[nearest(v, E4M3) for v in row] for row in (weight / matrix.scales[:, None]).tolist()]
    assert matrix.values.float().tolist() == expected
    assert matrix.values.float().abs().amax(dim=1).tolist() == [448.0] * 6


def test_mxfp4_takes_the_nearest_value_under_the_exponent_of_the_blocks_largest() -> None:
    """Microscaling formats 1.0, §6.3, value by value. One block holds every half-way point, one is beyond 6."""
    weight = random(5, 128) * torch.logspace(-30, 30, 5)[:, None]
    halves = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    weight[2, :32] = torch.tensor([*halves, *(-h for h in halves), *[0.1] * 17, 4.0])
    weight[2, 32] = 7.5 * 2.0 ** math.floor(math.log2(float(weight[2, 33:64].abs().max())))
    matrix = quantise_mxfp4(weight)
    widened = matrix.to(torch.float32).tolist()
    for n, row in enumerate(weight.double().tolist()):
        for group in range(4):
            block = row[32 * group : 32 * group + 32]
            exponent = math.floor(math.log2(max(map(abs, block)))) - 2
            assert matrix.scales[n, group] == exponent + 127
            expected = [nearest(v / 2.0**exponent, E2M1) * 2.0**exponent for v in block]
            assert widened[n][32 * group : 32 * group + 32] == expected
    assert matrix.scales[2, 0] == 127, "the half-way points are such in the quantised block too"


def test_mxfp4_exponents_end_where_the_format_ends() -> None:
    weight = torch.zeros(3, 64)
    weight[0] = 2.0**-130
    weight[1] = 3.4e38
    matrix = quantise_mxfp4(weight)
    assert matrix.scales[0].tolist() == [0, 0]
    assert matrix.scales[1].tolist() == [127 + 125] * 2
    assert torch.equal(matrix.to(torch.float32)[2], torch.zeros(64))
    assert matrix.to(torch.float32)[1].tolist() == [6 * 2.0**125] * 64


@every_narrow_form
def test_matrix_of_zeros_stays_one(form: quantised.Form) -> None:
    assert torch.equal(narrow(torch.zeros(3, 128), form).to(torch.float32), torch.zeros(3, 128))


@every_narrow_form
def test_matrix_larger_than_a_piece_is_quantised_as_its_parts_are(form: quantised.Form) -> None:
    weight = random(400, 1152)
    assert weight.numel() > quantised.PIECE
    parts = [narrow(part, form).to(torch.float32) for part in weight.split(90)]
    assert torch.equal(narrow(weight, form).to(torch.float32), torch.cat(parts))


@every_narrow_form
def test_layout_of_the_source_does_not_matter(form: quantised.Form) -> None:
    stack = random(2, 128, 60)
    there = narrow(stack.mT, form).to(torch.float32)
    assert torch.equal(there, narrow(stack.mT.contiguous(), form).to(torch.float32))
    assert torch.equal(narrow(stack[1].mT[0::2], form).to(torch.float32), there[1, 0::2])


@every_narrow_form
def test_weights_stored_in_bf16_are_quantised_as_their_values(form: quantised.Form) -> None:
    weight = random(9, 128).bfloat16()
    assert torch.equal(narrow(weight, form).to(torch.float32), narrow(weight.float(), form).to(torch.float32))


# --- inputs that are rounded ------------------------------------------------------------------------------------------


def test_rounded_inputs_are_whole_steps_of_their_block_and_the_nearest_ones() -> None:
    x = random(7, 100) * torch.logspace(-20, 20, 7)[:, None]
    found = quantised.rounded_to_int8(x)
    for given, block in zip(x.split(32, dim=1), found.split(32, dim=1), strict=True):
        step = given.abs().amax(dim=1, keepdim=True).double() / 127
        levels = block.double() / step
        torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-4)
        assert ((block - given).abs() <= step / 2 * (1 + 1e-4)).all()
        torch.testing.assert_close(block.abs().amax(dim=1), given.abs().amax(dim=1))


def test_rounded_inputs_of_whole_levels_stay_and_half_ones_become_even() -> None:
    """The largest is 127, so a step is 1."""
    x = torch.tensor([[127.0, -127.0, 3.0, 0.5, 1.5, 2.5, -0.5, -1.5, 0.0, 63.49]])
    assert quantised.rounded_to_int8(x).tolist() == [[127.0, -127.0, 3.0, 0.0, 2.0, 2.0, 0.0, -2.0, 0.0, 63.0]]
    assert quantised.rounded_to_int8(torch.tensor([[0.0, 0.0], [1e-38, -1e-38]])).abs().tolist() == [
        [0.0, 0.0],
        [0.0, 0.0],
    ]


@pytest.mark.parametrize("form", FORMS)
def test_only_weights_of_bf16_are_multiplied_in_bf16_and_they_are_not_copied(form: quantised.Form) -> None:
    weight = random(4, 128).to(quantised.PLAIN_DTYPES.get(form, torch.float32))
    stored = store(weight, form, "bf16")
    assert (isinstance(stored, QuantisedMatrix) and stored.arithmetic == "bf16") is (form == "bf16")
    if form == "bf16":
        assert isinstance(stored, QuantisedMatrix)
        assert stored.values.data_ptr() == weight.data_ptr()
        assert (stored.nbytes, stored.shape) == (weight.nbytes, weight.shape)
        assert torch.equal(stored.to(torch.float32), weight.float())
        cut = stored[1:3].columns(32, 96)
        assert cut is not None
        assert torch.equal(cut.to(torch.float32), weight[1:3, 32:96].float())


@pytest.mark.parametrize("form", FORMS)
def test_only_weights_of_8_and_4_whole_bits_are_multiplied_in_int8(form: quantised.Form) -> None:
    stored = store(random(4, 128), form, "int8")
    rounds = isinstance(stored, QuantisedMatrix) and stored.arithmetic == "int8"
    assert rounds is (form == "int8" or form.startswith("int4"))
    if rounds:
        assert isinstance(stored, QuantisedMatrix)
        assert stored[1:3].arithmetic == "int8"
        cut = stored.columns(0, 128)
        assert cut is not None
        assert cut.arithmetic == "int8"


@pytest.mark.parametrize(
    ("forms", "told"),
    [
        ({}, "there are none, for no component is named"),
        ({"experts": "bf16", "head": "fp8"}, "there are only experts bf16, head fp8"),
    ],
)
def test_int8_arithmetic_of_other_weights_is_refused(forms: dict[str, str], told: str) -> None:
    with pytest.raises(ValueError, match=f'arithmetic "int8" multiplies weights of int8, int4-g32.*, and {told}'):
        quantised.Quantisation.model_validate({**forms, "arithmetic": "int8"})


def test_bf16_arithmetic_of_other_weights_is_refused() -> None:
    with pytest.raises(ValueError, match='"bf16" multiplies weights of bf16, and there are only experts int8'):
        quantised.Quantisation.model_validate({"experts": "int8", "arithmetic": "bf16"})


# --- storage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["fp32", "bf16", "fp16"])
def test_plain_form_that_the_weight_has_is_the_weight_itself(form: quantised.Form) -> None:
    weight = random(4, 8).to(quantised.PLAIN_DTYPES[form])
    assert store(weight, form) is weight


def test_value_beyond_fp16_is_refused_rather_than_made_infinite() -> None:
    weight = random(4, 8)
    weight[2, 3] = -70000.0
    with pytest.raises(EngineError, match=r"a weight of 70000 does not fit into fp16 \(largest 65504\); use bf16"):
        store(weight, "fp16")


@pytest.mark.parametrize(
    ("form", "first", "end"),
    [("int8", 3, 40), ("fp8", 3, 40), ("int4-g32", 64, 192), ("int4-g128", 128, 256), ("mxfp4", 64, 128)],
)
def test_columns_of_a_quantised_matrix_are_the_columns_of_what_it_stands_for(
    form: quantised.Form, first: int, end: int
) -> None:
    stored = quantised.store(torch.randn(5, 256, generator=torch.Generator().manual_seed(3)), form)
    assert isinstance(stored, quantised.QuantisedMatrix)
    cut = stored.columns(first, end)
    assert cut is not None
    assert torch.equal(cut.to(torch.float32), stored.to(torch.float32)[:, first:end])
    assert cut.values.is_contiguous()


@pytest.mark.parametrize(("form", "first"), [("int4-g32", 32), ("int4-g128", 64), ("mxfp4", 32)])
def test_columns_that_split_a_block_or_a_group_are_not_cut(form: quantised.Form, first: int) -> None:
    stored = quantised.store(torch.ones(5, 256), form)
    assert isinstance(stored, quantised.QuantisedMatrix)
    assert stored.columns(first, 256) is None


@pytest.mark.parametrize(
    ("form", "bits"),
    [("int8", 8), ("fp8", 8), ("int4-g32", 4 + 1), ("int4-g64", 4.5), ("int4-g128", 4.25), ("mxfp4", 4 + 8 / 32)],
)
def test_bytes_are_those_of_the_format(form: quantised.Form, bits: float) -> None:
    row_scales = 4 * 16 * 4 if form in ("int8", "fp8") else 0
    assert narrow(random(4, 16, 256), form).nbytes == 4 * 16 * 256 * bits / 8 + row_scales


@every_narrow_form
def test_expert_of_a_quantised_stack_is_that_expert(form: quantised.Form) -> None:
    weight = random(4, 16, 256)
    matrix = narrow(weight, form)
    assert matrix.shape == weight.shape
    assert torch.equal(matrix[2].to(torch.float32), matrix.to(torch.float32)[2])
    assert torch.equal(matrix[1:3].to(torch.float32), matrix.to(torch.float32)[1:3])
    assert F.cosine_similarity(matrix[2].to(torch.float32), weight[2]).min() > 0.98


def nibble(words: Tensor, column: int) -> int:
    """Nibble j of word i of a block is column 8 j + i."""
    block, place = divmod(column, 64)
    return int(words[8 * block + place % 8]) >> (4 * (place // 8)) & 15


def test_nibbles_lie_where_the_kernels_look_for_them() -> None:
    codes = torch.randint(0, 16, (192,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    words = quantised.pack_nibbles(codes)
    assert words.dtype is torch.int32
    assert [nibble(words, column) for column in range(192)] == codes.tolist()
    assert torch.equal(quantised.unpack_nibbles(words), codes)


def test_levels_of_int4_are_raised_by_eight_but_for_the_top_nibble() -> None:
    levels = (torch.arange(192) * 7 % 16 - 8).to(torch.int8)
    words = quantised.pack_int4(levels)
    for column, level in enumerate(levels.tolist()):
        is_top = column % 64 >= 56
        assert nibble(words, column) == (level % 16 if is_top else level + 8)
    assert torch.equal(quantised.unpack_int4(words), levels)


def test_blocks_of_a_file_become_the_same_values_as_another_project_reads() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(4)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 130, (3, 10, 4), generator=generator, dtype=torch.uint8)
    matrix = mxfp4_from_blocks(PackedBlocks(blocks, scales))
    assert torch.equal(matrix.to(torch.bfloat16), convert_moe_packed_tensors(blocks, scales).mT)
    assert matrix.nbytes == blocks.nbytes + scales.nbytes
    # What is already in the format keeps its values under it; a block of small values may take a smaller exponent.
    assert torch.equal(quantise_mxfp4(matrix.to(torch.float32)).to(torch.float32), matrix.to(torch.float32))


@pytest.mark.parametrize(
    ("form", "width", "multiple"),
    [("int4-g32", 96, 64), ("int4-g64", 96, 64), ("int4-g128", 192, 128), ("mxfp4", 96, 64)],
)
def test_width_that_does_not_fill_groups_is_refused(form: quantised.Form, width: int, multiple: int) -> None:
    with pytest.raises(
        EngineError, match=f"{form} needs a width that is a multiple of {multiple}, not {width}; use int8"
    ):
        store(random(4, width), form)
