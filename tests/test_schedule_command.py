"""`joulebench schedule` as a user meets it: real processes and real runs, kills, bad input, what is told to whom."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from harness.schedule.due import run_due
from harness.schedule.entries import Book, Unfinished
from harness.schedule.world import RealWorld, environment_of
from results.database import DATABASE
from results.store import Store
from tests.command import EXECUTABLE, environment, joulebench, names_of_modules
from tests.plans import FAST, SHAREGPT, raw_plan, write_failing_plan, write_plan

HOSTILE = 'night\'; touch owned; $(touch owned) "x" %n'


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "state"
    monkeypatch.setenv("JOULEBENCH_STATE", str(folder))
    return folder


def plan(folder: Path, **changes: Any) -> Path:
    return write_plan(folder / "plan.toml", raw_plan(workload=[SHAREGPT], **changes))


def schedule(folder: Path, *words: str) -> tuple[int, str, str]:
    done = joulebench("schedule", *words, cwd=folder)
    return done.code, done.stdout, done.stderr


def add(folder: Path, *words: str) -> tuple[int, str, str]:
    return schedule(folder, "add", str(folder / "plan.toml"), "--every", "1d", "--zone", "UTC", *words)


def rows(folder: Path) -> list[dict[str, Any]]:
    return json.loads(schedule(folder, "list", "--json")[1])  # type: ignore[no-any-return]


def trials_in(folder: Path) -> list[str]:
    with Store.view(folder) as store:
        return [trial.trial_id for trial in store.trials()]


def test_the_page_s_line_for_cron_works_with_what_cron_sets(tmp_path: Path) -> None:
    """Its program was in no folder of cron's PATH, and what it said of errors reached no mail."""
    page = Path(__file__).parents[1] / "docs/schedule.md"
    (line,) = (line for line in page.read_text("utf-8").splitlines() if " regress --baseline " in line)
    command = line.split(maxsplit=5)[5].replace("/my/folder", shlex.quote(str(tmp_path)))
    command = command.replace("/my/venv/bin/joulebench", shlex.quote(str(EXECUTABLE)))
    mail = tmp_path / "bin/mail"
    mail.parent.mkdir()
    mail.write_text('#!/bin/sh\necho "$@"\ncat\n')
    mail.chmod(0o755)
    (tmp_path / "runs").mkdir()
    cron = {"HOME": str(tmp_path), "PATH": f"{mail.parent}:/usr/bin:/bin", "SHELL": "/bin/sh"}
    done = subprocess.run(["/bin/sh", "-c", command], env=cron, capture_output=True, text=True, check=False)
    mailed = "-s joulebench regress me@example.org\nerror: runs: holds no run yet"
    assert (done.returncode, done.stdout[: len(mailed)], done.stderr) == (0, mailed, "")


def test_a_plan_runs_once_when_it_is_due_and_never_twice(tmp_path: Path) -> None:
    plan(names_of_modules(tmp_path))
    code, said, _ = add(tmp_path, "--quiet", "00-00:01")
    assert code == 0
    assert "no run starts from 00:00 to 00:01 (UTC); one that goes on then is left alone" in said
    code, said, errors = schedule(tmp_path, "run-due")
    assert (code, errors) == (0, "")
    assert "1 trial ok, 0 failed" in said
    [folder] = (tmp_path / "runs").iterdir()
    assert said.splitlines()[-1] == f"small: done: {folder}"
    assert (folder / "report.html").is_file()
    first = trials_in(folder)
    assert schedule(tmp_path, "run-due") == (0, "", "")
    assert list((tmp_path / "runs").iterdir()) == [folder]
    assert trials_in(folder) == first
    [row] = rows(tmp_path)
    assert row["last"] == f"{folder}: done"
    assert schedule(tmp_path, "remove", "small")[0] == 0
    assert rows(tmp_path) == []
    assert folder.is_dir()


def test_a_plan_behind_a_link_is_what_the_link_leads_to_when_it_is_run(tmp_path: Path) -> None:
    """As `joulebench run` takes it: paths in a plan start at its folder, and that is the link's."""
    first, second = (tmp_path / name for name in ("first", "second"))
    for folder, repeats in ((first, 1), (second, 2)):
        folder.mkdir()
        plan(folder, protocol=FAST | {"repeats": repeats})
    link = tmp_path / "plan.toml"
    link.symlink_to(first / "plan.toml")
    assert add(tmp_path)[0] == 0
    assert rows(tmp_path)[0]["plan"] == str(link)
    link.unlink()
    link.symlink_to(second / "plan.toml")
    code, said, errors = schedule(tmp_path, "run-due")
    assert (code, errors) == (0, "")
    assert f"its plan has changed since it was added, and is run as it is now: {link}" in said
    assert "2 trials ok, 0 failed" in said


def test_a_time_in_quiet_hours_is_shown_with_their_end(tmp_path: Path) -> None:
    plan(tmp_path)
    assert add(tmp_path, "--at", "02:30", "--quiet", "22-06")[0] == 0
    assert rows(tmp_path)[0]["next"].endswith("02:30; quiet until 06:00")


def test_a_run_that_is_killed_goes_on_and_two_passes_run_it_once(tmp_path: Path, state: Path) -> None:
    """The pass is killed, its run goes on and keeps the entry; then the run is killed; then two passes come at once."""
    plan(tmp_path, protocol=FAST | {"repeats": 4, "cooldown_s": 1.0})
    assert add(tmp_path)[0] == 0
    begun = subprocess.Popen(
        [str(EXECUTABLE), "schedule", "run-due"], cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL
    )
    [run] = [wait_for(lambda: children_of(begun.pid), "a run")[0]]
    folder = wait_for(lambda: [f for f in (tmp_path / "runs").glob("*") if Store.holds_run(f)], "its folder")[0]
    wait_for(lambda: trials_in(folder), "a trial")
    os.kill(run, signal.SIGSTOP)  # what is asked meanwhile takes longer than its trials
    begun.send_signal(signal.SIGKILL)
    begun.wait()
    code, said, _ = schedule(tmp_path, "run-due")
    assert code == 0
    assert f"small is run by process {begun.pid}" in said
    assert rows(tmp_path)[0]["next"] == "runs now"
    os.kill(run, signal.SIGKILL)
    wait_for(lambda: not Book(state).is_locked("small"), "the lock")
    kept = trials_in(folder)
    assert 1 <= len(kept) < 4
    both = [
        subprocess.Popen(
            [str(EXECUTABLE), "schedule", "run-due"], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    said_by = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum(f"resuming: {len(kept)} of 4 trials are there" in said for said in said_by) == 1
    assert trials_in(folder)[: len(kept)] == kept
    assert len(trials_in(folder)) == 4
    assert list((tmp_path / "runs").iterdir()) == [folder]


def test_a_run_has_the_variables_that_its_entry_was_added_with_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan(tmp_path)
    monkeypatch.setenv("MKL_DYNAMIC", "FALSE")
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    assert add(tmp_path)[0] == 0
    monkeypatch.delenv("MKL_DYNAMIC")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    assert schedule(tmp_path, "run-due")[0] == 0
    [folder] = (tmp_path / "runs").iterdir()
    with Store.view(folder) as store:
        settings = {one.name: one.value for one in store.info().inputs}
    assert settings.get("MKL_DYNAMIC") == "FALSE"
    assert "MALLOC_ARENA_MAX" not in settings


def test_a_folder_that_is_away_leaves_the_run_due_until_it_is_back(tmp_path: Path) -> None:
    """A disk that is not mounted: after three passes the time was given up."""
    away = tmp_path / "away"
    away.mkdir()
    plan(tmp_path)
    command = ("add", str(tmp_path / "plan.toml"), "--every", "1d", "--zone", "UTC", "--out", str(tmp_path / "runs"))
    assert schedule(away, *command)[0] == 0
    away.rmdir()
    for _ in range(4):
        code, _, errors = schedule(tmp_path, "run-due")
        assert code == 7
        assert "the run cannot be started" in errors
        assert errors.rstrip().endswith("it stays due")
    away.mkdir()
    assert schedule(tmp_path, "run-due")[0] == 0
    assert len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="nobody can make a file in Linux's /proc")
def test_a_folder_for_runs_that_takes_nothing_is_told_when_the_plan_is_added(tmp_path: Path) -> None:
    """It was told at the first time that was due, at night."""
    plan(tmp_path)
    code, _, errors = add(tmp_path, "--out", "/proc/runs")
    assert (code, errors.startswith("error: --out /proc/runs: cannot be written (")) == (7, True)
    assert rows(tmp_path) == []
    assert add(tmp_path)[0] == 0
    assert not (tmp_path / "runs").exists()


def test_a_full_disk_leaves_an_unfinished_run_due(tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`run --resume` refuses with the code of a bad plan where there is no room, and the run was given up."""
    plan(tmp_path)
    assert add(tmp_path)[0] == 0
    book = Book(state)
    kept = book.read("small")
    folder = kept.entry.run_folder(0)
    folder.mkdir(parents=True)
    (folder / DATABASE).touch()
    begun = Unfinished(
        number=0, folder=str(folder), plan_sha256=kept.entry.plan_sha256, begun_at=kept.entry.rhythm.first
    )
    book.write(kept.model_copy(update={"progress": kept.progress.model_copy(update={"unfinished": begun})}))
    with monkeypatch.context() as full:
        full.setattr("results.run_folders.FREE_BYTES_NEEDED", 1 << 62)
        [happened] = run_due(book, RealWorld(state, book, lambda text: None), lambda one: None)
    assert (happened.kind, happened.code) == ("failed", 7)
    assert "4.61e+06 TB are needed; make room and go on with --resume" in happened.words
    progress = book.read("small").progress
    assert progress.unfinished is not None
    assert progress.unfinished == begun.model_copy(update={"begun_at": progress.unfinished.begun_at})
    assert progress.last is None


def test_a_variable_that_was_not_looked_at_then_is_that_of_the_pass(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of an entry that was added before `MKL_*` and `HF_ENDPOINT` were among the names."""
    plan(tmp_path)
    for variable in ("MKL_DYNAMIC", "HF_ENDPOINT", "ADB_SERVER_SOCKET", "OMP_DYNAMIC"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", "/then")
    assert add(tmp_path)[0] == 0
    book = Book(state)
    entry = book.read(book.names()[0]).entry
    now = {"MKL_DYNAMIC": "FALSE", "HF_ENDPOINT": "there", "ADB_SERVER_SOCKET": "tcp:now:1", "OMP_DYNAMIC": "TRUE"}
    for variable, value in (now | {"HF_HOME": "/now"}).items():
        monkeypatch.setenv(variable, value)
    assert {key: value for key, value in environment_of(entry).items() if key in now} == {}
    names = tuple(one for one in entry.carried if one not in ("MKL_*", "HF_ENDPOINT"))
    found = environment_of(entry.model_copy(update={"carried": names}))
    assert {key: found[key] for key in now if key in found} == {"MKL_DYNAMIC": "FALSE", "HF_ENDPOINT": "there"}
    assert found["HF_HOME"] == "/then"


def test_an_entry_that_does_not_say_what_it_kept_is_refused_and_is_added_again(tmp_path: Path, state: Path) -> None:
    plan(tmp_path)
    assert add(tmp_path)[0] == 0
    path = Book(state).path("small")
    of_before = json.loads(path.read_text())
    del of_before["entry"]["carried"]
    path.write_text(json.dumps(of_before))
    code, _, errors = schedule(tmp_path, "run-due")
    assert code != 0
    assert "`joulebench schedule remove` takes it out, and `add` makes it anew" in errors
    assert not (tmp_path / "runs").exists()
    assert schedule(tmp_path, "remove", "small")[0] == 0
    assert add(tmp_path)[0] == 0
    assert "carried" in json.loads(path.read_text())["entry"]


def children_of(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(one) for one in path.read_text().split()] if path.exists() else []


def wait_for(found: Any, what: str, limit_s: float = 60.0) -> Any:
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        try:
            if value := found():
                return value
        except Exception:  # noqa: BLE001 - a folder that is only half there yet
            pass
        time.sleep(0.05)
    raise AssertionError(f"{what} did not come in {limit_s} s")


def test_a_failed_run_tells_why_and_its_message_is_no_code(tmp_path: Path) -> None:
    """The plan's name is a piece of shell; it reaches the owner's program as text."""
    plan(tmp_path, name=HOSTILE.replace("/", ""))
    teller = tmp_path / "tell"
    teller.write_text('#!/bin/sh\ncat > input; printf %s "$1" > argument; printf %s "$JOULEBENCH_MESSAGE" > variable\n')
    teller.chmod(0o755)
    assert add(tmp_path, "--name", HOSTILE, "--notify", f"{shlex.quote(str(teller))} {{}}")[0] == 0
    (tmp_path / "plan.toml").unlink()
    code, _, errors = schedule(tmp_path, "run-due")
    assert code == 2
    message = (tmp_path / "input").read_text()
    assert message.startswith(f"joulebench schedule: {HOSTILE}: its plan {tmp_path}/plan.toml is gone; put it back")
    assert (tmp_path / "argument").read_text() == (tmp_path / "variable").read_text() == message.rstrip("\n")
    assert errors.startswith(f"error: {HOSTILE}: its plan")
    assert not (tmp_path / "owned").exists()
    assert f"now; could not run: its plan {tmp_path}/plan.toml is gone" in rows(tmp_path)[0]["next"]
    (tmp_path / "input").unlink()
    assert schedule(tmp_path, "run-due")[0] == 2
    assert not (tmp_path / "input").exists(), "the same of one time is told once"


def test_a_run_with_failed_trials_ends_with_its_code_and_reason(tmp_path: Path) -> None:
    write_failing_plan(tmp_path)
    assert add(tmp_path)[::2] == (0, "")
    code, _, errors = schedule(tmp_path, "run-due")
    assert code == 5
    assert "small: 1 of 1 trials failed" in errors
    assert schedule(tmp_path, "run-due") == (0, "", ""), "it came to its end"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--every", "1y"], ["--every '1y' is no interval; write a number and m, h, d or w"]),
        (["--every", "1h", "--at", "02:30"], ["--at 02:30: goes with days and weeks, and --every is 1h"]),
        (["--every", "1d", "--device", "hsot"], ["device[0].name: unknown device 'hsot'; did you mean host?"]),
        (
            ["--every", "1d", "--quiet", "22", "--zone", "Mars", "--notify", "no-such-program x"],
            [
                "--quiet '22' are no hours",
                "--zone 'Mars' is no time zone; write it as Europe/Berlin, or UTC",
                "--notify 'no-such-program x': there is no such program",
            ],
        ),
        (
            ["--every", "1d", "--quiet", "20-08", "--quiet", "8-20"],
            ["--quiet 20:00 to 08:00, 08:00 to 20:00: leave no time at which a run may start; shorten one"],
        ),
        (["--every", "1d", "--charge-to", "80"], ["--charge-to: is for phones, and the plan runs on host"]),
        (["--every", "1d", "--charge-on", "true"], ["--charge-on, --charge-off: to which", "go together"]),
        (["--every", "1d", "--set", "protocol.repeats=0"], ["protocol.repeats: must be greater than or equal to 1"]),
    ],
)
def test_bad_input_is_refused_whole(tmp_path: Path, words: list[str], expected: list[str]) -> None:
    plan(tmp_path)
    code, _, errors = schedule(tmp_path, "add", "plan.toml", *words)
    lines = errors.splitlines()
    assert code == 2
    assert len(lines) == len(expected), errors
    for line, part in zip(lines, expected, strict=True):
        assert line.startswith("error: ")
        assert part in line
    assert rows(tmp_path) == []


def test_a_name_that_fits_no_file_is_refused_and_the_longest_that_does_is_run(tmp_path: Path) -> None:
    """100 letters of other alphabets are 900 bytes of a file's name: the schedule was told to be made writable."""
    plan(tmp_path)
    code, _, errors = add(tmp_path, "--name", "測" * 23)
    assert code == 2
    assert "of which those that are not ASCII count six or more of 200; give another" in errors
    assert add(tmp_path, "--name", "測" * 22)[0] == 0
    assert schedule(tmp_path, "run-due")[::2] == (0, "")
    assert add(tmp_path, "--name", "a" * 100)[0] == 0


def test_a_name_is_taken_once(tmp_path: Path) -> None:
    plan(tmp_path)
    assert add(tmp_path)[0] == 0
    code, _, errors = add(tmp_path)
    assert (code, "small: is in the schedule already; give another --name" in errors) == (2, True)
    code, _, errors = schedule(tmp_path, "remove", "other")
    assert (code, "other: no such entry; `joulebench schedule list` shows them" in errors) == (2, True)


def test_a_host_that_another_process_measures_is_waited_for(tmp_path: Path, state: Path) -> None:
    from devices.device_lock import DeviceLock

    plan(tmp_path)
    assert add(tmp_path)[0] == 0
    lock = DeviceLock(state, "host")
    lock.take()
    try:
        code, said, _ = schedule(tmp_path, "run-due")
    finally:
        lock.release()
    assert code == 0
    assert f"host is used by process {os.getpid()}" in said
    assert not (tmp_path / "runs").exists()
    assert schedule(tmp_path, "run-due")[0] == 0


def test_install_shows_what_it_writes_and_leaves_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = tmp_path / "config" / "systemd" / "user"
    code, said, _ = schedule(tmp_path, "install", "--with", "systemd", "--dry-run")
    assert code == 0
    assert not folder.exists()
    code, said, _ = schedule(tmp_path, "install", "--with", "systemd", "--minutes", "30")
    assert code == 0
    for name in ("joulebench-schedule.service", "joulebench-schedule.timer"):
        text = (folder / name).read_text()
        assert all(f"  {line}" in said for line in text.splitlines())
    assert f'Environment="JOULEBENCH_STATE={state}"' in said
    assert "systemctl --user enable --now joulebench-schedule.timer" in said
    assert schedule(tmp_path, "install", "--with", "systemd")[0] == 0, "its own files are written again"
    (folder / "joulebench-schedule.timer").write_text("[Timer]\n")
    code, _, errors = schedule(tmp_path, "install", "--with", "systemd")
    assert code == 2
    assert "is there and not ours; move it away" in errors
    assert schedule(tmp_path, "install", "--with", "at")[2].startswith("error: --with at: no such system")
    assert schedule(tmp_path, "install", "--with", "cron", "--minutes", "50")[0] == 2
