"""The reference engine: torch, one request at a time, every technique through its dispatch plan.

Written to be right and to be read; a faster engine has this one to agree with.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from engines.base import PhaseListener
from engines.calibration import count_choices
from engines.checkpoints import Checkpoint
from engines.dispatch import DispatchPlan
from engines.errors import EngineError
from engines.prefix import HeldTokens, turned_alike
from engines.sampling import check_sampling, choose_token
from engines.techniques.base import ChunkPhase, Technique, TechniqueParameters
from engines.techniques.dropless import Dropless
from engines.transformer import KeyValueCache, Transformer
from results.records import Completion, EngineCounters, Request

logger = logging.getLogger(__name__)


class StepObserver(Protocol):
    """Hears of every forward chunk of a request once it is computed, in order; not of calibration.

    n_tokens: tokens of the chunk. kv_length: tokens in the cache after it. plans: one per layer, None for dense ones.
    """

    def step(
        self, n_tokens: int, kv_length: int, phase: Literal["prefill", "decode"], plans: Sequence[DispatchPlan | None]
    ) -> None: ...


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
    ) -> None:
        """prefill_chunk: tokens per prefill step. now_s: the run's clock, whose stamps completions carry.

        threads: CPU threads of this engine's arithmetic; None leaves torch's own number.
        reuse_prefix: a request starts behind the tokens that it shares with the one before (`engines.prefix`).
        """
        if prefill_chunk < 1:
            raise EngineError(f"prefill_chunk {prefill_chunk} must be at least 1 token")
        if checkpoint.config.moe is None and technique.calibration_prompts:
            raise EngineError(
                f"technique {technique.technique} places experts, and {checkpoint.source} is dense; use dropless"
            )
        self.tokenizer = checkpoint.tokenizer
        self.max_length = checkpoint.config.max_length
        self.observer: StepObserver | None = None
        self._model = Transformer(checkpoint)
        self._cache = KeyValueCache(checkpoint.config)
        self._held = HeldTokens()
        self._reuse_prefix = reuse_prefix
        self._parameters = technique
        self._prefill_chunk = prefill_chunk
        self._now_s = now_s
        self._threads = threads or torch.get_num_threads()
        self._technique: Technique | None = (
            None if technique.calibration_prompts else technique.build(prefill_chunk, None)
        )
        self._counters = EngineCounters()

    @property
    def needs_calibration(self) -> bool:
        return self._technique is None

    @torch.inference_mode()
    def calibrate(self, prompts: Sequence[Sequence[int]]) -> None:
        """Counts the true (dropless) choices over the prompts' prefill and freezes the technique on them.

        Calibration is offline: neither counted nor observed. A second one is refused, for shapes are frozen.
        """
        if not self.needs_calibration:
            raise EngineError(f"technique {self._parameters.technique} is complete; calibrate only while needed")
        torch.set_num_threads(self._threads)
        moe = self._model.config.moe
        if moe is None or not prompts:
            raise EngineError(f"calibration needs prompts, got {len(prompts)}; take some that no window asks")
        steps: list[list[DispatchPlan | None]] = []
        for prompt in prompts:
            self._check_prompt(prompt)
            self._cache.start(len(prompt))
            for _, chunk_T in self._chunks(prompt):
                steps.append(self._model.forward(chunk_T, self._cache, Dropless(), "prefill")[1])
        calibration = count_choices(steps, moe.n_experts, moe.top_k, len(prompts))
        self._technique = self._parameters.build(self._prefill_chunk, calibration)
        worst = max(calibration.tokens_per_expert, key=calibration.imbalance)
        logger.info(
            "calibrated %s on %d prompts; imbalance up to %.2f (layer %d)",
            self._parameters.technique,
            len(prompts),
            calibration.imbalance(worst),
            worst,
        )

    @torch.inference_mode()
    def run(self, request: Request, on_phase: PhaseListener) -> Completion:
        """Answers one request. Raises `EngineError` before any work on one that it cannot take.

        Stamps follow the token's value on the host, so on a device that runs ahead they wait for it. What a listener
        does at "request start" lies inside the request: keep it short. Detokenising the answer lies outside, except for
        the tail that is searched for stop strings.
        """
        technique = self._technique
        if technique is None:
            raise EngineError(f"technique {self._parameters.technique} is not calibrated; call calibrate first")
        # torch has one number for the whole process, and engines with other numbers share it.
        torch.set_num_threads(self._threads)
        self._check_prompt(request.prompt_ids)
        if request.kind == "loglikelihood":
            return self._loglikelihood(request, technique, on_phase)
        return self._generate(request, technique, on_phase)

    def reset(self) -> None:
        """The next request computes all of its prompt, whatever was asked before."""
        self._held.keep(0)

    def take_counters(self) -> EngineCounters:
        counters, self._counters = self._counters, EngineCounters()
        return counters

    def _generate(self, request: Request, technique: Technique, on_phase: PhaseListener) -> Completion:
        n_prompt = len(request.prompt_ids)
        check_sampling(request.sampling)
        if request.max_new_tokens < 1:
            raise EngineError(
                f"request {request.request_id}: max_new_tokens {request.max_new_tokens} must be at least 1"
            )
        if n_prompt + request.max_new_tokens > self.max_length:
            raise EngineError(
                f"request {request.request_id}: {n_prompt} prompt tokens + {request.max_new_tokens} new ones exceed "
                f"max_length {self.max_length}; shorten the prompt or ask for fewer"
            )
        generator = torch.Generator().manual_seed(request.sampling.seed)
        stops = StopStrings(request.stop, self.tokenizer.decode)
        token_ids: list[int] = []
        token_times_s: list[float] = []

        start_s = self._now_s()
        on_phase("request start", start_s)
        n_cached = self._begin(request, technique, n_prompt + request.max_new_tokens)
        for _, chunk_T in self._chunks(request.prompt_ids, n_cached):
            hidden_TH = self._step(chunk_T, technique, "prefill")
        while True:
            logits_L = self._model.logits(hidden_TH[-1:])[0]
            token_ids.append(choose_token(logits_L, request.sampling, generator))
            token_times_s.append(self._now_s())
            if len(token_ids) == 1:
                on_phase("prefill end", token_times_s[0])
            if (
                len(token_ids) == request.max_new_tokens
                or token_ids[-1] in self.tokenizer.eos_token_ids
                or stops.reached(token_ids)
            ):
                break
            hidden_TH = self._step(torch.tensor(token_ids[-1:]), technique, "decode")
        end_s = self._now_s()
        on_phase("request end", end_s)
        return Completion(
            request_id=request.request_id,
            sample_id=request.sample_id,
            n_prompt_tokens=n_prompt,
            n_cached_tokens=n_cached,
            start_s=start_s,
            prefill_end_s=token_times_s[0],
            end_s=end_s,
            token_ids=tuple(token_ids),
            token_times_s=tuple(token_times_s),
            text=stops.cut(self.tokenizer.decode(token_ids)),
        )

    def _loglikelihood(self, request: Request, technique: Technique, on_phase: PhaseListener) -> Completion:
        """Sum of log p(continuation token | all before it), as lm-eval defines it.

        The last continuation token is asked about but never read: P + C - 1 tokens go through the model.
        """
        self._check_ids(request.continuation_ids, "continuation")
        tokens = (*request.prompt_ids, *request.continuation_ids)[:-1]
        if len(tokens) > self.max_length:
            raise EngineError(
                f"request {request.request_id}: prompt and continuation, {len(tokens) + 1} tokens, exceed max_length "
                f"{self.max_length} + 1; cut the prompt from the left"
            )
        continuation_C = torch.tensor(request.continuation_ids, dtype=torch.int64)
        first = len(request.prompt_ids) - 1

        start_s = self._now_s()
        on_phase("request start", start_s)
        n_cached = self._begin(request, technique, len(tokens))
        total, is_greedy, n_seen = 0.0, True, 0
        for position, chunk_T in self._chunks(tokens, n_cached):
            hidden_TH = self._step(chunk_T, technique, "prefill")
            asking_TH = hidden_TH[max(first - position, 0) :]
            if asking_TH.shape[0] == 0:
                continue
            logits_TL = self._model.logits(asking_TH)
            target_T = continuation_C[n_seen : n_seen + asking_TH.shape[0]]
            log_probability_TL = torch.log_softmax(logits_TL, dim=-1)
            # In double, for in fp32 the sum would depend on where chunks end.
            total += float(log_probability_TL.gather(1, target_T[:, None]).double().sum())
            is_greedy = is_greedy and bool((logits_TL.argmax(dim=-1) == target_T).all())
            n_seen += asking_TH.shape[0]
        end_s = self._now_s()
        on_phase("prefill end", end_s)
        on_phase("request end", end_s)
        return Completion(
            request_id=request.request_id,
            sample_id=request.sample_id,
            n_prompt_tokens=len(tokens),
            n_cached_tokens=n_cached,
            start_s=start_s,
            prefill_end_s=end_s,
            end_s=end_s,
            loglikelihood=total,
            is_greedy=is_greedy,
        )

    def _begin(self, request: Request, technique: Technique, n_positions: int) -> int:
        """Readies the cache for a request; returns how many of its tokens are in there already.

        The last prompt token is always computed: its logits are wanted, and only keys and values are kept.
        """
        n_cached = 0
        if self._reuse_prefix:
            chunk = self._prefill_chunk if technique.couples_tokens else None
            n_cached = self._held.shared(request.prompt_ids[:-1], chunk)
        if n_cached and not turned_alike(self._model.config.rope, self._cache.n_positions, n_positions):
            logger.info(
                "request %s computes %d tokens again: rope turns up to %d positions otherwise than the %d before",
                request.request_id,
                n_cached,
                n_positions,
                self._cache.n_positions,
            )
            n_cached = 0
        self._held.keep(n_cached)
        self._cache.start(n_positions, n_cached)
        return n_cached

    def _chunks(self, token_ids: Sequence[int], start: int = 0) -> Iterator[tuple[int, Tensor]]:
        """Prefill chunks from `start` on, with the position of their first token."""
        tokens_T = torch.tensor(token_ids, dtype=torch.int64)
        for position in range(start, len(token_ids), self._prefill_chunk):
            yield position, tokens_T[position : position + self._prefill_chunk]

    def _step(self, tokens_T: Tensor, technique: Technique, phase: ChunkPhase) -> Tensor:
        hidden_TH, plans = self._model.forward(tokens_T, self._cache, technique, phase)
        self._held.add(tokens_T.tolist(), phase)
        for plan in plans:
            if plan is not None:
                self._counters = _added(self._counters, plan.counters())
        if self.observer is not None:
            self.observer.step(tokens_T.shape[0], self._cache.length, phase, plans)
        return hidden_TH

    def _check_prompt(self, prompt_ids: Sequence[int]) -> None:
        self._check_ids(prompt_ids, "prompt")
        if len(prompt_ids) > self.max_length:
            raise EngineError(
                f"prompt of {len(prompt_ids)} tokens exceeds max_length {self.max_length}; cut it from the left"
            )

    def _check_ids(self, token_ids: Sequence[int], what: str) -> None:
        if not token_ids:
            raise EngineError(f"{what} is empty; the model needs at least one token (the end token can stand for it)")
        rows = self._model.config.vocabulary_size
        outside = [token for token in token_ids if not 0 <= token < rows]
        if outside:
            raise EngineError(
                f"{what} holds token id {outside[0]}, outside 0..{rows - 1}; encode it with this tokenizer"
            )


class StopStrings:
    """Ends a generation at a string, and cuts the text before it as lm-eval does."""

    def __init__(self, stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._decode = decode
        # A token that shows is at least a byte long, so a stop string just completed lies in this many tokens; the rest
        # is slack for special tokens, which do not show. Searching a tail keeps the step's cost independent of length.
        self._tail = max((len(stop.encode()) for stop in self._stops), default=0) + 8

    def reached(self, token_ids: Sequence[int]) -> bool:
        if not self._stops:
            return False
        tail = self._decode(token_ids[-self._tail :])
        return any(stop in tail for stop in self._stops)

    def cut(self, text: str) -> str:
        for stop in self._stops:
            text = text.split(stop)[0]
        return text


def _added(a: EngineCounters, b: EngineCounters) -> EngineCounters:
    """Sums of two windows; hits and misses belong to caching techniques, which this engine does not run."""
    return EngineCounters(
        routed_pairs=a.routed_pairs + b.routed_pairs,
        dropped_pairs=a.dropped_pairs + b.dropped_pairs,
        computed_rows=a.computed_rows + b.computed_rows,
        padded_rows=a.padded_rows + b.padded_rows,
        expert_calls=a.expert_calls + b.expert_calls,
        bytes_moved=a.bytes_moved + b.bytes_moved,
    )
