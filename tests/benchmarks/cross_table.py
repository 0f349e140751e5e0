"""Which technique is first on which machine, and which constants that hangs on; all modelled.

python -m tests.benchmarks.cross_table
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from devices.models.sheet import Sheet, available_sheets, load_sheet
from engines.pricing.routing_specs import parse_routing, routing_of_spec
from engines.pricing.shapes import shape_named, sizes_of
from engines.techniques.presets import PRESETS
from harness.conclusions import Effect, ranking
from harness.cross.pricing import pricing
from harness.cross.sensitivity import METRICS, effects
from harness.cross.table import Question, Row, cross_table
from tests.benchmarks.measurement import Measurement, measured, write_page

NAME = "cross-table"
MODEL = "qwen3-30b-a3b"
TITLE = "Which technique is first on which machine?"
MOST_FLIPS = 4
"""Named in the table."""

REMARKS = """Every technique on every machine where it makes sense, as `joulebench cross --sensitivity` prices them:
{asked}.

Nothing is measured. If a sheet states no watts, joules are missing. Rooflines without shares are the best that a unit
could do, so times on the GPUs and on Trainium are lower bounds. The bound is the unit or link that works most of the
time. A conclusion flips if another technique is first when one constant of the sheet changes by a fifth.

{first}

{flips}

What each row means: [cross table](../cross.md). Every figure of those on a front:"""


def first_table(rows: Sequence[Row], sheets: Sequence[Sheet]) -> str:
    lines = ["| machine | | first | | bound by | next |", "|---|---|---|---|---|---|"]
    for sheet in sheets:
        own = [row for row in rows if row.machine == sheet.name]
        for metric, words in METRICS.items():
            by_name = {row.arm.name: row for row in own if getattr(row, metric) is not None}
            ranked = ranking({name: _cost(row, metric) for name, row in by_name.items()})
            if ranked:
                best, *others = (by_name[name] for name in ranked)
                bound = best.binds_prefill if metric in ("ttft_s", "j_per_prompt_token") else best.binds_decode
                after = (
                    f"{others[0].arm.name}, {_cost(others[0], metric) / _cost(best, metric):.2f} times"
                    if others
                    else ""
                )
                lines.append(
                    f"| {sheet.name} | {words} | {best.arm.name} | {_told(best, metric)} | {bound} | {after} |"
                )
        if not any(row.costs for row in own):
            lines.append(f"| {sheet.name} | | none fits | | | |")
    return "\n".join(lines)


def flips_table(found: Sequence[Effect]) -> str:
    flips = [one for one in found if one.flips]
    if not flips:
        return "No conclusion flips."
    lines = ["| machine | | first | flips with |", "|---|---|---|---|"]
    for where, metric in dict.fromkeys((one.where, one.metric) for one in flips):
        own = [one for one in flips if (one.where, one.metric) == (where, metric)]
        told = [f"`{one.constant}` times {one.factor:g}: {one.first or 'nothing fits'}" for one in own[:MOST_FLIPS]]
        more = f"; and {len(own) - MOST_FLIPS} more" if len(own) > MOST_FLIPS else ""
        lines.append(f"| {where} | {metric} | {own[0].before} | {'; '.join(told)}{more} |")
    return "\n".join(lines)


def _cost(row: Row, metric: str) -> float:
    return float(getattr(row, metric))


def _told(row: Row, metric: str) -> str:
    value = _cost(row, metric)
    if metric.startswith("j_"):
        return f"{value:.3g} J"
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def measurements(rows: Sequence[Row]) -> list[Measurement]:
    return [
        measured(words, _cost(row, metric), "J" if metric.startswith("j_") else "s", f"{row.machine}, {row.arm.name}",
                 note=f"modelled; {row.binds_prefill if metric == 'ttft_s' else row.binds_decode}")
        for row in rows
        if row.on_front
        for metric, words in METRICS.items()
        if getattr(row, metric) is not None
    ]  # fmt: skip


def main() -> None:
    shape = shape_named(MODEL)
    sizes = sizes_of(shape)
    assert sizes is not None
    routing = routing_of_spec(parse_routing("uniform"), sizes)
    question = Question(shape, routing, prompt_tokens=512, decode_steps=32)
    sheets = [sheet for sheet in map(load_sheet, available_sheets()) if sheet.only_for is None]
    found: list[Effect] = []
    with pricing(question, 2) as price:
        rows = cross_table(question, sheets, tuple(PRESETS), lambda line: print(line, file=sys.stderr), price)
        for sheet in sheets:
            own = [row for row in rows if row.machine == sheet.name]
            found += effects(sheet, shape, own, price, lambda line: None)
    remarks = REMARKS.format(asked=question.words, first=first_table(rows, sheets), flips=flips_table(found))
    write_page(NAME, TITLE, measurements(rows), remarks)


if __name__ == "__main__":
    main()
