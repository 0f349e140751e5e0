"""`joulebench sheets`: lists, shows, and writes copies to change."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from devices.models.sheet import available_sheets, load_sheet, sheet_path
from tests.command import joulebench


def test_sheets_are_listed_shown_and_written_out(tmp_path: Path) -> None:
    listed = json.loads(joulebench("sheets", "--json").stdout)
    assert [row["name"] for row in listed] == list(available_sheets())
    assert {row["name"]: row["links"] for row in listed}["a100"] == "pcie"
    written = tmp_path / "mine.toml"
    assert joulebench("sheets", "a100", "--out", str(written)).code == 0
    mine, a100 = load_sheet(written), load_sheet("a100")
    assert mine == a100.model_copy(update={"name": "mine"})
    shown = joulebench("sheets", str(written)).stdout
    assert "units.gpu.roofline.bytes_per_s" in shown
    assert "1.935 TB/s" in shown
    assert "80.0 GiB" in shown, "as all pages tell a memory"
    assert "cpu to gpu and back, duplex" in shown
    assert joulebench("sheets", "a100", "--out", str(written)).code == 2
    assert joulebench("sheets", "a100", "--out", str(tmp_path / "gh200.toml")).code == 2
    bare = written.rename(tmp_path / "mine")
    for name in ("a1000", str(bare)):
        told = joulebench("sheets", name).stderr
        assert "no hardware sheet has this name" in told
        assert "a sheet of your own is a file, and its name ends in .toml" in told
    assert "did you mean a100?" in joulebench("sheets", "a1000").stderr


@pytest.mark.parametrize("line", ["name = 'mine'", 'name="mine" # mine', '\ufeffname = "mine"'])
def test_a_copy_of_a_users_sheet_has_its_own_name_however_that_is_written(tmp_path: Path, line: str) -> None:
    text = sheet_path("a100").read_text().replace('name = "a100"', line)
    marked = line.startswith("\ufeff")
    (tmp_path / "mine.toml").write_text(line + "\n" + text.replace(line, "", 1) if marked else text)
    copy = tmp_path / "\N{GRINNING FACE} o'clock.toml"
    made = joulebench("sheets", str(tmp_path / "mine.toml"), "--out", str(copy))
    assert made.code == 0, made.stderr
    assert load_sheet(copy) == load_sheet("a100").model_copy(update={"name": copy.stem})
    (told,) = re.findall(r"sheet = .*", made.stdout)
    assert tomllib.loads(told) == {"sheet": copy.name}


def test_a_sheet_whose_name_is_hidden_is_not_copied_under_a_wrong_one(tmp_path: Path) -> None:
    text = sheet_path("a100").read_text().replace('name = "a100"', '"name" = "mine"')
    (tmp_path / "mine.toml").write_text(text)
    told = joulebench("sheets", str(tmp_path / "mine.toml"), "--out", str(tmp_path / "two.toml"))
    assert told.code == 2
    assert told.problems == [
        'error: mine: its name is not in a line of its own; copy the file, and write name = "two" in it'
    ]
    assert not (tmp_path / "two.toml").exists()
