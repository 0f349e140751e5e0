"""Attention by the kernels against its definition, of one token and of many."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engines.kernels import native, tables
from engines.kernels.decoder import cache_table, chunk_table
from engines.model.quantised import Arithmetic, AttentionArithmetic, Form, rounded, store
from engines.model.rope import turn
from engines.model.whole_numbers import BLOCK_KEYS, LEAST_VALUE, SHARE_BITS, VALUE_BITS
from tests.kernel_forms import needs_bf16, needs_byte_attention, needs_compiler, random, relative_error

pytestmark = pytest.mark.numbers

ARITHMETICS: list[tuple[Form, Arithmetic, AttentionArithmetic]] = [
    ("fp32", "fp32", "fp32"),
    ("bf16", "bf16", "fp32"),
    ("bf16", "bf16", "bf16"),
    ("int8", "int8", "bf16"),
    ("fp32", "fp32", "bf16"),
    ("int8", "int8", "int8"),
    ("fp32", "fp32", "int8"),
]
"""Of matrices: form and arithmetic; and of attention."""
SCALE = 0.25
SINKS = random(6, seed=4)
ROOT = Path(__file__).parents[1]
by_arithmetic = pytest.mark.parametrize(
    "held",
    [
        pytest.param(held, marks=[needs_bf16] * ("bf16" in held) + [needs_byte_attention] * (held[2] == "int8"))
        for held in ARITHMETICS
    ],
)


def attention_by_definition(
    x: Tensor,
    matrices: list[Tensor],
    biases: list[Tensor],
    norms: list[Tensor] | None,
    sinks: Tensor | None,
    window: int | None,
    past: tuple[Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    neighbours: bool,
) -> tuple[Tensor, Tensor]:
    """In double, one step after the other: the output, and the keys of the new tokens [M, T, D]."""
    n_new, n_past = len(x), past[0].shape[1]
    query, key, value = (
        (x.double() @ m.double().T + b).view(n_new, -1, 16).transpose(0, 1)
        for m, b in zip(matrices[:3], biases[:3], strict=True)
    )
    if norms is not None:
        query, key = (F.rms_norm(h, (16,), w.double(), 1e-3) for h, w in zip((query, key), norms, strict=True))
    query, key = (turn(h, cos.double(), sin.double(), "neighbours" if neighbours else "halves") for h in (query, key))
    keys, values = (torch.cat([old.double(), new], dim=1) for old, new in zip(past, (key, value), strict=True))
    score = 0.3 * query @ keys.repeat_interleave(3, 0).mT
    place, seen = torch.arange(n_past, n_past + n_new)[:, None], torch.arange(n_past + n_new)
    score = score.masked_fill(seen > place, -torch.inf)
    if window is not None:
        score = score.masked_fill(seen <= place - window, -torch.inf)
    if sinks is not None:
        score = torch.cat([score, sinks.double()[:, None, None].expand(-1, n_new, 1)], dim=-1)
    share = score.softmax(dim=-1)[..., : n_past + n_new]
    mixed = (share @ values.repeat_interleave(3, 0)).transpose(0, 1).flatten(1)
    return mixed @ matrices[3].double().T + biases[3], key


@needs_compiler
@pytest.mark.parametrize("n_new", [1, 2, 16, 23, 230])
@pytest.mark.parametrize("n_past", [0, 5, 130])
@pytest.mark.parametrize(
    ("norm", "sink", "window", "neighbours"),
    [(False, False, None, False), (True, False, None, True), (False, True, 7, False), (True, True, 100, False)],
)
def test_attention_block_is_its_definition(
    n_new: int, n_past: int, norm: bool, sink: bool, window: int | None, neighbours: bool
) -> None:
    """Six heads that share two key/value heads; half of each head's features are turned; scores reach far down."""
    x, past = random(n_new, 40), (random(2, n_past, 16, seed=1), random(2, n_past, 16, seed=2))
    matrices = [random(*shape, seed=n) / 3 for n, shape in enumerate([(96, 40), (32, 40), (32, 40), (40, 96)])]
    biases = [random(n, seed=n + place) for place, n in enumerate((96, 32, 32, 40))]
    norms = [4 * random(16, seed=7), random(16, seed=8)] if norm else None
    sinks = SINKS if sink else None
    cos, sin = random(n_new, 4, seed=5), random(n_new, 4, seed=6)
    table = tables.attention_table(
        *matrices, (biases[0], biases[1], biases[2], biases[3]), (norms[0], norms[1], 1e-3) if norms else None, sinks,
        16, window, 0.3, neighbours,
    )  # fmt: skip
    assert table is not None
    keys, values = torch.full((2, 2, n_past + n_new + 3, 16), float("nan")).unbind()
    keys[:, :n_past], values[:, :n_past] = past
    expected, new_keys = attention_by_definition(x, matrices, biases, norms, sinks, window, past, cos, sin, neighbours)
    chunks = chunk_table([(cache_table([keys], [values]), n_past, n_new)])
    found = native.attend(x, table, cos, sin, chunks, layer=0)
    assert relative_error(found, expected) < 3e-6
    assert relative_error(keys[:, n_past : n_past + n_new], new_keys) < 1e-6
    assert keys[:, n_past + n_new :].isnan().all()
    # Whoever asks for keys and values alone gets the very same, and nothing else is written.
    own_keys, own_values = torch.full((2, *keys.shape), float("nan")).unbind()
    own_keys[:, :n_past], own_values[:, :n_past] = past
    own = chunk_table([(cache_table([own_keys], [own_values]), n_past, n_new)])
    assert not len(native.attend(x, table, cos, sin, own, layer=0, keeps_only=True))
    for made, expected in ((own_keys, keys), (own_values, values)):
        assert torch.equal(made.nan_to_num(-99.0), expected.nan_to_num(-99.0))


def attended(
    cut: list[int],
    held: tuple[Form, Arithmetic, AttentionArithmetic],
    window: int | None,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    sinks: Tensor | None = SINKS,
) -> Tensor:
    """What six heads find for tokens that come in pieces of `cut`, behind what is cached before them all."""
    form, of_products, of_attention = held
    width, dim = query.shape[1], keys.shape[2]
    matrices = [store(torch.eye(rows, width), form, of_products) for rows in (width, 2 * dim, 2 * dim, width)]
    table = tables.attention_table(
        *matrices, (None,) * 4, None, sinks, dim, window, SCALE, neighbours=False, arithmetic=of_attention
    )
    assert table is not None
    pieces, done, n_past = list[Tensor](), 0, keys.shape[1] - len(query)
    for n in cut:
        chunks = chunk_table([(cache_table([keys], [values]), n_past + done, n)])
        pieces.append(native.attend_cached(query[done : done + n], table, chunks, layer=0))
        done += n
    return torch.cat(pieces)


@needs_compiler
@by_arithmetic
@pytest.mark.parametrize("window", [None, 7, 100])
def test_attention_is_the_same_however_a_prompt_is_cut(
    held: tuple[Form, Arithmetic, AttentionArithmetic], window: int | None
) -> None:
    query, (keys, values) = random(400, 96), (random(2, 430, 16, seed=1), random(2, 430, 16, seed=2))
    whole = attended([400], held, window, query, keys, values)
    assert torch.equal(attended([33, 90, 277], held, window, query, keys, values), whole)


@needs_compiler
@needs_bf16
@pytest.mark.parametrize("window", [None, 7, 100])
@pytest.mark.parametrize("of_products", ["fp32", "bf16"])
def test_attention_in_bf16_rounds_queries_keys_and_values_and_shares(
    of_products: Literal["fp32", "bf16"], window: int | None
) -> None:
    """What is rounded already comes to the same bits. Shares lose up to 2^-8, and what they give as much again where it
    goes into a product of bf16."""
    in_bf16, in_fp32 = (of_products, of_products, "bf16"), ("fp32", "fp32", "fp32")
    query, (keys, values) = random(400, 96), (random(2, 430, 16, seed=1), random(2, 430, 16, seed=2))
    found = attended([400], in_bf16, window, query, keys, values)
    query, keys, values = (rounded(x, "bf16") for x in (query, keys, values))
    assert torch.equal(found, attended([400], in_bf16, window, query, keys, values))
    exact = attended([400], in_fp32, window, query, keys, values)
    bound = attended([400], in_fp32, window, query, keys, values.abs())  # the shares' sum of magnitudes
    lost = 2**-8 + 2**-8 + 2**-16 if of_products == "bf16" else 2**-8
    assert ((found - exact).abs() <= lost * bound + 1e-5).all()
    assert not torch.equal(found, rounded(exact, "bf16"))
    assert relative_error(found, exact.double()) > 1e-4


def in_whole_numbers(values: Tensor) -> Tensor:
    """Each key's values in multiples of a power of two, by which the largest is below 2^11. values: [M, S, D]."""
    exponent = torch.frexp(values.abs().amax(dim=-1, keepdim=True)).exponent - 11
    return torch.ldexp(torch.ldexp(values, -exponent).round(), exponent)


def in_bytes(query: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """What attention in int8 multiplies: six heads' queries, scaled already, and keys."""
    by_head = rounded(SCALE * query.view(len(query), 6, keys.shape[2]), "int8") / SCALE
    return by_head.reshape(len(query), -1), rounded(keys, "int8").contiguous()


IN_INT8: tuple[Form, Arithmetic, AttentionArithmetic] = ("fp32", "fp32", "int8")
IN_FP32: tuple[Form, Arithmetic, AttentionArithmetic] = ("fp32", "fp32", "fp32")


@needs_compiler
@needs_byte_attention
@pytest.mark.parametrize("window", [None, 7, 100])
@pytest.mark.parametrize("dim", [8, 16, 72, 128, 512])
def test_attention_in_int8_rounds_queries_and_keys_to_bytes_and_values_and_shares_to_whole_numbers(
    dim: int, window: int | None
) -> None:
    """Beside fp32 attention of what torch rounds so, shares excepted: of a block's largest they lose up to 2^-14."""
    query, (keys, values) = random(230, 6 * dim), (random(2, 430, dim, seed=1), random(2, 430, dim, seed=2))
    query *= 4 / dim**0.5
    found = attended([230], IN_INT8, window, query, keys, values)
    unrounded = attended([230], IN_FP32, window, query, keys, values)
    of_exact_values = attended([230], IN_FP32, window, *in_bytes(query, keys), values)
    query, keys = in_bytes(query, keys)
    values = in_whole_numbers(values)
    exact = attended([230], IN_FP32, window, query, keys, values)
    bound = attended([230], IN_FP32, window, query, keys, values.abs())  # the shares' sum of magnitudes
    assert ((found - exact).abs() <= 2**-8 * bound + 1e-5).all()
    assert relative_error(found, exact.double()) < 3e-4
    assert relative_error(of_exact_values, exact.double()) > 3e-4
    assert relative_error(unrounded, exact.double()) > 3e-3


@needs_compiler
@needs_byte_attention
def test_many_small_shares_are_not_lost_beside_a_large_one_in_int8() -> None:
    """The largest score stands in the last block. Before it 2000 keys have 2^-15 of its share each, which would be 0 if
    whole numbers of 13 bits counted in it."""
    n_keys, n_far = 2017, 16
    keys, values = torch.zeros(2, n_keys, 16), random(2, n_keys, 16, seed=2) + 3
    keys[:, -1, 0] = 15 * 0.693147 / SCALE  # of 2017 keys the last, in the 22nd block
    query = torch.zeros(1 + n_far, 96)
    query[-1, ::16] = 1.0
    found = attended([1 + n_far], IN_INT8, None, query, keys, values)[-1]
    exact = attended([1 + n_far], IN_FP32, None, *in_bytes(query, keys), values)[-1]
    without = values[0, -1] * 2**15 / (2**15 + n_keys - 1 + torch.exp(SINKS)[0])
    assert relative_error(without[None], exact[None, :16].double()) > 0.03
    assert relative_error(found[None], exact[None].double()) < 1e-3


@needs_compiler
@needs_byte_attention
def test_values_far_apart_and_none_at_all_count_as_they_are_in_int8() -> None:
    """Keys whose values are a million times those of others, a millionth of them, zeros, or too small for any scale."""
    query, (keys, values) = random(230, 96), (random(2, 430, 16, seed=1), random(2, 430, 16, seed=2))
    values *= torch.tensor([1e6, 1.0, 1e-6, 0.0, 1e-30, 1.0, 1.0])[torch.arange(430) % 7][:, None]
    exact = attended([230], IN_FP32, None, *in_bytes(query, keys), values)
    assert relative_error(attended([230], IN_INT8, None, query, keys, values), exact.double()) < 1e-3
    values[:, torch.arange(430) % 7 == 0] = 0.0
    exact = attended([230], IN_FP32, None, *in_bytes(query, keys), values)
    assert relative_error(attended([230], IN_INT8, None, query, keys, values), exact.double()) < 1e-3
    nothing = attended([230], IN_INT8, None, query, keys, torch.zeros_like(values))
    assert torch.equal(nothing, torch.zeros_like(nothing))


@needs_compiler
@needs_byte_attention
@pytest.mark.parametrize("score", [*(n / 2 for n in range(-180, -160)), -270, 0, 90])
def test_a_block_of_which_a_query_sees_nothing_adds_nothing_in_int8(score: float) -> None:
    """Queries 82 to 95 meet the keys from 96 on beside later ones. All scores are the same, so all shares are. Where
    scores and the scale of values came to 2^-128, what such a block adds was 0 times infinity."""
    query, keys, values = torch.zeros(130, 96), torch.zeros(2, 130, 16), random(2, 130, 16, seed=2)
    query[:, ::16], keys[:, :, 0] = 1.0, score / SCALE
    found = attended([50, 80], IN_INT8, None, query, keys, values, sinks=None)
    means = values.cumsum(dim=1) / torch.arange(1, 131)[:, None]
    exact = means[[0, 0, 0, 1, 1, 1]].transpose(0, 1).reshape(130, 96)
    assert relative_error(found, exact.double()) < 1e-3


@needs_compiler
@needs_byte_attention
def test_the_largest_numbers_of_a_block_fit_in_int8() -> None:
    """Every share is the largest there is, and so is every value: the sum of the products has 31 bits."""
    query, keys = torch.zeros(230, 96), torch.zeros(2, 430, 16)
    values = torch.full((2, 430, 16), 1.9999)
    values[:, :, 1::2] *= -1
    found = attended([230], IN_INT8, None, query, keys, values)
    exact = attended([230], IN_FP32, None, query, keys, in_whole_numbers(values))
    assert relative_error(found, exact.double()) < 2**-17


@needs_compiler
@pytest.mark.parametrize("dim", [8, 16, 24, 72, 136])
@pytest.mark.parametrize("n_seen", [1, 8, 61])
def test_one_token_finds_the_same_whether_or_not_heads_fill_whole_registers(dim: int, n_seen: int) -> None:
    query, (keys, values) = random(1, 6 * dim), (random(2, n_seen, dim, seed=1), random(2, n_seen, dim, seed=2))
    found = attended([1], ("fp32", "fp32", "fp32"), None, query, keys, values)
    by_head_M3D = query.double().view(2, 3, dim)
    score_M3S = SCALE * by_head_M3D @ keys.double().mT
    with_sinks = torch.cat([score_M3S, SINKS.double().view(2, 3, 1)], dim=-1)
    expected = with_sinks.softmax(dim=-1)[..., :n_seen] @ values.double()
    assert relative_error(found, expected.flatten()[None]) < 3e-6


def test_rows_of_keys_have_room_for_the_widest_head() -> None:
    header = (ROOT / "engines/kernels/wide_rounded.h").read_text(encoding="utf-8")
    assert f"constexpr int64_t kKeyColumns = {tables.MAX_HEAD_DIM};" in header


def test_torch_rounds_shares_and_values_as_the_kernels_do() -> None:
    header = (ROOT / "engines/kernels/attention_blocks.h").read_text(encoding="utf-8")
    for name, value in {"kKeys": BLOCK_KEYS, "kBitsOfValue": VALUE_BITS, "kBitsOfShare": SHARE_BITS}.items():
        assert f" {name} = {value};" in header
    assert f" kLeastValue = {LEAST_VALUE}f;" in header


@needs_compiler
@needs_byte_attention
@pytest.mark.parametrize("of", ["query", "key", "value"])
@pytest.mark.parametrize("what", [torch.nan, torch.inf])
def test_what_is_no_number_is_none_behind_attention_in_int8(of: str, what: float) -> None:
    query, (keys, values) = random(40, 96), (random(2, 40, 16, seed=1), random(2, 40, 16, seed=2))
    {"query": query, "key": keys[0], "value": values[0]}[of][5, 3] = what
    found = attended([40], IN_INT8, None, query, keys, values)
    assert found[5, :16].isnan().all()
    assert found[:5].isfinite().all()
