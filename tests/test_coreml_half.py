"""The bundled model's fp16 packages, run by the interpreter, against two readers in torch.

Against torch that rounds to fp16 in the same places: the same tokens, drops and pads, whatever the prompt. Against
torch in fp32: the same tokens, but for one of which fp32 itself is not sure within fp16's error.

What fp16's error is, is measured on the request's prompt, in which both readers read the same tokens under the same
plans: the largest difference of a logit, of a router's logit, of a saliency (relatively). Two numbers may each be off
by that, so that what decides between them may turn where fp32's two lie nearer than twice it. The steps of the answer,
which are judged, take no part in the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
import torch
from torch import Tensor

from engines.coreml.transformer import CoremlTransformer, Variant
from engines.model.router import router_logits
from engines.model.weights import SparseWeights
from engines.techniques.parameters import Composed
from engines.techniques.presets import preset_parameters
from results.counters import EngineCounters
from tests.cases import marked
from tests.coreml import Converted, Recorded, converted, engine_of, generation, model_of, prompt, recorded
from tests.half_reader import HalfReader, PlannedReader
from tests.test_presets import pairs_of

pytest.importorskip("coremltools", reason="reads and writes packages (pip install joulebench[coreml])")
pytestmark = pytest.mark.numbers

PROMPTS = (80, 88, 96, 100, 104, 110, 124, 130, "drawn 1", "drawn 2", "drawn 3", "drawn 4")
"""So many tokens of a text; or 100 tokens drawn evenly, by their seed, of which the model is less sure."""
USUAL = (80, "drawn 1")
"""One of a text and one drawn; the others, which take as long each, are slow."""
N_DRAWN, N_NEW = 100, 64


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    return converted("npumoe", tmp_path_factory.mktemp("npumoe") / "packages", attention="stateless")


@pytest.mark.parametrize("asked", marked(PROMPTS, pytest.mark.slow, but=USUAL))
def test_64_tokens_and_all_counts_are_those_of_torch_in_fp16(packages: Converted, asked: int | str) -> None:
    same_as_torch_in_fp16(packages, packages, "npumoe", asked)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["npumoe-tg", "coreml-naive", "anemll"])
def test_other_placements_too(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    """All experts as graphs, attention on the CPU, all experts on the CPU."""
    found = converted(name, tmp_path_factory.mktemp(name) / "packages", attention="stateless")
    for asked in (100, 110, "drawn 1"):
        counted, model = same_as_torch_in_fp16(found, found, name, asked)
        if name == "anemll":
            assert {path.partition("/")[2] for path, _ in model.ran.used} == {"attention.mlpackage"}
        if name == "coreml-naive":
            assert model.ran.predictions == counted.expert_calls
    same_as_torch_in_fp32_or_undecided(found, found, name, 100)


@pytest.mark.parametrize("asked", marked(PROMPTS, pytest.mark.slow, but=USUAL))
def test_64_tokens_are_torchs_in_fp32_or_that_is_undecided(packages: Converted, asked: int | str) -> None:
    same_as_torch_in_fp32_or_undecided(packages, packages, "npumoe", asked)


def tokens_of(found: Converted, asked: int | str) -> tuple[int, ...]:
    if isinstance(asked, int):
        return prompt(found.checkpoint, asked)
    random = torch.Generator().manual_seed(int(asked.removeprefix("drawn ")))
    return tuple(torch.randint(found.checkpoint.config.vocabulary_size, (N_DRAWN,), generator=random).tolist())


def same_as_torch_in_fp16(
    found: Converted, in_torch: Converted, name: str, asked: int | str, variant: Variant = "stateless"
) -> tuple[EngineCounters, CoremlTransformer]:
    """What both counted, drops and pads among it, and the model that predicted. in_torch: with the weights that the
    packages hold."""
    technique, request = preset_parameters(name)(), generation(tokens_of(found, asked), N_NEW)
    assert isinstance(technique, Composed)
    half = HalfReader(in_torch.checkpoint, technique.choices.backbone == "npu")
    model = model_of(found, "float16", variant)
    engines = engine_of(in_torch, technique, half), engine_of(found, technique, model)
    wanted, answered = (engine.run(request, lambda *_: None).token_ids for engine in engines)
    assert len(wanted) == N_NEW
    assert answered == wanted
    counted, of_graphs = (engine.take_counters() for engine in engines)
    assert of_graphs == counted
    assert isinstance(counted, EngineCounters)
    assert counted.expert_calls > 0
    return counted, model


def same_as_torch_in_fp32_or_undecided(
    found: Converted, in_torch: Converted, name: str, asked: int | str, variant: Variant = "stateless"
) -> None:
    """First the tokens, under torch's plans. Then, where each reader makes its own, the first plan that keeps other
    pairs: what follows it is another computation."""
    technique, read = preset_parameters(name)(), tokens_of(found, asked)
    tokens = engine_of(in_torch, technique).run(generation(read, N_NEW), lambda *_: None).token_ids
    planned = engine_of(in_torch, technique, PlannedReader(in_torch.checkpoint))
    graphs = engine_of(found, technique, model_of(found, "float16", variant))
    ours = recorded(planned, read, decoded=tokens[:-1])
    same_plans = recorded(graphs, read, ours.plans, decoded=tokens[:-1])
    first = len(read) - 1
    own_NL, theirs_NL = (one.logits_TL[first:] for one in (ours, same_plans))
    assert own_NL.argmax(dim=1).tolist() == list(tokens)
    error = 2 * largest(zip(ours.logits_TL[:first], same_plans.logits_TL[:first], strict=True))
    for own_L, theirs_L in zip(own_NL, theirs_NL, strict=True):
        assert float(own_L.max() - own_L[theirs_L.argmax()]) < error
    own_pairs = [pairs_of(plan, 1) for plan in ours.plans]
    free = recorded(graphs, read, decoded=tokens[:-1], ends=lambda place, plan: pairs_of(plan, 1) != own_pairs[place])
    place = len(free.plans) - 1
    if pairs_of(free.plans[place], 1) != own_pairs[place]:
        assert_undecided(place, ours, same_plans, free, in_torch)
    else:
        assert len(free.plans) == len(own_pairs)


def assert_undecided(place: int, ours: Recorded, same_plans: Recorded, free: Recorded, in_torch: Converted) -> None:
    """Of the plan there: other experts were nearly as good for a token; or, where all tokens have the same experts, the
    tokens that one reader dropped and the other kept stand out nearly alike."""
    prompt_places = range(sum(seen.phase == "prefill" for seen in ours.seen))

    own_TE, own_ids_TK, other_ids_TK = (
        logits_of_router(ours, place, in_torch),
        ours.seen[place].routing.expert_ids_TK,
        free.seen[place].routing.expert_ids_TK,
    )
    leads = [
        float(own_TE[token, sorted(set(own) - set(other))].max() - own_TE[token, sorted(set(other) - set(own))].min())
        for token, (own, other) in enumerate(zip(own_ids_TK.tolist(), other_ids_TK.tolist(), strict=True))
        if set(own) != set(other)
    ]
    if leads:
        both = ours, same_plans
        assert max(leads) < 2 * largest([logits_of_router(one, p, in_torch) for one in both] for p in prompt_places)
        return
    log_saliencies = [[torch.log(saliency(one, p)) for p in prompt_places] for one in (ours, same_plans)]
    own_pairs, other_pairs = (set(pairs_of(one.plans[place], 1)) for one in (ours, free))
    in_doubt = torch.log(saliency(ours, place))[sorted({token for token, *_ in own_pairs ^ other_pairs})]
    assert float(in_doubt.max() - in_doubt.min()) < 2 * largest(zip(*log_saliencies, strict=True))


def logits_of_router(recorded: Recorded, place: int, found: Converted) -> Tensor:
    """Of the plan there, by torch's own product."""
    seen = recorded.seen[place]
    assert seen.hidden_state is not None
    mlp = found.checkpoint.weights.layers[seen.layer].mlp
    assert isinstance(mlp, SparseWeights)
    return router_logits(seen.hidden_state.router_input_TH, mlp.router)


def saliency(recorded: Recorded, place: int) -> Tensor:
    found = recorded.seen[place].saliency_T
    assert found is not None  # npumoe drops by it
    return found


def largest(pairs: Iterable[Sequence[Tensor]]) -> float:
    """Difference of any two numbers of a pair."""
    return max(float((a - b).abs().max()) for a, b in pairs)
