"""The run folder: what is committed comes back exactly, and nothing that goes wrong costs a finished trial."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import results.run_folders
from results.printable import printable
from results.records import Completion, EnergyReading, PowerTrace, Score
from results.run_folders import check_free_space
from results.store import Store, StoreError
from results.trace_files import IDLE_AFTER, IDLE_BEFORE, WINDOW
from results.trials import Failure, Trial
from tests.fakes.waveforms import trace
from tests.run_builders import completion, failed, reading, trial
from tests.store_checks import (
    CELLS,
    INFO,
    POWER,
    assert_same_trace,
    in_new_process,
)

# --- what is written comes back --------------------------------------------------------------------------------------


def test_run_comes_back_as_it_was_written(directory: Path, store: Store) -> None:
    one = trial(
        "c1",
        energy=(reading(), EnergyReading(phase="decode", meter="m", component="c", method="missing", duration_s=1.0)),
        scores=(Score(metric="acc", value=0.1 + 0.2, stderr=None, n=3),),
        marks=("throttled", 'quote " and ünïcode'),
    )
    two = failed("c2")
    store.add_trial(one, {WINDOW: [POWER]})
    store.add_trial(two, {})
    store.close()
    with Store.view(directory) as again:
        data = again.data()
    assert data.info == INFO
    assert data.cells == tuple(CELLS)
    assert data.trials == (one, two)
    assert_same_trace(data.load_traces(one.trial_id)[0], POWER)
    assert data.load_traces(two.trial_id) == ()


def test_infinite_and_undefined_figures_come_back_as_such(store: Store) -> None:
    impossible = completion("a", token_times_s=()).model_copy(update={"loglikelihood": float("-inf")})
    undefined = Score(metric="mcc", value=float("nan"))
    store.add_trial(trial("c1", completions=(impossible,), scores=(undefined,)), {})
    (got,) = store.trials()
    assert got.completions[0].loglikelihood == float("-inf")
    assert np.isnan(got.scores[0].value)


numbers = st.floats(allow_nan=False)
names = st.text(max_size=8).map(printable)
"""What a meter calls itself is read back printable, whoever wrote the file."""
described = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["power", "counter", "held"]),
        "meter": names,
        "component": names,
        "sample_interval_s": numbers,
        "update_period_s": numbers,
        "resolution": numbers,
        "relative_accuracy": numbers,
        "wrap_at_j": st.none() | numbers,
        "additive": st.booleans(),
        "note": st.none() | names,
        "gaps_s": st.lists(st.tuples(numbers, numbers), max_size=3).map(tuple),
    }
)
readings = st.lists(st.tuples(st.floats(), st.floats()), max_size=20)


@st.composite
def power_traces(draw: st.DrawFn) -> PowerTrace:
    fields: dict[str, Any] = draw(described)
    rows = np.array(draw(readings), dtype=np.float64).reshape(-1, 2)
    return trace(fields.pop("kind"), rows[:, 0], rows[:, 1], fields.pop("sample_interval_s"), **fields)


@settings(max_examples=50)
@given(before=st.lists(power_traces(), max_size=2), window=st.lists(power_traces(), max_size=3))
def test_traces_round_trip_bit_by_bit_and_by_part(before: list[PowerTrace], window: list[PowerTrace]) -> None:
    with tempfile.TemporaryDirectory() as folder, Store.create(Path(folder) / "run", INFO, CELLS) as store:
        store.add_trial(trial("c1"), {IDLE_BEFORE: before, WINDOW: window, IDLE_AFTER: []})
        for part, expected in ((IDLE_BEFORE, before), (WINDOW, window), (IDLE_AFTER, [])):
            got = store.traces("c1-t0", part)
            assert len(got) == len(expected)
            for one, other in zip(got, expected, strict=True):
                assert_same_trace(one, other)


@settings(max_examples=50)
@given(
    figures=st.lists(st.floats(allow_nan=False), min_size=4, max_size=4),
    texts=st.lists(st.text(), min_size=2, max_size=2),
    ids=st.lists(st.integers(0, 2**40), max_size=4),
)
def test_trials_round_trip_exactly(figures: list[float], texts: list[str], ids: list[int]) -> None:
    one = Trial(
        trial_id="t",
        cell_id="c1",
        repeat=0,
        status="failed",
        started_at=texts[0],
        window_start_s=figures[0],
        completions=(
            Completion(
                request_id="r",
                sample_id=texts[1],
                n_prompt_tokens=3,
                start_s=figures[1],
                prefill_end_s=figures[2],
                end_s=figures[3],
                token_ids=tuple(ids),
                token_times_s=tuple(figures),
            ),
        ),
        failure=Failure(kind="stable", error=texts[0], traceback=texts[1]),
    )
    with tempfile.TemporaryDirectory() as folder, Store.create(Path(folder) / "run", INFO, CELLS) as store:
        store.add_trial(one, {})
        assert store.trials() == (one,)


def test_trials_come_in_the_order_in_which_they_finished(store: Store) -> None:
    for cell_id, repeat in (("c2", 0), ("c1", 0), ("c2", 1), ("c1", 1)):
        store.add_trial(trial(cell_id, repeat), {})
    assert [t.trial_id for t in store.trials()] == ["c2-t0", "c1-t0", "c2-t1", "c1-t1"]
    assert store.finished() == {("c1", 0), ("c1", 1), ("c2", 0), ("c2", 1)}


# --- a finished trial is never lost ----------------------------------------------------------------------------------


def test_same_cell_and_repeat_twice_is_refused_and_the_first_kept(directory: Path, store: Store) -> None:
    store.add_trial(trial("c1"), {WINDOW: [POWER]})
    second = trial("c1", trial_id="another")
    with pytest.raises(StoreError, match=r"trial another \(trial 1 of cell c1\) .* never replaced"):
        store.add_trial(second, {WINDOW: [POWER]})
    assert [t.trial_id for t in store.trials()] == ["c1-t0"]
    assert [p.name for p in (directory / "traces").iterdir()] == ["c1-t0.parquet"]


def test_same_trial_twice_leaves_the_first_ones_trace_alone(store: Store) -> None:
    store.add_trial(trial("c1"), {WINDOW: [POWER]})
    with pytest.raises(StoreError):
        store.add_trial(trial("c1"), {WINDOW: [replace(POWER, note="overwritten")]})
    assert_same_trace(store.traces("c1-t0")[0], POWER)


def test_trial_whose_row_is_refused_leaves_no_trace_file(directory: Path, store: Store) -> None:
    with pytest.raises(StoreError, match="FOREIGN KEY"):
        store.add_trial(trial("no such cell"), {WINDOW: [POWER]})
    assert list((directory / "traces").iterdir()) == []
    assert store.trials() == ()


def test_trace_that_cannot_be_written_leaves_no_row(directory: Path, store: Store) -> None:
    store.add_trial(trial("c1", 0), {WINDOW: [POWER]})
    # A folder where the file shall go: the rename fails, as it would on a broken disk.
    (directory / "traces" / "c1-t1.parquet").mkdir()
    with pytest.raises(StoreError, match="finished trials are kept"):
        store.add_trial(trial("c1", 1), {WINDOW: [POWER]})
    assert [t.repeat for t in store.trials()] == [0]
    assert not (directory / "traces" / "c1-t1.tmp").exists()
    (directory / "traces" / "c1-t1.parquet").rmdir()
    store.add_trial(trial("c1", 1), {WINDOW: [POWER]})
    assert len(store.trials()) == 2


def test_a_run_whose_folder_was_removed_is_not_said_to_be_kept(directory: Path, store: Store) -> None:
    shutil.rmtree(directory)
    with pytest.raises(StoreError) as raised:
        store.add_trial(trial("c1", 0), {WINDOW: [POWER]})
    assert "removed or renamed meanwhile, and its finished trials with it" in str(raised.value)
    assert "--resume" not in str(raised.value)


def test_what_a_killed_process_left_half_written_is_removed_and_the_finished_kept(directory: Path) -> None:
    with Store.create(directory, INFO, CELLS) as store:
        store.add_trial(trial("c1"), {WINDOW: [POWER]})
    traces = directory / "traces"
    (traces / "half.tmp").write_bytes(b"PAR1 half")
    (traces / "orphan.parquet").write_bytes((traces / "c1-t0.parquet").read_bytes())
    with Store.open(directory) as store:
        assert sorted(p.name for p in traces.iterdir()) == ["c1-t0.parquet"]
        assert_same_trace(store.traces("c1-t0")[0], POWER)


def test_process_killed_between_trace_and_row_costs_that_trial_only(directory: Path) -> None:
    died = in_new_process(
        """
        import results.store
        def die(*arguments):
            written(*arguments)
            os._exit(9)
        with Store.create(Path(sys.argv[1]), INFO, CELLS) as store:
            store.add_trial(trial("c1", 0), {WINDOW: [POWER]})
            written, results.store.write_traces = results.store.write_traces, die
            store.add_trial(trial("c1", 1), {WINDOW: [POWER]})
        """,
        str(directory),
    )
    assert died.returncode == 9, died.stderr
    assert (directory / "traces" / "c1-t1.parquet").exists()
    with Store.open(directory) as store:
        assert [t.repeat for t in store.trials()] == [0]
        assert [p.name for p in (directory / "traces").iterdir()] == ["c1-t0.parquet"]
        store.add_trial(trial("c1", 1), {WINDOW: [POWER]})


FULL_DISK = """
    import resource, signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write over the limit fails with EFBIG
    store = Store.create(Path(sys.argv[1]), INFO, CELLS)
    store.add_trial(trial("c1", 0), {WINDOW: [POWER]})
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
    noise = np.random.default_rng(0).random(100_000)
    big = POWER if sys.argv[3] == "database" else replace(POWER, times_s=noise, values=noise)
    try:
        store.add_trial(trial("c1", 1, scores=[Score(metric="x" * 300_000, value=0)]), {WINDOW: [big]})
    except StoreError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    store.add_trial(trial("c1", 2), {WINDOW: [POWER]})
    store.close()
"""


@pytest.mark.parametrize(
    ("limit", "fills", "remedy"),
    [
        (900_000, "trace", "make room"),
        (150_000, "database", "look at the disk, which failed (dmesg says how), or make room where a quota is"),
    ],
    ids=("trace", "database"),
)
def test_full_disk_keeps_earlier_trials_and_the_store_goes_on(
    directory: Path, limit: int, fills: str, remedy: str
) -> None:
    """Of a file that may grow no more, SQLite says that the disk failed."""
    ended = in_new_process(FULL_DISK, str(directory), str(limit), fills)
    assert ended.returncode == 0, ended.stderr
    assert "trial c1-t1 could not be written" in ended.stdout
    assert f"finished trials are kept: {remedy}" in ended.stdout
    assert "and go on with --resume" in ended.stdout
    with Store.open(directory) as store:
        assert [t.repeat for t in store.trials()] == [0, 2]
        assert sorted(p.name for p in (directory / "traces").iterdir()) == ["c1-t0.parquet", "c1-t2.parquet"]
        assert_same_trace(store.traces("c1-t0")[0], POWER)


@pytest.fixture
def small_volume(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    volume = tmp_path / "small"
    volume.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(volume)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small file system cannot be mounted here (needs root)")
    yield volume
    subprocess.run(["umount", str(volume)], check=True)


def test_a_folder_where_nothing_can_be_written_is_told_as_such(tmp_path: Path) -> None:
    """/proc has no bytes at all: to make room there would help nobody."""
    for folder in (Path("/proc/joulebench"), tmp_path / "file" / "run"):
        (tmp_path / "file").write_text("mine")
        with pytest.raises(
            StoreError, match=r"cannot create the run folder .*; name a folder that can be written"
        ) as e:
            Store.create(folder, INFO, CELLS)
        assert "MB are" not in str(e.value)


def test_a_file_in_the_place_of_the_folder_is_told_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "to nowhere").symlink_to("nowhere")
    for path in (tmp_path / "file", Path("/dev/null"), tmp_path / "to nowhere"):
        with pytest.raises(StoreError, match="is no folder; name another one"):
            Store.create(path, INFO, CELLS)
    assert (tmp_path / "file").read_text() == "mine"


def test_too_little_room_is_told_before_anything_is_written(small_volume: Path) -> None:
    with pytest.raises(StoreError, match=r"only 1\.\d+ MB are free .* 67\.1 MB are needed; make room"):
        Store.create(small_volume / "run", INFO, CELLS)
    assert list(small_volume.iterdir()) == []
    with pytest.raises(StoreError, match="MB are needed"):
        check_free_space(small_volume / "not" / "yet" / "there")


def test_a_run_that_finds_too_little_room_in_its_midst_is_told_to_go_on(
    small_volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as room:
        room.setattr(results.run_folders, "FREE_BYTES_NEEDED", 0)
        store = Store.create(small_volume / "run", INFO, CELLS)
    with store, pytest.raises(StoreError, match=r"MB are needed; make room and go on with --resume"):
        store.add_trial(trial("c1", 0), {})


@pytest.mark.parametrize("n_readings", [0, 100_000])
def test_volume_that_fills_up_keeps_earlier_trials(
    small_volume: Path, monkeypatch: pytest.MonkeyPatch, n_readings: int
) -> None:
    monkeypatch.setattr(results.run_folders, "FREE_BYTES_NEEDED", 0)  # as when another program takes the room meanwhile
    noise = np.random.default_rng(0).random(n_readings)
    with Store.create(small_volume / "run", INFO, CELLS) as store:
        store.add_trial(trial("c1", 0), {WINDOW: [POWER]})
        big = trial("c1", 1, marks=("x" * 1_000_000,) if n_readings == 0 else ())
        with pytest.raises(StoreError, match=r"could not be written .*(full|No space left).* finished trials are kept"):
            store.add_trial(big, {WINDOW: [replace(POWER, times_s=noise, values=noise)]})
        store.add_trial(trial("c1", 2), {WINDOW: [POWER]})
    with Store.open(small_volume / "run") as store:
        assert [t.repeat for t in store.trials()] == [0, 2]
        assert_same_trace(store.traces("c1-t0")[0], POWER)
