"""A plan's file, and what `--set` changes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.plan import Plan, PlanError, load_plan
from harness.schema import StopSpec
from tests.plans import (
    DROPLESS,
    TIERS,
    raw_plan,
    write_plan,
)

# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"name = \n", "not TOML"),
        (b"\xff\xfe", "no text in UTF-8"),
        # An editor of Windows saved it.
        ("name = 'x'\n".encode("utf-16"), "no text in UTF-8"),
        (None, "no such file"),
    ],
)
def test_a_file_that_is_no_plan_is_named(tmp_path: Path, content: bytes | None, expected: str) -> None:
    path = tmp_path / "plan.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PlanError) as caught:
        load_plan(path)
    (line,) = caught.value.problems
    assert line.startswith(f"{path}: {expected}")


@pytest.mark.parametrize("name", ["plans/npumoe.toml", "npumoe"])
def test_a_plan_of_joulebench_that_is_not_there_is_told_how_to_get(tmp_path: Path, name: str) -> None:
    """As pages name it, for whoever has no clone."""
    with pytest.raises(PlanError) as caught:
        load_plan(tmp_path / name)
    remedy = "`joulebench init npumoe.toml --from npumoe` writes it"
    assert caught.value.problems == (f"{tmp_path / name}: no such file; {remedy}",)


def test_a_folder_is_not_a_plan(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="is a folder; give the path of a plan file"):
        load_plan(tmp_path)


# --- --set -----------------------------------------------------------------------------------------------------------


def loaded(tmp_path: Path, *assignments: str, **changes: Any) -> Plan:
    return load_plan(write_plan(tmp_path / "plan.toml", raw_plan(**changes)), assignments)


def test_set_reads_values_with_their_toml_types(tmp_path: Path) -> None:
    plan = loaded(
        tmp_path,
        "protocol.repeats=7",
        "protocol.idle_s=0.25",
        "protocol.order=shuffled",
        'name="quoted name"',
        "workload.boolq.limit=5",
        "engine.prefill_chunk = 64",
        'device.host.meters=["modelled"]',
        'protocol.stop={ metric = "ttft_s", max_repeats = 4 }',
    )
    assert (plan.protocol.repeats, plan.protocol.idle_s, plan.protocol.order) == (7, 0.25, "shuffled")
    assert plan.protocol.stop == StopSpec(metric="ttft_s", max_repeats=4)
    assert plan.name == "quoted name"
    (cell_plan,) = plan.cells
    assert cell_plan.workload.limit == 5
    assert cell_plan.engine.prefill_chunk == 64
    assert cell_plan.device.meters == ("modelled",)


def test_set_keeps_an_equals_sign_of_the_value(tmp_path: Path) -> None:
    assert loaded(tmp_path, 'name="a=b"').name == "a=b"


def test_set_of_a_list_reaches_every_element_or_the_named_one(tmp_path: Path) -> None:
    all_of_them = loaded(tmp_path, "engine.prefill_chunk=64", engine=[DROPLESS, TIERS])
    assert [c.engine.prefill_chunk for c in all_of_them.cells] == [64, 64]
    one = loaded(tmp_path, "engine.tiers.prefill_chunk=64", engine=[DROPLESS, TIERS])
    assert [c.engine.prefill_chunk for c in one.cells] == [512, 64]
    second = loaded(tmp_path, "engine.1.prefill_chunk=64", engine=[DROPLESS, TIERS])
    assert [c.engine.prefill_chunk for c in second.cells] == [512, 64]


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("protocol.repeats", ["no '='", "protocol.repeats=5"]),
        ("foo.bar=1", ["foo: unknown key"]),
        ("protocol.repeat=1", ["protocol.repeat: unknown key", "mean repeats"]),
        ("protocol.repeats.x=1", ["repeats is a value"]),
        ("engine.nope.prefill_chunk=1", ["'nope'", "dropless"]),
        ("engine=1", ["names no key"]),
        ("protocol.repeats=many", ["protocol.repeats", "'many'", "a whole number"]),
    ],
)
def test_a_wrong_set_is_told(tmp_path: Path, assignment: str, expected: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        loaded(tmp_path, assignment)
    (line,) = caught.value.problems
    for part in expected:
        assert part in line
