"""Experts that several ranks have: who computes them in one call of the kernels, against the plans."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from engines.dispatch import Routing
from engines.kernels.exchange import SharedSums, file_bytes
from engines.kernels.library import library
from engines.model.checkpoints import Checkpoint, load_checkpoint
from engines.model.transformer import Transformer
from engines.model.weights import SparseWeights
from engines.observers import SparseLayerStep
from engines.oracle import mix_experts
from engines.profiling import profile_of
from engines.sizes import own_sizes
from engines.techniques.context import BuildContext, LayerInput
from engines.techniques.over_ranks import OverRanks, own_segments
from engines.techniques.presets import preset_parameters
from tests.ranks import BUNDLED, technique

pytestmark = [
    pytest.mark.numbers,
    pytest.mark.skipif(library() is None, reason="no C++ compiler: no call of the kernels"),
]
N_TOKENS = 40


def one_layer() -> Checkpoint:
    """The first of the bundled model, four experts a token in place of two."""
    checkpoint = load_checkpoint(BUNDLED, torch.float32)
    config, moe = checkpoint.config, checkpoint.config.moe
    assert moe is not None
    moe = replace(moe, sparse_layers=(0,), router=replace(moe.router, top_k=4))
    attention = replace(
        config.attention, spans=config.attention.spans[:1], rope_layers=config.attention.rope_layers[:1]
    )
    weights = replace(checkpoint.weights, layers=checkpoint.weights.layers[:1])
    return replace(checkpoint, config=replace(config, n_layers=1, moe=moe, attention=attention), weights=weights)


def without_experts(checkpoint: Checkpoint) -> Checkpoint:
    """They give nothing."""
    (layer,) = checkpoint.weights.layers
    assert isinstance(layer.mlp, SparseWeights)
    own = layer.mlp.experts
    none = [replace(one, down_HI=torch.zeros(one.down_HI.shape)) for one in own.experts]
    mlp = replace(layer.mlp, experts=replace(own, experts=none))
    return replace(checkpoint, weights=replace(checkpoint.weights, layers=(replace(layer, mlp=mlp),)))


def over_ranks(model: Transformer, n_ranks: int, spare_slots: int) -> OverRanks:
    profile = profile_of(model, model.new_cache(), [list(range(10, 74))], 24, False)
    context = BuildContext(16, own_sizes(model.config), profile, ranks=n_ranks)
    built = technique("eplb", calibration_prompts=1, spare_slots=spare_slots).build(context)
    assert isinstance(built, OverRanks)
    return built


class Seen:
    def layer(self, seen: SparseLayerStep) -> None:
        self.step = seen


def decoded(model: Transformer, tokens: Tensor, observer: Seen | None = None) -> Iterator[Tensor]:
    """Hidden states of tokens, each of them alone."""
    sizes = own_sizes(model.config)
    own = preset_parameters("dropless").model_validate({}).build(BuildContext(16, sizes))
    with torch.inference_mode():
        for token in tokens:
            cache = model.new_cache()
            cache.start(1)
            hidden_1H, plans = model.forward(token[None], cache, own, "decode", observer)
            assert plans.is_fused == (observer is None)
            yield hidden_1H


@pytest.mark.parametrize(("n_ranks", "spare_slots"), [(2, 2), (2, 7), (4, 3)])
def test_experts_of_several_ranks_are_dealt_as_the_plan_says(n_ranks: int, spare_slots: int, tmp_path: Path) -> None:
    """Experts of all ranks but one give nothing: what is left is what that one computed."""
    checkpoint = one_layer()
    whole, nothing = Transformer(checkpoint), without_experts(checkpoint)
    dealt = over_ranks(whole, n_ranks, spare_slots)
    holders_E = dealt.holders_E(0)
    assert holders_E is not None
    assert {len(holders) for holders in holders_E} > {1}
    tokens = torch.randint(1, 2000, (N_TOKENS,), generator=torch.Generator().manual_seed(5))
    mlp = checkpoint.weights.layers[0].mlp
    assert isinstance(mlp, SparseWeights)
    expected, seen = [list[Tensor]() for _ in range(n_ranks)], Seen()
    for _ in decoded(whole, tokens, seen):
        step, routing = seen.step, seen.step.routing
        plan = dealt.plan(LayerInput(0, "decode", routing))
        for rank in range(n_ranks):
            own = plan.calls.expert_S[own_segments(plan, rank)]
            is_own_1K = torch.from_numpy(np.isin(routing.expert_ids_TK.numpy(), own))
            alone = Routing(routing.expert_ids_TK, routing.weights_TK * is_own_1K, routing.n_experts)
            mixed_1H = mix_experts(step.router_input_TH, alone, mlp.experts)
            expected[rank].append(checkpoint.weights.norm(step.residual_TH + mixed_1H))
    for rank in range(n_ranks):
        found = computed_by(rank, n_ranks, checkpoint, nothing, holders_E, tokens, tmp_path / f"sums {rank}")
        torch.testing.assert_close(torch.cat(found), torch.cat(expected[rank]), rtol=1e-5, atol=1e-5)


def computed_by(
    rank: int,
    n_ranks: int,
    checkpoint: Checkpoint,
    nothing: Checkpoint,
    holders_E: list[tuple[int, ...]],
    tokens: Tensor,
    path: Path,
) -> list[Tensor]:
    """All ranks of threads, of which one has experts that give something."""
    path.write_bytes(bytes(file_bytes(n_ranks, 1000)))
    found: list[list[Tensor]] = [[] for _ in range(n_ranks)]

    def run(number: int) -> None:
        model = Transformer(checkpoint if number == rank else nothing)
        sums = SharedSums(path, number, n_ranks, 1000, 20.0)
        local_E = [expert if number in holders else -1 for expert, holders in enumerate(holders_E)]
        model._exchange = sums.of_step([local_E], splits_attention=False, holders_LE=[holders_E])
        found[number] += decoded(model, tokens)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(n_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(torch.equal(torch.cat(one), torch.cat(found[0])) for one in found)
    return found[0]
