"""`joulebench cross`: what it is asked, refuses, prints and writes."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from engines.model.quantised import FORMS
from engines.pricing.model_shape import WeightBits
from harness.commands import app
from tests.fakes.published import PUBLISHED
from tests.toy_sheet import TOY_TOML


def test_it_writes_rows_effects_and_a_page(tmp_path: Path) -> None:
    out = tmp_path / "cross"
    asked = [
        "--prompt",
        "4",
        "--decode",
        "1",
        "--chunk",
        "4",
        "--machine",
        "a100",
        "--technique",
        "gpu",
        "--technique",
        "anemll",
    ]
    result = CliRunner().invoke(app, ["cross", *asked, "--sensitivity", "--out", str(out)])
    assert result.exit_code == 0, result.output
    with (out / "cross.csv").open(encoding="utf-8") as file:
        (found,) = (row for row in csv.DictReader(file) if row["technique"] == "gpu")
    assert (found["machine"], found["technique"], found["result"], found["method"]) == ("a100", "gpu", "ok", "modelled")
    with (out / "sensitivity.csv").open(encoding="utf-8") as file:
        constants = {one["constant"] for one in csv.DictReader(file)}
    assert "units.gpu.roofline.bytes_per_s" in constants
    page = (out / "cross.html").read_text(encoding="utf-8")
    assert "gpu: reading memory" in page
    assert "Nothing here was measured" in page
    # The other arm has no figures: nothing is said of what it takes, nor that a conclusion was tried.
    assert "gpu is first; no other arm takes less than 1.25 times as much." in page
    assert "changes by a fifth: on no machine is another arm near the first." in result.output
    assert page.count('<div class="scroll"') == page.count("<table class") + page.count('<div class="chart')
    first, later = (f"{1e3 * float(found[key]):.3g} ms" for key in ("ttft_s", "tpot_s"))
    assert f"First token soonest: gpu ({first}); least time per token: gpu ({later}); on the front: gpu." in page
    # Tables of two models can be told apart, and effects of an earlier table do not stay beside another.
    asked_words = "qwen3-30b-a3b, weights of 16 bits, whatever its checkpoint has; 4 tokens of prompt in chunks of 4"
    assert all(asked_of(out / name) == {found["asked"]} for name in ("cross.csv", "sensitivity.csv"))
    assert found["asked"].lower().startswith(asked_words)
    narrow = ["--prompt", "4", "--decode", "1", "--machine", "a100", "--technique", "gpu", "--weights", "int8"]
    assert CliRunner().invoke(app, ["cross", *narrow, "--out", str(out)]).exit_code == 0
    assert "experts 8" in next(iter(asked_of(out / "cross.csv")))
    assert not (out / "sensitivity.csv").exists()


def asked_of(path: Path) -> set[str]:
    with path.open(encoding="utf-8") as file:
        return {row["asked"] for row in csv.DictReader(file)}


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


def test_a_machine_that_is_nearly_named_is_told_which_was_meant() -> None:
    result = CliRunner().invoke(app, ["cross", "--machine", "m2ultra"])
    assert result.exit_code == 2
    assert "no hardware sheet has this name; did you mean m2-ultra?" in result.output


def test_every_number_that_is_none_is_told_at_once() -> None:
    asked = ["--prompt", "-1", "--decode", "0", "--chunk", "0", "--recall", "nan", "--jobs", "257", "--machine", "moon"]
    result = CliRunner().invoke(app, ["cross", *asked])
    assert result.exit_code == 2
    assert result.output.splitlines()[:5] == [
        "error: --prompt -1: must be 1 to 131072",
        "error: --decode 0: must be 1 to 131072",
        "error: --chunk 0: must be 1 to 131072",
        "error: --recall nan: must be 0 to 1",
        "error: --jobs 257: must be 1 to 256",
    ]
    assert "moon" in result.output.splitlines()[5]


def test_all_faults_of_a_config_have_a_line_each(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(PUBLISHED["OLMoE-1B-7B-0924"].config | {"hidden_size": 0, "vocab_size": "many"}))
    result = CliRunner().invoke(app, ["cross", "--model", str(config), "--prompt", "0"])
    assert result.exit_code == 2
    assert result.output.splitlines() == [
        "error: --prompt 0: must be 1 to 131072",
        f"error: --model: {config}: hidden_size must be a whole number above 0, found 0",
        f"error: --model: {config}: vocab_size must be a whole number above 0, found 'many'",
    ]


def test_a_request_beyond_the_models_context_is_refused_as_the_engine_refuses_it(tmp_path: Path) -> None:
    """OLMoE's config has 4096 positions. One that has more of them takes the same request."""
    asked = ["--decode", "1", "--chunk", "4096", "--machine", "a100", "--technique", "gpu", "--json"]

    def told(model: str, n_prompt: int) -> Result:
        return CliRunner().invoke(app, ["cross", *asked, "--model", model, "--prompt", str(n_prompt)])

    assert told("olmoe-1b-7b", 4095).exit_code == 0
    refused = told("olmoe-1b-7b", 4096)
    assert refused.exit_code == 2
    assert refused.output == (
        "error: --prompt and --decode: 4,097 tokens are more than the 4,096 that olmoe-1b-7b holds by its"
        " config.json; ask for fewer, or give --model a config.json with more\n"
    )
    config = tmp_path / "config.json"
    for n_positions, code in ((4096, 2), (8192, 0)):
        published = PUBLISHED["OLMoE-1B-7B-0924"].config
        config.write_text(json.dumps(published | {"max_position_embeddings": n_positions}))
        assert told(str(config), 4096).exit_code == code


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
    (told,) = json.loads(result.stdout)
    (found,) = told["rows"]
    assert found["result"] == "oom"
    assert "4 tokens of prompt in chunks of 256, 1 decoded; routing: generated, all experts alike" in told["asked"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_weights_can_be_asked_by_its_name(form: str) -> None:
    """All four components take it: as a table that names each."""
    table = ", ".join(f'{component} = "{form}"' for component in WeightBits._fields)
    asked = ["--prompt", "4", "--decode", "1", "--machine", "gh200", "--technique", "on-demand", "--json", "--weights"]
    by_name, by_table = (CliRunner().invoke(app, ["cross", *asked, one]) for one in (form, f"{{ {table} }}"))
    assert (by_name.exit_code, by_table.exit_code) == (0, 0), by_name.output + by_table.output
    assert json.loads(by_name.stdout) == json.loads(by_table.stdout)


@pytest.mark.parametrize("asked", ['arithmetic = "int8"', 'attention_arithmetic = "bf16"', 'cache = "fp16"'])
def test_arithmetic_is_no_form_that_a_sheet_prices(asked: str) -> None:
    told = CliRunner().invoke(app, ["cross", "--weights", f'{{ experts = "int8", {asked} }}'])
    assert told.exit_code == 2
    assert f"{asked.partition(' ')[0]}: no sheet has prices for it" in told.output


def test_two_machines_of_one_name_are_refused_and_one_is_asked_once(tmp_path: Path) -> None:
    first, again = tmp_path / "mine.toml", tmp_path / "again" / "mine.toml"
    again.parent.mkdir()
    first.write_text(TOY_TOML.replace('name = "toy"', 'name = "mine"'))
    again.write_text(first.read_text().replace("8.0", "9.0"))
    asked = ["cross", "--prompt", "4", "--decode", "1", "--technique", "coreml-cpu", "--json", "--model", "phi-3.5-moe"]
    told = CliRunner().invoke(app, [*asked, "--machine", str(first), "--machine", str(again)])
    assert told.exit_code == 2
    assert f"{str(first)!r} and {str(again)!r} are both called mine" in told.output
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
