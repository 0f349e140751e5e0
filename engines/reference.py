"""The reference engine: torch and the kernels, every technique through its dispatch plan; one request or a batch.

Written to be right and to be read; a faster engine has this one to agree with.

Legend: T tokens, H hidden, L vocabulary rows, A positions asked about in one step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from engines.answers import Answer, Limits, Loglikelihood, answer_to, packed
from engines.base import HeldWeights, PhaseListener, unheard
from engines.cores import PhaseCores, PhaseSetting, own_threads
from engines.counting import Counting
from engines.errors import EngineError
from engines.expert_memory import ExpertMemory, expert_layers
from engines.model.accelerator import DeviceType, find_backend, synchronised
from engines.model.checkpoints import Checkpoint
from engines.model.held_weights import active_weights, held_weights, remedy, rounding_of
from engines.model.rope_config import LongRope, LongScaling
from engines.model.transformer import Decoded, KeyValueCache, Transformer, model_of
from engines.observers import LayerObserver, StepObserver
from engines.prefix import HeldTokens, reusable
from engines.profile import Profile
from engines.profiling import profile_of
from engines.road import road
from engines.sequences import Reading, RunningSequence, reading, stamp
from engines.shown import Shown
from engines.sizes import own_sizes, told_sizes
from engines.techniques.base import Technique, TechniqueParameters, stands_alone
from engines.techniques.composed import ComposedTechnique
from engines.techniques.context import NOTHING, BuildContext, ChunkPhase, Costs, ModelSizes
from results.copies import DecodeStep
from results.counters import EngineCounters
from results.environments import Road
from results.expert_heat import ExpertHeat
from results.records import ActiveWeights, Completion, Request

MOST_CHUNK, MOST_THREADS = 2**31 - 1, 4096
"""Threads: more than any machine has cores; torch and the kernels start as many as they are told."""

LastLayer = Literal["asked"]

ANY_MEMORY = ExpertMemory()

logger = logging.getLogger(__name__)


class ReferenceEngine:
    """An `engines.base.Engine` that computes on this host."""

    device = "host"
    time_method: Literal["measured", "modelled"] = "measured"

    def __init__(
        self,
        checkpoint: Checkpoint,
        technique: TechniqueParameters,
        prefill_chunk: int = 512,
        now_s: Callable[[], float] = time.perf_counter,
        threads: int | None = None,
        reuse_prefix: bool = False,
        torch_device: DeviceType = "cpu",
        compute_dtype: torch.dtype | None = None,
        long_rope: LongRope = "at_once",
        sizes: ModelSizes | None = None,
        costs: Costs | None = None,
        model: Transformer | None = None,
        cores: PhaseCores | None = None,
        ranks: int = 1,
        expert_memory: ExpertMemory = ANY_MEMORY,
        plans_first: bool = False,
        last_layer: LastLayer | None = None,
    ) -> None:
        """prefill_chunk: tokens per prefill step. now_s: the run's clock, whose stamps completions carry.

        threads: CPU threads of this engine's arithmetic; None leaves torch's own number.
        cores: cores and threads of each phase, in the place of `threads`. On an accelerator those of the host, which
        plans and launches there.
        reuse_prefix: a request starts behind the tokens that it shares with the one before (`engines.prefix`).
        torch_device, compute_dtype: where this host computes, and in what; None is fp32 on the CPU and bf16 elsewhere.
        The weights are copied there (`engines.model.accelerator`).
        model: what `model_of` made of the same checkpoint, device and rope, to share its weights with other engines.
        sizes, costs: what the technique is told of the model, and of the machine that it plans for; its own sizes where
        they are not given.
        ranks: of how many processes this one is the first, whose answers it gives (`engines.parallel`).
        expert_memory: what a technique that loads experts may hold of them; the checkpoint's experts are then views of
        its file (`load_checkpoint` with experts_as_filed).
        plans_first: see `Shown`.
        last_layer: of a prompt. None computes all tokens in it, which nobody but a technique that couples them needs.
        "asked" computes those whose logits are wanted, and keys and values alone of the others.
        long_rope: when a sequence takes LongRoPE's long factors; of no effect in models without it.
        """
        if type(prefill_chunk) is not int or not 1 <= prefill_chunk <= MOST_CHUNK:
            raise EngineError(f"prefill_chunk {prefill_chunk!r} must be 1 to {MOST_CHUNK} tokens")
        if threads is not None and (type(threads) is not int or not 1 <= threads <= MOST_THREADS):
            raise EngineError(f"threads {threads!r} must be 1 to {MOST_THREADS}; leave it out for torch's own number")
        if checkpoint.config.moe is None and technique.wanted_prompts:
            raise EngineError(
                f"technique {technique.technique} places experts, and {checkpoint.source} is dense; use dropless"
            )
        self.tokenizer = checkpoint.tokenizer
        self.max_length = checkpoint.config.max_length
        self.observer: StepObserver | None = None
        self.layer_observer: LayerObserver | None = None
        backend = find_backend(torch_device, compute_dtype)
        self._backend = backend
        self._rounding = rounding_of(checkpoint.weights)
        self._turns_when_reached = long_rope == "when_reached"
        stay = expert_memory.loads(technique)
        self._model = model or model_of(checkpoint, torch_device, compute_dtype, long_rope, stay)
        self.limits = Limits(
            checkpoint.config.max_length, checkpoint.config.vocabulary_size, remedy(checkpoint.weights)
        )
        self._cache = self._model.new_cache()
        self._batch_caches: list[KeyValueCache] = []
        self._held = HeldTokens()
        self._reuse_prefix = reuse_prefix
        self._parameters = technique
        self._sizes, self._priced_sizes = told_sizes(own_sizes(checkpoint.config), sizes, backend), sizes
        self._costs = costs
        self._ranks = ranks
        self._prefill_chunk = prefill_chunk
        self._now_s = now_s if backend is None else synchronised(now_s, backend.device)
        self._cores = cores or PhaseCores(one := PhaseSetting(threads or own_threads()), one)
        self._expert_memory = expert_memory
        self._plans_first = plans_first
        self._last_layer = last_layer
        self._technique: Technique | None = None
        self._shown = Shown(NOTHING, None)
        if not technique.wanted_prompts:
            self._freeze(None)
        self._counting = Counting()
        self._profile: Profile | None = None

    @property
    def needs_calibration(self) -> bool:
        return self._technique is None

    def calibrate(self, prompts: Sequence[Sequence[int]]) -> None:
        """Counts the true (dropless) choices over the prompts' prefill and freezes the technique on them.

        Calibration is offline: neither counted nor observed. A second one is refused, for shapes are frozen.
        """
        self._check_needs_calibration()
        if self._backend is not None and self._expert_memory.loads(self._parameters):
            raise EngineError(
                f"{self._parameters.technique} copies experts to {self._backend.device}, where it is not calibrated;"
                " give it a profile (`joulebench calibrate`)"
            )
        self._cores.make_ready()
        with self._cores.given_back():
            self._cores.enter("prefill")
            wants_vectors = "default vectors" in self._parameters.learns
            profile = profile_of(self._model, self._cache, prompts, self._prefill_chunk, wants_vectors)
        self._cores.take_found()
        # Not before: a thread that copies would begin on the cores of this phase, and stay there.
        self.use_profile(profile)

    def use_profile(self, profile: Profile) -> None:
        """Freezes the technique on what was counted before, of this model: `engines.profile_files.mismatch` says so."""
        self._check_needs_calibration()
        self._profile = profile
        self._freeze(profile)
        worst = max(profile.tokens_per_expert, key=profile.imbalance)
        logger.info(
            "calibrated %s on %d prompts; imbalance up to %.2f (layer %d)",
            self._parameters.technique,
            profile.n_prompts,
            profile.imbalance(worst),
            worst,
        )

    def _freeze(self, profile: Profile | None) -> None:
        context = BuildContext(self._prefill_chunk, self._sizes, profile, self._costs, self._model, ranks=self._ranks)
        context = replace(context, routers_order=self._model.decodes_in_one_call, priced_sizes=self._priced_sizes)
        weights, loads = self._model.weights, self._expert_memory.loads(self._parameters)
        if loads:
            context = self._expert_memory.told(context, weights, self._backend)
        else:
            context = self._expert_memory.counted(context, weights)
        self._technique = self._parameters.build(context)
        if self._last_layer is not None and not stands_alone(self._technique):
            raise EngineError(
                f"technique {self._parameters.technique} plans a prompt's tokens together, in the last layer too; leave"
                " last_layer out"
            )
        self._shown = Shown(self._technique.asks, self._sizes, self._plans_first)
        if loads:
            self._shown.slots = self._expert_memory.slots(
                self._technique, weights, context, self._backend, time.perf_counter
            )

    def _check_needs_calibration(self) -> None:
        if not self.needs_calibration:
            raise EngineError(f"technique {self._parameters.technique} is complete; calibrate only while needed")

    def run(self, request: Request, on_phase: PhaseListener) -> Completion:
        """Answers one request. Raises `EngineError` before any work on one that it cannot take.

        Stamps follow the token's value on the host, so on a device that runs ahead they wait for it. What a listener
        does at "request start" lies inside the request: keep it short. Detokenising the answer lies outside, except for
        the tail that is searched for stop strings.
        """
        self._ready()
        return self.run_answer(answer_to(request, self.tokenizer, self.limits), on_phase)

    @torch.inference_mode()
    def run_answer(self, answer: Answer, on_phase: PhaseListener) -> Completion:
        """As `run`, for an answer whose maker wants to hear more of it than its completion tells. What its `take` and
        `stamp` raise ends the request, and harms none after it."""
        technique = self._ready()
        start_s = self._now_s()
        on_phase("request start", start_s)
        sequence = RunningSequence(answer, self._cache, self._held, self._begin(answer, technique))
        self._answer([sequence], technique, on_phase)
        return answer.completion(start_s, sequence.n_cached)

    @torch.inference_mode()
    def run_batch(self, requests: Sequence[Request], on_phase: PhaseListener) -> list[Completion]:
        """Answers requests of any kinds and lengths together, in their order. Raises `EngineError` before any work,
        naming the first request that it cannot take; one whose logits are no numbers ends the whole batch.

        All of them start at once. Prefill comes first, in steps of `prefill_chunk` tokens that are filled with one
        prompt after another; then every generation not yet complete decodes one token a step, and leaves when it is.
        So the stamps of a request are what a client of this batch would see, not what the request costs alone: its TTFT
        holds the prefill of those before it, its first inter-token time the prefill of those after it, and the tokens
        of one step share one stamp, taken when the last of their values is on the host. Phases of different requests
        overlap. A listener hears each edge with the stamp that the completions carry, once where they share it.

        A technique that couples tokens plans over the rows of all sequences of a step. Tiers froze their prefill for
        steps of `prefill_chunk` rows, which these fill; a decode graph that more sequences choose than it has rows
        drops, and the counters say so.

        Nothing is kept from requests before or for those after, whatever `reuse_prefix` says. An observer prices single
        sequences and is refused.
        """
        technique = self._ready()
        if self.observer is not None:
            raise EngineError(
                "a batch cannot be observed, for steps are priced one sequence at a time; run its requests"
            )
        answers = [answer_to(request, self.tokenizer, self.limits) for request in requests]
        if not answers:
            return []
        start_s = self._now_s()
        on_phase("request start", start_s)
        while len(self._batch_caches) < len(answers):
            self._batch_caches.append(self._model.new_cache())
        sequences = [RunningSequence(answer, cache) for answer, cache in zip(answers, self._batch_caches, strict=False)]
        for sequence in sequences:
            sequence.cache.start(sequence.answer.n_positions, 0, self._turned_for(sequence.answer))
        self._answer(sequences, technique, on_phase)
        return [answer.completion(start_s, 0) for answer in answers]

    @torch.inference_mode()
    def show_log_probabilities(self, request: Request, listener: Callable[[Tensor], object]) -> None:
        """See `engines.base.ShowsLogProbabilities`."""
        if request.kind != "loglikelihood":
            raise EngineError(f"request {request.request_id}: a {request.kind} shows none; ask for a loglikelihood")
        technique, counting, observer = self._ready(), self._counting, self.observer
        answer = Loglikelihood(request, self.limits, listener)
        self.observer, self._counting = None, Counting()
        self.reset()
        try:
            sequence = RunningSequence(answer, self._cache, self._held, self._begin(answer, technique))
            self._answer([sequence], technique, unheard)
        finally:
            self._counting, self.observer = counting, observer

    def held_weights(self) -> HeldWeights:
        """Where experts lie in slots or buffers, their bytes are those: the others lie in a file."""
        held, slots = held_weights(self._model.weights), self._shown.slots
        if slots is None:
            return held
        in_file = held_weights(tuple(layer for layer in expert_layers(self._model.weights) if layer is not None))
        return held._replace(n_bytes=held.n_bytes - in_file.n_bytes + slots.n_bytes)

    def active_weights(self) -> ActiveWeights:
        moe = self._model.config.moe
        return active_weights(self._model.weights, 0 if moe is None else moe.top_k, self._last_layer is not None)

    def reset(self) -> None:
        """The next request computes all of its prompt, whatever was asked before, and finds no expert loaded."""
        self._held.keep(0)
        self._shown.reset()

    def take_counters(self) -> EngineCounters:
        return self._counting.take_counters()

    def take_heat(self) -> ExpertHeat | None:
        heat = self._counting.take_heat(self._profile)
        if heat is None or not isinstance(self._technique, ComposedTechnique):
            return heat
        return heat.model_copy(update=self._technique.frozen(heat.layers))

    def take_decode_steps(self) -> tuple[DecodeStep, ...]:
        return () if self._shown.slots is None else self._shown.slots.stamps.take_steps()

    def take_road(self) -> Road:
        roads, found = self._counting.take_roads(), self._cores.take_found()
        return road(self._backend, *roads, self._cores.n_threads, found, self._rounding)

    def _ready(self) -> Technique:
        if self._technique is None:
            raise EngineError(f"technique {self._parameters.technique} is not calibrated; call calibrate first")
        # torch has one number for the whole process, and engines with other numbers share it.
        self._cores.make_ready()
        return self._technique

    def _answer(self, sequences: Sequence[RunningSequence], technique: Technique, on_phase: PhaseListener) -> None:
        with self._cores.given_back():
            self._compute(sequences, technique, on_phase)

    def _compute(self, sequences: Sequence[RunningSequence], technique: Technique, on_phase: PhaseListener) -> None:
        left = [s.answer.n_prefill - s.n_cached for s in sequences]
        n_left = sum(left)
        self._shown.start_request()
        try:
            for step in packed(left, self._prefill_chunk):
                n_left -= sum(n for _, n in step)
                self._shown.start_step(n_left)
                self._step([(sequences[i], n) for i, n in step], technique, "prefill", on_phase)
            while alive := [(s, 1) for s in sequences if not s.answer.is_complete]:
                for sequence, _ in alive:
                    self._turn_for_next(sequence, technique)
                self._shown.start_step(0, decodes=True)
                self._step(alive, technique, "decode", on_phase)
        except BaseException:
            self._shown.break_off()
            with suppress(EngineError):  # what ended the request is told
                self._counting.end_request(self._shown)
            raise
        self._counting.end_request(self._shown)

    def _step(
        self,
        parts: Sequence[tuple[RunningSequence, int]],
        technique: Technique,
        phase: ChunkPhase,
        on_phase: PhaseListener,
    ) -> None:
        """Reads the next n tokens of each sequence, and hands the logits of the positions asked about to its answer."""
        self._cores.enter(phase)
        read = reading(parts)
        caches = [sequence.cache for sequence, _ in parts]
        logits_AL, plans, largest = self._computed(read, caches, technique, phase)
        for (sequence, _), token_ids in zip(parts, read.chunks, strict=True):
            if sequence.held is not None:
                sequence.held.add(token_ids, phase)
        self._counting.step(plans, phase)
        if self.observer is not None:
            self.observer.step(read.n_rows, caches[0].length, phase, plans)
        if logits_AL is None:
            return
        shares = [logits_AL] if len(read.asking) == 1 else torch.split(logits_AL, read.n_asked)
        for answer, share_AL in zip(read.asking, shares, strict=True):
            answer.take(share_AL, largest)
        # Before its stamp: what listeners and other programs take behind it lies in no step.
        self._shown.end_step()
        stamp(read.asking, self._now_s, on_phase)

    def _computed(
        self, read: Reading, caches: Sequence[KeyValueCache], technique: Technique, phase: ChunkPhase
    ) -> Decoded:
        """Logits of the rows that are asked about."""
        if phase == "decode" and self.layer_observer is None:
            token_ids = [ids[0] for ids in read.chunks]
            if len(token_ids) == 1:
                whole = self._model.decode(token_ids[0], caches[0], technique, self._shown)
            else:
                whole = self._model.decode_batch(token_ids, caches, technique, self._shown)
            if whole is not None:
                return whole
        leaves_out = self._last_layer is not None and phase == "prefill"
        if leaves_out and (self.observer is not None or self.layer_observer is not None):
            raise EngineError("an observer is told of all tokens in every layer; leave last_layer out")
        hidden_TH, plans = self._model.forward_batch(
            [torch.tensor(token_ids) for token_ids in read.chunks],
            caches,
            technique,
            phase,
            self.layer_observer,
            self._counting.routed,
            self._shown,
            read.ends if leaves_out else None,
        )
        if not read.asking:
            return Decoded(None, plans)
        # A decode step asks about all rows, and takes no view of them: views cost it 7 us.
        asked_AH = hidden_TH if leaves_out or len(read.rows) == read.n_rows else hidden_TH[read.rows]
        return Decoded(self._model.logits(asked_AH), plans)

    def _turn_for_next(self, sequence: RunningSequence, technique: Technique) -> None:
        """Computes the sequence again where its next token needs other rotary factors than those before have."""
        cache, scaling = sequence.cache, self._model.config.rope.scaling
        if not isinstance(scaling, LongScaling):
            return
        if cache.length < scaling.original_max_length or cache.turned_for > scaling.original_max_length:
            return
        self._cores.enter("prefill")
        tokens = sequence.answer.tokens[: cache.length]
        if sequence.held is not None:
            sequence.held.keep(0)
        cache.start(cache.n_positions, 0, cache.length + 1)
        for chunk_T in torch.split(torch.tensor(tokens), self._prefill_chunk):
            self._shown.start_step(None)
            _, plans = self._model.forward(
                chunk_T,
                cache,
                technique,
                "prefill",
                self.layer_observer,
                self._counting.routed,
                self._shown,
            )
            if sequence.held is not None:
                sequence.held.add(chunk_T.tolist(), "prefill")
            self._counting.again(plans)
            if self.observer is not None:
                self.observer.step(len(chunk_T), cache.length, "again", plans)

    def _turned_for(self, answer: Answer) -> int:
        return answer.n_prefill if self._turns_when_reached else answer.n_positions

    def _begin(self, answer: Answer, technique: Technique) -> int:
        """Readies the engine's own cache for a request; returns how many of its tokens are in there already."""
        n_cached, turned_for = 0, self._turned_for(answer)
        if self._reuse_prefix:
            chunk = self._prefill_chunk if technique.couples_tokens else None
            turned = self._cache.turned_for, turned_for
            n_cached = reusable(self._held, answer.request, chunk, self._model.config.rope, *turned)
        self._held.keep(n_cached)
        self._cache.start(answer.n_positions, n_cached, turned_for)
        return n_cached
