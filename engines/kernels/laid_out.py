"""What laid_out.h reads: what one token's experts compute where a technique makes more of its choice than a row for
each, and which of them lie at hand.

Legend: L layers, E experts, K experts per token, H hidden.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engines.decode_layout import DecodeLayout
from engines.kernels.library import library
from engines.kernels.tables import ExpertTable, int64s, serves


class _Layout(ctypes.Structure):
    """`struct DecodeLayout` of laid_out.h."""

    _fields_ = (
        ("rows_E", ctypes.c_void_p),
        ("group_E", ctypes.c_void_p),
        ("n_padding_calls", ctypes.c_int64),
        ("slices", ctypes.c_void_p),
        ("n_slices", ctypes.c_int64),
        ("of_hidden", ctypes.c_int64),
    )


@dataclass(frozen=True)
class LayoutTable:
    """What every layer computes for its choice, as the kernels read it."""

    layouts: ctypes.Array[_Layout]
    is_plain: bool
    """Whether all of them are."""
    kept: tuple[object, ...]
    """Owners of the memory that the layouts point into."""


def layout_table(
    layouts: Sequence[DecodeLayout | None], n_experts: int, slices: Sequence[Sequence[ExpertTable]]
) -> LayoutTable:
    """layouts: of every layer, None of a dense one. slices: of every layer, its experts' part in each slice."""
    described, kept = list[_Layout](), list[object]()
    for layout, tables in zip(layouts, slices, strict=True):
        if layout is None or layout.is_plain:
            described.append(_Layout())
            continue
        assert layout.n_experts in (None, n_experts)
        assert len(tables) == len(layout.slices)
        numbers = [None if of_E is None else int64s(of_E) for of_E in (layout.rows_E, layout.group_of_E)]
        matrices = (ctypes.c_void_p * len(tables))(*(ctypes.addressof(table.matrices) for table in tables))
        described.append(
            _Layout(
                *(None if array is None else ctypes.addressof(array) for array in numbers),
                layout.n_padding_calls,
                ctypes.addressof(matrices) if tables else None,
                len(tables),
                bool(layout.hidden),
            )
        )
        kept += [*numbers, matrices, *tables]
    return LayoutTable((_Layout * len(described))(*described), not kept, tuple(kept))


class _Held(ctypes.Structure):
    """`struct Held` of laid_out.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("at_hand_LE", "uses_LE", "last_use_LE", "n_plans")),
        ("n_experts", ctypes.c_int64),
        ("matrices_L", ctypes.c_void_p),
    )


class HeldTable:
    """Which experts lie where they are computed, and what was used when, as the kernels read and write it."""

    def __init__(
        self,
        at_hand_LE: NDArray[np.bool_],
        uses_LE: NDArray[np.int64],
        last_use_LE: NDArray[np.int64],
        n_plans: NDArray[np.int64],
        experts: Sequence[ExpertTable | None] = (),
    ) -> None:
        """See `engines.residency.Residency`. n_plans: one number. They are read and written where they lie. experts: of
        every layer, where they lie elsewhere than `DecoderLayer` says."""
        assert at_hand_LE.shape == uses_LE.shape == last_use_LE.shape
        arrays = at_hand_LE, uses_LE, last_use_LE, n_plans
        assert all(array.flags.c_contiguous for array in arrays)
        matrices = [None if table is None else ctypes.addressof(table.matrices) for table in experts]
        assert len(matrices) in (0, len(at_hand_LE))
        matrices_L = (ctypes.c_void_p * len(matrices))(*matrices)
        self._kept = *arrays, matrices_L, experts
        places = *(array.ctypes.data for array in arrays), at_hand_LE.shape[1]
        self._struct = _Held(*places, ctypes.addressof(matrices_L) if matrices else None)
        self.address = ctypes.addressof(self._struct)


def mix_laid_out(
    x_1H: Tensor,
    experts: ExpertTable,
    table: LayoutTable,
    layer: int,
    ids_1K: Tensor,
    weights_1K: Tensor,
    held: HeldTable | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Weighted sum of the chosen experts of one token with the calls of a layer's layout, and the rows of each
    expert's call, rows_E: 0 of those not called. `serves(x, weights)` must hold.

    held: None where all experts lie at hand. Else what is called is counted as used; None is given back, and nothing
    done, where one of them does not."""
    assert len(x_1H) == len(ids_1K) == len(weights_1K) == 1
    assert x_1H.shape[1] == experts.hidden
    assert serves(x_1H, weights_1K)
    assert ids_1K.is_contiguous()
    n_experts = len(experts.kept) // 3
    out_1H, rows_E = torch.empty_like(x_1H), torch.empty(n_experts, dtype=torch.int64)
    kernels = library()
    assert kernels is not None  # the table exists
    ran = kernels.joulebench_laid_out(
        experts.matrices,
        ctypes.byref(table.layouts[layer]),
        n_experts,
        ids_1K.shape[1],
        ids_1K.data_ptr(),
        x_1H.data_ptr(),
        weights_1K.data_ptr(),
        out_1H.data_ptr(),
        rows_E.data_ptr(),
        None if held is None else held.address,
        layer,
        torch.get_num_threads(),
    )
    return (out_1H, rows_E) if ran else None
