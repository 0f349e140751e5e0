"""Source 002's own searches in a session: their result, their constants, and the tree that is shown of them."""

from __future__ import annotations

import csv
import html
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vl_convert

from harness.plan import PlanError
from harness.tuning.aecs import PRESETS
from harness.tuning.asked import _evidence
from harness.tuning.checking import verdict_of
from harness.tuning.choice_table import savings
from harness.tuning.core_race import core_race
from harness.tuning.cores import races_all
from harness.tuning.display import candidate_records, candidate_rows, order_words, sentence, taken_words
from harness.tuning.pages import front_chart, write_session
from harness.tuning.power_heuristic import PowerHeuristic, ThreadHeuristic
from harness.tuning.presets import COUNTS, idle_constants, parameters_of, probed_once, told
from harness.tuning.probing import Probe
from harness.tuning.profile import Check, CheckedRatio, Fingerprint, TunedProfile
from harness.tuning.race import AllFailedError, Ask, Estimate, Failed, Reading, Rules, drive, measured_j, race
from harness.tuning.session import PhaseFound, SearchProbe, SessionFound, TuneOptions
from harness.tuning.space import Space
from harness.tuning.tree_picture import tree_chart, tree_rows
from tests.test_aecs import FIGURE_5, MATE_40_PRO


def exact(ask: Ask[Any]) -> Reading:
    return Reading(*FIGURE_5[ask.arm])


def test_a_preset_ends_where_the_source_ends_and_claims_no_certainty() -> None:
    """6.2 / 20.6 = 0.301 J is the least of those within 8 % of 21.8 token/s; {1, 3} was tried in stage 1 alone."""
    found = drive(probed_once(MATE_40_PRO, PRESETS["aecs-measured"]), exact)
    assert found.chosen == (0, 2, 0)
    assert not found.is_separated
    states = {one.arm: one.state for one in found.standings}
    assert states[1, 3, 0] == "not raced"
    assert states[0, 2, 0] == "chosen"
    assert states[1, 0, 0] == "too slow"
    assert found.floor_tokens_per_s == pytest.approx(0.92 * 21.8)
    assert all(one.cost is not None and one.cost.low is None for one in found.standings)


def test_a_candidate_that_fails_is_told_by_a_preset_too() -> None:
    def probe(ask: Ask[Any]) -> Reading | Failed:
        return Failed("not supported") if ask.arm == (0, 2, 0) else exact(ask)

    found = drive(probed_once(MATE_40_PRO, PRESETS["aecs-measured"]), probe)
    assert [(one.arm, one.reason) for one in found.standings if one.state == "failed"] == [((0, 2, 0), "not supported")]


def later(*failing: Any) -> Any:
    """Answers each the first time; these fail the second time, as one in whose probe the device gets too hot."""
    asked: list[Any] = []

    def probe(ask: Ask[Any]) -> Reading | Failed:
        asked.append(ask.arm)
        return Failed("too hot") if ask.arm in failing and asked.count(ask.arm) > 1 else exact(ask)

    return probe


@pytest.mark.parametrize("slowdown", [0.0, 0.01, 0.08])
def test_stage_1s_fastest_that_fails_in_stage_2_is_neither_chosen_nor_a_yardstick(slowdown: float) -> None:
    """Of 21.8 token/s. What is left: 21.0 token/s at 0.357 J, and 20.6 at 0.301 J."""
    asked = replace(PRESETS["aecs-measured"], slowdown=slowdown)
    found = drive(probed_once(MATE_40_PRO, asked), later((1, 2, 0)))
    assert found.fastest == (0, 3, 0)
    assert found.floor_tokens_per_s == pytest.approx((1 - slowdown) * 21.0)
    assert found.chosen == ((0, 2, 0) if slowdown == 0.08 else (0, 3, 0))
    states = [one.state for one in found.standings if one.arm == (1, 2, 0)]
    assert states == ["failed"]
    assert {step.parent for step in found.steps if step.arm == (0, 3, 0)} == {(1, 2, 0)}


def test_where_every_candidate_fails_in_stage_2_nothing_is_chosen() -> None:
    def probe(ask: Ask[Any]) -> Reading | Failed:
        return exact(ask) if ask.stage == "fastest" else Failed("too hot")

    with pytest.raises(AllFailedError, match="too hot"):
        drive(probed_once(MATE_40_PRO, PRESETS["aecs"]), probe)


def test_constants_are_read_and_all_bad_ones_told_at_once() -> None:
    found = parameters_of("aecs", 0.1, ["alpha=0.5", "scale_efficiency=0.3", "static_w=0.8", "tree=efficiency"])
    assert (found.alpha, found.slowdown, found.tree) == (0.5, 0.1, "efficiency")
    assert isinstance(found.heuristic, PowerHeuristic)
    assert (found.heuristic.scales["efficiency"], found.heuristic.scales["prime"]) == (0.3, 1.0)
    assert found.heuristic.static_w == 0.8
    assert told(found)["scale_efficiency"] == 0.3
    raced = parameters_of("tree", 0.08, ["alpha=1", "w_per_thread=2.5"])
    assert raced.heuristic == ThreadHeuristic(w_per_thread=2.5)
    # A race judges by what was measured, unless it is told otherwise.
    assert parameters_of("tree", 0.08, []).alpha == 0.0
    with pytest.raises(PlanError) as caught:
        parameters_of("tree", 0.08, ["alpha=2", "ends_at=0.9", "tree=oak", "alpha", "least_gain=true"])
    assert len(caught.value.problems) == 5


def test_where_few_selections_are_raced_whole_no_constant_of_the_tree_is_read() -> None:
    """Up to six (docs/tuning.md). A search of the source walks its tree on whatever device."""
    given = ["tree=fig6", "least_gain=0.05"]
    for search, n, n_idle in (("tree", 6, 2), ("tree", 7, 0), ("exhaustive", 39, 2), ("aecs", 3, 0)):
        found = parameters_of(search, 0.08, given)
        assert len(idle_constants(found, given, "energy", races_all(search, n))) == n_idle


def test_every_preset_says_what_it_is_by_its_constants() -> None:
    for name, preset in PRESETS.items():
        assert parameters_of(name, 0.08, [f"{k}={v}" for k, v in told(preset).items() if v is not None]) == preset


def shown(result: Any) -> Any:
    names = {one.arm: str(one.arm) for one in result.standings} | {step.arm: str(step.arm) for step in result.steps}
    return SimpleNamespace(space=SimpleNamespace(names=names)), SimpleNamespace(result=result)


@pytest.mark.parametrize("repeats", [True, False])
def test_the_tree_shows_which_move_made_which_candidate(repeats: bool) -> None:
    """By hand, Figure 6 below stage 1's {1 big, 2 middle}."""
    search: Any = core_race(MATE_40_PRO, Rules()) if repeats else probed_once(MATE_40_PRO, PRESETS["aecs-measured"])
    rows = tree_rows(*shown(drive(search, exact)))
    by_name = {one["name"]: one for one in rows}
    assert [one["name"] for one in rows][:2] == ["(1, 0, 0)", "(1, 1, 0)"]
    assert {name: (one["parent_row"] is not None and rows[one["parent_row"]]["name"], one["move"])
            for name, one in by_name.items()} == {
        "(1, 0, 0)": (False, "stage 1 begins"),
        "(1, 1, 0)": ("(1, 0, 0)", "one more core"),
        "(1, 2, 0)": ("(1, 1, 0)", "one more core"),
        "(1, 3, 0)": ("(1, 2, 0)", "one more core"),
        "(0, 3, 0)": ("(1, 2, 0)", "a smaller core for a bigger"),
        "(0, 2, 0)": ("(1, 1, 0)", "a smaller core for a bigger"),
        "(0, 1, 0)": ("(1, 0, 0)", "a smaller cluster for a bigger"),
    }  # fmt: skip
    assert by_name["(0, 2, 0)"]["chosen"]
    # Each stands behind its parent.
    assert all(one["parent_row"] is None or one["parent_row"] < one["row"] for one in rows)
    # Vega-Lite refuses a picture whose layers disagree on their axes.
    drawn = vl_convert.vegalite_to_vega(tree_chart(rows, "tree") | {"width": 700})
    assert "(0, 2, 0): a smaller core for a bigger; chosen" in json.dumps(drawn)


def test_savings_are_told_against_the_planned_arm_and_the_fastest() -> None:
    result = drive(probed_once(MATE_40_PRO, PRESETS["aecs-measured"]), exact)
    check = SimpleNamespace(ratios=[CheckedRatio(phase="decode", quantity="energy", ratio=0.8, low=0.7, high=0.95)])
    found: Any = SimpleNamespace(phase="decode", result=result)
    rows = {(one.against, one.quantity): one for one in savings(found, SimpleNamespace(check=check))}  # type: ignore[arg-type]
    assert rows["as planned", "energy"][2:5] == pytest.approx((0.2, 0.05, 0.3))
    fast, least = FIGURE_5[1, 2, 0], FIGURE_5[0, 2, 0]
    assert rows["the fastest", "energy"].value == pytest.approx(1 - (least[1] / least[0]) / (fast[1] / fast[0]))
    assert rows["the fastest", "time"].value == pytest.approx(1 - fast[0] / least[0])
    # 1.25 of the chosen's energy, [1.1, 1.6]: a fifth less, between 1 - 1/1.1 and 1 - 1/1.6.
    standings = tuple(
        one._replace(cost_over_chosen=Estimate(1.25, 1.1, 1.6)) if one.arm == (1, 2, 0) else one
        for one in result.standings
    )
    found.result = replace(result, standings=standings)
    (saved,) = [one for one in savings(found, SimpleNamespace(check=None)) if one[:2] == ("the fastest", "energy")]  # type: ignore[arg-type]
    assert saved[2:5] == pytest.approx((0.2, 1 - 1 / 1.1, 1 - 1 / 1.6))


def raced(*kept_out: Any, **options: Any) -> tuple[SessionFound[Any], PhaseFound[Any]]:
    """Selections of Figure 5, raced without noise. Energies as of a large model, 20 J a token and more."""
    arms = [(1, 2, 0), (0, 2, 0), (0, 1, 0)]
    asked = TuneOptions(phases=("decode",), **options)
    judge = None if asked.objective == "latency" else measured_j
    rules = Rules(objective=asked.objective, slowdown=asked.slowdown, most_probes=12)

    def answer(ask: Ask[Any]) -> Reading | Failed:
        speed, watts = FIGURE_5[ask.arm]
        return Failed("kept out") if ask.arm in kept_out else Reading(speed, 100 * watts)

    result = drive(race(arms, rules, judge, 0), answer)
    probe = Probe(50, 2.0, 30.0, "counter", None)
    probes = (SearchProbe(Ask(arms[0], 1, "candidates", 3), 1, probe),)
    found = PhaseFound("decode", result, probes)
    space = Space(dict.fromkeys(arms, ()), {arm: str(arm) for arm in arms}, {arm: {} for arm in arms}, ())
    return SessionFound(space, asked, (found,), "measured", ()), found


def test_the_picture_holds_the_floor_where_no_candidate_is_too_slow() -> None:
    """It was drawn left of the axis, over its numbers."""
    session, found = raced(slowdown=0.9)
    assert found.result.floor_tokens_per_s is not None
    assert found.result.floor_tokens_per_s < min(speed for speed, _ in FIGURE_5.values())
    first, last = next(
        layer["encoding"]["x"]["scale"]["domain"]
        for layer in front_chart(session, found)["layer"]
        if "scale" in layer["encoding"].get("x", {})
    )
    assert first <= found.result.floor_tokens_per_s < last


def test_a_preset_says_that_one_probe_set_the_floor() -> None:
    session, found = raced()
    once = replace(session, options=TuneOptions(search="aecs-measured", phases=("decode",)))
    assert "from one probe of (1, 2, 0)" in sentence(once, found)
    assert "the fastest is (1, 2, 0)" in sentence(session, found)


def test_a_session_for_latency_shows_no_columns_of_energy_and_the_fastest_first() -> None:
    session, found = raced(objective="latency")
    rows = candidate_rows(session, found)
    assert [row["candidate"] for row in rows] == ["(1, 2, 0)", "(0, 2, 0)", "(0, 1, 0)"]
    assert {key for row in rows for key in row if "J" in key or "energy" in key} == set()
    assert order_words(session.options) == "the fastest first"
    assert {row["energy_method"] for row in candidate_records(session, found)} == {"missing"}


def test_figures_of_a_session_are_told_to_their_last_digit() -> None:
    """A slowdown of 2.5 % is not 2 %, and 36697 mJ are not 3.67e+04. All else is slower by more than that."""
    session, found = raced(slowdown=0.025)
    words = sentence(session, found)
    assert "that are at most 2.5 % slower than the fastest" in words
    speed, watts = FIGURE_5[1, 2, 0]
    assert f" {1e5 * watts / speed:.0f} mJ/token (counter)" in words
    assert "at most 2.5 % slower" in sentence(*raced(slowdown=0.025, objective="pareto"))


def test_who_was_kept_out_is_not_said_to_have_not_been_raced() -> None:
    words = sentence(*raced((0, 2, 0), (0, 1, 0)))
    assert "(1, 2, 0) is the only candidate that was raced: " in words
    assert "2 left the search; their reasons stand with the candidates." in words
    assert "not raced" not in words


def test_a_single_candidate_is_told_without_others_that_there_are_not() -> None:
    """It cost least of those of 1 candidate, and no other of them may be better."""
    speed, watts = FIGURE_5[1, 2, 0]
    session, found = raced((0, 2, 0), (0, 1, 0))
    (one,) = [one for one in found.result.standings if one.state != "failed"]
    alone = replace(found, result=replace(found.result, standings=(one,)))
    session = replace(session, space=replace(session.space, cells={one.arm: ()}), phases=(alone,))
    assert sentence(session, alone) == (
        f"Decoding: (1, 2, 0) is the only candidate that was raced: {1e5 * watts / speed:.0f} mJ/token (counter) at"
        f" {speed} token/s."
    )


def checked(objective: str, *ratios: CheckedRatio) -> TunedProfile:
    unknown = dict.fromkeys(("machine", "cpu_model", "n_threads", "os", "torch", "kernels_sha256", "model_sha256"))
    mark = Fingerprint(
        device="host", joulebench="1", model="m", engine="dropless", weights="float32", program_sha256=None, **unknown
    )
    check = Check(at="2026-11-29", n_pairs=5, ratios=ratios, verdict="holds", words="It holds.")
    return TunedProfile(
        name="x", created_at="2026-11-29", fingerprint=mark, objective=objective, slowdown=0.08, engine={},
        settings={}, plan={"engine": [{}]}, evidence=(), check=check,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "judged_by"),
    [({"objective": "latency"}, "not asked"), ({"constants": {"alpha": 1.0}}, "modelled by the heuristic alone")],
)
def test_joules_of_the_check_are_told_by_their_meter_whatever_candidates_were_judged_by(
    tmp_path: Path, options: dict[str, Any], judged_by: str
) -> None:
    """A counter's stood below "not asked", and below a heuristic's name."""
    session, _ = raced(**options)
    energy = CheckedRatio(phase="decode", quantity="energy", ratio=0.8, low=0.7, high=0.9, method="counter")
    time = CheckedRatio(phase="decode", quantity="time", ratio=1.1, low=1.0, high=1.2)
    write_session(session, checked(session.options.objective, time, energy), tmp_path)
    page = (tmp_path / "tune.html").read_text(encoding="utf-8")
    # Against the planned arm, and beside it; against the fastest by what the search was judged by.
    assert (page.count(">Energy, counter<"), page.count(f">Energy, {judged_by}<")) == (2, 1)
    with (tmp_path / "choice.csv").open() as file:
        rows = {(row["against"], row["quantity"]): row["saving_method"] for row in csv.DictReader(file)}
    assert (rows["as planned", "energy"], rows["as planned", "time"]) == ("counter", "measured")
    if options.get("objective") != "latency":
        assert rows["the fastest", "energy"] == judged_by


def test_the_energy_of_a_heuristic_alone_is_in_joules_whatever_a_gauge_counts_in() -> None:
    session, found = raced(constants={"alpha": 1.0})
    gauge = tuple(replace(one, found=one.found._replace(method="relative gauge")) for one in found.probes)
    found = replace(found, probes=gauge)
    assert found.energy_unit == "gauge unit/token"
    assert {row["energy_unit"] for row in candidate_records(session, found)} == {"J/token"}
    assert " mJ/token (modelled by the heuristic alone)" in sentence(session, found)
    assert "mJ/token" in json.dumps(front_chart(session, found))


def test_what_plans_refuse_is_not_offered_to_them(tmp_path: Path) -> None:
    """A session whose check does not hold ended with "a plan takes it", and no plan did."""
    session, _ = raced()
    ratio = CheckedRatio(phase="decode", quantity="energy", ratio=1.3, low=1.2, high=1.4, method="counter")
    holds = checked("energy", ratio).model_copy(update={"settings": {"cores": "0"}})
    assert holds.check is not None
    lost = holds.model_copy(update={"check": holds.check.model_copy(update={"verdict": "does not hold"})})
    pages = {}
    for profile in (holds, lost):
        write_session(session, profile, tmp_path)
        page = html.unescape((tmp_path / "tune.html").read_text(encoding="utf-8"))
        pages[profile.check] = page[page.index("What to write in a plan") : page.index("Beside the arm as planned")]
    assert taken_words(holds) == 'a plan takes it by engine = "tuned:x"'
    assert 'engine = "tuned:x"' in pages[holds.check]
    assert taken_words(lost).startswith('no plan takes the profile "x", for its check does not hold; ')
    assert "tuned:x" not in pages[lost.check] + taken_words(lost)
    assert 'Nothing: no plan takes the profile "x"' in pages[lost.check]


def test_nothing_that_follows_from_replayed_joules_is_certain(tmp_path: Path) -> None:
    """A recording does not know which candidate runs: a slower one gets more of its joules."""
    session, found = raced()
    played = tuple(replace(one, found=one.found._replace(method="replayed")) for one in found.probes)
    found = replace(found, probes=played)
    session = replace(session, phases=(found,))
    told = sentence(session, found)
    assert " Not certain. The joules are replayed from a recording" in told
    assert "95 % confidence" not in told
    assert "95 % confidence" in sentence(*raced())
    measured, one = raced()
    assert _evidence(measured, one).is_separated
    assert not _evidence(session, found).is_separated
    for low, high in ((0.5, 0.6), (1.5, 1.6)):
        time = CheckedRatio(phase="decode", quantity="time", ratio=1.0, low=0.99, high=1.01)
        energy = CheckedRatio(phase="decode", quantity="energy", ratio=low, low=low, high=high, method="replayed")
        assert verdict_of([time, energy], 0.08, "energy", modelled=False) == "not certain"
        assert verdict_of([time, energy], 0.08, "latency", modelled=False) == "holds"
        counted = energy.model_copy(update={"method": "counter"})
        assert verdict_of([time, counted], 0.08, "energy", modelled=False) == ("holds" if low < 1 else "does not hold")
    write_session(session, checked("energy", time, energy), tmp_path)
    assert "No meter was read: the joules are replayed" in (tmp_path / "tune.html").read_text(encoding="utf-8")


def test_the_page_has_each_constant_with_its_default() -> None:
    page = (Path(__file__).parents[1] / "docs" / "tuning-race.md").read_text("utf-8")
    table = page[page.index("| constant |") :].split("\n\n")[0].splitlines()
    head, _, *rows = ([cell.strip(" `") for cell in line.split("|")[1:-1]] for line in table)
    assert head == ["constant", *PRESETS, "tree", "what"]
    for column, search in enumerate(head[1:-1], start=1):
        shown = {row[0]: row[column] for row in rows}
        constants = told(parameters_of(search, 0.08, []))
        of_presets = {*COUNTS, "ends_at", "order", "floor_from"}
        taken = {key: value for key, value in constants.items() if search in PRESETS or key not in of_presets}
        words = {key: f"{value:g}" if isinstance(value, int | float) else value or "" for key, value in taken.items()}
        assert shown == dict.fromkeys(shown, "") | words
