"""An anchor takes out what drifts within a sitting. Of repeats from two sittings it cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from results.history.index import open_history
from results.history.marks import mark
from results.history.regress import Asked, regress
from tests.histories import judged, made_trial, write_run
from tests.run_builders import cell

WARMER = 1.08
"""By how much the machine is slower in the second sitting."""


def write_sittings(
    directory: Path,
    n_runs: int,
    sitting: Callable[[int, str, int], int],
    n_repeats: int = 4,
    is_marked: Callable[[int, str, int], bool] = lambda day, arm, repeat: False,
) -> None:
    """Arms a and b of the same time, whatever run: b is never slower. sitting, is_marked: by run, arm and repeat."""
    rng = np.random.default_rng(0)
    for day in range(n_runs):
        arms = {"a": "c1", "b": "c2"}
        trials = []
        for arm, cell_id in arms.items():
            for repeat in range(n_repeats):
                own = sitting(day, arm, repeat)
                e2e_s = (WARMER if own else 1.0) * (1 + 0.001 * float(rng.standard_normal()))
                marks = ("contended",) if is_marked(day, arm, repeat) else ()
                trials.append(made_trial(cell_id, repeat, e2e_s, energy_j=4 * e2e_s, sitting=own, marks=marks))
        write_run(directory / f"run{day:03d}", [cell(c, engine=arm, label=arm) for arm, c in arms.items()], trials, day)


def test_a_repeat_of_another_sitting_is_no_pair_of_its_anchor(tmp_path: Path) -> None:
    """From run 10 on the phone is lost under b: its last two repeats are measured when the machine is warmer."""
    write_sittings(tmp_path, 20, lambda day, arm, repeat: int(day >= 10 and arm == "b" and repeat >= 2))
    one = judged(tmp_path, anchor="a")["b"]
    assert one.verdict == "PASS"
    assert one.series.points[-1].x == pytest.approx(0.0, abs=0.004)
    assert [point.figure.n for point in (one.series.points[0], one.series.points[-1])] == [4, 2]


def test_repeats_that_were_all_of_a_later_sitting_are_pairs(tmp_path: Path) -> None:
    write_sittings(tmp_path, 20, lambda day, arm, repeat: int(day >= 10 and repeat >= 2))
    one = judged(tmp_path, anchor="a")["b"]
    assert (one.verdict, {point.figure.n for point in one.series.points}) == ("PASS", {4})


def test_a_run_whose_arm_was_measured_apart_from_its_anchor_is_left_out_and_told(tmp_path: Path) -> None:
    write_sittings(tmp_path, 20, lambda day, arm, repeat: int(day in (6, 19) and arm == "b"))
    one = judged(tmp_path, anchor="a")["b"]
    words = "no repeat of it and of the anchor is of one sitting"
    assert (one.verdict, len(one.series.points), one.left_out) == ("PASS", 18, (f"{words} (2 runs)",))
    assert one.behind == f"the newest run, run019: {words}"


def test_one_pair_that_is_left_is_all_that_counts(tmp_path: Path) -> None:
    """Of the anchor, too, whose mean over all its repeats was asked for before."""

    def sitting(day: int, arm: str, repeat: int) -> int:
        """The first repeat of both is of the first sitting; of b the others of the second, of a the last of a third."""
        return 0 if day < 10 else {"a": (0, 0, 2), "b": (0, 1, 1)}[arm][repeat]

    write_sittings(tmp_path, 20, sitting, 3)
    one = judged(tmp_path, anchor="a")["b"]
    assert [point.figure.n for point in (one.series.points[0], one.series.points[-1])] == [3, 1]
    assert [point.x for point in one.series.points[10:]] == pytest.approx([0.0] * 10, abs=0.006)


@pytest.mark.parametrize(
    ("kept", "n"),
    [
        pytest.param({"a": (0,), "b": (0, 2, 3)}, 1, id="one repeat of both"),
        pytest.param({"a": (1,), "b": (0, 2, 3)}, 1, id="none of both, and one beside the anchor's"),
        pytest.param({"a": (2,), "b": (1, 2, 3)}, 1, id="one repeat of both, of the later sitting"),
        pytest.param({"a": (0, 1), "b": (2, 3)}, None, id="two sittings"),
    ],
)
def test_where_means_are_taken_for_lack_of_pairs_they_are_of_one_sitting(
    tmp_path: Path, kept: dict[str, tuple[int, ...]], n: int | None
) -> None:
    """From run 10 on repeats 2 and 3 are of a warmer sitting, and of what is not marked no two are a pair."""
    write_sittings(
        tmp_path,
        20,
        lambda day, arm, repeat: int(day >= 10 and repeat >= 2),
        is_marked=lambda day, arm, repeat: day >= 10 and repeat not in kept[arm],
    )
    one = judged(tmp_path, anchor="a")["b"]
    if n is None:
        assert one.left_out == ("no repeat of it and of the anchor is of one sitting (10 runs)",)
        return
    assert (one.verdict, one.series.points[-1].figure.n) == ("PASS", n)
    assert [point.x for point in one.series.points[10:]] == pytest.approx([0.0] * 10, abs=0.006)


@pytest.mark.parametrize(("n_in_turn", "order"), [(3, "sequential"), (0, "shuffled")])
def test_of_runs_that_measured_arms_in_turn_an_anchor_does_not_take_out_the_drift(
    tmp_path: Path, n_in_turn: int, order: str
) -> None:
    """The oldest runs have no pairs of trials that followed each other; of arms that were, what drifts is out."""
    for day in range(8):
        cells = [cell("c1", engine="a", label="a"), cell("c2", engine="b", label="b")]
        trials = [made_trial(c.cell_id, i, 1.0 + 0.001 * i) for c in cells for i in range(3)]
        asked = {"order": order if day < 3 else "interleaved"}
        inputs = {"OMP_NUM_THREADS": "1"}
        write_run(tmp_path / f"run{day:03d}", cells, trials, day, protocol=asked, inputs=inputs)
    with open_history(tmp_path) as history:
        mark(history, "good", ["run000", "run001", "run002"], add=False)
        found = regress(history, "good", Asked(anchor="a"))
    (note,) = [words for words in found.notes if " over a in the same run" in words]
    told = f'In {n_in_turn} of 8 runs protocol.order is "sequential": all repeats of an arm were measured before'
    assert (told in note) == (n_in_turn > 0)
    assert ("the machine's drift is out" in note) == (n_in_turn == 0)
