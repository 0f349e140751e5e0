"""`joulebench baseline`: which runs of a history are good ones, and the file that says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from results.history.index import HistoryError, open_history
from results.history.marks import LOCK, MARKS, baseline_runs, mark, read_marks
from tests.command import joulebench
from tests.histories import write_history


def alike(day: int, arm: str) -> float:
    return 2.0


def test_where_the_folder_of_runs_is_not_there_a_baseline_is_told_how_to_name_it(tmp_path: Path) -> None:
    """It said to give the folder "as `runs`", which is what was not there, and the command takes none so."""
    write_history(tmp_path, 1, alike)
    found = joulebench("baseline", "set", "good", str(tmp_path / "run000"), cwd=tmp_path)
    assert found.code == 2
    (line,) = found.problems
    assert "runs is not there" in line
    assert line.endswith("with --history")
    assert joulebench("baseline", "set", "good", str(tmp_path / "run000"), "--history", str(tmp_path)).code == 0


def test_baselines_are_set_added_to_listed_and_removed(tmp_path: Path) -> None:
    write_history(tmp_path, 3, alike)
    at = ("--history", str(tmp_path))
    assert joulebench("baseline", "set", "good", str(tmp_path / "run000"), *at).code == 0
    added = joulebench("baseline", "set", "good", "run001-id", "--add", *at)
    assert added.stdout == f"baseline good of {tmp_path}: run000, run001\n"
    assert "[good]" in joulebench("history", str(tmp_path)).stdout.splitlines()[1]
    assert "run000, run001" in joulebench("baseline", "list", *at).stdout
    assert joulebench("baseline", "remove", "good", *at).code == 0
    assert read_marks(tmp_path) == {}
    unknown = joulebench("baseline", "remove", "good", *at)
    assert (unknown.code, "no such baseline" in unknown.stderr) == (2, True)
    stranger = joulebench("baseline", "set", "good", "run009", *at)
    assert (stranger.code, "has no such run" in stranger.stderr) == (2, True)
    assert "--history names another folder of runs" in stranger.stderr


@pytest.mark.parametrize("command", [("set", "good", "run000"), ("remove", "good")])
def test_baselines_that_cannot_be_written_end_with_7_and_stay(tmp_path: Path, command: tuple[str, ...]) -> None:
    write_history(tmp_path, 2, alike)
    kept = '{"good": ["run001"]}'
    (tmp_path / MARKS).write_text(kept)
    (tmp_path / LOCK).mkdir()
    done = joulebench("baseline", *command, "--history", str(tmp_path))
    assert (done.code, done.stdout) == (7, "")
    assert f"{LOCK}: cannot be written" in done.stderr
    assert f"make {tmp_path} writable" in done.stderr
    assert (tmp_path / MARKS).read_text() == kept


def test_a_baseline_file_that_is_none_is_told(tmp_path: Path) -> None:
    write_history(tmp_path, 1, alike)
    (tmp_path / MARKS).write_text('{"good": "run000"}', encoding="utf-8")
    with open_history(tmp_path) as found, pytest.raises(HistoryError, match="is not of the form"):
        mark(found, "other", ["run000"], add=False)
    (tmp_path / MARKS).write_text('{"good": ["run007"]}', encoding="utf-8")
    with open_history(tmp_path) as found, pytest.raises(HistoryError, match="baseline good: run007"):
        baseline_runs(found, "good")
