"""Operations of a modelled window are kept raw: another sheet prices them without a new run."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.base import DeviceError
from devices.models.device import ModelDevice
from devices.models.operation import Operation
from devices.models.operations import operations_of, operations_trace
from devices.models.repricing import ARRIVE, Parts, repriced
from devices.models.sheet import Sheet, available_sheets, parse_sheet, sheet_path
from harness.rederive import as_it_ran, rederived_run
from results.derivation import energies_of
from results.operations import operations_table, spent_by_operation
from results.ran_operations import OPERATIONS, ORDER
from results.records import Completion
from results.report.arms import arms_of
from results.report.html import html_text, page_context
from results.report.operation_tables import operation_tables
from results.run_frames import RunFrames
from results.store import Store
from results.trace_files import TraceFileError, read_parts, write_traces
from results.trial_tables import trials
from results.trials import Trial
from tests.command import joulebench
from tests.conftest import FinishedRun
from tests.run_builders import ENVIRONMENT, cell, completion, run, trial
from tests.toy_sheet import TOY_TOML, figure, toy_sheet

CPU_WORK = Operation("expert FFN", "cpu", "expert_ffn", flops=1000)  # 2 s: 16 J on cpu, 2 J on comm
NPU_WORK = Operation("expert FFN", "npu", "expert_ffn", flops=1000, weight_bytes=200)  # 0.8 s: 1.4 J, 0.8 J
NORM = Operation("norm", "cpu", "norm", moved_bytes=100)  # 0.1 s
OTHER = parse_sheet(
    f"idle_w = {figure(3.0)}"
    + TOY_TOML.replace(figure(8.0), figure(16.0)).replace(
        f"expert_ffn = {{ s_per_flop = {figure(2e-3)}", f"expert_ffn = {{ s_per_flop = {figure(4e-3)}"
    ),
    "toy",
)
"""Twice the watts of the CPU, half its speed at experts, and idle watts: its 1000 FLOP take 4 s, 64 J and 4 J."""


LINK = f"""
[links.bus]
source = "cpu"
target = "npu"
kind = "shared"
bytes_per_s = {figure(20.0)}
pj_per_bit = {figure(1e9)}
"""


class Modelled(NamedTuple):
    trial: Trial
    parts: Parts


def run_on(sheet: Sheet, steps: Sequence[Sequence[Operation]], idle_s: float = 0.0) -> Modelled:
    """A request whose prompt is the first step, and whose tokens are the ends of all; idle time before it."""
    device = ModelDevice(sheet, lambda: ENVIRONMENT)
    (meter,) = device.meters
    clock = device.timeline
    clock.run([CPU_WORK])
    meter.start()
    clock.sleep_until_s(clock.now_s() + idle_s)
    parts: dict[str, Sequence] = {"idle before": meter.stop()} if idle_s else {}
    meter.start()
    start_s, ends_s = clock.now_s(), []
    for step in steps:
        clock.run(step)
        ends_s.append(clock.now_s())
    parts |= {"window": meter.stop(), "window, raw": meter.raw_traces()}
    done = completion("s", start_s, token_times_s=ends_s)
    found = energies_of([done], parts, (start_s, clock.now_s()))
    one = trial(completions=[done], energy=found.readings, idle=found.idle, time_method="modelled")
    return Modelled(one, parts)


def stamps_s(one: Trial) -> list[float]:
    """Since the window's start, which lies elsewhere on another timeline."""
    (done,) = one.completions
    all_s = [done.start_s, done.prefill_end_s, *done.token_times_s, done.end_s, one.window_end_s or 0.0]
    return [at_s - (one.window_start_s or 0.0) for at_s in all_s]


def joules(found: Modelled) -> dict[tuple[str, str], float | None]:
    one = found.trial
    assert one.window_start_s is not None
    assert one.window_end_s is not None
    readings = energies_of(one.completions, found.parts, (one.window_start_s, one.window_end_s)).readings
    return {(r.phase, r.component): r.energy_j for r in readings}


def test_operations_at_another_sheets_prices_take_its_time_and_joules() -> None:
    made = run_on(toy_sheet(), [[CPU_WORK, NPU_WORK], [NORM, CPU_WORK]])
    assert stamps_s(made.trial)[1:] == pytest.approx([2.8, 2.8, 4.9, 4.9, 4.9])
    now = Modelled(*repriced(made.trial, made.parts, OTHER))
    assert stamps_s(now.trial)[1:] == pytest.approx([4.8, 4.8, 8.9, 8.9, 8.9])
    assert joules(now)["prefill", "total"] == pytest.approx(64 + 4 + 1.4 + 0.8)
    assert joules(now)["all", "cpu"] == pytest.approx(64 + 1.6 + 64)
    assert joules(now)["all", "comm"] == pytest.approx(8.9)


LINKED = parse_sheet(TOY_TOML + LINK, "toy")
LINKED_OTHER = parse_sheet(TOY_TOML.replace(figure(8.0), figure(16.0)) + LINK.replace(figure(20.0), figure(8.0)), "toy")
"""A slower link, and twice the watts of the CPU."""
FETCH = Operation("expert transfer", "bus", "transfer", moved_bytes=40, aside=True)  # 2 s
AWAITS = replace(NPU_WORK, after=(1, 3))
ALONGSIDE = tuple(replace(work, alongside=True) for work in (CPU_WORK, NPU_WORK))
steps_of_a_request = st.lists(
    # A forward step begins with a norm, which waits for all units.
    st.lists(st.sampled_from((CPU_WORK, NPU_WORK, NORM, *ALONGSIDE)), max_size=5).map(lambda step: [NORM, *step]),
    min_size=2,
    max_size=5,
)


steps_that_fetch = st.lists(
    st.lists(st.sampled_from((CPU_WORK, NPU_WORK, *ALONGSIDE, FETCH, FETCH, AWAITS)), max_size=6).map(
        lambda step: [NORM, *step, NORM]
    ),
    min_size=2,
    max_size=4,
)


@given(steps_that_fetch)
def test_what_travels_meanwhile_is_repriced_as_a_run_on_the_other_sheet_says(steps: list[list[Operation]]) -> None:
    """Operations are kept by their starts, and run again in the order in which they were asked."""
    made, wanted = (run_on(sheet, steps) for sheet in (LINKED, LINKED_OTHER))
    now = Modelled(*repriced(made.trial, made.parts, LINKED_OTHER))
    assert stamps_s(now.trial) == pytest.approx(stamps_s(wanted.trial), rel=1e-12)
    assert joules(now) == pytest.approx(joules(wanted), rel=1e-9)
    again = Modelled(*repriced(made.trial, made.parts, LINKED))
    assert again.trial == made.trial
    for one, other in zip(again.parts["window, raw"], made.parts["window, raw"], strict=True):
        assert one.component == other.component
        assert one.component == OPERATIONS or one.values == pytest.approx(other.values, abs=1e-9)


def test_what_waited_for_a_transfer_and_when_it_ran_is_told() -> None:
    """A norm to 0.1 s; 40 B to 2.1 s; the NPU, which needs them, from there to 2.9 s: it waited 2 s."""
    made = run_on(LINKED, [[NORM], [FETCH, replace(NPU_WORK, after=(1,))]])
    found = {one.operation: (one.first_start_s, one.last_end_s, one.waited_s) for one in spent_by_operation(made.parts)}
    assert found["norm"] == pytest.approx((0, 0.1, 0))
    assert found["expert transfer"] == pytest.approx((0.1, 2.1, 0))
    assert found["expert FFN"] == pytest.approx((2.1, 2.9, 2.0))


def test_a_damaged_order_of_operations_is_refused() -> None:
    made = run_on(LINKED, [[NORM, FETCH], [NORM, AWAITS]])
    order = next(trace for trace in made.parts["window, raw"] if trace.component == ORDER)
    others = [trace for trace in made.parts["window, raw"] if trace is not order]
    damaged = replace(order, values=np.zeros_like(order.values))
    with pytest.raises(TraceFileError, match="the order of 4 operations cannot be read"):
        repriced(made.trial, {**made.parts, "window, raw": [*others, damaged]}, LINKED)


@given(steps_of_a_request)
def test_repriced_is_what_a_run_on_the_other_sheet_says(steps: list[list[Operation]]) -> None:
    made, wanted = (run_on(sheet, steps, idle_s=5.0) for sheet in (toy_sheet(), OTHER))
    now = Modelled(*repriced(made.trial, made.parts, OTHER))
    assert stamps_s(now.trial) == pytest.approx(stamps_s(wanted.trial), rel=1e-12)
    assert joules(now) == pytest.approx(joules(wanted), rel=1e-9)
    again = Modelled(*repriced(made.trial, made.parts, toy_sheet()))
    assert again.trial == made.trial, "at the same prices nothing moves"
    idle_w = np.diff(now.parts["idle before"][0].values[[0, -1]]) / 5.0
    assert idle_w == pytest.approx([3.0])


def test_the_time_of_each_operation_follows_from_what_is_kept(tmp_path: Path) -> None:
    """Two on each unit and a norm, after a trip through a file."""
    made = run_on(toy_sheet(), [[CPU_WORK, NPU_WORK], [NORM, CPU_WORK, NPU_WORK]])
    write_traces(tmp_path / "t.parquet", made.parts)
    ran = operations_of(read_parts(tmp_path / "t.parquet"))
    assert ran is not None
    assert [ran.distinct[place] for place in ran.places] == [CPU_WORK, NPU_WORK, NORM, CPU_WORK, NPU_WORK]
    found = spent_by_operation(read_parts(tmp_path / "t.parquet"))
    assert [one[:3] for one in found] == [("expert FFN", "cpu", 2), ("expert FFN", "npu", 2), ("norm", "cpu", 1)]
    assert [one.seconds for one in found] == pytest.approx([4.0, 1.6, 0.1])
    assert [one.joules for one in found[:2]] == pytest.approx([2 * (16 + 2), 2 * (1.4 + 0.8)])


def test_operations_alongside_have_their_own_seconds_and_share_communication() -> None:
    """CPU 2 s and 16 J beside NPU 0.8 s and 1.4 J: of the memory's watt, each has half for 0.8 s, the CPU the rest."""
    cpu, npu = ALONGSIDE
    made = run_on(toy_sheet(), [[NORM, npu, cpu, NORM]])
    found = {(one.operation, one.unit): one for one in spent_by_operation(made.parts)}
    assert found["expert FFN", "cpu"].seconds == pytest.approx(2.0)
    assert found["expert FFN", "npu"].seconds == pytest.approx(0.8)
    assert found["expert FFN", "npu"].joules == pytest.approx(1.4 + 0.4)
    assert found["expert FFN", "cpu"].joules == pytest.approx(16 + 0.4 + 1.2)
    whole_j = joules(made)["all", "total"]
    assert sum(one.joules for one in found.values()) == pytest.approx(whole_j)
    assert stamps_s(made.trial)[-1] == pytest.approx(0.1 + 2.0 + 0.1)


def test_short_operations_at_the_edges_of_phases_are_counted_whole() -> None:
    """A norm of 0.1 ms at 8 W before NPU work of 0.8 s at 1 W: 0.8 mJ + 0.1 mJ, and 1.4 J + 0.8 J, in each phase."""
    norm = replace(NORM, moved_bytes=NORM.moved_bytes / 1000)
    made = run_on(toy_sheet(), [[norm, NPU_WORK], [norm, NPU_WORK]], idle_s=5.0)
    found = joules(made)
    assert found["all", "cpu"] == pytest.approx(2 * 0.8e-3, rel=1e-9)
    for phase, n_steps in ("prefill", 1), ("decode", 1), ("all", 2):
        assert found[phase, "total"] == pytest.approx(n_steps * (0.9e-3 + 2.2), rel=1e-12), phase
    assert sum(one.joules for one in spent_by_operation(made.parts)) == pytest.approx(found["all", "total"], rel=1e-12)


def test_a_store_of_before_has_seconds_from_boundaries_and_a_damaged_one_is_refused() -> None:
    made = run_on(toy_sheet(), [[CPU_WORK, NPU_WORK], [NORM]])
    (raw,) = made.parts["window, raw"]

    def listed(change: dict[str, object]) -> Parts:
        basis = [
            {key: value for key, value in {**one, **change}.items() if value is not None}
            for one in json.loads(raw.basis or "")
        ]
        return {**made.parts, "window, raw": (replace(raw, basis=json.dumps(basis)),)}

    before = spent_by_operation(listed({"seconds": None}))
    assert before == [pytest.approx(one) for one in spent_by_operation(made.parts)]
    assert [one.seconds for one in before] == pytest.approx([2.0, 0.8, 0.1])
    for wrong in (-1.0, "long"):
        with pytest.raises(TraceFileError):
            spent_by_operation(listed({"seconds": wrong}))


def test_waiting_is_no_part_of_an_operation() -> None:
    device = ModelDevice(toy_sheet(), lambda: ENVIRONMENT)
    (meter,) = device.meters
    meter.start()
    device.timeline.run([CPU_WORK])
    device.timeline.sleep_until_s(device.timeline.now_s() + 7.0)
    device.timeline.run([NPU_WORK])
    found = spent_by_operation({"window": meter.stop(), "window, raw": meter.raw_traces()})
    assert [(one.unit, one.seconds) for one in found] == [("cpu", pytest.approx(2.0)), ("npu", pytest.approx(0.8))]


def test_operations_of_a_run_are_a_table_in_file_and_page() -> None:
    made = run_on(toy_sheet(), [[CPU_WORK, NPU_WORK], [NORM, CPU_WORK, NPU_WORK]])
    data = replace(run([cell("c1")], [made.trial]), load_parts=lambda _: made.parts)
    frame = operations_table(data).set_index(["operation", "runs_on"])
    assert frame.loc[("expert FFN", "cpu"), "share_of_time"] == pytest.approx(4.0 / 5.7)
    (table,) = page_context(data)["operation_tables"]
    assert table.rows[1] == ("expert FFN on npu", (("1.60 s (28.1 %)", "4.40 J", ""),))
    assert "expert FFN on npu" in html_text(data)
    measured = replace(data, trials=(made.trial.model_copy(update={"time_method": "measured"}),))
    assert operations_table(measured).empty
    (kept,) = made.parts["window, raw"]
    damaged = replace(data, load_parts=lambda _: {**made.parts, "window, raw": (replace(kept, basis="[]"),)})
    assert operations_table(damaged).empty
    assert "none of the 0" in damaged.lost_traces[made.trial.trial_id]


def test_shares_of_time_are_of_the_window_where_units_work_at_the_same_time() -> None:
    """The CPU works for 2 s, and the NPU beside it for the first 0.8 s of them."""
    made = run_on(toy_sheet(), [[replace(CPU_WORK, alongside=True), replace(NPU_WORK, alongside=True)]])
    data = replace(run([cell("c1")], [made.trial]), load_parts=lambda _: made.parts)
    shares = operations_table(data).set_index("runs_on")["share_of_time"]
    assert shares.to_dict() == pytest.approx({"cpu": 1.0, "npu": 0.4})


def test_operations_stand_in_the_order_of_a_layer_whichever_arm_has_them() -> None:
    """The NPU's arm begins the table; what only the CPU's arm has stands where it ran, and not at the end."""
    on_npu = ("norm on cpu", "attention on npu", "router on cpu", "expert FFN on npu", "residual on cpu")
    on_cpu = ("norm on cpu", "attention on cpu", "router on cpu", "expert FFN on cpu", "residual on cpu")
    spent = [
        (arm, *name.split(" on "), 10.0**-k)
        for arm, own in (("a", on_npu), ("b", on_cpu))
        for k, name in enumerate(own)
    ]
    frame = pd.DataFrame(spent, columns=["cell", "operation", "runs_on", "share_of_time"])
    frame = frame.assign(device="model:m", workload="w", seconds=1500.0, joules=1.0, seconds_outside_fit=0.0)
    (table,) = operation_tables(frame, arms_of([cell("a"), cell("b")]))
    assert [name for name, _ in table.rows] == [
        "norm on cpu", "attention on npu", "attention on cpu", "router on cpu", "expert FFN on npu",
        "expert FFN on cpu", "residual on cpu",
    ]  # fmt: skip
    first = [of_arms[0][0] for _, of_arms in table.rows]
    assert first == [
        "1500 s (100.0 %)", "1500 s (10.0 %)", "", "1500 s (1.0 %)", "1500 s (0.1 %)", "", "1500 s (< 0.1 %)",
    ]  # fmt: skip


def test_what_cannot_be_priced_again_is_refused() -> None:
    made = run_on(toy_sheet(), [[CPU_WORK], [NPU_WORK]])
    only_cpu = toy_sheet().model_copy(update={"units": {"cpu": toy_sheet().units["cpu"]}})
    with pytest.raises(DeviceError, match="has no unit 'npu'"):
        repriced(made.trial, made.parts, only_cpu)
    (done,) = made.trial.completions
    arrived = made.trial.model_copy(update={"completions": (Completion(**vars(done) | {"arrival_s": 0.0}),)})
    with pytest.raises(TraceFileError, match=ARRIVE):
        repriced(arrived, made.parts, OTHER)
    (kept,) = made.parts["window, raw"]
    for damaged, why in (
        (replace(kept, basis="[{}]"), "cannot be read"),
        (replace(kept, basis="[]"), "none of the 0"),
        (replace(kept, basis="[" * 99_999), "cannot be read"),
    ):
        with pytest.raises(TraceFileError, match=why):
            repriced(made.trial, {**made.parts, "window, raw": [damaged]}, OTHER)


def test_a_window_without_operations_keeps_none_and_stays_as_it_was() -> None:
    assert operations_trace("timeline", toy_sheet(), np.array([]), np.array([], dtype=np.int32), []) == ()
    made = run_on(toy_sheet(), [[CPU_WORK], [NPU_WORK]])
    older = {"window": made.parts["window"]}
    assert repriced(made.trial, older, OTHER) == (made.trial, older)


def test_a_run_keeps_the_operations_of_its_modelled_trials_and_derives_the_same_from_them(
    finished_run: FinishedRun, tmp_path: Path
) -> None:
    with Store.view(finished_run.directory) as store:
        data = store.data()
        modelled = [t for t in data.trials if t.time_method == "modelled"]
        assert modelled
        for one in modelled:
            ran = operations_of(data.load_parts(one.trial_id))
            assert ran is not None
            assert {"attention", "expert FFN", "LM head"} <= {operation.name for operation in ran.distinct}
            assert len(ran.distinct) < len(ran.places) / 2
            lasted_s = (one.window_end_s or 0.0) - (one.window_start_s or 0.0)
            spent = spent_by_operation(data.load_parts(one.trial_id))
            assert sum(o.seconds for o in spent) == pytest.approx(lasted_s)
            counted_j = sum(t.values[-1] - t.values[0] for t in data.load_parts(one.trial_id)["window"])
            assert sum(o.joules for o in spent) == pytest.approx(counted_j)
            assert OPERATIONS not in {t.component for t in data.load_traces(one.trial_id)}
    done = joulebench("report", str(finished_run.directory), "--rederive", "--out", str(tmp_path))
    assert done.code == 0, done.stderr
    assert f"{len(data.trials)} trials derived again from their raw records: nothing changed" in done.stdout
    assert set(operations_table(data)["method"]) == {"modelled"}
    asked = pd.read_csv(finished_run.directory / "requests.csv")
    assert dict(zip(asked["device"], asked["time_method"], strict=True)) == {
        c.device: "modelled" if c.device.startswith("model:") else "measured" for c in data.cells
    }
    tables = sorted(path.name for path in finished_run.directory.glob("*.csv"))
    same = [n for n in tables if (tmp_path / n).read_bytes() == (finished_run.directory / n).read_bytes()]
    assert [n for n in tables if n not in same] == ["trials.csv"], "which says that its figures were derived again"


def test_another_sheet_prices_operations_too_and_the_page_names_it(
    finished_run: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Operations are priced again with the trials, and add up to the times and joules beside them."""
    with Store.view(finished_run.directory) as store:
        data = store.data()
    (device,) = {c.device for c in data.cells if c.device.startswith("model:")}
    name = device.removeprefix("model:")
    then = sheet_path(name).read_bytes()
    doubled = re.sub(rb"(busy_w = { value = )([0-9.e+-]+)", lambda m: m[1] + b"2" + m[2], then)
    doubled = re.sub(rb"(s_per_flop = { value = )([0-9.]+)", rb"\g<1>1\g<2>", doubled)
    (tmp_path / f"{name}.toml").write_bytes(doubled)
    monkeypatch.setattr("devices.models.sheet._FOLDER", tmp_path)
    request.addfinalizer(available_sheets.cache_clear)  # the names in this folder are nobody else's
    found = rederived_run(data)
    modelled = [t for t in found.run.trials if t.time_method == "modelled"]
    assert found.n_changed == len(modelled)
    operations = RunFrames(found.run).operations
    for one in modelled:
        own = operations[operations["cell"] == one.cell_id]
        lasted_s = (one.window_end_s or 0.0) - (one.window_start_s or 0.0)
        assert own["seconds"].sum() == pytest.approx(lasted_s)
        (whole,) = (r for r in one.energy if (r.phase, r.component) == ("all", "total"))
        assert own["joules"].sum() == pytest.approx(whole.energy_j, rel=1e-12)
        counted_j = sum(t.values[-1] - t.values[0] for t in found.run.load_traces(one.trial_id))
        assert own["joules"].sum() == pytest.approx(counted_j)
        was = next(t for t in data.trials if t.trial_id == one.trial_id)
        assert lasted_s > 1.002 * ((was.window_end_s or 0.0) - (was.window_start_s or 0.0))
        now, before = hashlib.sha256(doubled).hexdigest(), hashlib.sha256(then).hexdigest()
        assert (str(one.derived_by)[-16:], str(was.derived_by)[-16:]) == (now[:16], before[:16])
    inputs = {one.name: one.value for one in found.run.info.inputs}
    assert inputs[f"hardware sheet {name}"] == f"sha256:{now}"
    assert inputs[f"hardware sheet {name}, when the run was made"] == f"sha256:{before}"
    (remark,) = found.run.remarks
    assert all(word in remark for word in (now[:12], before[:12], "joulebench report DIR"))
    assert remark in page_context(found.run)["warnings"]
    (as_ran,) = as_it_ran(data).remarks
    assert all(word in as_ran for word in (now[:12], before[:12], "report DIR --rederive"))
    assert (set(trials(found.run)["derived"]), set(trials(data)["derived"])) == ({"again"}, {"when it ran"})


def test_a_run_that_other_code_priced_says_so(finished_run: FinishedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sheet that is here as it was: the code beside it is another, so prices may be."""
    with Store.view(finished_run.directory) as store:
        data = store.data()
    n_modelled = sum(t.time_method == "modelled" for t in data.trials)
    monkeypatch.setattr("devices.models.priced_by.pricing_digest", lambda: "0" * 64)
    (remark,) = as_it_ran(data).remarks
    assert remark.startswith(f"model:m2-ultra: {n_modelled} of {n_modelled} trials were priced by another version")
    again = rederived_run(data).run
    assert {t.derived_by for t in again.trials if t.time_method == "modelled"} != {
        t.derived_by for t in data.trials if t.time_method == "modelled"
    }
    assert all(f" pricing {'0' * 16} sheet " in str(t.derived_by) for t in again.trials if t.time_method == "modelled")
    assert as_it_ran(again).remarks == ()


def test_a_run_whose_sheet_is_here_as_it_was_says_nothing_of_it(finished_run: FinishedRun) -> None:
    with Store.view(finished_run.directory) as store:
        assert as_it_ran(store.data()).remarks == ()
