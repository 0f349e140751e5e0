"""A generation that is told token by token, with what the model said of each where that is asked.

Legend: A positions asked about in one step, L vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from engines.answers import Generation, Limits
from engines.kernels.native import Largest
from engines.model.tokenizer import Tokenizer
from results.records import Request


class TokenSaid(NamedTuple):
    """top: the likeliest tokens at the same place with their log-probabilities, the likeliest first."""

    token_id: int
    log_probability: float
    top: tuple[tuple[int, float], ...]


class ToldGeneration(Generation):
    """`said` holds a row a token: those of the prompt but its first, where they are asked, and then the new ones."""

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        limits: Limits,
        on_token: Callable[[int], object],
        n_top: int | None = None,
        with_prompt: bool = False,
    ) -> None:
        """on_token: told each new token once it is on the host; what it raises ends the request. n_top: alternatives of
        each token in `said`; None: nothing is said. with_prompt: of the prompt's tokens too.

        Raises `EngineError` on a request that cannot be taken.
        """
        super().__init__(request, tokenizer, limits)
        self.said: list[TokenSaid] = []
        self._on_token, self._n_top = on_token, n_top
        if with_prompt and n_top is not None:
            self.first_asked = 0
        self._n_seen = self.first_asked
        """The position of the next row of logits."""

    def take(self, logits_AL: Tensor, largest: Largest | None = None) -> None:
        first, self._n_seen = self._n_seen, self._n_seen + len(logits_AL)
        if self._n_seen >= self.n_prefill:
            super().take(logits_AL, largest)
        if self._n_top is not None:
            self._say(logits_AL, self.tokens[first + 1 : self._n_seen + 1], self._n_top)

    @property
    def ended_by(self) -> Literal["stop", "length"]:
        """Of a complete one, in the protocol's words: an end token or a stop string, or the number that was asked."""
        is_end = self.token_ids[-1] in self._tokenizer.eos_token_ids and not self.request.ignore_end_tokens
        return "stop" if is_end or self._stops.reached(self.token_ids) else "length"

    def stamp(self, at_s: float) -> bool:
        if not self.token_ids:
            return False
        prefill_ends = super().stamp(at_s)
        self._on_token(self.token_ids[-1])
        return prefill_ends

    def _say(self, logits_AL: Tensor, token_ids: list[int], n_top: int) -> None:
        log_probability_AL = torch.log_softmax(logits_AL.float(), dim=-1)
        wanted_A = torch.tensor(token_ids, device=logits_AL.device)
        own = log_probability_AL.gather(1, wanted_A[:, None])[:, 0].tolist()
        values, ids = log_probability_AL.topk(min(n_top, logits_AL.shape[1]), dim=-1)
        for token, value, others, theirs in zip(token_ids, own, ids.tolist(), values.tolist(), strict=True):
            self.said.append(TokenSaid(token, value, tuple(zip(others, theirs, strict=True))))
