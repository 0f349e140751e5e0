"""On a GPU: experts that are copied while it computes give what all of them in its memory give; and ranks over nccl.

Skipped where torch sees none. The order of copies and waits is tested without one (`tests/test_stream_copies.py`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engines.base import unheard
from engines.expert_memory import ExpertMemory
from engines.model.checkpoints import inspect_checkpoint, load_checkpoint
from engines.model.copier import Part
from engines.model.stream_copier import StreamCopier
from engines.parallel.engine import ParallelEngine
from engines.parallel.running import RanksAsked
from engines.profile_files import profile_folder, read_profile
from engines.reference import ReferenceEngine
from engines.techniques.presets import preset_parameters
from tests.fakes.random_models import BUNDLED
from tests.ranks import assert_same_answers, one_process, technique
from tests.test_expert_slots import EXPERT, request

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU here")


def engine(name: str, memory: ExpertMemory | None, **parameters: object) -> ReferenceEngine:
    checkpoint = load_checkpoint(str(BUNDLED), torch.float32, experts_as_filed=memory is not None)
    own = preset_parameters(name).model_validate(parameters)
    made = ReferenceEngine(
        checkpoint, own, 32, torch_device="cuda", compute_dtype=torch.float32, expert_memory=memory or ExpertMemory()
    )
    if made.needs_calibration:
        made.use_profile(read_profile(profile_folder("bundled:tiny-qwen3-moe")))
    return made


@needs_gpu
@pytest.mark.parametrize(
    ("name", "n_slots", "parameters"),
    [
        *((name, n, {}) for name in ("on-demand", "prefetch-hint", "router-pf", "est-pf") for n in (4, 6, 32)),
        ("lru", None, {"slots": 3}),
        ("moe-ondemand", None, {"slots": 3}),
    ],
)
def test_a_gpu_answers_as_with_all_experts_in_its_memory(
    name: str, n_slots: int | None, parameters: dict[str, Any]
) -> None:
    memory = ExpertMemory(None if n_slots is None else n_slots * EXPERT * 4)
    made = engine(name, memory, **parameters)
    plain = engine(name if name in ("router-pf", "est-pf") else "dropless", None)
    for asked in (request(40, 20), request(9, 20)) * 3:
        assert made.run(asked, unheard).token_ids == plain.run(asked, unheard).token_ids
    counters = made.take_counters()
    assert (counters.bytes_copied or 0) > 0
    assert (counters.copying_s or 0) > 0
    for step in made.take_decode_steps():
        assert step.duration_s > 0
        assert all(copy.end_s >= copy.begin_s for copy in step.copies)


@needs_gpu
def test_the_host_does_not_wait_for_a_copy() -> None:
    """1 GB takes 15 ms or more over any link; giving it to the queue takes a fraction of that."""
    import time

    from engines.model.cuda_streams import CudaStreams

    streams = CudaStreams(torch.device("cuda"))
    source, into = streams.pinned(1 << 30), torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    source.fill_(3)
    copier = StreamCopier(streams, torch.uint8)
    begin_s = time.perf_counter()
    job = copier.start([Part(into, source)], after=copier.mark())
    given_s = time.perf_counter() - begin_s
    job.wait()
    total = into[:: 1 << 20].sum()  # what computes waits by itself
    assert int(total) == 3 * (1 << 10)
    job.join()
    assert given_s < (job.end_s - job.begin_s) / 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees no two CUDA GPUs here")
@pytest.mark.parametrize("name", ["tensor-parallel", "expert-parallel"])
def test_two_ranks_over_nccl_give_what_one_process_gives(name: str) -> None:
    asked = RanksAsked(inspect_checkpoint(str(BUNDLED)), technique(name), 2, prefill_chunk=32, backend="nccl")
    several = ParallelEngine(asked)
    try:
        assert_same_answers(one_process(), several)
        assert several.take_counters().bytes_exchanged
    finally:
        several.close()
