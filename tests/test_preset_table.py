"""Each preset is the line that the table of systems gives it: its four choices and the unit of the backbone.

The lines are written here by hand from the sources; `docs/decisions/0022-four-decisions.md` has those still to come.
"""

from __future__ import annotations

from typing import Any

import pytest

from engines.techniques.parameters import CustomParameters
from engines.techniques.presets import PRESETS, preset_parameters

Line = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
"""Place, layout and move: the parameters that make the system what it is."""


def on(unit: str, **others: Any) -> dict[str, Any]:
    return {"kind": "one_unit", "unit": unit, "naive_launch": False} | others


EXACT, NOTHING = {"kind": "exact"}, {"kind": "nothing"}
AHEAD = {"kind": "two_buffers", "prefetch": True}
SINGLY = {"kind": "tiers", "overflow": "saliency", "grouped": False}
GROUPED = SINGLY | {"grouped": True}
LINES: dict[str, tuple[str, Line]] = {
    "dropless": ("cpu", (on("cpu"), EXACT, NOTHING)),
    "coreml-cpu": ("cpu", (on("cpu"), EXACT, NOTHING)),
    "anemll": ("npu", (on("cpu"), EXACT, NOTHING)),
    "gpu": ("gpu", (on("gpu"), EXACT, NOTHING)),
    "coreml-naive": (
        "cpu",
        (on("npu", naive_launch=True), {"kind": "capacity", "rows": "max", "overflow": "none"}, NOTHING),
    ),
    "npumoe-base": (
        "npu",
        (on("npu"), {"kind": "capacity", "overflow": "saliency", "renormalise_survivors": False}, NOTHING),
    ),
    "npumoe-t": ("npu", (on("npu"), SINGLY, NOTHING)),
    "npumoe-tg": ("npu", (on("npu"), GROUPED, NOTHING)),
    "npumoe": ("npu", ({"kind": "by_cost"}, GROUPED, NOTHING)),
    "blockwise": ("cpu", (on("cpu"), {"kind": "blocks"}, NOTHING)),
    "dropping": (
        "cpu",
        (on("cpu"), {"kind": "capacity", "overflow": "order", "renormalise_survivors": "model"}, NOTHING),
    ),
    "selective": ("cpu", (on("cpu"), {"kind": "selective"}, NOTHING)),
    "all-experts": ("cpu", (on("cpu"), {"kind": "all_experts"}, NOTHING)),
    "on-demand": ("gpu", (on("gpu"), EXACT, {"kind": "two_buffers", "prefetch": False})),
    "prefetch-hint": ("gpu", (on("gpu"), EXACT, AHEAD)),
    "router-pf": ("gpu", (on("gpu"), EXACT, AHEAD)),
    "est-pf": ("gpu", (on("gpu"), EXACT, AHEAD)),
    "hybrid-pf": ("gpu", (on("gpu"), EXACT, AHEAD)),
    "tensor-parallel": ("cpu", ({"kind": "tensor_parallel"}, EXACT, NOTHING)),
    "expert-parallel": ("cpu", ({"kind": "expert_parallel", "exchange": "all_to_all"}, EXACT, NOTHING)),
    "tp-ep": ("cpu", ({"kind": "tp_ep", "tensor_ranks": 2}, EXACT, NOTHING)),
    "eplb": ("cpu", ({"kind": "eplb", "nodes": 1}, EXACT, NOTHING)),
    "ndp-tp": ("gpu", ({"kind": "ndp", "ndps": 6, "balanced": False, "resident": False}, EXACT, NOTHING)),
    "ndp-tp-lb": (
        "gpu",
        ({"kind": "ndp", "ndps": 6, "balanced": True, "resident": False}, EXACT, {"kind": "slices", "prefetch": False}),
    ),
    "ndp-tp-pre": (
        "gpu",
        ({"kind": "ndp", "ndps": 6, "balanced": False, "resident": True}, EXACT, {"kind": "slices", "prefetch": True}),
    ),
    "ndp": (
        "gpu",
        ({"kind": "ndp", "ndps": 6, "balanced": True, "resident": True}, EXACT, {"kind": "slices", "prefetch": True}),
    ),
    "moe-ondemand": ("cpu", (on("cpu"), EXACT, {"kind": "cache", "evict": "static", "stay": "first"})),
    "fiddler": ("gpu", ({"kind": "cheaper", "objective": "sum"}, EXACT, {"kind": "fetch", "gpu_slots": 0})),
    "monde": ("gpu", ({"kind": "hottest", "h": "least"}, EXACT, {"kind": "fetch", "gpu_slots": 0})),
    "duplex": ("gpu", ({"kind": "hottest", "ndps": 1, "h": "least"}, EXACT, NOTHING)),
    "lru": ("cpu", (on("cpu"), EXACT, {"kind": "cache", "evict": "lru"})),
    "lfu": ("cpu", (on("cpu"), EXACT, {"kind": "cache", "evict": "lfu"})),
    "static": ("cpu", (on("cpu"), EXACT, {"kind": "cache", "evict": "static", "stay": "popular"})),
}
ROUTES = {
    "prefetch-hint": {"kind": "predicted", "predictor": "router", "source": "q", "executes": "router"},
    "router-pf": {"kind": "predicted", "predictor": "router", "source": "q", "executes": "prediction"},
    "est-pf": {"kind": "predicted", "predictor": "estimator", "executes": "prediction"},
    "hybrid-pf": {"kind": "predicted", "predictor": "hybrid", "executes": "prediction"},
}
"""Of those whose route is not the router's own. None speculates in prefill."""


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_its_line_of_the_table(name: str) -> None:
    choices = preset_parameters(name)().choices
    backbone, line = LINES[name]
    assert choices.backbone == backbone
    route = ROUTES[name] | {"speculate_prefill": False} if name in ROUTES else {"kind": "router"}
    decisions = (choices.route, choices.place, choices.layout, choices.move)
    for choice, said in zip(decisions, (route, *line), strict=True):
        own = choice.model_dump()  # type: ignore[attr-defined]
        assert {key: own.get(key) for key in said} == said


def test_no_parameter_of_a_preset_belongs_to_two_decisions() -> None:
    """They stand flat beside the name. A layout of decode steps shares its own with that of prefill."""
    for preset in PRESETS.values():
        choices = preset.choices
        names = [
            set(type(c).model_fields) - {"kind"} for c in (choices.route, choices.place, choices.layout, choices.move)
        ]  # type: ignore[type-var]
        assert sum(map(len, names)) == len(set().union(*names))


def test_the_four_may_be_spelled_out() -> None:
    spelled = CustomParameters.model_validate(
        {"route": {"kind": "router"}, "place": {"kind": "one_unit"}, "layout": EXACT, "move": NOTHING}
    )
    assert spelled.choices == PRESETS["dropless"].choices
