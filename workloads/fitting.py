"""Which requests a model's context holds, and what becomes of the others: left out and counted, or an error.

A request is never cut: the prompt that is measured is the prompt that was meant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from results.records import Request
from workloads.base import Workload, WorkloadError, n_tokens

TooLong = Literal["fail", "skip"]
"""What a plan says of requests longer than the model's context."""


def most_prompt_tokens(requests: Sequence[Request]) -> list[int]:
    """Prompt tokens of each request; of one that follows another the most there may be, for answers may end early."""
    most: list[int] = []
    held: dict[str, int] = {}
    for request in requests:
        n = (held[request.follows] if request.follows else 0) + len(request.prompt_ids)
        most.append(n)
        held[request.request_id] = n + request.max_new_tokens
    return most


def fitting(
    requests: Sequence[Request], max_length: int, too_long: TooLong, name: str, what: str
) -> tuple[tuple[Request, ...], tuple[str, ...]]:
    """(requests that the model holds, notes on those left out). A request that follows one left out goes with it.

    name: the workload's. what: its requests in the plural, such as "turns". Raises `WorkloadError` where the plan says
    so.
    """
    # A conversation only grows: what follows a request too long is too long itself.
    n_tokens_of = {
        r.request_id: n - len(r.prompt_ids) + n_tokens(r)
        for r, n in zip(requests, most_prompt_tokens(requests), strict=True)
    }
    notes = told_too_long(n_tokens_of, max_length, too_long, name, what)
    return tuple(r for r in requests if n_tokens_of[r.request_id] <= max_length), notes


def told_too_long(
    n_tokens_of: Mapping[str, int], max_length: int, too_long: TooLong, name: str, what: str
) -> tuple[str, ...]:
    """The note on requests that the model does not hold, if any. Raises `WorkloadError` where the plan says so.

    n_tokens_of: tokens of prompt and answer, by request.
    """
    left_out = {request: n for request, n in n_tokens_of.items() if n > max_length}
    if not left_out:
        return ()
    if too_long == "fail":
        first, n_first = next(iter(left_out.items()))
        raise WorkloadError(
            f"{name}: {len(left_out)} of {len(n_tokens_of)} {what} are longer than the model's {max_length} tokens "
            f"({first}: {n_first} with its answer); ask for fewer tokens, use a model with a longer context, or leave "
            'them out with too_long = "skip"'
        )
    return (f"{len(left_out)} of {len(n_tokens_of)} {what} skipped: longer than {max_length} tokens",)


def reasons_for_none(workload: Workload, label: str, max_length: int) -> tuple[str, ...]:
    """Why a workload asks a model of that context nothing."""
    reasons = workload.notes or (f"no request fits the model's {max_length} tokens",)
    return tuple(f"{label}: {reason}" for reason in reasons)


def told_length(length: int, most: int, too_long: TooLong, name: str) -> tuple[str, ...]:
    """The note on a length that all samples share, if it is too long. Raises `WorkloadError` where the plan says so.

    most: tokens that a sample may have with this model.
    """
    if length <= most:
        return ()
    if too_long == "fail":
        raise WorkloadError(
            f"{name}: length {length} is more than the {most} tokens that a sample may have with this model; lower "
            'length, use a model with a longer context, or leave this length out with too_long = "skip"'
        )
    return (f"length {length} skipped: a sample may have {most} tokens with this model",)
