"""fp16 numbers in float64, against numpy's own fp16: the same bits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from engines.coreml.halves import FEW, rounded, widened

HALVES = np.arange(2**16, dtype=np.uint16).view(np.float16)
with np.errstate(invalid="ignore"):
    EXACT = HALVES.astype(np.float64)
FINITE = np.sort(EXACT[np.isfinite(EXACT)])


@pytest.fixture(autouse=True)
def _infinity_is_no_news() -> Iterator[None]:
    with np.errstate(over="ignore"):
        yield


def bits(values: NDArray[np.float64]) -> NDArray[np.uint64]:
    return values.view(np.uint64)


def by_numpy(values: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(np.float16).astype(np.float64)


def test_fp16_is_widened_to_the_same_number() -> None:
    assert (bits(widened(HALVES)) == bits(EXACT)).all()


@pytest.mark.parametrize("largest", [30000.0, np.inf])
def test_all_ties_and_their_neighbours_round_as_numpys_fp16(largest: float) -> None:
    """Each number of fp16, the middle to the next one, and the float64 before and after both: smallest and signed
    zeros too. Up to 30000 they are rounded in place, with a larger one among them by numpy."""
    own = FINITE[np.abs(FINITE) < largest]
    middles = (own[1:] + own[:-1]) / 2
    exact = np.concatenate([own, middles, [0.0, -0.0]])
    asked = np.concatenate([exact, np.nextafter(exact, np.inf), np.nextafter(exact, -np.inf)])
    assert (bits(rounded(asked)) == bits(by_numpy(asked))).all()


@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan, 65519.99, 65520.0, -65520.0, 1e300, 5e-324])
def test_one_number_that_fp16_lacks_is_rounded_among_others(odd: float) -> None:
    asked = np.linspace(-3, 3, FEW)
    asked[FEW // 2] = odd
    np.testing.assert_array_equal(rounded(asked), by_numpy(asked))


def test_what_is_given_stays_as_it_was_and_may_lie_in_any_order() -> None:
    asked = np.linspace(-3, 3, 64 * 64).reshape(64, 64)
    before = asked.copy()
    assert (bits(rounded(asked.T).T.copy()) == bits(by_numpy(before))).all()
    assert (asked == before).all()


def test_fp32_and_few_numbers_are_rounded_too() -> None:
    few = np.array([1 / 3, -1e-7, 7e4])
    np.testing.assert_array_equal(rounded(few), by_numpy(few))
    single = np.linspace(0, 1, FEW, dtype=np.float32)
    np.testing.assert_array_equal(rounded(single), by_numpy(single.astype(np.float64)))
    assert rounded(single).dtype == np.float64
