"""Next-token distributions of one engine against those that another one gave: KL divergence, and the likeliest token.

The reference's log-probabilities are kept in files, fp32, for they are large: positions x vocabulary x 4 bytes.

Legend: A positions told at once, L vocabulary rows, C positions of a sample.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engines.answers import WIDER
from engines.base import ShowsLogProbabilities
from engines.errors import EngineError
from results.records import Divergence, Request

ROWS_AT_A_TIME = 64
"""Positions whose distributions are widened to doubles at once."""


def keep_log_probabilities(engine: ShowsLogProbabilities, request: Request, path: Path) -> None:
    """Writes [C, L] of a request to a file, row after row. Raises `OSError`, `EngineError`."""
    with path.open("wb") as file:
        engine.show_log_probabilities(request, lambda log_p_AL: file.write(log_p_AL.cpu().numpy().tobytes()))


def divergence(engine: ShowsLogProbabilities, request: Request, path: Path) -> Divergence:
    """Of an engine's distributions from those that `keep_log_probabilities` wrote. Raises `EngineError`."""
    n_positions = len(request.continuation_ids)
    kept_CL = np.memmap(path, dtype=np.float32, mode="r").reshape(n_positions, -1)
    kl_nats, n_same, at = 0.0, 0, 0

    def compare(log_p_AL: Tensor) -> None:
        nonlocal kl_nats, n_same, at
        if log_p_AL.shape[1] != kept_CL.shape[1]:
            raise EngineError(
                f"request {request.request_id}: {log_p_AL.shape[1]} vocabulary rows, the reference has "
                f"{kept_CL.shape[1]}; compare arms of one model"
            )
        for own_AL in torch.split(log_p_AL.cpu(), ROWS_AT_A_TIME):
            # A copy: torch takes no read-only memory.
            reference_AL = torch.from_numpy(np.array(kept_CL[at : at + len(own_AL)]))
            kl_nats += float(kl_divergence(reference_AL, own_AL).sum())
            n_same += int((reference_AL.argmax(-1) == own_AL.argmax(-1)).sum())
            at += len(own_AL)

    engine.show_log_probabilities(request, compare)
    if math.isnan(kl_nats):
        raise EngineError(f"request {request.request_id}: KL divergence is nan; {WIDER}")
    return Divergence(
        sample_id=request.sample_id,
        n_positions=n_positions,
        kl_nats=kl_nats / n_positions,
        same_top1=n_same / n_positions,
    )


def kl_divergence(reference_AL: Tensor, other_AL: Tensor) -> Tensor:
    """KL(reference || other) [A] in nats, of log-probabilities: sum_l p_l (log p_l - log q_l), in doubles.

    A token that the reference excludes (log p = -inf) adds nothing.
    """
    log_p_AL, log_q_AL = reference_AL.double(), other_AL.double()
    p_AL = log_p_AL.exp()
    return torch.where(p_AL > 0, p_AL * (log_p_AL - log_q_AL), 0.0).sum(-1)
