"""Programs of other engines on a fake phone, end to end: a shell script stands for the engine, and draws power.

It says what it draws, and since when, in a file from which the fake battery's gauge follows: 8 W while it loads, 6 W in
prefill, 3 W in decode, 1 W idle. So every joule has a closed form, and a load that counted as prefill would show.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Timer

import pytest
from rich.console import Console

from devices.android import battery as battery_module
from devices.android.device import AndroidDevice
from devices.android.server import ServerAddress
from devices.base import DeviceError, TransientDeviceError
from devices.clock import MonotonicClock
from devices.gates import Gates
from engines.base import EngineError, unheard
from engines.external import gate
from engines.external.programs.engine import ProgramEngine
from engines.external.programs.executorch import ExecuTorch, ExecuTorchOptions
from engines.external.programs.llama_bench import LlamaBench, LlamaBenchOptions
from engines.external.programs.phone_target import ROOT, PhoneTarget
from engines.external.programs.program import PhaseSetting, ProgramCall, Settings
from engines.external.programs.target import HostTarget
from engines.model.checkpoints import BUNDLED_FOLDER
from engines.model.tokenizer import Tokenizer
from harness.opening import open_run
from harness.plan import PlanError, draft_plan
from harness.preflight import preflight
from harness.progress import PlainProgress
from harness.run_parts import RunParts
from harness.runner import Runner
from harness.schema import TrialProtocol
from harness.session import PreparedCell, run_trial
from results.records import Request
from results.store import Store
from tests.eventually import eventually, running
from tests.fakes.adb_server import FakeAdbServer
from tests.fakes.battery import DRAWS, FakeBattery
from tests.fakes.held_clock import HeldClock
from tests.fakes.machine import FakeWorkload, SpokenIds
from tests.fakes.phone import FakePhone
from tests.plans import FAST, raw_plan

LOAD_S, PREFILL_S, DECODE_S = 0.6, 1.6, 1.8
IDLE_W, LOAD_W, PREFILL_W, DECODE_W = 1.0, 8.0, 6.0, 3.0
CLOCK = MonotonicClock()
SETTINGS = Settings(PhaseSetting(2, frozenset({0})), PhaseSetting(1, frozenset({0})))
LLAMA_BENCH = f"""#!/bin/sh
while [ $# -gt 0 ]; do case $1 in -p) p=$2;; -n) n=$2;; -d) d=$2;; -t) t=$2;; esac; shift; done
watts() {{ [ -z "$PHONE" ] || echo "$(date +%s%6N) $1" >>"$PHONE/{DRAWS}"; }}
echo loading >&2
watts {LOAD_W}; sleep {LOAD_S}
if [ $p -gt 0 ]; then watts {PREFILL_W}; s={PREFILL_S}; else watts {DECODE_W}; s={DECODE_S}; fi
sleep $s; watts {IDLE_W}
echo '['
echo '{{"build_commit": "4dca015b", "backends": "CPU", "n_prompt": '$p', "n_gen": '$n', "n_depth": '${{d:-0}}','
echo '"n_threads": '$t', "samples_ns": ['${{s}}e9']}}'
echo ']'
"""
HUNG = f"600.{os.getpid()}"
"""Seconds; told apart from what tests beside this one let hang."""
HANGS = f"#!/bin/sh\nexec sleep {HUNG}\n"
REQUEST = Request(
    request_id="r",
    sample_id="s",
    kind="generate",
    prompt_ids=tuple(range(16)),
    max_new_tokens=4,
    ignore_end_tokens=True,
)


@pytest.fixture
def fake(tmp_path: Path, clock: HeldClock) -> FakePhone:
    """A pause of this machine would be a gap in its gauge's readings, or a phase of its programs that lasts longer."""
    phone = FakePhone(tmp_path / "phone")
    phone.file("/proc/cpuinfo", "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd05\n")
    phone.file("/proc/meminfo", "MemTotal:       8000000 kB\n")
    return phone


@pytest.fixture
def server(fake: FakePhone) -> Iterator[FakeAdbServer]:
    with FakeBattery(fake, IDLE_W, update_s=0.05), FakeAdbServer(fake) as running:
        yield running


@pytest.fixture
def device(server: FakeAdbServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AndroidDevice]:
    monkeypatch.setattr(battery_module, "CALIBRATION_S", 0.4)
    opened = device_at(server, tmp_path)
    opened.open()
    yield opened
    opened.close()


def device_at(server: FakeAdbServer, tmp_path: Path) -> AndroidDevice:
    address = ServerAddress("127.0.0.1", server.port)
    gates = Gates(wait_s=0.0)
    return AndroidDevice("adb:FAKE0001", 0.05, CLOCK, gates, address=address, state_folder=tmp_path / "state")


def engine_on(
    device: AndroidDevice, tmp_path: Path, script: str = LLAMA_BENCH, timeout_s: float = 30.0
) -> ProgramEngine:
    binary, model = tmp_path / "llama-bench", tmp_path / "it's a model.gguf"
    binary.write_text(script)
    model.write_bytes(b"GGUF")
    program = LlamaBench(LlamaBenchOptions(), SETTINGS, model.name)
    files = {"llama-bench": binary, model.name: model}
    target = PhoneTarget(device, CLOCK.now_s)
    return ProgramEngine(program, target, files, device.name, SpokenIds(), 512, CLOCK.now_s, timeout_s)  # type: ignore[arg-type]


def test_a_trial_has_the_joules_of_its_phases_and_none_of_loading(device: AndroidDevice, tmp_path: Path) -> None:
    engine = engine_on(device, tmp_path)
    engine.prepare()
    arm = PreparedCell("cell", engine, FakeWorkload(), device, CLOCK, [REQUEST])
    trial, _ = run_trial(arm, TrialProtocol(warmup=0, idle_s=0.0, sample_interval_s=0.02), repeat=0)
    [done] = trial.completions
    assert done.ttft_s == pytest.approx(PREFILL_S, abs=1e-3)
    # Three steps after the first of four tokens.
    assert done.tpot_s == pytest.approx(DECODE_S / 3, abs=1e-3)
    assert done.e2e_s == pytest.approx(PREFILL_S + DECODE_S, abs=2e-3)
    assert done.itl_s == ()
    joules = {e.phase: e.energy_j for e in trial.energy if e.component == "total"}
    assert joules["prefill"] == pytest.approx(PREFILL_W * PREFILL_S, rel=0.12)
    assert joules["decode"] == pytest.approx(DECODE_W * DECODE_S, rel=0.12)
    assert joules["all"] == pytest.approx(PREFILL_W * PREFILL_S + DECODE_W * DECODE_S, rel=0.12)
    assert trial.counters is None
    assert trial.peak_memory_bytes is None
    assert "a program computed" in str(trial.peak_memory_remark)
    notes = " ".join(trial.notes)
    assert "llama-bench 4dca015b (CPU): edges of phases are derived" in notes
    assert "time to the first token is derived" in notes
    engine.close()


def test_a_program_that_frees_its_model_for_long_does_not_shift_its_phases(
    device: AndroidDevice, tmp_path: Path
) -> None:
    """It says its result and goes on: counted from its end, half of each phase would be of idle time."""
    engine = engine_on(device, tmp_path, LLAMA_BENCH + f"sleep {PREFILL_S / 2}\n")
    engine.prepare()
    arm = PreparedCell("cell", engine, FakeWorkload(), device, CLOCK, [REQUEST])
    trial, _ = run_trial(arm, TrialProtocol(warmup=0, idle_s=0.0, sample_interval_s=0.02), repeat=0)
    [done] = trial.completions
    joules = {e.phase: e.energy_j for e in trial.energy if e.component == "total"}
    assert joules["prefill"] == pytest.approx(PREFILL_W * PREFILL_S, rel=0.12)
    assert joules["decode"] == pytest.approx(DECODE_W * DECODE_S, rel=0.12)
    assert done.edges_uncertainty_s > 0
    engine.close()


def test_files_are_pushed_once_and_again_where_one_is_damaged(
    device: AndroidDevice, fake: FakePhone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: list[str] = []
    push = device.phone.push
    monkeypatch.setattr(
        device.phone, "push", lambda local, remote, mode=0o755: pushed.append(remote) or push(local, remote, mode)
    )
    own = fake.file(f"{ROOT}/0123/of-others", "x")
    engine_on(device, tmp_path).prepare()
    assert [Path(remote).name for remote in pushed] == ["llama-bench", "it's a model.gguf", "joulebench.manifest"]
    engine_on(device, tmp_path).prepare()
    assert len(pushed) == 3
    fake.local(pushed[1]).write_bytes(b"cut short")
    engine_on(device, tmp_path).prepare()
    assert len(pushed) == 6
    engine_on(device, tmp_path, HANGS).prepare()
    assert Path(pushed[-1]).parent != Path(pushed[0]).parent
    assert own.read_text() == "x"


def test_cores_that_the_phone_does_not_give_are_the_arms_failure(device: AndroidDevice, tmp_path: Path) -> None:
    """And not the phone's, which would end a tuning session: other arms ask for other cores."""
    core, absent = min(os.sched_getaffinity(0)), (os.cpu_count() or 1) + 8
    (tmp_path / "model").write_text("")
    target = PhoneTarget(device, CLOCK.now_s)
    target.prepare({"model": tmp_path / "model"})
    with pytest.raises(EngineError, match=rf"cores {core},{absent} were asked for, and the program had {core} alone"):
        target.run(ProgramCall(("true",), frozenset({core, absent})), {}, 30.0)
    target.close()


@pytest.mark.parametrize("what", ["unplugged", "server killed", "too slow"])
def test_a_run_that_is_cut_off_is_worth_a_retry_and_leaves_nothing_running(
    device: AndroidDevice, server: FakeAdbServer, fake: FakePhone, tmp_path: Path, what: str
) -> None:
    engine = engine_on(device, tmp_path, HANGS, timeout_s=0.5 if what == "too slow" else 20.0)
    engine.prepare()
    before = set(running(f"sleep\x00{HUNG}"))
    if what != "too slow":
        Timer(0.6, fake.pull_cable if what == "unplugged" else server.stop).start()
    with pytest.raises(TransientDeviceError, match="llama-bench") as caught:
        engine.run(REQUEST, unheard)
    assert str(caught.value).count(fake.serial) == 1, "it is named once"
    assert caught.value.is_lost == (what != "too slow"), "a program that hangs does so again another day"
    assert eventually(lambda: set(running(f"sleep\x00{HUNG}")) <= before)
    if what == "server killed":
        server.start()
    fake.plug_in()
    engine.close()


def test_stamps_of_the_phones_wall_clock_are_placed_on_the_runs(
    device: AndroidDevice, fake: FakePhone, tmp_path: Path
) -> None:
    """ExecuTorch stamps its phases itself, and reads the prompt as text."""
    script = """#!/bin/sh
sleep 0.3; a=$(date +%s%3N); sleep 0.3; b=$(date +%s%3N); sleep 0.2; c=$(date +%s%3N); sleep 0.4
echo 'PyTorchObserver {"prompt_tokens":16,"generated_tokens":3,"inference_start_ms":'$a\\
',"first_token_ms":'$b',"inference_end_ms":'$c'}'
"""
    files = {}
    for name, text in (("llama_main", script), ("model.pte", "PTE"), ("tokenizer.json", "{}")):
        (tmp_path / name).write_text(text)
        files[name] = tmp_path / name
    one = PhaseSetting(1)
    program = ExecuTorch(ExecuTorchOptions(), Settings(one, one), "model.pte", "tokenizer.json")
    target = PhoneTarget(device, CLOCK.now_s)
    engine = ProgramEngine(program, target, files, device.name, SpokenIds(), 512, CLOCK.now_s)  # type: ignore[arg-type]
    engine.prepare()
    begun_s = CLOCK.now_s()
    done = engine.run(REQUEST, unheard)
    [prompt] = fake.root.rglob("prompt.txt")
    assert prompt.read_text() == " ".join(map(str, REQUEST.prompt_ids))
    assert done.ttft_s == pytest.approx(0.3, abs=0.1)
    # Bound from both sides: it slept 0.3 s before, and 0.4 s after its last stamp. Nothing follows from its end.
    assert begun_s + 0.3 < done.start_s < done.end_s < CLOCK.now_s() - 0.4
    assert any("the program's own stamps; the phone's wall clock" in remark for remark in engine.take_remarks())
    engine.close()
    assert not list(fake.root.rglob("prompt.txt"))


LLAMA_MAIN = """#!/bin/sh
cat prompt.txt
printf ' Paris.\\nPyTorchObserver {"prompt_tokens":5}\\n'
"""


def test_a_program_on_a_phone_is_asked_for_its_answers(device: AndroidDevice, tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("llama_main", "m.pte", "tokenizer.json")}
    for path in files.values():
        path.write_text(LLAMA_MAIN)
    alike = Settings(PhaseSetting(1, frozenset({0})), PhaseSetting(1, frozenset({0})))
    program = ExecuTorch(ExecuTorchOptions(), alike, "./m.pte", "./tokenizer.json")
    tokenizer = Tokenizer(BUNDLED_FOLDER / "tiny-qwen3-moe", "tiny", (), 2048)
    target = PhoneTarget(device, CLOCK.now_s)
    engine = ProgramEngine(program, target, files, device.name, tokenizer, 512, CLOCK.now_s, 30.0)
    assert gate.answers_of(engine, gate.requests_of(tokenizer.encode_prompt)) == [" Paris."] * 3
    engine.close()


def test_a_phone_that_another_process_has_is_refused_with_its_name(
    device: AndroidDevice, server: FakeAdbServer, tmp_path: Path
) -> None:
    [held] = (tmp_path / "state" / "locks").iterdir()
    known_as = f"adb:FAKE0001 127.0.0.1:{server.port}"
    assert held.read_text().startswith(f"process {os.getpid()} since 20")
    child = os.fork()
    if child == 0:
        # Another process: it has neither the descriptor nor the count of this one.
        from devices.device_lock import DeviceLock

        DeviceLock._held.clear()
        try:
            DeviceLock(tmp_path / "state", "adb:FAKE0001", known_as).take()
        except DeviceError as error:
            os._exit(7 if f"used by process {os.getppid()} since" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    # Within this process it may be opened again, and is held until the last lets go.
    other = device_at(server, tmp_path)
    other.open()
    other.close()
    assert held.read_text() != ""
    device.close()
    assert held.read_text() == ""


def test_the_same_program_on_this_host(tmp_path: Path) -> None:
    binary, model = tmp_path / "llama-bench", tmp_path / "model.gguf"
    binary.write_text(
        LLAMA_BENCH.replace(f"sleep {LOAD_S}", "sleep 0.05").replace("sleep $s", "sleep 0.2").replace("${s}e9", "2e8")
    )
    binary.chmod(0o755)
    model.write_bytes(b"GGUF")
    program = LlamaBench(LlamaBenchOptions(), SETTINGS, model.name)
    files = {"llama-bench": binary, model.name: model}
    engine = ProgramEngine(program, HostTarget(CLOCK.now_s), files, "host", SpokenIds(), 512, CLOCK.now_s)  # type: ignore[arg-type]
    done = engine.run(REQUEST, unheard)
    assert done.ttft_s == pytest.approx(0.2, abs=1e-3)
    assert done.e2e_s == pytest.approx(0.4, abs=2e-3)
    assert len(done.set_aside_s) == 3
    assert done.edges_uncertainty_s == 0
    assert "derived from the program's last words or its end" in " ".join(engine.take_remarks())
    # A program that says it computed for longer than it ran is not believed.
    binary.write_text(binary.read_text().replace("2e8", "9e9"))
    with pytest.raises(Exception, match=r"computed for 9 s, and it ran 0\.\d+ s"):
        engine.run(REQUEST, unheard)
    engine.close()


def test_how_well_edges_are_known_is_not_told_of_a_program_whose_last_words_did_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = LlamaBench.calls
    monkeypatch.setattr(
        LlamaBench, "calls", lambda self, lengths: [replace(c, last_words="none") for c in calls(self, lengths)]
    )
    binary, model = tmp_path / "llama-bench", tmp_path / "model.gguf"
    quick = LLAMA_BENCH.replace(f"sleep {LOAD_S}", "").replace("sleep $s", "sleep 0.1").replace("${s}e9", "1e8")
    binary.write_text(quick)
    binary.chmod(0o755)
    model.write_bytes(b"GGUF")
    program, files = LlamaBench(LlamaBenchOptions(), SETTINGS, model.name), {"llama-bench": binary, model.name: model}
    engine = ProgramEngine(program, HostTarget(CLOCK.now_s), files, "host", SpokenIds(), 512, CLOCK.now_s)  # type: ignore[arg-type]
    done = engine.run(REQUEST, unheard)
    engine.close()
    assert done.edges_uncertainty_s is None
    assert "derived from the program's end, which may be late" in " ".join(engine.take_remarks())


def test_a_plan_runs_programs_on_a_phone_and_tells_which_ran_out_of_memory(
    server: FakeAdbServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(battery_module, "CALIBRATION_S", 0.4)
    monkeypatch.setenv("ANDROID_ADB_SERVER_PORT", str(server.port))
    monkeypatch.setenv("JOULEBENCH_STATE", str(tmp_path / "state"))
    quick = (
        LLAMA_BENCH.replace(f"sleep {LOAD_S}", "sleep 0.05").replace("sleep $s", "sleep 0.2").replace("${s}e9", "2e8")
    )
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    arms = []
    for name, script in (("small", quick), ("large", "#!/bin/sh\necho Killed >&2\nexit 137\n")):
        binary = tmp_path / name / "llama-bench"
        binary.parent.mkdir()
        binary.write_text(script)
        own = {"name": name, "runs": "llama-bench", "program": str(binary), "cores": "0"}
        arms.append(own | {"model_file": str(tmp_path / "model.gguf")})
    lengths = {"name": "fixed_lengths", "prompt_tokens": 16, "new_tokens": 4, "limit": 1}
    raw = raw_plan(engine=arms, workload=[lengths], device=[{"name": "adb:FAKE0001"}], protocol=FAST)
    draft = draft_plan(raw)
    run_parts = RunParts(draft.plan.protocol)
    plan = preflight(draft, run_parts)
    with open_run(plan, tmp_path / "run", False, run_parts) as store:
        Runner(plan, store, run_parts, PlainProgress(Console(quiet=True))).run()
    run_parts.close()
    with Store.view(tmp_path / "run") as store:
        small, large = store.trials()
    cell = plan.cells[0].cell
    assert (small.status, cell.technique, cell.device) == ("ok", "llama-bench", "adb:FAKE0001")
    assert "sha256 " in str(cell.engine_parameters["program of llama-bench"])
    assert small.completions[0].ttft_s == pytest.approx(0.2, abs=1e-3)
    assert {e.method for e in small.energy} == {"battery gauge"}
    assert large.failure is not None
    assert large.failure.result == "out of memory"


@pytest.mark.parametrize(
    ("phone", "runs"), [("adb:FAKE0001", "llama-bench"), ("ios:00008140-0001100100000001", "mnn-app")]
)
def test_a_plan_whose_engines_do_not_go_onto_its_phone_says_which_would(phone: str, runs: str) -> None:
    draft = draft_plan(raw_plan(device=[{"name": phone}]))
    with pytest.raises(PlanError, match=rf"no engine of the plan goes onto it.*runs = \"{runs}\""):
        preflight(draft, RunParts(draft.plan.protocol))


def test_an_engine_of_phones_that_lacks_a_key_is_not_said_to_stay_at_home() -> None:
    draft = draft_plan(raw_plan(engine=[{"name": "m", "runs": "mllm"}], device=[{"name": "adb:FAKE0001"}]))
    with pytest.raises(PlanError) as caught:
        preflight(draft, RunParts(draft.plan.protocol))
    assert [line.split(":")[0] for line in caught.value.problems] == ["engine[0].config_file"]
