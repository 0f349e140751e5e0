"""Candidates compared within rounds: what drifts between rounds is taken out, whichever candidates a round had.

    log x[r, k] = round[r] + candidate[k] + noise          r rounds, k candidates; a round may lack candidates

Least squares, with one noise for all candidates, for it is the meter's and the machine's. In logarithms a fluctuation
of 5 % is as large for a fast candidate as for a slow one. A reading far from the rest (another app woke up) weighs no
more than one at `MOST_DEVIATION` robust standard deviations (Huber's fit), and is counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MOST_DEVIATION = 3.5
"""Robust standard deviations. Of 10 000 normal readings 5 lie beyond it."""
FEWEST_TO_JUDGE = 8
"""Degrees of freedom from which on a reading can be told to lie far from the rest."""
NORMAL_MAD = 1.4826
"""Standard deviation of normal values over their median absolute deviation."""
MOST_STEPS, SETTLED = 20, 0.01
"""Of Huber's fit, which ends when no residual moves by more than this share of the noise."""
TINY = 1e-9
"""Readings of no noise at all differ by how they are rounded."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Fit:
    """Of one quantity. K candidates; R rounds."""

    effect_K: Array
    """Logarithms, 0 on average: only differences mean something."""
    spread_KK: Array
    """Covariance of the effects at a noise of 1."""
    noise: float
    """Relative standard deviation of one probe within its round."""
    dof: int
    drawn_in: int
    """Readings that lay far from the rest."""
    level: float
    """What is added to an effect for the logarithm of a candidate's value in a mean round."""
    level_error: float
    """Standard error of it, by how rounds differ; infinite of one round."""
    n_rounds: int

    def value_error(self, k: int) -> tuple[float, float]:
        """(standard error of the logarithm of a candidate's value, degrees of freedom by Satterthwaite): of its effect
        among the others, and of the level of the rounds, which drifts."""
        within, between = self.noise**2 * float(self.spread_KK[k, k]), self.level_error**2
        total = within + between
        if self.dof < 1 or self.n_rounds < 2 or total == 0.0:
            return float(np.sqrt(total)), float(min(self.dof, self.n_rounds - 1))
        return float(np.sqrt(total)), total**2 / (within**2 / self.dof + between**2 / (self.n_rounds - 1))

    def standard_errors_KK(self) -> Array:
        """Of every difference of two effects."""
        if not np.isfinite(self.noise):
            return np.where(np.eye(len(self.effect_K)) == 1, 0.0, np.inf)
        own = np.diag(self.spread_KK)
        variance = own[:, None] + own[None, :] - 2.0 * self.spread_KK
        errors_KK: Array = self.noise * np.sqrt(np.maximum(variance, 0.0))
        return errors_KK


def fit_rounds(values_RK: Array, spread_KK: Array) -> Fit:
    """Of values above 0, NaN where a round lacks a candidate; a round has one at least. spread_KK: of `spread`."""
    x_RK = np.log(values_RK)
    is_there_RK = ~np.isnan(x_RK)
    n = int(is_there_RK.sum())
    dof = n - is_there_RK.shape[0] - is_there_RK.shape[1] + 1
    effect_K, round_R = _solve(x_RK, is_there_RK, spread_KK)
    residual_RK = x_RK - effect_K - round_R[:, None]
    drawn_in = 0
    if dof >= FEWEST_TO_JUDGE:
        scale = NORMAL_MAD * float(np.median(np.abs(residual_RK[is_there_RK]))) * np.sqrt(n / dof) + TINY
        most = MOST_DEVIATION * scale
        # Huber's fit: one far reading pulls its round along at first, and less each time.
        for _ in range(MOST_STEPS):
            far = int((np.abs(residual_RK) > most).sum())
            if not far:
                break
            kept_RK = x_RK - residual_RK + np.clip(residual_RK, -most, most)
            effect_K, round_R = _solve(kept_RK, is_there_RK, spread_KK)
            moved_RK = x_RK - effect_K - round_R[:, None]
            is_still = bool(np.nanmax(np.abs(moved_RK - residual_RK)) < SETTLED * scale)
            residual_RK = moved_RK
            if is_still:
                break
        drawn_in = int((np.abs(residual_RK) > most).sum())
        residual_RK = np.clip(residual_RK, -most, most)
    # What is drawn in tells nothing of the candidate, so that the rest weighs less than its number.
    noise = float(np.sqrt(np.nansum(residual_RK**2) / dof)) * n / (n - drawn_in) if dof > 0 else np.inf
    n_rounds = len(round_R)
    level_error = float(round_R.std(ddof=1) / np.sqrt(n_rounds)) if n_rounds > 1 else np.inf
    return Fit(effect_K, spread_KK, noise, dof, drawn_in, float(round_R.mean()), level_error, n_rounds)


def spread(values_RK: Array) -> Array:
    """Covariance of the effects at a noise of 1: the pseudo-inverse of the design's Laplacian, rounds being its blocks.

    Raises ValueError where the rounds do not connect all candidates.
    """
    is_there_RK = ~np.isnan(values_RK)
    there_RK = is_there_RK.astype(np.float64)
    size_R = there_RK.sum(axis=1)
    laplacian_KK = np.diag(there_RK.sum(axis=0)) - there_RK.T @ (there_RK / size_R[:, None])
    k = laplacian_KK.shape[0]
    mean_KK = np.full((k, k), 1.0 / k)
    eigenvalues_K, vectors_KK = np.linalg.eigh(laplacian_KK + mean_KK)
    if eigenvalues_K[0] < 1e-9:
        raise ValueError("the rounds do not connect all candidates, so they cannot be compared")
    found: Array = (vectors_KK / eigenvalues_K) @ vectors_KK.T - mean_KK
    return found


def _solve(x_RK: Array, is_there_RK: NDArray[np.bool_], spread_KK: Array) -> tuple[Array, Array]:
    """(effects of candidates, levels of rounds)."""
    size_R = is_there_RK.sum(axis=1)
    filled_RK = np.where(is_there_RK, x_RK, 0.0)
    mean_R = filled_RK.sum(axis=1) / size_R
    within_RK = np.where(is_there_RK, x_RK - mean_R[:, None], 0.0)
    effect_K = spread_KK @ within_RK.sum(axis=0)
    round_R = mean_R - (is_there_RK @ effect_K) / size_R
    return effect_K, round_R
