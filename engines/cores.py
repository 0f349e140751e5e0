"""Core sets by phase: prefill and decoding on cores and thread counts of their own, with one cache.

Bound are the threads that compute, one by one: the caller's, the kernels' workers, and torch's OpenMP workers. No other
thread of the process is touched, and all are given back when a request ends, so that what the harness starts meanwhile
(samplers, other arms) inherits nothing. A set is a mask, not one core for each thread: the kernel balances within it.

torch tells nobody which threads its OpenMP works with. They are those that begin while the caller computes bound, for a
new thread takes over the mask of its maker. Workers from before end first (`omp_pause_resource_all`).
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from devices.cpu_seconds import usable_cpus
from engines.errors import EngineError
from engines.kernels.library import library
from engines.techniques.context import ChunkPhase
from results.core_lists import core_words, parse_cores
from results.environments import PhaseThreads

TASKS = Path("/proc/self/task")
BINDING_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""With any of them OpenMP binds its threads itself, and anew for each piece of work."""
MOST_WORKERS = 4096
HARD_PAUSE = 2
"""omp_pause_hard: the workers of the calling thread end."""


@dataclass(frozen=True)
class PhaseSetting:
    """n_threads: those that compute, the caller's among them. cores: None leaves them where they may be."""

    n_threads: int
    cores: frozenset[int] | None = None


@dataclass
class _Threads:
    """torch's number of threads: what stood before an engine set its own, and what one set last."""

    before: int = 0
    by_engine: int | None = None


_THREADS = _Threads()


def own_threads() -> int:
    """Torch's own number of threads, whatever an engine of this process has set: another arm's would be inherited."""
    now = torch.get_num_threads()
    return _THREADS.before if now == _THREADS.by_engine else now


def _set_threads(n_threads: int) -> None:
    _THREADS.before, _THREADS.by_engine = own_threads(), n_threads
    torch.set_num_threads(n_threads)


def phase_setting(cores: str | None, threads: int | None) -> PhaseSetting:
    """A thread for each core, where `threads` does not say otherwise; torch's own number without either.

    Raises `EngineError` for cores that cannot be had.
    """
    if cores is None:
        return PhaseSetting(threads or own_threads())
    try:
        wanted = parse_cores(cores)
    except ValueError as error:
        raise EngineError(f'cores "{cores}" {error}') from error
    if reason := why_not_bound(wanted):
        raise EngineError(f'cores "{cores}": {reason}')
    if threads is not None and threads > len(wanted):
        raise EngineError(f'{threads} threads on cores "{cores}": at most one on each core')
    return PhaseSetting(threads or len(wanted), wanted)


def phase_threads(setting: PhaseSetting, found: Iterable[str]) -> PhaseThreads:
    """What was asked of a phase, and where its threads were found, in words of `core_words`."""
    asked = None if setting.cores is None else core_words(setting.cores)
    return PhaseThreads(n_threads=setting.n_threads, cores=asked, found=tuple(found))


def why_not_had(cores: frozenset[int]) -> str | None:
    """Why neither this process nor one that it starts gets all of these cores; None where it does. taskset says
    nothing: it takes any mask that has one core of this machine."""
    usable = usable_cpus()
    if usable is None:
        return "this system binds no thread to cores; remove cores"
    lacking = cores - usable
    if not lacking:
        return None
    n = os.cpu_count() or len(usable)
    absent = {core for core in lacking if core >= n}
    if absent:
        return f"this machine has no core {core_words(absent)}; this process may use {core_words(usable)}"
    return f"this process may not use core {core_words(lacking)}; it may use {core_words(usable)}"


def why_not_bound(cores: frozenset[int]) -> str | None:
    """Why threads of this process cannot be bound to these cores; None where they can."""
    if reason := why_not_had(cores):
        return reason
    binding = next((name for name in BINDING_VARIABLES if os.environ.get(name, "").lower() not in ("", "false")), None)
    if binding is not None:
        return f"{binding}={os.environ[binding][:40]!r} has OpenMP bind torch's threads otherwise; unset it"
    if _openmp() is None:
        return "torch's threads cannot be bound: it has no OpenMP that ends them (omp_pause_resource_all)"
    return None


@cache
def _openmp() -> ctypes.CDLL | None:
    """That which torch computes with, if it can end its workers.

    Found as the loader finds it for torch: first what all libraries see, then what torch itself brings. Others in the
    process (scikit-learn's, say) are not torch's.
    """
    brought = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    for path in (None, brought):
        try:
            found = ctypes.CDLL(None if path is None else str(path))
        except OSError:
            continue
        if hasattr(found, "omp_pause_resource_all"):
            return found
    return None


class PhaseCores:
    """Binds what computes to the cores of a phase, and gives all back. One engine's; used by one thread at a time.

    Without cores it sets torch's number of threads, which the kernels follow, and nothing else.
    """

    def __init__(self, prefill: PhaseSetting, decode: PhaseSetting) -> None:
        self._settings = {"prefill": prefill, "decode": prefill if decode == prefill else decode}
        self._is_binding = prefill.cores is not None or decode.cores is not None
        self._tells = self._is_binding or prefill != decode
        self.n_threads = max(prefill.n_threads, decode.n_threads)
        self._phase: ChunkPhase | None = None
        self._now: PhaseSetting | None = None
        self._home: frozenset[int] = frozenset()
        self._are_started = False
        self._kernel_ids: list[int] = []
        """Of the kernels' workers, the chosen ones first."""
        self._torch_ids: list[int] = []
        """Of OpenMP's workers, in the order in which they began: a smaller team is made of the first of them."""
        self._known: set[int] = set()
        """All threads of the process that are looked at no more."""
        self._found: dict[ChunkPhase, dict[str, None]] = {}

    def make_ready(self) -> None:
        """Before a request, outside of its time: torch's number of threads, and workers that can be told apart.

        Raises `EngineError` where the system starts too few: torch's OpenMP would end the process.
        """
        _set_threads(self.n_threads)
        if self._is_binding or not self._are_started:
            self._kernel_ids = _chosen(self.n_threads)
            n_there = len(self._kernel_ids) + 1
            if n_there < self.n_threads and library() is not None:
                raise EngineError(
                    f"the system starts no more than {n_there} of {self.n_threads} threads (ulimit -u, ulimit -v, or"
                    f" pids.max of its cgroup); raise that limit, or set threads to {n_there}"
                )
            self._are_started = True
        if not self._is_binding:
            return
        self._home = frozenset(os.sched_getaffinity(0))
        there = self._unknown()
        if there:
            pause = _openmp()
            assert pause is not None  # `why_not_bound` looked
            pause.omp_pause_resource_all(HARD_PAUSE)
            there = self._unknown()
        self._known |= there

    @contextmanager
    def given_back(self) -> Iterator[None]:
        """Afterwards every thread may be where it might be before."""
        try:
            yield
        finally:
            self._give_back()

    def enter(self, phase: ChunkPhase) -> None:
        """What is computed from now on is of this phase. Raises `EngineError` where the kernel refuses its cores."""
        if phase == self._phase:
            return
        setting = self._settings[phase]
        self._read_back()
        self._phase = phase
        if setting is self._now:
            return
        self._now = setting
        _set_threads(setting.n_threads)
        if not self._is_binding:
            return
        cores = self._home if setting.cores is None else setting.cores
        n_workers = setting.n_threads - 1
        # Idle workers of OpenMP spin before they sleep, for milliseconds as a user may set it (docs/decisions/0028).
        elsewhere = self._home - cores
        for thread_id in self._torch_ids[n_workers:] if elsewhere else ():
            _bind(thread_id, elsewhere)
        # The kernels' workers spin too until they are told to sleep: before the caller goes to the core of one, where
        # it would wait for the end of its slice.
        self._kernel_ids = _chosen(setting.n_threads)
        try:
            _bind(0, cores)
        except OSError as error:
            raise EngineError(
                f"the kernel refuses cores {core_words(cores)} ({error.strerror}); did this machine lose one?"
            ) from error
        for thread_id in (*self._kernel_ids[:n_workers], *self._torch_ids[:n_workers]):
            _bind(thread_id, cores)

    def take_found(self) -> tuple[PhaseThreads | None, PhaseThreads | None]:
        """Of prefill and of decoding since the last call: what was asked and what was found. None where nothing was
        computed, or where a plan chose one number of threads for both and no cores."""
        found, self._found = self._found, {}
        return self._told("prefill", found), self._told("decode", found)

    def _told(self, phase: ChunkPhase, found: dict[ChunkPhase, dict[str, None]]) -> PhaseThreads | None:
        return phase_threads(self._settings[phase], found[phase]) if self._tells and phase in found else None

    def _read_back(self) -> None:
        """Where the threads may be that computed the phase now at its end."""
        if self._phase is None:
            return
        found = self._found.setdefault(self._phase, {})
        if not self._is_binding or self._now is None:
            return
        bound = self._home if self._now.cores is None else self._now.cores
        self._find_workers(bound)
        n_workers = self._now.n_threads - 1
        for thread_id in (0, *self._kernel_ids[:n_workers], *self._torch_ids[:n_workers]):
            cores = _cores_of(thread_id)
            if cores is not None:
                found[core_words(cores)] = None

    def _find_workers(self, bound: frozenset[int]) -> None:
        """OpenMP's workers that began in this phase, in order; those that ended are forgotten."""
        there = thread_ids()
        new = self._unknown(there)
        self._known |= new
        self._torch_ids = [i for i in self._torch_ids if i in there]
        # What another thread began meanwhile has no mask of ours.
        self._torch_ids += sorted(i for i in new if _cores_of(i) == bound)

    def _unknown(self, there: set[int] | None = None) -> set[int]:
        """Threads that neither Python nor the kernels began, and that were not there at the last look."""
        new = (thread_ids() if there is None else there) - self._known - set(self._kernel_ids)
        return new and new - {thread.native_id for thread in threading.enumerate()}

    def _give_back(self) -> None:
        if self._phase is None:
            return
        try:
            self._read_back()
            if self._is_binding:
                for thread_id in (0, *self._kernel_ids, *self._torch_ids):
                    _bind(thread_id, self._home)
        finally:
            self._phase, self._now = None, None


def _chosen(n_threads: int) -> list[int]:
    """The system's ids of the kernels' workers, the chosen ones first. The others sleep from now on."""
    kernels = library()
    if kernels is None:
        return []
    ids = (ctypes.c_int32 * MOST_WORKERS)()
    n_workers = kernels.joulebench_choose(n_threads, ids, MOST_WORKERS)
    return ids[: min(n_workers, MOST_WORKERS)]


def _bind(thread_id: int, cores: frozenset[int]) -> None:
    """A thread that ended meanwhile needs none. Raises `OSError`."""
    try:
        os.sched_setaffinity(thread_id, cores)
    except ProcessLookupError:
        return


def _cores_of(thread_id: int) -> frozenset[int] | None:
    try:
        return frozenset(os.sched_getaffinity(thread_id))
    except ProcessLookupError:
        return None


def thread_ids() -> set[int]:
    return {int(name) for name in os.listdir(TASKS)}
