"""Which constants of a sheet the conclusions of its rows hang on: one at a time, a fifth less and a fifth more.

A conclusion is which arm of a machine is the fastest to the first token, the fastest per token, or takes the fewest
joules. With a constant changed every arm that is near the first is planned and priced again, for a technique that
places by cost may decide otherwise there. Where the constant is a memory or a limit, arms that did not fit are priced
too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from devices.models.sheet import Sheet
from devices.models.variations import constants, varied
from engines.pricing.model_shape import ModelShape
from harness.conclusions import FACTORS, Effect, effect_on, near_the_first
from harness.cross.arms import Arm, arms_on
from harness.cross.table import Row

METRICS: Final = {
    "ttft_s": "time to the first token",
    "tpot_s": "time per token",
    "j_per_prompt_token": "joules per token of the prompt",
    "j_per_token": "joules per decoded token",
}
NO_ROOM: Final = ("N.S.", "oom")
LIMITS: Final = ("memories", "memory", "graph_bytes_limit")
"""Where figures stand that say what fits."""

Priced = Callable[[Sequence[tuple[Arm, Sheet]]], Iterable[Row]]


def effects(
    sheet: Sheet,
    shape: ModelShape,
    rows: Sequence[Row],
    priced: Priced,
    say: Callable[[str], object],
    cached_tokens: int = 0,
) -> list[Effect]:
    """rows: of that machine. priced: arms on sheets, in order. say: is told each constant before it is changed.
    cached_tokens: as of `arms_on`."""
    by_metric = {metric: _costs(rows, metric) for metric in METRICS}
    near = {metric: near_the_first(costs) for metric, costs in by_metric.items() if costs}
    near_costs = {metric: {name: by_metric[metric][name] for name in names} for metric, names in near.items()}
    found: list[Effect] = []
    if not near:
        return found
    contenders = {name for names in near.values() for name in names}
    has_joules = any(metric.startswith("j_") for metric in near)
    for constant in constants(sheet):
        if constant.is_of_joules and not has_joules:
            continue
        say(f"{sheet.name}: {constant.name}")
        asked = {_key(row.arm): row.arm.name for row in rows if row.arm.name in contenders}
        if constant.places[0][0] in LIMITS:
            asked |= {_key(row.arm): row.arm.name for row in rows if row.result in NO_ROOM}
        for factor in FACTORS:
            other = varied(sheet, constant, factor)
            techniques = tuple(dict.fromkeys(technique for technique, _ in asked))
            arms = [arm for arm in arms_on(other, shape, techniques, cached_tokens) if _key(arm) in asked]
            found_rows = priced([(arm, other) for arm in arms])
            again = {asked[_key(arm)]: row for arm, row in zip(arms, found_rows, strict=True)}
            for metric, costs in near_costs.items():
                if constant.is_of_joules and not metric.startswith("j_"):
                    continue
                changed = {
                    name: _cost(row, metric)
                    for name, row in again.items()
                    if getattr(row, metric) is not None and (name in costs or name not in by_metric[metric])
                }
                found.append(effect_on(sheet.name, METRICS[metric], constant.name, factor, costs, changed))
    return found


def _costs(rows: Sequence[Row], metric: str) -> Mapping[str, float]:
    return {row.arm.name: _cost(row, metric) for row in rows if getattr(row, metric) is not None}


def _cost(row: Row, metric: str) -> float:
    return float(getattr(row, metric))


def _key(arm: Arm) -> tuple[str, object]:
    """The same arm on a sheet with other memories: how many experts stay follows from them."""
    return arm.technique, dict(arm.changed).get("unit")
