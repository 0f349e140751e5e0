"""`joulebench cross`: what it is asked, refuses, prints and writes."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engines.model.quantised import FORMS
from engines.pricing.model_shape import WeightBits
from harness.commands import app
from tests.toy_sheet import TOY_TOML


def test_it_writes_rows_effects_and_a_page(tmp_path: Path) -> None:
    out = tmp_path / "cross"
    asked = ["--prompt", "4", "--decode", "1", "--chunk", "4", "--machine", "a100", "--technique", "gpu"]
    result = CliRunner().invoke(app, ["cross", *asked, "--sensitivity", "--out", str(out)])
    assert result.exit_code == 0, result.output
    with (out / "cross.csv").open(encoding="utf-8") as file:
        (found,) = csv.DictReader(file)
    assert (found["machine"], found["technique"], found["result"], found["method"]) == ("a100", "gpu", "ok", "modelled")
    with (out / "sensitivity.csv").open(encoding="utf-8") as file:
        constants = {one["constant"] for one in csv.DictReader(file)}
    assert "units.gpu.roofline.bytes_per_s" in constants
    page = (out / "cross.html").read_text(encoding="utf-8")
    assert "gpu: reading memory" in page
    assert "Nothing here was measured" in page
    first, later = (f"{1e3 * float(found[key]):.3g} ms" for key in ("ttft_s", "tpot_s"))
    assert f"First token soonest: gpu ({first}); least time per token: gpu ({later}); on the front: gpu." in page


def test_every_wrong_word_is_told_at_once() -> None:
    asked = ["--model", "no-such", "--machine", "moon", "--technique", "dropples", "--weights", "int3"]
    result = CliRunner().invoke(app, ["cross", *asked])
    assert result.exit_code == 2
    lines = result.output.splitlines()
    assert len(lines) == 4
    assert "int3" in lines[0]
    assert "no-such" in lines[1]
    assert "moon" in lines[2]
    assert "dropless" in lines[3]


def test_a_model_that_fits_nowhere_is_told_why_where_it_was_asked(tmp_path: Path) -> None:
    """Also where files are written: else nothing but a count would stand in the terminal."""
    asked = ["--prompt", "4", "--decode", "1", "--machine", "a6000", "--technique", "gpu", "--model", "deepseek-v3"]
    result = CliRunner().invoke(app, ["cross", *asked, "--out", str(tmp_path / "cross")])
    assert result.exit_code == 0, result.output
    assert "Without figures: 1 oom." in result.output
    assert "a6000, 1 of them: oom: 1.19 TiB of experts of deepseek-v3" in " ".join(result.output.split())


def test_json_has_the_same_rows() -> None:
    asked = ["--prompt", "4", "--decode", "1", "--machine", "a6000", "--technique", "gpu", "--json"]
    result = CliRunner().invoke(app, ["cross", *asked])
    assert result.exit_code == 0, result.output
    ((found,),) = [one["rows"] for one in json.loads(result.stdout)]
    assert found["result"] == "oom"


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_weights_can_be_asked_by_its_name(form: str) -> None:
    """All four components take it: as a table that names each."""
    table = ", ".join(f'{component} = "{form}"' for component in WeightBits._fields)
    asked = ["--prompt", "4", "--decode", "1", "--machine", "gh200", "--technique", "on-demand", "--json", "--weights"]
    by_name, by_table = (CliRunner().invoke(app, ["cross", *asked, one]) for one in (form, f"{{ {table} }}"))
    assert (by_name.exit_code, by_table.exit_code) == (0, 0), by_name.output + by_table.output
    assert json.loads(by_name.stdout) == json.loads(by_table.stdout)


def test_arithmetic_is_no_form_that_a_sheet_prices() -> None:
    told = CliRunner().invoke(app, ["cross", "--weights", '{ experts = "int8", arithmetic = "int8" }'])
    assert told.exit_code == 2
    assert "arithmetic: no sheet has prices for it" in told.output


def test_two_machines_of_one_name_are_refused_and_one_is_asked_once(tmp_path: Path) -> None:
    first, again = tmp_path / "mine.toml", tmp_path / "again" / "mine.toml"
    again.parent.mkdir()
    first.write_text(TOY_TOML.replace('name = "toy"', 'name = "mine"'))
    again.write_text(first.read_text().replace("8.0", "9.0"))
    asked = ["cross", "--prompt", "4", "--decode", "1", "--technique", "coreml-cpu", "--json", "--model", "phi-3.5-moe"]
    told = CliRunner().invoke(app, [*asked, "--machine", str(first), "--machine", str(again)])
    assert told.exit_code == 2
    assert f"'{first}' and '{again}' are both called mine" in told.output
    once = CliRunner().invoke(app, [*asked, "--machine", str(first), "--machine", f"{tmp_path}/./mine.toml"])
    assert [row["machine"] for one in json.loads(once.stdout) for row in one["rows"]] == ["mine"], once.output


def test_narrow_weights_fit_where_wide_ones_do_not() -> None:
    """58 GB of 16-bit experts, 51.5 GB of memory; with 8 bits half as many."""
    asked = [
        "--prompt",
        "4",
        "--decode",
        "1",
        "--machine",
        "a6000",
        "--technique",
        "gpu",
        "--json",
        "--weights",
        "int8",
    ]
    result = CliRunner().invoke(app, ["cross", *asked])
    assert result.exit_code == 0, result.output
    ((found,),) = [one["rows"] for one in json.loads(result.stdout)]
    assert found["result"] == "ok"


def test_a_machine_of_ones_own_is_a_file_and_stands_there_once(tmp_path: Path) -> None:
    written = CliRunner().invoke(app, ["sheets", "a100", "--out", str(tmp_path / "mine.toml")])
    assert written.exit_code == 0, written.output
    asked = ["--prompt", "4", "--decode", "1", "--technique", "gpu", "--json"]
    machine = ["--machine", str(tmp_path / "mine.toml")]
    result = CliRunner().invoke(app, ["cross", *asked, *machine, *machine])
    assert result.exit_code == 0, result.output
    ((found,),) = [one["rows"] for one in json.loads(result.stdout)]
    assert (found["machine"], found["result"]) == ("mine", "ok")
