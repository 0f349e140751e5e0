"""What a technique did, as figures in CSV, page and terminal."""

from __future__ import annotations

import io
import math

from rich.console import Console

from harness.summary import print_summary
from results import tables
from results.counters import COUNTERS, CountedLayers, EngineCounters
from results.report.html import page_context
from results.run_frames import RunFrames
from results.summary import summary
from tests.run_builders import cell, run, trial
from tests.test_tables import one_cell, row


def test_a_counter_is_one_line_and_reaches_csv_page_and_terminal() -> None:
    """Of two windows with 10 and 30 loads the mean is 20; what nothing counted has no row."""
    both = [trial(repeat=i, counters=EngineCounters(routed_pairs=8, weight_loads=n)) for i, n in enumerate((10, 30))]
    data = one_cell(*both)
    assert row(data, "weight_loads")["mean"] == 20
    assert row(data, "weight_loads")["unit"] == "experts"
    assert summary(data)["weight_loads"].tolist() == [20]
    (experts,) = [t for t in page_context(data)["figure_tables"] if t.title == "Experts"]
    assert [title for title, _ in experts.headings] == ["dropped", "padded", "calls", "loads", "moved"]
    ((_, (arm,)),) = experts.parts
    assert arm.entries[3].text.startswith("20")
    assert arm.method == ("counted",)
    assert not {"hits", "misses"} & set(tables.tidy(data)["metric"])


def test_the_name_of_each_column_has_its_unit() -> None:
    """A recall of 0.75 is 0.75 in `experts.csv` and 75 in the summary, whose column had the same name."""
    ends = {"%": "_percent", "B/s": "_bytes_per_s"}
    named = {counter.unit: counter.column for counter in COUNTERS if counter.unit in ends}
    assert set(named) == set(ends)
    wrong = [c.column for c in COUNTERS if c.unit in ends and not c.column.endswith(ends[c.unit])]
    wrong += [c.column for c in COUNTERS if c.unit == "B" and "bytes" not in c.column]
    assert wrong == []
    counters = EngineCounters(routed_pairs=8, predicted=4, recalled=3, decode_timed_s=10.0, decode_waited_s=4.0)
    told = summary(one_cell(trial(counters=counters)))
    assert (told["recall_percent"].tolist(), told["wait_percent"].tolist()) == ([75], [40])


def test_an_arm_that_counts_nothing_is_not_called_counted() -> None:
    """Figures of a server are missing in every column, and the column of methods said that they were counted."""
    data = run(
        [cell("a", engine="dropless"), cell("b", engine="vllm")],
        [trial("a", counters=EngineCounters(routed_pairs=8, bytes_exchanged=640)), trial("b", counters=None)],
    )
    found = {t.title: [arm for _, arms in t.parts for arm in arms] for t in page_context(data)["figure_tables"]}
    for title in ("Experts", "Exchanges"):
        assert [arm.method for arm in found[title]] == [("counted",), ("missing",)]
        assert {entry.text for entry in found[title][1].entries} == {"missing"}


def test_what_a_cache_hit_and_missed_has_rows_where_there_is_one() -> None:
    data = one_cell(trial(counters=EngineCounters(routed_pairs=8, hits=3, misses=5, bytes_moved=7)))
    assert [row(data, metric)["mean"] for metric in ("hits", "misses", "bytes_moved")] == [3, 5, 7]
    (cache,) = [t for t in page_context(data)["figure_tables"] if t.title == "Cache of experts"]
    assert [title for title, _ in cache.headings] == ["hits", "misses"]


def test_what_units_sent_each_other_has_a_row_where_they_did() -> None:
    data = one_cell(trial(counters=EngineCounters(routed_pairs=8, bytes_exchanged=640)))
    assert (row(data, "bytes_exchanged")["mean"], row(data, "bytes_exchanged")["unit"]) == (640, "B")
    (exchanges,) = [t for t in page_context(data)["figure_tables"] if t.title == "Exchanges"]
    assert [title for title, _ in exchanges.headings] == ["exchanged"]
    assert [arm.method for _, arms in exchanges.parts for arm in arms] == [("counted",)]
    silent = one_cell(trial(counters=EngineCounters(routed_pairs=8)))
    assert "bytes_exchanged" not in set(tables.tidy(silent)["metric"])


def test_padding_that_was_not_fetched_has_a_row_where_a_layout_leaves_any() -> None:
    data = one_cell(trial(counters=EngineCounters(routed_pairs=8, computed_rows=12, padded_rows=4, rows_not_fetched=3)))
    assert (row(data, "rows_not_fetched")["mean"], row(data, "rows_not_fetched")["unit"]) == (3, "rows")
    (padding,) = [t for t in page_context(data)["figure_tables"] if t.title == "Padding"]
    assert [title for title, _ in padding.headings] == ["not fetched"]
    assert [arm.method for _, arms in padding.parts for arm in arms] == [("counted",)]
    fetched = one_cell(trial(counters=EngineCounters(routed_pairs=8, computed_rows=12, padded_rows=4)))
    assert "rows_not_fetched" not in set(tables.tidy(fetched)["metric"])


def test_a_store_from_before_a_counter_says_that_it_was_not_counted() -> None:
    stored = {"routed_pairs": 8, "dropped_pairs": 0, "computed_rows": 8, "padded_rows": 0, "expert_calls": 4}
    data = one_cell(trial(counters=EngineCounters.model_validate(stored)))
    assert math.isnan(row(data, "weight_loads")["mean"])
    assert row(data, "weight_loads")["reason"] == "weight loads were not counted"
    assert row(data, "expert_calls")["mean"] == 4


def test_what_was_counted_in_one_trial_has_no_spread_to_speak_of() -> None:
    data = one_cell(trial(counters=EngineCounters(routed_pairs=8, computed_rows=8, expert_calls=4)))
    (experts,) = [t for t in page_context(data)["figure_tables"] if t.title == "Experts"]
    ((_, (arm,)),) = experts.parts
    calls = arm.entries[[title for title, _ in experts.headings].index("calls")]
    assert calls.text == "4"
    assert calls.below == ()


def test_counters_add_up_and_what_none_counted_stays_unknown() -> None:
    parts = [EngineCounters(routed_pairs=2, hits=1), EngineCounters(routed_pairs=3, weight_loads=5)]
    assert EngineCounters.total(parts) == EngineCounters(routed_pairs=5, hits=1, weight_loads=5)
    assert EngineCounters.total([]) == EngineCounters()


def test_every_counter_of_the_record_can_be_read() -> None:
    """Each field changes some figure."""
    names = [name for name in EngineCounters.model_fields if name != "counted_layers"]  # what they are of
    base = EngineCounters.model_validate({name: 10 + n for n, name in enumerate(names)})
    for name in names:
        other = base.model_copy(update={name: getattr(base, name) + 1})
        assert any(counter.read(base) != counter.read(other) for counter in COUNTERS), name


def test_counters_of_other_layers_than_are_priced_say_so_wherever_they_stand() -> None:
    """A model of 4 layers ran, one of 32 is priced: its operations are eight times as many."""
    layers = CountedLayers(n_run=4, n_priced=32)
    cells = [cell(name, engine=name, device="model:toy") for name in ("first", "second")]
    trials = [
        trial(c.cell_id, counters=EngineCounters(routed_pairs=8, expert_calls=n, counted_layers=layers))
        for c, n in zip(cells, (714, 100), strict=True)
    ]
    data, words = run(cells, trials), "of the 4 layers that ran; priced are 32"
    assert summary(data)["counters_of"].tolist() == [words, words]
    (experts,) = [t for t in page_context(data)["figure_tables"] if t.title == "Experts"]
    ((_, arms),) = experts.parts
    assert [arm.method for arm in arms] == [("counted", words)] * 2
    out = io.StringIO()
    print_summary(RunFrames(data), Console(file=out, width=100))
    assert f"\ncalls a window ({words}): first 714; second 100" in out.getvalue()


def test_the_terminal_tells_counters_that_part_the_arms() -> None:
    """No column: 80 columns hold no more. Equal ones say nothing."""
    arms = [("c1", "dropless", 16), ("c2", "grouped", 4)]
    cells = [cell(cell_id, engine=name) for cell_id, name, _ in arms]
    trials = [trial(c, counters=EngineCounters(routed_pairs=8, expert_calls=n, weight_loads=16)) for c, _, n in arms]
    out = io.StringIO()
    print_summary(RunFrames(run(cells, trials)), Console(file=out, width=80))
    assert "\ncalls a window: dropless 16; grouped 4" in out.getvalue()
    assert "loads, experts" not in out.getvalue()
