"""How wide weights are priced on a sheet that was fitted, and what is told where others were fitted."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from devices.models.sheet import load_sheet
from engines.pricing.routing_sources import UniformRouting
from engines.pricing.shapes import shape_named
from harness.combinations import prices_as_held
from harness.cross.pages import context
from harness.cross.table import Question, cross_table
from harness.device_specs import ModelledSpec
from harness.plan import read_draft
from harness.preflight import preflight
from harness.run_parts import RunParts
from tests.command import joulebench
from tests.test_own_sheets import own_sheet, write_own_plan
from tests.toy_sheet import figure


def test_a_plan_warns_of_other_weights_than_a_sheet_was_fitted_with(tmp_path: Path) -> None:
    """A model that runs is priced as its arm holds it."""
    named = 'description = "'
    for form in ("fp32", "bf16"):
        own_sheet(tmp_path / f"{form}.toml", (named, f'fitted_weights = "{form}"\n{named}'))
    sheets = ("fp32.toml", "bf16.toml")
    assert warnings_of(write_own_plan(tmp_path / "plan.toml", *sheets)) == [
        "device model:bf16: its prices were fitted with weights in bf16, and experts of 32 bits are asked: another"
        " arithmetic may compute them, so these times are a guess; fit a sheet with such weights"
        " (`joulebench model fit --weights FORM`)"
    ]
    model = {"shape": "olmoe-1b-7b", "routing": {"kind": "uniform", "seed": 3}}
    for form, bits in (("int8", "8.0"), ("fp32", "32")):
        engine = {"name": form, "technique": {"name": "coreml-cpu"}, "quantise": {"experts": form}}
        told = warnings_of(write_own_plan(tmp_path / f"{form}-plan.toml", *sheets, model=model, engine=[engine]))
        refused = sheets if form == "int8" else ("bf16.toml",)
        assert [one.partition(":")[2].partition(":")[0] for one in told] == [
            one.removesuffix(".toml") for one in refused
        ]
        assert all(f"experts of {bits}" in one for one in told)


def test_a_sheet_of_an_older_fit_is_told_to_be_fitted_again(tmp_path: Path) -> None:
    """Its fit counted four bytes for each value of a row, and plans price two. One that another source made is none."""
    named, source = 'description = "', "`joulebench model fit`, 2026-11-20, torch 2.9.1, Linux"
    for name, more in (("old", ""), ("four", "fitted_value_bytes = 4\n"), ("new", "fitted_value_bytes = 2\n")):
        own_sheet(tmp_path / f"{name}.toml", (named, f'fitted_weights = "fp32"\n{more}{named}'))
        path = tmp_path / f"{name}.toml"
        path.write_text(re.sub('source = ".*"', f'source = "{source}"', path.read_text(), count=1))
    own_sheet(tmp_path / "theirs.toml")
    sheets = ("old.toml", "four.toml", "new.toml", "theirs.toml")
    older = (
        "an older `joulebench model fit` made it, which counted other bytes of activations, keys and values than plans"
        " price: these times are a guess; fit again"
    )
    told = warnings_of(write_own_plan(tmp_path / "plan.toml", *sheets))
    assert told == [f"device model:{name}: {older}" for name in ("old", "four")]
    question = Question(shape_named("olmoe-1b-7b"), UniformRouting(), prompt_tokens=4, decode_steps=1, chunk=4)
    found, said = [load_sheet(tmp_path / name) for name in sheets], list[str]()
    rows = cross_table(question, found, ("dropless",), said.append)
    assert [line for line in said if older in line] == [f"{name}: {older}" for name in ("old", "four")]
    assert [older == machine.doubt for machine in context(question, found, rows, None)["machines"]] == [
        True, True, False, False,
    ]  # fmt: skip


def test_weights_on_a_sheet_with_a_fitted_gpu_count_two_bytes(tmp_path: Path) -> None:
    """It computed in bf16, whatever form the fit was asked for."""
    misses = "[fit_misses.{}.decode]\nrequests = 9\nmedian = 0.02\np90 = 0.1\n[units.cpu]"
    for unit in ("cpu", "gpu"):
        path = own_sheet(tmp_path / f"{unit}.toml", ('description = "', 'fitted_weights = "fp32"\ndescription = "'))
        path.write_text(path.read_text().replace("[units.cpu]", misses.format(unit), 1))
        assert prices_as_held(ModelledSpec(sheet=str(path))) == (unit == "cpu")


HIDDEN, WIDTH, ATTENTION_ROWS, N_LAYERS, TOP_K, N_WORDS = 192, 128, 4 * 64 + 2 * 2 * 64, 4, 2, 2048
"""Of the bundled model, by its config.json: the head is tied to the embedding."""
OTHER_THAN_FITTED = "other than fitted"


@pytest.mark.parametrize(
    ("fitted", "dtype", "quantise", "widths"),
    [
        pytest.param("fp32", "float32", {}, (4, 4, 4), id="as the model is held"),
        pytest.param("fp32", "bfloat16", {}, (2, 2, 2), id=OTHER_THAN_FITTED),
        pytest.param("bf16", "float32", {"experts": "bf16", "head": "bf16"}, (4, 2, 2), id="by component"),
        pytest.param(None, "float32", {}, (2, 2, 2), id="a sheet of a source"),
    ],
)
def test_a_sheet_of_this_machine_prices_weights_as_the_arm_holds_them(
    fitted: str | None,
    dtype: str,
    quantise: dict[str, str],
    widths: tuple[int, int, int],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """They were priced at two bytes a value: a decoded token took half of the time that it was measured to take. The
    page tells where the arm holds others than were fitted, as the check does, which is gone by then."""
    s_per_byte = f"{{ s_per_weight_byte = {figure(1e-9)} }}"
    nothing = f"{{ s_per_launch = {figure(0.0)} }}"
    kernels = "".join(f"{kernel} = {s_per_byte}\n" for kernel in ("attention", "expert_ffn", "lm_head"))
    kernels += "".join(
        f"{kernel} = {nothing}\n" for kernel in ("norm", "router", "gather_dynamic", "scatter", "residual")
    )
    form = "" if fitted is None else f'fitted_weights = "{fitted}"\n'
    head = f'name = "mine"\ndescription = "weights alone"\nsource = "hand"\n{form}'
    (tmp_path / "mine.toml").write_text(f"{head}[units.cpu.kernels]\n{kernels}")
    engine = {"name": "cpu", "technique": {"name": "dropless"}}
    asked = {**engine, "quantise": quantise} if quantise else engine
    model = {"source": "bundled:tiny-qwen3-moe", "dtype": dtype}
    plan = write_own_plan(tmp_path / "plan.toml", "mine.toml", engine=[asked], model=model)
    assert joulebench("run", str(plan), "--out", "run", cwd=tmp_path).code == 0
    with (tmp_path / "run" / "latency.csv").open(newline="") as file:
        (tpot,) = [float(row["mean"]) for row in csv.DictReader(file) if row["metric"] == "tpot"]
    attention, experts, words = widths
    attention_bytes = attention * HIDDEN * (ATTENTION_ROWS + 4 * 64)
    expert_bytes = experts * TOP_K * 3 * HIDDEN * WIDTH
    assert tpot == pytest.approx(1e-9 * (N_LAYERS * (attention_bytes + expert_bytes) + words * HIDDEN * N_WORDS))
    page = (tmp_path / "run" / "report.html").read_text()
    assert ("these times are a guess" in page) == (request.node.callspec.id == OTHER_THAN_FITTED)


def warnings_of(plan: Path) -> list[str]:
    """About what sheets were fitted on."""
    draft = read_draft(plan)
    found = preflight(draft, RunParts(draft.plan.protocol)).warnings
    return [one for one in found if "fitted" in one or "`joulebench model fit`" in one]
