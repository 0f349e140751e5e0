"""The search as a tree: which move made which candidate, and what became of it."""

from __future__ import annotations

from typing import Any

from harness.tuning.display import energy_words, speed_words, state_words
from harness.tuning.probing import Arm
from harness.tuning.session import PhaseFound, SessionFound
from results.report.charts import page_spec

ROW_PX, HEAD_PX = 24, 30


def tree_rows(session: SessionFound[Arm], found: PhaseFound[Arm]) -> list[dict[str, Any]]:
    """A row an arm, depth first, each behind its parent. depth and row from 0; parent_row None: the search began there.
    Empty where the search was on no tree."""
    children: dict[Arm | None, list[Arm]] = {}
    moves = {step.arm: step.move for step in found.result.steps}
    for step in found.result.steps:
        children.setdefault(step.parent, []).append(step.arm)
    standings = {one.arm: one for one in found.result.standings}
    rows: list[dict[str, Any]] = []

    def place(arm: Arm, depth: int, parent_row: int | None) -> None:
        row, one = len(rows), standings.get(arm)
        outcome = "not probed" if one is None else one.reason or state_words(found.result, one)
        rows.append(
            {
                "row": row,
                "depth": depth,
                "parent_row": parent_row,
                "name": session.space.names[arm],
                "move": moves[arm],
                "outcome": outcome,
                "speed": "" if one is None else speed_words(one.speed_tokens_per_s),
                "energy": "" if one is None else energy_words(one.cost),
                "chosen": arm == found.result.chosen,
            }
        )
        for child in children.get(arm, ()):
            place(child, depth + 1, row)

    for root in children.get(None, ()):
        place(root, 0, None)
    return rows


def tree_chart(rows: list[dict[str, Any]], description: str) -> dict[str, Any]:
    """rows: of `tree_rows`, one at least."""
    import altair as alt

    edges = [
        {"row": one["row"], "up": one["parent_row"], "depth": one["depth"], "left": one["depth"] - 1}
        for one in rows
        if one["parent_row"] is not None
    ]
    points = [
        {"row": one["row"], "depth": one["depth"], "chosen": one["chosen"],
         "words": f"{one['name']}: {one['move']}; {one['outcome']}"}
        for one in rows
    ]  # fmt: skip
    deepest = max(one["depth"] for one in rows)
    # Words stand right of the points, and the deepest needs room for them.
    across_scale = alt.Scale(domain=[-0.2, deepest + 6], nice=False)
    down_scale = alt.Scale(domain=[len(rows) - 0.5, -0.5], nice=False)

    def at(x: str, y: str) -> dict[str, Any]:
        # Every layer says it alike: one that says nothing would bring axes back.
        return {"x": alt.X(f"{x}:Q", axis=None, scale=across_scale), "y": alt.Y(f"{y}:Q", axis=None, scale=down_scale)}

    lines = alt.Chart(alt.InlineData(values=edges))
    ink = alt.value("var(--rule-2)")
    down = lines.mark_rule().encode(**at("left", "up"), y2="row:Q", color=ink)
    across = lines.mark_rule().encode(**at("left", "row"), x2="depth:Q", color=ink)
    base = alt.Chart(alt.InlineData(values=points)).encode(**at("depth", "row"))
    fill = alt.condition("datum.chosen", alt.value("var(--accent)"), alt.value("var(--paper, white)"))
    dots = base.mark_circle(size=80, stroke="var(--accent)", strokeWidth=1.5, opacity=1).encode(fill=fill)
    words = base.mark_text(align="left", dx=9, color="var(--ink)").encode(text="words:N")
    return page_spec(alt.layer(down, across, dots, words), HEAD_PX + ROW_PX * len(rows), description)
