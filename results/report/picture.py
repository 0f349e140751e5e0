"""The page's first picture: arms between joules (across) and a score or seconds (up), as plain SVG.

It needs no script. Each arm has a symbol of its own, the same beside its name in every table; nothing is written over a
point. Joules and seconds start at 0, or are logarithmic where arms differ 20 times and more. A share of right answers
ends at 100 % and starts at the highest of 0, 50, 80 and 90 % that leaves every interval whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from results.report.arms import Arm
from results.report.numbers import Numbers, with_interval
from results.units import format_number

WIDTH, HEIGHT = 300, 190
LEFT, RIGHT, TOP, BOTTOM = 52, 18, 12, 36
LOG_FROM = 20.0
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""
SHARE_FLOORS = (0.9, 0.8, 0.5, 0.0)
SHAPES = (
    "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0",
    "M-3.6,-3.6h7.2v7.2h-7.2z",
    "M0,-5L4.6,3.6H-4.6z",
    "M0,-5L5,0L0,5L-5,0z",
    "M0,5L4.6,-3.6H-4.6z",
    "M-1.6,-4.6h3.2v3h3v3.2h-3v3h-3.2v-3h-3v-3.2h3z",
    "M4.8,0L-3.6,4.4V-4.4z",
    "M0,-5L1.5,-1.7L5,-1.5L2.3,0.8L3.1,4.4L0,2.4L-3.1,4.4L-2.3,0.8L-5,-1.5L-1.5,-1.7z",
)
"""Around 0, 10 wide. After the last one they come again, filled, and then in other colours."""


@dataclass(frozen=True)
class Point:
    """An arm. Ends are the mean where there is no interval."""

    arm: Arm
    x: float
    x_low: float
    x_high: float
    y: float
    y_low: float
    y_high: float


@dataclass(frozen=True)
class Axis:
    """title: with the unit. scale: what values are divided by to be shown. is_share: of right answers, in percent."""

    title: str
    scale: float = 1.0
    is_share: bool = False


@dataclass(frozen=True)
class Panel:
    """better: the way in which a point is better."""

    title: str
    better: str
    caption: str
    svg: Markup
    numbers: Numbers


def symbol(index: int, is_filled: bool = False) -> Markup:
    """An arm's symbol, for beside its name. index: of the arm. is_filled: always, as in a chart of lines."""
    mark = _mark(index, is_filled)
    return Markup('<svg class="symbol" viewBox="-6 -6 12 12" aria-hidden="true">{}</svg>').format(mark)


UP, DOWN = "\u2196 up and left is better", "\u2199 down and left is better"


def panel(title: str, better: str, caption: str, points: Sequence[Point], across: Axis, up: Axis) -> Panel:
    x = _Scale([(p.x, p.x_low, p.x_high) for p in points], across, LEFT, WIDTH - RIGHT)
    y = _Scale([(p.y, p.y_low, p.y_high) for p in points], up, HEIGHT - BOTTOM, TOP)
    told = "; ".join(f"{p.arm.name}: {_value(p.x, across)}, {_value(p.y, up)}" for p in points)
    description = f"{title}. {across.title} across, {up.title} up; {better[2:]}. {told}."
    parts = [*_grid(x, y, across, up), *(_point(p, x, y, across, up) for p in points)]
    svg = Markup('<svg class="picture" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        WIDTH, HEIGHT, description, Markup("").join(parts)
    )
    rows = tuple((p.arm.name, _told(p.x, p.x_low, p.x_high, across), _told(p.y, p.y_low, p.y_high, up)) for p in points)
    return Panel(title, better, caption, svg, Numbers(("Arm", across.title, up.title), rows))


def _told(value: float, low: float, high: float, axis: Axis) -> str:
    """With its interval, where it has one."""
    has_interval = (low, high) != (value, value) and math.isfinite(low) and math.isfinite(high)
    ends = (_value(low, axis), _value(high, axis)) if has_interval else (None, None)
    return with_interval(_value(value, axis), *ends)


class _Scale:
    """From values to pixels, with its ticks. An interval that reaches beyond what can be (below 0) ends at the edge."""

    def __init__(self, values: Sequence[tuple[float, float, float]], axis: Axis, from_px: float, to_px: float) -> None:
        """values: (mean, low, high) of each arm."""
        self._px = from_px, to_px
        means = [mean / axis.scale for mean, _, _ in values]
        ends = [v / axis.scale for own in values for v in own if math.isfinite(v)]
        low, high = min(ends), max(ends)
        if min(means) >= 0:
            low = max(low, 0.0)
        self.is_log = not axis.is_share and min(means) > 0 and max(means) / min(means) >= LOG_FROM
        if self.is_log:
            low = min(v for v in ends if v > min(means) / LOG_FROM)
        if axis.is_share:
            self.ends = next(f for f in SHARE_FLOORS if f <= max(low, 0.0)), 1.0
            self.ticks = [t for t in round_steps(*self.ends, 4) if t >= self.ends[0] - 1e-9]
        elif self.is_log:
            exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            self.ticks = [10.0**e for e in exponents]
            self.ends = self.ticks[0], self.ticks[-1]
        else:
            ticks = round_steps(min(low, 0.0), max(high, 0.0) or 1.0, 4)
            self.ticks, self.ends = ticks, (ticks[0], ticks[-1])

    def px(self, shown: float) -> float:
        low, high = self.ends
        part = math.log(shown / low) / math.log(high / low) if self.is_log else (shown - low) / (high - low)
        return self._px[0] + part * (self._px[1] - self._px[0])


def round_steps(low: float, high: float, n: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten that enclose both ends, about n of them."""
    rough = (high - low) / n
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(k * power for k in (1, 2, 2.5, 5, 10) if k * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def _grid(x: _Scale, y: _Scale, across: Axis, up: Axis) -> list[Markup]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for tick in y.ticks:
        at = round(y.px(tick), 1)
        parts.append(Markup('<path class="grid" d="M{},{}H{}"/>').format(LEFT, at, right))
        parts.append(
            Markup('<text x="{}" y="{}" text-anchor="end">{}</text>').format(LEFT - 5, at + 3.5, _tick(tick, up))
        )
    for tick in x.ticks:
        at = round(x.px(tick), 1)
        parts.append(Markup('<path class="grid" d="M{},{}V{}"/>').format(at, bottom, TOP))
        parts.append(
            Markup('<text x="{}" y="{}" text-anchor="middle">{}</text>').format(at, bottom + 14, _tick(tick, across))
        )
    parts.append(Markup('<path class="axis" d="M{},{}V{}H{}"/>').format(LEFT, TOP, bottom, right))
    middle = (LEFT + right) / 2
    parts.append(
        Markup('<text class="title" x="{}" y="{}" text-anchor="middle">{}</text>').format(
            middle, HEIGHT - 5, across.title
        )
    )
    parts.append(
        Markup('<text class="title" transform="translate(11 {}) rotate(-90)" text-anchor="middle">{}</text>').format(
            (TOP + bottom) / 2, up.title
        )
    )
    return parts


def _point(p: Point, x: _Scale, y: _Scale, across: Axis, up: Axis) -> Markup:
    at_x, at_y = (round(v, 1) for v in (x.px(p.x / across.scale), y.px(p.y / up.scale)))
    (x1, x2), (y1, y2) = (
        (round(s.px(_inside(low / a.scale, s)), 1), round(s.px(_inside(high / a.scale, s)), 1))
        for s, a, low, high in ((x, across, p.x_low, p.x_high), (y, up, p.y_low, p.y_high))
    )
    title = f"{p.arm.name}: {_value(p.x, across)}, {_value(p.y, up)}"
    return Markup(
        '<g class="point"><path class="interval-line {}" d="M{},{}H{}M{},{}V{}"/>'
        '<g transform="translate({} {})">{}<title>{}</title></g></g>'
    ).format(_colour(p.arm.index), x1, at_y, x2, at_x, y1, y2, at_x, at_y, _mark(p.arm.index), title)


def _inside(value: float, scale: _Scale) -> float:
    low, high = scale.ends
    return min(max(value, low), high)


def _mark(index: int, is_filled: bool = False) -> Markup:
    filled = " filled" if is_filled or index // len(SHAPES) % 2 else ""
    return Markup('<path class="mark {}{}" d="{}"/>').format(_colour(index), filled, SHAPES[index % len(SHAPES)])


def _colour(index: int) -> str:
    """Shape and filling come again after 16 arms, with another colour: 128 symbols are unlike."""
    return f"arm-{(index + index // (2 * len(SHAPES))) % len(SHAPES)}"


def _tick(value: float, axis: Axis) -> str:
    return f"{100 * value:.3g}" if axis.is_share else f"{value:.6g}"


def _value(value: float, axis: Axis) -> str:
    return f"{100 * value:.3g} %" if axis.is_share else format_number(value / axis.scale)
