"""`joulebench model fit` as a process: what it refuses before measuring, what an interrupt leaves, one whole run."""

from __future__ import annotations

import csv
import json
import shlex
import signal
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from devices.models.sheet import load_sheet, parse_sheet
from engines.curves import machine
from engines.curves.host import SIZES, THIN
from engines.curves.machine import FittedMachine, doubts
from engines.curves.pieces import emptying_bytes
from engines.curves.prices import Residual
from engines.curves.rounds import Measured, Piece, Point, Rounds
from engines.made_models import MadeSizes
from harness import model_command
from tests.command import joulebench, start


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("mine.txt", "a sheet is a TOML file; end its name with .toml"),
        ("absent/mine.toml", "its folder does not exist; make it first"),
        ("there.toml", "exists already and is left as it is; give another name"),
        ("beside.toml", "beside.csv: exists already"),
        ("a100.toml", "a100 is a sheet of joulebench; give the file another name"),
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


def test_all_faults_of_a_name_are_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "there.toml").write_text("mine")
    (tmp_path / "there.csv").write_text("mine")
    both = joulebench("model", "fit", "--quick", "--out", str(tmp_path / "there.toml")).problems
    kept = "exists already and is left as it is; give another name"
    assert both == [f"error: {tmp_path / name}: {kept}" for name in ("there.toml", "there.csv")]
    absent = tmp_path / "absent" / "mine.txt"
    assert joulebench("model", "fit", "--quick", "--out", str(absent)).problems == [
        f"error: --out {absent}: a sheet is a TOML file; end its name with .toml",
        f"error: {absent}: its folder does not exist; make it first",
    ]


def test_a_device_that_is_not_here_is_told(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    found = joulebench("model", "fit", "--quick", "--device", "cuda", "--out", str(tmp_path / "mine.toml"))
    assert found.code == 4
    assert "sees no cuda device" in found.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("n_disturbed", "even_if_busy", "told"),
    [
        (14, False, "cpu: 1 of 3 rounds"),
        (15, False, "cpu: 1 of 3 rounds; 15 of 140 runs were disturbed so far: no sheet may come of it without"),
        (15, True, "cpu: 1 of 3 rounds; 15 of 140 runs were disturbed so far"),
    ],
)
def test_a_busy_machine_is_told_after_each_round(n_disturbed: int, even_if_busy: bool, told: str) -> None:
    line = model_command._told_of_rounds("cpu", Rounds(1, n_disturbed, 140), 3, even_if_busy)
    assert line.removesuffix(" --even-if-busy") == told


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


@pytest.mark.parametrize("is_json", [False, True])
@pytest.mark.parametrize("has_cwd", [True, False])
def test_what_was_fitted_is_written_elsewhere_where_it_was_asked_is_no_room(
    is_json: bool, has_cwd: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Somebody takes the name meanwhile. Minutes of measuring were lost, and no residual was shown."""
    cwd, scratch, out = tmp_path / "here", tmp_path / "scratch", tmp_path / "mine.toml"
    cwd.mkdir()
    scratch.mkdir()
    monkeypatch.chdir(cwd)
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    for name in ("quiet_libraries", "raise_in_command"):
        monkeypatch.setattr(model_command, name, lambda: None)
    copies = missed("copy", 0.25)
    measured = Measured(tuple(one.point for one in copies), None, 1, 5, 0)

    def measure(name: str, *_: object) -> FittedMachine:
        out.write_text("another's")
        if not has_cwd:
            cwd.rmdir()
        unit: Any = SimpleNamespace(measured=measured, residuals=copies)
        return FittedMachine(load_sheet("a100").model_copy(update={"name": name}), (), {"cpu": unit})

    monkeypatch.setattr(machine, "fit_machine", measure)
    with pytest.raises(typer.Exit) as ended:
        model_command.fit(out, quick=True, as_json=is_json)
    assert ended.value.exit_code == 7
    points, sheet = sorted((cwd if has_cwd else scratch).iterdir())
    assert (points.suffix, points.stem) == (".csv", sheet.stem)
    assert parse_sheet(sheet.read_text(), sheet.stem).units == load_sheet("a100").units
    told = capsys.readouterr()
    assert f"error: --out {out}: cannot be written (File exists); the sheet is in {sheet}\n" in told.err
    assert "0.25" in told.out
    if is_json:
        assert [row["median_miss"] for row in json.loads(told.out)] == [0.25]
    else:
        assert f"joulebench cross --machine {shlex.quote(str(sheet))} --weights fp32" in told.out
        # 30 billion weights, which cross asks by itself, fit into the memory of few machines.
        assert "--model takes a smaller model" in told.out
    assert (out.read_text(), out.with_suffix(".csv").exists()) == ("another's", False)


@pytest.mark.slow
def test_a_sheet_of_this_machine_loads_and_says_how_it_was_made(tmp_path: Path) -> None:
    found = joulebench("model", "fit", "--quick", "--even-if-busy", "--threads", "1", "--out", str(tmp_path / "m.toml"))
    assert found.code == 0, found.stderr
    named = shlex.quote(str(tmp_path / "m.toml"))
    assert found.stdout.endswith(f"joulebench cross --machine {named} --weights fp32\n")
    sheet = parse_sheet((tmp_path / "m.toml").read_text(), "m")
    assert sheet.units["cpu"].busy_w is None
    assert "1 threads" in sheet.description
    assert {"expert_ffn", "attention", "scores", "lm_head", "layer", "decode_layer"} <= set(sheet.units["cpu"].kernels)
    rows = list(csv.DictReader((tmp_path / "m.csv").open()))
    # A call from Python and the bytes that it reads are told apart by a model that reads next to none.
    assert any(row["curve"] == "experts" and row["shape"].startswith(str(THIN)) for row in rows)
    # And static shapes by whole requests of them.
    assert any(row["curve"] == "decode" and float(row["many_rows.moved_bytes"] or 0) > 0 for row in rows)
    assert {row["curve"] for row in rows} >= {"experts", "few rows", "attention", "copy", "prefill", "decode"}
    assert all(float(row["measured_s"]) > 0 for row in rows)
    for row in rows:
        assert float(row["residual"]) == pytest.approx(float(row["predicted_s"]) / float(row["measured_s"]) - 1)


def missed(curve: str, *misses: float) -> list[Residual]:
    return [Residual(Point(Piece(curve, "any", {}), 1.0, 5, True), 1.0 + miss) for miss in misses]


def test_prices_that_miss_whole_requests_are_doubted_although_nobody_took_cpu_time() -> None:
    right, wrong = missed("decode", 0.01, -0.149, 0.9), missed("prefill", 0.24, -0.26, 0.01)
    (told,) = doubts({"cpu": [*right, *wrong], "gpu": missed("decode", -0.1)})
    assert told.startswith("cpu: the fitted prices miss prompts by 24 % (median of 3); DO NOT TRUST THIS SHEET.")
    # A kernel that takes next to no time may be missed.
    assert doubts({"cpu": [*missed("residual", 0.3, 0.5), *right]}) == ()


def test_one_model_reads_next_to_nothing_in_a_call() -> None:
    """The others read 70 MB and more in a layer's call: so many bytes and a call would be one and the same thing."""

    def n_bytes(sizes: MadeSizes) -> int:
        return 4 * 3 * sizes.hidden * sizes.expert_width * sizes.n_experts

    assert min(map(n_bytes, SIZES)) > 50e6
    assert n_bytes(THIN) < min(map(n_bytes, SIZES)) / 50


@pytest.mark.parametrize(
    ("sizes", "n_bytes"),
    [
        ((), 128 << 20),  # a system that tells nothing
        (("32K", "1024K", "32768K"), 128 << 20),
        (("48K", "491520K"), 640 << 20),
        (("3M", "480M"), 640 << 20),
        (("99999999M",), 2 << 30),
        (("", "many", "96M"), 128 << 20),
    ],
)
def test_so_much_is_read_that_the_largest_cache_is_emptied(
    tmp_path: Path, sizes: tuple[str, ...], n_bytes: int
) -> None:
    for i, size in enumerate(sizes):
        (tmp_path / f"index{i}").mkdir()
        (tmp_path / f"index{i}" / "size").write_text(f"{size}\n")
    assert emptying_bytes(tmp_path) == n_bytes
