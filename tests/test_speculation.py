"""Experts that are fetched a layer ahead, and executed as predicted: against the oracle, and a model written apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engines.base import unheard
from engines.calls import Calls, ExpertCall
from engines.dispatch import FILE, DispatchPlan, Link, Prediction, Routing
from engines.errors import EngineError
from engines.estimator import Estimator, EstimatorRecipe, estimator_shapes
from engines.model.checkpoints import BUNDLED_FOLDER, load_checkpoint
from engines.model.transformer import Transformer
from engines.observers import SparseLayerStep
from engines.oracle import Oracle
from engines.prediction import KnownState
from engines.profile import EstimatorOrigin, LayerAccuracy, Profile, ProfiledPredictions
from engines.profiling import profile_of
from engines.reference import ReferenceEngine
from engines.shown import Shown
from engines.sizes import own_sizes
from engines.techniques.base import Technique
from engines.techniques.composed import ComposedTechnique
from engines.techniques.context import BuildContext, ChunkPhase, LayerInput, ModelSizes
from engines.techniques.layout.exact import Exact
from engines.techniques.move.two_buffers import TwoBuffers, TwoBuffersParameters
from engines.techniques.place.units import OneUnitParameters
from engines.techniques.presets import preset_parameters
from engines.techniques.route import PredictedRoute
from results.records import Request
from tests.fakes.families import CASES, write_family

BUNDLED = "bundled:tiny-qwen3-moe"
FAMILIES = [
    "mixtral",
    "olmoe",
    "qwen2-moe",
    "phi-moe",
    "deepseek-v2-groups",
    "deepseek-v3",
    "llama4",
    "glm4-moe",
    "gpt-oss",
    "llama4-top2",
]
STEPS: tuple[tuple[int, ChunkPhase], ...] = ((9, "prefill"), (4, "prefill"), *[(1, "decode")] * 6)


def tokens(n: int = 19) -> Tensor:
    return torch.randint(1, 2000, (n,), generator=torch.Generator().manual_seed(5))


class Ran:
    """Logits of every token, and the plan of each layer of each step."""

    def __init__(
        self,
        model: Transformer,
        technique: Technique,
        sizes: ModelSizes | None,
        observer: Any = None,
        told: Callable[[int], object] = lambda step: None,
    ) -> None:
        shown, cache = Shown(technique.asks, sizes), model.new_cache()
        cache.start(sum(n for n, _ in STEPS))
        hidden: list[Tensor] = []
        self.plans: list[tuple[ChunkPhase, list[DispatchPlan]]] = []
        with torch.inference_mode():
            for number, (chunk, (_, phase)) in enumerate(
                zip(tokens().split([n for n, _ in STEPS]), STEPS, strict=True)
            ):
                shown.start_step(0)
                told(number)
                found, plans = model.forward(chunk, cache, technique, phase, observer, shown=shown)
                hidden.append(found)
                self.plans.append((phase, [plan for plan in plans if plan is not None]))
            self.logits = model.logits(torch.cat(hidden))

    def off(self, other: Ran) -> float:
        return float((self.logits - other.logits).norm() / other.logits.norm())

    def of(self, phase: ChunkPhase) -> list[DispatchPlan]:
        return [plan for own, plans in self.plans if own == phase for plan in plans]


def loaded(source: str) -> tuple[Transformer, ModelSizes, Profile]:
    checkpoint = load_checkpoint(source, torch.float32)
    model, sizes = Transformer(checkpoint), own_sizes(checkpoint.config)
    assert sizes is not None
    profile = profile_of(model, model.new_cache(), [list(range(10, 58))], 24, True)
    return model, sizes, with_estimator(profile, sizes, model)


def with_estimator(profile: Profile, sizes: ModelSizes, model: Transformer) -> Profile:
    """A random one: what it guesses must be executed, right or wrong."""
    assert model.config.moe is not None
    layers = sorted(model.config.moe.sparse_layers)
    generator = torch.Generator().manual_seed(4)
    shapes = estimator_shapes(len(layers) - 1, sizes.hidden, sizes.n_experts, 8, 2)
    estimator = Estimator(
        tuple(layers[:-1]), **{name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    )
    row = LayerAccuracy(
        predictor="estimator", data="calibration", layer=layers[1], n_tokens=1, recall=1.0,
        rank_alignment=(1.0,) * sizes.top_k, cosine=None,
    )  # fmt: skip
    origin = EstimatorOrigin(recipe=EstimatorRecipe(), width=8, n_parameters=estimator.n_parameters, n_tokens=1)
    predictions = ProfiledPredictions(
        every=1, held_out=(), held_out_sha256=None, accuracies=(row,), estimator=origin, estimated_layers=(layers[0],)
    )
    return replace(profile, predictions=predictions, estimator=estimator)


def built(name: str, model: Transformer, sizes: ModelSizes, profile: Profile | None, **changes: object) -> Technique:
    return preset_parameters(name).model_validate(changes).build(BuildContext(16, sizes, profile, None, model))


@pytest.fixture(scope="module")
def bundled() -> tuple[Transformer, ModelSizes, Profile]:
    return loaded(BUNDLED)


# --- lossless --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", FAMILIES)
def test_hints_change_no_answer_and_perfect_predictions_none_either(case: str, tmp_path: Path) -> None:
    """Every family: fetching on a hint is the oracle, and so is executing predictions that are the truth."""
    write_family(tmp_path, CASES[case])
    model, sizes, profile = loaded(str(tmp_path))
    truth = Recorded()
    oracle = Ran(model, Oracle(), sizes, truth, truth.step)
    for hints in ("prefetch-hint", "on-demand"):
        assert Ran(model, built(hints, model, sizes, profile), sizes).off(oracle) < 1e-5
    perfect = Ran(model, perfectly(truth, model, sizes), sizes, None, truth.step)
    assert perfect.off(oracle) < 1e-5
    decoded = [plan for plan in perfect.of("decode") if plan.recalled is not None]
    assert decoded
    assert all(plan.recalled == plan.routed_pairs and plan.misses == 0 for plan in decoded)
    # The first sparse layer of a step is its router's, fetched on demand; all later ones lay there.
    sparse = sorted(model.config.moe.sparse_layers) if model.config.moe else []
    assert len(perfect.of("decode")) - len(decoded) == 6 == len(perfect.of("decode")) // len(sparse)


class Recorded:
    """What routers chose, step by step, to be told again a layer ahead."""

    def __init__(self) -> None:
        self.routings: dict[tuple[int, int], Routing] = {}
        self._now = 0

    def step(self, number: int) -> None:
        self._now = number

    def layer(self, seen: SparseLayerStep) -> None:
        self.routings[self._now, seen.layer] = seen.routing

    def predict(self, known: KnownState) -> Prediction | None:
        later = [layer for step, layer in self.routings if step == self._now and layer > known.layer]
        return Prediction(min(later), self.routings[self._now, min(later)]) if later else None


def perfectly(truth: Recorded, model: Transformer, sizes: ModelSizes, prefill: bool = True) -> ComposedTechnique:
    context = BuildContext(16, sizes, None, None, model)
    route = PredictedRoute(truth, executes_prediction=True, speculates_prefill=prefill)
    place = OneUnitParameters(unit="gpu").build(context, Exact())
    move = TwoBuffersParameters().build(context)
    return ComposedTechnique("perfect", route, place, {"prefill": Exact(), "decode": Exact()}, move, context)


# --- lossy, against a model written apart ----------------------------------------------------------------------------


class WrittenApart:
    """transformers' model with its experts in plain loops over the file's tensors, executed as predicted in decoding.

    Keeps what each layer predicts for the next one, and counts how many of the routers' own experts were predicted.
    """

    def __init__(self, profile: Profile, predict: str) -> None:
        from transformers import AutoModelForCausalLM

        folder = BUNDLED_FOLDER / "tiny-qwen3-moe"
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._file = {name: t.float() for name, t in load_file(folder / "model.safetensors").items()}
        self._profile, self._predict = profile, predict
        self._told: dict[int, tuple[list[int], list[float]]] = {}
        self._residual: Tensor = torch.empty(0)
        self._decodes = False
        self.n_predicted = self.n_recalled = 0
        for number, layer in enumerate(self._model.model.layers):
            layer.post_attention_layernorm.register_forward_pre_hook(self._keep_residual)
            layer.mlp.forward = lambda x, number=number: self._experts(number, x)

    def logits(self) -> Tensor:
        found, cache = [], None
        with torch.no_grad():
            for chunk, (_, phase) in zip(tokens().split([n for n, _ in STEPS]), STEPS, strict=True):
                self._decodes = phase == "decode"
                out = self._model(input_ids=chunk[None], past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                found.append(out.logits[0])
        return torch.cat(found)

    def _keep_residual(self, module: object, inputs: tuple[Tensor]) -> None:
        self._residual = inputs[0][0]

    def _experts(self, number: int, x_1TH: Tensor) -> Tensor:
        rows = []
        for x_H, r_H in zip(x_1TH[0], self._residual, strict=True):
            ids, weights = self._choice(number, x_H)
            if self._decodes and number > 0:
                self.n_predicted += len(ids)
                self.n_recalled += len({*ids} & {*self._told[number][0]})
                ids, weights = self._told[number]
            if self._decodes and number < 3:
                self._told[number + 1] = self._prediction(number, x_H, r_H, ids, weights)
            row = torch.zeros_like(x_H)
            for expert, weight in zip(ids, weights, strict=True):
                gate, up, down = (
                    self._file[f"model.layers.{number}.mlp.experts.{expert}.{n}_proj.weight"]
                    for n in ("gate", "up", "down")
                )
                inner = gate @ x_H
                row = row + weight * (down @ (inner / (1 + torch.exp(-inner)) * (up @ x_H)))
            rows.append(row)
        return torch.stack(rows)[None]

    def _choice(self, number: int, x_H: Tensor) -> tuple[list[int], list[float]]:
        return self._best(self._file[f"model.layers.{number}.mlp.gate.weight"] @ x_H)

    def _best(self, logits_E: Tensor) -> tuple[list[int], list[float]]:
        """The two best and their softmax, normalised."""
        score = torch.exp(logits_E - logits_E.max())
        ids = sorted(range(16), key=lambda e: -float(score[e]))[:2]
        total = float(sum(score[e] for e in ids))
        return ids, [float(score[e]) / total for e in ids]

    def _prediction(
        self, number: int, x_H: Tensor, r_H: Tensor, ids: list[int], weights: list[float]
    ) -> tuple[list[int], list[float]]:
        if self._predict == "s":
            return self._choice(number + 1, x_H)
        vectors = self._profile.default_vectors_EH
        assert vectors is not None
        q_H = r_H.clone()
        for expert, weight in zip(ids, weights, strict=True):
            q_H = q_H + weight * vectors[number][expert]
        q_H = q_H / torch.sqrt((q_H**2).mean() + 1e-6)
        q_H = q_H * self._file[f"model.layers.{number + 1}.post_attention_layernorm.weight"]
        if self._predict == "q" or (self._predict == "hybrid" and number != 0):
            return self._choice(number + 1, q_H)
        own = self._profile.estimator
        assert own is not None
        z = own.reduce_WH @ q_H + own.position_PW[number]
        inner = own.widen_VW @ z
        z = z + own.narrow_WV @ (inner / (1 + torch.exp(-inner)))
        z = (z - z.mean()) / torch.sqrt(z.var(unbiased=False) + 1e-5) * own.norm_W + own.norm_bias_W
        return self._best(own.head_EW @ z)


@pytest.mark.parametrize(
    ("predict", "name", "changes"),
    [
        ("q", "router-pf", {}),
        ("s", "router-pf", {"source": "s"}),
        ("estimator", "est-pf", {}),
        ("hybrid", "hybrid-pf", {}),
    ],
)
def test_predictions_are_executed_as_a_model_written_apart_executes_them(
    predict: str, name: str, changes: dict[str, object], bundled: tuple[Transformer, ModelSizes, Profile]
) -> None:
    """Logits, and how many of the routers' experts had been told; and it is not what the routers would have given."""
    model, sizes, profile = bundled
    apart = WrittenApart(profile, predict)
    expected = apart.logits()
    found = Ran(model, built(name, model, sizes, profile, **changes), sizes)
    torch.testing.assert_close(found.logits, expected, atol=2e-3, rtol=1e-3)
    n_predicted = sum(plan.routed_pairs for plan in found.of("decode") if plan.recalled is not None)
    assert (n_predicted, sum(plan.recalled or 0 for plan in found.of("decode"))) == (
        apart.n_predicted,
        apart.n_recalled,
    )
    assert apart.n_recalled < apart.n_predicted
    assert found.off(Ran(model, Oracle(), sizes)) > 1e-3
    assert torch.equal(found.logits[:13].argmax(-1), Ran(model, Oracle(), sizes).logits[:13].argmax(-1))


# --- what a prediction may know --------------------------------------------------------------------------------------


def changed(folder: Path, to: Path, wanted: Callable[[str], bool]) -> str:
    """The bundled model, with other weights under the names that are wanted."""
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    tensors = load_file(to / "model.safetensors")
    names = [name for name in tensors if wanted(name)]
    assert names
    for name in names:
        tensors[name] = torch.flip(tensors[name], (0,)).contiguous()
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return str(to)


@pytest.mark.parametrize("name", ["prefetch-hint", "router-pf", "est-pf", "hybrid-pf"])
def test_a_prefetch_does_not_hang_on_what_comes_later(
    name: str, tmp_path: Path, bundled: tuple[Transformer, ModelSizes, Profile]
) -> None:
    """Layer 1's experts, and layers 2 and 3 but for the norm and the router that a guess asks, give other values: what
    they read and choose is another, and what layers 0 and 1 fetched for layers 1 and 2 is the same."""
    model, sizes, profile = bundled

    def later(tensor: str) -> bool:
        known = tensor.endswith(("layers.2.mlp.gate.weight", "layers.2.post_attention_layernorm.weight"))
        return "layers.1.mlp.experts" in tensor or (
            tensor.startswith(("model.layers.2.", "model.layers.3.")) and not known
        )

    other = Transformer(
        load_checkpoint(changed(BUNDLED_FOLDER / "tiny-qwen3-moe", tmp_path / "m", later), torch.float32)
    )
    one, two = (Recorded() for _ in range(2))
    a = Ran(model, built(name, model, sizes, profile), sizes, one, one.step)
    b = Ran(other, built(name, other, sizes, profile), sizes, two, two.step)
    assert not torch.equal(one.routings[2, 2].weights_TK, two.routings[2, 2].weights_TK)
    for layer in (0, 1):
        for step in range(2, len(STEPS)):
            first, second = (ran.plans[step][1][layer] for ran in (a, b))
            assert first.prediction is not None
            assert second.prediction is not None
            ahead = [[t.expert for t in plan.transfers if t.layer == layer + 1] for plan in (first, second)]
            assert ahead[0] == ahead[1] != []
            assert torch.equal(first.prediction.routing.weights_TK, second.prediction.routing.weights_TK)


# --- what travels ----------------------------------------------------------------------------------------------------


def called(*experts: int, unit: str = "gpu") -> Calls:
    return Calls.of(
        ExpertCall((e,), (1,), (1,), row, kind=replace(ExpertCall((0,), (1,), (1,), 0).kind, unit=unit))
        for row, e in enumerate(experts)
    )


def told(*experts: int) -> Routing:
    return Routing(torch.tensor([experts]), torch.full((1, len(experts)), 1 / len(experts)), 6)


def seen(layer: int, phase: ChunkPhase, chosen: Sequence[int], predicted: Routing | None = None) -> LayerInput:
    return LayerInput(layer, phase, told(*chosen), predicted=predicted)


def test_a_toy_step_fetches_what_is_missing_and_then_what_was_predicted() -> None:
    """Layers 2, 3 and 5 have experts. By hand: on demand, then 4 and 1 ahead; then 1 is a hit and 0 a miss."""
    move = TwoBuffers({2: 3, 3: 5}, 6, 100, prefetch=True)
    first = move.moved(seen(2, "decode", (0, 5)), called(0, 5), Prediction(3, told(4, 1)))
    assert [(t.expert, t.layer) for t in first.transfers] == [(0, 2), (5, 2), (1, 3), (4, 3)]
    assert (first.hits, first.misses, first.transfers.n_bytes) == (0, 2, 400)
    assert first.unused == 0
    assert first.transfers.links == (Link("cpu", "gpu"),)
    second = move.moved(seen(3, "decode", (0, 1), told(4, 1)), called(0, 1), Prediction(5, told(0, 1)))
    assert [(t.expert, t.layer) for t in second.transfers] == [(0, 3), (0, 5), (1, 5)]
    assert (second.hits, second.misses, second.unused) == (1, 1, 1)
    last = move.moved(seen(5, "decode", (0, 1), told(0, 1)), called(0, 1), None)
    assert (len(last.transfers), last.hits, last.misses, last.unused) == (0, 2, 0, 0)


def test_a_prefill_without_predictions_loads_all_experts() -> None:
    move = TwoBuffers({2: 3, 3: 5}, 6, 100, prefetch=True)
    first = move.moved(seen(2, "prefill", (0, 5)), called(0, 5), None)
    assert [(t.expert, t.layer) for t in first.transfers] == [(0, 2), (5, 2), *((e, 3) for e in range(6))]
    following = move.moved(seen(5, "prefill", (0, 1)), called(0, 1), None)
    assert (len(following.transfers), following.hits, following.misses, following.unused) == (0, 2, 0, 4)


def test_on_demand_every_expert_is_missing_until_its_layer_asks() -> None:
    move = TwoBuffers({2: 3, 3: 5}, 6, 100, prefetch=False)
    for phase in ("prefill", "decode"):
        found = move.moved(seen(3, phase, (0, 1)), called(1, 0, unit="cpu"), None)
        assert [(t.expert, t.layer) for t in found.transfers] == [(0, 3), (1, 3)]
        assert (found.hits, found.misses, found.transfers.links) == (0, 2, (Link(FILE, "cpu"),))
        assert found.unused is None


def test_hits_of_hints_are_their_recall(bundled: tuple[Transformer, ModelSizes, Profile]) -> None:
    """One token: the experts called are those that its router chose, so that hits are those which were told; and what
    is executed as predicted misses nothing."""
    model, sizes, profile = bundled
    hints = Ran(model, built("prefetch-hint", model, sizes, profile), sizes).of("decode")
    assert [plan.hits for plan in hints] == [plan.recalled or 0 for plan in hints]
    assert [plan.misses for plan in hints] == [2 - (plan.recalled or 0) for plan in hints]
    executed = Ran(model, built("router-pf", model, sizes, profile), sizes).of("decode")
    assert [(plan.hits, plan.misses) for plan in executed] == [(0, 2), (2, 0), (2, 0), (2, 0)] * 6
    assert [plan.prefetched for plan in executed] == [2, 2, 2, 0] * 6


def test_prefill_speculates_when_it_is_told_to(bundled: tuple[Transformer, ModelSizes, Profile]) -> None:
    model, sizes, profile = bundled
    plain = Ran(model, built("router-pf", model, sizes, profile), sizes)
    assert all(plan.recalled is None and plan.executed is None for plan in plain.of("prefill"))
    assert [plan.prefetched for plan in plain.of("prefill")] == [16, 16, 16, 0] * 2
    bold = Ran(model, built("router-pf", model, sizes, profile, speculate_prefill=True), sizes)
    assert [plan.recalled is not None for plan in bold.of("prefill")] == [False, True, True, True] * 2
    assert bold.off(plain) > 1e-3


# --- in an engine ----------------------------------------------------------------------------------------------------


def ask(ids: Sequence[int], n: int = 5) -> Request:
    return Request(request_id="a", sample_id="a", kind="generate", prompt_ids=tuple(ids), max_new_tokens=n)


@pytest.mark.parametrize("name", ["router-pf", "prefetch-hint"])
def test_an_engine_counts_recall_and_learns_default_vectors_on_the_fly(name: str) -> None:
    checkpoint = load_checkpoint(BUNDLED, torch.float32)
    engine = ReferenceEngine(checkpoint, preset_parameters(name)(), 16)
    engine.calibrate([list(range(10, 58))])
    engine.run(ask(range(20, 50)), unheard)
    counters = engine.take_counters()
    # The first of five tokens comes from the prefill, so that four are decoded: three layers, two experts each.
    assert counters.predicted == 4 * 3 * 2
    assert counters.recalled is not None
    assert 0 < counters.recalled < counters.predicted
    assert counters.hits is not None
    assert counters.bytes_moved > 0


def test_decoded_tokens_are_read_again_where_decoding_took_other_experts() -> None:
    """Their keys are of what was predicted: with a shared prefix or without, the next request has the same answer."""
    checkpoint = load_checkpoint(BUNDLED, torch.float32)
    answers = []
    for reuse in (True, False):
        engine = ReferenceEngine(checkpoint, preset_parameters("router-pf")(source="s"), 8, reuse_prefix=reuse)
        first = engine.run(ask(range(20, 50), 12), unheard)
        again = engine.run(ask([*range(20, 50), *first.token_ids, 7, 8], 6), unheard)
        answers.append((first.token_ids, again.token_ids))
        assert again.n_cached_tokens == (24 if reuse else 0)
    assert answers[0] == answers[1]


def test_what_cannot_be_predicted_with_says_what_to_do(bundled: tuple[Transformer, ModelSizes, Profile]) -> None:
    model, sizes, profile = bundled
    for name in ("est-pf", "hybrid-pf"):
        with pytest.raises(EngineError, match=r"needs an estimator; `joulebench calibrate --estimator`"):
            built(name, model, sizes, replace(profile, estimator=None))
    with pytest.raises(EngineError, match="need default vectors"):
        built("router-pf", model, sizes, replace(profile, default_vectors_EH=None))
    assert profile.lacks(frozenset({"counts", "default vectors", "estimator"})) is None
    assert "no estimator" in str(replace(profile, estimator=None).lacks(frozenset({"estimator"})))
    assert "no default vectors" in str(replace(profile, default_vectors_EH=None).lacks(frozenset({"default vectors"})))
