"""The threads that carry the ranks' messages take no core from the threads that compute."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from engines.cores import TASKS, thread_ids
from engines.parallel.links import Links

N_RANKS = 2


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="the policy is of Linux")
def test_gloo_threads_wait_for_a_core_and_no_other_thread_does(tmp_path: Path) -> None:
    before = thread_ids()
    ended = threading.Barrier(N_RANKS + 1)
    came: dict[int, list[float]] = {}
    policies: dict[int, int] = {}

    def send(rank: int) -> None:
        links = Links(str(tmp_path / "store"), rank, N_RANKS)
        values = [torch.full((3,), 10.0 * rank + to) for to in range(N_RANKS)]
        came[rank] = links.exchanged(values, [3] * N_RANKS, "experts")[1 - rank].tolist()
        policies[rank] = os.sched_getscheduler(0)
        ended.wait(60)
        ended.wait(60)

    ranks = [threading.Thread(target=send, args=(rank,), daemon=True) for rank in range(N_RANKS)]
    for rank in ranks:
        rank.start()
    ended.wait(60)
    began = thread_ids() - before
    of_gloo = {one for one in began if "gloo" in (TASKS / str(one) / "comm").read_text()}
    found = {os.sched_getscheduler(one) for one in of_gloo}
    ended.wait(60)
    for rank in ranks:
        rank.join(60)
    assert came == {0: [10.0] * 3, 1: [1.0] * 3}
    assert of_gloo
    assert found == {os.SCHED_BATCH}
    assert set(policies.values()) == {os.SCHED_OTHER}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
