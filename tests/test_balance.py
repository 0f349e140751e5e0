"""Eq. 1 to 3 of GPU-NDP (001) in closed form, against every E_g tried by itself, in exact arithmetic."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.techniques.place.balance import Times, balanced, most_on_gpu

EPSILON = Fraction(1, 10**9)


def exact(*values: object) -> Times:
    return Times(*(Fraction(value) for value in values))  # type: ignore[arg-type]


def unhidden(on_gpu: Fraction, n_units: int) -> Fraction:
    """E_g' as the source defines it."""
    whole = on_gpu.denominator == 1
    if whole and on_gpu % n_units == 0:
        return Fraction(1, n_units)
    return (on_gpu - on_gpu.numerator // on_gpu.denominator) / n_units


def excess(times: Times, n_units: int, n_experts: int, n_tokens: int, on_gpu: Fraction) -> Fraction:
    """The GPU's side of Eq. 2 less the NDP units'."""
    gpu = times.fetch * on_gpu + times.gpu * unhidden(on_gpu, n_units) + (n_tokens - 1) * times.activation * n_units
    return gpu - (n_units + 1) * times.activation - times.ndp * (n_experts - on_gpu)  # type: ignore[return-value]


def by_trying(times: Times, n_units: int, n_experts: int, n_tokens: int) -> list[Fraction]:
    """Every E_g in [0, K] that balances, largest first: whole numbers by themselves, and between two of them the zero
    of the straight line through two points."""

    def at(on_gpu: Fraction) -> Fraction:
        return excess(times, n_units, n_experts, n_tokens, on_gpu)

    found = [Fraction(n) for n in range(n_experts + 1) if at(Fraction(n)) == 0]
    for n in range(n_experts):
        low, high = n + Fraction(1, 4), n + Fraction(3, 4)
        rise = (at(high) - at(low)) / (high - low)
        if rise and n < (zero := low - at(low) / rise) < n + 1:
            found.append(zero)
    return sorted(found, reverse=True)


def check(times: Times, n_units: int, n_experts: int, n_tokens: int = 1) -> None:
    found, every = balanced(times, n_units, n_experts, n_tokens), by_trying(times, n_units, n_experts, n_tokens)
    assert 0 <= found.on_gpu <= n_experts
    if every:
        assert [found.on_gpu, *found.others] == every
    elif found.on_gpu == 0:  # even nothing on the GPU is too much for it
        assert excess(times, n_units, n_experts, n_tokens, EPSILON) > 0
    else:  # even all on the GPU is too little
        assert found.on_gpu == n_experts
        assert excess(times, n_units, n_experts, n_tokens, n_experts - EPSILON) < 0
    assert not found.others or every


positive = st.fractions(min_value=0, max_value=20, max_denominator=12)


@given(positive, positive, positive, positive, st.integers(1, 6), st.integers(1, 12), st.integers(1, 40))
def test_what_balances_is_what_trying_every_share_finds(
    fetch: Fraction, gpu: Fraction, ndp: Fraction, activation: Fraction, n_units: int, n_experts: int, n_tokens: int
) -> None:
    if fetch + gpu + ndp > 0:
        check(Times(fetch, gpu, ndp, activation), n_units, n_experts, n_tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("n_units", range(1, 7))
@pytest.mark.parametrize("gpu", ["1/3", "6", "40"])
def test_at_every_edge_of_the_sawtooth(n_units: int, gpu: str) -> None:
    """Times that balance just below, at and just above each whole E_g of 8 experts, by the right limit and by the left:
    T_w E_g + T_g E_g' = (N + 1) T_a + T_n (8 - E_g) with T_w = 2, T_n = 1."""
    for edge, off, tooth in product(range(9), (-1, 0, 1), (Fraction(0), Fraction(gpu) / n_units)):
        activation = (3 * edge - 8 + tooth + off * EPSILON) / (n_units + 1)
        if activation >= 0:
            check(Times(Fraction(2), Fraction(gpu), Fraction(1), activation), n_units, 8)  # type: ignore[arg-type]


def test_written_out() -> None:
    """T_w 2, T_g 6, T_n 1, T_a 0, N = 2, K = 8: 2 E + 6 E' = 8 - E, with E' = f / 2 that is 3 n + 6 f = 8. So n = 2
    gives f = 1/3, n = 1 gives 5/6; n = 0 gives 4/3, which is no fraction. Both balance: the NDP units compute 8 - 7/3
    experts or 8 - 11/6, and take less time at the larger."""
    assert balanced(exact(2, 6, 1, 0), 2, 8) == (Fraction(7, 3), (Fraction(11, 6),))


def test_a_multiple_of_the_units_counts_as_a_whole_tooth() -> None:
    """T_w 2, T_g 6, T_n 1, N = 2: at E = 2 the left side is 4 + 6 / 2 = 7; the right is 8 - 2 + 3 T_a, so T_a = 1/3
    balances there. 3 n + 6 f = 9 has f = 1 at n = 1, which is E = 2 itself, 1/2 at n = 2, and 0 at n = 3."""
    assert balanced(exact(2, 6, 1, "1/3"), 2, 8) == (3, (Fraction(5, 2), 2))


def test_a_long_prompt_leaves_the_gpu_nothing_and_slow_units_leave_it_all() -> None:
    """(S - 1) T_a N on the GPU's side grows with the prompt; units that take ever longer balance nowhere."""
    assert balanced(exact(2, 6, 1, 1), 2, 8, n_tokens=100) == (0, ())
    assert balanced(exact(1, 1, 1000, 10**6), 2, 8) == (8, ())
    assert balanced(exact(2, 6, 0, 0), 2, 8) == (0, ()), "units that take no time"


def test_eq_3_is_where_both_end_together() -> None:
    """K 8, T_g 1, T_n 3, T_a 1/2, N 6: E = (24 + 7/2) / 4 = 55/8, and 55/8 = (8 - 55/8) 3 + 7/2."""
    assert most_on_gpu(exact(100, 1, 3, "1/2"), 6, 8) == Fraction(55, 8)
    assert Fraction(55, 8) * 1 == (8 - Fraction(55, 8)) * 3 + Fraction(7, 2)
    assert most_on_gpu(exact(1, 0, 0, 0), 6, 8) == 8
    assert most_on_gpu(exact(1, 1, 1, 10**3), 6, 8) == 8, "no more than there are"


@given(positive, positive, positive, st.integers(1, 6), st.integers(1, 12))
def test_eq_3_holds_up_to_its_end_and_not_beyond(
    gpu: Fraction, ndp: Fraction, activation: Fraction, n_units: int, n_experts: int
) -> None:
    def fits(n: Fraction | int) -> bool:
        return gpu * n <= (n_experts - n) * ndp + (1 + n_units) * activation

    most = Fraction(most_on_gpu(Times(Fraction(1), gpu, ndp, activation), n_units, n_experts))  # type: ignore[arg-type]
    assert fits(most)
    assert most == n_experts or not fits(most + EPSILON)


def test_floats_are_near_the_fractions() -> None:
    """An RTX 5080 with 6 DIMMs, an expert of Qwen3-30B-A3B: 9.4 MB over 63 GB/s and over 6 x 102.4 GB/s."""
    fetch, ndp = Fraction(9437184, 63 * 10**9), Fraction(9437184 * 10, 6 * 1024 * 10**9)
    times = (fetch, Fraction(1, 10**5), ndp, Fraction(4096, 63 * 10**9))
    found = balanced(Times(*map(float, times)), 6, 8).on_gpu
    assert found == pytest.approx(float(balanced(Times(*times), 6, 8).on_gpu), rel=1e-12)  # type: ignore[arg-type]
