"""An answer in the making: which tokens a request has read, which logits it asks for, and what it makes of them.

The engine reads tokens for an answer and hands it the logits of the positions it asks about, from `first_asked` on. A
generation asks about the end of its prompt and then about each token that it chose; a log-likelihood asks about every
position whose next token is one of its continuation's.

Legend: A positions asked about in one step, L vocabulary rows, C tokens of a continuation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.errors import EngineError
from engines.kernels.native import Largest
from engines.model.tokenizer import Tokenizer
from engines.sampling import check_sampling, choose_token
from results.records import Completion, Request

WIDER = "use wider weights or arithmetic, or fetch the model again"
"""Where nothing is known of how an engine holds its weights."""


@dataclass(frozen=True)
class Limits:
    """What a model takes: positions of a sequence, and ids below the embedding's rows. remedy: what may help where its
    logits are no numbers."""

    max_length: int
    vocabulary_rows: int
    remedy: str = WIDER


def check_prompt(prompt_ids: Sequence[int], limits: Limits, whose: str) -> None:
    """Raises `EngineError` beginning with `whose`, such as "request 7: prompt"."""
    check_ids(prompt_ids, limits, whose)
    if len(prompt_ids) > limits.max_length:
        raise EngineError(
            f"{whose} of {len(prompt_ids)} tokens exceeds max_length {limits.max_length}; cut it from the left"
        )


def check_ids(token_ids: Sequence[int], limits: Limits, whose: str) -> None:
    if not token_ids:
        raise EngineError(f"{whose} is empty; the model needs at least one token (the end token can stand for it)")
    outside = next((token for token in token_ids if not 0 <= token < limits.vocabulary_rows), None)
    if outside is not None:
        raise EngineError(
            f"{whose} holds token id {outside}, outside 0..{limits.vocabulary_rows - 1}; encode it with this tokenizer"
        )


def check_stops(stops: Sequence[str], whose: str) -> None:
    """Raises `EngineError` on a string that no text of a model can hold."""
    for stop in stops:
        try:
            stop.encode()
        except UnicodeEncodeError as error:
            raise EngineError(
                f"{whose}: stop string {stop!r:.80} holds half a character (a lone surrogate); give it whole"
            ) from error


class Generation:
    """Tokens chosen one by one until an end token (unless the request ignores it), a stop string or the asked number.

    `take` chooses, `stamp` notes when the choice was on the host, and only then is it searched for stop strings: what
    that takes belongs to the next token.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, limits: Limits) -> None:
        """Raises `EngineError` on a request that cannot be taken."""
        name, n_prompt = f"request {request.request_id}", len(request.prompt_ids)
        check_prompt(request.prompt_ids, limits, f"{name}: prompt")
        check_sampling(request.sampling, name)
        if request.max_new_tokens < 1:
            raise EngineError(f"{name}: max_new_tokens {request.max_new_tokens} must be at least 1")
        if n_prompt + request.max_new_tokens > limits.max_length:
            raise EngineError(
                f"{name}: {n_prompt} prompt tokens + {request.max_new_tokens} new ones exceed "
                f"max_length {limits.max_length}; shorten the prompt or ask for fewer"
            )
        check_stops(request.stop, name)
        self.request = request
        self.tokens = list(request.prompt_ids)
        """What is read: the prompt, then what was chosen."""
        self.token_ids: list[int] = []
        self.n_prefill = n_prompt
        self.n_positions = n_prompt + request.max_new_tokens
        self.first_asked = n_prompt - 1
        self.is_complete = False
        self.end_s: float | None = None
        self._tokenizer = tokenizer
        self._generator = torch.Generator().manual_seed(request.sampling.seed)
        self._stops = StopStrings(request.stop, tokenizer.spell)
        self._times_s: list[float] = []
        self._remedy = limits.remedy

    def take(self, logits_AL: Tensor, largest: Largest | None = None) -> None:
        """Chooses the next token. largest: of the last row's logits, where it is known. Raises `EngineError` where they
        are no numbers to choose by."""
        try:
            token = choose_token(logits_AL, self.request.sampling, self._generator, largest)
        except EngineError as error:
            n = len(self.token_ids) + 1
            raise EngineError(f"request {self.request.request_id}, token {n}: {error}: {self._remedy}") from error
        self.token_ids.append(token)
        self.tokens.append(token)

    def stamp(self, at_s: float) -> bool:
        """What was taken is on the host. True when that ends the prefill."""
        self._times_s.append(at_s)
        self.is_complete = (
            len(self.token_ids) == self.request.max_new_tokens
            or (self.token_ids[-1] in self._tokenizer.eos_token_ids and not self.request.ignore_end_tokens)
            or self._stops.reached(self.token_ids)
        )
        return len(self._times_s) == 1

    def completion(self, start_s: float, n_cached: int) -> Completion:
        assert self.end_s is not None  # only complete answers are told
        return Completion(
            request_id=self.request.request_id,
            sample_id=self.request.sample_id,
            n_prompt_tokens=self.n_prefill,
            n_cached_tokens=n_cached,
            start_s=start_s,
            prefill_end_s=self._times_s[0],
            end_s=self.end_s,
            token_ids=tuple(self.token_ids),
            token_times_s=tuple(self._times_s),
            text=self._stops.cut(self._tokenizer.decode(self.token_ids)),
        )


class Loglikelihood:
    """Sum of log p(continuation token | all before it), as lm-eval defines it.

    The last continuation token is asked about but never read: P + C - 1 tokens go through the model, all of them
    prefill.
    """

    def __init__(self, request: Request, limits: Limits, listener: Callable[[Tensor], object] | None = None) -> None:
        """listener: told the log-probabilities [A, L] of all tokens at the positions asked about, in their order.

        Raises `EngineError` on a request that cannot be taken.
        """
        name = f"request {request.request_id}"
        check_prompt(request.prompt_ids, limits, f"{name}: prompt")
        check_ids(request.continuation_ids, limits, f"{name}: continuation")
        self.request = request
        self.tokens = [*request.prompt_ids, *request.continuation_ids][:-1]
        if len(self.tokens) > limits.max_length:
            raise EngineError(
                f"{name}: prompt and continuation, {len(self.tokens) + 1} tokens, exceed max_length "
                f"{limits.max_length} + 1; cut the prompt from the left"
            )
        self.n_prefill = self.n_positions = len(self.tokens)
        self.first_asked = len(request.prompt_ids) - 1
        self.is_complete = False
        self.end_s: float | None = None
        self._continuation_C = torch.tensor(request.continuation_ids, dtype=torch.int64)
        self._listener = listener
        self._n_seen = 0
        self._total = 0.0
        self._is_greedy = True
        self._remedy = limits.remedy

    def take(self, logits_AL: Tensor, largest: Largest | None = None) -> None:
        """Adds the next continuation tokens. Raises `EngineError` where their logits are no numbers."""
        target_A = self._continuation_C[self._n_seen : self._n_seen + len(logits_AL)].to(logits_AL.device)
        log_probability_AL = torch.log_softmax(logits_AL, dim=-1)
        if self._listener is not None:
            self._listener(log_probability_AL)
        # In double, for in fp32 the sum would depend on where chunks end; and on the host, for MPS has no doubles.
        self._total += float(log_probability_AL.gather(1, target_A[:, None]).cpu().double().sum())
        self._is_greedy = self._is_greedy and bool((logits_AL.argmax(dim=-1) == target_A).all())
        self._n_seen += len(logits_AL)
        if math.isnan(self._total):
            raise EngineError(
                f"request {self.request.request_id}, continuation token {self._n_seen} or before: log-likelihood is "
                f"nan; activations overflow, or weights are damaged: {self._remedy}"
            )

    def stamp(self, at_s: float) -> bool:
        """What was taken is on the host. True when that ends the prefill, and with it the request."""
        self.is_complete = self._n_seen == len(self._continuation_C)
        if self.is_complete:
            self.end_s = at_s
        return self.is_complete

    def completion(self, start_s: float, n_cached: int) -> Completion:
        assert self.end_s is not None  # only complete answers are told
        return Completion(
            request_id=self.request.request_id,
            sample_id=self.request.sample_id,
            n_prompt_tokens=self.n_prefill,
            n_cached_tokens=n_cached,
            start_s=start_s,
            prefill_end_s=self.end_s,
            end_s=self.end_s,
            loglikelihood=self._total,
            is_greedy=self._is_greedy,
        )


Answer = Generation | Loglikelihood


def answer_to(request: Request, tokenizer: Tokenizer, limits: Limits) -> Answer:
    """Raises `EngineError`, naming the request, on one that cannot be taken."""
    if request.kind == "loglikelihood":
        return Loglikelihood(request, limits)
    return Generation(request, tokenizer, limits)


class StopStrings:
    """Ends a generation at a string, and cuts the text before it as lm-eval does."""

    def __init__(self, stops: Sequence[str], spell: Callable[[Sequence[int]], str]) -> None:
        """spell: the text of tokens with special ones, which may be what a string names (`<|im_end|>`)."""
        self._stops = tuple(stop for stop in stops if stop)
        self._spell = spell
        # A token is at least a byte long, so a stop string just completed lies in this many tokens; the rest is slack
        # for tokens that show nothing. Searching a tail keeps the step's cost independent of length.
        self._tail = max((len(stop.encode()) for stop in self._stops), default=0) + 8

    def reached(self, token_ids: Sequence[int]) -> bool:
        if not self._stops:
            return False
        tail = self._spell(token_ids[-self._tail :])
        return any(stop in tail for stop in self._stops)

    def cut(self, text: str) -> str:
        for stop in self._stops:
            text = text.split(stop)[0]
        return text


def packed(n_tokens: Sequence[int], n_rows: int) -> list[list[tuple[int, int]]]:
    """Sequences of so many tokens cut into steps of n_rows, in order: each step as (which sequence, how many tokens).

    Only the last step may be short. A sequence's tail and the next one's head share a step, so that a batch of short
    prompts fills what one prompt would.
    """
    steps: list[list[tuple[int, int]]] = [[]]
    room = n_rows
    for index, left in enumerate(n_tokens):
        while left:
            if not room:
                steps.append([])
                room = n_rows
            n = min(left, room)
            steps[-1].append((index, n))
            left, room = left - n, room - n
    return steps if steps[0] else []
