"""Readings of one window that came in several pieces: a link broke between them, or a long one was cut on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from results.records import PowerTrace


def joined(pieces: Sequence[PowerTrace]) -> PowerTrace:
    """One trace of pieces of the same component, in order of time; of what two of them hold, the first one's.

    Where nothing was read between two, there is a stretch without readings: whoever integrates it sees the gap.
    """
    last_s = -np.inf
    kept = []
    for piece in pieces:
        overlaps = len(piece.times_s) > 0 and piece.times_s[0] <= last_s
        # The clocks of two pieces differ by milliseconds: what both hold may seem to lie behind the end of the first.
        later = piece.times_s > last_s + (piece.sample_interval_s / 2 if overlaps else 0.0)
        kept.append((piece.times_s[later], piece.values[later]))
        last_s = max(last_s, float(piece.times_s.max(initial=-np.inf)))
    notes = dict.fromkeys(piece.note for piece in pieces if piece.note)
    left_out = dict.fromkeys(piece.left_out for piece in pieces if piece.left_out)
    return replace(
        pieces[-1],
        times_s=np.concatenate([times_s for times_s, _ in kept]),
        values=np.concatenate([values for _, values in kept]),
        update_period_s=max(piece.update_period_s for piece in pieces),
        resolution=min((piece.resolution for piece in pieces if piece.resolution > 0), default=0.0),
        gaps_s=tuple(gap for piece in pieces for gap in piece.gaps_s),
        note="; ".join(notes) or None,
        left_out="; ".join(left_out) or None,
    )


def joined_by_component(pieces: Sequence[Sequence[PowerTrace]]) -> list[PowerTrace]:
    """pieces: each with a trace a component, all in the same order."""
    return [joined(own) for own in zip(*pieces, strict=True)]
