"""One call for the next token of every sequence of a batch: what the layers give one by one, bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from engines.base import unheard
from engines.dispatch import DispatchPlan, Routing
from engines.errors import EngineError
from engines.kernels.tables import why_not_bf16
from engines.model.checkpoints import load_checkpoint
from engines.model.quantised import Arithmetic, CacheForm, Quantisation
from engines.model.transformer import KeyValueCache, Transformer
from engines.reference import ReferenceEngine
from engines.shown import Shown
from engines.techniques.base import Technique, TechniqueParameters
from engines.techniques.context import NOTHING, LayerInput
from engines.techniques.presets import DroplessParameters, dropless
from results.records import Completion, Request
from tests.fakes.random_models import BUNDLED
from tests.techniques import AsDropless, NpumoeT, built, seen, that_plan_alone
from tests.test_decode import FUSED, LAYER_BY_LAYER, Watcher, model_of

pytestmark = [
    pytest.mark.numbers,
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler: torch computes everything"),
]

SIZES = (1, 2, 8, 33)
N_STEPS = 3
NARROW = ("int8", "fp8", "int4-g32", "mxfp4")


def caches_of(model: Transformer, n: int) -> list[KeyValueCache]:
    """Behind prompts of unlike lengths."""
    found = []
    for number in range(n):
        cache = model.new_cache()
        cache.start(70)
        generator = torch.Generator().manual_seed(number)
        model.forward(torch.randint(1, 2048, (3 + number,), generator=generator), cache, dropless(), "prefill")
        found.append(cache)
    return found


def assert_same_plans(found: Sequence[DispatchPlan | None], expected: Sequence[DispatchPlan | None]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert (mine.calls, mine.counters()) == (theirs.calls, theirs.counters())
            assert torch.equal(mine.token_R, theirs.token_R)
            assert torch.equal(mine.weight_R, theirs.weight_R)


@torch.inference_mode()
def assert_one_call_is_its_layers(model: Transformer, n: int) -> None:
    mine, theirs = caches_of(model, n), caches_of(model, n)
    generator = torch.Generator().manual_seed(n)
    for _ in range(N_STEPS):
        token_ids = torch.randint(1, 2048, (n,), generator=generator).tolist()
        found = model.decode_batch(token_ids, mine, dropless(), Shown(NOTHING, None))
        assert found is not None
        logits_TL, plans, largest = found
        assert logits_TL is not None
        assert largest is None
        assert plans.is_fused
        chunks = [torch.tensor([token]) for token in token_ids]
        hidden_TH, expected = model.forward_batch(chunks, theirs, dropless(), "decode", Watcher())
        assert torch.equal(logits_TL, model.logits(hidden_TH))
        assert_same_plans(plans, expected)
    for one, other in zip(mine, theirs, strict=True):
        assert one.length == other.length
        end = one.length
        for held, also in zip([*one.keys, *one.values], [*other.keys, *other.values], strict=True):
            assert torch.equal(held[:, :end], also[:, :end])


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_call_is_its_layers_in_every_family_that_the_kernels_know(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model, _ = model_of(kind, tmp_path, dtype)
    for n in SIZES:
        assert_one_call_is_its_layers(model, n)


@pytest.mark.parametrize("n_threads", [1, 2, 3])
@pytest.mark.parametrize("arithmetic", ["fp32", "int8", "bf16"])
def test_one_call_is_its_layers_in_every_form_of_weights(n_threads: int, arithmetic: Arithmetic) -> None:
    if arithmetic == "bf16" and (reason := why_not_bf16()):
        pytest.skip(reason)
    torch.set_num_threads(n_threads)
    forms = ("bf16",) if arithmetic == "bf16" else NARROW[::2] if arithmetic == "int8" else NARROW
    for form in forms:
        head = form if form in ("bf16", "int8") else "int8"
        quantise = Quantisation(experts=form, dense=form, attention=form, head=head, arithmetic=arithmetic)
        model = Transformer(load_checkpoint(str(BUNDLED), torch.float32, quantise))
        for n in SIZES:
            assert_one_call_is_its_layers(model, n)


@pytest.mark.parametrize("form", ["bf16", "fp16"])
def test_one_call_is_its_layers_with_a_narrow_cache(form: CacheForm) -> None:
    model = Transformer(load_checkpoint(str(BUNDLED), torch.float32, Quantisation(cache=form)))
    for n in SIZES:
        assert_one_call_is_its_layers(model, n)


@pytest.mark.parametrize("kind", LAYER_BY_LAYER)
def test_what_the_kernels_do_not_know_is_left_to_the_layers(kind: str, tmp_path: Path) -> None:
    model, _ = model_of(kind, tmp_path)
    caches = caches_of(model, 2)
    assert model.decode_batch([5, 6], caches, dropless(), Shown(NOTHING, None)) is None
    assert [cache.length for cache in caches] == [3, 4]


def test_sequences_need_caches_of_their_own_with_room() -> None:
    model = Transformer(load_checkpoint(str(BUNDLED), torch.float32))
    one, other = caches_of(model, 2)
    with pytest.raises(EngineError, match="2 sequences in fewer caches"):
        model.decode_batch([5, 6], [one, one], dropless(), Shown(NOTHING, None))
    other.n_positions = other.length
    with pytest.raises(EngineError, match="beyond the cache"):
        model.decode_batch([5, 6], [one, other], dropless(), Shown(NOTHING, None))
    assert [one.length, other.length] == [3, 4]


class Dropping(AsDropless):
    """Says that it batches exactly, and leaves the last token out."""

    batches_exactly = True

    def plan(self, seen: LayerInput) -> DispatchPlan:
        routing = seen.routing
        fewer = Routing(routing.expert_ids_TK[:-1], routing.weights_TK[:-1], routing.n_experts)
        return dropless().plan(LayerInput(seen.layer, seen.phase, fewer))


def test_a_plan_of_a_batch_that_is_not_what_ran_is_refused() -> None:
    model = Transformer(load_checkpoint(str(BUNDLED), torch.float32))
    with torch.inference_mode():
        found = model.decode_batch([5, 6], caches_of(model, 2), Dropping(), Shown(NOTHING, None))
    assert found is not None
    with pytest.raises(EngineError, match=r"as dropless decoded layer 0 with rows \{.*\} by expert and planned \{"):
        list(found[1])


def test_techniques_that_batch_exactly_call_each_expert_by_number_with_its_tokens_in_order() -> None:
    exact = set()
    for name in that_plan_alone():
        technique = built(name, 64) if name == "dropless" else _built(name)
        if technique is None or not technique.batches_exactly:
            continue
        exact.add(name)
        for n_tokens in (2, 9, 40):
            scores_TE = torch.rand(n_tokens, 16, generator=torch.Generator().manual_seed(n_tokens))
            weights_TK, ids_TK = scores_TE.topk(3)
            plan = technique.plan(seen(Routing(ids_TK, weights_TK, 16), "decode"))
            tokens_of = {e: [t for t in range(n_tokens) if e in ids_TK[t].tolist()] for e in range(16)}
            called = [expert for expert in range(16) if tokens_of[expert]]
            assert plan.calls.expert_S.tolist() == called
            assert plan.calls.rows_S.tolist() == [len(tokens_of[expert]) for expert in called]
            assert plan.token_R.tolist() == [token for expert in called for token in tokens_of[expert]]
            weights = [scores_TE[token, expert] for expert in called for token in tokens_of[expert]]
            assert torch.equal(plan.weight_R, torch.stack(weights))
    assert "dropless" in exact


def _built(name: str) -> Technique | None:
    try:
        return built(name, 64)
    except EngineError:
        return None  # it wants a profile, or sizes


def requests() -> list[Request]:
    """Prompts and answers of unlike lengths; one answer is a token."""
    return [
        Request(
            request_id=str(n),
            sample_id=str(n),
            kind="generate",
            prompt_ids=tuple(8 + (37 * i + 11 * n) % 2000 for i in range(4 + 5 * n)),
            max_new_tokens=1 + 3 * n,
        )
        for n in range(5)
    ]


class Answered:
    """What an engine made of the requests together."""

    def __init__(self, parameters: TechniqueParameters, watches: bool = False, plans_first: bool = False) -> None:
        checkpoint = load_checkpoint(str(BUNDLED), torch.float32)
        engine = ReferenceEngine(checkpoint, parameters, plans_first=plans_first)
        if parameters.wanted_prompts:
            engine.calibrate([list(range(8, 200))])
        engine.layer_observer = Watcher() if watches else None
        self.completions: list[Completion] = engine.run_batch(requests(), unheard)
        self.counters, self.heat, self.road = engine.take_counters(), engine.take_heat(), engine.take_road().decoding

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        return [one.token_ids for one in self.completions]


def test_a_batch_whose_sequences_end_one_by_one_is_counted_and_answered_as_layer_by_layer() -> None:
    found = Answered(DroplessParameters())
    assert found.road == "fused"
    for other in (
        Answered(DroplessParameters(), watches=True),
        Answered(DroplessParameters(), plans_first=True),
    ):
        assert other.road == "plan by plan"
        assert found.tokens == other.tokens
        assert [len(tokens) for tokens in found.tokens] == [1, 4, 7, 10, 13]
        assert (found.counters, found.heat) == (other.counters, other.heat)


def test_a_technique_whose_rows_hang_on_the_batch_waits_for_its_plans() -> None:
    assert Answered(NpumoeT(calibration_prompts=1)).road == "both", "its last token alone is one call"
