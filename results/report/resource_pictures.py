"""How busy units and links of a modelled machine were: a bar for each, in prefill and in decoding, and a table.

A bar is the whole phase: working alone, working while others work, waiting while others work, idle with the machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from markupsafe import Markup

from results.records import COMM
from results.report.arms import Arm
from results.report.operation_tables import percent
from results.resources import resource_place, shown_resource
from results.units import format_quantity

MOST_ARMS = 12
"""Of one picture; for those beyond there is resources.csv."""
LEFT_PX, BAR_PX, GAP_PX, LANE_PX, PITCH_PX, TITLE_PX, HEAD_PX = 86, 300, 14, 13, 16, 18, 16
LABEL_PX = 30
"""Width from which a bar has its share in it."""
STATES = ("alone", "overlap", "waiting", "idle")
SHOWN_PHASES = ("prefill", "decode")


@dataclass(frozen=True)
class ResourcePicture:
    """rows: a resource, and of each arm (seconds, joules) as text; empty where the arm has none."""

    title: str
    caption: str
    svg: Markup
    arms: tuple[Arm, ...]
    rows: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]


def resource_pictures(frame: pd.DataFrame, arms: Mapping[str, Arm]) -> list[ResourcePicture]:
    """frame: of `results.resources.resources_table`. One for each device and workload."""
    found = []
    for (device, workload), own in frame.groupby(["device", "workload"], sort=False):
        cells = list(dict.fromkeys(own["cell"]))
        shown = [(arms[cell], own[own["cell"] == cell]) for cell in cells]
        title = f"{workload} · {device}"
        hidden = len(shown) - MOST_ARMS
        caption = f"{hidden} more arms stand in the table below and in resources.csv." if hidden > 0 else ""
        svg = _picture(title, shown[:MOST_ARMS])
        found.append(ResourcePicture(title, caption, svg, tuple(arm for arm, _ in shown), _rows(own, cells)))
    return found


def _rows(own: pd.DataFrame, cells: Sequence[str]) -> tuple[tuple[str, tuple[tuple[str, str], ...]], ...]:
    whole = own[own["phase"] == "all"]
    told: dict[tuple[str, str], tuple[str, str]] = {}
    for row in _records(whole):
        joules = [row[f"{state}_joules"] for state in ("busy", "waiting", "idle")]
        told[row["cell"], row["resource"]] = (_seconds_words(row), _joules_words(joules))
    return tuple(
        (shown_resource(resource), tuple(told.get((cell, resource), ("", "")) for cell in cells))
        for resource in sorted(set(whole["resource"]), key=resource_place)
    )


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def _seconds_words(row: Mapping[str, float]) -> str:
    if math.isnan(row["busy_s"]):
        return "while any unit works"
    busy = f"busy {percent(row['busy_share'])}"
    if row["overlap_s"] > 0:
        busy += f" ({percent(row['overlap_share'])} with others)"
    rest = (f"{state} {percent(row[f'{state}_share'])}" for state in ("waiting", "idle") if row[f"{state}_s"] > 0)
    return ", ".join([busy, *rest])


def _joules_words(joules: Sequence[float]) -> str:
    if any(map(math.isnan, joules)):
        return ""
    named = zip(joules, ("busy", "waiting", "idle"), strict=True)
    return ", ".join(f"{format_quantity(j, 'J')} {state}" for j, state in named if j or state == "busy")


# --- the picture -----------------------------------------------------------------------------------------------------


def _picture(title: str, shown: Sequence[tuple[Arm, pd.DataFrame]]) -> Markup:
    parts: list[Markup] = []
    top = float(HEAD_PX)
    for i, phase in enumerate(SHOWN_PHASES):
        parts.append(_text(_left(i), HEAD_PX - 5, phase, "start", "name"))
    for arm, own in shown:
        top += TITLE_PX
        parts.append(_text(0, top - 5, arm.name, "start", "name"))
        lanes = own[(own["resource"] != COMM) & own["phase"].isin(SHOWN_PHASES)]
        for resource in dict.fromkeys(lanes["resource"]):
            parts.append(_text(LEFT_PX - 6, top + LANE_PX - 3, shown_resource(resource), "end"))
            for i, phase in enumerate(SHOWN_PHASES):
                of_phase = lanes[(lanes["resource"] == resource) & (lanes["phase"] == phase)]
                for row in _records(of_phase):
                    parts += _bar(_left(i), top, f"{arm.name}, {shown_resource(resource)}, {phase}", row)
            top += PITCH_PX
    return Markup(
        '<svg class="picture timeline uses" viewBox="0 0 {} {:.0f}" role="img" aria-label="{}">{}</svg>'
    ).format(
        LEFT_PX + 2 * BAR_PX + GAP_PX,
        top + 4,
        f"How busy units and links of {title} were; the table below has the figures.",
        Markup("").join(parts),
    )


def _left(phase: int) -> float:
    return LEFT_PX + phase * (BAR_PX + GAP_PX)


def _bar(left: float, top: float, whose: str, row: Mapping[str, float]) -> Iterator[Markup]:
    alone = row["busy_share"] - row["overlap_share"]
    shares = (alone, row["overlap_share"], row["waiting_share"], row["idle_share"])
    words = f"{whose}: {_seconds_words(row)}"
    begin = left
    for state, share in zip(STATES, shares, strict=True):
        width = BAR_PX * share
        if width > 0:
            yield Markup(
                '<rect class="{}" x="{:.2f}" y="{:.1f}" width="{:.2f}" height="{}"><title>{}</title></rect>'
            ).format(state, begin, top, width, LANE_PX, words)
        begin += width
    if BAR_PX * row["busy_share"] >= LABEL_PX:
        label = f"{100 * row['busy_share']:.0f} %"
        yield _text(left + BAR_PX * row["busy_share"] / 2, top + LANE_PX - 3, label, "middle", "in")


def _text(x: float, y: float, words: str, anchor: str, kind: str = "") -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(kind, x, y, anchor, words)
