"""CSV files: they read back to the same numbers, execute nothing, and are whole or absent."""

import csv
import json
import math
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from results import tables
from results.report import files
from results.report.csv import csv_text, json_records, neutralised, write_csv
from results.report.files import check_folder, replace_text
from tests.run_builders import TABLES, cell, example_run, failed, run, trial


def test_files_read_back_to_the_tables(tmp_path: Path) -> None:
    data = example_run(n_repeats=2)
    paths = write_csv(data, tmp_path)
    assert [p.name for p in paths] == [f"{name}.csv" for name in TABLES]
    latency = tables.latency(data)
    read = pd.read_csv(tmp_path / "latency.csv")
    assert list(read.columns) == list(latency.columns)
    assert read["mean"].equals(latency["mean"]), "every digit survives"


def test_missing_energy_is_an_empty_cell_not_zero(tmp_path: Path) -> None:
    write_csv(run([cell()], [trial()]), tmp_path)
    with (tmp_path / "energy.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {r["mean"] for r in rows} == {""}
    assert {r["method"] for r in rows} == {"missing"}
    assert {r["reason"] for r in rows} == {"no meter was read in this trial"}


@pytest.mark.parametrize("text", ["=1+1", "+1+1", "-A1", "-1;A1", "--1", "@SUM(A1)", "\t=1", "\r=1", "  =1", "＝1"])
def test_text_that_a_spreadsheet_would_execute_is_neutralised(text: str) -> None:
    assert neutralised(text) == "'" + text


@given(st.text())
def test_no_text_cell_starts_like_a_formula(text: str) -> None:
    safe = neutralised(text)
    if safe == "-":
        return
    is_number = bool(re.fullmatch(r"[0-9.e+; -]+", safe)) and all(map(is_float, safe.split("; ")))
    assert is_number or safe.lstrip(" ")[:1] not in {"=", "+", "-", "@", "\t", "\r", "\n"}


def is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def test_a_folder_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    check_folder(tmp_path / "new" / "deep")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="exists"):
        check_folder(tmp_path / "file")
    with pytest.raises(OSError, match="Not a directory"):
        check_folder(tmp_path / "file" / "below")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_negative_numbers_stay_numbers() -> None:
    assert csv_text(pd.DataFrame({"x": [-1.5, 2.0], "t": ["-a", None]})) == "x,t\n-1.5,'-a\n2.0,\n"
    mixed = pd.DataFrame({"ours": [-1.5, "-1.93; 22.9", "-2", "-6.5e-05", "-1-2", "-"]})
    assert csv_text(mixed) == "ours\n-1.5\n-1.93; 22.9\n-2\n-6.5e-05\n'-1-2\n-\n"


def test_a_hostile_error_reaches_the_file_as_text(tmp_path: Path) -> None:
    write_csv(run([cell()], [failed(error='=HYPERLINK("http://x","y")')]), tmp_path)
    with (tmp_path / "trials.csv").open(newline="") as file:
        assert next(csv.DictReader(file))["failure"] == '\'=HYPERLINK("http://x","y")'


def test_a_write_that_fails_leaves_the_old_file_and_no_rest(tmp_path: Path) -> None:
    path = tmp_path / "summary.csv"
    replace_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        replace_text(path, "new \ud800")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["summary.csv"]


def test_a_pipe_gets_the_text_and_stays_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        replace_text(path, ["a\n", "μ\n"])
        assert os.read(reader, 100) == "a\nμ\n".encode()
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(path.stat().st_mode)
    assert os.listdir(tmp_path) == ["pipe"]


def test_links_of_the_devices_are_followed_and_others_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dev").mkdir()
    link, other, target = tmp_path / "dev" / "stdout", tmp_path / "link", tmp_path / "target"
    for one in (link, other):
        one.symlink_to(target)
    monkeypatch.setattr(files, "DEVICE_FOLDER", str(link.parent))
    target.write_text("kept, ")
    replace_text(link, "through")
    assert (link.is_symlink(), target.read_text()) == (True, "kept, through")
    replace_text(other, "its own")
    assert (other.is_symlink(), other.read_text(), target.read_text()) == (False, "its own", "kept, through")


@pytest.mark.parametrize("folder", ["/dev/fd", "/proc/self/fd", "/dev/../dev/fd", "/proc/OWN/fd"])
def test_an_open_file_is_written_where_it_stands(tmp_path: Path, folder: str) -> None:
    folder = folder.replace("OWN", str(os.getpid()))
    if not Path(folder).is_dir():
        pytest.skip(f"this system has no {folder}")
    log = tmp_path / "log"
    for how, offset, left in (
        (os.O_RDWR, 6, "first\ntable|!last\n"),
        (os.O_RDWR | os.O_APPEND, 0, "first\n1234567last\ntable|!"),
    ):
        log.write_text("first\n1234567last\n")
        descriptor = os.open(log, how)
        try:
            os.lseek(descriptor, offset, os.SEEK_SET)
            replace_text(Path(folder, str(descriptor)), ["table", "|"])
            os.write(descriptor, b"!")
        finally:
            os.close(descriptor)
        assert log.read_text() == left


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/../dev/stdout"])
def test_a_table_on_standard_output_comes_between_what_is_printed_and_keeps_the_file(tmp_path: Path, name: str) -> None:
    log = tmp_path / "log"
    log.write_text("old\n")
    script = (
        "from pathlib import Path; from results.report.files import replace_text\n"
        f"print('before'); replace_text(Path({name!r}), 'table\\n'); print('after')"
    )
    with log.open("ab") as output:
        subprocess.run([sys.executable, "-c", script], stdout=output, check=True)
    assert log.read_text() == "old\nbefore\ntable\nafter\n"


def test_what_is_not_open_is_an_error_that_names_it() -> None:
    with pytest.raises(OSError, match="Bad file descriptor") as caught:
        replace_text(Path("/dev/fd/999999999"), "text")
    assert caught.value.filename == "/dev/fd/999999999"


def test_a_folder_is_no_file_to_write(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError) as caught:
        replace_text(tmp_path, "text")
    assert caught.value.filename == str(tmp_path)


def test_programs_get_every_digit_and_nothing_for_what_is_no_number() -> None:
    """pandas' own JSON has ten digits behind the point: a p of 3e-15 was told as 0."""
    frame = pd.DataFrame({"p": [3.1023226e-15, math.nan, math.inf], "s": [0.016476379612345, 1.0, 2.0]})
    frame = frame.assign(n=pd.array([3, pd.NA, 4], dtype="Int64"), ok=[True, False, True])
    frame["why"] = np.array(["x", None, ""], dtype=object)
    assert json.loads(json.dumps(json_records(frame))) == [
        {"p": 3.1023226e-15, "s": 0.016476379612345, "n": 3, "ok": True, "why": "x"},
        {"p": None, "s": 1.0, "n": None, "ok": False, "why": None},
        {"p": None, "s": 2.0, "n": 4, "ok": True, "why": ""},
    ]
