"""Arms of a run that was gone on with: what changed between two sittings is no difference of the arms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from results.compare import compare_trials
from results.history.comparison import Side, compare, told_of
from results.ratios import ratio_of_means
from results.report.caveats import caveats_of
from results.report.standings import Group
from results.runs import RunData
from results.sittings import APART, pairs_that_count, sitting_notes
from tests.run_builders import run
from tests.test_standings import groups, lasting, named, screen, standing

SLOWER = 1.05
"""The machine in the second sitting."""


def noisy(seconds: float, n: int, seed: int) -> list[float]:
    return [seconds * (1 + 0.002 * x) for x in np.random.default_rng(seed).standard_normal(n).tolist()]


def apart(n: int, later: Sequence[int], seconds: float = 1.0) -> RunData:
    """Two arms over n repeats, the second of which takes so long; these repeats of it were measured in the second
    sitting, and those behind the last of them of both arms."""
    whole = set(range(max(later, default=n) + 1, n))
    trials = []
    for name, mean_s, late in (("first", 1.0, whole), ("second", seconds, whole | set(later))):
        values = [s * (SLOWER if i in late else 1) for i, s in enumerate(noisy(mean_s, n, len(name)))]
        trials += [t.model_copy(update={"sitting": int(t.repeat in late)}) for t in lasting(name, values)]
    return run(named("first", "second", reference_id="first"), trials)


def group_of(data: RunData) -> Group:
    ((found, _),) = groups(data)
    return found


@pytest.mark.parametrize(("n", "n_apart"), [(3, 1), (6, 1), (6, 2), (6, 4), (10, 3), (10, 9)])
def test_an_interval_holds_the_ratio_whatever_a_second_sitting_changed(n: int, n_apart: int) -> None:
    """Arms that are alike, and scatter by 1 %. Of all ten pairs, nine of them apart, none held the truth."""
    rng, n_runs = np.random.default_rng(4), 300
    sittings = dict.fromkeys(range(n), 0), {i: int(i < n_apart) for i in range(n)}
    for shift in (1.0, 1.02, SLOWER, 2.0):
        held = 0
        for _ in range(n_runs):
            first, second = 1 + 0.01 * rng.standard_normal((2, n))
            second[:n_apart] *= shift
            (counted,) = pairs_that_count([range(n)], [sittings[0]], [sittings[1]])
            found = ratio_of_means([([second[i] for i in counted], [first[i] for i in counted])])
            held += found.low is None or found.high is None or found.low <= 1 <= found.high
        assert held / n_runs > 0.9


def test_an_arm_that_was_measured_another_day_is_not_slower_for_certain() -> None:
    data = apart(5, later=range(5))
    for quantity in ("time", "energy"):
        found = standing(group_of(data), "second", quantity)
        assert found.ratio is not None
        assert found.ratio.value == pytest.approx(SLOWER, rel=0.01)
        assert (found.ratio.low, found.is_certain, found.reason) == (None, False, APART)
        assert not group_of(data).verdicts[quantity].is_certain
    (_, fastest), *_ = screen(data).sentences
    assert fastest.startswith(f"Fastest: not certain between first, second ({APART}")
    whole = replace(data, trials=tuple(t.model_copy(update={"sitting": 0}) for t in data.trials))
    assert standing(group_of(whole), "second", "time").is_certain, "so it would be, were it the arm's own"


def test_pairs_of_one_sitting_tell_arms_apart_without_the_others() -> None:
    """Two of ten are apart; the eight tell that the second takes 1.2 times as long, and not a little longer."""
    found = standing(group_of(apart(10, later=(3, 4), seconds=1.2)), "second", "time")
    assert found.ratio is not None
    assert (found.ratio.n, found.is_certain) == (8, True)
    assert found.ratio.value == pytest.approx(1.2, rel=0.002)
    told = "as times first: over the 8 repeats that were measured in one sitting; the figure below the interval is over"
    assert (found.remark or "").startswith(told)


def test_one_pair_of_two_sittings_stays_with_the_others() -> None:
    """As after one Ctrl-C in the middle of a round: of three pairs two would say nothing."""
    data = apart(3, later=(1,))
    found = standing(group_of(data), "second", "time")
    assert found.ratio is not None
    assert (found.ratio.n, found.is_certain, found.remark) == (3, False, None)
    assert found.ratio.low is not None
    assert found.ratio.high is not None
    assert found.ratio.low < 1 < found.ratio.high


def test_changes_beside_the_accuracy_and_of_compare_have_the_same_pairs() -> None:
    for data, n in ((apart(10, later=(3, 4)), 8), (apart(3, later=(1,)), 3)):
        first, second = ([t for t in data.trials if t.cell_id == name] for name in ("first", "second"))
        assert compare_trials(first, second, "e2e", "all").n == n
    data = apart(5, later=range(5))
    first, second = ([t for t in data.trials if t.cell_id == name] for name in ("first", "second"))
    change = compare_trials(first, second, "e2e", "all")
    assert (change.n, change.low, change.p, change.reason) == (5, None, None, APART)
    told = told_of(data)
    rows = compare(Side("a", told, "first"), Side("b", told, "second"), frozenset()).rows
    assert {(row.verdict, row.reason) for row in rows if row.first.kind in ("time", "energy")} == {
        ("not tested", APART)
    }


@pytest.mark.parametrize(
    ("later", "pairs"),
    [
        # By workload, the repeats whose pair is of two sittings: one in all is held by the interval of all pairs.
        (((), ()), ((0, 1, 2), (0, 1, 2))),
        (((2,), ()), ((0, 1, 2), (0, 1, 2))),
        (((2,), (0,)), ((0, 1), (1, 2))),
        (((0, 2), ()), ((1,), (0, 1, 2))),
        (((0, 1, 2), (1,)), ((), (0, 2))),
    ],
)
def test_pairs_of_two_sittings_are_counted_over_all_workloads_of_a_ratio(
    later: Sequence[Sequence[int]], pairs: Sequence[Sequence[int]]
) -> None:
    repeats = [range(3)] * 2
    own = [dict.fromkeys(range(3), 0) for _ in later]
    other = [{i: int(i in of_workload) for i in range(3)} for of_workload in later]
    assert [tuple(kept) for kept in pairs_that_count(repeats, own, other)] == list(pairs)


def test_arms_that_were_measured_one_after_the_other_are_told() -> None:
    """Repeat i of both is no pair then: they may be hours apart, and nothing in the repeats tells."""
    data = apart(3, later=())
    both = [Side("a", told_of(data), "first"), Side("b", told_of(data), "second")]
    assert sitting_notes(data) == []
    assert not [note for note in compare(*both, frozenset()).notes if "sequential" in note]
    assert not [c for c in caveats_of(data, "host") if "one after the other" in c.text]
    in_turn = replace(data, info=data.info.model_copy(update={"plan": {"protocol": {"order": "sequential"}}}))
    (note,) = sitting_notes(in_turn)
    assert "all repeats of an arm were measured before those of the next" in note
    both = [Side("a", told_of(in_turn), "first"), Side("b", told_of(in_turn), "second")]
    assert note in compare(*both, frozenset()).notes
    assert [c.target for c in caveats_of(in_turn, "host") if "one after the other" in c.text] == ["know"]
    alone = replace(in_turn, cells=in_turn.cells[:1], trials=in_turn.trials[:3])
    assert sitting_notes(alone) == []
