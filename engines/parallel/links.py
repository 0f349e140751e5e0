"""What ranks send each other, and how many bytes that was.

One exchange serves for everything, all-to-all with parts of unlike sizes: what a rank sends is what it gives, so that
the bytes are known without knowing an algorithm of gloo or nccl. Sums are added in the order of the ranks, by everyone
who needs them: all ranks have the same bits. Small sums on the CPU go through memory that the ranks share, one part to
all others as a message would: a message of 4 kB takes a hundred times as long.

Legend: N ranks, T rows of a step, K experts per token, X values of a row.
"""

from __future__ import annotations

import datetime
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from engines.cores import thread_ids
from engines.errors import EngineError
from engines.kernels.exchange import SharedSums, file_bytes
from engines.kernels.library import library
from engines.techniques.over_ranks import DIRECT_BYTES, VALUE_BYTES, tokens_N

Backend = Literal["gloo", "nccl"]
Purpose = Literal["experts", "backbone"]
"""What a plan's exchanges say; keys and values of dealt tokens, attention of decoded ones, the last hidden states."""
CONNECT_S = 60.0
"""Until all ranks have found each other."""
COLLECTIVE_S = 600.0
"""The slowest rank of a step may need so long; a rank that is stopped costs this time."""
LOOPBACK = "127.0.0.1"
MESSAGE = 0
"""Of one kind: two ranks send each other one message after another, in the same order."""


class Links:
    """Of one rank to the others. Raises `RuntimeError` where one of them is lost."""

    def __init__(self, store_file: str, rank: int, n_ranks: int, backend: Backend = "gloo") -> None:
        """Waits for the others. store_file: the same for all of them, in a folder of this user alone."""
        import torch.distributed as torch_distributed

        dist: Any = torch_distributed
        self.rank, self.n_ranks = rank, n_ranks
        self.sent_bytes: dict[Purpose, int] = {"experts": 0, "backbone": 0}
        self.shared_bytes = 0
        """Of them, what went through memory that the ranks share."""
        self.sums: SharedSums | None = None
        """Where the ranks of a machine share memory, and the kernels are there to use it."""
        # torch's stubs know neither gloo's options nor the collective.
        self._group: Any = None
        self._device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
        if n_ranks == 1:
            return
        store = dist.FileStore(store_file, n_ranks)
        store.set_timeout(datetime.timedelta(seconds=CONNECT_S))
        shared = Path(f"{store_file}.sums")
        if rank == 0 and backend == "gloo" and library() is not None:
            shared.write_bytes(bytes(file_bytes(n_ranks, DIRECT_BYTES // VALUE_BYTES)))
        if backend == "nccl":
            self._group = dist.ProcessGroupNCCL(store, rank, n_ranks)
        else:
            options = dist.ProcessGroupGloo._Options()
            # Not the address that the machine's name stands for: others may reach that one.
            options._timeout = datetime.timedelta(seconds=COLLECTIVE_S)
            with _displacing_nobody():
                options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
                self._group = dist.ProcessGroupGloo(store, rank, n_ranks, options)
        # All are here: the first one has made the file, or never will.
        if shared.exists():
            self.sums = self._joined(shared)
        self._is_gloo = backend == "gloo"
        self._options = dist.AllToAllOptions()

    def _joined(self, shared: Path) -> SharedSums:
        if library() is None:
            raise EngineError(f"rank {self.rank} has no kernels, and rank 0 has; give both the same C++ compiler")
        return SharedSums(shared, self.rank, self.n_ranks, DIRECT_BYTES // VALUE_BYTES, COLLECTIVE_S)

    @property
    def told(self) -> str | None:
        """By what the ranks send; None of one rank."""
        if self.n_ranks == 1:
            return None
        return ("gloo" if self._is_gloo else "nccl") + (" and shared memory" if self.sums is not None else "")

    def leave(self) -> None:
        """No rank waits for a sum from now on."""
        if self.sums is not None:
            self.sums.leave()

    def exchanged(self, to_N: Sequence[Tensor], n_from_N: Sequence[int], purpose: Purpose) -> list[Tensor]:
        """Sends to each rank what is for it, and returns what came from each, flat: so many fp32 values. Of the own
        rank it is neither read nor returned."""
        parts = [part.reshape(-1) for part in to_N]
        others = [rank for rank in range(self.n_ranks) if rank != self.rank]
        self.sent_bytes[purpose] += VALUE_BYTES * sum(len(parts[rank]) for rank in others)
        if self._is_gloo:
            return self._passed(parts, n_from_N, others)
        parts[self.rank] = torch.empty(0, device=self._device)
        n_from = [0 if rank == self.rank else n for rank, n in enumerate(n_from_N)]
        came = torch.empty(sum(n_from), device=self._device)
        self._group.alltoall_base(came, torch.cat(parts), n_from, list(map(len, parts)), self._options).wait()
        return list(torch.split(came, n_from))

    def _passed(self, parts: Sequence[Tensor], n_from_N: Sequence[int], others: Sequence[int]) -> list[Tensor]:
        """By messages between each two ranks, which this thread itself waits for: gloo's collectives hand the work to a
        thread of theirs first, and take up to twice the time. Nothing is sent where there is nothing to send."""
        came = [torch.empty(0 if rank == self.rank else n) for rank, n in enumerate(n_from_N)]
        # What is being sent, and its message, must outlive the sending.
        kept = [parts[rank].contiguous() for rank in others]
        sending = [
            self._group.send([part], rank, MESSAGE) for rank, part in zip(others, kept, strict=True) if len(part)
        ]
        receiving = [self._group.recv([came[rank]], rank, MESSAGE) for rank in others if n_from_N[rank]]
        with nullcontext() if self.sums is None else self.sums.lent():
            for message in (*receiving, *sending):
                message.wait()
        return came

    def gathered(self, own_TX: Tensor, rows_N: Sequence[int], purpose: Purpose, only: int | None = None) -> Tensor:
        """The rows of all ranks in order, of which rank r has rows_N[r]. only: whom alone they go to; the others get
        their own back."""
        n_values = own_TX.shape[1]
        is_wanted = [only is None or only == rank for rank in range(self.n_ranks)]
        nothing = own_TX[:0]
        to_N = [own_TX if wanted else nothing for wanted in is_wanted]
        came = self.exchanged(to_N, [n * n_values * is_wanted[self.rank] for n in rows_N], purpose)
        if not is_wanted[self.rank]:
            return own_TX
        came[self.rank] = own_TX.reshape(-1)
        return torch.cat(came).view(-1, n_values)

    def scattered_sum(self, partial_TX: Tensor, rows_N: Sequence[int]) -> Tensor:
        """The own rows' sums over the ranks' partial results of all rows."""
        parts = torch.split(partial_TX, list(rows_N))
        own = parts[self.rank]
        came = self.exchanged(parts, [own.numel()] * self.n_ranks, "experts")
        came[self.rank] = own.reshape(-1)
        return _added(came).view(own.shape)

    def note_sums(self, n_sums: int, n_values: int) -> None:
        """Counts what went through shared memory as what it is: this rank's part, to each other rank."""
        self._note_shared("experts", n_sums * n_values)

    def note_split(self, n_layers: int, n_values: int) -> None:
        """Counts what this rank computed of attention for the others, and gave them through shared memory."""
        self._note_shared("backbone", n_layers * n_values)

    def _note_shared(self, purpose: Purpose, n_values: int) -> None:
        n_bytes = VALUE_BYTES * n_values * (self.n_ranks - 1)
        self.sent_bytes[purpose] += n_bytes
        self.shared_bytes += n_bytes

    def summed(self, partial: Tensor) -> Tensor:
        """The sum over the ranks, on all of them."""
        flat, n = partial.reshape(-1), partial.numel()
        if self.sums is not None and VALUE_BYTES * n <= DIRECT_BYTES and partial.dtype == torch.float32:
            total = partial.clone(memory_format=torch.contiguous_format)
            self.sums.add_up(total)
            self.note_sums(1, n)
            return total
        if VALUE_BYTES * n <= DIRECT_BYTES:
            came = self.exchanged([flat] * self.n_ranks, [n] * self.n_ranks, "experts")
            came[self.rank] = flat
            return _added(came).view(partial.shape)
        values_N = tokens_N(n, self.n_ranks).tolist()
        own = self.scattered_sum(flat[:, None], values_N)
        return self.gathered(own, values_N, "experts").view(partial.shape)


@contextmanager
def _displacing_nobody() -> Iterator[None]:
    """Threads that begin inside of it wait for a core until somebody leaves one, where the system lets them (Linux).

    A message wakes gloo's thread. Where it took the core of the thread that was just sending, and so held the lock of
    the pair, it tried the lock again and again until the end of its time slice: 3 ms for a message of 0.1 ms.
    """
    if not hasattr(os, "SCHED_BATCH"):
        yield
        return
    before = thread_ids()
    yield
    for thread_id in thread_ids() - before - {thread.native_id for thread in threading.enumerate()}:
        with suppress(OSError):  # a thread that ended meanwhile, or a system that forbids it
            os.sched_setscheduler(thread_id, os.SCHED_BATCH, os.sched_param(0))


def _added(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total


def why_unreachable() -> str | None:
    """Why processes of this machine could not reach each other, or None: asked before anything runs."""
    import socket

    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        return "this build of torch has no torch.distributed with gloo; install one that has, or leave ranks out"
    try:
        with socket.create_server((LOOPBACK, 0)) as server, socket.create_connection(server.getsockname(), timeout=5):
            return None
    except OSError as error:
        return (
            f"ranks cannot reach each other over {LOOPBACK} ({error.strerror or error}); bring the loopback interface"
            " up, or leave ranks out"
        )


def why_not_on_gpus(n_ranks: int) -> str | None:
    """Why so many ranks have no GPU each, or no nccl between them; None where they have."""
    import torch.distributed as dist

    n_gpus = torch.cuda.device_count()
    if n_gpus < n_ranks:
        return f"each rank takes a GPU, and torch {torch.__version__} sees {n_gpus}; give fewer ranks, or use the CPU"
    if not dist.is_nccl_available():
        return f"torch {torch.__version__} was built without nccl; install a build that has it, or use the CPU"
    return None


def check_ids(ids_TK: Tensor, n_experts: int) -> None:
    """Raises `EngineError` for numbers that are none of experts: what came is not what a rank of ours sends."""
    if bool(((ids_TK < 0) | (ids_TK >= n_experts)).any()):
        raise EngineError(f"a rank sent numbers that are none of {n_experts} experts; the ranks have lost step")
