"""Charts: thinning of traces, power derived from counters, and specifications that compile."""

import re
from itertools import pairwise

import numpy as np
import pytest

from results.cumulative import UnresolvedError
from results.records import PowerTrace
from results.report.charts import (
    MAX_POINTS,
    EnergyBar,
    energy_chart,
    power_chart,
    shown_part,
    thinned,
)
from tests.run_builders import power_trace


def test_thinning_keeps_the_ends_and_a_single_peak() -> None:
    times_s = np.linspace(0.0, 100.0, 100_001)
    watts = np.ones_like(times_s)
    watts[77_777], watts[33_333] = 9.0, 0.1
    shown_s, shown_w = thinned(times_s, watts)
    assert len(shown_s) <= MAX_POINTS
    assert (shown_s[0], shown_s[-1]) == (0.0, 100.0)
    assert (shown_w.max(), shown_w.min()) == (9.0, 0.1)
    assert np.all(np.diff(shown_s) > 0)


def test_short_traces_are_not_thinned() -> None:
    times_s = np.linspace(0.0, 1.0, MAX_POINTS)
    assert thinned(times_s, times_s)[0] is times_s


def test_power_of_a_counter_is_its_difference_over_time() -> None:
    # 3 W for 2 s, then 7 W; the counter wraps at 10 J between the readings of 9 and 16 J.
    counter = PowerTrace(
        "rapl", "package", "counter", "counter", np.array([0.0, 2.0, 3.0, 4.0]), np.array([3.0, 9.0, 6.0, 3.0]),
        sample_interval_s=1.0, wrap_at_j=10.0,
    )  # fmt: skip
    times_s, watts = shown_part(counter, 0.0, 4.0)
    assert times_s.tolist() == [2.0, 3.0, 4.0]
    assert watts.tolist() == pytest.approx([3.0, 7.0, 7.0])


def test_a_trace_outside_the_shown_part_is_refused() -> None:
    with pytest.raises(UnresolvedError, match="no reading in the shown part"):
        shown_part(power_trace(1.0, 5.0, "nvml"), 2.0, 3.0)


def test_every_kind_of_chart_compiles_to_a_picture_with_its_marks() -> None:
    import vl_convert

    bars = [
        EnergyBar("A", "prefill", 1.0, 0.9, 1.1, "prefill 1"),
        EnergyBar("A", "decode", None, None, None, "missing"),
    ]
    trace = power_trace(1.0, 5.0, "nvml")
    charts = {
        "bars": energy_chart(bars, "J/token", "bars"),
        "a trace": power_chart([trace, trace], [(0.0, 0.4)], [0.4, 0.5], 0.0, 1.0, "a trace"),
    }
    marks = {
        "bars": ("rect", "rule", "text"),
        "a trace": ("rect", "line", "text", "rule"),
    }
    for description, spec in charts.items():
        svg = vl_convert.vegalite_to_svg(spec | {"width": 300})
        assert spec["description"] == description
        for mark in marks[description]:
            assert f"mark-{mark}" in svg, f"{description} has no {mark}"


def test_names_of_lines_that_end_at_the_same_power_do_not_lie_on_each_other() -> None:
    """ "timeline npu" stood on "timeline gpu" where both end at 0 W."""
    import vl_convert

    meters = ("nvml", "rapl", "zeus")
    traces = [power_trace(1.0, 5.0, meter) for meter in meters]
    spec = power_chart(traces, [(0.0, 0.4)], [0.4, 0.5], 0.0, 1.0, "three")
    svg = vl_convert.vegalite_to_svg(spec | {"width": 300})
    heights = {
        meter: {float(y) for y in re.findall(rf"translate\([\d.]+,([\d.-]+)\)[^>]*>{meter} ", svg)} for meter in meters
    }
    assert [len(own) for own in heights.values()] == [1, 1, 1], heights
    at = sorted(y for own in heights.values() for y in own)
    assert min(b - a for a, b in pairwise(at)) >= 11, "letters are 11 px high"
