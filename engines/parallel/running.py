"""Ranks that run: the first's model, and the processes of the others."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from engines.errors import EngineError
from engines.model.checkpoints import CheckpointFacts, decisive_files
from engines.model.held_weights import held_weights
from engines.model.key_value_cache import KeyValueCache
from engines.model.quantised import AS_THE_MODEL, Quantisation
from engines.model.rope_config import LongRope
from engines.parallel.links import Backend, Links
from engines.parallel.processes import Loaded, ToldCache, Workers
from engines.parallel.settings import RankPart, RankSettings
from engines.parallel.torchrun import Meeting
from engines.parallel.transformer import RankTransformer
from engines.profile import Profile
from engines.reference import ReferenceEngine
from engines.techniques.context import ChunkPhase
from engines.techniques.over_ranks import OverRanks
from engines.techniques.parameters import Composed
from results.counters import EngineCounters

WATCH_S = 0.1
DType = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class RanksAsked:
    """An engine of several processes, as it is asked for. threads: of each rank. prefill_chunk, long_rope: as of the
    reference engine. backend: nccl takes a GPU for each rank. meeting: where ranks that torchrun started wait; None:
    they are started here."""

    facts: CheckpointFacts
    technique: Composed
    n_ranks: int
    dtype: DType = "float32"
    quantise: Quantisation = AS_THE_MODEL
    prefill_chunk: int = 512
    threads: int | None = None
    long_rope: LongRope = "at_once"
    backend: Backend = "gloo"
    meeting: Meeting | None = None

    @property
    def threads_of_each(self) -> int:
        """This machine's cores over the ranks, where nobody said."""
        return self.threads or threads_of_each(self.n_ranks)


def threads_of_each(n_ranks: int) -> int:
    return max(1, usable_cores() // n_ranks)


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Running:
    """From the start of the processes to `close`. engine: the first rank's, of whoever answers requests."""

    engine: ReferenceEngine

    def __init__(self, asked: RanksAsked, profile: Profile | None = None) -> None:
        """Starts the others, reads the first rank's shard, and waits until all have found each other. Raises
        `EngineError`."""
        facts = asked.facts

        def settings(store_file: str) -> RankSettings:
            return RankSettings(
                source=facts.source if facts.revision is None else str(facts.folder),
                dtype=asked.dtype,
                quantise=asked.quantise,
                long_rope=asked.long_rope,
                technique=asked.technique.technique,
                parameters=asked.technique.model_dump(mode="json", exclude={"name"}),
                prefill_chunk=asked.prefill_chunk,
                n_ranks=asked.n_ranks,
                threads=asked.threads_of_each,
                backend=asked.backend,
                store_file=store_file,
                profile=None if profile is None else dict(profile.tokens_per_expert),
                top_k=1 if profile is None else profile.top_k,
                n_prompts=1 if profile is None else profile.n_prompts,
            )

        if facts.revision is not None:
            decisive_files(facts.source)  # of a hub model, fetched once and not by every rank
        self._kept_bytes: dict[str, int] = {}
        """Sent, and in no counter yet, when something that is not counted began."""
        self.workers = Workers(settings, asked.n_ranks, asked.meeting)
        try:
            told = self.workers.settings
            self.technique: OverRanks = told.technique_of(facts.config)
            part = RankPart(told, self.technique, 0)
            self.checkpoint = part.checkpoint
            own = Loaded(part.read_bytes, held_weights(part.checkpoint.weights).n_bytes)
            self.loaded = [own, *self.workers.loaded()]
            """Of each rank."""
            try:
                self.links = Links(told.store_file, 0, asked.n_ranks, asked.backend)
            except RuntimeError as error:
                raise EngineError(f"the ranks did not find each other: {self.workers.why_lost()}") from error
            self.model = _Leading(part, self.links, self.workers)
            self._ended = threading.Event()
            threading.Thread(target=self._watch, daemon=True).start()
        except BaseException:
            self.workers.close()
            raise

    @property
    def has_lost_one(self) -> bool:
        return any(process.poll() is not None for process in self.workers.processes)

    def counted(self, counters: EngineCounters) -> EngineCounters:
        if not self.workers.processes:
            return counters
        experts, backbone = (sent + self._kept_bytes.pop(of, 0) for of, sent in self._sent_bytes().items())
        planned = counters.bytes_exchanged or 0
        if experts != planned:
            raise EngineError(f"the ranks sent {experts} bytes for the experts, and the plans say {planned}")
        return counters.model_copy(update={"bytes_exchanged": experts + backbone})

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What the ranks send inside it stands in no counter: it answers no request."""
        before = self._sent_bytes() if self.workers.processes else {}
        yield
        if self.workers.processes:
            self._sent_bytes()
            self._kept_bytes = {of: self._kept_bytes.get(of, 0) + sent for of, sent in before.items()}

    def _sent_bytes(self) -> dict[str, int]:
        """Of all ranks since it was asked last, for the experts and for the backbone."""
        reports = self.workers.reports()
        own, self.links.sent_bytes = self.links.sent_bytes, dict.fromkeys(self.links.sent_bytes, 0)
        for rank, report in enumerate(reports, 1):
            if report.routed_crc != self.model.routed_crc:
                raise EngineError(f"ranks 0 and {rank} chose unlike experts; their processors or libraries differ")
        return {of: own[of] + sum(report.sent_bytes[of] for report in reports) for of in ("experts", "backbone")}

    def _watch(self) -> None:
        """Who waits for a rank's part of a sum in shared memory hears of its end from nobody else."""
        while not self._ended.wait(WATCH_S):
            if self.has_lost_one:
                self.links.leave()
                return

    def close(self) -> None:
        self._ended.set()
        self.links.leave()
        self.workers.close()


class _Leading(RankTransformer):
    """The first rank's: what it computes the others are told."""

    def __init__(self, part: RankPart, links: Links, workers: Workers) -> None:
        super().__init__(part.checkpoint, links, part.backend)
        self._workers = workers
        self._n_caches = 0

    def new_cache(self) -> KeyValueCache:
        cache = ToldCache(self.config, self._device, self._kept)
        cache.number, cache.workers = self._n_caches, self._workers
        self._n_caches += 1
        return cache

    def _tell(self, chunks: Sequence[Tensor], caches: Sequence[KeyValueCache], phase: ChunkPhase) -> None:
        numbers = [cache.number for cache in caches if isinstance(cache, ToldCache)]
        self._workers.step(chunks, numbers, phase)
