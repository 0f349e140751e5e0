"""`joulebench model fit` as a process: what it refuses before measuring, what an interrupt leaves, one whole run."""

from __future__ import annotations

import csv
import signal
import time
from pathlib import Path

import pytest

from devices.models.sheet import parse_sheet
from tests.command import joulebench, start


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("mine.txt", "a sheet is a TOML file; end its name with .toml"),
        ("absent/mine.toml", "its folder does not exist; make it first"),
        ("there.toml", "exists already and is left as it is; give another name"),
        ("beside.toml", "beside.csv: exists already"),
    ],
)
def test_names_are_looked_at_before_anything_is_measured(tmp_path: Path, name: str, told: str) -> None:
    (tmp_path / "there.toml").write_text("mine")
    (tmp_path / "beside.csv").write_text("mine")
    found = joulebench("model", "fit", "--quick", "--out", str(tmp_path / name))
    assert found.code == 2
    assert told in found.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"there.toml", "beside.csv"}
    assert (tmp_path / "there.toml").read_text() == "mine"


def test_a_device_that_is_not_here_is_told(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    found = joulebench("model", "fit", "--quick", "--device", "cuda", "--out", str(tmp_path / "mine.toml"))
    assert found.code == 4
    assert "sees no cuda device" in found.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    heard = tmp_path / "heard"
    with heard.open("w+") as output:
        process = start("model", "fit", "--quick", "--out", str(tmp_path / "mine.toml"), output=output)
        while "of 3 rounds" not in heard.read_text() and process.poll() is None:
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        code = process.wait(60)
    assert code == 130
    assert "no sheet was written" in heard.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["heard"]


@pytest.mark.slow
def test_a_sheet_of_this_machine_loads_and_says_how_it_was_made(tmp_path: Path) -> None:
    found = joulebench("model", "fit", "--quick", "--even-if-busy", "--threads", "1", "--out", str(tmp_path / "m.toml"))
    assert found.code == 0, found.stderr
    sheet = parse_sheet((tmp_path / "m.toml").read_text(), "m")
    assert sheet.units["cpu"].busy_w is None
    assert "1 threads" in sheet.description
    assert {"expert_ffn", "attention", "scores", "lm_head", "layer", "decode_layer"} <= set(sheet.units["cpu"].kernels)
    rows = list(csv.DictReader((tmp_path / "m.csv").open()))
    assert {row["curve"] for row in rows} >= {"experts", "few rows", "attention", "copy", "prefill", "decode"}
    assert all(float(row["measured_s"]) > 0 for row in rows)
    for row in rows:
        assert float(row["residual"]) == pytest.approx(float(row["predicted_s"]) / float(row["measured_s"]) - 1)
