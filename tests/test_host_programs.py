"""Programs that we start on this host: their CPU time is ours, and they end with us, whatever ends us."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from devices.base import UnendedProgramError
from devices.cpu_seconds import own_cpu_seconds
from engines import IS_OURS
from engines.external.programs.program import ProgramCall
from engines.external.programs.target import HostTarget, ProgramRun
from harness.external.programs import LlamaBenchSpec
from harness.plan import PlanError, draft_plan
from harness.preflight import preflight
from harness.run_parts import RunParts
from results.core_lists import core_words
from tests.eventually import eventually, gone
from tests.plans import PHONE, raw_plan

BURNS = f"""#!/bin/sh
# As a wrapper around the program would: its child computes.
{sys.executable} -c 'import time
while time.process_time() < 0.6: pass'
exit 0
"""
STARTS_AND_WAITS = """
import sys, time
from pathlib import Path
from engines.external.programs.program import ProgramCall
from engines.external.programs.target import HostTarget
target = HostTarget(time.monotonic)
target.prepare({"program": Path(sys.argv[1])})
target.run(ProgramCall(("./program",)), {}, 60.0)
"""


def program(folder: Path, text: str) -> Path:
    path = folder / "program"
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_cpu_time_of_a_program_is_ours_while_it_runs_and_once_it_has_ended(tmp_path: Path) -> None:
    """By the system's own account of children that have ended: modelled joules follow from it."""
    target = HostTarget(time.monotonic)
    target.prepare({"program": program(tmp_path, BURNS)})
    over = threading.Event()

    def others_s() -> tuple[float, float]:
        """At least and at most, without our own process, whose time moves on meanwhile."""
        before_s, found_s = time.process_time(), own_cpu_seconds()
        return found_s - time.process_time(), found_s - before_s

    begin_s, _ = others_s()
    seen_s = [(0.0, 0.0)]

    def watch() -> None:
        while not over.wait(0.02):
            low_s, high_s = others_s()
            seen_s.append((low_s - begin_s, high_s - begin_s))

    watcher = threading.Thread(target=watch)
    watcher.start()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    target.run(ProgramCall(("./program",)), {}, 60.0)
    over.set()
    watcher.join()
    used, found_s = resource.getrusage(resource.RUSAGE_CHILDREN), others_s()[1] - begin_s
    target.close()
    children_s = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    assert found_s == pytest.approx(children_s, abs=0.05)
    assert found_s >= 0.6
    assert all(at_most_s >= before_s for (before_s, _), (_, at_most_s) in itertools.pairwise(seen_s))
    assert any(0.1 < low_s <= high_s < 0.6 for low_s, high_s in seen_s)


def test_a_program_does_not_get_our_setting_of_torchs_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "0")

    def told() -> str:
        target = HostTarget(time.monotonic)
        target.prepare({"program": program(tmp_path, '#!/bin/sh\necho "${GOMP_SPINCOUNT-unset}"\n')})
        try:
            return target.run(ProgramCall(("./program",)), {}, 60.0).output.stdout.strip()
        finally:
            target.close()

    monkeypatch.delenv(IS_OURS, raising=False)
    assert told() == "0"
    monkeypatch.setenv(IS_OURS, "1")
    assert told() == "unset"


def test_a_program_ends_when_we_are_killed(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    waits = program(tmp_path, f"#!/bin/sh\nsleep 600 &\necho $$ $! >{told}.new; mv {told}.new {told}; wait\n")
    ours = subprocess.Popen([sys.executable, "-c", STARTS_AND_WAITS, str(waits)])
    try:
        assert eventually(told.is_file)
        groups = {int(pid): os.getpgid(int(pid)) for pid in told.read_text().split()}
    finally:
        ours.send_signal(signal.SIGKILL)
        ours.wait()
    assert len(set(groups.values())) == 1
    assert gone(groups)


def ran(folder: Path, text: str, last_words: str | None = None, timeout_s: float = 60.0) -> ProgramRun:
    target = HostTarget(time.monotonic)
    target.prepare({"program": program(folder, text)})
    try:
        return target.run(ProgramCall(("./program",), last_words=last_words), {}, timeout_s)
    finally:
        target.close()


def test_a_program_that_goes_on_after_its_last_words_was_done_with_them(tmp_path: Path) -> None:
    """It frees its model: counted from its end, its phases held that."""
    frees = "#!/bin/sh\necho done\nsleep 0.2\necho done $(date +%s.%N) >&2\nsleep 1\n"
    ahead_s = time.time() - time.monotonic()
    run = ran(tmp_path, frees, "done")
    assert run.done is not None
    assert run.done.at_s + ahead_s >= float(run.output.stderr.split()[1]) - 0.01  # the last time they came
    assert run.ended_s - run.done.at_s > 0.25
    for words in ("never said", None):
        assert ran(tmp_path, frees, words).done is None


@pytest.mark.parametrize(("rate", "off_s"), [(0.02, 5e-3), (-0.02, 5e-3), (0.05, None)])
def test_stamps_by_a_clock_that_is_put_right_little_by_little_are_placed_where_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate: float, off_s: float | None
) -> None:
    """Up to 30 ms: a phase of 0.2 s was as much too long, with an uncertainty of 0."""
    t0_s = time.monotonic()
    wall_of = lambda at_s: at_s + 1e9 + rate * (at_s - t0_s)  # noqa: E731
    monkeypatch.setattr(time, "time", lambda: wall_of(time.monotonic()))
    run = ran(tmp_path, "#!/bin/sh\nsleep 1\n")
    for share in (0.5, 1.0):
        at_s = run.begun_s + share * (run.ended_s - run.begun_s)
        assert run.of_wall_s(wall_of(at_s)) == (None if off_s is None else pytest.approx(at_s, abs=off_s))
    gained_s = abs(rate) * (run.ended_s - run.begun_s)
    assert run.stamp_uncertainty_s == pytest.approx(gained_s / 12**0.5, abs=3e-3)


def test_all_that_a_program_writes_is_taken_whichever_pipe_is_full(tmp_path: Path) -> None:
    n = 1 << 20
    text = f"#!/bin/sh\nhead -c {n} /dev/zero | tr '\\0' e >&2\nhead -c {n} /dev/zero | tr '\\0' o\n"
    run = ran(tmp_path, text + "printf '10 %%\\r100 %%\\r\\nend'\nexit 3\n")
    assert run.output.stdout == "o" * n + "10 %\n100 %\nend"
    assert run.output.stderr == "e" * n
    assert run.output.exit_code == 3


@pytest.mark.parametrize("last", ["sleep 600", "exec >&- 2>&-; sleep 600", "while :; do echo on; done"])
def test_a_program_that_does_not_end_in_time_is_killed_whatever_it_writes(tmp_path: Path, last: str) -> None:
    begin_s = time.monotonic()
    with pytest.raises(UnendedProgramError, match=r"has not ended after 0\.3 s; it was killed"):
        ran(tmp_path, f"#!/bin/sh\n{last}\n", timeout_s=0.3)
    assert time.monotonic() - begin_s < 30


def test_libraries_beside_a_program_belong_to_its_build(tmp_path: Path) -> None:
    """It loads them without being told of them."""
    binary = program(tmp_path, "#!/bin/sh\n")
    (tmp_path / "libggml.so.0").write_bytes(b"1")
    given = {"name": "x", "runs": "llama-bench", "program": str(binary), "model_file": "m.gguf", "threads": 1}
    assert LlamaBenchSpec.model_validate(given).find().files["library libggml.so.0"].read_bytes() == b"1"


def checked(**raw: Any) -> list[str]:
    """What a plan's check refuses."""
    draft = draft_plan(raw_plan(**raw))
    try:
        preflight(draft, RunParts(draft.plan.protocol))
    except PlanError as error:
        return list(error.problems)
    return []


def test_cores_that_this_host_lacks_are_one_problem_of_another_engines_arm(tmp_path: Path) -> None:
    """taskset takes any mask that has one core of this machine. On a phone they are the phone's."""
    binary, model = program(tmp_path, "#!/bin/sh\n"), tmp_path / "m.gguf"
    model.write_bytes(b"GGUF")
    n, usable = os.cpu_count() or 1, core_words(os.sched_getaffinity(0))
    cores = f"0-{n}"
    arm = {"name": "x", "runs": "llama-bench", "program": str(binary), "model_file": str(model), "cores": cores}
    lengths = {"name": "fixed_lengths", "prompt_tokens": 16, "new_tokens": 4, "limit": 1}
    told = f'engine x: cores "{cores}": this machine has no core {n}; this process may use {usable}'
    assert checked(engine=[arm], workload=[lengths]) == [told]
    apart = {"prefill": "0", "decode": str(n)}
    (told,) = checked(engine=[arm | {"cores": apart}], workload=[lengths])
    assert told.startswith(f'engine x: cores "{n}" for decode: this machine has no core {n}; ')
    assert checked(engine=[arm], workload=[lengths], device=[PHONE]) == []
