"""Charts: the Pareto front, thinning of traces, power derived from counters, and specifications that compile."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from results.energy import UnresolvedError
from results.records import PowerTrace
from results.report.charts import (
    MAX_POINTS,
    EnergyBar,
    TradePoint,
    drawn_range,
    energy_chart,
    label_sides,
    latency_energy_chart,
    pareto_front,
    point_labels,
    power_chart,
    shown_part,
    thinned,
)
from tests.run_builders import power_trace

coordinate = st.integers(0, 6).map(float)


@given(st.lists(st.tuples(coordinate, coordinate), max_size=12))
def test_front_is_every_point_that_no_other_dominates(points: list[tuple[float, float]]) -> None:
    def dominated(p: tuple[float, float]) -> bool:
        return any(q[0] <= p[0] and q[1] <= p[1] and q != p for q in points)

    assert pareto_front(points) == [not dominated(p) for p in points]


def point(letter: str, latency: float, energy: float) -> TradePoint:
    return TradePoint(letter, letter, latency, None, None, energy, None, None, False)


def test_points_that_would_overprint_share_one_label() -> None:
    points = [point("A", 0, 0), point("B", 10, 10), point("C", 0.5, 0.5), point("D", 0.5, 5), point("E", 10, 9.9)]
    assert point_labels(points) == ["A, C", "B, E", "", "D", ""]
    assert point_labels([point("A", 3, 0)]) == ["A"]


def test_labels_keep_their_distance_on_an_axis_that_wide_intervals_stretch() -> None:
    wide = TradePoint("A", "A", 1.0, -50.0, 50.0, 1.0, None, None, False)
    assert point_labels([wide, point("B", 2.0, 1.0), point("C", 40.0, 1.0)]) == ["A, B", "", "C"]


@pytest.mark.parametrize(
    ("at", "labels", "left"),
    [
        # Of 240 px, 29 lie between the first two: "B, C" on the right reaches over 33, and "A" on the left over 12.
        ([40.0, 52.0, 90.0], ["B, C", "A", "D"], [True, True, True]),
        ([0.0, 12.0, 90.0], ["A", "B", "C"], [False, True, True]),
        ([0.0, 12.0, 90.0], ["A, D", "B", "C"], [False, False, True]),
    ],
)
def test_labels_stand_on_the_left_unless_the_edge_or_another_label_is_there(
    at: list[float], labels: list[str], left: list[bool]
) -> None:
    points = [point(label[0], x, 1.0) for x, label in zip(at, labels, strict=True)]
    assert label_sides(points, labels, [0.0, 100.0]) == left


def test_an_axis_of_equal_values_still_has_a_width() -> None:
    assert drawn_range([1.0, 2.0]) == pytest.approx([0.9, 2.1])
    assert drawn_range([1.5, 1.5]) == pytest.approx([1.35, 1.65])
    assert drawn_range([0.0]) == [-1.0, 1.0]


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

    points = [
        TradePoint("A", "A dense", 1.0, 0.9, 1.1, 5.0, 4.0, 6.0, True),
        TradePoint("B", "B tiers", 2.0, None, None, 6.0, None, None, False),
    ]
    bars = [
        EnergyBar("A", "prefill", 1.0, 0.9, 1.1, "prefill 1"),
        EnergyBar("A", "decode", None, None, None, "missing"),
    ]
    trace = power_trace(1.0, 5.0, "nvml")
    charts = {
        "a scatter": latency_energy_chart(points, "ms", "J/token", "a scatter"),
        "bars": energy_chart(bars, "J/token", "bars"),
        "a trace": power_chart([trace, trace], [(0.0, 0.4)], [0.4, 0.5], 0.0, 1.0, "a trace"),
    }
    marks = {
        "a scatter": ("line", "rule", "symbol", "text"),
        "bars": ("rect", "rule", "text"),
        "a trace": ("rect", "line", "text", "rule"),
    }
    for description, spec in charts.items():
        svg = vl_convert.vegalite_to_svg(spec | {"width": 300})
        assert spec["description"] == description
        for mark in marks[description]:
            assert f"mark-{mark}" in svg, f"{description} has no {mark}"
