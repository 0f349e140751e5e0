"""How like the states that predictions are made from are to what they stand for, the next router's input (003 §3.3).

Held while tokens are computed and counted when a request has ended, so that no token's time holds it. Of each request
the first tokens, as many as little memory takes.

Legend: T tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

MOST_BYTES = 1 << 24
"""Of states held at once: 64 decoded tokens of 16 predicted layers of width 2048."""


class Cosines(NamedTuple):
    """Of so many tokens, the sum."""

    tokens: int
    total: float

    def plus(self, other: Cosines) -> Cosines:
        return Cosines(self.tokens + other.tokens, self.total + other.total)


class Likeness:
    """Of the requests of one engine."""

    def __init__(self) -> None:
        self._held: list[tuple[int, Tensor, Tensor]] = []
        self._held_rows: list[tuple[Sequence[int], Callable[[], Tensor]]] = []
        self._n_bytes = 0

    def hold(self, layer: int, shown_TH: Tensor, true_TH: Tensor) -> None:
        """Nothing writes to the tensors later."""
        n_bytes = 2 * shown_TH.numel() * shown_TH.element_size()
        if self._n_bytes + n_bytes <= MOST_BYTES:
            self._held.append((layer, shown_TH, true_TH))
            self._n_bytes += n_bytes

    def hold_rows(self, layers: Sequence[int], row_bytes: int, states_2PH: Callable[[], Tensor]) -> None:
        """Of one token in several layers: what was shown, a row of each, and what is true. states_2PH: asked when it is
        counted, for a view takes its time. row_bytes: of both."""
        n_rows = min(len(layers), (MOST_BYTES - self._n_bytes) // row_bytes)
        if n_rows:
            self._held_rows.append((layers[:n_rows], states_2PH))
            self._n_bytes += n_rows * row_bytes

    def take(self) -> dict[int, Cosines]:
        """Of each layer, since the last call."""
        found: dict[int, Cosines] = {}
        for layer, shown_TH, true_TH in [*self._held, *self._rows()]:
            own = Cosines(len(shown_TH), float(F.cosine_similarity(shown_TH.double(), true_TH.double(), dim=-1).sum()))
            found[layer] = found[layer].plus(own) if layer in found else own
        self._held.clear()
        self._held_rows.clear()
        self._n_bytes = 0
        return found

    def _rows(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        for layers, states_2PH in self._held_rows:
            shown_PH, true_PH = states_2PH()
            for row, layer in enumerate(layers):
                yield layer, shown_PH[row : row + 1], true_PH[row : row + 1]
