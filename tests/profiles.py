"""Profiles as tests make them, and plans that name them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engines.model.checkpoints import inspect_checkpoint
from engines.profile import Profile, ProfiledData, ProfileOrigin
from harness.opening import open_run
from harness.plan import Plan, PlanError, draft_plan
from harness.preflight import preflight
from harness.profiles import model_digests
from harness.run_parts import RunParts
from harness.runner import Runner
from results.trials import Trial
from tests.plans import MODEL, raw_plan
from tests.test_runner import Heard


def bench_and_plan(**changes: Any) -> tuple[RunParts, Plan]:
    draft = draft_plan(raw_plan(**changes))
    bench = RunParts(draft.plan.protocol)
    return bench, preflight(draft, bench)


def problems(**changes: Any) -> list[str]:
    with pytest.raises(PlanError) as caught:
        bench_and_plan(**changes)
    return list(caught.value.problems)


def trials(folder: Path, resume: bool = False, **changes: Any) -> tuple[Trial, ...]:
    bench, plan = bench_and_plan(**changes)
    with open_run(plan, folder, resume, bench) as store:
        Runner(plan, store, bench, Heard()).run()
        return store.trials()


def origin_of(source: str) -> ProfileOrigin:
    digests = model_digests(inspect_checkpoint(source), str)
    assert digests.model is not None
    return ProfileOrigin(
        model=source,
        model_sha256=digests.model,
        tokenizer_sha256=digests.tokenizer,
        data_sha256="00" * 32,
        data=(ProfiledData(workload="boolq", source="sample", n_prompts=1),),
        dtype="float32",
    )


def skewed(source: str = MODEL, busiest: int = 0) -> Profile:
    """As if every token had chosen the same two experts in each layer."""
    moe = inspect_checkpoint(source).config.moe
    assert moe is not None
    own = [100 if e in (busiest, busiest + 1) else 0 for e in range(moe.n_experts)]
    return Profile(
        {layer: tuple(own) for layer in moe.sparse_layers},
        moe.top_k,
        1,
        {layer: tuple(map(float, own)) for layer in moe.sparse_layers},
        origin=origin_of(source),
    )
