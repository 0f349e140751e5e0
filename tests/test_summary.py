"""The terminal's last word on accuracy: changes against the reference, where weights have learnt something."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from harness.summary import print_summary
from results.environments import Conditions
from results.expert_heat import ExpertHeat, LayerForetold
from results.records import EnergyReading
from results.run_frames import RunFrames
from results.run_notes import run_notes
from results.runs import RunData
from tests.run_builders import cell, completion, reading, run, trial
from tests.scored_runs import two_arms


def printed(data: RunData, width: int = 200) -> str:
    out = io.StringIO()
    print_summary(RunFrames(data), Console(file=out, width=width))
    return out.getvalue()


def test_changes_against_the_reference_stand_in_a_line_with_their_test() -> None:
    data = two_arms("1" * 15 + "0" * 5, "1" * 11 + "0" * 8 + "1")
    # McNemar by hand: 2 (1 + 5) / 2^5 of 4 against 1; the interval as in the report.
    assert "gsm8k · host · acc against exact: tiers -0.150 [-0.4, 0.1], p = 0.38" in printed(data)


def test_random_weights_have_no_such_line() -> None:
    data = two_arms("10", "11")
    cells = tuple(c.model_copy(update={"model_note": "random weights"}) for c in data.cells)
    assert "against exact" in printed(data)
    assert "against exact" not in printed(replace(data, cells=cells))


def test_marked_trials_are_not_called_ok_as_on_the_page() -> None:
    data = two_arms("10", "11")
    first, *others = data.trials
    marked = replace(data, trials=(first.model_copy(update={"marks": ("contended",)}), *others))
    said = "5 trials ok, 0 failed, 1 marked, whose times and joules are in no mean"
    assert printed(marked).splitlines()[-1] == said


def test_four_of_four_is_not_certain_and_no_tool_is_named_that_did_not_say_so() -> None:
    said = printed(two_arms("1111", "1101"))
    # scipy.stats.binomtest(4, 4) and (3, 4), proportion_ci(method="wilson"): [0.510, 1] and [0.301, 0.954].
    assert "1.0 [0.5,1.0]" in said
    assert "0.8 [0.3,1.0]" in said
    assert "[ ] is that of an accuracy over its samples" in said
    assert "lm-eval" not in said


def test_the_half_beside_a_mean_reaches_its_intervals_farther_end() -> None:
    """Cut off at 0, the interval is [0, 14.7]: half of it, 7, is not how far the mean may be off."""
    trials = [trial(repeat=i, completions=[completion("a", 0.0, 4, (t, t + 1))]) for i, t in enumerate((1, 3))]
    # t_{0.975,1} = tan(0.475 pi) = 12.7; mean 2, s / sqrt(n) = 1.
    assert re.search(r"\b2±13\b", printed(run([cell()], trials)))


def test_each_of_the_two_meanings_of_plus_or_minus_is_told() -> None:
    """Each window states 5 % of its joules as one standard uncertainty; the note said that all ± are of intervals."""
    said = printed(two_arms("10", "10"))
    assert "joules counter (±5.00 % each)" in said
    assert "± is as far as the farther end of the 95 % interval over the trials" in said
    assert "In a title ± is one standard uncertainty of a window's joules." in said


def test_joules_of_a_recording_are_said_to_be_of_no_window_of_the_run() -> None:
    """A log of a meter in the wall's socket looked as if it were laid beside the run: ±0.1 %, and no word."""
    played = trial(energy=(reading(meter="replay", method="replayed"),))
    said = "host: joules are replayed: each window has the recording from its first row. They are not of this run."
    assert said in printed(run([cell()], [played])).splitlines()
    assert "replayed:" not in printed(two_arms("10", "10"))


def test_on_80_columns_nothing_is_cut_and_no_interval_is_torn() -> None:
    said = printed(two_arms("1" * 15 + "0" * 5, "1" * 11 + "0" * 8 + "1"), width=80)
    assert max(map(len, said.splitlines())) <= 80
    assert "…" not in said
    # scipy.stats.binomtest(15, 20).proportion_ci(method="wilson"): [0.531, 0.888].
    assert "0.75 [0.53,0.89] 3" in said
    lines = said.splitlines()
    above = next(i for i, line in enumerate(lines) if line.split() == ["prefill", "all"])
    assert lines[above + 1].index("token/s") == lines[above].index("prefill"), "whose tokens a second they are"
    ends = [line.index(word) + len(word) for line, word in zip(lines[above:], ("all", "J/token"), strict=False)]
    assert ends[0] == ends[1], "whose joules they are"


def test_a_terminal_that_is_narrower_than_a_table_loses_no_figure() -> None:
    """The last columns, and with them the accuracy, were cut off; a terminal folds the lines itself."""
    said = printed(two_arms("1" * 15 + "0" * 5, "1" * 11 + "0" * 8 + "1"), width=40)
    exact = next(line.split() for line in said.splitlines() if line.split()[:1] == ["exact"])
    assert exact[-2:] == ["0.75", "3"]
    assert "[0.53,0.89]" in said
    assert "[0.46,0.58]" in said
    assert "…" not in said


def test_the_answer_of_the_first_screen_stands_at_the_end_with_names_and_times_the_baseline() -> None:
    """Joules of the windows: 6, 6.1, 6.2 J against 3, 3.2, 3.4 J; the seconds are the same twice.

    9.6 / 18.3 = 0.525; a - 0.525 b has a standard deviation of 0.1475, so about 4.303 x 0.1475 / sqrt(3) / 6.1 = 0.06.
    """
    said = printed(two_arms("1" * 15 + "0" * 5, "1" * 11 + "0" * 8 + "1")).splitlines()
    start = next(i for i, line in enumerate(said) if line.startswith("host · gsm8k · times exact"))
    assert said[-1] == "6 trials ok, 0 failed"
    answer = "\n".join(said[start:])
    (tiers,) = (line for line in said[start:] if line.strip().startswith("tiers"))
    assert "0.52× [0.46,0.58] fewest joules" in tiers
    (exact,) = (line for line in said[start:] if line.strip().startswith("exact "))
    assert "1× (6.1 J)" in exact, "of what the others are times: (6 + 6.1 + 6.2) / 3"
    assert "1× (75 % of 20)" in exact
    assert "0.8× [0.6,1.1]" in tiers
    assert "Fewest joules for certain: tiers, 0.52× [0.46, 0.58]." in answer
    assert "Most accurate: not certain between exact, tiers (their difference may be 0)." in answer


def test_a_figure_without_an_interval_has_a_note_that_says_why() -> None:
    data = two_arms("10", "10")
    said = printed(replace(data, trials=tuple(t for t in data.trials if t.repeat == 0)))
    assert "(1) n = 1: no interval from one pair" in said


def test_a_note_names_the_arms_that_have_it_where_not_all_of_a_workload_have() -> None:
    data = two_arms("10", "10")
    (tiers,) = (cell.cell_id for cell in data.cells if cell.engine == "tiers")
    trials = [
        t.model_copy(update={"notes": ("of all", "of one") if t.cell_id == tiers else ("of all",)}) for t in data.trials
    ]
    found = run_notes(replace(data, trials=tuple(trials)))
    assert "gsm8k: of all." in found
    assert "tiers · gsm8k: of one." in found
    assert "gsm8k: of one." not in found


@pytest.mark.parametrize("name", ["cpu_policy", "gpu_limits"])
def test_a_rule_that_was_changed_between_two_trials_is_told_and_one_that_was_not_seen_is_no_change(name: str) -> None:
    """Neither trial is marked: within each the rule is one. A marked one is in no mean."""

    def told(*rules: tuple[str, ...] | None) -> list[str]:
        data = two_arms("10", "10")
        trials = [
            t.model_copy(update={"conditions": (Conditions.model_validate({"at_s": 0.0, name: rules[t.repeat]}),)})
            for t in data.trials
        ]
        marked = [t.model_copy(update={"marks": ("charging",) if t.repeat == 2 else ()}) for t in trials]
        return [line for line in run_notes(replace(data, trials=tuple(marked))) if "limits" in line]

    one, other = ("as it was",), ("the first", "the second")
    assert told(one, other, one) == [
        "host: clock limits changed between trials (as it was, then the first; the second): means are of both, and"
        " differences of arms may be theirs."
    ]
    assert told(one, one, other) == told(one, None, one) == []


def test_a_meter_that_saw_other_parts_in_some_trials_is_told() -> None:
    """As after a restart, where the counters of the CPU are readable by root again. gpu0's power checks its counter."""

    def told(*seen: tuple[str, ...]) -> list[str]:
        data = two_arms("10", "10")
        trials = [
            t.model_copy(update={"energy": tuple(reading("all", 1.0, component=part) for part in seen[t.repeat])})
            for t in data.trials
        ]
        return [line for line in run_notes(replace(data, trials=tuple(trials))) if "other parts" in line]

    gpu, both = ("total", "gpu0", "gpu0 power"), ("total", "gpu0", "cpu0")
    assert told(both, gpu, both) == [
        "host: joules of nvml are of other parts in some trials than in others (cpu0, gpu0; then one part): their means"
        " are of neither, and differences of arms may be of that."
    ]
    assert told(both, both, both) == told(gpu, ("total",), gpu) == told((), gpu, gpu) == []


def foretelling(n_layers: int) -> RunData:
    """Every trial of `tiers`: 10 tokens of two experts in each layer but the first; layer l recalls 2 l of 20."""
    told = tuple(
        LayerForetold(tokens=10, recalled=2 * layer, aligned=(layer, 0)) if layer else None for layer in range(n_layers)
    )
    heat = ExpertHeat(layers=tuple(range(n_layers)), chosen=((20, 0),) * n_layers, foretold=told)
    data = two_arms("11", "11")
    (tiers,) = (c.cell_id for c in data.cells if c.engine == "tiers")
    own = {t.trial_id for t in data.trials if t.cell_id == tiers}
    return replace(data, load_heat=lambda trial: heat if trial in own else None)


def test_an_arm_that_predicts_has_a_line_with_recall_and_ranks_of_each_layer() -> None:
    lines = [line for line in printed(foretelling(3)).splitlines() if "predictions" in line]
    assert lines == ["predictions of tiers, recall (right expert by rank, %): layer 1 10 % (10 0); layer 2 20 % (20 0)"]


def test_of_many_layers_it_tells_the_range() -> None:
    (line,) = (line for line in printed(foretelling(10)).splitlines() if "predictions" in line)
    assert line == ("predictions of tiers, recall: 10 % (layer 1) to 90 % (layer 9); every layer stands in experts.csv")


def test_a_note_is_of_figures_that_the_table_has() -> None:
    """Every arm of BoolQ had one that no request generated a token; of phases, that their joules were not known."""

    def notes(token_times_s: tuple[float, ...], *readings: EnergyReading) -> list[str]:
        done = [completion("a", 0.0, 4, token_times_s)]
        trials = [trial(repeat=i, completions=done, energy=readings) for i in range(2)]
        return [line for line in printed(run([cell()], trials)).splitlines() if line.startswith("[1]")]

    unread = reading("decode", None, reason="no reading lies in the phase")
    assert notes((), reading()) == []
    assert notes((1.0, 1.5), reading(), unread) == []
    assert notes((), reading("all", None, reason="a gap of 1 s")) == ["[1] a gap of 1 s"]
    assert notes(()) == ["[1] no meter was read in this trial"]


def test_a_note_tells_why_one_of_two_arms_lacks_a_time() -> None:
    trials = [trial("c1"), trial("c2", completions=[completion("a", 0.0, 4, (1.0,))])]
    data = run(
        [cell("c1"), cell("c2", engine="other")], [one.model_copy(update={"energy": (reading(),)}) for one in trials]
    )
    assert "[1] no request generated two tokens or more" in printed(data).splitlines()
