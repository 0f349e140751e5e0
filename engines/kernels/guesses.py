"""How layers of a decode step guess the next router's choice, as the kernels read it.

Legend: L layers, P layers that are guessed for, E experts, K experts per token, H hidden, W width of the estimator,
V its inner width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

from torch import Tensor

from engines.kernels.native import MatrixStruct, RouterStruct, RouterTable, address, described, serves


class _Estimator(ctypes.Structure):
    """`struct Estimator` of guess.h."""

    _fields_ = (
        *((name, MatrixStruct) for name in ("reduce", "widen", "narrow", "head")),
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


@dataclass(frozen=True)
class LayerEstimator:
    """A small network in a router's place, at one layer: see `engines.estimator`."""

    reduce_WH: Tensor
    widen_VW: Tensor
    narrow_WV: Tensor
    head_EW: Tensor
    position_W: Tensor
    norm_W: Tensor
    norm_bias_W: Tensor
    eps: float

    def tensors(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self) if field.name != "eps"]


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

    def tensors(self) -> list[Tensor]:
        own = [tensor for tensor in (self.norm_H, self.vectors_EH) if tensor is not None]
        return own + (self.estimator.tensors() if self.estimator is not None else [])


class GuessTable:
    """How every layer guesses, the same in all steps."""

    def __init__(self, guesses: Sequence[LayerGuess | None], are_executed: bool) -> None:
        """guesses: of every layer; each is for the next layer that guesses, the last for one that does not.
        are_executed: a layer executes what was guessed for it, and not its router's choice. `serves` must hold of all
        tensors."""
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
    assert serves(*own.tensors())
    matrices = own.reduce_WH, own.widen_VW, own.narrow_WV, own.head_EW
    vectors = own.position_W, own.norm_W, own.norm_bias_W
    return _Estimator(*map(described, matrices), *map(address, vectors), own.eps)


def _described(guess: LayerGuess | None, estimator: _Estimator | None) -> _Guess:
    if guess is None:
        return _Guess()
    assert serves(*guess.tensors())
    assert (guess.norm_H is None) == (guess.vectors_EH is None)
    return _Guess(
        guess.router.struct,
        address(guess.norm_H),
        address(guess.vectors_EH),
        None if estimator is None else ctypes.addressof(estimator),
        guess.eps,
    )
