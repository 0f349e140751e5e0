"""Perplexities and nats over several runs: no share of right answers, so neither in % nor in points."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from results.binary_scores import exponential_interval
from results.history.comparison import Side, compare
from results.records import Score
from results.report.against import Against, against
from results.report.arm_figures import ArmFigure
from results.report.arms import Arm
from results.report.compare_page import _drawn, table_row
from results.share_metrics import is_share_metric
from results.tables import accuracy
from results.trials import Trial
from tests.command import joulebench
from tests.compared_runs import between, read, row
from tests.histories import judged, made_trial, write_run
from tests.run_builders import cell, run
from tests.test_first_screen import figures
from tests.test_standings import named

NATS = (0.5, 0.7, 0.6, 0.8)
WORSE = (2.4, 2.7, 2.2, 2.9)


def of_texts(nats: tuple[float, ...], repeat: int = 0) -> Trial:
    own = [Score(metric="nll_nats", value=n, sample_id=f"s{i}", higher_is_better=False) for i, n in enumerate(nats)]
    mean = float(np.mean(nats))
    wholes = [
        Score(metric=metric, value=value, stderr=0.1, n=len(nats), higher_is_better=False)
        for metric, value in (("perplexity", math.exp(mean)), ("nll_nats", mean))
    ]
    return made_trial("c1", repeat, 1.0, scores=(*own, *wholes))


def of_metric(metric: str, values: tuple[float, ...], repeat: int = 0, is_risen: bool = True) -> Trial:
    own = [Score(metric=metric, value=v, sample_id=f"s{i}", higher_is_better=is_risen) for i, v in enumerate(values)]
    whole = Score(metric=metric, value=float(np.mean(values)), n=len(values), higher_is_better=is_risen)
    return made_trial("c1", repeat, 1.0, scores=(*own, whole))


def two_runs(folder: Path) -> tuple[Path, Path]:
    first, second = (
        write_run(folder / name, [cell("c1")], [of_texts(nats, i) for i in range(2)], day)
        for day, (name, nats) in enumerate((("a", NATS), ("b", WORSE)))
    )
    return first, second


def test_compare_tells_them_as_plain_numbers(tmp_path: Path) -> None:
    found = between(*two_runs(tmp_path))
    nats, perplexity = row(found, "nll_nats"), row(found, "perplexity")
    assert table_row(nats)[5:8] == ("0.650", "2.55", "+1.90")
    assert table_row(perplexity)[5:8] == (f"{math.exp(0.65):.2f}", f"{math.exp(2.55):.1f}", "+10.9")
    low, high = stats.t.interval(0.95, 3, 1.9, np.std(np.subtract(WORSE, NATS), ddof=1) / 2)
    assert table_row(nats)[8] == f"[+{low:.2f}, +{high:.2f}]"
    assert not [one for one in _drawn(found.rows) if "nats" in one.row or "perplexity" in one.row], "no common axis"


@pytest.mark.parametrize(("n", "percent_exponential", "percent_lognormal"), [(10, 90, 84), (20, 92, 87), (50, 93, 90)])
def test_the_page_tells_how_often_the_interval_of_a_perplexity_of_uneven_texts_holds_it(
    n: int, percent_exponential: int, percent_lognormal: int
) -> None:
    """docs/figures.md. Of 4000 runs a share of 90 % is known to half a percent."""
    rng = np.random.default_rng(0)
    nats = {percent_exponential: (rng.exponential(0.5, (4000, n)), 0.5)}
    nats[percent_lognormal] = (rng.lognormal(0.0, 1.0, (4000, n)), math.exp(0.5))
    for percent, (drawn, expected) in nats.items():
        held = 0
        for mean, stderr in zip(drawn.mean(axis=1), stats.sem(drawn, axis=1), strict=True):
            low, high = exponential_interval(math.exp(mean), math.exp(mean) * stderr, n)
            held += low is None or high is None or low <= math.exp(expected) <= high
        assert 100 * held / 4000 == pytest.approx(percent, abs=1.5)


def test_the_interval_of_a_perplexity_is_that_of_its_samples_nats_and_never_below_0() -> None:
    """Three texts had a perplexity of 6500 [-600, 13600]."""
    nats = (8.2, 8.9, 9.3)
    mean, stderr = float(np.mean(nats)), float(stats.sem(nats))
    wholes = (
        Score(metric="perplexity", value=math.exp(mean), stderr=math.exp(mean) * stderr, n=3, higher_is_better=False),
        Score(metric="nll_nats", value=mean, stderr=stderr, n=3, higher_is_better=False),
    )
    frame = accuracy(run([cell("c1")], [made_trial("c1", 0, 1.0, scores=wholes)])).set_index("metric")
    ends = {metric: tuple(frame.loc[metric, ["ci_low", "ci_high"]]) for metric in ("nll_nats", "perplexity")}
    expected = stats.t.interval(0.95, 2, mean, stderr)
    assert ends["nll_nats"] == pytest.approx(expected)
    assert ends["perplexity"] == pytest.approx(tuple(np.exp(expected)))
    assert exponential_interval(1e300, 1e301, 2) == (None, None), "its upper end is beyond any number"


def test_a_perplexity_is_tested_by_its_samples_as_in_the_report_of_a_run(tmp_path: Path) -> None:
    """The delta method's interval, and p of the paired t test of nll_nats."""
    perplexity = row(between(*two_runs(tmp_path)), "perplexity")
    before, after = math.exp(0.65), math.exp(2.55)
    influences = after * np.array(WORSE) - before * np.array(NATS)
    half = float(stats.t.ppf(0.975, 3)) * float(np.std(influences, ddof=1)) / 2
    assert perplexity.low is not None
    assert perplexity.high is not None
    assert (perplexity.change, perplexity.low, perplexity.high) == pytest.approx(
        (after - before, after - before - half, after - before + half)
    )
    assert perplexity.p == pytest.approx(stats.ttest_rel(WORSE, NATS).pvalue)
    assert perplexity.verdict == "worse"


def test_what_counts_least_is_a_share_of_them(tmp_path: Path) -> None:
    """2.55 nats are 290 % more than 0.65, and 190 hundredths."""
    first, second = two_runs(tmp_path)
    sides = Side("A", read(first)), Side("B", read(second))
    found = [row(compare(*sides, frozenset(), least), "nll_nats").verdict for least in (2.5, 3.5)]
    assert found == ["worse", "not certain"]


def test_a_history_tells_them_as_plain_numbers(tmp_path: Path) -> None:
    two_runs(tmp_path)
    assert "perplexity 1.92" in joulebench("history", str(tmp_path)).stdout
    assert joulebench("history", str(tmp_path), "--html", str(tmp_path / "page.html")).code == 0
    text = (tmp_path / "page.html").read_text("utf-8")
    charts = json.loads(text.split('id="charts">')[1].split("</script>")[0])["specs"].values()
    (chart,) = (one for one in charts if one["description"].startswith("perplexity over time"))
    data = chart["data"] if "data" in chart else chart["layer"][0]["data"]
    values = [point["value"] for point in chart["datasets"][data["name"]]]
    assert values == pytest.approx([math.exp(0.65), math.exp(2.55)])
    assert "perplexity ()" not in text


def test_regress_takes_their_change_as_a_ratio(tmp_path: Path) -> None:
    """One step of 0.1 % is below `--least`, however large the perplexity; one of 2 % counts."""
    for n, factor in enumerate([1.0] * 8 + [1.001] * 8):
        nats = tuple(6.0 + math.log(factor) + i / 10 for i in range(4))
        write_run(tmp_path / "small" / f"run{n:03d}", [cell("c1", engine="a", label="a")], [of_texts(nats)], n)
    assert judged(tmp_path / "small", "perplexity")["a"].verdict == "PASS"
    for n, factor in enumerate([1.0] * 8 + [1.02] * 8):
        nats = tuple(6.0 + math.log(factor) + i / 10 for i in range(4))
        write_run(tmp_path / "large" / f"run{n:03d}", [cell("c1", engine="a", label="a")], [of_texts(nats)], n)
    one = judged(tmp_path / "large", "perplexity")["a"]
    assert one.verdict == "REGRESSION"
    assert one.change is not None
    assert one.change == pytest.approx(math.log(1.02))
    assert one.series.shown(one.change) == "+2.0 %"


@pytest.mark.parametrize(("least", "verdict"), [(0.005, "REGRESSION"), (0.5, "REGRESSION"), (3.0, "PASS")])
def test_regress_takes_a_change_of_what_may_be_0_as_a_share_too(tmp_path: Path, least: float, verdict: str) -> None:
    """Divergences of 0.0002 nats that become 0.0006 are three times as large, and 0.04 hundredths of a nat more. One
    run has none at all, so that no logarithm is taken."""
    rng = np.random.default_rng(0)
    for n in range(16):
        nats = 0.0 if n == 3 else (0.0002 if n < 8 else 0.0006) * (1 + 0.01 * rng.standard_normal())
        own = of_metric("kl_nats", (nats,) * 4, is_risen=False)
        write_run(tmp_path / f"run{n:03d}", [cell("c1", engine="a", label="a")], [own], n)
    one = judged(tmp_path, "kl_nats", most_noise=10.0, least=least)["a"]
    assert (one.series.is_log, one.verdict) == (False, verdict)


def test_noise_that_proves_nothing_is_a_share_of_them_too(tmp_path: Path) -> None:
    """Divergences that scatter by all of themselves are hundredths of a nat."""
    rng = np.random.default_rng(1)
    for n in range(16):
        own = of_metric("kl_nats", (0.0 if n == 3 else 0.0002 * float(rng.exponential()),) * 4, is_risen=False)
        write_run(tmp_path / f"run{n:03d}", [cell("c1", engine="a", label="a")], [own], n)
    one = judged(tmp_path, "kl_nats")["a"]
    assert (one.verdict, "too much noise" in one.reason) == ("UNRELIABLE", True)


def test_a_metric_is_of_one_kind_in_all_runs(tmp_path: Path) -> None:
    """A BLEU of 0.8 was a share, and one of 2.4 a number: the first run was left out of the other's history."""
    for n, value in enumerate((0.8, 2.4, 0.9, 2.2, 0.7, 2.3)):
        trials = [of_metric("bleu_max", (value, value / 2), i) for i in range(2)]
        write_run(tmp_path / f"run{n:03d}", [cell("c1", engine="a", label="a")], trials, n)
    one = judged(tmp_path, "bleu_max", baseline=3)["a"]
    assert (len(one.series.points), one.left_out) == (6, ())
    told = table_row(row(between(tmp_path / "run000", tmp_path / "run001"), "bleu_max"))
    assert told[5:8] == ("0.600", "1.80", "+1.20")


@pytest.mark.parametrize(
    ("metric", "is_share"),
    [
        ("acc", True),
        ("acc_norm/stem", True),
        ("exact_match,strict-match", True),
        ("prompt_level_strict_acc", True),
        ("pass@1_plus", True),
        ("4096", True),
        ("string_match_all", True),
        ("bleu_acc", True),
        ("rouge_l", True),
        ("same_top1", True),
        ("bleu_max", False),
        ("rougeL_diff", False),
        ("f1", False),
        ("em", False),
        ("mcc", False),
        ("perplexity", False),
        ("nll_nats", False),
        ("my_score", False),
    ],
)
def test_the_name_of_a_metric_tells_whether_it_is_a_share(metric: str, is_share: bool) -> None:
    assert is_share_metric(metric) == is_share


@pytest.mark.parametrize(
    ("metric", "value", "shown"),
    [("bleu_max", 0.8, "0.800, n = 2"), ("bleu_max", 2.4, "2.40, n = 2"), ("acc", 0.5, "50 % of 2")],
)
def test_the_first_screen_tells_them_as_the_picture_and_the_history_do(metric: str, value: float, shown: str) -> None:
    """A BLEU of 0.8 stood there as 80 %, and its axis, and the run of a BLEU of 2.4, had numbers."""
    first = of_metric(metric, (2 * value, 0.0))
    data = run(named("first", "second"), [first.model_copy(update={"cell_id": name}) for name in ("first", "second")])
    assert figures(data, 2)["first"].value == shown


def page_values(*nats: tuple[float, ...]) -> list[str]:
    names = ["first", "second"]
    trials = [of_texts(own).model_copy(update={"cell_id": name}) for own, name in zip(nats, names, strict=True)]
    return [one.value for one in figures(run(named(*names), trials), 2).values()]


def test_an_arm_whose_texts_scatter_by_hundreds_of_nats_still_has_a_page() -> None:
    """e to the mean of 600 and 2 nats is 5.28e+130; the ratio's interval ends beyond any double."""
    values = page_values((2.0, 2.5), (600.0, 2.0))
    assert [value.split(",")[0] for value in values] == [f"{math.exp(2.25):.2f}", "5.28e+130"]


@pytest.mark.parametrize("broken", [0, 1])
def test_a_perplexity_that_is_infinite_is_no_figure(broken: int) -> None:
    """A token of probability 0 has infinitely many nats."""
    nats = [(2.0, 2.5), (2.0, 2.5)]
    nats[broken] = (2.0, math.inf)
    values = page_values(*nats)
    assert "inf" not in values[broken].split(",")[0]
    assert values[1 - broken].startswith(f"{math.exp(2.25):.2f},")


def test_nothing_is_a_multiple_of_a_perplexity_that_is_no_figure() -> None:
    arms = [Arm(i, name, name, "dropless", "host", "tiny", "{}", "") for i, name in enumerate(("first", "second"))]
    base = ArmFigure(arms[0], None, "", "measured", None, 1, "samples", reason="it came out as inf")
    figure = ArmFigure(arms[1], 9.5, "", "measured", None, 1, "samples", scores={"a": (2.25,)}, is_log=True)
    assert against(figure, base) == Against(None, "first has no figure: it came out as inf")
