"""An engine of several processes: the reference engine of the first rank, and the ranks that compute with it.

The first rank is the run's own process. It starts the others (`engines.parallel.processes`), reads its own shard, and
answers requests as the reference engine does; each step is told to the others, who compute their part of it. Where a
rank is lost the request fails with its name, and all are started anew with the next.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from engines.base import HeldWeights, PhaseListener
from engines.errors import EngineError
from engines.model.wanted_tensors import tensor_shapes
from engines.parallel.messages import LostError
from engines.parallel.running import RanksAsked, Running
from engines.profile import Profile
from engines.profiling import profile_of
from engines.reference import ReferenceEngine
from engines.techniques.parameters import Composed, CustomParameters
from engines.techniques.place.ranks import ExpertParallelParameters, Held
from results.counters import EngineCounters
from results.environments import Road
from results.expert_heat import ExpertHeat
from results.records import Completion, Request

logger = logging.getLogger(__name__)


class ParallelEngine:
    """An `engines.base.Engine` that computes on this host in several processes. `close` ends them."""

    device = "host"
    time_method: Literal["measured", "modelled"] = "measured"

    def __init__(
        self, asked: RanksAsked, now_s: Callable[[], float] = time.perf_counter, reuse_prefix: bool = False
    ) -> None:
        """now_s, reuse_prefix: as of the reference engine. Nothing is started before the first request, or `reset`."""
        self.tokenizer = asked.facts.tokenizer
        self.max_length = asked.facts.config.max_length
        self.n_ranks = asked.n_ranks
        self._asked = asked
        self._technique = asked.technique
        self._now_s = now_s
        self._reuse_prefix = reuse_prefix
        self._profile: Profile | None = None
        self._running: Running | None = None

    @property
    def needs_calibration(self) -> bool:
        return self._technique.wanted_prompts > 0 and self._profile is None

    def calibrate(self, prompts: Sequence[Sequence[int]]) -> None:
        """Counts with experts dealt in equal numbers, every token on every rank."""
        self._check_needs_calibration()
        place = ExpertParallelParameters(sequence_parallel=False)
        with self._guarded():
            counting = self._started(CustomParameters(place=place), None)
            try:
                model = counting.model
                with torch.inference_mode():
                    profile = profile_of(
                        model, model.new_cache(), prompts, self._asked.prefill_chunk, technique=counting.technique
                    )
            finally:
                counting.close()
        self.use_profile(profile)

    def use_profile(self, profile: Profile) -> None:
        self._check_needs_calibration()
        self._profile = profile

    def _check_needs_calibration(self) -> None:
        if not self.needs_calibration:
            raise EngineError(f"technique {self._technique.technique} is complete; calibrate only while needed")

    def run(self, request: Request, on_phase: PhaseListener) -> Completion:
        with self._guarded():
            return self._ready().engine.run(request, on_phase)

    def run_batch(self, requests: Sequence[Request], on_phase: PhaseListener) -> list[Completion]:
        with self._guarded():
            return self._ready().engine.run_batch(requests, on_phase)

    def show_log_probabilities(self, request: Request, listener: Callable[[Tensor], object]) -> None:
        with self._guarded():
            running = self._ready()
            with running.uncounted():
                running.engine.show_log_probabilities(request, listener)

    def held_weights(self) -> HeldWeights:
        """Parameters of the model; bytes that all ranks hold together, what each has whole counted as often."""
        with self._guarded():
            n_bytes = sum(rank.held_bytes for rank in self._ready().loaded)
        n_values = sum(map(_product, tensor_shapes(self._asked.facts.config).values()))
        return HeldWeights(n_values, n_bytes)

    def read_bytes(self) -> list[dict[str, int]]:
        """Of each rank: bytes read of each tensor."""
        with self._guarded():
            return [rank.read_bytes for rank in self._ready().loaded]

    def held(self, layer: int, rank: int) -> Held:
        """What a rank computes with in a layer."""
        with self._guarded():
            return self._ready().technique.held(layer, rank)

    def process_ids(self) -> list[int]:
        """Of the ranks, the first being this process."""
        with self._guarded():
            return [os.getpid(), *(process.pid for process in self._ready().workers.processes)]

    def reset(self) -> None:
        """Also starts what is not running: no window should hold that."""
        with self._guarded():
            self._ready().engine.reset()

    def take_counters(self) -> EngineCounters:
        """With the bytes that all ranks have sent. Raises `EngineError` where they are not what the plans said."""
        with self._guarded():
            running = self._ready()
            return running.counted(running.engine.take_counters())

    def take_heat(self) -> ExpertHeat | None:
        return self._ready().engine.take_heat()

    def take_road(self) -> Road:
        running = self._ready()
        told = running.engine.take_road()
        return told.model_copy(update={"n_processes": self.n_ranks, "links": running.links.told})

    def close(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """What went wrong between ranks ends them all, and is told with the name of the one that was lost."""
        try:
            yield
        except (LostError, RuntimeError) as error:
            # gloo and nccl raise RuntimeError, and nothing narrower; EngineError is none of both.
            running, self._running = self._running, None
            if running is None or isinstance(error, NotImplementedError | RecursionError):
                raise
            told = running.workers.why_lost()
            running.close()
            raise EngineError(f"{told}; the ranks are started anew with the next request") from error
        except EngineError:
            if self._running is not None and self._running.has_lost_one:
                self.close()
            raise

    def _ready(self) -> Running:
        if self.needs_calibration:
            raise EngineError(f"technique {self._technique.technique} is not calibrated; call calibrate first")
        if self._running is None:
            self._running = self._started(self._technique, self._profile)
        return self._running

    def _started(self, technique: Composed, profile: Profile | None) -> Running:
        on_gpus = self._asked.backend == "nccl"
        started = Running(replace(self._asked, technique=technique), profile)
        try:
            started.engine = ReferenceEngine(
                started.checkpoint,
                technique,
                self._asked.prefill_chunk,
                self._now_s,
                self._asked.threads_of_each,
                self._reuse_prefix,
                torch_device="cuda" if on_gpus else "cpu",
                compute_dtype=torch.float32 if on_gpus else None,
                model=started.model,
                ranks=self.n_ranks,
            )
            if profile is not None:
                started.engine.use_profile(profile)
        except BaseException:
            started.close()
            raise
        logger.info("%d ranks of %d threads over %s", self.n_ranks, self._asked.threads_of_each, self._asked.backend)
        return started


def _product(shape: Sequence[int]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n
