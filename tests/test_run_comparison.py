"""Two runs, arms and machines against each other: what differs for certain, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from results.history.compared import Compared, of_groups, of_pairs
from results.history.comparison import CompareError
from results.history.points import Figure
from results.history.unlike import What, unlike_environments
from results.records import OF_A_RECORDING
from tests.command import joulebench
from tests.compared_runs import between, row, times, written
from tests.histories import made_trial, write_run
from tests.run_builders import ENVIRONMENT, cell, failed, reading
from tests.test_road import KERNELS as ROAD

OTHER_CPU = ENVIRONMENT.model_copy(update={"cpu_model": "another"})
NEWER = ENVIRONMENT.model_copy(update={"joulebench": "0.2.0"})


def test_of_two_runs_size_interval_and_p_are_those_of_welchs_test(tmp_path: Path) -> None:
    first, second = times(1.0, 0), times(1.03, 1)
    one = row(between(written(tmp_path / "a", first), written(tmp_path / "b", second)))
    expected = stats.ttest_ind(np.log(second), np.log(first), equal_var=False)
    low, high = expected.confidence_interval(0.95)
    assert one.p == pytest.approx(expected.pvalue)
    assert (one.low, one.high) == (pytest.approx(math.expm1(low)), pytest.approx(math.expm1(high)))
    assert one.verdict == "worse"
    assert one.longer == 1.0


@pytest.mark.parametrize(("scatters", "welch"), [((0.01, 0.001), False), ((0.001, 0.01), True)])
def test_of_unlike_numbers_of_trials_the_less_sure_test_counts(scatters: tuple[float, float], welch: bool) -> None:
    """Thirty trials and three: where the three scatter less by chance, they are taken to scatter as all do."""
    rng = np.random.default_rng(4)
    first, second = rng.normal(0.0, scatters[0], 30), rng.normal(0.02, scatters[1], 3)
    found = _of_two_runs(np.exp(first), np.exp(second))
    expected = stats.ttest_ind(second, first, equal_var=not welch)
    low, high = expected.confidence_interval(0.95)
    assert found.test == ("Welch's t" if welch else "Student's t")
    assert found.p == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == (pytest.approx(math.expm1(low)), pytest.approx(math.expm1(high)))


def test_few_trials_that_met_no_slow_one_are_told_to_differ_no_more_often_than_is_said() -> None:
    """One trial in ten takes half as long again, on both sides alike; by Welch's t 22 of 100 pairs differed."""
    rng = np.random.default_rng(5)

    def took_s(n: int) -> np.ndarray:
        return rng.normal(1.0, 0.005, n) * np.where(rng.random(n) < 0.1, 1.5, 1.0)

    found = [_of_two_runs(took_s(30), took_s(3)).p or 0.0 for _ in range(1000)]
    assert np.mean(np.less(found, 0.05)) < 0.05


def _of_two_runs(first: np.ndarray, second: np.ndarray) -> Compared:
    sides = [
        Figure(
            metric="e2e", phase="all", unit="s", kind="time", better="lower", method="measured",
            values=dict(enumerate(own.tolist())),
        )
        for own in (first, second)
    ]  # fmt: skip
    return of_groups(Compared("w", "d", "a", sides[0], sides[1], "not tested"), sides[1], 0.0)


def test_means_that_say_the_other_direction_than_the_change_are_explained(tmp_path: Path) -> None:
    """One slow trial: the mean falls from 1.1125 to 1.1, and the geometric mean rises from 1.081 to 1.1."""
    slow_once = written(tmp_path / "a", [0.9, 0.95, 1.0, 1.6])
    found = between(slow_once, written(tmp_path / "b", [1.09, 1.10, 1.11, 1.10]))
    one = row(found)
    assert one.second is not None
    assert one.second.mean < one.first.mean
    assert one.change == pytest.approx(stats.gmean([1.09, 1.10, 1.11, 1.10]) / stats.gmean([0.9, 0.95, 1.0, 1.6]) - 1)
    assert any("geometric means" in note for note in found.notes)
    faster = between(slow_once, written(tmp_path / "c", [0.5, 0.51, 0.52, 0.53]))
    assert not any("geometric means" in note for note in faster.notes)


def test_of_two_arms_of_one_run_repeats_are_pairs(tmp_path: Path) -> None:
    """Repeats that drift alike hide a small difference from Welch's test, and not from the paired one."""
    first = times(1.0, 2, spread=0.1)
    second = [
        1.01 * t * (1 + 0.001 * x) for t, x in zip(first, np.random.default_rng(3).standard_normal(8), strict=True)
    ]
    cells = [cell("c1", engine="a"), cell("c2", engine="b")]
    trials = [
        made_trial(c.cell_id, i, s) for c, own in zip(cells, (first, second), strict=True) for i, s in enumerate(own)
    ]
    folder = write_run(tmp_path / "run", cells, trials)
    one = row(between(folder, folder, arm_a="a", arm_b="b"))
    expected = stats.ttest_rel(np.log(second), np.log(first))
    assert one.p == pytest.approx(expected.pvalue)
    assert one.low is not None
    assert one.low == pytest.approx(math.expm1(expected.confidence_interval(0.95).low))
    assert one.verdict == "worse"


@pytest.mark.parametrize("logs", [np.random.default_rng(0).normal(0.2, 0.02, 400), np.array([0.25, -0.25])])
def test_pairs_that_differ_beyond_any_p_or_not_at_all_on_average_have_their_interval(logs: np.ndarray) -> None:
    """p of the first is below the least number that a float holds, of the second it is 1: no error follows from p."""
    figure = Figure(
        metric="e2e", phase="all", unit="s", kind="time", better="lower", method="measured", values={0: 1.0}
    )  # fmt: skip
    found = of_pairs(Compared("w", "d", "a", figure, figure, "not tested"), logs.tolist(), 0.0)
    expected = stats.ttest_1samp(logs, 0.0)
    low, high = expected.confidence_interval(0.95)
    assert (found.change, found.p) == (pytest.approx(math.expm1(logs.mean())), pytest.approx(expected.pvalue))
    assert (found.low, found.high) == (pytest.approx(math.expm1(low)), pytest.approx(math.expm1(high)))


@pytest.mark.parametrize(("logs", "effect"), [([0.3, 0.1], None), ([0.3, 0.1, 0.2], 0.2 / 0.1 * 4 / 7)])
def test_two_pairs_have_no_size_of_their_difference(logs: list[float], effect: float | None) -> None:
    """Hedges' correction is 1 - 3 / (4 d - 1) with d = n - 1: of two pairs it is 0, and g was told as 0."""
    figure = Figure(
        metric="e2e", phase="all", unit="s", kind="time", better="lower", method="measured", values={0: 1.0}
    )  # fmt: skip
    found = of_pairs(Compared("w", "d", "a", figure, figure, "not tested"), logs, 0.0)
    assert found.effect == (None if effect is None else pytest.approx(effect))
    assert found.p is not None


def test_false_discoveries_are_held_down_over_all_figures(tmp_path: Path) -> None:
    """Adjusted p as scipy has it; of 60 cells that do not differ none is worse, though some p are below 0.05."""
    cells = [cell(f"c{i}", engine=f"arm{i}") for i in range(60)]
    folders = [
        write_run(
            tmp_path / name,
            cells,
            [made_trial(c.cell_id, r, s) for i, c in enumerate(cells) for r, s in enumerate(times(1.0, seed + i))],
        )
        for name, seed in (("a", 100), ("b", 900))
    ]
    found = between(*folders)
    ps = [one.p for one in found.rows if one.p is not None]
    assert len(ps) == found.n_tested == 300
    expected = stats.false_discovery_control(ps)
    assert [one.adjusted for one in found.rows if one.p is not None] == pytest.approx(list(expected))
    assert sum(p < 0.05 for p in ps) >= 5
    assert not found.has_worse


def test_scores_are_compared_sample_by_sample_by_mcnemars_test(tmp_path: Path) -> None:
    right = [1.0] * 40
    wrong = [0.0] * 12 + [1.0] * 28
    first = write_run(tmp_path / "a", [cell("c1")], [made_trial("c1", 0, 1.0, right=right)])
    second = write_run(tmp_path / "b", [cell("c1")], [made_trial("c1", 0, 1.0, right=wrong)])
    one = row(between(first, second), "acc")
    assert one.p == pytest.approx(2 * 0.5**12)
    assert (one.verdict, one.change) == ("worse", pytest.approx(-0.3))


def test_all_that_must_be_allowed_is_named_at_once(tmp_path: Path) -> None:
    first = written(tmp_path / "a", times(1.0, 0))
    second = written(tmp_path / "b", times(1.5, 1), environment=OTHER_CPU, requests_sha256="9" * 64)
    refused = row(between(first, second))
    assert refused.reason.endswith("(--allow machines --allow requests)")
    assert row(between(first, second, "machines", "requests")).verdict == "worse"


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("machines", {"environment": OTHER_CPU}),
        ("versions", {"environment": NEWER}),
        ("systems", {"environment": ENVIRONMENT.model_copy(update={"os": "Linux 6.9"})}),
        ("requests", {"requests_sha256": "9" * 64}),
        ("methods", {"time_method": "modelled"}),
        ("roads", {"road": ROAD.model_copy(update={"decoding": "plan by plan"})}),
    ],
)
def test_what_is_unlike_is_refused_unless_it_is_allowed_and_then_said(
    tmp_path: Path, what: What, changes: dict[str, object]
) -> None:
    first = written(tmp_path / "a", times(1.0, 0), road=ROAD)
    second = written(tmp_path / "b", times(1.5, 1), **({"road": ROAD} | changes))  # type: ignore[arg-type]
    refused = row(between(first, second))
    assert (refused.verdict, refused.p) == ("refused", None)
    assert f"other {what}: " in refused.reason
    assert f"(--allow {what})" in refused.reason
    allowed = row(between(first, second, what))
    assert allowed.p is not None
    assert any(told.startswith(f"unlike {what}: ") for told in allowed.said)
    # Seconds of a model that states no error are never certain beside a clock's.
    assert allowed.verdict == ("not certain" if what == "methods" else "worse")
    done = joulebench("compare", str(first), str(second))
    assert f"Refused: other {what}: " in done.stdout
    # Prefill was computed alike, where only decoding took another road.
    assert (done.code, "nothing could be compared" in done.stderr) == ((1, False) if what == "roads" else (6, True))
    done = joulebench("compare", str(first), str(second), "--allow", what)
    assert f"Compared although they are unlike, as asked: unlike {what}: " in done.stdout
    assert done.code == (0 if what == "methods" else 1)


def test_memory_of_unlike_machines_is_told_in_the_unit_of_all_memory() -> None:
    """8 x 2^30 bytes are 8 GiB; as GB they would be 8.6."""
    small, large = (ENVIRONMENT.model_copy(update={"memory_bytes": n * 2**30}) for n in (8, 16))
    assert list(unlike_environments(small, large)) == [("machines", "memory 8.00 GiB; 16.0 GiB")]


def test_two_phones_of_one_model_are_unlike() -> None:
    one, other = (ENVIRONMENT.model_copy(update={"unit": unit}) for unit in ("8c2f01d5b7aa", "04d1c3e99b6f"))
    words = "phone (digest of its serial number) 8c2f01d5b7aa; 04d1c3e99b6f"
    assert list(unlike_environments(one, other)) == [("machines", words)]
    assert list(unlike_environments(one, ENVIRONMENT)) == []


def test_another_gpu_is_another_machine_and_another_driver_of_it_another_version() -> None:
    one = ENVIRONMENT.model_copy(update={"gpus": ("RTX 4090",), "gpu_driver": "550.54"})
    other = one.model_copy(update={"gpus": ("RTX 4090", "RTX 3090")})
    assert list(unlike_environments(one, other)) == [("machines", "GPU RTX 4090; RTX 4090, RTX 3090")]
    newer = one.model_copy(update={"gpu_driver": "580.65"})
    assert list(unlike_environments(one, newer)) == [("versions", "GPU driver 550.54; 580.65")]
    assert list(unlike_environments(one, ENVIRONMENT)) == []  # kept before GPUs were


def test_joules_of_two_meters_are_refused_and_then_carry_both_meters_whole_error(tmp_path: Path) -> None:
    paths = []
    for name, meter, scale in (("a", "nvml", 1.0), ("b", "rapl", 1.1)):
        trials = [
            made_trial("c1", i, s).model_copy(update={"energy": (reading("all", 4 * scale * s, meter=meter),)})
            for i, s in enumerate(times(1.0, len(paths)))
        ]
        paths.append(write_run(tmp_path / name, [cell("c1")], trials))
    one = row(between(*paths), "energy_per_response")
    assert (one.verdict, "other meters: nvml; rapl" in one.reason) == ("refused", True)
    assert row(between(*paths)).verdict == "not certain"  # times have no meter
    # Each states 5 %, so that 10 % are within 1.96 sqrt(0.05^2 + 0.05^2) = 14 %.
    both = row(between(*paths, "meters"), "energy_per_response")
    assert both.low is not None
    assert both.verdict == "not certain"
    assert math.log1p(both.change or 0) - math.log1p(both.low) == pytest.approx(0.1386, rel=0.05)


def test_nothing_within_a_models_error_is_certain(tmp_path: Path) -> None:
    paths = []
    for name, scale in (("a", 1.0), ("b", 1.3), ("c", 9.0)):
        trials = [
            made_trial("c1", i, s).model_copy(
                update={
                    "energy": (
                        reading(
                            "all", 4 * scale * s, method="modelled", meter="cpu-sheet", uncertainty_j=2 * scale * s
                        ),
                    )
                }
            )
            for i, s in enumerate(times(1.0, len(paths)))
        ]
        paths.append(write_run(tmp_path / name, [cell("c1")], trials))
    within, beyond = (row(between(paths[0], other), "energy_per_response") for other in paths[1:])
    assert within.p is not None
    assert within.p < 1e-6
    assert (within.verdict, within.reason) == ("not certain", "within the model's own error")
    assert beyond.verdict == "worse"


def test_joules_of_a_recording_are_never_certain(tmp_path: Path) -> None:
    """A recording of 4 W makes four joules of each second, whatever the arm does: nine times in nine times the time."""
    paths = []
    for name, scale in (("a", 1.0), ("b", 9.0)):
        lasted = times(scale, len(paths))
        trials = [
            made_trial("c1", i, s).model_copy(update={"energy": (reading("all", 4 * s, method="replayed"),)})
            for i, s in enumerate(lasted)
        ]
        paths.append(write_run(tmp_path / name, [cell("c1")], trials))
    found = between(*paths)
    joules = row(found, "energy_per_response")
    assert joules.p is not None
    assert joules.p < 1e-6
    assert (joules.verdict, joules.reason) == ("not certain", OF_A_RECORDING)
    assert row(found).verdict == "worse"


def test_machines_are_paired_without_their_names_and_one_trial_has_no_interval(tmp_path: Path) -> None:
    cells = [cell("c1", device="host"), cell("c2", device="phone")]
    folder = write_run(tmp_path / "run", cells, [made_trial("c1", 0, 1.0), made_trial("c2", 0, 3.0)])
    one = row(between(folder, folder, device_a="host", device_b="phone"))
    assert (one.device, one.change) == ("host → phone", pytest.approx(2.0))
    assert (one.verdict, one.reason) == ("not tested", "1 and 1 trials: no interval from one")


def test_machines_are_told_to_differ_only_where_a_and_b_are_of_two(tmp_path: Path) -> None:
    """Two runs with two devices each were said to be compared across machines."""
    cells = [cell("c1", device="host"), cell("c2", device="phone")]
    trials = [made_trial(c, i, s) for c in ("c1", "c2") for i, s in enumerate(times(1.0, 1))]
    one, other = (write_run(tmp_path / name, cells, trials) for name in ("one", "other"))
    told = "Of two machines: a difference is of machine, software and arm together."
    assert told not in between(one, other).notes
    assert told in between(one, one, device_a="host", device_b="phone").notes


def test_trials_that_count_beside_other_processes_are_told_of_their_side(tmp_path: Path) -> None:
    """A plan may let them count (`max_foreign_cpu_share = 1`). An arm was told to be 5.5 times as fast, for certain,
    where the neighbour alone had gone."""
    shares = (0.91, 0.05, 0.6, None)
    trials = [made_trial("c1", i, s, foreign_cpu_share=shares[i]) for i, s in enumerate(times(2.0, 1, 4))]
    trials.append(made_trial("c1", 4, 9.0, foreign_cpu_share=0.99, marks=("contended",)))
    trials += [made_trial("c2", i, s, foreign_cpu_share=0.1) for i, s in enumerate(times(1.0, 2, 4))]
    run = write_run(tmp_path / "run", [cell("c1", engine="slow"), cell("c2", engine="fast")], trials)
    told = (
        "A: 2 of 3 trials that count shared the CPU: other processes took up to 91 % of it; their times and joules are"
        " disturbed."
    )
    notes = between(run, run, arm_a="slow", arm_b="fast").notes
    assert [note for note in notes if "shared the CPU" in note] == [told]
    quiet = between(run, run, arm_a="fast", arm_b="slow").notes
    assert [note for note in quiet if "shared the CPU" in note] == [told.replace("A:", "B:")]


def test_a_figure_that_one_side_alone_has_is_told_whichever_side_that_is(tmp_path: Path) -> None:
    scored = written(tmp_path / "scored", times(1.0, 0, n=3), right=[1.0, 0.0])
    unscored = written(tmp_path / "unscored", times(1.0, 0, n=3))
    assert row(between(scored, unscored), "acc").reason == "the other side has no such figure"
    assert "B alone has acc: nothing to compare with." in between(unscored, scored).notes
    again = written(tmp_path / "again", times(1.0, 1, n=3), right=[1.0, 0.0])
    assert not any("alone has" in note for note in between(scored, again).notes)


def test_where_nothing_can_be_compared_for_more_than_one_reason_it_is_not_told_as_the_only_one(tmp_path: Path) -> None:
    """Times of a single trial have no interval; that the score is missing said nothing of them."""
    scored = written(tmp_path / "scored", times(1.0, 0, n=1), right=[1.0, 0.0])
    unscored = written(tmp_path / "unscored", times(1.0, 0, n=1))
    done = joulebench("compare", str(scored), str(unscored))
    assert done.code == 6
    assert "nothing could be compared; most often: " in done.stderr
    assert "1 and 1 trials: no interval from one" in done.stderr
    assert "--all shows every figure" in done.stderr


def test_a_run_of_failures_alone_compares_with_nothing_and_is_no_error(tmp_path: Path) -> None:
    """It ended with 1, which says that B is worse."""
    fine = written(tmp_path / "fine", times(1.0, 0, n=3))
    broken = write_run(tmp_path / "broken", [cell("c1", engine="dropless")], [failed("c1", i) for i in range(3)])
    table = tmp_path / "changes.csv"
    done = joulebench("compare", str(broken), str(fine), "--csv", str(table), "--json")
    assert (done.code, json.loads(done.stdout)["rows"]) == (6, [])
    assert "nothing could be compared: A has no figure" in done.stderr
    assert table.read_text("utf-8").startswith("verdict,arm,workload,device,metric,")


def test_nothing_in_common_and_the_same_cells_are_told(tmp_path: Path) -> None:
    first = written(tmp_path / "a", times(1.0, 0), arm="one")
    second = written(tmp_path / "b", times(1.0, 0), arm="two")
    with pytest.raises(
        CompareError, match="have no cell in common: the one has one · gsm8k · host; the other has two · "
    ):
        between(first, second)
    with pytest.raises(CompareError, match="have only the same cells in common; name two runs"):
        between(first, first)
    with pytest.raises(CompareError, match="have only the same cells in common; name two runs"):
        between(first, first, arm_a="one")
    with pytest.raises(CompareError, match="no cell is so; its arms are one; its devices host"):
        between(first, second, arm_a="three")
    assert row(between(first, second, arm_a="one", arm_b="two")).arm == "one → two"
