"""A run by a fleet, through the command line: the same trials as a run, and what is refused."""

from __future__ import annotations

import hashlib
import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.fleet.messages import Answer, Description, MessageError, PlanSent, Task, packed, sealed, unpacked
from harness.fleet.state import read_state
from harness.fleet.worker_side import OwnRun, RefusedError
from results.runs import Input
from results.store import Store
from tests.command import EXECUTABLE, environment, joulebench, names_of_modules
from tests.eventually import PATIENCE_S, eventually
from tests.free_ports import free_port
from tests.plans import DROPLESS, FAST, HOST, M2_ULTRA, Raw, raw_plan, two_device_plan, write_plan
from tests.run_builders import cell, power_trace, run_info, trial

pytestmark = pytest.mark.waits

DEVICES = ("--device", "host", "--device", "model:m2-ultra")


def free_address() -> str:
    return f"127.0.0.1:{free_port()}"


@contextmanager
def workers(address: str, log: Path, *devices: str, cwd: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(EXECUTABLE), "fleet", "join", address, *devices],
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(),
            cwd=cwd,
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(PATIENCE_S)


def small_plan() -> Raw:
    return two_device_plan() | {"device": [HOST, M2_ULTRA], "protocol": FAST | {"repeats": 2}}


def test_a_fleet_takes_no_plan_of_endurance(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan.toml", raw_plan(protocol=FAST | {"stop": {"minutes": 1}}))
    done = joulebench("fleet", "start", str(plan), "--out", str(tmp_path / "run"), "--listen", free_address())
    assert done.code == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: protocol.stop.minutes: rounds of endurance follow each other, and a fleet deals out")
    assert line.endswith("`joulebench run` takes this plan")
    assert not (tmp_path / "run").exists()


def test_a_fleet_gives_the_trials_of_a_run_and_goes_on_with_it(tmp_path: Path) -> None:
    plan, run, address = write_plan(tmp_path / "plan.toml", small_plan()), tmp_path / "run", free_address()
    folder = names_of_modules(tmp_path)
    with workers(address, tmp_path / "join", *DEVICES, cwd=folder) as joined:
        ended = joulebench("fleet", "start", str(plan), "--out", str(run), "--listen", address, cwd=folder)
        assert ended.code == 0, ended.stderr + ended.stdout
        assert joined.wait(PATIENCE_S) == 0, (tmp_path / "join").read_text()
    assert "open to this machine only. Dask carries Python pickles" in ended.stdout
    with Store.view(run) as store:
        data = store.data()
        kept = {t.trial_id: store.traces(t.trial_id) for t in data.trials if t.time_method == "measured"}
    assert not data.is_unfinished
    asked = {(c.cell_id, r) for c in data.cells for r in range(1 if c.device.startswith("model:") else 2)}
    assert sorted((t.cell_id, t.repeat) for t in data.trials) == sorted(asked)
    assert {t.status for t in data.trials} == {"ok"}
    assert all(kept.values()), "traces came along"
    assert {c.workload for c in data.cells} == {workload for workload, _ in data.samples}
    assert data.info.environments.keys() == {"host", "model:m2-ultra"}
    assert any(i.name == "OMP_NUM_THREADS, worker of host" for i in data.info.inputs)
    assert {p.name for p in run.iterdir()} >= {"report.html", "trials.csv", "fleet.json"}
    state = read_state(run)
    assert state is not None
    assert (state.is_over, state.n_done, {d.state for d in state.devices}) == (True, len(asked), {"finished"})
    told = joulebench("fleet", "status", str(run), "--json")
    assert json.loads(told.stdout)["n_done"] == len(asked)
    again = joulebench("fleet", "start", str(plan), "--out", str(run), "--listen", address, "--resume")
    assert again.code == 0, again.stderr
    assert f"resuming: {len(asked)} of {len(asked)} trials are there" in again.stdout
    alone = joulebench("run", str(plan), "--out", str(run), "--resume")
    assert alone.code == 2
    assert f"go on with `joulebench fleet start PLAN --out {run} --resume`" in alone.stderr
    with Store.view(run) as store:
        assert len(store.trials()) == len(asked)


def test_a_run_that_no_fleet_began_is_not_gone_on_with_by_one(tmp_path: Path) -> None:
    """Each worker was refused for inputs that are not those of the run, and the coordinator waited for them."""
    plan = write_plan(tmp_path / "plan.toml", small_plan())
    info = run_info(inputs=(Input(name="nice value", value="0"),))
    with Store.create(tmp_path / "run", info, [cell("c1")]) as store:
        store.note_unfinished(2)
        assert store.data().remarks[0].endswith("`joulebench run` with --resume measures the rest.")
    ended = joulebench(
        "fleet", "start", str(plan), "--out", str(tmp_path / "run"), "--listen", free_address(), "--resume"
    )
    assert ended.code == 2
    assert f"go on with `joulebench run PLAN --out {tmp_path / 'run'} --resume`" in ended.stderr


def test_a_fleets_run_that_was_broken_off_is_told_how_it_goes_on(tmp_path: Path) -> None:
    """It was told to go on with `joulebench run`, which refused it."""
    info = run_info(inputs=(Input(name="nice value, worker of adb:X", value="0"),))
    with Store.create(tmp_path / "run", info, [cell("c1")]) as store:
        store.note_unfinished(2)
        assert store.data().remarks[0].endswith("`joulebench fleet start` with --resume measures the rest.")


def test_a_device_that_does_not_come_is_named(tmp_path: Path) -> None:
    plan, address = write_plan(tmp_path / "plan.toml", small_plan()), free_address()
    with workers(address, tmp_path / "join", "--device", "host"):
        # It has started, so that it is there in time.
        assert eventually(lambda: "no coordinator" in (tmp_path / "join").read_text())
        given = ["fleet", "start", str(plan), "--out", str(tmp_path / "run"), "--listen", address, "--wait-s", "12"]
        ended = joulebench(*given)
    assert ended.code == 4
    told = ended.stderr.splitlines()[-1]
    assert told.startswith("error: after 12 s not there: ")
    assert told.endswith("model:m2-ultra (absent); --wait-s waits longer")
    assert "host (absent)" not in told, "it is there, and on a busy machine still looks at its device"
    assert not (tmp_path / "run").exists()


def test_more_devices_than_commands_are_shown_for_are_counted(tmp_path: Path) -> None:
    """Of four devices three commands stood there, and who typed these waited for an hour."""
    sheets = [{"name": f"model:{name}"} for name in ("m2-ultra", "rtx5080-ndp", "m2-ultra-table4")]
    plan = write_plan(tmp_path / "plan.toml", raw_plan(device=[HOST, *sheets], protocol=FAST))
    given = ["--out", str(tmp_path / "run"), "--listen", free_address(), "--wait-s", "0"]
    said = joulebench("fleet", "start", str(plan), *given).stdout.splitlines()
    commands = [i for i, line in enumerate(said) if "joulebench fleet join" in line]
    assert [len(commands), said[commands[-1] + 1]] == [3, "  and so for 1 more device"]


def test_who_is_waited_for_is_told_to_whoever_asks(tmp_path: Path) -> None:
    """Until every device had joined, the status was that the fleet had not told anything yet."""
    plan, address = write_plan(tmp_path / "plan.toml", small_plan()), free_address()
    given = [str(EXECUTABLE), "fleet", "start", str(plan), "--out", str(tmp_path / "run"), "--listen", address]
    started = subprocess.Popen(given, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment())
    try:
        assert eventually(lambda: joulebench("fleet", "status", address, "--json").code == 0)
        told = json.loads(joulebench("fleet", "status", address, "--json").stdout)
    finally:
        started.send_signal(signal.SIGINT)
        started.wait(PATIENCE_S)
    assert {d["device"]: d["state"] for d in told["devices"]} == {"host": "absent", "model:m2-ultra": "absent"}
    assert not (tmp_path / "run").exists()


def test_a_folder_or_an_address_that_is_taken_is_told_before_anybody_is_waited_for(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan.toml", small_plan())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = joulebench("fleet", "start", str(plan), "--out", str(tmp_path / "run"), "--listen", address)
    assert "waiting for" not in ended.stdout
    assert ended.code == 4
    assert f"cannot listen on tcp://{address} (Address already in use)" in ended.stderr
    assert ("--listen" in ended.stderr, "Traceback" in ended.stderr) == (True, False)
    lacking = joulebench("fleet", "start", str(plan), "--out", str(tmp_path / "no"), "--resume")
    assert (lacking.code, "holds no run" in lacking.stderr) == (2, True)


# --- messages ---------------------------------------------------------------------------------------------------------

PLAN = PlanSent(raw={"name": "x"}, plan_hash="ab", folder="/", data_root=None, max_cells=3)
TRACES = {"window": [power_trace(1.0, 5.0, "rapl")]}


def test_messages_come_back_with_their_traces() -> None:
    task = Task(kind="trial", joulebench="1", plan=PLAN, device="host", lease_id="a-1", cell_id="c", repeat=2)
    assert unpacked(Task, packed(task)) == (task, {})
    answer = Answer(lease_id="a-1", process_id="p", trial=trial())
    back, traces = unpacked(Answer, packed(answer, TRACES))
    assert back == answer
    [[own]] = traces.values()
    assert (own.meter, own.values.tolist()) == ("rapl", TRACES["window"][0].values.tolist())


def test_a_worker_whose_processor_leaves_an_arm_out_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    """It told to give it the same models and data, which it had."""
    rounding = DROPLESS | {"name": "by bf16", "quantise": {"experts": "bf16", "arithmetic": "bf16"}}
    sent = PLAN.model_copy(update={"raw": raw_plan(engine=[DROPLESS, rounding]), "max_cells": 10})
    monkeypatch.setattr("engines.kernels.compile.lacking", list)
    monkeypatch.setattr("engines.kernels.tables.why_not_bf16", lambda: "this processor lacks it")
    with pytest.raises(RefusedError) as refused:
        OwnRun(sent, "host")
    (told,) = refused.value.reasons
    assert "other cells here" in told
    assert "left out here: host: by bf16: this processor lacks AVX-512 BF16" in told
    assert told.endswith("an arm by bf16 needs AVX-512 BF16 on both")


def test_a_worker_does_not_speak_of_bf16_where_no_arm_multiplies_it() -> None:
    with pytest.raises(RefusedError) as refused:
        OwnRun(PLAN.model_copy(update={"raw": raw_plan(), "max_cells": 10}), "host")
    (told,) = refused.value.reasons
    assert told.endswith("give both the same models, data and profiles")


DESCRIPTION = Description(process_id="p", host="h").model_dump_json().encode()


def with_digest(whole: bytes) -> bytes:
    return hashlib.sha256(whole).digest() + whole


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("text", "a message is bytes, and this is str"),
        (b"short", "has more than 40"),
        (with_digest((99).to_bytes(8, "big") + b"{}"), "ends after 42 bytes, and says that it has 139"),
        (sealed(b"{}"), "process_id: Field required"),
        (sealed(b"not JSON!"), "Invalid JSON"),
        (sealed(DESCRIPTION, b"PAR1"), "the file of its traces is damaged"),
        (sealed(DESCRIPTION.replace(b'"host":', b'"evil":')), "host: Field required"),
    ],
)
def test_what_is_no_message_is_refused(content: object, words: str) -> None:
    with pytest.raises(MessageError, match=words):
        unpacked(Description, content)


@settings(max_examples=200)
@given(data=st.data())
def test_no_bit_of_a_message_can_be_changed_unseen(data: st.DataObject) -> None:
    """A digit of a figure that a proxy changed on its way was kept as measured."""
    content = bytearray(packed(Answer(lease_id="a-1", process_id="p", trial=trial()), TRACES))
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    with pytest.raises(MessageError):
        unpacked(Answer, bytes(content))


@settings(max_examples=50)
@given(data=st.data())
def test_no_message_is_cut_or_joined_unseen(data: st.DataObject) -> None:
    content = packed(Answer(lease_id="a-1", process_id="p", trial=trial()), TRACES)
    for damaged in (content[: data.draw(st.integers(0, len(content) - 1))], content + content):
        with pytest.raises(MessageError):
            unpacked(Answer, damaged)
