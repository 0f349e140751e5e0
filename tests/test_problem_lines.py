"""One mistake in a plan is one line, in the words of who wrote the plan."""

from __future__ import annotations

from typing import Any

import pytest

from harness.plan import draft_plan
from tests.plans import DROPLESS, HOST, raw_plan


def with_technique(**technique: Any) -> dict[str, Any]:
    return raw_plan(engine=[{"name": "a", "technique": technique}])


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (
            with_technique(name="blockwise", block_size="big"),
            "engine[0].technique.block_size: must be a whole number or \"intensity\", found 'big'",
        ),
        (
            with_technique(name="blockwise", block_size=64.5),
            'engine[0].technique.block_size: must be a whole number or "intensity", found 64.5',
        ),
        (
            with_technique(name="dropping", rows="big"),
            "engine[0].technique.rows: must be a whole number or \"max\", found 'big'",
        ),
        (
            with_technique(name="npumoe-t", multiples=[]),
            "engine[0].technique.multiples: must hold at least 1 value, found []",
        ),
        (raw_plan(device=[HOST | {"meters": []}]), "device[0].meters: must hold at least 1 value, found []"),
        (raw_plan(engine=[DROPLESS | {"devices": []}]), "engine[0].devices: must hold at least 1 value, found []"),
        (
            with_technique(name="npumoe-t", multiples=[float("nan")]),
            "engine[0].technique.multiples[0]: must be a finite number, found nan",
        ),
        (
            with_technique(name="custom", place={"kind": "by_cost"}, layout={"kind": "exact"}),
            "engine[0].technique: place by_cost places graphs of tiers, and layout exact has none; use layout tiers",
        ),
        (
            raw_plan(sweep={"engine.technique.unitt": ["cpu", "gpu"]}),
            "sweep.engine.technique.unitt: unknown key; did you mean unit?",
        ),
        (
            raw_plan(sweep={"engine.technique.unit": ["cpu", "tpu"]}),
            "sweep.engine.technique.unit: must be 'cpu', 'gpu' or 'npu', found 'tpu'",
        ),
        (raw_plan(baseline="zz"), "baseline: no arm has the name 'zz'; known: dropless"),
        (
            raw_plan(table=[{"title": "t", "over": "dropless", "columns": 5}]),
            "table[0].columns: must be a text or a list, found 5",
        ),
        (
            raw_plan(table=[{"title": "t", "over": "dropless", "columns": []}]),
            "table[0].columns: must hold at least 1 value, found []",
        ),
        (
            raw_plan(table=[{"title": "t", "over": "dropless", "columns": [1]}]),
            "table[0].columns[0]: must be a text, found 1",
        ),
        (
            raw_plan(engine=[DROPLESS | {"computes": "cuda"}]),
            "engine[0].computes: unknown key, found 'cuda'; it is a key of [[device]]",
        ),
        (
            with_technique(name="expert-parallel", ranks=2),
            "engine[0].technique.ranks: unknown key, found 2; it is a key of [[engine]]",
        ),
        (
            raw_plan(engine=[DROPLESS | {"block_size": 64}]),
            "engine[0].block_size: unknown key, found 64; it is a parameter of a technique: write it into"
            " technique = { ... }",
        ),
        (
            raw_plan(protocol={"limit": 3}),
            "protocol.limit: unknown key, found 3; it is a key of [[workload]]",
        ),
        (
            raw_plan(engine=[DROPLESS | {"reuse_prefx": False}]),
            "engine[0].reuse_prefx: unknown key, found false; did you mean reuse_prefix?",
        ),
    ],
)
def test_a_mistake_is_one_line_that_its_writer_understands(raw: dict[str, Any], expected: str) -> None:
    # NaN is what TOML has and JSON has not: the parser of plans gives it as it is.
    assert draft_plan(raw).problems == (expected,)


def test_a_plan_that_names_no_schema_is_of_the_first() -> None:
    raw = raw_plan()
    del raw["schema"]
    assert draft_plan(raw).problems == ()
