"""Plans shared by tokens whose calls miss alike, against a plan for every token and layer: the same hits, the same
bytes, and the same experts in the same slots afterwards.

One dense layer and three with 12 experts, of which a token calls four.
"""

from __future__ import annotations

import numpy as np
import pytest

from engines.calls import Integers
from engines.dispatch import DispatchPlan
from engines.pricing.alike import shared_plans
from engines.pricing.cached import CachedPlans
from engines.pricing.played import played_steps, profile_of_source, routing_of
from engines.pricing.routing_sources import Purpose
from engines.shown import Shown
from engines.techniques.composed import ComposedTechnique
from engines.techniques.context import BuildContext, ModelSizes
from engines.techniques.presets import preset_parameters

L, E, K, N_PROMPT, N_DECODED = 3, 12, 4, 5, 60
SIZES = ModelSizes(E, K, 8, 12, 100, L + 1, L)


class Skewed:
    """Each expert is half as likely again as the next: some are nearly always called, some hardly ever."""

    name = "skewed"

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def ids_LTK(self, sizes: ModelSizes, n_tokens: int, purpose: Purpose = "run", sequence: int = 0) -> Integers:
        random = np.random.default_rng((self._seed, sequence))
        keys_LTE = random.exponential(1.5 ** np.arange(E), (L, n_tokens, E))
        found_LTK: Integers = np.argsort(keys_LTE, axis=-1)[..., :K]
        return found_LTK


def built(policy: str, n_slots: int, source: Skewed) -> ComposedTechnique:
    profile = profile_of_source(source, SIZES, 64, 1)
    technique = preset_parameters(policy).model_validate({"slots": n_slots, "unit": "gpu"})
    made = technique.build(BuildContext(chunk=N_PROMPT, sizes=SIZES, profile=profile))
    assert isinstance(made, ComposedTechnique)
    return made


def told(plan: DispatchPlan) -> tuple[int | None, int | None, list[int], int, list[int]]:
    """What it costs and counts: which of its calls wait for a transfer, and of which layer."""
    arrives = set(plan.transfers.expert_M.tolist())
    waits = [i for i, expert in enumerate(plan.calls.expert_S.tolist()) if expert in arrives]
    return plan.hits, plan.misses, waits, plan.transfers.n_bytes, plan.transfers.layer_M.tolist()


def both_ways(policy: str, n_slots: int, seed: int) -> list[list[DispatchPlan]]:
    """Plans one by one, and shared ones: they hit, cost and leave the same."""
    source = Skewed(seed)
    ids_LTK = source.ids_LTK(SIZES, N_PROMPT + N_DECODED)
    technique = built(policy, n_slots, source)
    slow, fast = Shown(technique.asks, SIZES), Shown(technique.asks, SIZES)
    plans: list[list[DispatchPlan]] = []
    for shown, all_arrived in ((slow, None), (fast, lambda: True)):
        steps = played_steps(
            technique, shown, [ids_LTK], SIZES, N_PROMPT, N_PROMPT, all_arrived=all_arrived, any_order=True
        )
        plans.append([plan for step in steps for plan in step.plans if plan is not None])
    assert [told(plan) for plan in plans[1]] == [told(plan) for plan in plans[0]]
    assert slow.residency is not None
    assert fast.residency is not None
    assert fast.residency.is_as(slow.residency)
    for layer in range(1, L + 1):
        assert fast.residency.n_free("gpu", layer) == slow.residency.n_free("gpu", layer)
    return plans


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("policy", "n_slots"), [("lru", 4), ("lru", 7), ("lfu", 5), ("lfu", 9), ("static", 1)])
def test_shared_plans_hit_and_leave_what_plans_one_by_one_do(policy: str, n_slots: int, seed: int) -> None:
    """`static` with one slot of its own in each layer: the four that all share are what most experts pass through."""
    plans = both_ways(policy, n_slots, seed)
    assert len({id(plan) for plan in plans[1]}) < len({id(plan) for plan in plans[0]})


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("policy", "n_slots"), [("lru", 1), ("lru", 3), ("lfu", 2)])
def test_fewer_slots_than_a_token_has_experts_are_gone_through_as_in_plans_one_by_one(
    policy: str, n_slots: int, seed: int
) -> None:
    both_ways(policy, n_slots, seed)


def test_shared_slots_are_hit_where_few_experts_pass_through_them() -> None:
    """Three of each token's experts stay, and the fourth changes every third token: two in a row find it in one of the
    four slots that all layers share."""
    source = Skewed(0)
    technique = built("static", 5, source)
    slow, fast = Shown(technique.asks, SIZES), Shown(technique.asks, SIZES)
    ids_LTK = np.tile([0, 1, 2, 9], (L, N_PROMPT + N_DECODED, 1))
    ids_LTK[..., 3] += np.arange(N_PROMPT + N_DECODED) // 3 % 3
    found = [
        [told(plan) for step in steps for plan in step.plans if plan is not None]
        for steps in (
            played_steps(technique, slow, [ids_LTK], SIZES, N_PROMPT, N_PROMPT),
            played_steps(technique, fast, [ids_LTK], SIZES, N_PROMPT, N_PROMPT, all_arrived=lambda: True),
        )
    ]
    assert found[1] == found[0]
    decoded = found[1][2 * L :]  # what the prompt left is gone
    assert {hits for hits, *_ in decoded} == {K - 1, K}
    assert sum(hits == K - 1 for hits, *_ in decoded) == L * (N_DECODED // 3)
    assert fast.residency is not None
    assert slow.residency is not None
    assert fast.residency.is_as(slow.residency)


def test_a_cache_too_small_for_a_token_is_asked_one_by_one() -> None:
    """Three slots and four experts: one that a call needed goes for another of the same token."""
    technique = built("lru", 3, Skewed(0))
    shown = Shown(technique.asks, SIZES)
    ids_LTK = Skewed(0).ids_LTK(SIZES, 2)
    for layer, ids_TK in enumerate(ids_LTK[:, :1], 1):
        seen = shown.layer(layer, "decode", routing_of(np.ascontiguousarray(ids_TK), E), None, None)
        shown.ran(seen, technique.plan(seen))
    shared = shared_plans(
        technique, shown.residency, ids_LTK[:, 1:], 1, any_order=True, interchange=lambda units: False
    )
    assert isinstance(shared, CachedPlans)
    shared.start_token(0)
    assert shared.known(1) is None
