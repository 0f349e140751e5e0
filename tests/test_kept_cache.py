"""Keys and values that a cache keeps in bf16 or halves: rounded as they are written, floats wherever they are read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.base import unheard
from engines.errors import EngineError
from engines.kernels import native, tables
from engines.kernels.decoder import cache_table, chunk_table
from engines.model.attention import AttentionWeights
from engines.model.checkpoints import inspect_checkpoint, load_checkpoint
from engines.model.quantised import AttentionArithmetic, Quantisation
from engines.model.transformer import Transformer
from engines.model.wanted_tensors import check_quantisation
from engines.parallel.engine import ParallelEngine
from engines.parallel.running import RanksAsked
from engines.reference import ReferenceEngine
from engines.techniques.presets import DroplessParameters, dropless
from tests.fakes.families import CASES, write_family
from tests.kernel_forms import needs_bf16, needs_byte_attention, needs_compiler, random
from tests.ranks import BUNDLED, CHUNK, LOGLIKELIHOOD, technique

pytestmark = pytest.mark.numbers

by_form = pytest.mark.parametrize("kept", [torch.bfloat16, torch.float16])
N_HEADS, N_KV_HEADS, DIM = 6, 2, 16


def table_of(
    kept: torch.dtype, window: int | None = None, arithmetic: AttentionArithmetic = "fp32", dim: int = DIM
) -> tables.AttentionTable:
    hidden = N_HEADS * dim
    matrices = [torch.eye(rows, hidden) for rows in (hidden, N_KV_HEADS * dim, N_KV_HEADS * dim)]
    found = tables.attention_table(
        *matrices, torch.eye(hidden), (None,) * 4, None, random(N_HEADS, seed=4),
        dim, window, 0.25, neighbours=False, arithmetic=arithmetic, kept=kept,
    )  # fmt: skip
    assert found is not None
    return found


@needs_compiler
@by_form
@pytest.mark.parametrize("window", [None, 7, 100])
@pytest.mark.parametrize("n_new", [1, 2, 23, 230])
@pytest.mark.parametrize(
    "arithmetic",
    ["fp32", pytest.param("bf16", marks=needs_bf16), pytest.param("int8", marks=needs_byte_attention)],
)
@pytest.mark.parametrize("dim", [DIM, 72])
def test_what_is_kept_narrow_is_read_as_the_floats_that_it_stands_for(
    kept: torch.dtype, window: int | None, n_new: int, arithmetic: AttentionArithmetic, dim: int
) -> None:
    """Bit for bit, beside a cache of floats with the very same numbers."""
    query, narrow = random(n_new, N_HEADS * dim), [random(2, 430, dim, seed=n).to(kept) for n in (1, 2)]
    found, expected = (
        native.attend_cached(
            query,
            table_of(caches[0].dtype, window, arithmetic, dim),
            chunk_table([(cache_table([caches[0]], [caches[1]]), 430 - n_new, n_new)]),
            layer=0,
        )
        for caches in (narrow, [held.float() for held in narrow])
    )
    assert torch.equal(found, expected)


@needs_compiler
@by_form
@pytest.mark.parametrize("n_new", [1, 3, 40])
def test_what_is_kept_is_the_nearest_of_its_form(kept: torch.dtype, n_new: int) -> None:
    """As torch rounds: ties to even, and what is tiny stays if its form has it. What no half holds is no number."""
    x = random(n_new, 96)
    ties = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11]
    x[-1, :16] = torch.tensor(
        [*ties, 65504, 65519.99, 65520, -7e4, 3e38, 3.4e38, -3.4e38, 6e-8, 2.9e-8, -1e-7, 0.0, -0.0]
    )
    keys, values = torch.full((2, 2, n_new + 2, DIM), 5.0, dtype=kept).unbind()
    chunks = chunk_table([(cache_table([keys], [values]), 1, n_new)])
    native.attend(x, table_of(kept), None, None, chunks, layer=0)
    expected = x[:, : N_KV_HEADS * DIM].view(n_new, N_KV_HEADS, DIM).transpose(0, 1).to(kept)
    if kept is torch.float16:
        assert int(expected.isinf().sum()) == 5
        expected[expected.isinf()] = torch.nan
    for held in (keys, values):
        torch.testing.assert_close(held[:, 1:-1], expected, rtol=0, atol=0, equal_nan=True)
        assert (held[:, [0, -1]] == 5.0).all()


@needs_compiler
def test_a_table_of_another_form_than_its_cache_is_not_used() -> None:
    keys, values = torch.zeros((2, 2, 9, DIM), dtype=torch.float16).unbind()
    chunks = chunk_table([(cache_table([keys], [values]), 0, 1)])
    with pytest.raises(AssertionError):
        native.attend(random(1, 96), table_of(torch.bfloat16), None, None, chunks, layer=0)


@pytest.mark.parametrize(("form", "told"), [("fp16", "fp16"), ("bf16", "bf16"), ("fp32", None)])
def test_the_road_says_how_keys_and_values_were_kept(form: Any, told: str | None) -> None:
    loaded = load_checkpoint(BUNDLED, torch.float32, Quantisation(cache=form))
    assert ReferenceEngine(loaded, DroplessParameters(), threads=1).take_road().cache_rounded_to == told


@pytest.mark.parametrize("by_kernels", [True, False])
def test_a_key_that_no_half_holds_ends_the_request(by_kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded to infinity it could score minus infinity, which stands for what is not seen: it would be left out."""
    if not by_kernels:
        for module in ("native", "tables"):
            monkeypatch.setattr(f"engines.kernels.{module}.library", lambda: None)
    loaded = load_checkpoint(BUNDLED, torch.float32, Quantisation(cache="fp16"))
    first = loaded.weights.layers[0].attention
    assert isinstance(first, AttentionWeights)
    assert isinstance(first.v_MH, Tensor)
    large = replace(loaded.weights.layers[0], attention=replace(first, v_MH=1e7 * first.v_MH))
    weights = replace(loaded.weights, layers=(large, *loaded.weights.layers[1:]))
    engine = ReferenceEngine(replace(loaded, weights=weights), DroplessParameters(), threads=1)
    with pytest.raises(EngineError, match="keep the cache in bf16 or fp32, for fp16 ends at 65504"):
        engine.run(LOGLIKELIHOOD, unheard)


def logits_of(quantise: Quantisation) -> tuple[Tensor, Tensor]:
    """Of a prompt, and of a token behind it; the cache is that of the model."""
    model = Transformer(load_checkpoint(BUNDLED, torch.float32, quantise))
    cache = model.new_cache()
    cache.start(101)
    assert cache.keys[0].dtype is cache.values[0].dtype is quantise.kept
    tokens = torch.randint(1, 2048, (100,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        prompt = model.logits(model.forward(tokens, cache, dropless(), "prefill")[0])
        return prompt, model.logits(model.forward(tokens[:1], cache, dropless(), "decode")[0])


@pytest.mark.parametrize(("form", "least", "most"), [("fp16", 1e-5, 3e-3), ("bf16", 1e-4, 3e-2)])
def test_a_models_answers_with_a_narrow_cache_are_torchs(
    form: Any, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, plain = logits_of(Quantisation(cache=form)), logits_of(Quantisation())
    for module in ("native", "tables"):
        monkeypatch.setattr(f"engines.kernels.{module}.library", lambda: None)
    expected = logits_of(Quantisation(cache=form))
    for own, torchs, exact in zip(found, expected, plain, strict=True):
        cost = float((exact - torchs).norm() / torchs.norm())
        assert least < cost < most
        # A key near a tie goes the other way where sums come in another order.
        assert float((own - torchs).norm() / torchs.norm()) < cost / 2


@pytest.mark.parametrize("family", ["deepseek-v2", "gemma2", "olmoe"])
def test_a_family_that_torch_attends_for_is_refused_a_narrow_cache(family: str, tmp_path: Any) -> None:
    write_family(tmp_path, CASES[family])
    config = inspect_checkpoint(str(tmp_path)).config
    with pytest.raises(EngineError, match=r"quantise.cache: torch computes this model's attention \(.*; remove it"):
        check_quantisation(config, Quantisation(cache="fp16"))


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [technique("tensor-parallel"), technique("expert-parallel")], ids=["tp", "ep"])
def test_ranks_keep_what_one_process_keeps(chosen: Any) -> None:
    """Sums come in another order, which may bring a key near a tie to the other side."""
    asked = [LOGLIKELIHOOD.model_copy(update={"prompt_ids": tuple(range(20 + 7 * i, 60 + 9 * i))}) for i in range(6)]
    quantise = Quantisation(cache="bf16")
    one, exact = (
        ReferenceEngine(load_checkpoint(BUNDLED, torch.float32, own), DroplessParameters(), CHUNK, threads=1)
        for own in (quantise, Quantisation())
    )
    several = ParallelEngine(
        RanksAsked(inspect_checkpoint(BUNDLED), chosen, 2, quantise=quantise, prefill_chunk=CHUNK, threads=1)
    )
    try:
        found_N, one_N, exact_N = (
            torch.tensor([engine.run(one_of, unheard).loglikelihood for one_of in asked])
            for engine in (several, one, exact)
        )
    finally:
        several.close()
    moved_N = (found_N - one_N).abs() / (exact_N - one_N).abs()  # 1 where ranks would keep floats
    assert float(moved_N.sort().values[1]) < 0.2
