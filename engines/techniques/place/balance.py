"""How many experts a GPU takes from NDP units so that both end together (001, Eq. 1 to 3), in closed form.

The GPU side fetches E_g experts and computes what the fetching does not hide; the NDP side computes the other
E_n = K - E_g, each in slices over N units, and sends activations in and out:

    T_w E_g + T_g E_g' + (S - 1) T_a N = (N + 1) T_a + T_n E_n

S = 1 is Eq. 1 (decode), S tokens are Eq. 2 (prefill). E_g' is frac(E_g) / N, and 1 / N where E_g is a multiple of N.
With E_g = n + f, each n has the f at which both sides meet, and f falls from one n to the next by the same step r:

    f_n = f_0 - n r    f_0 = [(N + 1) T_a + T_n K - (S - 1) T_a N] / A    r = (T_w + T_n) / A    A = T_w + T_n + T_g / N

Every n with 0 <= f_n < 1 balances. As E_g' falls where E_g passes a whole number, there may be several; the largest E_g
is taken, where both sides take least. Where none balances, the GPU takes nothing, or all K.

Plain numbers: floats, or fractions for exact results.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Times(NamedTuple):
    """Seconds. fetch: of an expert to the GPU (T_w). gpu, ndp: of computing an expert there, on the NDP units in slices
    at once (T_g, T_n). activation: of a token's activations over the link (T_a)."""

    fetch: float
    gpu: float
    ndp: float
    activation: float


class Balance(NamedTuple):
    """on_gpu: E_g. others: smaller ones that balance too, the largest first."""

    on_gpu: float
    others: tuple[float, ...] = ()


def balanced(times: Times, n_units: int, n_experts: int, n_tokens: int = 1) -> Balance:
    """E_g of Eq. 2; of Eq. 1 with one token. n_experts: K of a decode step, those activated in a prefill."""
    fetch, gpu, ndp, activation = times
    slope = fetch + ndp + gpu / n_units
    first = (n_units + 1) * activation + ndp * n_experts - (n_tokens - 1) * activation * n_units
    if first < 0 or slope == 0:
        return Balance(0)
    first, step = first / slope, (fetch + ndp) / slope
    if gpu == 0:  # no sawtooth
        return Balance(min(first, n_experts))
    lowest, highest = -1, n_experts  # E_g = 0 is the end of a tooth
    if step > 0:
        lowest, highest = max(lowest, math.ceil((first - 1) / step)), min(highest, math.floor(first / step))
    found = [n + f for n in range(highest, lowest - 1, -1) if _balances(n, f := first - n * step, n_units, n_experts)]
    if not found:
        return Balance(0 if first == 0 else n_experts)
    return Balance(found[0], tuple(found[1:]))


def _balances(n: int, f: float, n_units: int, n_experts: int) -> bool:
    """Whether n + f is an E_g: at multiples of N the sawtooth is as high as just below them, else as just above."""
    if n + f > n_experts:
        return False
    if f == 1:
        return (n + 1) % n_units == 0
    return n >= 0 and (0 < f < 1 or (f == 0 and n % n_units != 0))


def most_on_gpu(times: Times, n_units: int, n_experts: int) -> float:
    """E_max of Eq. 3: T_g E_max = (K - E_max) T_n + (1 + N) T_a, for experts that lie in the GPU's memory already."""
    both = times.gpu + times.ndp
    if both == 0:
        return n_experts
    return min((n_experts * times.ndp + (1 + n_units) * times.activation) / both, n_experts)
