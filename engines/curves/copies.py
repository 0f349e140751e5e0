"""Copies of experts from their file into memory, as the thread of `engines.model.copier` makes them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engines.curves.pieces import CALLS, Emptied
from engines.curves.rounds import Called, Piece, Work
from engines.expert_memory import expert_layers
from engines.model.checkpoints import Checkpoint
from engines.model.copier import Copier, Part
from engines.model.made_experts import tensors_of

N_COPIED = (1, 4)
"""Experts that are asked for together."""


def copies(name: str, checkpoint: Checkpoint) -> Iterator[Work]:
    """checkpoint: with its experts in their file, and used by nobody else: pages that were copied leave the process."""
    experts = [one for layer in expert_layers(checkpoint.weights) if layer is not None for one in layer.experts]
    copier = Copier()
    into = [[torch.empty_like(tensor) for tensor in tensors_of(experts[0])] for _ in range(max(N_COPIED))]
    n_bytes = experts[0].n_bytes
    for n in N_COPIED:
        state = {"next": 0}

        def call(n: int = n, state: dict[str, int] = state) -> None:
            jobs = []
            for slot in range(n):
                expert = experts[(state["next"] + slot) % len(experts)]
                parts = [Part(*pair) for pair in zip(into[slot], tensors_of(expert), strict=True)]
                jobs.append(copier.start(parts))
            state["next"] += n
            for job in jobs:
                job.wait()

        amounts = {"copy.launches": float(n), "copy.moved_bytes": float(n * n_bytes), CALLS: 1.0}
        yield Called(
            Piece("copy", f"{name}; {n} of {n_bytes} bytes", amounts), call, before=Emptied.of(torch.device("cpu"))
        )
