"""How like the states that predictions are made from are to what they stand for, the next router's input (003 §3.3).

Held while tokens are computed and counted when a request has ended, so that no token's time holds it. Of each request
the first tokens, as many as little memory takes.

Legend: T tokens, P layers that are predicted, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_BYTES = 1 << 24
"""Of states held at once: 64 decoded tokens of 16 predicted layers of width 2048."""
PIECE_FLOATS = 1 << 18


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
        self._held_rows: list[tuple[Sequence[int], int, int, int, int]] = []
        self._pieces: list[Tensor] = []
        """Of memory for rows, which stay for the next request."""
        self._piece, self._at, self._n_left, self._address = -1, 0, 0, 0
        """Where the next ones go: how many bytes into which piece, how many are left there, and their address."""
        self._n_bytes = 0

    def hold(self, layer: int, shown_TH: Tensor, true_TH: Tensor) -> None:
        """Nothing writes to the tensors later."""
        n_bytes = 2 * shown_TH.numel() * shown_TH.element_size()
        if self._n_bytes + n_bytes <= MOST_BYTES:
            self._held.append((layer, shown_TH, true_TH))
            self._n_bytes += n_bytes

    def rows(self, layers: Sequence[int], hidden: int) -> int:
        """The address where one token writes, for several layers, what was shown and then what is true, [2, P, H]. It
        is held of as many layers as memory is left for."""
        n_bytes = 8 * len(layers) * hidden
        if n_bytes > self._n_left:
            self._begin_piece(n_bytes)
        address, at = self._address, self._at
        if self._n_bytes + n_bytes > MOST_BYTES:
            layers = layers[: (MOST_BYTES - self._n_bytes) // (8 * hidden)]
        self._held_rows.append((layers, hidden, self._piece, at, n_bytes))
        if layers:
            self._n_bytes += 8 * len(layers) * hidden
            self._at = at + n_bytes
            self._address = address + n_bytes
            self._n_left -= n_bytes
        return address

    def drop_rows(self) -> None:
        """Those of the last call, for they were not written: the token was broken off."""
        self._held_rows.pop()

    def _begin_piece(self, n_bytes: int) -> None:
        self._piece += 1
        while self._piece < len(self._pieces) and self._pieces[self._piece].nbytes < n_bytes:
            self._piece += 1
        if self._piece == len(self._pieces):
            self._pieces.append(torch.empty(max(n_bytes // 4, PIECE_FLOATS)))
        piece = self._pieces[self._piece]
        self._at, self._n_left, self._address = 0, piece.nbytes, piece.data_ptr()

    def take(self) -> dict[int, Cosines]:
        """Of each layer, since the last call."""
        found: dict[int, Cosines] = {}
        for layer, shown_TH, true_TH in [*self._held, *self._rows()]:
            own = Cosines(len(shown_TH), float(F.cosine_similarity(shown_TH.double(), true_TH.double(), dim=-1).sum()))
            found[layer] = found[layer].plus(own) if layer in found else own
        self._held.clear()
        self._held_rows.clear()
        self._n_bytes = 0
        self._piece, self._n_left = -1, 0
        return found

    def _rows(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        for layers, hidden, piece, at, n_bytes in self._held_rows:
            shown_PH, true_PH = self._pieces[piece][at // 4 : (at + n_bytes) // 4].view(2, -1, hidden)
            for row, layer in enumerate(layers):
                yield layer, shown_PH[row : row + 1], true_PH[row : row + 1]
