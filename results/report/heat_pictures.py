"""Expert heat as pictures: of each workload a map, layers by experts, and beside each layer how uneven its choices are.

One picture stands for all arms that route alike: of each layer less than `ALIKE` of the choices would have to go to
other experts for two arms to choose as often. Arms that route otherwise have a picture of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
from markupsafe import Markup

from results.expert_heat import ExpertHeat
from results.popularity import imbalance, popularity
from results.records import Cell
from results.report.arms import Arm
from results.runs import RunData
from results.units import format_number

ALIKE = 0.05
"""Total variation of two distributions over experts, above which a picture is not said to be of both."""
SHOWN_PICTURES = 4
"""Of one workload; for the arms beyond them there is heat.csv."""
SHOWN_EXPERTS = 4
TITLED_CELLS = 2048
"""Layers x experts up to which each has its figure under the pointer; beyond it each layer has."""
ROW_PX, LEFT_PX, MAP_PX, GAP_PX, BAR_PX, HEAD_PX = 14, 30, 520, 12, 110, 16
WIDTH_PX = LEFT_PX + MAP_PX + GAP_PX + BAR_PX + 34


@dataclass(frozen=True)
class LayerRow:
    """most_chosen: experts with their share of the layer's choices."""

    layer: int
    chosen: int
    imbalance: str
    profiled: str
    most_chosen: str
    never_chosen: int


@dataclass(frozen=True)
class HeatPicture:
    title: str
    arms: str
    caption: str
    svg: Markup
    has_profile: bool
    rows: tuple[LayerRow, ...]


def heat_pictures(
    run: RunData, heats: Mapping[str, ExpertHeat], overlap: pd.DataFrame, arms: Mapping[str, Arm]
) -> list[HeatPicture]:
    """heats, overlap: of `results.heat.heat_of_cells` and `overlaps`."""
    found = []
    for workload in dict.fromkeys(c.workload for c in run.cells):
        own = [c for c in run.cells if c.workload == workload and c.cell_id in heats]
        for i, cells in enumerate(_alike(own, heats)[:SHOWN_PICTURES]):
            # Overlaps are told of one arm's window, the first.
            caption = "" if i else _overlap_words(workload, cells, overlap)
            found.append(_picture(cells, heats[cells[0].cell_id], arms, caption))
    return found


def _alike(cells: Sequence[Cell], heats: Mapping[str, ExpertHeat]) -> list[list[Cell]]:
    """Cells that route alike together. The first of each is the one that is drawn, the reference before all."""
    found: list[list[Cell]] = []
    for cell in sorted(cells, key=lambda c: c.reference_id != c.cell_id):
        same = next((own for own in found if _is_alike(heats[own[0].cell_id], heats[cell.cell_id])), None)
        if same is None:
            found.append([cell])
        else:
            same.append(cell)
    return found


def _is_alike(a: ExpertHeat, b: ExpertHeat) -> bool:
    if a.layers != b.layers or any(len(x) != len(y) for x, y in zip(a.chosen, b.chosen, strict=True)):
        return False
    return all(_variation(x, y) < ALIKE for x, y in zip(a.chosen, b.chosen, strict=True))


def _variation(a_E: Sequence[int], b_E: Sequence[int]) -> float:
    """The share of one's choices that other experts would have to have for the other's."""
    a, b = sum(a_E) or 1, sum(b_E) or 1
    return sum(abs(x / a - y / b) for x, y in zip(a_E, b_E, strict=True)) / 2


def _picture(cells: Sequence[Cell], heat: ExpertHeat, arms: Mapping[str, Arm], caption: str) -> HeatPicture:
    workload = cells[0].workload
    names = ", ".join(dict.fromkeys(arms[c.cell_id].name for c in cells))
    rows = tuple(
        LayerRow(
            layer=layer,
            chosen=sum(chosen),
            imbalance=_figure(imbalance(chosen)),
            profiled="" if heat.profiled is None else _figure(imbalance(heat.profiled[i])),
            most_chosen=_most_chosen(chosen),
            never_chosen=chosen.count(0),
        )
        for i, (layer, chosen) in enumerate(zip(heat.layers, heat.chosen, strict=True))
    )
    svg = _map(f"{workload}, {names}", heat)
    return HeatPicture(workload, names, caption, svg, heat.profiled is not None, rows)


def _overlap_words(workload: str, cells: Sequence[Cell], overlap: pd.DataFrame) -> str:
    """Whether the experts chosen most in a profile are those chosen most here, by phase and K."""
    own = overlap[(overlap["by"] == "profile") & (overlap["then_in"] == workload)]
    own = own[own["model"].isin([c.model for c in cells])]
    return " ".join(_overlap_line(rows) for _, rows in own.groupby(["phase", "k"], sort=False))


def _overlap_line(rows: pd.DataFrame) -> str:
    """Of one phase and K."""
    rows = rows.drop_duplicates("chosen_first_in")
    first, known = rows.iloc[0], rows.dropna(subset=["overlap"])
    phase, k = first["phase"], first["k"]
    when = "" if phase == "all" else f" in {'decoding' if phase == 'decode' else phase}"
    if known.empty:
        return f"Of the {k} experts chosen most{when} nothing is told: {first['reason']}."
    n_layers = int(known["layers"].max())
    told = [
        f"the profile of {row['chosen_first_in']} has {_percent(row['overlap'])} among its own {k}"
        f" ({_percent(row['least'])} to {_percent(row['most'])})"
        for row in known.to_dict("records")
    ]
    return (
        f"Of the {k} experts chosen most here{when}, {'; '.join(told)}. By chance it would be"
        f" {_percent(first['chance'])}. Median of {n_layers} layer{'s' if n_layers != 1 else ''}, least to most."
    )


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _most_chosen(chosen_E: Sequence[int]) -> str:
    total = sum(chosen_E)
    first = [e for e in popularity(chosen_E)[:SHOWN_EXPERTS] if chosen_E[e]]
    return ", ".join(f"{e}: {format_number(100 * chosen_E[e] / total)} %" for e in first)


def _figure(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"


# --- the map ---------------------------------------------------------------------------------------------------------


def _map(title: str, heat: ExpertHeat) -> Markup:
    n_experts, n_layers = len(heat.chosen[0]), len(heat.layers)
    shares = [[n / (sum(chosen) or 1) for n in chosen] for chosen in heat.chosen]
    most = max(map(max, shares)) or 1.0
    uneven = [imbalance(chosen) for chosen in heat.chosen]
    widest = max((v for v in uneven if v is not None), default=1.0)
    bottom = HEAD_PX + n_layers * ROW_PX
    told = "; ".join(f"layer {layer}: {_figure(v)}" for layer, v in zip(heat.layers, uneven, strict=True))
    parts = [
        _text(LEFT_PX - 4, HEAD_PX - 5, "layer", "end"),
        _text(LEFT_PX + MAP_PX + GAP_PX, HEAD_PX - 5, "imbalance, max / mean", "start"),
    ]
    has_titles = n_experts * n_layers <= TITLED_CELLS
    for i, layer in enumerate(heat.layers):
        parts.append(_layer(layer, HEAD_PX + i * ROW_PX, heat.chosen[i], shares[i], most, has_titles))
        parts.append(_bar(layer, HEAD_PX + i * ROW_PX, uneven[i], widest))
    step = max(1, n_experts // 8)
    width = MAP_PX / n_experts
    parts += [_text(LEFT_PX + (e + 0.5) * width, bottom + 11, str(e), "middle") for e in range(0, n_experts, step)]
    legend = f"experts; darkest: {format_number(100 * most)} % of a layer's choices, evenly they would be"
    legend += f" {format_number(100 / n_experts)} %"
    parts.append(_text(LEFT_PX + MAP_PX / 2, bottom + 24, legend, "middle"))
    return Markup('<svg class="picture heat" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        WIDTH_PX,
        bottom + 30,
        f"Expert heat of {title}: {n_layers} layers by {n_experts} experts. Imbalance, {told}.",
        Markup("").join(parts),
    )


def _layer(
    layer: int, top: float, chosen_E: Sequence[int], shares_E: Sequence[float], most: float, has_titles: bool
) -> Markup:
    width = MAP_PX / len(chosen_E)
    parts = [_text(LEFT_PX - 4, top + ROW_PX - 3.5, str(layer), "end")]
    for expert, (n, share) in enumerate(zip(chosen_E, shares_E, strict=True)):
        title = Markup("")
        if has_titles:
            words = f"layer {layer}, expert {expert}: {format_number(100 * share)} % of its choices ({n})"
            title = Markup("<title>{}</title>").format(words)
        parts.append(
            Markup('<rect x="{}" y="{}" width="{}" height="{}" fill-opacity="{}">{}</rect>').format(
                round(LEFT_PX + expert * width, 2), top, round(width, 2), ROW_PX - 1, round(share / most, 3), title
            )
        )
    told = Markup("")
    if not has_titles:
        told = Markup("<title>{}</title>").format(f"layer {layer}, chosen most: {_most_chosen(chosen_E)}")
    return Markup("<g>{}{}</g>").format(told, Markup("").join(parts))


def _bar(layer: int, top: float, value: float | None, widest: float) -> Markup:
    left = LEFT_PX + MAP_PX + GAP_PX
    length = BAR_PX * value / widest if value is not None else 0.0
    return Markup('<g class="uneven"><rect x="{}" y="{}" width="{}" height="{}"/>{}</g>').format(
        left, top, round(length, 2), ROW_PX - 1, _text(left + length + 4, top + ROW_PX - 3.5, _figure(value), "start")
    )


def _text(x: float, y: float, words: str, anchor: str) -> Markup:
    return Markup('<text x="{}" y="{}" text-anchor="{}">{}</text>').format(round(x, 2), y, anchor, words)
