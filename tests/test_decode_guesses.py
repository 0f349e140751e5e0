"""Guesses at the next layer's experts that are made inside of a decode step, against those that Python makes of the
state of each layer: the same states, experts, weights, plans and figures."""

from __future__ import annotations

import ctypes
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engines.base import unheard
from engines.dispatch import DispatchPlan, Routing
from engines.expert_memory import ExpertMemory
from engines.likeness import MOST_BYTES, PIECE_FLOATS, Likeness
from engines.model.checkpoints import load_checkpoint
from engines.model.experts import GatedWeights
from engines.model.transformer import Transformer
from engines.model.weights import SparseWeights
from engines.prediction import EstimatorPredictor, HybridPredictor, RouterPredictor
from engines.profile_files import profile_folder, read_profile
from engines.profiling import profile_of
from engines.reference import ReferenceEngine
from engines.shown import Shown
from engines.sizes import own_sizes
from engines.techniques.base import Technique
from engines.techniques.context import BuildContext, ModelSizes
from engines.techniques.parameters import CustomParameters
from engines.techniques.presets import preset_parameters
from results.counters import EngineCounters
from results.records import Request
from tests.fakes.families import CASES, write_family
from tests.fakes.random_models import write_random_model
from tests.speculating import BUNDLED, built, loaded, with_estimator

pytestmark = [
    pytest.mark.numbers,
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler: torch computes everything"),
]

N_PROMPT, N_DECODED = 11, 30
ROUTERS = [("router-pf", {}), ("router-pf", {"source": "s"}), ("prefetch-hint", {}), ("prefetch-hint", {"source": "s"})]
ESTIMATORS = [("est-pf", {}), ("hybrid-pf", {}), ("prefetch-hint", {"predictor": "estimator"})]


class Decoded:
    """Hidden states, plans, and what was held of states, of tokens one at a time behind a prompt."""

    def __init__(self, model: Transformer, technique: Technique, plans_first: bool = False) -> None:
        """plans_first: Python guesses between router and experts."""
        shown = Shown(technique.asks, own_sizes(model.config), plans_first)
        tokens = torch.randint(1, 2000, (N_PROMPT + N_DECODED,), generator=torch.Generator().manual_seed(3))
        cache = model.new_cache()
        cache.start(len(tokens))
        hidden, self.plans, self.are_fused = [], list[DispatchPlan](), set[bool]()
        with torch.inference_mode():
            shown.start_step(0)
            model.forward(tokens[:N_PROMPT], cache, technique, "prefill", shown=shown)
            shown.likeness.take()
            for token in tokens[N_PROMPT:]:
                shown.start_step(0)
                one, plans = model.forward(token[None], cache, technique, "decode", shown=shown)
                hidden.append(one)
                self.plans += [plan for plan in plans if plan is not None]
                self.are_fused.add(plans.is_fused)
        self.hidden_TH = torch.cat(hidden)
        self.likeness = shown.likeness.take()

    def decisions(self) -> list[object]:
        """Of every plan: what is called, what travels, and what was guessed and recalled."""
        return [
            (
                *(plan.calls, plan.hits, plan.misses, plan.unused, plan.prefetched, plan.recalled, plan.foretold),
                list(plan.transfers),
                plan.executed and plan.executed.expert_ids_TK.tolist(),
                plan.prediction and (plan.prediction.layer, plan.prediction.routing.expert_ids_TK.tolist()),
            )
            for plan in self.plans
        ]

    def weights(self) -> list[torch.Tensor]:
        told: list[Routing | None] = [plan.executed for plan in self.plans]
        told += [None if plan.prediction is None else plan.prediction.routing for plan in self.plans]
        return [routing.weights_TK for routing in told if routing is not None] + [p.weight_R for p in self.plans]


def made(kind: str, folder: Path, dtype: torch.dtype) -> tuple[Transformer, ModelSizes]:
    if kind in CASES:
        write_family(folder, CASES[kind])
    elif kind != "bundled":
        write_random_model(folder, kind)
    model = Transformer(load_checkpoint(BUNDLED if kind == "bundled" else str(folder), dtype))
    sizes = own_sizes(model.config)
    assert sizes is not None
    return model, sizes


def technique_of(
    name: str, changes: dict[str, str], model: Transformer, sizes: ModelSizes, width: int = 8, largest: float = 0.0
) -> Technique:
    """Adds up in the order of the model's own steps. width, largest: of an estimator."""
    profile = profile_of(model, model.new_cache(), [list(range(10, 58))], 24, True)
    profile = with_estimator(profile, sizes, model, width, largest)
    context = BuildContext(16, sizes, profile, None, model, routers_order=True)
    return preset_parameters(name).model_validate(changes).build(context)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["bundled", "qwen3-moe", "qwen3-moe-some-dense", "mixtral"])
@pytest.mark.parametrize(("name", "changes"), ROUTERS)
def test_a_router_guesses_in_the_step_what_it_guesses_in_python_bit_for_bit(
    name: str, changes: dict[str, str], kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model, sizes = made(kind, tmp_path, dtype)
    technique = technique_of(name, changes, model, sizes)
    found, expected = Decoded(model, technique), Decoded(model, technique, plans_first=True)
    assert (found.are_fused, expected.are_fused) == ({True}, {False})
    assert torch.equal(found.hidden_TH, expected.hidden_TH)
    assert found.decisions() == expected.decisions()
    assert all(torch.equal(*pair) for pair in zip(found.weights(), expected.weights(), strict=True))
    assert found.likeness == expected.likeness
    n_guesses = N_DECODED * (sizes.n_sparse_layers - 1)
    assert sum(plan.prediction is not None for plan in found.plans) == n_guesses
    assert sum(cosines.tokens for cosines in found.likeness.values()) == n_guesses


def alike_but_for_order(model: Transformer, technique: Technique) -> tuple[Decoded, Decoded]:
    """In one call of the kernels, and planned first by torch, whose sums are in another order."""
    found, expected = Decoded(model, technique), Decoded(model, technique, plans_first=True)
    assert (found.are_fused, expected.are_fused) == ({True}, {False})
    torch.testing.assert_close(found.hidden_TH, expected.hidden_TH, atol=2e-5, rtol=2e-5)
    assert found.decisions() == expected.decisions()
    for mine, theirs in zip(found.weights(), expected.weights(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    return found, expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["bundled", "qwen3-moe-some-dense"])
@pytest.mark.parametrize(("name", "changes"), ESTIMATORS)
def test_an_estimator_guesses_in_the_step_what_torch_computes(
    name: str, changes: dict[str, str], kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model, sizes = made(kind, tmp_path, dtype)
    technique = technique_of(name, changes, model, sizes)
    found, expected = alike_but_for_order(model, technique)
    assert found.likeness.keys() == expected.likeness.keys()
    for layer, cosines in found.likeness.items():
        assert cosines.tokens == expected.likeness[layer].tokens
        assert cosines.total == pytest.approx(expected.likeness[layer].total, rel=1e-6)


@pytest.mark.parametrize("width", [32, 41, 200])
@pytest.mark.parametrize(("largest", "is_rounded"), [(60000.0, True), (70000.0, False)])
def test_an_estimator_of_any_width_is_computed_at_16_bits_where_these_hold_it(
    width: int, largest: float, is_rounded: bool
) -> None:
    """Rows that fill panels and such that do not; the largest number of fp16 is 65504."""
    model, sizes = made("bundled", Path(), torch.float32)
    technique = technique_of("est-pf", {}, model, sizes, width, largest)
    rules = technique.guesses
    assert rules is not None
    (estimator,) = {rule.estimator for rule in rules.of_layer.values()}
    assert estimator is not None
    assert all(torch.equal(matrix.half().float(), matrix) for matrix in estimator.matrices) == is_rounded
    alike_but_for_order(model, technique)


@pytest.mark.parametrize("name", ["router-pf", "prefetch-hint", "est-pf"])
def test_a_shared_expert_is_part_of_the_guess(name: str) -> None:
    """The bundled model with one, whose output is large: a guess without it would be another."""
    checkpoint = load_checkpoint(BUNDLED, torch.float32)
    generator = torch.Generator().manual_seed(9)
    layers = []
    for layer in checkpoint.weights.layers:
        assert isinstance(layer.mlp, SparseWeights)
        shapes = [matrix.shape for matrix in vars(layer.mlp.experts.experts[0]).values() if matrix is not None]
        shared = GatedWeights(*(torch.randn(*shape, generator=generator) / shape[1] ** 0.5 for shape in shapes))
        layers.append(replace(layer, mlp=replace(layer.mlp, shared=shared)))
    with_shared = replace(checkpoint, weights=replace(checkpoint.weights, layers=tuple(layers)))
    model, sizes = Transformer(with_shared), own_sizes(checkpoint.config)
    assert sizes is not None
    technique = technique_of(name, {}, model, sizes)
    found, expected = Decoded(model, technique), Decoded(model, technique, plans_first=True)
    assert (found.are_fused, expected.are_fused) == ({True}, {False})
    torch.testing.assert_close(found.hidden_TH, expected.hidden_TH, atol=5e-5, rtol=5e-5)
    assert found.decisions() == expected.decisions()
    for mine, theirs in zip(found.weights(), expected.weights(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"place": {"kind": "shards", "shard": "intermediate", "cores": 2}},
        {"layout": {"kind": "blocks", "block_size": 1, "block_count": "sufficient", "skip_padding_blocks": False}},
    ],
)
def test_what_was_guessed_is_laid_out_as_a_choice_is(changes: dict[str, object]) -> None:
    model, sizes = made("bundled", Path(), torch.float32)
    route = {"kind": "predicted", "source": "s", "executes": "prediction"}
    parameters = CustomParameters.model_validate({"route": route} | changes)
    technique = parameters.build(BuildContext(16, sizes, model=model, routers_order=True))
    found, expected = Decoded(model, technique), Decoded(model, technique, plans_first=True)
    assert (found.are_fused, expected.are_fused) == ({True}, {False})
    torch.testing.assert_close(found.hidden_TH, expected.hidden_TH, atol=2e-5, rtol=2e-5)
    assert found.decisions() == expected.decisions()


class Answered:
    """By an engine with the profile that is installed; its estimator was trained."""

    def __init__(self, name: str, plans_first: bool, dtype: torch.dtype = torch.float32, n_bytes: int | None = None):
        """n_bytes: what experts are copied into; None: all lie in memory."""
        checkpoint = load_checkpoint(BUNDLED, dtype, experts_as_filed=n_bytes is not None)
        technique, memory = preset_parameters(name)(), ExpertMemory(n_bytes)
        engine = ReferenceEngine(checkpoint, technique, 16, plans_first=plans_first, expert_memory=memory)
        engine.use_profile(read_profile(profile_folder(BUNDLED)))
        prompt = tuple(range(20, 50))
        asked = Request(request_id="a", sample_id="a", kind="generate", prompt_ids=prompt, max_new_tokens=24)
        self.token_ids = engine.run(asked, unheard).token_ids
        self.counters, self.road = engine.take_counters(), engine.take_road().decoding
        heat = engine.take_heat()
        assert heat is not None
        assert heat.foretold is not None
        recalls = [one and (one.tokens, one.recalled, one.aligned, one.cosine_tokens) for one in heat.foretold]
        self.counts = recalls, heat.chosen, heat.decoded
        self.cosines = [one.cosine_sum for one in heat.foretold if one is not None]

    def check(self, other: Answered) -> None:
        assert (self.token_ids, self.counts) == (other.token_ids, other.counts)
        assert self.counters.predicted
        assert self.cosines == pytest.approx(other.cosines, rel=1e-6)


@pytest.mark.parametrize("name", ["prefetch-hint", "router-pf", "est-pf", "hybrid-pf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engine_counts_and_answers_the_same_on_both_roads(name: str, dtype: torch.dtype) -> None:
    found, expected = (Answered(name, plans_first, dtype) for plans_first in (False, True))
    assert (found.road, expected.road) == ("fused", "plan by plan")
    found.check(expected)
    assert found.counters == expected.counters


@pytest.mark.parametrize("name", ["prefetch-hint", "router-pf", "est-pf", "hybrid-pf"])
def test_a_step_that_stops_for_copies_takes_the_guesses_of_the_kernels(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def counted(counters: EngineCounters) -> dict[str, object]:
        return {name: value for name, value in counters if not name.endswith("_s")}

    expected = Answered(name, True, n_bytes=6_000_000)
    for predictor in (RouterPredictor, EstimatorPredictor, HybridPredictor):
        monkeypatch.setattr(predictor, "predict", None)
    found = Answered(name, False, n_bytes=6_000_000)
    assert (found.road, expected.road) == ("plan by plan", "plan by plan")
    found.check(expected)
    assert counted(found.counters) == counted(expected.counters)
    assert found.counters.bytes_copied


def test_what_no_kernel_can_guess_waits_for_its_plan() -> None:
    """Vectors in another dtype than the kernels read."""
    model, sizes, profile = loaded(BUNDLED)
    assert profile.default_vectors_EH is not None
    odd = {layer: vectors.double() for layer, vectors in profile.default_vectors_EH.items()}
    technique = built("router-pf", model, sizes, replace(profile, default_vectors_EH=odd))
    assert Decoded(model, technique).are_fused == {False}


# --- how like states are, held by step -------------------------------------------------------------------------------


def write(into: Likeness, layers: tuple[int, ...], states_2PH: torch.Tensor) -> None:
    """As a step does."""
    hidden = states_2PH.shape[-1]
    ctypes.memmove(into.rows(layers, hidden), states_2PH.data_ptr(), states_2PH.nbytes)


def test_rows_of_a_step_are_held_as_tokens_one_by_one_are() -> None:
    states = torch.randn(5, 2, 3, 7, generator=torch.Generator().manual_seed(1))
    by_rows, one_by_one = Likeness(), Likeness()
    for states_2PH in states:
        by_rows.rows((1, 2, 5), 7)
        by_rows.drop_rows()  # broken off
        write(by_rows, (1, 2, 5), states_2PH)
        for row, layer in enumerate((1, 2, 5)):
            one_by_one.hold(layer, states_2PH[0, row : row + 1], states_2PH[1, row : row + 1])
    found = by_rows.take()
    assert found == one_by_one.take()
    assert {layer: cosines.tokens for layer, cosines in found.items()} == {1: 5, 2: 5, 5: 5}
    assert not by_rows.take()


def test_no_more_rows_are_held_than_little_memory_takes() -> None:
    hidden = MOST_BYTES // (2 * 4 * 5)  # five rows of two states
    by_rows = Likeness()
    for _ in range(3):
        write(by_rows, (1, 2), torch.ones(2, 2, hidden))
    assert {layer: cosines.tokens for layer, cosines in by_rows.take().items()} == {1: 3, 2: 2}


@pytest.mark.parametrize("hidden", [7, PIECE_FLOATS // 16 - 1, PIECE_FLOATS])
def test_rows_lie_apart_in_the_pieces_of_memory_and_of_the_next_request(hidden: int) -> None:
    """Pieces that steps do not fill evenly, and steps larger than a piece. Each token is as like as its number says."""
    by_rows = Likeness()
    angles = torch.arange(1, 8) / 10
    for _ in range(2):
        for angle in angles:
            states_2PH = torch.zeros(2, 3, hidden)
            states_2PH[0, :, 0] = 1
            states_2PH[1, :, 0], states_2PH[1, :, 1] = angle.cos(), angle.sin()
            write(by_rows, (1, 2, 5), states_2PH)
        n_held = min(len(angles) * 3, MOST_BYTES // (8 * hidden))
        found = by_rows.take()
        assert sum(own.tokens for own in found.values()) == n_held
        for own in found.values():
            assert own.total == pytest.approx(float(angles[: own.tokens].cos().sum()), rel=1e-6)
