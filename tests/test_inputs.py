"""Repeats of one cell come from the same inputs: what decides a number belongs to the run, and a change is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.inputs import _own_code, ranges
from harness.matrix import CellPlan
from harness.opening import open_run
from harness.plan import Plan, build_plan, draft_plan
from harness.preflight import preflight
from harness.run_parts import RunParts
from harness.runner import Runner, RunOutcome
from results.environments import Build, Environment
from results.records import Sample
from results.report.html import html_text
from results.runs import RunData
from results.sealed_rows import seal_all
from results.store import Store, StoreError
from results.trials import Trial
from tests.command import run_python
from tests.fakes.items import write_data_folder
from tests.fakes.machine import FakeBench, FakeWorkload
from tests.fakes.random_models import copy_bundled
from tests.plans import BOOLQ, FAST, raw_plan
from tests.test_runner import Heard

ABC_SHA256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
"""Of "abc", from FIPS 180-2."""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JOULEBENCH_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


def planned(**changes: Any) -> Plan:
    return build_plan(raw_plan(protocol=FAST | {"repeats": 2}, **changes))


def run(plan: Plan, folder: Path, resume: bool = False, bench: RunParts | None = None) -> RunOutcome:
    bench = bench or FakeBench()
    with open_run(plan, folder, resume, bench) as store:
        return Runner(plan, store, bench, Heard()).run()


def refused(plan: Plan, folder: Path, bench: RunParts | None = None) -> str:
    """The message of a resume that is not allowed; the trials stay."""
    with pytest.raises(StoreError) as caught:
        run(plan, folder, resume=True, bench=bench)
    with Store.view(folder) as store:
        assert len(store.trials()) == 2
    return str(caught.value)


# --- files -----------------------------------------------------------------------------------------------------------


def one_byte_changed(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_another_model_in_the_same_folder_is_refused(tmp_path: Path, name: str) -> None:
    model = copy_bundled(tmp_path / "model")
    plan = planned(model={"source": str(model)})
    run(plan, tmp_path / "run")
    if name == "model.safetensors":
        one_byte_changed(model / name)
    else:
        (model / name).write_text((model / name).read_text("utf-8") + "\n", encoding="utf-8")
    told = refused(plan, tmp_path / "run")
    assert re.search(
        rf"begun with other inputs \({name} of model {model} sha256 [0-9a-f]{{12}} -> sha256 [0-9a-f]{{12}}\)", told
    )


def test_a_model_put_back_is_gone_on_with(tmp_path: Path) -> None:
    model = copy_bundled(tmp_path / "model")
    plan = planned(model={"source": str(model)})
    run(plan, tmp_path / "run")
    for _ in range(2):
        one_byte_changed(model / "model.safetensors")
    assert run(plan, tmp_path / "run", resume=True) == RunOutcome(n_ok=2, n_failed=0)


def test_another_watts_sheet_or_recording_of_the_same_name_is_refused(tmp_path: Path) -> None:
    sheet, recording = tmp_path / "mine.toml", tmp_path / "trace.parquet"
    sheet.write_text("watts = 1", encoding="utf-8")
    recording.write_bytes(b"PAR1 a")
    host = {"name": "host", "watts_sheet": str(sheet), "recording": str(recording), "meters": ["modelled", "replay"]}
    plan = planned(device=[host])
    run(plan, tmp_path / "run")
    sheet.write_text("watts = 2", encoding="utf-8")
    recording.write_bytes(b"PAR1 b")
    told = refused(plan, tmp_path / "run")
    assert f"watts sheet {sheet} sha256" in told
    assert f"recording {recording} sha256" in told


def test_a_right_answer_that_was_changed_in_the_data_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The questions, and so the requests and their hash, stay as they were."""
    folder = write_data_folder(tmp_path / "data")
    monkeypatch.setenv("JOULEBENCH_DATA", str(folder))

    def begun(resume: bool) -> None:
        draft = draft_plan(raw_plan(workload=[BOOLQ]), folder)
        bench = RunParts(draft.plan.protocol)
        open_run(preflight(draft, bench), tmp_path / "run", resume, bench).close()
        bench.close()

    begun(resume=False)
    (path,) = (folder / "boolq").glob("validation.jsonl")
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    rows = [row | {"label": 1 - row["label"]} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with pytest.raises(StoreError, match=rf"begun with other inputs \(data file {path} sha256"):
        begun(resume=True)


def test_a_run_whose_plan_has_no_path_says_nothing_of_where_joulebench_lies(tmp_path: Path) -> None:
    """Its owner's name is in that path, and a run is given to others."""
    draft = draft_plan(raw_plan(workload=[BOOLQ]))
    bench = RunParts(draft.plan.protocol)
    open_run(preflight(draft, bench), tmp_path / "run", False, bench).close()
    bench.close()
    with Store.view(tmp_path / "run") as store:
        names = [one.name for one in store.data().info.inputs]
    assert "data file boolq_validation.jsonl of joulebench" in names
    assert not [name for name in names if "/" in name]


# --- files that change while a run goes on ---------------------------------------------------------------------------


def quantised_arms(model: Path, dtype: str = "float32") -> Plan:
    """Two arms, which load the model one after the other; each twice."""
    engines = [
        {"name": "a", "technique": {"name": "dropless"}},
        {"name": "int8 arm", "technique": {"name": "dropless"}, "quantise": {"experts": "int8"}},
    ]
    return planned(model={"source": str(model), "dtype": dtype}, engine=engines, workload=[BOOLQ | {"limit": 1}])


class After(Heard):
    """Does something once, when some trial has begun or is finished."""

    def __init__(self, event: str, act: Callable[[], object]) -> None:
        super().__init__()
        self.acts = {event: [act]}

    def _heard(self, event: str) -> None:
        for act in self.acts.pop(event, []):
            act()

    def trial_started(self, cell: str, repeat: int) -> None:
        super().trial_started(cell, repeat)
        self._heard(f"begun {repeat}")

    def trial_finished(self, cell: str, trial: Trial) -> None:
        super().trial_finished(cell, trial)
        self._heard(f"finished {trial.repeat}")


def replaced(path: Path) -> None:
    """As a download or a training does it: other weights under the same name, at once."""
    other = path.with_name("next")
    shutil.copyfile(path, other)
    one_byte_changed(other)
    other.replace(path)


def written_in_place(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "replaced": (replaced, "was replaced by another file"),
    "written in place": (written_in_place, "was written to"),
    "grown": (lambda path: path.open("ab").write(b"more"), r"was written to \(\d+ -> \d+ bytes\)"),
    "gone": (Path.unlink, "can no longer be read"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("event", "n_kept"), [("finished 0", 1), ("begun 1", 2)])
def test_weights_that_change_while_a_run_goes_on_end_it(tmp_path: Path, change: str, event: str, n_kept: int) -> None:
    """Between two trials, or in one, which is not kept; the trials before it stand."""
    act, told = CHANGES[change]
    model = copy_bundled(tmp_path / "model")
    weights = model / "model.safetensors"
    plan, bench = quantised_arms(model), FakeBench()
    with (
        pytest.raises(
            StoreError, match=rf"model\.safetensors of model .* {told}.* since the run .* go on with --resume"
        ),
        open_run(plan, tmp_path / "run", False, bench) as store,
    ):
        Runner(plan, store, bench, After(event, lambda: act(weights))).run()
    with Store.view(tmp_path / "run") as store:
        assert [t.status for t in store.trials()] == ["ok"] * n_kept


def test_a_mode_or_a_link_more_is_no_change(tmp_path: Path) -> None:
    """A backup that links files while a run goes on moves the inode's time alone."""
    model = copy_bundled(tmp_path / "model")
    weights = model / "model.safetensors"
    plan, bench = quantised_arms(model), FakeBench()

    def backed_up() -> None:
        (tmp_path / "backup").hardlink_to(weights)

    with open_run(plan, tmp_path / "run", False, bench) as store:
        assert Runner(plan, store, bench, After("finished 0", backed_up)).run().n_ok == 4


def test_a_write_whose_time_was_set_back_is_a_change(tmp_path: Path) -> None:
    model = copy_bundled(tmp_path / "model")
    weights = model / "model.safetensors"
    plan, bench = quantised_arms(model), FakeBench()

    def hidden() -> None:
        then = weights.stat()
        one_byte_changed(weights)
        os.utime(weights, ns=(then.st_atime_ns, then.st_mtime_ns))

    with (
        pytest.raises(StoreError, match="was written to since the run"),
        open_run(plan, tmp_path / "run", False, bench) as store,
    ):
        Runner(plan, store, bench, After("finished 0", hidden)).run()


@pytest.mark.parametrize("kind", ["watts sheet", "recording"])
def test_sheets_and_recordings_that_change_while_a_run_goes_on_end_it(tmp_path: Path, kind: str) -> None:
    files = {"watts sheet": tmp_path / "mine.toml", "recording": tmp_path / "trace.parquet"}
    for path in files.values():
        path.write_bytes(b"then")
    host = {"name": "host", "watts_sheet": str(files["watts sheet"]), "recording": str(files["recording"])}
    plan, bench = planned(device=[host | {"meters": ["modelled", "replay"]}]), FakeBench()
    with (
        pytest.raises(StoreError, match=rf"{kind} .* was written to"),
        open_run(plan, tmp_path / "run", False, bench) as store,
    ):
        Runner(plan, store, bench, After("finished 0", lambda: files[kind].write_bytes(b"now"))).run()


def test_data_that_changed_since_it_was_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read when the plan was checked, replaced before the run took its digests."""
    folder = write_data_folder(tmp_path / "data")
    monkeypatch.setenv("JOULEBENCH_DATA", str(folder))
    draft = draft_plan(raw_plan(workload=[BOOLQ]), folder)
    bench = RunParts(draft.plan.protocol)
    plan = preflight(draft, bench)
    (path,) = (folder / "boolq").glob("validation.jsonl")
    replaced(path)
    with pytest.raises(StoreError, match=rf"data file {path} was replaced by another file"):
        open_run(plan, tmp_path / "run", False, bench)
    bench.close()
    assert not (tmp_path / "run").exists()


# --- settings and software -------------------------------------------------------------------------------------------


def test_other_thread_settings_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.delenv("OMP_PROC_BIND", raising=False)
    run(planned(), tmp_path / "run")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OMP_PROC_BIND", "close")
    told = refused(planned(), tmp_path / "run")
    assert "OMP_NUM_THREADS 2 -> 1" in told
    assert "OMP_PROC_BIND absent -> close" in told


@pytest.mark.parametrize(
    "name",
    ["GLIBC_TUNABLES", "MALLOC_ARENA_MAX", "MALLOC_CONF", "TORCH_MKLDNN_MATMUL_MIN_DIM", "OPENBLAS_CORETYPE",
     "CUDA_LAUNCH_BLOCKING", "NVIDIA_TF32_OVERRIDE", "LD_PRELOAD", "ATEN_CPU_CAPABILITY"],
)  # fmt: skip
def test_another_allocator_or_library_setting_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv(name, raising=False)
    run(planned(), tmp_path / "run")
    monkeypatch.setenv(name, "7")
    assert f"{name} absent -> 7" in refused(planned(), tmp_path / "run")


def test_another_priority_is_refused(tmp_path: Path) -> None:
    """In a process of its own: a priority that was given up does not come back."""
    run(planned(), tmp_path / "run")
    code = "import os\nfrom pathlib import Path\nfrom tests.test_inputs import *\n"
    nicer = f"os.nice(3); print(refused(planned(), Path({str(tmp_path / 'run')!r})))"
    batch = f"os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0)); {nicer}"
    now = os.getpriority(os.PRIO_PROCESS, 0)
    for act, told in ((nicer, f"nice value {now} -> "), (batch, "scheduling policy SCHED_OTHER -> SCHED_BATCH")):
        done = run_python(code + act)
        assert told in done.stdout, done.stderr


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not bind processes to CPUs")
def test_fewer_cpus_are_refused(tmp_path: Path) -> None:
    cpus = os.sched_getaffinity(0)
    if len(cpus) < 2:
        pytest.skip("one CPU")
    run(planned(), tmp_path / "run")
    os.sched_setaffinity(0, {min(cpus)})
    try:
        assert f"CPUs that may be used {ranges(cpus)} -> " in refused(planned(), tmp_path / "run")
    finally:
        os.sched_setaffinity(0, cpus)


class Computing(FakeBench):
    """Computes by a given build."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.build = build

    def environment(self, plan: CellPlan) -> Environment:
        return super().environment(plan).model_copy(update={"build": self.build})


KERNELS = Build(road="kernels", instruction_set="AVX-512", compiler="g++ 12", sha256="a" * 64)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (Build(road="torch", reason="no compiler"), "road kernels -> torch"),
        (KERNELS.model_copy(update={"instruction_set": "AVX2"}), "instruction set AVX-512 -> AVX2"),
        (KERNELS.model_copy(update={"sha256": "b" * 64}), f"sha256 {'a' * 64} -> {'b' * 64}"),
    ],
)
def test_another_road_or_build_of_the_kernels_is_refused(tmp_path: Path, other: Build, expected: str) -> None:
    run(planned(), tmp_path / "run", bench=Computing(KERNELS))
    told = refused(planned(), tmp_path / "run", Computing(other))
    assert "was begun with other kernels" in told
    assert expected in told
    assert run(planned(), tmp_path / "run", True, Computing(KERNELS)).n_ok == 2


# --- right answers ---------------------------------------------------------------------------------------------------


class Telling(FakeWorkload):
    """Knows its samples in words."""

    def __init__(self, expected: str) -> None:
        super().__init__()
        self.expected_answer = expected

    def samples(self) -> Sequence[Sample]:
        return [Sample(sample_id=i, question="?", expected=self.expected_answer) for i in ("a", "b")]


def test_other_right_answers_to_the_same_questions_are_refused(tmp_path: Path) -> None:
    def bench(expected: str) -> FakeBench:
        made = FakeBench()
        made.fake_workload = Telling(expected)
        return made

    run(planned(), tmp_path / "run", bench=bench("yes"))
    told = refused(planned(), tmp_path / "run", bench("no"))
    assert "2 of 2 samples of boolq (a, b) have another text or right answer" in told
    assert run(planned(), tmp_path / "run", True, bench("yes")).n_ok == 2


# --- where it is kept ------------------------------------------------------------------------------------------------


def test_a_run_and_its_page_show_what_decided_the_numbers(tmp_path: Path) -> None:
    model = copy_bundled(tmp_path / "model")
    (model / "chat_template.jinja").write_text("abc", encoding="utf-8")
    run(planned(model={"source": str(model)}), tmp_path / "run")
    with Store.view(tmp_path / "run") as store:
        data = store.data()
    kept = {i.name: i.value for i in data.info.inputs}
    assert kept[f"chat_template.jinja of model {model}"] == f"sha256:{ABC_SHA256}"
    assert {f"{name} of model {model}" for name in ("config.json", "tokenizer.json", "model.safetensors")} <= {*kept}
    assert {"watts sheet generic", "joulebench's own code"} <= {*kept}
    page = html_text(data)
    assert f"sha256 {ABC_SHA256[:12]}" in page
    assert ABC_SHA256 in page


def test_a_run_of_before_inputs_were_kept_is_gone_on_with(tmp_path: Path) -> None:
    run(planned(), tmp_path / "run")
    with Store.open(tmp_path / "run") as store:
        info = store.info().model_copy(update={"inputs": ()})
        store._connection.execute("UPDATE run SET record = ?", (info.model_dump_json(),))
        seal_all(store._connection)
    assert run(planned(), tmp_path / "run", resume=True).n_ok == 2
    assert "What decided the numbers" not in html_text(RunData(info, (), (), lambda _: ()))


def test_cpus_are_told_one_by_one_as_linux_does() -> None:
    """The same number of other CPUs is another setting: cores of one machine may be unlike."""
    assert ranges({8, 0, 1, 2, 3}) == "0-3,8"
    assert ranges({5}) == "5"
    assert ranges({0, 2, 4}) == "0,2,4"


@pytest.mark.parametrize(
    ("path", "counts"),
    [("a.py", True), ("deep/er/b.py", True), ("deep/c.cpp", True), ("deep/c.h", True), ("deep/report/d.py", True),
     ("report/page.py", False), ("report/deep/page.py", False), ("a.toml", False), ("__pycache__/a.pyc", False)],
)  # fmt: skip
def test_code_that_computes_figures_is_an_input_and_a_page_is_none(
    path: str, counts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "results" / path
    file.parent.mkdir(parents=True)
    monkeypatch.setattr("harness.inputs.results", SimpleNamespace(__file__=str(tmp_path / "results" / "__init__.py")))
    digests = [_own_code()]
    for text in ("x = 1\n", "x = 2\n"):
        file.write_text(text)
        digests.append(_own_code())
    file.rename(file.with_stem("other"))
    digests.append(_own_code())
    assert len({*digests}) == (4 if counts else 1)
