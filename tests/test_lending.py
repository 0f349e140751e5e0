"""A rank that waits lends its core: the other's helper computes there, then and at no other time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from engines.kernels import native
from engines.kernels.exchange import SharedSums, file_bytes
from engines.kernels.library import library

TASKS = Path("/proc/self/task")
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []

pytestmark = pytest.mark.skipif(len(CORES) < 2 or not TASKS.exists(), reason="needs two cores of Linux")


def thread_ids() -> set[int]:
    return {int(name) for name in os.listdir(TASKS)}


def cpu_ns(thread_id: int) -> int:
    return int((TASKS / str(thread_id) / "schedstat").read_text().split()[0])


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[tuple[list[SharedSums], list[int]]]:
    """Two ranks of one process, and the helper of each."""
    if library() is None:
        pytest.skip("no kernels here")
    path = tmp_path / "sums"
    path.write_bytes(bytes(file_bytes(2, 1000)))
    sums, helpers = [], []
    for rank in range(2):
        before = thread_ids()
        sums.append(SharedSums(path, rank, 2, 1000, 20.0))
        helpers += sorted(thread_ids() - before)
    yield sums, helpers
    for one in sums:
        one.leave()
    assert not thread_ids() & set(helpers), "helpers end with their rank"


@contextmanager
def lending(sums: SharedSums, core: int) -> Iterator[None]:
    """Another thread waits on that core, as a rank's would."""
    has_lent, ends = threading.Event(), threading.Event()

    def wait() -> None:
        os.sched_setaffinity(0, {core})
        with sums.lent():
            has_lent.set()
            ends.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    assert has_lent.wait(60)
    try:
        yield
    finally:
        ends.set()
        thread.join()


@pytest.fixture
def bound() -> Iterator[None]:
    home = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {CORES[0]})
    yield
    os.sched_setaffinity(0, home)


@pytest.fixture
def one_thread() -> Iterator[None]:
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


@pytest.mark.usefixtures("one_thread")
def test_helper_computes_on_the_core_that_is_lent_and_only_while_it_is(
    ranks: tuple[list[SharedSums], list[int]], bound: None
) -> None:
    sums, helpers = ranks
    x_TH, weight = torch.randn(64, 512), torch.randn(2048, 512)
    alone = native.linear(x_TH, weight)

    def spent_ns(seconds: float) -> int:
        """CPU time of the first rank's helper, while products are computed for so long or until it has had some."""
        before, until_s = cpu_ns(helpers[0]), time.monotonic() + seconds
        while time.monotonic() < until_s and cpu_ns(helpers[0]) - before < 50_000_000:
            assert torch.equal(native.linear(x_TH, weight), alone), "the same bits, whoever computes"
        return cpu_ns(helpers[0]) - before

    assert spent_ns(0.2) == 0, "nobody lends"
    with lending(sums[1], CORES[1]):
        assert spent_ns(60.0) >= 50_000_000
        assert os.sched_getaffinity(helpers[0]) == {CORES[1]}
    native.linear(x_TH, weight)  # wakes it once more if it waits for a job
    deadline_s = time.monotonic() + 60
    while spent_ns(0.2) and time.monotonic() < deadline_s:
        pass  # the system books the time of a running thread late
    assert spent_ns(0.2) == 0, "the core is taken back"


@pytest.mark.usefixtures("one_thread")
def test_helper_goes_to_no_core_that_this_process_may_not_use(bound: None, tmp_path: Path) -> None:
    """Who was bound to a core stays there, whatever another rank lends."""
    if library() is None:
        pytest.skip("no kernels here")
    path = tmp_path / "sums"
    path.write_bytes(bytes(file_bytes(2, 1000)))
    before = thread_ids()
    first = SharedSums(path, 0, 2, 1000, 20.0)
    (helper,) = thread_ids() - before
    os.sched_setaffinity(0, set(CORES))
    second = SharedSums(path, 1, 2, 1000, 20.0)
    x_TH, weight = torch.randn(64, 512), torch.randn(2048, 512)
    with lending(second, CORES[1]):
        for _ in range(50):
            native.linear(x_TH, weight)
        assert os.sched_getaffinity(helper) == {CORES[0]}
    first.leave()
    second.leave()
