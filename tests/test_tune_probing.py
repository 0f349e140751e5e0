"""Probes of a tuning session over made-up trials: what is used, what is measured again, and what ends a session."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from harness.matrix import CellPlan
from harness.tuning.checking import _words, verdict_of
from harness.tuning.constraints import is_right_or_wrong, too_hot, too_wrong
from harness.tuning.probing import Probe, SessionBrokenOffError, TrialProber, walk
from harness.tuning.profile import CheckedRatio
from harness.tuning.race import Ask, Failed, Reading, Rules, drive, measured_j
from harness.tuning.suggested import suggested_race
from results.environments import Conditions
from results.records import Completion, EnergyReading, Phase, Score
from results.trials import Failure, Trial

APART: tuple[Phase, ...] = ("prefill", "decode")


class FakeCell(NamedTuple):
    """As much of a `CellPlan` as a prober asks for."""

    cell_id: str
    is_modelled: bool = False

    @property
    def cell(self) -> Any:
        return self

    @property
    def label(self) -> str:
        return self.cell_id


def trial(
    cell: str = "a",
    repeat: int = 0,
    prefill_s: float = 0.5,
    decode_s: float = 2.0,
    joules: float | None = 3.0,
    marks: tuple[str, ...] = (),
    failure: Failure | None = None,
    scores: Sequence[Score] = (),
) -> Trial:
    """64 tokens of a prompt and 50 decoded ones."""
    end_s = 10.0 + prefill_s + decode_s
    done = Completion(
        request_id="r",
        sample_id="s",
        n_prompt_tokens=64,
        start_s=10.0,
        prefill_end_s=10.0 + prefill_s,
        end_s=end_s,
        token_ids=(1,) * 51,
        token_times_s=(10.0 + prefill_s, *[end_s] * 50),
    )
    read = [
        EnergyReading(
            phase=phase, meter="m", component="total", method="counter", duration_s=1.0, energy_j=joules,
            reason=None if joules is not None else "the counter stood still",
        )
        for phase in ("prefill", "decode", "all")
    ]  # fmt: skip
    return Trial(
        trial_id=f"{cell}{repeat}",
        cell_id=cell,
        repeat=repeat,
        status="ok" if failure is None else "failed",
        started_at="",
        prefill_tokens=64,
        decode_tokens=50,
        completions=() if failure else (done,),
        energy=() if failure else tuple(read),
        marks=marks,
        failure=failure,
        scores=tuple(scores),
    )


class Tape:
    """Measures what was recorded for each cell, in order."""

    def __init__(self, **recorded: list[Trial]) -> None:
        self.left = recorded
        self.kept: dict[str, list[Trial]] = {}

    def trials_of(self, cell_id: str) -> Sequence[Trial]:
        return tuple(self.kept.get(cell_id, ()))

    def measure(self, cell_plan: CellPlan) -> Trial:
        cell_id = cell_plan.cell.cell_id
        kept = self.kept.setdefault(cell_id, [])
        kept.append(self.left[cell_id].pop(0).model_copy(update={"repeat": len(kept)}))
        return kept[-1]


def prober(tape: Tape, *cells: str, **options: Any) -> TrialProber[str]:
    return TrialProber(tape, {cell: (FakeCell(cell),) for cell in cells}, APART, **options)  # type: ignore[dict-item]


def test_a_probe_gives_the_rate_and_the_power_of_each_phase() -> None:
    found = prober(Tape(a=[trial()]), "a").probe("a", 1)
    assert not isinstance(found, Failed)
    assert found["prefill"].reading == Reading(64 / 0.5, 3.0 / 0.5)
    assert found["decode"].reading == Reading(50 / 2.0, 3.0 / 2.0)


def test_a_workload_that_decodes_nothing_has_no_part_in_probes_of_decoding() -> None:
    """Choices by log-likelihood beside an answer, as a session under an accuracy floor asks them."""
    nothing = EnergyReading(
        phase="decode", meter="m", component="total", method="counter", duration_s=0.0, energy_j=None,
        reason="no decode tokens in this trial",
    )  # fmt: skip
    whole = trial()
    (done,) = whole.completions
    choice = trial("c").model_copy(
        update={
            "completions": (
                done.model_copy(update={"token_ids": (), "token_times_s": (), "end_s": done.prefill_end_s}),
            ),
            "decode_tokens": 0,
            "energy": tuple(nothing if read.phase == "decode" else read for read in whole.energy),
        }
    )
    both = TrialProber(Tape(a=[trial()], c=[choice]), {"a": (FakeCell("a"), FakeCell("c"))}, APART)  # type: ignore[dict-item]
    found = both.probe("a", 1)
    assert not isinstance(found, Failed)
    assert found["prefill"] == Probe(128, 1.0, 6.0, "counter")
    assert found["decode"] == Probe(50, 2.0, 3.0, "counter")
    with pytest.raises(SessionBrokenOffError, match="no decode tokens"):
        prober(Tape(c=[choice]), "c").probe("c", 1)


def test_a_disturbed_probe_is_made_again_and_one_without_joules_too() -> None:
    tape = Tape(a=[trial(marks=("contended",)), trial(joules=None), trial(decode_s=4.0), trial(decode_s=5.0)])
    found = prober(tape, "a").probe("a", 1)
    assert not isinstance(found, Failed)
    assert found["decode"].seconds == 4.0
    assert len(tape.trials_of("a")) == 3


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (trial(marks=("charging",)), "charging"),
        (trial(joules=None), "the counter stood still"),
        (trial(failure=Failure(kind="transient", error="adb: device offline", by_device=True)), "device offline"),
    ],
)
def test_a_device_that_cannot_be_measured_ends_the_session_and_blames_no_candidate(bad: Trial, words: str) -> None:
    tape = Tape(a=[bad] * 9 + [trial()])
    with pytest.raises(SessionBrokenOffError, match=words) as caught:
        prober(tape, "a").probe("a", 1)
    assert "--resume" in str(caught.value)
    # What is resumed has its patience back, and takes the first good one.
    while not isinstance(found := _again(tape), dict):
        assert tape.left["a"]
    assert found["decode"].seconds == 2.0


def test_a_session_that_others_disturb_names_the_key_and_says_that_it_makes_another_session() -> None:
    contended = trial(marks=("contended",))
    tape = Tape(a=[contended] * 3, b=[contended, trial(joules=None), contended])
    limited = prober(tape, "a", "b", max_foreign_cpu_share=0.25)
    with pytest.raises(SessionBrokenOffError) as caught:
        limited.probe("a", 1)
    assert "took more than protocol.max_foreign_cpu_share = 0.25 of the CPU: end them, and go on" in str(caught.value)
    assert "begin anew with another --out" in str(caught.value)
    # Other processes are not all that is wrong here.
    with pytest.raises(SessionBrokenOffError) as caught:
        limited.probe("b", 1)
    assert "max_foreign_cpu_share" not in str(caught.value)
    assert "put that right" in str(caught.value)


def _again(tape: Tape) -> Any:
    try:
        return prober(tape, "a").probe("a", 1)
    except SessionBrokenOffError as error:
        return error


def test_a_candidate_that_fails_by_itself_leaves_the_search_with_its_reason() -> None:
    tape = Tape(a=[trial(failure=Failure(kind="stable", error="out of memory"))])
    assert prober(tape, "a").probe("a", 1) == Failed("out of memory")
    assert prober(tape, "a").has("a", 5)


def at_c(*temperatures_c: float | None) -> tuple[Conditions, ...]:
    return tuple(Conditions(at_s=float(i), temperature_c=c) for i, c in enumerate(temperatures_c))


def test_a_candidate_leaves_at_the_first_probe_in_which_the_device_gets_too_hot() -> None:
    warm, hot = (trial().model_copy(update={"conditions": at_c(*told)}) for told in ((39.0, 42.0), (41.0, None, 42.5)))
    probes = prober(Tape(a=[warm, hot], b=[trial()]), "a", "b", heat_limit=lambda trials: too_hot(trials, 42.0))
    assert isinstance(probes.probe("a", 1), dict)
    told = Failed("kept out: the device was at 42.5 degC, over the limit 42 degC")
    assert [probes.probe("a", 2), probes.probe("a", 1)] == [told, told]
    assert probes.probe("b", 1) == Failed("kept out: the device tells no temperature, and the limit is 42 degC")


@pytest.mark.parametrize("mark", ["wrong answers", "cores not kept"])
def test_a_candidate_whose_own_marks_do_not_end_leaves_the_search_and_the_session_goes_on(mark: str) -> None:
    tape = Tape(a=[trial(marks=(mark,)) for _ in range(9)])
    assert prober(tape, "a").probe("a", 1) == Failed(mark)
    assert len(tape.kept["a"]) == 3
    # What is resumed measures it no more.
    assert prober(tape, "a").has("a", 1)
    assert prober(tape, "a").probe("a", 1) == Failed(mark)
    assert len(tape.kept["a"]) == 3


def test_a_session_that_goes_on_finds_what_came_before_a_failure() -> None:
    tape = Tape(a=[trial(decode_s=4.0), trial(failure=Failure(kind="stable", error="out of memory"))])
    first = [prober(tape, "a").probe("a", n) for n in (1, 2)]
    assert isinstance(first[0], dict)
    assert first[1] == Failed("out of memory")
    assert [prober(tape, "a").probe("a", n) for n in (1, 2)] == first


def test_searches_of_both_phases_share_probes_and_a_second_session_walks_the_same_way_without_measuring() -> None:
    def search(n: int) -> Generator[Ask[str], Reading | Failed, list[Reading | Failed]]:
        found = []
        for i in range(n):
            for arm in ("a", "b"):
                found.append((yield Ask(arm, i + 1, "candidates", 2)))
        return found

    tape = Tape(a=[trial("a", decode_s=1.0 + i) for i in range(4)], b=[trial("b", decode_s=9.0 + i) for i in range(4)])
    told: list[tuple[Phase, str, int]] = []

    def tell(phase: Phase, ask: Ask[str], nth: int, found: Probe | Failed) -> None:
        told.append((phase, ask.arm, nth))

    first = walk({"prefill": search(1), "decode": search(3)}, prober(tape, "a", "b"), tell)
    # Three rounds of decoding, of which the first serves prefill too.
    assert {cell: len(own) for cell, own in tape.kept.items()} == {"a": 3, "b": 3}
    assert [r.speed_tokens_per_s for r in first["decode"] if isinstance(r, Reading)] == pytest.approx(
        [50 / s for s in (1, 9, 2, 10, 3, 11)]
    )
    assert len(told) == 8
    before = list(told)
    told.clear()
    tape.left = {}
    again = walk({"prefill": search(1), "decode": search(3)}, prober(tape, "a", "b"), tell)
    assert again == first
    assert sorted(told) == sorted(before)


def answers(*right: int) -> list[Trial]:
    return [trial(scores=[Score(metric="acc", value=float(v), sample_id=str(i)) for i, v in enumerate(right)])]


def test_the_accuracy_floor_keeps_out_what_is_not_proven() -> None:
    same = answers(*[1, 0, 1, 1] * 25)
    assert too_wrong(same, same, 0.0) is None
    # 10 of 100 lost: -11/102 + 1/102 +- 1.96 sqrt((12/102 - (10/102)^2) / 102), so [-0.162, -0.034] by hand.
    worse = answers(*[1, 0, 1, 1] * 15, *[0, 0, 1, 1] * 10)
    assert too_wrong(worse, same, 0.2) is None
    assert "acc -10.00 %" in str(too_wrong(worse, same, 0.1))
    assert "right or wrong" in str(too_wrong([trial()], same, 0.1))
    assert is_right_or_wrong(same)
    assert not is_right_or_wrong([trial()])


def test_a_check_holds_only_where_it_surely_costs_no_more() -> None:
    def ratio(quantity: Any, value: float, low: float, high: float) -> CheckedRatio:
        return CheckedRatio(phase="decode", quantity=quantity, ratio=value, low=low, high=high)

    as_fast = ratio("time", 1.0, 0.9, 1.1)
    assert verdict_of([as_fast, ratio("energy", 0.8, 0.7, 0.9)], 0.08, "energy", False) == "holds"
    assert verdict_of([as_fast, ratio("energy", 0.9, 0.7, 1.1)], 0.08, "energy", False) == "not certain"
    assert verdict_of([as_fast, ratio("energy", 1.1, 1.05, 1.2)], 0.08, "energy", False) == "does not hold"
    # 1 / 0.92 is 1.087 times the time: surely more than that is too slow, however little it costs.
    too_slow = ratio("time", 1.3, 1.2, 1.4)
    assert verdict_of([too_slow, ratio("energy", 0.5, 0.4, 0.6)], 0.08, "energy", False) == "does not hold"
    unknown = CheckedRatio(phase="decode", quantity="energy", ratio=None, reason="no meter")
    assert verdict_of([as_fast, unknown], 0.08, "energy", False) == "not certain"
    assert verdict_of([ratio("time", 0.8, 0.7, 0.9), unknown], 0.08, "latency", False) == "holds"


def test_a_large_space_ends_at_its_optimum_and_its_seed_walks_the_same_way_again() -> None:
    """64 candidates on a grid, 3 % noise: J fall with the first key and speed with the second; the floor decides."""
    values = [8, 8]
    arms = [f"{i} {j}" for i in range(8) for j in range(8)]

    def answered(seed: int) -> tuple[str, list[str]]:
        rng = np.random.default_rng(7)
        asked: list[str] = []

        def answer(ask: Ask[str]) -> Reading:
            asked.append(ask.arm)
            i, j = map(int, ask.arm.split())
            speed = 100.0 - 3.0 * j
            joules = 2.0 + (i - 5) ** 2 + 0.3 * (7 - j)
            noise = np.exp(rng.normal(0.0, 0.03, 2))
            return Reading(speed * noise[0], joules * speed * noise[0] * noise[1])

        rules = Rules(most_probes=400, indifference=0.05)
        return drive(suggested_race(arms, values, rules, measured_j, seed), answer).chosen, asked

    chosen, asked = answered(1)
    # By hand: the least of 2 + (i - 5)^2 + 0.3 (7 - j) with 100 - 3 j >= 92 is at i = 5, j = 2.
    assert chosen == "5 2"
    assert len(set(asked)) < 64
    assert answered(1) == (chosen, asked)


def test_a_check_without_joules_says_so_in_its_sentence() -> None:
    """A meter that saw nothing in the one pair: it was an error behind a whole search."""
    found = [
        CheckedRatio(phase="decode", quantity="time", ratio=0.9),
        CheckedRatio(phase="decode", quantity="energy", ratio=None, reason="no meter"),
    ]
    words = _words(found, "not certain")
    assert "joules that are not known (no meter)" in words
    assert "(no meter) and 0.90× the time: the choice" in words


def test_a_ratio_of_a_check_without_an_interval_says_why_it_has_none() -> None:
    found = [
        CheckedRatio(phase="decode", quantity="time", ratio=0.9, low=0.8, high=1.0),
        CheckedRatio(phase="decode", quantity="energy", ratio=0.96, reason="n = 1: no interval from one pair"),
    ]
    told = "0.96× the joules (n = 1: no interval from one pair) and 0.90× [0.80, 1.00] the time"
    assert told in _words(found, "not certain")


def test_a_reason_that_all_ratios_of_a_check_share_is_told_once() -> None:
    reason = "the baseline scatters too widely over 2 pairs for an interval"
    found = [
        CheckedRatio(phase=phase, quantity=quantity, ratio=0.9, reason=reason)
        for phase in ("prefill", "decode")
        for quantity in ("time", "energy")
    ]
    words = _words(found, "not certain")
    assert words.count(reason) == 1
    assert words.endswith(f"No ratio has an interval: {reason}.")
