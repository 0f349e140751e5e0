"""Conclusions of the kind "this arm is first", and which constants of a sheet they hang on.

With one constant changed by a fifth, a time or an energy changes by a quarter at most, and every arm moves in the same
direction. So an arm that takes 1.25 times the best or more cannot become the first, and only nearer ones are asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from results.report.charts import page_spec

FACTORS: Final = (0.8, 1.2)
REACH: Final = 1.25
"""How many times the best an arm can take that comes first when one constant is changed by a fifth."""
FLOAT_NOISE: Final = 1e-9
MOST_DRAWN: Final = 8
"""Constants of a conclusion in its chart: those of the most effect."""
ROW_PX, HEAD_PX, WORDS_PX = 34, 40, 24
CHANGES: Final = {0.8: "- 20 %", 1.2: "+ 20 %"}


@dataclass(frozen=True)
class Effect:
    """Of one constant on one conclusion.

    where: the machine, and what was asked. lead: what the best other arm takes, over what the arm takes that is first
    by the sheet. Below 1 the conclusion flips, and `first` is another. lead_before: by the sheet itself. None: no other
    arm is near. first: None where none is left.
    """

    where: str
    metric: str
    constant: str
    factor: float
    before: str
    lead_before: float | None
    first: str | None
    lead: float | None

    @property
    def flips(self) -> bool:
        return self.first != self.before

    @property
    def words(self) -> str:
        changed = "a fifth less" if self.factor < 1 else "a fifth more"
        return (
            f"{self.where}, {self.metric}: {self.before} is first; with {self.constant} {changed} it is"
            f" {self.first or 'nobody'}"
        )


def ranking(costs: Mapping[str, float]) -> list[str]:
    """The least first; those that sums in another order set apart count as equal, and keep their order."""
    return sorted(costs, key=lambda name: float(f"{costs[name]:.9e}"))


def near_the_first(costs: Mapping[str, float]) -> list[str]:
    """Arms that can be first when a constant changes, the first in front; of equal ones in their order."""
    ranked = ranking(costs)
    return [name for name in ranked if costs[name] < REACH * costs[ranked[0]]] or ranked[:1]


def effect_on(
    where: str,
    metric: str,
    constant: str,
    factor: float,
    costs: Mapping[str, float],
    changed: Mapping[str, float],
) -> Effect:
    """costs: by the sheet, of those near the first; changed: of the same, with the constant changed. A tie stays."""
    before, *others = near_the_first(costs)
    lead_before = costs[others[0]] / costs[before] if others else None
    rest = ranking({name: cost for name, cost in changed.items() if name != before})
    lead = changed[rest[0]] / changed[before] if before in changed and rest else None
    stays = before in changed and (lead is None or lead >= 1 - FLOAT_NOISE)
    first = before if stays else (rest[0] if rest else None)
    return Effect(where, metric, constant, factor, before, lead_before, first, lead)


COLUMNS = ("where", "metric", "constant", "factor", "first", "lead", "first_changed", "lead_changed", "flips")


def effect_records(found: Sequence[Effect]) -> Iterator[Mapping[str, Any]]:
    """For the CSV and `--json`."""
    for one in found:
        figures = (
            one.where, one.metric, one.constant, one.factor, one.before, one.lead_before, one.first, one.lead,
            one.flips,
        )  # fmt: skip
        yield dict(zip(COLUMNS, figures, strict=True))


def conclusion_words(own: Sequence[Effect]) -> str:
    """own: all effects on one conclusion."""
    one = own[0]
    words = f"{one.metric.capitalize()}: {one.before} is first"
    if one.lead_before is None:
        return f"{words}; no other arm takes less than {REACH:g} times as much."
    return f"{words}; the next takes {one.lead_before:.2f} times as much."


def flip_words(own: Sequence[Effect]) -> str:
    """Empty where nothing flips."""
    told = [
        f"{one.constant} {'a fifth less' if one.factor < 1 else 'a fifth more'} ({one.first or 'nothing fits'} is first"
        " then)"
        for one in own
        if one.flips
    ]
    return "; ".join(told)


def leads_chart(own: Sequence[Effect]) -> dict[str, Any]:
    """The lead of the first arm with each constant a fifth less and a fifth more; left of 1 another is first."""
    import altair as alt

    known = [one for one in own if one.lead is not None and one.lead_before is not None]
    spans = {one.constant: 0.0 for one in known}
    for one in known:
        spans[one.constant] = max(spans[one.constant], abs((one.lead or 0.0) - (one.lead_before or 0.0)))
    kept = sorted((name for name in spans if spans[name] > FLOAT_NOISE), key=lambda name: -spans[name])[:MOST_DRAWN]
    values = [
        {"constant": one.constant, "lead": one.lead, "change": CHANGES[one.factor]}
        for one in known
        if one.constant in kept
    ]
    base = alt.Chart(alt.InlineData(values=values))
    y = alt.Y("constant:N", title=None, sort=kept, axis=alt.Axis(ticks=False, domain=False, labelLimit=420))
    scale = alt.Scale(zero=False, padding=WORDS_PX)
    axis = alt.Axis(labelOverlap=True)
    x = alt.X("lead:Q", title="next arm over the first; left of 1 another is first", scale=scale, axis=axis)
    fill = alt.Fill("change:N", legend=None).scale(
        domain=list(CHANGES.values()), range=["var(--accent)", "var(--accent-2)"]
    )
    dots = base.mark_circle(size=70, opacity=1).encode(x=x, y=y, fill=fill)
    # Above and below, so that both can be read where both changes come to the same.
    words = [
        base.transform_filter(alt.datum.change == change)
        .mark_text(dy=dy, fontSize=9, color="var(--ink)")
        .encode(x=x, y=y, text="change:N")
        for change, dy in zip(CHANGES.values(), (11, -9), strict=True)
    ]
    edge = alt.Chart(alt.InlineData(values=[{"at": 1.0}])).mark_rule(strokeDash=[4, 3], color="var(--ink-2)")
    described = f"{own[0].metric}: lead of the first arm when one constant changes by a fifth"
    return page_spec(alt.layer(edge.encode(x="at:Q"), dots, *words), HEAD_PX + ROW_PX * len(kept), described)
