"""A timeline that repeats what it knows, against the one that runs every operation."""

from __future__ import annotations

import pytest

from devices.models.operation import TRANSFER, Operation
from devices.models.repeating import RepeatingTimeline
from devices.models.sheet import load_sheet
from devices.models.timeline import Timeline

SHEET = load_sheet("a100")
BYTES = 31.5e6
"""A millisecond on its link."""
COMPUTE = Operation("attention", "gpu", "attention", flops=312e12 * 0.4e-3)
FETCH = Operation("expert prefetch", "pcie", TRANSFER, moved_bytes=BYTES, aside=True)
FIRST = (COMPUTE, FETCH, FETCH)
BETWEEN = (COMPUTE,)


@pytest.mark.parametrize("n_between", [0, 1, 3])
def test_what_is_under_way_is_repeated_as_it_would_run(n_between: int) -> None:
    """Each layer waits for what the one before sent for, and sends for more: transfers overlap all that computes.
    Seconds, busy and overlapping ones, and bytes are those of a run."""
    gather = Operation("gather", "gpu", "gather_static", moved_bytes=1935e9 * 1e-4, after=(2 + n_between,))
    layer = (*n_between * (BETWEEN,), (gather, FETCH, COMPUTE))
    repeating, running = RepeatingTimeline(SHEET), Timeline(SHEET)
    for part in (FIRST, *30 * layer):
        repeating.run(part)
        running.run(part)
    assert not repeating.is_at_rest
    assert len(repeating._flows) < 12  # of 30 layers: what the others took was known
    assert repeating.now_s() == pytest.approx(running.now_s(), rel=1e-12)
    assert repeating.n_run == running.n_run
    assert repeating.seconds_by_operation() == pytest.approx(running.seconds_by_operation(), rel=1e-12)
    assert repeating.bytes_by_link() == running.bytes_by_link()
    found, known = repeating.take_use(), running.use(0.0)
    assert found.overlap_s == pytest.approx(known.overlap_s, rel=1e-12)
    for resource in ("gpu", "pcie"):
        assert found.of(resource) == pytest.approx(known.of(resource), rel=1e-9, abs=1e-12)
