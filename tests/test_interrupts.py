"""Ctrl-C, SIGTERM and SIGHUP at any moment: a line, the exit code of a shell, and what is finished is kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from results.store import Store
from tests.cases import marked
from tests.command import environment, start
from tests.eventually import PATIENCE_S
from tests.plans import FAST, raw_plan, write_plan
from tests.warm_command import attended

ENDINGS = [
    (signal.SIGINT, 130, "interrupted"),
    (signal.SIGTERM, 143, "terminated (SIGTERM)"),
    (signal.SIGHUP, 129, "hung up (SIGHUP)"),
]


def interrupted_at_import(module: str, number: int, *arguments: str, ignored: bool = False) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of joulebench that a signal hits as it begins to import a module."""
    code = f"""
        import os, sys
        class Hit:
            def find_spec(self, name, path=None, target=None):
                if name == {module!r}:
                    sys.meta_path.remove(self)
                    os.kill(os.getpid(), {int(number)})
        sys.meta_path.insert(0, Hit())
        sys.argv = ["joulebench", *{list(arguments)!r}]
        from harness.cli import main
        main()
    """

    def before() -> None:
        attended()
        if ignored:
            signal.signal(number, signal.SIG_IGN)

    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
        preexec_fn=before,
        check=False,
    )
    return process.returncode, process.stdout, process.stderr


@pytest.mark.parametrize(("number", "code", "words"), ENDINGS)
def test_a_signal_while_the_program_starts_prints_a_line_and_no_traceback(number: int, code: int, words: str) -> None:
    assert interrupted_at_import("typer", number, "--help") == (code, "", f"error: {words}\n")


@pytest.mark.parametrize(("number", "code", "words"), marked(ENDINGS, pytest.mark.slow, but=ENDINGS[:1]))
def test_a_signal_while_a_command_imports_what_it_needs_prints_a_line(number: int, code: int, words: str) -> None:
    assert interrupted_at_import("harness.cross.table", number, "cross") == (code, "", f"error: {words}\n")


@pytest.mark.parametrize(("number", "code", "words"), marked(ENDINGS[:2], pytest.mark.slow, but=ENDINGS[1:2]))
def test_a_signal_while_a_plan_is_checked_says_that_nothing_was_begun(
    tmp_path: Path, number: int, code: int, words: str
) -> None:
    plan = write_plan(tmp_path / "plan.toml", raw_plan())
    found = interrupted_at_import("harness.preflight", number, "run", str(plan), "--out", str(tmp_path / "run"))
    assert found == (code, "", f"error: {words}; no trial was begun\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("module", "arguments", "stays"),
    [
        ("harness.tuning.asked", ["tune"], "no probe was begun"),
        ("harness.tuning.asked", ["tune", "--check", "mine"], "the profile stays as it was, check it again"),
    ],
)
def test_what_a_signal_leaves_is_told_as_it_is(module: str, arguments: list[str], stays: str) -> None:
    """A check was said to go on with --resume, which it refuses, and so was a session that had written nothing."""
    found = interrupted_at_import(module, signal.SIGINT, *arguments)
    assert found == (130, "", f"error: interrupted; {stays}\n")


def test_a_signal_that_the_caller_ignores_stays_ignored() -> None:
    """As under nohup."""
    code, stdout, _ = interrupted_at_import("typer", signal.SIGHUP, "--help", ignored=True)
    assert code == 0
    assert "Usage" in stdout


def test_what_waits_ends_where_a_continue_comes_right_behind() -> None:
    """`timeout` and systemd send SIGTERM and SIGCONT. A thread, as libraries have them, took the first in three of four
    cases, and what waited (serve, a pause between windows) went on."""
    code = """if True:
        import threading, time
        from harness.interrupts import InterruptedBySignalError, end_at_once, raise_in_command
        end_at_once()
        raise_in_command()
        for _ in range(3):
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        print("ready", flush=True)
        try:
            time.sleep(600)
        except InterruptedBySignalError:
            print("ended")
    """
    for _ in range(8):
        given = [sys.executable, "-c", code]
        with subprocess.Popen(given, stdout=subprocess.PIPE, text=True, env=environment()) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.05)  # it waits by then; where it does not, it ends all the same
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGCONT)
            try:
                said, _ = process.communicate(timeout=PATIENCE_S)
            finally:
                process.kill()
            assert said == "ended\n"


@pytest.mark.parametrize(("number", "code", "words"), marked(ENDINGS[1:], pytest.mark.slow, but=ENDINGS[2:]))
def test_a_run_that_is_ended_from_outside_keeps_its_trials_and_says_how_to_go_on(
    tmp_path: Path, number: signal.Signals, code: int, words: str
) -> None:
    plan = write_plan(tmp_path / "plan.toml", raw_plan(protocol=FAST | {"repeats": 500, "idle_s": 0.02}))
    log = tmp_path / "log"
    with log.open("w", encoding="utf-8") as output:
        process = start("run", str(plan), "--out", str(tmp_path / "run"), output=output)
        while len(list((tmp_path / "run" / "traces").glob("*.parquet"))) < 3:
            assert process.poll() is None, log.read_text(encoding="utf-8")
            time.sleep(0.005)
        process.send_signal(number)
        assert process.wait(timeout=PATIENCE_S) == code
    text = log.read_text(encoding="utf-8")
    assert "Traceback" not in text
    assert text.splitlines()[-1] == f"error: {words}; finished trials are kept, go on with --resume"
    with Store.view(tmp_path / "run") as store:
        assert 2 <= len(store.trials()) < 500
    assert not list((tmp_path / "run").glob("*.csv"))


def test_a_terminal_that_is_gone_costs_no_more_than_what_it_would_have_shown(tmp_path: Path) -> None:
    """The other end of a pseudo-terminal is closed, which sends SIGHUP; printing to it then fails."""
    plan = write_plan(tmp_path / "plan.toml", raw_plan(protocol=FAST | {"repeats": 500, "idle_s": 0.02}))
    ours, theirs = os.openpty()
    arguments = [sys.executable, "-m", "joulebench", "run", str(plan), "--out", str(tmp_path / "run")]

    def take_terminal() -> None:
        import fcntl
        import termios

        attended()
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=environment(), preexec_fn=take_terminal
    )
    os.close(theirs)
    os.set_blocking(ours, False)
    while len(list((tmp_path / "run" / "traces").glob("*.parquet"))) < 2:
        assert process.poll() is None
        try:
            os.read(ours, 65536)  # or its buffer fills up, and it waits for us
        except BlockingIOError:
            time.sleep(0.005)
    os.close(ours)
    assert process.wait(timeout=PATIENCE_S) == 129
    with Store.view(tmp_path / "run") as store:
        assert store.trials()
