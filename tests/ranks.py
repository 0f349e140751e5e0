"""Several processes as tests start them, ask them, and see them gone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engines.base import unheard
from engines.kernels.library import library
from engines.model.checkpoints import load_checkpoint
from engines.model.step_plans import Computed
from engines.model.transformer import RoutingListener, Transformer
from engines.parallel.engine import ParallelEngine
from engines.reference import ReferenceEngine
from engines.techniques.context import ChunkPhase
from engines.techniques.parameters import CustomParameters
from engines.techniques.presets import DroplessParameters, preset_parameters
from results.records import Request

BUNDLED = "bundled:tiny-qwen3-moe"
CHUNKS = [37, 2, 50] + [1] * 11
"""Prefill in steps of which one has fewer tokens than some ranks, then decoding."""
TOLERANCE = 1e-5
LINKS = "gloo and shared memory" if library() is not None else "gloo"


def technique(name: str, **parameters: object) -> Any:
    kind = CustomParameters if name == "custom" else preset_parameters(name)
    return kind.model_validate(parameters)


def logits(model: Transformer, technique: Any, on_routing: RoutingListener | None = None) -> torch.Tensor:
    tokens = torch.randint(0, 2048, (sum(CHUNKS),), generator=torch.Generator().manual_seed(3))
    cache, hidden = model.new_cache(), list[torch.Tensor]()
    with torch.inference_mode():
        cache.start(len(tokens))
        for chunk in tokens.split(CHUNKS):
            phase: ChunkPhase = "decode" if len(chunk) == 1 else "prefill"
            found, plans = model.forward(chunk, cache, technique, phase, None, on_routing)
            hidden.append(found)
            if plans.is_fused and on_routing is not None:
                for layer, computed in enumerate(plans.computed):
                    if isinstance(computed, Computed):
                        on_routing(layer, computed.routing, phase)
        return model.logits(torch.cat(hidden))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def asked(kind: str, n_prompt: int, seed: int, **more: Any) -> Request:
    prompt = torch.randint(10, 2000, (n_prompt,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Request(request_id=f"{kind} {seed}", sample_id=str(seed), kind=kind, prompt_ids=prompt, **more)  # type: ignore[arg-type]


GENERATE = [asked("generate", n, n, max_new_tokens=8, ignore_end_tokens=True) for n in (70, 33, 3)]
LOGLIKELIHOOD = asked("loglikelihood", 45, 1, continuation_ids=(5, 6, 7))
CHUNK = 32
N_LAYERS, N_EXPERTS, TOP_K, HIDDEN = 4, 16, 2, 192


def one_process() -> ReferenceEngine:
    """What several are held to."""
    return ReferenceEngine(load_checkpoint(BUNDLED, torch.float32), DroplessParameters(), CHUNK, threads=1)


def assert_same_answers(one: ReferenceEngine, several: ParallelEngine) -> None:
    for request in GENERATE:
        assert several.run(request, unheard).token_ids == one.run(request, unheard).token_ids
    found, expected = several.run(LOGLIKELIHOOD, unheard), one.run(LOGLIKELIHOOD, unheard)
    assert found.loglikelihood == pytest.approx(expected.loglikelihood, rel=TOLERANCE)
    together = zip(several.run_batch(GENERATE, unheard), one.run_batch(GENERATE, unheard), strict=True)
    assert all(a.token_ids == b.token_ids for a, b in together)
