"""Python's collector stands still for a while, and then goes on as it did."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from results.collection import no_collection


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """What the tests have imported and collected stays frozen."""
    gc.enable()
    yield
    gc.unfreeze()
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.mark.parametrize("stay", [False, True])
def test_nothing_is_collected_meanwhile_and_only_what_stays_is_left_out_later(stay: bool) -> None:
    gc.unfreeze()
    with no_collection(stay=stay):
        assert not gc.isenabled()
    assert gc.isenabled()
    assert (gc.get_freeze_count() > 0) is stay


def test_a_collector_that_stood_still_before_stays_so_after_an_error_too() -> None:
    gc.disable()
    with pytest.raises(ValueError, match="of this test"), no_collection(stay=False):
        raise ValueError("of this test")
    assert not gc.isenabled()
