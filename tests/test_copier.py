"""The thread that copies: what arrives, how fast, what it tells of a failure, and when it ends."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from itertools import pairwise

import pytest
import torch

from engines.errors import EngineError
from engines.model.copier import Copier, Part


def test_a_rate_holds_from_one_copy_to_the_next() -> None:
    """3 copies of 2 MB at 40 MB/s take 0.15 s, each of them 0.05."""
    copier = Copier(40e6)
    sources = [torch.randint(0, 255, (2_000_000,), dtype=torch.uint8) for _ in range(3)]
    targets = [torch.empty_like(source) for source in sources]
    jobs = [copier.start([Part(into, source)]) for into, source in zip(targets, sources, strict=True)]
    for job in jobs:
        job.wait()
    assert all(torch.equal(into, source) for into, source in zip(targets, sources, strict=True))
    assert jobs[-1].end_s - jobs[0].begin_s >= 0.149
    assert all(one.end_s <= following.begin_s for one, following in pairwise(jobs))


@pytest.mark.numbers
@pytest.mark.parametrize(
    ("source", "into"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float16, torch.float32)],
)
def test_values_arrive_as_torch_converts_them(source: torch.dtype, into: torch.dtype) -> None:
    values = torch.randn(300, 257, generator=torch.Generator().manual_seed(3)).to(source)
    target = torch.zeros(300, 257, dtype=into)
    for given in (values, values.t().contiguous().t()):
        target.zero_()
        copier = Copier()
        copier.start([Part(target, given)]).wait()
        assert torch.equal(target, values.to(into))


def test_a_copy_that_fails_is_told_to_whoever_waits() -> None:
    job = Copier().start([Part(torch.zeros(3, 4), torch.zeros(4, 3))])
    with pytest.raises(EngineError, match=r"could not be copied \(\(4, 3\) into \(3, 4\)\)"):
        job.wait()


def test_the_thread_ends_with_its_copier() -> None:
    def copiers() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "copier"}

    gc.collect()
    before = copiers()
    copier = Copier()
    (own,) = copiers() - before
    copier.finish()
    del copier
    gc.collect()
    own.join(60)
    assert not own.is_alive()


def test_a_process_ends_as_it_should_while_copiers_are_at_work() -> None:
    """A thread that Python stops inside of torch takes the process along: these convert when the process ends."""
    script = (
        "import torch; from engines.model.copier import Copier, Part\n"
        "copiers = [Copier() for _ in range(4)]\n"
        "source = torch.zeros(1 << 23, dtype=torch.bfloat16)\n"
        "for copier in copiers:\n"
        "    copier.start([Part(torch.empty(source.shape), source)])\n"
    )
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")


def test_copies_go_on_while_another_thread_computes() -> None:
    """A paced copy of 0.2 s ends while this thread sits in one long product after another, outside of Python."""
    copier, a = Copier(50e6), torch.randn(700, 700)
    job = copier.start([Part(torch.empty(10_000_000, dtype=torch.uint8), torch.zeros(10_000_000, dtype=torch.uint8))])
    begin_s = time.perf_counter()
    while not job.is_done and time.perf_counter() - begin_s < 60:
        a @ a
    assert job.is_done
    assert job.end_s - job.begin_s < 2
