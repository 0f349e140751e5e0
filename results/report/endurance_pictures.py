"""Speed and watts of an endurance series over its minutes, with its levels and steps; and the same in numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from results.endurance import Level, Round, Series, power_method_of
from results.report.arms import Arm
from results.report.endurance_words import sentences_of
from results.report.picture import round_steps
from results.units import format_number

LEFT_PX, WIDE_PX, RIGHT_PX = 58, 600, 16
SPEED_PX, WATTS_PX, GAP_PX, TOP_PX, BELOW_PX = 150, 90, 24, 16, 36
MOST_POINTS = 400
"""Of one line: means of rounds that follow each other, where there are more."""
MOST_ROWS = 12
MINUTE_S = 60.0
NOT_TOLD = "not told"
"""By the device."""


@dataclass(frozen=True)
class EndurancePicture:
    """rows: (minutes, rounds, speed, watts, temperature, battery) as text."""

    title: str
    arm: Arm
    sentences: tuple[str, ...]
    svg: Markup
    speed_heading: str
    power_heading: str
    rows: tuple[tuple[str, ...], ...]


def endurance_pictures(found: Sequence[Series], arms: Mapping[str, Arm]) -> list[EndurancePicture]:
    return [_of_series(one, arms[one.cell.cell_id], several=_has_several(one, found)) for one in found]


def _has_several(one: Series, found: Sequence[Series]) -> bool:
    return sum(other.cell.cell_id == one.cell.cell_id for other in found) > 1


def _of_series(series: Series, arm: Arm, several: bool) -> EndurancePicture:
    title = f"{series.cell.workload} · {series.cell.device}" + (f" · series {series.number + 1}" if several else "")
    sentences = tuple(sentences_of(series))
    return EndurancePicture(
        title, arm, sentences, _svg(series, f"{title}. {'; '.join(sentences)}."),
        f"{series.phase or 'speed'}, token/s", f"W, {power_method_of(series.rounds)}", tuple(_rows(series)),
    )  # fmt: skip


# --- numbers ---------------------------------------------------------------------------------------------------------


def _speed(series: Series) -> Callable[[Round], float | None]:
    return lambda r: r.decode_per_s if series.phase == "decode" else r.prefill_per_s


def _rows(series: Series) -> Iterator[tuple[str, ...]]:
    """Of equal stretches of time; what a round is told at its end is told as the last of each."""
    length_s = series.duration_s / MOST_ROWS
    for k in range(MOST_ROWS):
        own = [r for r in series.rounds if k * length_s <= r.middle_s < (k + 1) * length_s]
        if not own:
            continue
        last = own[-1]
        yield (
            f"{format_number(k * length_s / MINUTE_S)} to {format_number((k + 1) * length_s / MINUTE_S)}",
            str(len(own)),
            _mean([_speed(series)(r) for r in own]),
            _mean([r.power_w for r in own]),
            NOT_TOLD if last.temperature_c is None else f"{last.temperature_c:.1f}",
            NOT_TOLD if last.battery_percent is None else f"{last.battery_percent:.0f}",
            NOT_TOLD if last.throttled is None else "yes" if any(r.throttled for r in own) else "no",
        )


def _mean(values: Sequence[float | None]) -> str:
    known = [v for v in values if v is not None]
    return format_number(sum(known) / len(known)) if known else "missing"


# --- the picture -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Panel:
    """top: of its plot. at_y: a value's pixel."""

    top: float
    height: float
    ticks: tuple[float, ...]

    def at_y(self, value: float) -> float:
        low, high = self.ticks[0], self.ticks[-1]
        return self.top + self.height * (1 - (value - low) / (high - low))


def _svg(series: Series, description: str) -> Markup:
    end_min = series.duration_s / MINUTE_S
    ticks = [t for t in round_steps(0.0, end_min, 6) if t <= end_min * 1.0001]

    def at_x(seconds: float) -> float:
        return LEFT_PX + WIDE_PX * seconds / MINUTE_S / end_min

    speeds = series.speeds
    watts = [(r, r.power_w) for r in series.rounds if r.power_w is not None]
    parts: list[Markup] = []
    top = float(TOP_PX)
    if speeds:
        panel = _panel(top, SPEED_PX, [v for _, v in speeds])
        parts += _frame(panel, f"{series.phase}, token/s")
        parts += _points(panel, at_x, speeds)
        parts += _levels(panel, at_x, series)
        parts += _steps(at_x, series, top, SPEED_PX)
        top += SPEED_PX + GAP_PX
    if watts:
        method = power_method_of(series.rounds)
        panel = _panel(top, WATTS_PX, [v for _, v in watts])
        parts += _frame(panel, f"W, {method}")
        parts += _points(panel, at_x, watts)
        parts += _steps(at_x, series, top, WATTS_PX)
        top += WATTS_PX + GAP_PX
    bottom = top - GAP_PX
    for tick in ticks:
        parts.append(_text(at_x(tick * MINUTE_S), bottom + 14, format_number(tick), "middle"))
    parts.append(_text(LEFT_PX + WIDE_PX / 2, bottom + 29, "minutes", "middle"))
    return Markup('<svg class="picture endurance" viewBox="0 0 {} {:.0f}" role="img" aria-label="{}">{}</svg>').format(
        LEFT_PX + WIDE_PX + RIGHT_PX, bottom + BELOW_PX, description, Markup("").join(parts)
    )


def _panel(top: float, height: float, values: Sequence[float]) -> _Panel:
    """From 0: what is lost of a level is seen as a share of it."""
    return _Panel(top, height, tuple(round_steps(0.0, max(values) or 1.0, 4)))


def _frame(panel: _Panel, title: str) -> Iterator[Markup]:
    for tick in panel.ticks:
        y = panel.at_y(tick)
        yield Markup('<path class="grid" d="M{},{:.1f}H{}"/>').format(LEFT_PX, y, LEFT_PX + WIDE_PX)
        yield _text(LEFT_PX - 5, y + 3.5, format_number(tick), "end")
    yield _text(LEFT_PX, panel.top - 5, title, "start", "name")


def _points(panel: _Panel, at_x: Callable[[float], float], shown: Sequence[tuple[Round, float]]) -> Iterator[Markup]:
    width = math.ceil(len(shown) / MOST_POINTS)
    for k in range(0, len(shown), width):
        own = shown[k : k + width]
        seconds = sum(r.middle_s for r, _ in own) / len(own)
        value = sum(v for _, v in own) / len(own)
        yield Markup('<circle class="round" cx="{:.1f}" cy="{:.1f}" r="1.8"><title>{}</title></circle>').format(
            at_x(seconds), panel.at_y(value), f"{format_number(seconds / MINUTE_S)} min: {format_number(value)}"
        )


def _levels(panel: _Panel, at_x: Callable[[float], float], series: Series) -> Iterator[Markup]:
    edges_s = [0.0, *(step.at_s for step in series.steps), series.duration_s]
    levels: list[Level | None] = [series.level] if not series.steps else [series.steps[0].before]
    levels += [step.after for step in series.steps]
    for (from_s, to_s), level in zip(pairwise(edges_s), levels, strict=True):
        if level is not None:
            yield Markup('<path class="level" d="M{:.1f},{:.1f}H{:.1f}"/>').format(
                at_x(from_s), panel.at_y(level.mean), at_x(to_s)
            )


def _steps(at_x: Callable[[float], float], series: Series, top: float, height: float) -> Iterator[Markup]:
    for step in series.steps:
        left, right = at_x(step.low_s), at_x(step.high_s)
        yield Markup('<rect class="when" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>').format(
            left, top, max(1.0, right - left), height
        )
        yield Markup('<path class="step" d="M{0:.1f},{1:.1f}v{2:.1f}"/>').format(at_x(step.at_s), top, height)


def _text(x: float, y: float, words: str, anchor: str, kind: str = "") -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(kind, x, y, anchor, words)
