"""Standard output on a full disk, without a reader, or closed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from results.store import Store
from tests.command import EXECUTABLE, environment
from tests.conftest import FinishedRun
from tests.plans import FAST, raw_plan, write_plan

FULL = "standard output cannot be written (No space left on device)"
GONE = "standard output cannot be written (Broken pipe)"
OPEN_FILE = (
    "from harness.interrupts import watch_output; watch_output(); print(open({path!r}, 'w').fileno(), flush=True)"
)


def shell(words: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """words: of a shell, in which `"$@"` is our command."""
    command = ["bash", "-c", words, "bash", str(EXECUTABLE), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=240, check=False)


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    return write_plan(tmp_path / "plan.toml", raw_plan(protocol=FAST | {"repeats": 2}))


def test_a_run_that_cannot_print_says_so_and_keeps_what_is_finished(plan: Path, tmp_path: Path) -> None:
    done = shell('"$@" >/dev/full', "run", plan, "--out", tmp_path / "run")
    assert done.returncode == 7
    assert f"error: {FULL}; finished trials are kept, go on with --resume" in done.stderr.splitlines()
    with Store.view(tmp_path / "run") as store:
        assert len(store.finished()) >= 1


def test_a_run_whose_reader_has_gone_says_so_and_goes_on_with_resume(plan: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = shell('"$@" | head -0; exit ${PIPESTATUS[0]}', "run", plan, "--out", out)
    assert done.returncode == 128 + signal.SIGPIPE
    assert f"error: {GONE}; finished trials are kept, go on with --resume" in done.stderr.splitlines()
    assert shell('"$@"', "run", plan, "--out", out, "--resume").returncode == 0


def test_a_command_that_keeps_nothing_names_the_full_disk(plan: Path) -> None:
    done = shell('"$@" >/dev/full', "plan", "check", plan)
    assert (done.returncode, done.stderr) == (7, f"error: {FULL}\n")


@pytest.mark.parametrize(
    ("command", "table"),
    [
        (("cross", "--machine", "a100", "--technique", "dropless"), "cross.csv"),
        (("reproduce", "000-204"), "reproduced.csv"),
    ],
)
def test_files_that_are_asked_for_are_there_whether_or_not_somebody_reads_the_table(
    command: tuple[str, ...], table: str, tmp_path: Path
) -> None:
    """`| head` and `| less` ended the command before it wrote what it had computed for minutes, without a word."""
    for i, (lost, code) in enumerate((("| head -0; exit ${PIPESTATUS[0]}", 141), (">/dev/full", 7))):
        done = shell(f'"$@" {lost}', *command, "--out", tmp_path / str(i))
        assert done.returncode == code, done.stderr
        assert (tmp_path / str(i) / table).is_file()


def test_a_scheduled_run_whose_reader_has_gone_says_so_and_is_gone_on_with(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass ended with 1 and no word, and its run went on without it."""
    monkeypatch.setenv("JOULEBENCH_STATE", str(tmp_path / "state"))
    added = ("schedule", "add", plan, "--every", "1d", "--out", tmp_path / "runs")
    assert shell('"$@"', *added).returncode == 0
    done = shell('"$@" | head -0; exit ${PIPESTATUS[0]}', "schedule", "run-due")
    assert done.returncode == 128 + signal.SIGPIPE
    assert f"error: {GONE}; finished trials are kept, the next `run-due` goes on with them" in done.stderr.splitlines()
    done = shell('"$@"', "schedule", "run-due")
    assert (done.returncode, done.stdout.splitlines()[-1].startswith("small: done: ")) == (0, True), done.stderr


def test_a_list_of_which_the_beginning_is_enough_ends_without_a_word(finished_run: FinishedRun) -> None:
    done = shell('"$@" | head -0; exit ${PIPESTATUS[0]}', "history", finished_run.directory.parent)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, ""), "1 is the word of `regress` for worse"


def test_errors_that_nobody_can_be_told_keep_their_exit_code(tmp_path: Path) -> None:
    for nowhere in ("2>/dev/full", "2>&-"):
        assert shell(f'"$@" {nowhere}', "report", tmp_path / "none").returncode == 2


@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- 2>&-"])
def test_no_file_gets_what_is_written_to_a_stream_that_was_closed(closed: str, tmp_path: Path) -> None:
    script = OPEN_FILE.format(path=str(tmp_path / "file"))
    done = subprocess.run(
        ["bash", "-c", f'"$@" {closed}', "bash", sys.executable, "-c", script],
        capture_output=True, text=True, env=environment(), timeout=240, check=False,
    )  # fmt: skip
    assert int(done.stdout) > 2
