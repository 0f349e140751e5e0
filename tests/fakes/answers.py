"""Completions as an engine would return them, with answers that a test chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from results.records import Completion, Request


def answer(requests: Sequence[Request], reply: Callable[[Request], float | str]) -> list[Completion]:
    """reply(request): a log-likelihood, or a text."""
    return [_completion(request, reply(request)) for request in requests]


def _completion(request: Request, reply: float | str) -> Completion:
    is_text = isinstance(reply, str)
    return Completion(
        request_id=request.request_id,
        sample_id=request.sample_id,
        n_prompt_tokens=len(request.prompt_ids) + len(request.continuation_ids),
        start_s=0.0,
        prefill_end_s=1.0,
        end_s=2.0,
        text=reply if is_text else "",
        loglikelihood=None if is_text else reply,
        is_greedy=None if is_text else False,
    )
