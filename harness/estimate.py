"""How long a run may take, before it runs. An estimate: speeds are guessed from a probe.

Prefill tokens are exact (with `reuse_prefix`, and where prompts hold answers: the most that may be computed); decode
tokens are the most that may be generated, as a stop may come sooner. `max_batch` is taken for no gain.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

from engines.model.model_config import ModelConfig
from engines.model.wanted_tensors import tensor_shapes
from harness.external.openai import OpenAISpec
from harness.matrix import CellPlan
from harness.model_specs import PlayedModelSpec
from harness.plan import Plan
from harness.run_parts import RunParts
from harness.runner import rule_of
from harness.schema import EnduranceSpec, EngineSpec
from harness.tuning.tuned_plans import is_phone
from results.records import Request
from workloads.fitting import most_prompt_tokens

PROBE_SIZE = 1024
EFFICIENCY = 0.3
"""Share of the probe's matrix rate that small expert calls reach. Assumed."""
LAYER_CALL_S = 1.0e-3
"""Cost of one layer call beside its arithmetic, in a decode step or a prefill chunk. Assumed."""
OTHERS_CHUNK = 512
"""Prompt tokens that an engine which is not ours takes through the layers at once. Assumed."""
PRICED_LAYER_S = 1.0e-4
"""The same where no model runs, and the layer's plan is only made and priced. Assumed."""


class CellEstimate(NamedTuple):
    cell_plan: CellPlan
    n_trials: int
    n_requests: int
    prefill_tokens: int
    decode_tokens: int
    seconds: float


def estimate(plan: Plan, run_parts: RunParts) -> list[CellEstimate]:
    """For each cell: counts of tokens, and seconds from a matrix-product probe of this machine."""
    flop_per_s = _probe_flop_per_s()
    return [_estimate_cell(plan, c, run_parts, flop_per_s) for c in plan.cells]


def guessed_words(found: Sequence[CellEstimate]) -> str:
    """How the speeds were had, and of what they say nothing."""
    others = dict.fromkeys(other for e in found if (other := _not_probed(e.cell_plan)))
    words = "speeds are guessed from a probe of this machine's CPU"
    return f"{words}, which says nothing of {', '.join(others)}" if others else words


def _not_probed(cell_plan: CellPlan) -> str | None:
    """What computes a cell, where it is not this machine's CPU."""
    if is_phone(cell_plan.cell.device):
        return cell_plan.cell.device
    if isinstance(cell_plan.engine, OpenAISpec):
        return f"the server of {cell_plan.cell.engine}"
    return None if cell_plan.device.computes == "cpu" else f"the GPU of {cell_plan.cell.device}"


def _estimate_cell(plan: Plan, cell_plan: CellPlan, run_parts: RunParts, flop_per_s: float) -> CellEstimate:
    requests = run_parts.requests(cell_plan)
    pushed = prefill_tokens(requests)
    prefill = sum(pushed)
    decode = sum(max(0, r.max_new_tokens - 1) for r in requests)
    chunk = cell_plan.engine.prefill_chunk if isinstance(cell_plan.engine, EngineSpec) else OTHERS_CHUNK
    chunks = sum(-(-n // chunk) for n in pushed)
    if isinstance(cell_plan.model, PlayedModelSpec):
        arithmetic_s, calls_s = 0.0, PRICED_LAYER_S * run_parts.played(cell_plan.model).shape.n_layers
    else:
        config = run_parts.facts(cell_plan.model.source).config
        arithmetic_s = 2.0 * active_parameters(config) * (prefill + decode) / (EFFICIENCY * flop_per_s)
        calls_s = LAYER_CALL_S * config.n_layers
    calls_s *= chunks + decode
    n_trials = rule_of(plan, cell_plan).max_repeats
    protocol = plan.protocol
    warmup_share = min(protocol.warmup, len(requests)) / max(1, len(requests))
    waiting_s = 0.0 if cell_plan.is_modelled else 2 * protocol.idle_s + protocol.cooldown_s
    working_s = arithmetic_s + calls_s
    # A window is as long as its work, or as its arrivals take; a modelled machine waits for them in no time.
    arriving_s = 0.0 if cell_plan.is_modelled else max((r.arrival_s or 0.0 for r in requests), default=0.0)
    seconds = n_trials * (waiting_s + max(working_s, arriving_s) + working_s * warmup_share)
    if isinstance(protocol.stop, EnduranceSpec) and not cell_plan.is_modelled:
        seconds = 60 * protocol.stop.minutes
        n_trials = max(1, round(seconds / max(working_s, arriving_s, 1e-3)))
    return CellEstimate(cell_plan, n_trials, len(requests), prefill, decode, seconds)


def prefill_tokens(requests: Sequence[Request]) -> list[int]:
    """Of each request, at most. A log-likelihood's last token is predicted and never pushed."""
    most = most_prompt_tokens(requests)
    return [n + max(0, len(r.continuation_ids) - 1) for r, n in zip(requests, most, strict=True)]


def active_parameters(config: ModelConfig) -> float:
    """Weights that one token meets: all but the embedding and the experts that it does not choose."""
    chosen = config.moe.top_k / config.moe.n_experts if config.moe else 0.0
    total = 0.0
    for name, shape in tensor_shapes(config).items():
        if "embed_tokens" in name and not config.tie_embeddings:
            continue
        total += math.prod(shape) * (chosen if ".experts." in name else 1.0)
    return total


def _probe_flop_per_s() -> float:
    import torch

    a = torch.ones(PROBE_SIZE, PROBE_SIZE)
    a @ a
    started_s = time.perf_counter()
    a @ a
    return 2.0 * PROBE_SIZE**3 / (time.perf_counter() - started_s)
