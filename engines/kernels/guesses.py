"""How layers of a decode step guess the next router's choice, as the kernels read it.

Legend: L layers, P layers that are guessed for, E experts, K experts per token, H hidden, W width of the estimator,
V its inner width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from engines.kernels.tables import RouterStruct, RouterTable, address, serves

PANEL_ROWS = 32
"""`kPanelRows` of guess.h."""


class _Panels(ctypes.Structure):
    """`struct Panels` of guess.h."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "columns")),
        ("is_fp16", ctypes.c_int32),
    )


class _Estimator(ctypes.Structure):
    """`struct Estimator` of guess.h."""

    _fields_ = (
        *((name, _Panels) for name in ("reduce", "widen", "narrow", "head")),
        *((name, ctypes.c_void_p) for name in ("position_W", "norm_W", "norm_bias_W")),
        ("eps", ctypes.c_float),
    )


class _Guess(ctypes.Structure):
    """`struct Guess` of guess.h."""

    _fields_ = (
        ("router", RouterStruct),
        *((name, ctypes.c_void_p) for name in ("norm_H", "vectors_EH", "estimator")),
        ("eps", ctypes.c_float),
    )


class _Guesses(ctypes.Structure):
    """`struct Guesses` of guess.h."""

    _fields_ = (
        ("of_L", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("executes", "n_chosen", "n_states")),
    )


class EstimatorMatrices:
    """Of a small network in a router's place (`engines.estimator`), as the kernels read them: in panels, one behind the
    other. In fp16 where that loses nothing, else in fp32."""

    def __init__(self, matrices: Sequence[Tensor]) -> None:
        """reduce_WH, widen_VW, narrow_WV, head_EW: in fp32, on the CPU."""
        halves = [matrix.half() for matrix in matrices]
        is_fp16 = all(torch.equal(half.float(), own) for half, own in zip(halves, matrices, strict=True))
        panels = [_panels(one) for one in (halves if is_fp16 else matrices)]
        self._values = torch.cat(panels)
        ends = accumulate(one.nbytes for one in panels)
        self.structs = [
            _Panels(self._values.data_ptr() + end - one.nbytes, *matrix.shape, is_fp16)
            for matrix, one, end in zip(matrices, panels, ends, strict=True)
        ]


def _panels(matrix: Tensor) -> Tensor:
    n_rows, n_columns = matrix.shape
    filled = F.pad(matrix, (0, 0, 0, -n_rows % PANEL_ROWS))
    return filled.view(-1, PANEL_ROWS, n_columns).transpose(1, 2).flatten()


@dataclass(frozen=True)
class LayerEstimator:
    """At one layer; its matrices are those of all."""

    matrices: EstimatorMatrices
    position_W: Tensor
    norm_W: Tensor
    norm_bias_W: Tensor
    eps: float

    @property
    def vectors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.position_W, self.norm_W, self.norm_bias_W


@dataclass(frozen=True)
class LayerGuess:
    """In one layer, for another. router: of that other layer. norm_H: before that router, an RMS norm without a bias;
    None: it is shown what this layer's own router reads. vectors_EH: what each of this layer's experts gives on
    average, where there is a norm. estimator: gives the logits in the router's place."""

    layer: int
    router: RouterTable
    norm_H: Tensor | None
    vectors_EH: Tensor | None
    estimator: LayerEstimator | None
    eps: float

    @property
    def is_read(self) -> bool:
        """Whether the kernels read all that it has."""
        vectors = (self.norm_H, self.vectors_EH, *(() if self.estimator is None else self.estimator.vectors))
        return serves(*(one for one in vectors if one is not None))


class GuessTable:
    """How every layer guesses, the same in all steps."""

    def __init__(self, guesses: Sequence[LayerGuess | None], are_executed: bool) -> None:
        """guesses: of every layer; each is for the next layer that guesses, the last for one that does not.
        are_executed: a layer executes what was guessed for it, and not its router's choice. `is_read` must hold of
        all."""
        makers = [(layer, guess) for layer, guess in enumerate(guesses) if guess is not None]
        assert makers
        assert all(guess.layer == following for (_, guess), (following, _) in pairwise(makers))
        self.layers = tuple(guess.layer for _, guess in makers)
        self.row_of = {layer: row for row, layer in enumerate(self.layers)}
        """Of a layer that is guessed for."""
        self.made_in = {layer: row for row, (layer, _) in enumerate(makers)}
        """Of a layer that guesses."""
        self.are_executed = are_executed
        self.top_k = makers[0][1].router.top_k
        assert all(guess.router.top_k == self.top_k for _, guess in makers)
        self.n_chosen = len(makers) * self.top_k
        """Experts of all layers that are guessed for."""
        self.hidden = int(makers[0][1].router.struct.hidden)
        estimators = [None if guess is None else _estimator(guess.estimator) for guess in guesses]
        self._guesses = (_Guess * len(guesses))(*map(_described, guesses, estimators))
        n_states = len(makers) * self.hidden
        self._struct = _Guesses(ctypes.addressof(self._guesses), are_executed, self.n_chosen, n_states)
        self.address = ctypes.addressof(self._struct)
        self._kept = (tuple(guesses), estimators)


def _estimator(own: LayerEstimator | None) -> _Estimator | None:
    if own is None:
        return None
    return _Estimator(*own.matrices.structs, *map(address, own.vectors), own.eps)


def _described(guess: LayerGuess | None, estimator: _Estimator | None) -> _Guess:
    if guess is None:
        return _Guess()
    assert guess.is_read
    assert (guess.norm_H is None) == (guess.vectors_EH is None)
    return _Guess(
        guess.router.struct,
        address(guess.norm_H),
        address(guess.vectors_EH),
        None if estimator is None else ctypes.addressof(estimator),
        guess.eps,
    )
