"""llama.cpp in this process, through the shared library that the wheel xllamacpp carries.

It answers the requests that ours answers: the same token ids in, each next token chosen from its logits as ours is, and
stamped when its value is here. A log-likelihood is summed from its logits in the same way. Choosing costs the same few
microseconds a token in both engines; llama.cpp's own sampler is not used.

The cache of keys and values is emptied before each request, so that no prompt is found there.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import threading
import time
from collections.abc import Callable, Sequence
from ctypes import c_void_p
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from engines.answers import Answer, Limits, answer_to
from engines.base import HeldWeights, PhaseListener
from engines.cores import TASKS, PhaseSetting, phase_threads, thread_ids
from engines.errors import EngineError
from engines.external.base import Found
from engines.external.llama_api import CACHE_TYPES, TokenBatch, library, thread_pool
from engines.model.tokenizer import Tokenizer
from engines.profile import Profile
from engines.techniques.context import ChunkPhase
from results.core_lists import core_words
from results.counters import EngineCounters
from results.environments import PhaseThreads, Road
from results.records import Completion, Request

WHEEL = "xllamacpp"
REMEDY = "install it with `pip install 'joulebench[llama-cpp]'`"
CacheForm = Literal["f32", "f16", "q8_0"]
INSTRUCTIONS = ("AMX_INT8", "AVX512_BF16", "AVX512_VNNI", "AVX512", "AVX_VNNI", "AVX2", "AVX", "SSE3", "SVE", "NEON")
"""The widest that a build uses is what tables call it by."""


def find_wheel() -> Found:
    """The wheel, without loading it. Raises `EngineError`."""
    spec = importlib.util.find_spec(WHEEL)
    if spec is None or spec.origin is None:
        raise EngineError(f"llama.cpp is not here: no Python package {WHEEL}; {REMEDY}")
    folder = Path(spec.origin).parent
    libraries = sorted(folder.glob(f"{WHEEL}*.so"))
    if not libraries:
        raise EngineError(f"llama.cpp is not here: {folder} holds no library; {REMEDY}")
    return Found(str(libraries[0]), f"{WHEEL} {importlib.metadata.version(WHEEL)}", {f"{WHEEL} library": libraries[0]})


class LlamaCppEngine:
    """An `engines.base.Engine` that computes on this host's CPU. Raises `EngineError`, `OutOfMemoryError`."""

    device = "host"
    time_method: Literal["measured", "modelled"] = "measured"
    needs_calibration = False

    def __init__(
        self,
        found: Found,
        model: Path,
        tokenizer: Tokenizer,
        limits: Limits,
        phases: tuple[PhaseSetting, PhaseSetting],
        micro_batch: int = 512,
        cache: CacheForm = "f16",
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        """model: a GGUF file with the plan's vocabulary. phases: threads and cores of prefill and of decoding.

        micro_batch: tokens that go through the layers together. cache: in what form keys and values are kept.
        """
        self.tokenizer, self._limits, self._now_s = tokenizer, limits, now_s
        self.max_length = limits.max_length
        self._library = library(Path(found.where))
        self._cache: CacheForm = cache
        self._micro_batch = micro_batch
        parameters = self._library("llama_model_default_params")
        parameters.n_gpu_layers = 0
        self._library.warnings.clear()
        self._model = self._library("llama_model_load_from_file", os.fsencode(model), parameters)
        if not self._model:
            raise self._library.failed(f"{model} cannot be loaded")
        rows = self._library("llama_vocab_n_tokens", self._library("llama_model_get_vocab", self._model))
        if rows != limits.vocabulary_rows:
            self._free_model()
            raise EngineError(
                f"llama.cpp: {model} has {rows} rows of vocabulary, and the plan's model {limits.vocabulary_rows}; give"
                " the file of that model"
            )
        self._rows = int(rows)
        self._context: int | None = None
        self._n_positions = 0
        self._batch = TokenBatch(self._library, micro_batch)
        self._threads = _Threads(phases)
        self._pools = {
            phase: thread_pool(self._library, setting.n_threads, self._threads.mask(phase))
            for phase, setting in self._threads.settings.items()
        }

    def make_room(self, n_positions: int) -> None:
        """A context for sequences of so many tokens, unless there is one. Requests before their window's first."""
        if self._context is not None and n_positions <= self._n_positions:
            return
        if self._context is not None:
            self._library("llama_free", self._context)
            self._context = None
        parameters = self._library("llama_context_default_params")
        parameters.n_ctx = -(-n_positions // 256) * 256
        parameters.n_batch = parameters.n_ubatch = self._micro_batch
        parameters.n_outputs_max = parameters.n_outputs_max_per_seq = self._micro_batch
        parameters.type_k = parameters.type_v = CACHE_TYPES[self._cache]
        if self._cache == "f32":
            # Its fused attention rounds to f16 whatever the cache holds.
            parameters.flash_attn_type = 0
        self._library.warnings.clear()
        self._context = self._library("llama_init_from_model", self._model, parameters)
        if not self._context:
            raise self._library.failed(f"no context of {parameters.n_ctx} tokens")
        self._n_positions = n_positions

    def calibrate(self, prompts: Sequence[Sequence[int]]) -> None:
        raise EngineError("llama.cpp learns nothing offline")

    def use_profile(self, profile: Profile) -> None:
        raise EngineError("llama.cpp takes no profile")

    @torch.inference_mode()
    def run(self, request: Request, on_phase: PhaseListener) -> Completion:
        """Answers one request. Raises `EngineError`, also where a request asks for a draw."""
        if request.sampling.temperature > 0:
            raise EngineError(f"request {request.request_id}: llama.cpp is asked greedily here; set temperature = 0")
        answer = answer_to(request, self.tokenizer, self._limits)
        self.make_room(answer.n_positions)
        self._library("llama_memory_clear", self._library("llama_get_memory", self._context), False)
        with self._threads:
            start_s = self._now_s()
            on_phase("request start", start_s)
            self._enter("prefill")
            for first in range(0, answer.n_prefill, self._micro_batch):
                self._step(answer, first, min(first + self._micro_batch, answer.n_prefill), on_phase)
            if not answer.is_complete:
                self._enter("decode")
            while not answer.is_complete:
                n = len(answer.tokens)
                self._step(answer, n - 1, n, on_phase)
            if answer.end_s is None:
                answer.end_s = self._now_s()
            on_phase("request end", answer.end_s)
        return answer.completion(start_s, 0)

    def _enter(self, phase: ChunkPhase) -> None:
        """One number of threads and one pool for whatever is computed from now on: by itself llama.cpp would take a
        prompt's piece of one token for a decode step."""
        self._threads.enter(phase)
        n_threads, pool = self._threads.settings[phase].n_threads, self._pools[phase]
        self._library("llama_set_n_threads", self._context, n_threads, n_threads)
        self._library("llama_attach_threadpool", self._context, pool, pool)

    def _step(self, answer: Answer, first: int, end: int, on_phase: PhaseListener) -> None:
        """Reads tokens, and hands the logits of the positions asked about to the answer."""
        batch = self._batch.filled(answer.tokens[first:end], first, lambda at: at >= answer.first_asked)
        with self._threads.noted():
            code = self._library("llama_decode", self._context, batch)
        if code != 0:
            raise self._library.failed(f"request {answer.request.request_id}: llama_decode says {code}")
        asked = range(max(0, answer.first_asked - first), end - first)
        if not asked:
            return
        rows = [self._library("llama_get_logits_ith", self._context, i) for i in asked]
        if not all(rows):
            raise self._library.failed(f"request {answer.request.request_id}: no logits")
        answer.take(torch.from_numpy(np.stack([np.ctypeslib.as_array(row, (self._rows,)) for row in rows])))
        at_s = self._now_s()
        if answer.stamp(at_s):
            on_phase("prefill end", at_s)
        if answer.is_complete:
            answer.end_s = at_s

    def reset(self) -> None:
        """Nothing is kept from request to request."""

    def held_weights(self) -> HeldWeights:
        n_parameters = int(self._library("llama_model_n_params", self._model))
        return HeldWeights(n_parameters, int(self._library("llama_model_size", self._model)))

    def take_counters(self) -> EngineCounters | None:
        """None: what it does with experts is not told."""
        return None

    def take_road(self) -> Road:
        """`lost_cores` of it says where threads did not stay on the cores that were asked for."""
        phases = self._threads.take_found()
        system = self._library.system
        return Road(
            arithmetic="llama.cpp",
            dtype=f"keys and values in {self._cache}",
            n_threads=max(setting.n_threads for setting in self._threads.settings.values()),
            prefill_threads=phases[0],
            decoding_threads=phases[1],
            instruction_set=next((name for name in INSTRUCTIONS if f" {name} = 1" in system), None),
        )

    def close(self) -> None:
        """Gives its memory back. The library stays loaded."""
        if self._context is not None:
            self._library("llama_free", self._context)
            self._context = None
        for pool in self._pools.values():
            self._library("ggml_threadpool_free", pool)
        self._pools.clear()
        if self._model:
            self._batch.free()
            self._free_model()

    def _free_model(self) -> None:
        self._library("llama_model_free", c_void_p(self._model))
        self._model = None


class _Threads:
    """Threads and cores of the phases: llama.cpp binds its threads by the mask of a pool, the caller's among them. Here
    they are found and read back, and the caller is given back after each request."""

    def __init__(self, phases: tuple[PhaseSetting, PhaseSetting]) -> None:
        self.settings: dict[ChunkPhase, PhaseSetting] = {"prefill": phases[0], "decode": phases[1]}
        self._binds = any(setting.cores is not None for setting in phases)
        self._tells = self._binds or phases[0] != phases[1]
        self._home = frozenset(os.sched_getaffinity(0)) if self._binds else frozenset[int]()
        self._phase: ChunkPhase | None = None
        self._workers: list[int] = []
        self._found: dict[ChunkPhase, dict[str, None]] = {}

    def mask(self, phase: ChunkPhase) -> frozenset[int] | None:
        """Of a pool. A phase without cores of its own takes all, or its threads would stay where the other put them."""
        return (self.settings[phase].cores or self._home) if self._binds else None

    def __enter__(self) -> None:
        self._phase = None

    def __exit__(self, *_: object) -> None:
        self._read_back()
        self._phase = None
        if self._binds:
            os.sched_setaffinity(0, self._home)

    def enter(self, phase: ChunkPhase) -> None:
        self._read_back()
        self._phase = phase
        if self._binds:
            # A phase of one thread is computed by the caller without a pool, so without its mask.
            os.sched_setaffinity(0, self.settings[phase].cores or self._home)

    def noted(self) -> _Noted:
        """Around a call of the library: threads that begin in it compute for it."""
        return _Noted(self._workers if self._binds else None)

    def take_found(self) -> tuple[PhaseThreads | None, PhaseThreads | None]:
        found, self._found = self._found, {}
        return self._told("prefill", found), self._told("decode", found)

    def _told(self, phase: ChunkPhase, found: dict[ChunkPhase, dict[str, None]]) -> PhaseThreads | None:
        return phase_threads(self.settings[phase], found[phase]) if self._tells and phase in found else None

    def _read_back(self) -> None:
        """Where the threads may be that computed the phase now at its end."""
        if self._phase is None:
            return
        found = self._found.setdefault(self._phase, {})
        if not self._binds:
            return
        self._workers[:] = [i for i in self._workers if (TASKS / str(i)).exists()]
        for thread in (0, *sorted(self._workers)[: self.settings[self._phase].n_threads - 1]):
            found[core_words(frozenset(os.sched_getaffinity(thread)))] = None


class _Noted:
    """Adds the threads that began inside to a list. None: does nothing, which costs nothing."""

    def __init__(self, workers: list[int] | None) -> None:
        self._workers = workers
        self._before: set[int] = set()

    def __enter__(self) -> None:
        if self._workers is not None:
            self._before = thread_ids()

    def __exit__(self, *_: object) -> None:
        if self._workers is not None:
            began = thread_ids() - self._before
            self._workers += began - {thread.native_id for thread in threading.enumerate()}
