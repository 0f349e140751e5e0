"""The page of a tuning session: what was chosen, how it was found, and how it does beside the planned arm."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from harness.tuning.choice_table import checked_method, choice_cells, choice_records, saved_cells
from harness.tuning.display import candidate_records, candidate_rows, order_words, probe_records, sentence, taken_words
from harness.tuning.probing import Arm, Probe
from harness.tuning.profile import CheckedRatio, TunedProfile, is_refuted
from harness.tuning.race import Estimate
from harness.tuning.session import PhaseFound, SessionFound
from harness.tuning.tree_picture import tree_chart, tree_rows
from results.report.charts import page_spec
from results.report.csv import csv_text
from results.report.files import replace_text
from results.report.picture import LOG_FROM
from results.report.plain_pages import frame, write_plain_pages
from results.report.plan_text import value_text
from results.units import format_share

PAGE, CANDIDATES_CSV, PROBES_CSV, CHOICE_CSV = "tune.html", "candidates.csv", "probes.csv", "choice.csv"
TITLES = {"prefill": "Prefill", "decode": "Decoding", "all": "Whole requests"}
STYLE = "td.chosen, th.chosen { font-weight: 600; } table.figures { width: auto; }"
ROW_PX, HEAD_PX = 22, 48
MARGIN = 1.15
"""Around the intervals of a chart, for the words beside its points."""

Charts = list[tuple[str, dict[str, Any]]]


class PhaseShown(NamedTuple):
    title: str
    words: str
    columns: list[str]
    rows: list[tuple[bool, list[str]]]
    """(whether it is the chosen, its cells)."""
    front_chart: str
    search_chart: str
    tree_chart: str
    choice: list[str]
    saved: list[str]
    n_probes: int
    n_selections: int
    noise: str
    method: str


def write_session(session: SessionFound[Arm], profile: TunedProfile, folder: Path) -> list[Path]:
    """The page and the tables. Raises `OSError`."""
    tables = {CANDIDATES_CSV: candidate_records, PROBES_CSV: probe_records}
    written = []
    for name, records in tables.items():
        rows = [row for found in session.phases for row in records(session, found)]
        replace_text(folder / name, csv_text(pd.DataFrame(rows)))
        written.append(folder / name)
    choice = choice_records(session, profile)
    replace_text(folder / CHOICE_CSV, csv_text(pd.DataFrame(choice)))
    written.append(folder / CHOICE_CSV)
    shown = context(session, profile)
    return written + write_plain_pages("harness.tuning", {PAGE: ("tune.html.j2", shown)}, folder)


def context(session: SessionFound[Arm], profile: TunedProfile) -> dict[str, Any]:
    charts: Charts = []
    phases = [_phase(session, found, profile, charts) for found in session.phases]
    return {
        **frame(f"Tuned: {profile.name}", charts, STYLE),
        "profile": profile,
        "disturbances": session.disturbances,
        "phases": phases,
        "settings": [f"{key} = {value_text(value)}" for key, value in profile.settings.items()],
        "threads_give_way": "cores" in profile.settings and "threads" in profile.plan["engine"][0],
        "order": order_words(session.options),
        "refuted": taken_words(profile) if is_refuted(profile) else "",
        "check_command": f"joulebench tune --check {shlex.quote(profile.name)}",
        "methods": [phase.method for phase in phases],
        "alpha": session.options.alpha,
        "checked": _by_phase(profile),
        "modelled": session.time_method == "modelled",
        "time_method": session.time_method,
        "energy_unit": f"m{session.cost_unit(session.phases[0]) or 'J/token'}",
        "checked_method": checked_method(profile) or phases[0].method,
    }


def _by_phase(profile: TunedProfile) -> list[tuple[str, list[CheckedRatio]]]:
    """The check's ratios of time and energy, prefill first."""
    ratios = () if profile.check is None else profile.check.ratios
    phases = dict.fromkeys(one.phase for one in ratios)
    return [(TITLES[phase], [one for one in ratios if one.phase == phase]) for phase in phases]


def _phase(session: SessionFound[Arm], found: PhaseFound[Arm], profile: TunedProfile, charts: Charts) -> PhaseShown:
    rows = [{"": str(i), **row} for i, row in enumerate(candidate_rows(session, found), start=1)]
    chosen = session.space.names[found.result.chosen]
    front = search = tree = ""
    if any(one.cost for one in found.result.standings):
        front = f"front-{found.phase}"
        charts.append((front, front_chart(session, found)))
    if found.probes:
        search = f"search-{found.phase}"
        charts.append((search, search_chart(session, found)))
    if branches := tree_rows(session, found):
        tree = f"tree-{found.phase}"
        charts.append((tree, tree_chart(branches, f"{TITLES[found.phase]}: the search as a tree")))
    noise = [
        f"{what} {format_share(value, '.1f')}"
        for what, value in (("speed", found.result.speed_noise), ("energy", found.result.cost_noise))
        if value is not None
    ]
    return PhaseShown(
        TITLES[found.phase],
        sentence(session, found),
        list(rows[0]),
        [(row["candidate"] == chosen, [str(value) for value in row.values()]) for row in rows],
        front,
        search,
        tree,
        choice_cells(session, found, profile),
        saved_cells(found, profile),
        found.result.n_probes,
        len(session.space.cells),
        ", ".join(noise) or "not known",
        session.cost_method(found) or ("not asked" if session.options.objective == "latency" else "no meter"),
    )


def front_chart(session: SessionFound[Arm], found: PhaseFound[Arm]) -> dict[str, Any]:
    """Energy of a token over speed, with intervals; the floor, and the front as a line."""
    import altair as alt

    result = found.result
    values = []
    for number, one in enumerate(result.standings, start=1):
        speed, cost = one.speed_tokens_per_s, one.cost
        if speed is None or cost is None:
            continue
        values.append(
            {
                "name": f"{number}: {session.space.names[one.arm]}" if one.arm == result.chosen else str(number),
                "speed": speed.value,
                "speed_low": speed.value if speed.low is None else speed.low,
                "speed_high": speed.value if speed.high is None else speed.high,
                "energy": 1e3 * cost.value,
                "energy_low": 1e3 * (cost.value if cost.low is None else cost.low),
                "energy_high": 1e3 * (cost.value if cost.high is None else cost.high),
                "chosen": one.arm == result.chosen,
                "front": one.arm in result.front,
            }
        )
    base = alt.Chart(alt.InlineData(values=values))
    speeds = [one.speed_tokens_per_s for one in result.standings]
    apart = alt.Axis(tickCount=6, labelOverlap="greedy", labelSeparation=8)
    floor_tokens_per_s = result.floor_tokens_per_s
    if floor_tokens_per_s is not None:
        # It lies below all candidates where none is too slow.
        speeds.append(Estimate(floor_tokens_per_s, None, None))
    x = alt.X("speed:Q", title="token/s", axis=apart, scale=_scale(speeds))
    y = alt.Y(
        "energy:Q", title=f"m{session.cost_unit(found)}", scale=_scale([one.cost for one in result.standings], 1e3)
    )
    ink = alt.value("var(--ink-2)")
    layers = [
        base.mark_rule(strokeWidth=1).encode(x="speed_low:Q", x2="speed_high:Q", y=y, color=ink),
        base.mark_rule(strokeWidth=1).encode(x=x, y="energy_low:Q", y2="energy_high:Q", color=ink),
    ]
    if len(result.front) > 1:
        layers.append(
            base.transform_filter("datum.front").mark_line(strokeDash=[4, 3], color="var(--ink-2)").encode(x=x, y=y)
        )
    if floor_tokens_per_s is not None:
        floor = alt.Chart(alt.InlineData(values=[{"floor": floor_tokens_per_s, "words": "floor"}]))
        layers.append(floor.mark_rule(color="var(--accent-2)", strokeWidth=1.5).encode(x="floor:Q"))
        layers.append(
            floor.mark_text(align="right", dx=-4, baseline="top", color="var(--ink)").encode(
                x="floor:Q", y=alt.value(4), text="words:N"
            )
        )
    fill = alt.condition("datum.chosen", alt.value("var(--accent)"), alt.value("var(--paper, white)"))
    points = base.mark_circle(size=110, stroke="var(--accent)", strokeWidth=1.5, opacity=1).encode(x=x, y=y, fill=fill)
    words = base.mark_text(align="left", dx=9, dy=-9, color="var(--ink)").encode(x=x, y=y, text="name:N")
    return page_spec(alt.layer(*layers, points, words), 300, f"{TITLES[found.phase]}: energy over speed")


def _scale(estimates: Sequence[Estimate | None], shown_times: float = 1.0) -> Any:
    """Whole intervals are in it. Of powers of ten where candidates differ much, as on the first screen of a run."""
    import altair as alt

    known = [estimate for estimate in estimates if estimate is not None]
    low = shown_times * min(one.value if one.low is None else one.low for one in known)
    high = shown_times * max(one.value if one.high is None else one.high for one in known)
    if max(one.value for one in known) / min(one.value for one in known) >= LOG_FROM:
        # As it is: rounded to powers of ten most of the chart may be empty.
        return alt.Scale(type="log", domain=[low / MARGIN, high * MARGIN], nice=False)
    room = MARGIN - 1.0
    return alt.Scale(domain=[max(0.0, low - room * (high - low)), high + 2 * room * (high - low) + 1e-12], zero=False)


def search_chart(session: SessionFound[Arm], found: PhaseFound[Arm]) -> dict[str, Any]:
    """A row for each candidate, a mark for each probe: when a candidate leaves, its row ends."""
    import altair as alt

    names = session.space.names
    probed = dict.fromkeys(names[one.ask.arm] for one in found.probes)
    order = [*dict.fromkeys([*(names[one.arm] for one in found.result.standings), *probed])]
    stages = {"fastest": "in search of the fastest", "suggested": "suggested by Optuna", "candidates": "raced"}
    values = [
        {
            "name": names[one.ask.arm],
            "round": one.ask.round,
            "stage": stages[one.ask.stage] if isinstance(one.found, Probe) else "failed",
        }
        for one in found.probes
    ]
    base = alt.Chart(alt.InlineData(values=values))
    y = alt.Y(
        "name:N", title=None, sort=order, axis=alt.Axis(ticks=False, domain=False, labelPadding=8, labelLimit=260)
    )
    x = alt.X("round:Q", title="round of probes", axis=alt.Axis(tickMinStep=1, format="d"), scale=alt.Scale(zero=False))
    seen = {str(value["stage"]) for value in values}
    shapes = dict(zip([*stages.values(), "failed"], ("triangle-up", "diamond", "circle", "cross"), strict=True))
    shape = alt.Shape("stage:N", legend=alt.Legend(title=None, orient="top", labelColor="var(--ink)")).scale(
        domain=[name for name in shapes if name in seen], range=[mark for name, mark in shapes.items() if name in seen]
    )
    line = base.mark_line(color="var(--rule-2)").encode(x=x, y=y, detail="name:N")
    points = base.mark_point(filled=True, size=55, color="var(--accent)", opacity=1).encode(x=x, y=y, shape=shape)
    return page_spec(
        alt.layer(line, points), HEAD_PX + ROW_PX * len(order), f"{TITLES[found.phase]}: probes of each candidate"
    )
