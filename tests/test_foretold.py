"""What was predicted beside what routers chose: recall@k and rank alignment of a run, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engines.base import unheard
from engines.dispatch import DispatchPlan, Routing
from engines.foretold import Foretold, foretold
from engines.model.checkpoints import load_checkpoint
from engines.observers import SparseLayerStep
from engines.reference import ReferenceEngine
from engines.techniques.presets import preset_parameters
from results.records import Request

E, K = 6, 3


def drawn(n_tokens: int, width: int, seed: int) -> Routing:
    generator = torch.Generator().manual_seed(seed)
    ids_TK = torch.rand(n_tokens, E, generator=generator).argsort(-1)[:, :width]
    # Few values, so that some weights are equal.
    return Routing(ids_TK, torch.randint(1, 4, (n_tokens, width), generator=generator) / 4, E)


def slow(chosen: Routing, told: Routing) -> Foretold:
    """Token by token, as 003 says it: the share of a token's experts that was told; the expert of each rank."""
    recalled, aligned = 0, [0] * chosen.expert_ids_TK.shape[1]
    tensors = chosen.expert_ids_TK, chosen.weights_TK, told.expert_ids_TK, told.weights_TK
    for own_K, weights_K, told_K, told_weights_K in zip(*(t.tolist() for t in tensors), strict=True):
        recalled += sum(expert in told_K for expert in own_K)
        by_rank = [
            [e for _, e in sorted(zip([-w for w in ws], es, strict=True))]
            for es, ws in ((own_K, weights_K), (told_K, told_weights_K))
        ]
        for rank, (a, b) in enumerate(zip(*by_rank, strict=False)):
            aligned[rank] += a == b
    return Foretold(len(chosen.expert_ids_TK), recalled, tuple(aligned))


@given(st.integers(1, 5), st.integers(1, E), st.integers(0, 2**20))
def test_counts_are_those_of_plain_loops(n_tokens: int, width: int, seed: int) -> None:
    """However many experts are predicted for a token."""
    chosen, told = drawn(n_tokens, K, seed), drawn(n_tokens, width, seed + 1)
    assert foretold(chosen, told) == slow(chosen, told)


def test_by_hand() -> None:
    """2 of 3 told, then 1 of 3. True ranks 1 4 6 and 0 2 3, told ones 1 5 6 and 3 7 5."""
    chosen = Routing(torch.tensor([[4, 1, 6], [0, 2, 3]]), torch.tensor([[0.2, 0.7, 0.1], [0.5, 0.3, 0.2]]), 8)
    told = Routing(torch.tensor([[1, 6, 5], [3, 7, 5]]), torch.tensor([[0.6, 0.1, 0.3], [0.5, 0.3, 0.2]]), 8)
    assert foretold(chosen, told) == (2, 3, (1, 0, 1))
    assert foretold(chosen, told) + foretold(chosen, told) == (4, 6, (2, 0, 2))


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(map(mul, a, b)) / math.sqrt(sum(map(mul, a, a)) * sum(map(mul, b, b)))


class Watched:
    """The routers' choices and the plans of each step, of an engine that answers."""

    def __init__(self) -> None:
        self.chosen: list[dict[int, Routing]] = [{}]
        self.read: list[dict[int, Tensor]] = [{}]
        self.plans: list[Sequence[DispatchPlan | None]] = []

    def layer(self, seen: SparseLayerStep) -> None:
        self.chosen[-1][seen.layer] = seen.routing
        self.read[-1][seen.layer] = seen.router_input_TH

    def step(self, n_tokens: int, kv_length: int, phase: str, plans: Sequence[DispatchPlan | None]) -> None:
        self.plans.append(plans)
        self.chosen.append({})
        self.read.append({})


CASES = [("router-pf", {"source": "s"}), ("router-pf", {"speculate_prefill": True}), ("prefetch-hint", {})]


@pytest.mark.parametrize(("name", "changes"), CASES)
def test_a_window_tells_how_well_each_layer_was_foretold(name: str, changes: dict[str, object]) -> None:
    """Against loops over what the plan of the layer before predicted and what each router then chose."""
    checkpoint = load_checkpoint("bundled:tiny-qwen3-moe", torch.float32)
    engine = ReferenceEngine(checkpoint, preset_parameters(name).model_validate(changes), 16)
    if "source" not in changes:  # which learns nothing
        engine.calibrate([list(range(10, 58))])
    engine.take_heat()
    watched = Watched()
    engine.layer_observer, engine.observer = watched, watched
    ids = tuple(range(20, 50))
    engine.run(Request(request_id="a", sample_id="a", kind="generate", prompt_ids=ids, max_new_tokens=6), unheard)
    expected: dict[int, Foretold] = {}
    cosines: dict[int, list[float]] = {}
    for chosen, read, plans in zip(watched.chosen, watched.read, watched.plans, strict=False):
        for layer in (1, 2, 3):
            before = plans[layer - 1]
            assert before is not None
            if before.prediction is not None:
                assert before.prediction.shown_TH is not None
                both = before.prediction.shown_TH.tolist(), read[layer].tolist()
                cosines.setdefault(layer, []).extend(map(cosine, *both))
                found = slow(chosen[layer], before.prediction.routing)
                expected[layer] = found + expected[layer] if layer in expected else found
    assert sorted(expected) == [1, 2, 3]
    heat = engine.take_heat()
    assert heat is not None
    assert heat.foretold is not None
    assert heat.foretold[0] is None
    for (layer, found), own in zip(sorted(expected.items()), heat.foretold[1:], strict=True):
        assert own is not None
        assert (own.tokens, own.recalled, own.aligned) == (found.tokens, found.recalled, found.aligned_K)
        assert own.cosine_tokens == own.tokens
        assert own.cosine_sum == pytest.approx(sum(cosines[layer]), rel=1e-5)
    counters = engine.take_counters()
    assert counters.recalled == sum(found.recalled for found in expected.values())
    engine.run(Request(request_id="b", sample_id="b", kind="generate", prompt_ids=ids, max_new_tokens=1), unheard)
    again = engine.take_heat()
    assert again is not None
    assert (again.foretold is None) == (not changes.get("speculate_prefill")), "a window tells of itself alone"
