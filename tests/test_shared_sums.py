"""Sums of several processes in shared memory: bit for bit in the order of ranks, and who is gone is told."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from engines.kernels.exchange import RankLostError, SharedSums, file_bytes
from engines.kernels.library import library

pytestmark = pytest.mark.numbers


def joined(folder: Path, n_ranks: int, limit_s: float = 20.0) -> list[SharedSums]:
    if library() is None:
        pytest.skip("no kernels here")
    path = folder / "sums"
    path.write_bytes(bytes(file_bytes(n_ranks, 1000)))
    return [SharedSums(path, rank, n_ranks, 1000, limit_s) for rank in range(n_ranks)]


@pytest.mark.parametrize("n_ranks", [2, 3, 4])
def test_sums_in_shared_memory_are_those_of_the_ranks_in_their_order_bit_for_bit(n_ranks: int, tmp_path: Path) -> None:
    """Many turns of unlike sizes, by threads that come early and late: no box is written before all have read it."""
    sums = joined(tmp_path, n_ranks)
    sizes = [1000, 1, 17, 999] * 50
    parts = [[torch.randn(n) for n in sizes] for _ in range(n_ranks)]
    found: list[list[torch.Tensor]] = [[] for _ in range(n_ranks)]

    def add(rank: int) -> None:
        for turn, part in enumerate(parts[rank]):
            if (turn + rank) % 37 == 0:
                time.sleep(0.002)
            total = part.clone()
            sums[rank].add_up(total)
            found[rank].append(total)

    threads = [threading.Thread(target=add, args=(rank,), daemon=True) for rank in range(n_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for turn in range(len(sizes)):
        expected = parts[0][turn].clone()
        for rank in range(1, n_ranks):
            expected += parts[rank][turn]
        assert all(torch.equal(found[rank][turn], expected) for rank in range(n_ranks))


def test_who_waits_for_a_rank_that_is_gone_is_told(tmp_path: Path) -> None:
    first, second = joined(tmp_path, 2)
    threading.Timer(0.1, second.leave).start()
    with pytest.raises(RankLostError, match="a rank of a sum is gone"):
        first.add_up(torch.ones(4))
    late, _ = joined(tmp_path, 2, limit_s=0.1)
    with pytest.raises(RankLostError):
        late.add_up(torch.ones(4))
