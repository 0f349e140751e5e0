"""What a run's exit code says of its figures, and where a report is written."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from harness import terminal
from harness.commands import app
from harness.opening import open_run
from harness.outcome import tell_outcome
from harness.plan import build_plan
from harness.runner import RunOutcome
from results.cells import INTERPRETED
from results.graph_placement import EXPERTS_NOT_ON_ANE, PLACEMENT_NOT_TOLD
from results.self_tests import SelfTest
from results.store import StoreError
from tests.command import joulebench, run_python
from tests.conftest import FinishedRun
from tests.fakes.machine import FakeBench
from tests.fleet_phones import phones_plan
from tests.plans import FAST, raw_plan, write_plan
from tests.run_builders import ENVIRONMENT
from tests.test_contention import shared


def test_a_run_whose_every_trial_was_contended_does_not_end_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = shared(0.5)
    monkeypatch.setattr("harness.run_parts.RunParts", lambda protocol, allow_code, meeting: bench)
    limits = {"repeats": 2, "max_foreign_cpu_share": 0.2, "contention_retries": 0}
    plan = write_plan(tmp_path / "plan.toml", raw_plan(protocol=FAST | limits))
    done = CliRunner().invoke(app, ["run", str(plan), "--out", str(tmp_path / "run")])
    assert done.exit_code == 6
    assert "error: no trial can be used: 2 of 2 are marked (contended) and 0 failed, so no table has" in done.stderr
    key = "protocol.max_foreign_cpu_share"
    assert f"other processes took more than {key} = 0.2 of the CPU: end them, or raise that key" in done.stderr
    assert key in (tmp_path / "run" / "report.html").read_text("utf-8")


@pytest.mark.parametrize("where", ["below a file", "read-only", "full"])
def test_a_folder_that_cannot_be_written_is_told_before_a_device_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """To open this machine compiles the kernels: twenty seconds."""
    bench = FakeBench()
    opened = []
    monkeypatch.setattr(bench, "environment", opened.append)
    above = tmp_path / "above"
    why = f"{above} is no folder; name a folder that can be written with --out"
    if where == "below a file":
        above.touch()
    else:
        above.mkdir()
    if where == "read-only":
        above.chmod(0o555)
        if os.access(above, os.W_OK):
            pytest.skip("root writes to a folder that others only read")
        why = f"{above} cannot be written; name a folder that can be written with --out"
    if where == "full":
        monkeypatch.setattr("results.run_folders.FREE_BYTES_NEEDED", 1 << 62)
        why = "4.61e+06 TB are needed; make room or name a folder on another disk with --out"
    with pytest.raises(StoreError) as caught:
        open_run(build_plan(raw_plan()), above / "run", False, bench)
    assert why in str(caught.value)
    assert opened == []


@pytest.mark.parametrize(
    ("marks", "remedy"),
    [
        ((EXPERTS_NOT_ON_ANE,), "`joulebench coreml lint` which operations the Neural Engine does not take"),
        ((PLACEMENT_NOT_TOLD,), "placement.csv says why Core ML did not tell where the experts lie"),
        ((EXPERTS_NOT_ON_ANE, "hot"), "report.html says what disturbed them"),
        (("hot",), "report.html says what disturbed them"),
        (
            (INTERPRETED,),
            'times say nothing of a Mac; for these run the plan on a Mac with predictor = "macos"',
        ),
    ],
)
def test_where_no_trial_can_be_used_the_remedy_is_that_of_its_mark(
    marks: tuple[str, ...], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended:
        tell_outcome(RunOutcome(2, 0, n_marked=2, marks=marks), 0.1)
    assert ended.value.exit_code == 6
    assert f"2 of 2 are marked ({', '.join(marks)})" in (said := " ".join(capsys.readouterr().err.split()))
    assert remedy in said


def test_what_nobody_foresaw_is_one_line_and_whole_on_request(tmp_path: Path) -> None:
    script = """
        import sys, harness.preflight
        from harness.cli import main

        def broken(draft, run_parts):
            raise RuntimeError("a list\\nof nothing")

        harness.preflight.preflight = broken
        main()
    """
    plan = write_plan(tmp_path / "plan.toml", raw_plan())
    for verbose in ([], ["--verbose"]):
        done = run_python(script, *verbose, "plan", "check", str(plan))
        assert done.code == 1
        if verbose:
            assert "Traceback" in done.stderr
            assert "in broken" in done.stderr
        else:
            (line,) = done.stderr.splitlines()
            assert line.startswith("error: RuntimeError: a list of nothing (<string>, line 6); nobody foresaw this:")
            assert "joulebench --verbose" in line


def test_the_page_of_exit_codes_has_each() -> None:
    page = (Path(__file__).parents[1] / "docs" / "plans.md").read_text(encoding="utf-8")
    table = page.partition("| exit code | meaning |")[2].partition("\n\n")[0]
    told = {int(code) for cell in re.findall(r"^\| ([0-9, ]+) \|", table, re.MULTILINE) for code in cell.split(",")}
    ours = {code for name, code in vars(terminal).items() if name.startswith("EXIT_")}
    signals = {128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE, signal.SIGTERM)}
    assert len(ours) == 8
    assert told == {0, *ours, *signals}


def test_a_file_that_is_closed_to_this_user_is_no_fault_of_the_program() -> None:
    """And its exit code is not the 1 by which `compare` says that something is worse."""
    script = """
        import harness.compare_command
        from harness.cli import main

        def closed(told):
            raise PermissionError(13, "Permission denied", told)

        harness.compare_command._parsed = closed
        main()
    """
    done = run_python(script, "compare", "/home/other/run", "/home/other/run")
    assert (done.code, done.stdout) == (2, "")
    assert "'/home/other/run': it is closed to this user" in done.stderr
    assert "nobody foresaw" not in done.stderr


@pytest.mark.parametrize(
    "command",
    ["history @", "compare @ .", "regress @ --baseline a", "open @", "trace @", "bundle @ --out b", "export @ --out e"],
)
def test_a_name_that_is_too_long_is_no_fault_of_the_program(command: str, tmp_path: Path) -> None:
    """`history` and others ended with "nobody foresaw this" and 1; `bundle` and `export` blamed --out."""
    done = joulebench(*command.replace("@", 300 * "a").split(), cwd=tmp_path)
    assert (done.code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {75 * 'a'}")
    assert "too long" in line
    assert "--out" not in line
    assert list(tmp_path.iterdir()) == []


def test_what_a_limit_on_memory_ends_names_the_limit(tmp_path: Path) -> None:
    """Python's own error, and a library that the loader had no room for."""
    script = """
        import resource, sys, harness.preflight
        from harness.cli import main

        ERRORS = {"own": MemoryError(), "library": ImportError("libx.so: failed to map segment from shared object")}
        limited, kind = sys.argv[1:3]
        del sys.argv[1:3]

        def broken(draft, run_parts):
            if limited == "limited":
                resource.setrlimit(resource.RLIMIT_AS, (1 << 36, resource.getrlimit(resource.RLIMIT_AS)[1]))
            raise ERRORS[kind]

        harness.preflight.preflight = broken
        main()
    """
    plan = write_plan(tmp_path / "plan.toml", raw_plan())

    def told(limited: str, kind: str) -> str:
        done = run_python(script, limited, kind, "plan", "check", str(plan))
        assert done.code == 1
        return done.stderr.strip()

    limit = "this process may take 67108864 KiB of memory (ulimit -v): raise that"
    assert told("limited", "own") == f"error: MemoryError; {limit}"
    library = "error: ImportError: libx.so: failed to map segment from shared object"
    assert told("limited", "library") == f"{library}; {limit}"
    assert told("free", "own").startswith("error: MemoryError; no memory is left")
    assert told("free", "library").startswith(f"{library} (")
    assert "nobody foresaw this" in told("free", "library")


def test_where_nothing_temporary_can_be_written_the_remedy_is_told(tmp_path: Path) -> None:
    """On a full disk torch itself asks for that folder, when it is imported."""
    script = """
        import tempfile, harness.preflight
        from harness.cli import main

        def full(draft, run_parts):
            tempfile.tempdir = None
            tempfile._candidate_tempdir_list = lambda: ["/proc"]
            tempfile.gettempdir()

        harness.preflight.preflight = full
        main()
    """
    done = run_python(script, "plan", "check", str(write_plan(tmp_path / "plan.toml", raw_plan())))
    assert done.code == 1
    (line,) = done.stderr.splitlines()
    assert "No usable temporary directory found in ['/proc']: make room in one of them, or set TMPDIR" in line
    assert "nobody foresaw" not in line


def test_in_a_folder_that_is_gone_no_command_begins() -> None:
    """oneMKL ended the process there, and blamed libtorch_cpu.so."""
    done = run_python(
        """
        import os, tempfile
        from harness.cli import main

        gone = tempfile.mkdtemp()
        os.chdir(gone)
        os.rmdir(gone)
        main()
        """,
        "list",
        "plans",
    )
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr == "error: the current folder is not there any more: go to another one (cd)\n"


def test_a_plan_that_has_no_place_here_is_to_be_written_elsewhere(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["init", str(tmp_path / "none" / "plan.toml")])
    told = "cannot be written (No such file or directory); name a file in another folder"
    assert (done.exit_code, told in done.stderr) == (7, True)


def test_a_file_of_weights_that_is_cut_short_under_a_run_does_not_end_it_without_a_word(tmp_path: Path) -> None:
    """The kernel ends a process that reads a mapped page which is gone; here by the same signal."""
    script = """
        import mmap, sys, harness.run_parts
        from pathlib import Path
        from tests.fakes.machine import FakeBench

        class Mapped:
            def __init__(self, path):
                path.write_bytes(bytes(9000))
                self.file = path.open("r+b")
                self.pages = mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ)

            def run(self, *arguments):
                self.file.truncate(0)
                return self.pages[8000]

        bench = FakeBench()
        bench.engine.run = Mapped(Path(sys.argv.pop())).run
        harness.run_parts.RunParts = lambda protocol, allow_code, meeting: bench
        from harness.commands import app
        app()
    """
    plan = write_plan(tmp_path / "plan.toml", raw_plan(protocol=FAST))
    arguments = ["run", str(plan), "--out", str(tmp_path / "run"), str(tmp_path / "weights")]
    done = run_python(script, *arguments)
    assert done.code == -signal.SIGBUS, done.stderr
    assert "Fatal Python error: Bus error" in done.stderr


def test_one_trial_that_can_be_used_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = shared(0.5, 0.0)
    monkeypatch.setattr("harness.run_parts.RunParts", lambda protocol, allow_code, meeting: bench)
    limits = {"repeats": 2, "max_foreign_cpu_share": 0.2, "contention_retries": 0}
    plan = write_plan(tmp_path / "plan.toml", raw_plan(protocol=FAST | limits))
    assert CliRunner().invoke(app, ["run", str(plan), "--out", str(tmp_path / "run")]).exit_code == 0


def test_an_outcome_counts_marked_trials_apart(tmp_path: Path) -> None:
    from harness.opening import open_run
    from harness.plan import build_plan
    from harness.runner import Runner
    from tests.test_runner import Heard

    def outcome(bench: FakeBench, folder: Path) -> RunOutcome:
        plan = build_plan(raw_plan(protocol=FAST | {"max_foreign_cpu_share": 0.2, "contention_retries": 0}))
        with open_run(plan, folder, False, bench) as store:
            return Runner(plan, store, bench, Heard()).run()

    assert outcome(shared(0.5), tmp_path / "a") == RunOutcome(1, 0, 1, ("contended",))
    assert outcome(shared(0.0), tmp_path / "b") == RunOutcome(1, 0)


@pytest.mark.parametrize(("environment", "expected"), [(ENVIRONMENT, 3), (None, 4)])
def test_the_doctor_tells_a_device_without_a_meter_from_one_to_be_fixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: object, expected: int
) -> None:
    """A `modelled only` machine is as it is; a code of its own lets a script go on with it."""
    found = SelfTest(device="host", made_at="2026-11-22T07:00:00Z", environment=environment, checks=())  # type: ignore[arg-type]
    monkeypatch.setenv("JOULEBENCH_STATE", str(tmp_path))
    monkeypatch.setattr("harness.examination.examine_device", lambda *arguments, **named: found)
    assert CliRunner().invoke(app, ["doctor"]).exit_code == expected


def test_a_report_goes_where_it_is_asked_to_and_leaves_the_run_alone(tmp_path: Path, finished_run: FinishedRun) -> None:
    before = {p: p.stat().st_mtime_ns for p in finished_run.directory.iterdir() if p.suffix in (".csv", ".html")}
    done = CliRunner().invoke(app, ["report", str(finished_run.directory), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.stderr
    assert {p.name for p in (tmp_path / "out").iterdir()} == {p.name for p in before}
    for path in before:
        if path.suffix == ".csv":
            assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    assert {p: p.stat().st_mtime_ns for p in before} == before


def test_a_report_does_not_replace_the_tables_of_another_run(tmp_path: Path, finished_run: FinishedRun) -> None:
    (tmp_path / "run.sqlite").write_bytes(b"")
    done = CliRunner().invoke(app, ["report", str(finished_run.directory), "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert "holds another run, whose tables would be replaced" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["run.sqlite"]


def test_a_file_is_no_folder_for_runs_and_reports(tmp_path: Path, finished_run: FinishedRun) -> None:
    (tmp_path / "file").write_text("mine")
    run = str(finished_run.directory)
    for arguments in (["run", str(finished_run.plan), "--out"], ["report", run, "--out"], ["report"]):
        for path in (tmp_path / "file", Path("/dev/null")):
            done = CliRunner().invoke(app, [*arguments, str(path)])
            assert done.exit_code == 2, arguments
            (line,) = done.stderr.splitlines()
            assert f"{path} is no folder; name another one" in line
    assert (tmp_path / "file").read_text() == "mine"


def test_a_name_that_no_folder_can_have_is_told(finished_run: FinishedRun) -> None:
    for arguments in ([], [str(finished_run.directory), "--out"]):
        done = CliRunner().invoke(app, ["report", *arguments, "a" * 300])
        assert done.exit_code == 2
        assert "no folder can be there" in done.stderr


def test_a_report_says_on_the_terminal_that_traces_are_of_other_trials(
    tmp_path: Path, finished_run: FinishedRun
) -> None:
    shutil.copytree(finished_run.directory, tmp_path / "run")
    first, second, *_ = sorted((tmp_path / "run" / "traces").iterdir())
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    done = CliRunner().invoke(app, ["report", str(tmp_path / "run")])
    assert done.exit_code == 0, done.stderr
    assert "the traces of 2 of " in " ".join(done.stdout.split())


def test_a_dry_run_says_that_it_looks_at_no_device(finished_run: FinishedRun) -> None:
    done = CliRunner().invoke(app, ["run", str(finished_run.plan), "--dry-run"])
    assert done.exit_code == 0, done.stderr
    assert "not looked at: devices and meters; `joulebench doctor` tests them" in done.stdout
    assert re.search(r"about ([1-9]\d* s|[\d.]+ (minutes|hours|days)) \(decode tokens at most", done.stdout)
    assert "from a probe of this machine's CPU)" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("n_lost", "n_spare", "words"),
    [
        (0, 0, "`--resume` measures none of them again: give the plan another --out"),
        (2, 0, "They lost their device, a meter or a server: once it is back, `--resume` measures them again"),
        (
            1,
            0,
            "1 of them lost their device, a meter or a server: once it is back, `--resume` measures these again. The",
        ),
        (0, 2, "They lost their device, a meter or a server: `protocol.stop` has enough without them"),
        (1, 1, "again. 1 of them lost their device, a meter or a server: `protocol.stop` has enough without these"),
    ],
)
def test_it_is_told_which_failed_trials_a_resume_measures_again(
    n_lost: int, n_spare: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit):
        tell_outcome(RunOutcome(2, 2, n_lost=n_lost, n_spare=n_spare), 0.1)
    told = " ".join(capsys.readouterr().err.split())
    assert "2 of 4 trials failed" in told
    assert words in told


def test_a_dry_run_says_that_a_probe_of_this_machine_tells_no_phone_s_speed(tmp_path: Path) -> None:
    path = write_plan(tmp_path / "plan.toml", phones_plan(tmp_path, 1))
    done = CliRunner().invoke(app, ["run", str(path), "--dry-run"])
    assert done.exit_code == 0, done.stderr
    of = "a probe of this machine's CPU, which says nothing of adb:FAKE0001, adb:FAKE0002, adb:FAKE0003)"
    assert of in " ".join(done.stdout.split())
