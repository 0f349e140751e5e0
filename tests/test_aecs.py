"""The search of source 002 over phones whose speed and power we make up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.models.core_clusters import CoreCluster, CoreKind, Selection
from harness.tuning.aecs import AECS, PRESETS, Probe, heuristic_energy_j, search, search_all
from harness.tuning.power_heuristic import PowerHeuristic, ThreadHeuristic
from harness.tuning.race import Reading
from harness.tuning.selections import Tree, all_selections, candidates

MATE_40_PRO = [
    CoreCluster("A77 3.13", 1, "prime", 3.13),
    CoreCluster("A77 2.54", 3, "performance", 2.54),
    CoreCluster("A55 2.05", 4, "efficiency", 2.05),
]
MEASURED_ALONE = PRESETS["aecs-measured"]


def played(readings: dict[Selection, tuple[float, float]]) -> tuple[list[Selection], Probe]:
    """A probe that answers from a table, and what it was asked."""
    asked: list[Selection] = []

    def probe(selection: Selection) -> Reading:
        asked.append(selection)
        return Reading(*readings[selection])

    return asked, probe


# Speed saturates with the third core, as in Figure 5; two middle cores draw least at 0.95 of the speed.
FIGURE_5: dict[Selection, tuple[float, float]] = {
    (1, 0, 0): (15.0, 5.5),
    (1, 1, 0): (20.0, 7.0),
    (1, 2, 0): (21.8, 8.0),
    (1, 3, 0): (21.7, 8.7),
    (0, 3, 0): (21.0, 7.5),
    (0, 2, 0): (20.6, 6.2),
    (0, 1, 0): (12.0, 4.0),
}


def test_the_search_walks_figures_5_and_6() -> None:
    asked, probe = played(FIGURE_5)
    found = search(MATE_40_PRO, probe, MEASURED_ALONE)
    assert found.fastest == (1, 2, 0)
    assert asked[:4] == [(1, 0, 0), (1, 1, 0), (1, 2, 0), (1, 3, 0)]
    assert asked[4:] == list(candidates(MATE_40_PRO, (1, 2, 0)))
    assert found.floor_tokens_per_s == pytest.approx(0.92 * 21.8)
    # 6.2 / 20.6 = 0.301 J; {1 big} has 5.5 / 15 and {1 middle} 4 / 12, both too slow.
    assert found.chosen == (0, 2, 0)
    assert {each.selection for each in found.allowed} == {(1, 2, 0), (0, 3, 0), (0, 2, 0)}
    assert found.n_probes == 10
    assert len(found.distinct) == 7


def test_line_8_keeps_the_fast_ones() -> None:
    """As printed it would throw out what is fast enough, and take {1 middle} at 0.55 of the speed."""
    _, probe = played(FIGURE_5)
    found = search(MATE_40_PRO, probe, MEASURED_ALONE)
    assert FIGURE_5[found.chosen][0] >= 0.92 * 21.8
    kept_as_printed = [s for s in candidates(MATE_40_PRO, (1, 2, 0)) if FIGURE_5[s][0] < 0.92 * 21.8]
    assert found.chosen not in kept_as_printed


def test_the_heuristic_power_is_equation_9() -> None:
    """{2 middle} of the Mate 40 Pro by hand, s = 2.54 / 3.13."""
    s2 = (2.54 / 3.13) ** 2
    big = 1.0 * (0 + 1 * 0.7) * 3.13**2
    middle = 0.8 * (2 + 1 * 0.7) * 2.54**2
    small = 0.4 * (0 + 4 * 0.7) * 2.05**2
    by_hand = 0.2 * (big + middle + small) * s2 + 1.0
    assert PowerHeuristic().watts(MATE_40_PRO, (0, 2, 0)) == pytest.approx(by_hand)


def test_capacity_stands_before_frequency_where_every_cluster_has_one() -> None:
    clusters = [CoreCluster("a", 1, "prime", 3.0, 1024), CoreCluster("b", 1, "performance", 2.0, 512)]
    alone = PowerHeuristic(w_per_ghz2=1.0, static_w=0.0, idle_factor=0.0).watts(clusters, (0, 1))
    assert alone == pytest.approx(0.8 * (2.0 * 0.5) ** 2)
    lacking = [clusters[0], replace(clusters[1], capacity=None)]
    by_clock = PowerHeuristic(w_per_ghz2=1.0, static_w=0.0, idle_factor=0.0).watts(lacking, (0, 1))
    assert by_clock == pytest.approx(0.8 * (2.0 * 2.0 / 3.0) ** 2)


def test_alpha_weighs_the_two_energies() -> None:
    reading, selection = Reading(20.0, 6.0), (0, 2, 0)
    h_w = PowerHeuristic().watts(MATE_40_PRO, selection)
    assert heuristic_energy_j(MATE_40_PRO, selection, reading, AECS) == pytest.approx(0.75 * 0.3 + 0.25 * h_w / 20.0)
    assert heuristic_energy_j(MATE_40_PRO, selection, reading, MEASURED_ALONE) == pytest.approx(0.3)


def test_without_a_meter_alpha_must_be_1() -> None:
    with pytest.raises(ValueError, match="use alpha 1"):
        heuristic_energy_j(MATE_40_PRO, (0, 2, 0), Reading(20.0, None), AECS)


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_a_probe_that_did_not_decode_is_refused(speed: float) -> None:
    with pytest.raises(ValueError, match="it must decode"):
        heuristic_energy_j(MATE_40_PRO, (0, 2, 0), Reading(speed, 5.0), AECS)


def test_all_bad_parameters_are_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"slowdown is 1\.5.*alpha is -1.*first_cores is 0") as raised:
        replace(AECS, slowdown=1.5, alpha=-1.0, first_cores=0)
    assert "least_gain" not in str(raised.value)


def test_without_clocks_there_is_no_heuristic() -> None:
    with pytest.raises(ValueError, match="its highest clock is not known"):
        PowerHeuristic().watts([CoreCluster("A14", 2, "prime")], (1,))


def test_an_iphone_is_tuned_by_threads_without_a_meter() -> None:
    """Two threads are fastest; one is within 8 % and draws less by the heuristic: (1 + 1.8) / 30 < (1 + 3.6) / 31."""
    speeds = {1: 30.0, 2: 31.0, 3: 30.5, 4: 28.0}
    found = search([CoreCluster("thread", 6, "prime")], lambda s: Reading(speeds[s[0]], None), PRESETS["ios"])
    assert found.fastest == (2,)
    assert found.chosen == (1,)
    assert found.probed[1].energy_j == pytest.approx(ThreadHeuristic().watts([], (1,)) / 30.0)


def test_the_authors_code_probes_by_estimated_power_and_ends_early() -> None:
    """Two big cores first; the least estimated power of the tree first; {1 middle} is slow, {2 middle} ends it."""
    readings = FIGURE_5 | {(0, 2, 0): (21.7, 6.2)}
    asked, probe = played(readings)
    found = search(MATE_40_PRO, probe, PRESETS["aecs-code"])
    assert asked[0] == (1, 1, 0)
    estimated = [PowerHeuristic().watts(MATE_40_PRO, each.selection) for each in found.probed]
    assert estimated == sorted(estimated)
    assert [each.selection for each in found.probed] == [(0, 1, 0), (0, 2, 0)]
    assert found.floor_tokens_per_s == pytest.approx(0.92 * (21.8 + 21.7) / 2)
    assert found.chosen == (0, 2, 0)


def test_where_every_candidate_proves_too_slow_the_fastest_stays() -> None:
    """Probed again, the fastest is 10 % slower than it was in stage 1."""
    asked: list[Selection] = []

    def probe(selection: Selection) -> Reading:
        asked.append(selection)
        return Reading(20.0 if len(asked) <= 2 else 18.0, 5.0)

    found = search([CoreCluster("a", 2, "prime", 3.0)], probe, MEASURED_ALONE)
    assert found.is_fallback
    assert found.chosen == found.fastest == (1,)


def test_stage_1_ends_after_as_many_probes_as_it_may() -> None:
    many = [CoreCluster("a", 12, "prime", 3.0)]
    _, first = search(many, lambda s: Reading(float(sum(s)), 1.0), PRESETS["aecs-code"]).first_probes[0]
    found = search(many, lambda s: Reading(float(sum(s)), 1.0), PRESETS["aecs-code"])
    assert first.speed_tokens_per_s == 2.0
    assert len(found.first_probes) == 7
    assert found.fastest == (8,)


@st.composite
def phones(draw: st.DrawFn) -> tuple[list[CoreCluster], dict[Selection, Reading]]:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    kinds: tuple[CoreKind, ...] = ("prime", "performance", "efficiency")
    clusters = [CoreCluster(f"c{i}", n, kinds[i], 3.0 - 0.5 * i) for i, n in enumerate(sizes)]
    figures = st.floats(0.5, 50.0)
    return clusters, {s: Reading(draw(figures), draw(figures)) for s in all_selections(clusters)}


@given(phones(), st.sampled_from(["fig6", "depth2", "efficiency"]), st.floats(0.0, 0.5), st.floats(0.0, 1.0))
def test_the_choice_is_the_best_of_the_candidates_that_are_fast_enough(
    phone: tuple[list[CoreCluster], dict[Selection, Reading]], tree: Tree, slowdown: float, alpha: float
) -> None:
    clusters, readings = phone
    parameters = replace(AECS, tree=tree, slowdown=slowdown, alpha=alpha)
    found = search(clusters, readings.__getitem__, parameters)
    floor = (1.0 - slowdown) * readings[found.fastest].speed_tokens_per_s
    assert readings[found.chosen].speed_tokens_per_s >= floor
    assert not found.is_fallback

    def energy_j(selection: Selection) -> float:
        speed, power_w = readings[selection]
        assert power_w is not None
        return ((1 - alpha) * power_w + alpha * PowerHeuristic().watts(clusters, selection)) / speed

    allowed = [s for s in candidates(clusters, found.fastest, tree) if readings[s].speed_tokens_per_s >= floor]
    assert energy_j(found.chosen) == pytest.approx(min(map(energy_j, allowed)))


@given(phones())
def test_the_exhaustive_search_is_brute_force(phone: tuple[list[CoreCluster], dict[Selection, Reading]]) -> None:
    clusters, readings = phone
    found = search_all(clusters, readings.__getitem__, MEASURED_ALONE)
    top = max(r.speed_tokens_per_s for r in readings.values())
    allowed = {s: r for s, r in readings.items() if r.speed_tokens_per_s >= 0.92 * top}
    least = min((r.power_w or 0.0) / r.speed_tokens_per_s for r in allowed.values())
    chosen = readings[found.chosen]
    assert found.chosen in allowed
    assert (chosen.power_w or 0.0) / chosen.speed_tokens_per_s == pytest.approx(least)
    assert found.n_probes == len(readings)


@given(phones())
def test_no_search_within_the_tree_beats_all_of_them_when_nothing_is_noisy(
    phone: tuple[list[CoreCluster], dict[Selection, Reading]],
) -> None:
    """Where stage 1 found the fastest, the tree's best is no better than the best of all."""
    clusters, readings = phone
    tree, whole = (find(clusters, readings.__getitem__, MEASURED_ALONE) for find in (search, search_all))
    if readings[tree.fastest].speed_tokens_per_s == readings[whole.fastest].speed_tokens_per_s:
        spent = [(readings[r.chosen].power_w or 0.0) / readings[r.chosen].speed_tokens_per_s for r in (tree, whole)]
        assert spent[0] >= spent[1] * (1 - 1e-12)
