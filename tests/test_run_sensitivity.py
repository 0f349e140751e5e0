"""`joulebench report --sensitivity`: operations of a stored run priced again, one constant of the sheet changed."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest

from devices.models.sheet import load_sheet, sheet_path
from tests.command import joulebench
from tests.histories import made_trial, write_run
from tests.run_builders import cell

CONSTANT = "units.npu.kernels.expert_ffn+attention.s_per_launch"
PLAN = """
schema = 1
name = "two"
[model]
source = "bundled:tiny-qwen3-moe"
[[engine]]
name = "all on the CPU"
technique = { name = "coreml-cpu" }
[[engine]]
name = "attention on the NPU"
technique = { name = "anemll" }
[[workload]]
name = "ruler_niah_single_2"
limit = 1
length = 512
[[device]]
name = "model:m2-ultra"
priced_as = "phi-3.5-moe"
[protocol]
repeats = 1
warmup = 0
"""


def seconds_of(folder: Path) -> dict[str, float]:
    arms = pd.read_csv(folder / "arms.csv")
    return dict(arms[arms.quantity == "time"].set_index("arm").value)


def sheet_file(path: Path, factor: float) -> Path:
    """The sheet with that figure changed as text; its name is the file's."""
    value = load_sheet("m2-ultra").units["npu"].kernels["attention"].s_per_launch
    assert value is not None
    text, n = re.subn(
        r"(\[units\.npu\.kernels\.(?:attention|expert_ffn)\]\ns_per_launch = \{ value = )[0-9.e+-]+",
        lambda found: f"{found[1]}{value.value * factor!r}",
        sheet_path("m2-ultra").read_text(encoding="utf-8"),
    )
    assert n == 2
    path.write_text(text.replace('name = "m2-ultra"', f'name = "{path.stem}"'))
    return path


@pytest.mark.slow
def test_leads_are_those_of_the_run_priced_again_with_the_changed_file(tmp_path: Path) -> None:
    """The other road: the sheet's file with that figure changed, and `--rederive` with it."""
    (tmp_path / "plan.toml").write_text(PLAN)
    for asked in (("run", "plan.toml", "--out", "run"), ("report", "run", "--sensitivity")):
        done = joulebench(*asked, cwd=tmp_path)
        assert done.code == 0, done.stderr
    before = seconds_of(tmp_path / "run")
    first, second = sorted(before, key=lambda arm: before[arm])
    found = pd.read_csv(tmp_path / "run" / "sensitivity.csv")
    of_constant = found[(found.constant == CONSTANT) & (found.metric == "time of a request")]
    for factor, name in ((0.8, "less"), (1.2, "more")):
        sheet = sheet_file(tmp_path / f"{name}.toml", factor)
        done = joulebench(
            "report", "run", "--rederive", "--sheet", f"model:m2-ultra={sheet.name}", "--out", name, cwd=tmp_path
        )
        assert done.code == 0, done.stderr
        after = seconds_of(tmp_path / name)
        (row,) = of_constant[of_constant.factor == factor].to_dict("records")
        assert row["first"] == first
        assert row["lead"] == pytest.approx(before[second] / before[first], rel=1e-9)
        assert row["lead_changed"] == pytest.approx(after[second] / after[first], rel=1e-9)
        assert row["lead_changed"] != pytest.approx(row["lead"], rel=1e-6)
        assert row["flips"] == (after[second] < after[first])
    assert "What do the conclusions of this run hang on?" in (tmp_path / "run" / "sensitivity.html").read_text()
    watts = found[found.constant.str.endswith("_w")]
    assert set(watts.metric) == {"joules of a request"}, "no time hangs on watts"


def test_a_run_without_a_hardware_sheet_is_told_that_nothing_can_change(tmp_path: Path) -> None:
    """It said that no conclusion flips."""
    write_run(
        tmp_path / "run", [cell("c1"), cell("c2", engine="other")], [made_trial("c1", 0, 1.0), made_trial("c2", 0, 2.0)]
    )
    done = joulebench("report", str(tmp_path / "run"), "--sensitivity")
    assert done.code == 2
    assert "--sensitivity: no device of this run has a hardware sheet, so no constant can change" in done.stderr
    assert "No conclusion flips" not in done.stdout
    assert not (tmp_path / "run" / "sensitivity.csv").exists()


def test_watts_are_not_asked_where_joules_are_missing(tmp_path: Path) -> None:
    text = sheet_path("m2-ultra").read_text(encoding="utf-8")
    text, n = re.subn(r"(\[units\.npu\]\n(?:.*\n)*?)busy_w = .*\n", r"\1", text, count=1)
    assert n == 1
    (tmp_path / "mine.toml").write_text(text.replace('name = "m2-ultra"', 'name = "mine"'))
    device = 'name = "model:m2-ultra"'
    (tmp_path / "plan.toml").write_text(PLAN.replace(device, 'sheet = "mine.toml"'))
    for asked in (("run", "plan.toml", "--out", "run"), ("report", "run", "--sensitivity")):
        done = joulebench(*asked, cwd=tmp_path)
        assert done.code == 0, done.stderr
    found = pd.read_csv(tmp_path / "run" / "sensitivity.csv")
    assert set(found.metric) == {"time of a request"}
    assert CONSTANT in set(found.constant)
    assert not found.constant.str.endswith("_w").any()
