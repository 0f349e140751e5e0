"""Tables of a run: which trials enter, what divides what, and what is said where there is no figure."""

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest
from scipy.stats import t as student

from results import tables
from results.counters import COUNTERS, EngineCounters
from results.derivation import phase_intervals
from results.energy import NO_JOULES
from results.records import PowerTrace, Score
from results.report.csv import csv_text
from results.report.html import html_text
from results.runs import RunData
from results.summary import summary
from results.trial_tables import request_frames, trials
from results.trials import Trial
from tests.run_builders import cell, completion, example_run, failed, reading, run, trial
from tests.scored_runs import scored


def one_cell(*trials: Trial, **changes: Any) -> RunData:
    return run([cell(**changes)], trials)


def row(data: RunData, metric: str, phase: str | None = None, **where: str) -> pd.Series:
    frame = tables.tidy(data)
    chosen = frame["metric"] == metric
    chosen &= frame["phase"].isna() if phase is None else frame["phase"] == phase
    for column, value in where.items():
        chosen &= frame[column] == value
    assert chosen.sum() == 1, frame[chosen]
    return frame[chosen].iloc[0]


def test_tidy_has_one_row_per_cell_metric_phase_meter_and_method() -> None:
    frame = tables.tidy(example_run())
    assert tuple(frame.columns) == tables.COLUMNS
    assert not frame.duplicated(["cell", "metric", "phase", "meter", "method"]).any()
    assert frame["cell"].nunique() == 12


def test_an_empty_run_gives_empty_tables() -> None:
    nothing = run([], [])
    assert [len(f(nothing)) for f in (tables.tidy, trials, summary)] == [0, 0, 0]


def test_latency_is_the_mean_over_trials_of_the_mean_over_requests() -> None:
    # Requests: TTFT 1 and 3 s in the first trial, 4 s in the second; TPOT 0.5 and 0.25 s, then 1 s.
    first = [completion("a", 0.0, 4, (1.0, 1.5)), completion("b", 10.0, 4, (13.0, 13.25))]
    second = [completion("a", 0.0, 4, (4.0, 5.0))]
    data = one_cell(trial(repeat=0, completions=first), trial(repeat=1, completions=second))
    assert row(data, "ttft", "prefill")["mean"] == pytest.approx((2.0 + 4.0) / 2)
    assert row(data, "tpot", "decode")["mean"] == pytest.approx((0.375 + 1.0) / 2)
    assert row(data, "e2e", "all")["mean"] == pytest.approx(((1.5 + 3.25) / 2 + 5.0) / 2)
    assert row(data, "ttft", "prefill")["n"] == 2


def test_interval_of_latency_is_student_t_over_trials() -> None:
    data = one_cell(*(trial(repeat=i, completions=[completion("a", 0.0, 4, (t, t + 1))]) for i, t in enumerate((1, 3))))
    # t_{0.975,1} = tan(pi * 0.475); mean 2, s = sqrt(2), s / sqrt(n) = 1.
    half = math.tan(math.pi * 0.475)
    ttft = row(data, "ttft", "prefill")
    assert (ttft["ci_low"], ttft["ci_high"]) == pytest.approx((0, 2 + half)), "no mean time is below 0"


def test_tail_percentiles_are_pooled_over_requests() -> None:
    requests = [completion(f"s{i}", 100.0 * i, 4, (100.0 * i + 1 + i, 100.0 * i + 2 + i)) for i in range(10)]
    data = one_cell(trial(repeat=0, completions=requests[:5]), trial(repeat=1, completions=requests[5:]))
    ttft = row(data, "ttft", "prefill")
    assert ttft["p90"] == pytest.approx(np.quantile(np.arange(1.0, 11.0), 0.9))
    assert math.isnan(ttft["p99"]), "99 of 100 cannot be told from ten values"


def test_decoding_ends_with_its_last_token_and_takes_no_time_of_a_single_one() -> None:
    """As its joules do: a server keeps its connection open behind the last token."""
    one = completion("one", 0.0, token_times_s=(1.0,)).model_copy(update={"end_s": 1.5})
    three = completion("three", 2.0, token_times_s=(3.0, 3.5, 4.0)).model_copy(update={"end_s": 4.3})
    timed = trial(completions=(one, three))
    assert phase_intervals(timed.completions, (0.0, 4.3))["decode"] == [(3.0, 4.0)]
    assert row(one_cell(timed), "throughput", "decode")["mean"] == 2.0


def test_throughput_counts_time_shared_by_batched_requests_once() -> None:
    # Two prompts of 6 tokens prefilled over the same 2 s: 12 tokens in 2 s.
    together = [completion("a", 0.0, 6, (2.0, 3.0, 4.0)), completion("b", 0.0, 6, (2.0, 3.0, 4.0))]
    data = one_cell(trial(completions=together))
    assert row(data, "throughput", "prefill")["mean"] == pytest.approx(6.0)
    assert row(data, "throughput", "decode")["mean"] == pytest.approx(4 / 2)


def test_a_batch_decodes_once_all_its_prompts_are_read_in_tokens_a_second_as_in_joules() -> None:
    """The short prompt is read at 1 s and waits for the long one until 2 s: 4 tokens in 2 s, at 10 W."""
    done = [completion("a", 0.0, 2, (1.0, 3.0, 4.0)), completion("b", 0.0, 6, (2.0, 3.0, 4.0))]
    (span,) = phase_intervals(done, (0.0, 4.0))["decode"]
    assert span == (2.0, 4.0)
    energy = reading("decode", 20.0, duration_s=2.0)
    data = one_cell(trial(completions=done, energy=(energy,)))
    per_s, per_token = (row(data, metric, "decode")["mean"] for metric in ("throughput", "energy_per_token"))
    assert per_s == pytest.approx(2.0)
    assert per_s * per_token == pytest.approx(row(data, "average_power", "decode")["mean"]) == pytest.approx(10.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_score_that_is_no_number_is_missing_and_all_else_is_told(value: float) -> None:
    """TruthfulQA divides 0 by 0 where every answer has a probability of 0: no table of the run could be written."""
    scores = (
        Score(metric="acc", value=1.0, sample_id="s0"), Score(metric="acc", value=value, sample_id="s1"),
        Score(metric="acc", value=value, stderr=value, n=2),
    )  # fmt: skip
    cells = [cell(name, engine=name, reference_id="exact") for name in ("exact", "tiers")]
    data = run(cells, [scored("exact", "10"), scored("tiers", "10", scores=scores)])
    found = tables.accuracy(data).set_index(["cell", "metric"])
    assert found["mean"]["exact", "acc"] == 0.5
    assert math.isnan(found["mean"]["tiers", "acc"])
    assert math.isnan(found["mean"]["tiers", "acc_stderr"])
    why = f"acc came out as {value}, which is no number to go by"
    assert found["reason"]["tiers", "acc"] == why
    assert why in html_text(data)


@pytest.mark.parametrize(("phase", "n_tokens"), [("prefill", 10), ("decode", 4), ("all", 10 + 6)])
def test_energy_per_token_divides_by_the_tokens_of_its_phase(phase: Any, n_tokens: int) -> None:
    # Two requests of 5 prompt and 3 generated tokens: 2 tokens each after the first.
    requests = [completion("a", 0.0, 5, (1.0, 2.0, 3.0)), completion("b", 4.0, 5, (5.0, 6.0, 7.0))]
    energy = reading(phase, 80.0, net_energy_j=40.0)
    data = one_cell(trial(completions=requests, energy=(energy,)))
    assert row(data, "energy_per_token", phase)["mean"] == pytest.approx(80 / n_tokens)
    assert row(data, "net_energy_per_token", phase)["mean"] == pytest.approx(40 / n_tokens)
    assert row(data, "average_power", phase)["mean"] == pytest.approx(80 / 2.0)
    assert row(data, "energy_uncertainty", phase)["mean"] == pytest.approx(5.0)


def test_missing_energy_is_an_empty_cell_with_its_reason() -> None:
    data = one_cell(trial(energy=(reading("all", None, reason="gap of 1.2 s in the readings"),)))
    energy = row(data, "energy", "all")
    assert math.isnan(energy["mean"])
    assert (energy["method"], energy["n"]) == ("missing", 0)
    assert energy["reason"] == "gap of 1.2 s in the readings"


def test_a_trial_without_any_meter_says_so() -> None:
    energy = row(one_cell(trial()), "energy_per_token", "decode")
    assert math.isnan(energy["mean"])
    assert energy["reason"] == "no meter was read in this trial"


def test_energy_that_some_trials_lack_is_averaged_over_the_others_and_said() -> None:
    data = one_cell(
        trial(repeat=0, energy=(reading("all", 6.0),)),
        trial(repeat=1, energy=(reading("all", 8.0),)),
        trial(repeat=2, energy=(reading("all", None, reason="gap of 1.2 s"),)),
    )
    energy = row(data, "energy", "all")
    assert (energy["n"], energy["mean"]) == (2, 7.0)
    assert energy["reason"] == "1 of 3 trials without a counter figure: gap of 1.2 s"


def test_the_summary_and_the_page_say_that_joules_are_of_fewer_trials() -> None:
    """The meter died in the last of three windows: each arm's row says 3 trials, and its joules are of two."""
    data = one_cell(
        trial(repeat=0, energy=(reading("all", 6.0),)),
        trial(repeat=1, energy=(reading("all", 8.0),)),
        trial(repeat=2, energy=(reading("all", None, reason="gap of 1.2 s"),)),
    )
    why = "1 of 3 trials without a counter figure: gap of 1.2 s"
    [wide] = summary(data).to_dict("records")
    assert (wide["n"], wide["all_j_per_token"]) == (3, pytest.approx(7.0 / 6))
    assert why in wide["reason"]
    assert why in html_text(data)


def test_reasons_that_differ_only_in_numbers_are_said_once() -> None:
    lost = [
        trial(repeat=i, energy=(reading("all", None, reason=f"window of {ms} ms"),)) for i, ms in enumerate((7.5, 80))
    ]
    assert row(one_cell(*lost), "energy", "all")["reason"] == "window of 7.5 ms"


def test_two_methods_never_share_a_row() -> None:
    data = one_cell(
        trial(repeat=0, energy=(reading("all", 6.0, method="counter"),)),
        trial(repeat=1, energy=(reading("all", 60.0, method="modelled"),)),
    )
    assert row(data, "energy", "all", method="counter")["mean"] == 6.0
    assert row(data, "energy", "all", method="modelled")["mean"] == 60.0


def test_two_meters_of_one_method_have_rows_of_their_own() -> None:
    both = (reading("all", 6.0, meter="nvml"), reading("all", 2.0, meter="rapl"))
    data = one_cell(trial(energy=both))
    assert row(data, "energy", "all", meter="nvml")["mean"] == 6.0
    assert row(data, "energy", "all", meter="rapl")["mean"] == 2.0


def test_measured_and_modelled_times_never_share_a_row() -> None:
    data = one_cell(trial(repeat=0), trial(repeat=1, time_method="modelled"))
    assert [row(data, "e2e", "all", method=m)["n"] for m in ("measured", "modelled")] == [1, 1]


def test_a_relative_gauge_never_stands_under_joules() -> None:
    """6 units over 2 s, known to 0.3."""
    units = {"gauge_units": 6.0, "gauge_units_uncertainty": 0.3}
    gauge = reading("all", None, method="relative gauge", reason=NO_JOULES, **units)
    data = one_cell(trial(energy=(gauge,)))
    shown = {m: row(data, m, "all") for m in ("energy", "average_power", "energy_uncertainty", "energy_per_token")}
    assert (shown["energy"]["mean"], shown["energy"]["unit"]) == (6.0, "gauge unit")
    assert (shown["average_power"]["mean"], shown["average_power"]["unit"]) == (3.0, "gauge unit/s")
    assert shown["energy_uncertainty"]["mean"] == pytest.approx(5.0)
    assert shown["energy_per_token"]["unit"] == "gauge unit/token"
    net = row(data, "net_energy_per_token", "all")
    assert (net["n"], net["reason"]) == (0, NO_JOULES)
    [wide] = summary(data).to_dict("records")
    assert pd.isna(wide["all_j_per_token"])
    assert NO_JOULES in wide["reason"]


def test_components_are_not_added_to_their_meters_total() -> None:
    data = one_cell(trial(energy=(reading("all", 6.0), reading("all", 4.0, component="dram"))))
    assert row(data, "energy", "all")["mean"] == 6.0


def test_failed_and_marked_trials_are_out_of_the_means() -> None:
    slow = [completion("a", 0.0, 4, (90.0, 91.0))]
    data = one_cell(
        trial(repeat=0), trial(repeat=1), trial(repeat=2, completions=slow, marks=("throttled",)), failed(repeat=3)
    )
    ttft = row(data, "ttft", "prefill")
    assert (ttft["n"], ttft["n_failed"], ttft["mean"]) == (2, 1, 1.0)
    assert ttft["reason"] == "1 of 4 trials failed, 1 of 4 trials left out (throttled)"


def test_a_cell_of_failures_shows_every_metric_with_the_error() -> None:
    scored = trial("c2", scores=(Score(metric="acc", value=1.0, stderr=0.1, n=9),))
    data = run([cell("c1"), cell("c2")], [failed("c1", error="out of memory: lower the batch\nsecond line"), scored])
    for metric, phase in (("ttft", "prefill"), ("energy_per_token", "all"), ("drop_rate", None), ("acc", None)):
        missing = row(data, metric, phase, cell="c1")
        assert (missing["n"], missing["n_failed"], missing["method"]) == (0, 1, "missing")
        assert missing["reason"] == "1 of 1 trials failed (out of memory: lower the batch)"


def test_a_cell_that_was_never_run_says_so() -> None:
    assert row(run([cell()], []), "e2e", "all")["reason"] == "no trial was run"


def test_one_trial_has_a_mean_but_no_interval() -> None:
    ttft = row(one_cell(trial()), "ttft", "prefill")
    assert ttft["mean"] == 1.0
    assert math.isnan(ttft["ci_low"])
    assert ttft["reason"] == "n = 1: no interval from one value"


def test_log_likelihoods_have_no_ttft_and_say_why() -> None:
    ttft = row(one_cell(trial(completions=[completion(token_times_s=())])), "ttft", "prefill")
    assert math.isnan(ttft["mean"])
    assert "log-likelihoods end with prefill" in ttft["reason"]


def test_accuracy_interval_is_the_closed_form_over_items() -> None:
    scores = (Score(metric="acc", value=0.4, stderr=0.05, n=96),)
    data = one_cell(*(trial(repeat=i, scores=scores) for i in range(3)))
    acc = row(data, "acc")
    assert (acc["n"], acc["mean"]) == (96, pytest.approx(0.4))
    assert (acc["ci_low"], acc["ci_high"]) == pytest.approx(student.interval(0.95, 95, 0.4, 0.05))
    assert row(data, "acc_stderr")["mean"] == pytest.approx(0.05)
    assert list(tables.accuracy(data)["metric"]) == ["acc", "acc_stderr"]


@pytest.mark.parametrize("right", ["1111", "0000", "1101", "1"])
def test_a_share_of_right_samples_has_an_interval_with_a_width_and_within_0_and_1(right: str) -> None:
    expected = binomtest(right.count("1"), len(right)).proportion_ci(method="wilson")
    acc = row(one_cell(*(scored("c1", right, repeat) for repeat in range(3))), "acc")
    assert (acc["n"], acc["mean"]) == (len(right), right.count("1") / len(right))
    assert (acc["ci_low"], acc["ci_high"]) == pytest.approx((expected.low, expected.high), rel=1e-6, abs=1e-12)
    wide = summary(one_cell(scored("c1", right))).iloc[0]
    assert (wide["accuracy_low"], wide["accuracy_high"]) == (acc["ci_low"], acc["ci_high"])
    assert wide["accuracy_stderr"] == 0.1, "what the task states stays beside it"


def test_a_mean_of_unlike_subjects_keeps_the_closed_form_of_its_task() -> None:
    """(1 + 1/2) / 2 of three samples, as a group that does not weight by size: no share of them."""
    singles = tuple(Score(metric="acc", value=v, sample_id=f"s{i}") for i, v in enumerate((1.0, 1.0, 0.0)))
    acc = row(one_cell(trial(scores=(*singles, Score(metric="acc", value=0.75, stderr=0.1, n=3)))), "acc")
    low, high = student.interval(0.95, 2, 0.75, 0.1)
    assert high > 1
    assert (acc["ci_low"], acc["ci_high"]) == pytest.approx((low, 1.0))


def test_scores_that_all_are_1_have_an_interval_with_a_width_where_other_arms_have_less() -> None:
    """RULER's tasks of four needles: a sample may have three of them."""

    def found(cell_id: str, *values: float) -> Trial:
        own = [Score(metric="4096", value=v, sample_id=f"s{i}") for i, v in enumerate(values)]
        mean, n = np.mean(values), len(values)
        whole = Score(metric="4096", value=float(mean), stderr=float(np.std(values, ddof=1) / n**0.5), n=n)
        return trial(cell_id, scores=(*own, whole))

    data = run([cell("a"), cell("b")], [found("a", *10 * [1.0]), found("b", *9 * [1.0], 0.75)])
    first, second = (row(data, "4096", cell=name) for name in ("a", "b"))
    expected = binomtest(10, 10).proportion_ci(method="wilson")
    assert (first["ci_low"], first["ci_high"]) == pytest.approx((expected.low, 1.0))
    low, high = student.interval(0.95, 9, 0.975, 0.025)
    assert (second["ci_low"], second["ci_high"]) == pytest.approx((low, min(high, 1.0)))


def test_drop_and_pad_rates_are_what_the_engine_counted() -> None:
    counters = EngineCounters(routed_pairs=200, dropped_pairs=3, computed_rows=400, padded_rows=100)
    data = one_cell(trial(counters=counters))
    assert row(data, "drop_rate")["mean"] == pytest.approx(1.5)
    assert row(data, "pad_rate")["mean"] == pytest.approx(25.0)


def test_a_dense_model_has_no_drop_rate() -> None:
    rate = row(one_cell(trial(counters=EngineCounters())), "drop_rate")
    assert math.isnan(rate["mean"])
    assert rate["reason"] == "no token was routed to an expert"


def test_random_weights_and_sample_data_are_in_every_table() -> None:
    data = one_cell(trial(data_source="sample"), model_note="random weights")
    for frame in (tables.tidy(data), trials(data)):
        assert set(frame["model"]) == {"tiny-moe (random weights)"}
        assert set(frame["workload"]) == {"gsm8k (sample)"}
    wide = summary(data).iloc[0]
    assert (wide["model_note"], wide["data_source"]) == ("random weights", "sample")


def test_a_failed_cell_shows_the_sample_data_that_others_recorded() -> None:
    data = run([cell("c1"), cell("c2")], [failed("c1"), trial("c2", data_source="sample")])
    assert set(tables.tidy(data)["workload"]) == {"gsm8k (sample)"}


def test_slices_partition_the_tidy_table() -> None:
    data = example_run()
    frame = tables.tidy(data)
    parts = [tables.latency(data), tables.energy(data), tables.accuracy(data)]
    others = {c.metric for c in COUNTERS} | {"parameters", "weight_bytes", "peak_memory"}
    assert sum(len(p) for p in parts) + frame["metric"].isin(others).sum() == len(frame)


def test_requests_join_latency_energy_and_score_of_a_request() -> None:
    requests = [completion("a", 0.0, 4, (1.0, 2.0)), completion("b", 2.0, 4, (5.0, 6.0))]
    scores = (Score(metric="acc", value=1.0, sample_id="b"), Score(metric="acc", value=0.5, stderr=0.1, n=2))
    constant = PowerTrace(
        "nvml", "gpu", "power", "integrated power", np.linspace(0, 6, 601), np.full(601, 7.0), sample_interval_s=0.01
    )
    one = trial(completions=requests, scores=scores, energy=(reading("all", 42.0),))
    (frame,) = request_frames(run([cell()], [one], {one.trial_id: (constant,)}))
    frame = frame.set_index("sample_id")
    # 7 W over 2 s and over 4 s.
    assert frame["energy_j"].to_dict() == pytest.approx({"a": 14.0, "b": 28.0})
    assert set(frame["energy_method"]) == {"integrated power"}
    assert frame.loc["b", "score_acc"] == 1.0
    assert math.isnan(frame.loc["a", "score_acc"])
    assert frame["ttft_s"].to_dict() == {"a": 1.0, "b": 3.0}


def test_trials_show_what_a_request_did_not_compute() -> None:
    first = completion("a", n_prompt=9)
    (frame,) = request_frames(one_cell(trial(completions=[first, first.model_copy(update={"n_cached_tokens": 7})])))
    assert frame[["prompt_tokens", "cached_tokens"]].to_numpy().tolist() == [[9, 0], [9, 7]]


def test_a_request_too_short_for_its_meter_has_a_reason_instead_of_energy() -> None:
    coarse = PowerTrace(
        "battery", "pack", "held", "battery gauge", np.arange(0, 9, 0.25), np.full(36, 3.0), 0.25, update_period_s=0.25
    )
    one = trial(energy=(reading("all", 4.5, meter="battery"),))
    (frame,) = request_frames(run([cell()], [one], {one.trial_id: (coarse,)}))
    request = frame.iloc[0]
    assert math.isnan(request["energy_j"])
    assert request["energy_method"] == "missing"
    assert "unresolved" in request["energy_reason"]


def test_a_failed_trial_is_a_row_of_its_own() -> None:
    data = one_cell(failed(error="device lost"))
    assert trials(data)[["status", "failure", "requests"]].iloc[0].tolist() == ["failed", "device lost", 0]
    (frame,) = request_frames(data)
    assert frame.empty


def test_requests_in_parts_are_the_same_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part may have no score where another has one, and no energy."""
    cells = [cell("c1"), cell("c2")]
    scored = (Score(metric="acc", value=1.0, sample_id="s1"),)
    made = run(cells, [trial("c1", 0), failed("c1", 1), trial("c1", 2, scores=scored), trial("c2", 0), trial("c2", 1)])
    (whole,) = request_frames(made)
    monkeypatch.setattr("results.trial_tables.TRIALS_A_PART", 2)
    parts = list(request_frames(made))
    assert [len(p) for p in parts] == [1, 2, 1]
    assert "".join(csv_text(p, header=i == 0) for i, p in enumerate(parts)) == csv_text(whole)
    assert whole["score_acc"].isna().tolist() == [True, False, True, True]


def test_summary_is_one_row_per_cell_in_display_units() -> None:
    data = one_cell(trial(energy=(reading("all", 12.0), reading("prefill", 4.0), reading("decode", 3.0))))
    wide = summary(data).iloc[0]
    assert (wide["ttft_ms"], wide["tpot_ms"], wide["prefill_j_per_token"]) == pytest.approx((1000.0, 500.0, 1.0))
    assert (wide["energy_method"], wide["time_method"], wide["n"]) == ("counter", "measured", 1)
    assert "no idle baseline" in wide["reason"]
    assert len(summary(example_run())) == 12


def test_an_interval_of_a_time_does_not_go_below_0() -> None:
    """1 s and 9 s: Student's interval is 5 +- 50.8 s, and no mean time is below 0."""
    own = [
        trial("c1", i, completions=[completion("s", 0.0, token_times_s=(s, s + 1))]) for i, s in enumerate((1.0, 9.0))
    ]
    frame = tables.tidy(run([cell("c1")], own))
    row = frame[frame["metric"] == "ttft"].iloc[0]
    assert (row["mean"], row["ci_low"]) == (5.0, 0.0)
    assert row["ci_high"] == pytest.approx(5 + 12.7062 * 4, rel=1e-4)


def test_the_wide_row_has_the_figures_of_a_trial_in_its_own_units() -> None:
    """4 prompt tokens in 1 s, one more token in 0.5 s; 6 J in 2 s, of 6 tokens."""
    wide = summary(run([cell()], [trial(energy=(reading(),))])).iloc[0]
    worked_out = {
        "ttft_ms": 1000.0,
        "tpot_ms": 500.0,
        "e2e_ms": 1500.0,
        "prefill_token_per_s": 4.0,
        "decode_token_per_s": 2.0,
        "all_j_per_token": 1.0,
        "j_per_response": 6.0,
        "mean_power_w": 3.0,
    }
    assert {name: wide[name] for name in worked_out} == pytest.approx(worked_out)
