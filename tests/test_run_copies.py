"""Of copies of a run in a history that which tells most counts, whatever its folder is called."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from results.history.copies import Copy, without_copies
from results.history.index import open_history
from results.store import Store
from tests.histories import made_trial, write_run
from tests.run_builders import cell, failed


def counted(directory: Path) -> tuple[list[str], list[Copy]]:
    with open_history(directory) as found:
        runs, copies = without_copies(found.runs)
    return [run.folder for run in runs], copies


def write(folder: Path, n_ok: int) -> Path:
    trials = [made_trial("c1", i, 1.0) if i < n_ok else failed("c1", i) for i in range(3)]
    return write_run(folder, [cell("c1")], trials)


@pytest.mark.parametrize("name", ["a-backup", "z-backup"])
def test_a_copy_from_before_a_resume_does_not_stand_for_the_run(tmp_path: Path, name: str) -> None:
    """As many trials are in both: what a lost device took was measured again in the run alone."""
    write(tmp_path / "m-run", 1)
    shutil.copytree(tmp_path / "m-run", tmp_path / name)
    shutil.rmtree(tmp_path / "m-run")
    write(tmp_path / "m-run", 3)
    assert counted(tmp_path) == (["m-run"], [Copy(name, "m-run")])


@pytest.mark.parametrize("name", ["a-backup", "z-backup"])
def test_a_copy_of_the_last_moment_of_a_run_does_not_stand_for_it(tmp_path: Path, name: str) -> None:
    """Its last trial was there, and the mark that more is to come: half runs are in no verdict."""
    write(tmp_path / "m-run", 3)
    shutil.copytree(tmp_path / "m-run", tmp_path / name)
    with Store.open(tmp_path / name) as store:
        store.note_unfinished(3)
    assert counted(tmp_path) == (["m-run"], [Copy(name, "m-run")])
