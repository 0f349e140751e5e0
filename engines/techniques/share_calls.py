"""The calls of a share of a layer's experts: which segments of rows each has, on which unit, in which kind of call.

Legend: E experts, S segments, C calls, P pieces of a share, N units that share a call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

import numpy as np

from engines.calls import CallKind, Calls, Integers
from engines.techniques.base import Layout, Piece, Rows, Share


def kinds_of(share: Share, layout: Layout) -> tuple[CallKind, ...]:
    """Of the calls of each piece. A naive launch finds a graph of its size, whatever the size follows."""
    if share.exact:
        return tuple(_kind(piece, False, False) for piece in share.pieces)
    return tuple(_kind(piece, layout.static or piece.naive_launch, layout.skips_padding) for piece in share.pieces)


@cache
def _kind(piece: Piece, static: bool, skips: bool) -> CallKind:
    shape = piece.width, piece.naive_launch, piece.hidden
    return CallKind(piece.unit, static, *shape, skips, piece.overlaps, piece.once)


def calls_of(laid: Rows, share: Share, layout: Layout, first_row: int) -> Calls:
    """The calls of a share, whose rows begin at `first_row`."""
    kinds = kinds_of(share, layout)
    first_row_S = np.cumsum(laid.rows_S) - laid.rows_S
    if first_row:
        first_row_S += first_row
    n_calls, n_pieces = len(laid.starts_C), len(kinds)
    calls = Calls(
        laid.expert_S, laid.rows_S, laid.valid_S, first_row_S, laid.starts_C, kinds, None, laid.weight_loads_C
    )
    if n_pieces == 1:
        return calls
    if share.piece_E is not None:
        of_piece_C = share.piece_E[laid.expert_S[laid.starts_C]]
        return Calls(*_columns(calls), laid.starts_C, kinds, of_piece_C, laid.weight_loads_C)
    if share.dealt:
        in_turn_C = np.arange(n_calls) % n_pieces
        return Calls(*_columns(calls), laid.starts_C, kinds, in_turn_C, _loads_in_turn(laid, n_pieces))
    # Each piece has all the calls, one piece after another.
    places = _places(kinds)
    kind_C = np.array([places[kind] for kind in kinds], dtype=np.int64).repeat(n_calls)
    starts_PC = laid.starts_C + len(laid.expert_S) * np.arange(n_pieces)[:, None]
    loads_C = None if laid.weight_loads_C is None else np.tile(laid.weight_loads_C, n_pieces)
    expert_S, rows_S, valid_S, first_row_S = (np.concatenate([one_S] * n_pieces) for one_S in _columns(calls))
    return Calls(expert_S, rows_S, valid_S, first_row_S, starts_PC.reshape(-1), tuple(places), kind_C, loads_C)


def of_share(laid: Rows, share: Share) -> Rows:
    """Without the experts of other shares: a layout may have rows for experts that have no pairs here."""
    if share.experts_E is None:
        return laid
    is_own_S = share.experts_E[laid.expert_S]
    if is_own_S.all() or not len(laid.starts_C):
        return laid
    n_own_C = np.add.reduceat(is_own_S.astype(np.int64), laid.starts_C)
    is_called_C = n_own_C > 0
    loads_C = None if laid.weight_loads_C is None else np.minimum(laid.weight_loads_C, n_own_C)[is_called_C]
    n_own_C = n_own_C[is_called_C]
    segments = (laid.expert_S[is_own_S], laid.rows_S[is_own_S], laid.valid_S[is_own_S])
    return Rows(*segments, np.cumsum(n_own_C) - n_own_C, laid.kept_E, loads_C)


def cut(laid: Rows, share: Share, layout: Layout) -> Rows:
    """Every expert's rows as a call for each piece. Frozen shapes stay: an expert's blocks are calls already."""
    n = len(share.pieces)
    if not share.cut or layout.static:
        return laid
    ends_SN = laid.rows_S[:, None] * np.arange(1, n + 1) // n
    rows_S = np.diff(ends_SN, axis=1, prepend=0).reshape(-1)
    has_rows = rows_S > 0
    rows_S = rows_S[has_rows]
    return Rows(np.repeat(laid.expert_S, n)[has_rows], rows_S, rows_S, np.arange(len(rows_S)), laid.kept_E)


def _loads_in_turn(laid: Rows, n_units: int) -> Integers | None:
    """Of calls that units take in turn: a unit finds an expert's weights only where its own call before left them."""
    if laid.weight_loads_C is None:
        return None
    first_C = laid.expert_S[laid.starts_C]
    is_same_C = np.zeros(len(first_C), dtype=np.bool_)
    is_same_C[n_units:] = first_C[n_units:] == first_C[:-n_units]
    n_segments_C = np.diff(laid.starts_C, append=len(laid.expert_S))
    return np.where(is_same_C, laid.weight_loads_C, n_segments_C)


def _columns(calls: Calls) -> tuple[Integers, Integers, Integers, Integers]:
    return calls.expert_S, calls.rows_S, calls.valid_S, calls.first_row_S


def joined_calls(parts: Sequence[Calls]) -> Calls:
    """The calls of several shares or pieces, one after another."""
    places = _places(kind for part in parts for kind in part.kinds)
    expert_S, rows_S, valid_S, first_row_S = map(np.concatenate, zip(*map(_columns, parts), strict=True))
    n_before = np.cumsum([0, *(len(part.expert_S) for part in parts)])
    starts_C = np.concatenate([part.starts_C + n for part, n in zip(parts, n_before, strict=False)])
    kind_C = np.concatenate([_kinds_in(part, places) for part in parts])
    has_loads = any(part.weight_loads_C is not None for part in parts)
    loads_C = np.concatenate([part.loads_C for part in parts]) if has_loads else None
    return Calls(expert_S, rows_S, valid_S, first_row_S, starts_C, tuple(places), kind_C, loads_C)


def _places(kinds: Iterable[CallKind]) -> dict[CallKind, int]:
    """Of each among those that differ, in their order."""
    return {kind: place for place, kind in enumerate(dict.fromkeys(kinds))}


def _kinds_in(part: Calls, places: Mapping[CallKind, int]) -> Integers:
    number = np.array([places[kind] for kind in part.kinds], dtype=np.int64)
    return number[part.kind_C] if part.kind_C is not None else np.full(len(part), number[0])
