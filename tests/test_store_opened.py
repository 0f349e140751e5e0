"""A store that is there: damaged, of another schema, in use, or in a folder of other files."""

from __future__ import annotations

import gc
import json
import sqlite3
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from results.database import transaction
from results.records import Sample
from results.store import Store, StoreError
from results.trace_files import WINDOW, TraceFileError
from results.trials import Trial
from tests.run_builders import cell, failed, trial
from tests.store_checks import (
    CELLS,
    INFO,
    POWER,
    assert_same_trace,
    in_new_process,
)

# --- folders that take nothing ---------------------------------------------------------------------------------------


def test_a_run_in_a_folder_that_takes_nothing_is_not_called_damaged(directory: Path) -> None:
    """`run --resume` on a disk for reading sent to sqlite3's .recover."""
    Store.create(directory, INFO, CELLS).close()
    (directory / "run.lock").unlink(missing_ok=True)
    (directory / "run.lock").mkdir()
    with pytest.raises(StoreError, match=r"run cannot be written \(Is a directory\); .* go on with a copy") as caught:
        Store.open(directory)
    assert "damaged" not in str(caught.value)


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "text"])
def test_damaged_trace_is_named_and_its_trial_stays_readable(directory: Path, damage: str) -> None:
    noise = np.random.default_rng(0).random(1000)
    with Store.create(directory, INFO, CELLS) as store:
        store.add_trial(trial("c1", 0), {WINDOW: [replace(POWER, times_s=noise, values=noise)]})
        store.add_trial(trial("c1", 1), {WINDOW: [POWER]})
    path = directory / "traces" / "c1-t0.parquet"
    content = path.read_bytes()
    middle = len(content) // 2
    # One flipped bit of one reading: only a checksum can tell.
    flipped = content[:middle] + bytes([content[middle] ^ 0x10]) + content[middle + 1 :]
    damaged = {"truncated": content[:middle], "flipped": flipped, "empty": b"", "text": b"x"}
    path.write_bytes(damaged[damage])
    with Store.open(directory) as store:
        with pytest.raises(TraceFileError, match=r"c1-t0\.parquet is damaged"):
            store.traces("c1-t0")
        assert len(store.trials()) == 2
        assert_same_trace(store.traces("c1-t1")[0], POWER)


def test_trace_file_of_somebody_else_is_damaged_too(directory: Path, store: Store) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    store.add_trial(trial("c1"), {WINDOW: [POWER]})
    path = directory / "traces" / "c1-t0.parquet"
    for metadata in ({}, {"joulebench": "not json"}, {"joulebench": json.dumps([{"part": WINDOW}])}):
        pq.write_table(pa.table({"a": [1]}).replace_schema_metadata(metadata), path)
        with pytest.raises(TraceFileError, match="is damaged"):
            store.traces("c1-t0")


def test_damaged_database_is_an_error_that_names_it(directory: Path) -> None:
    Store.create(directory, INFO, CELLS).close()
    intact = (directory / "run.sqlite").read_bytes()
    (directory / "run.sqlite").write_bytes(b"this is no database" * 100)
    with pytest.raises(StoreError, match=r"run\.sqlite cannot be used .*damaged") as caught:
        Store.open(directory)
    with pytest.raises(StoreError, match="cannot create the run folder"):
        Store.create(directory, INFO, CELLS)
    (directory / "run.sqlite").write_bytes(intact)
    Store.open(directory).close()
    del caught  # until here it kept alive what the failed `open` held: a lock that was not let go would show


def test_samples_come_back_in_order_by_workload_and_model_and_are_kept_once(directory: Path, store: Store) -> None:
    first = [Sample(sample_id=f"q/{i}", question=f"what is {i}?\n\u2028", expected=str(i)) for i in range(12)]
    store.add_samples("boolq", "tiny", first)
    store.add_samples("boolq", "tiny", [s.model_copy(update={"question": "another"}) for s in first])
    store.add_samples("boolq", "other", first[:1])
    with Store.view(directory) as seen:
        assert seen.data().samples == {("boolq", "tiny"): tuple(first), ("boolq", "other"): (first[0],)}


# --- schema ----------------------------------------------------------------------------------------------------------


def write_schema_1(directory: Path, trials: list[Trial]) -> None:
    """A run folder as the first version wrote it, spelled out: the store's own text may change."""
    (directory / "traces").mkdir(parents=True)
    db = sqlite3.connect(directory / "run.sqlite")
    db.executescript(
        """
        CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
        CREATE TABLE run (run_id TEXT PRIMARY KEY, record TEXT NOT NULL) STRICT;
        CREATE TABLE cell (cell_id TEXT PRIMARY KEY, position INTEGER NOT NULL UNIQUE, record TEXT NOT NULL) STRICT;
        CREATE TABLE trial (trial_id TEXT PRIMARY KEY, cell_id TEXT NOT NULL REFERENCES cell (cell_id),
            repeat INTEGER NOT NULL, status TEXT NOT NULL CHECK (status IN ('ok', 'failed')),
            record TEXT NOT NULL) STRICT;
        CREATE UNIQUE INDEX trial_once ON trial (cell_id, repeat);
        INSERT INTO meta VALUES ('schema_version', '1');
        """
    )
    db.execute("INSERT INTO run VALUES (?, ?)", (INFO.run_id, INFO.model_dump_json()))
    for i, one in enumerate(CELLS):
        db.execute("INSERT INTO cell VALUES (?, ?, ?)", (one.cell_id, i, one.model_dump_json()))
    for t in trials:
        row = (t.trial_id, t.cell_id, t.repeat, t.status, t.model_dump_json())
        db.execute("INSERT INTO trial VALUES (?, ?, ?, ?, ?)", row)
    db.commit()
    db.close()


def schema_version(directory: Path) -> str:
    with sqlite3.connect(directory / "run.sqlite") as db:
        return str(db.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()[0])


@pytest.mark.parametrize("opened", [Store.open, Store.view])
def test_run_of_schema_1_is_brought_up_to_date_with_its_trials_in_order(directory: Path, opened: Any) -> None:
    old = [trial("c2", 0), trial("c1", 0), failed("c2", 1)]
    write_schema_1(directory, old)
    with opened(directory) as store:
        assert store.trials() == tuple(old)
        assert store.info() == INFO
        assert store.data().samples == {}
    assert schema_version(directory) == "7"
    with Store.open(directory) as store:
        store.add_trial(trial("c1", 1), {})
        assert [t.trial_id for t in store.trials()] == ["c2-t0", "c1-t0", "c2-t1", "c1-t1"]


def test_run_of_a_newer_joulebench_is_refused_and_left_as_it_is(directory: Path) -> None:
    Store.create(directory, INFO, CELLS).close()
    with sqlite3.connect(directory / "run.sqlite") as db:
        db.execute("UPDATE meta SET value = '8' WHERE key = 'schema_version'")
    for opened in (Store.open, Store.view):
        with pytest.raises(StoreError, match=r"newer joulebench \(schema 8, this one reads 7\); update joulebench"):
            opened(directory)
    assert schema_version(directory) == "8"


# --- folders ---------------------------------------------------------------------------------------------------------


def test_second_process_is_refused_while_the_first_runs_but_may_look(directory: Path, store: Store) -> None:
    store.add_trial(trial("c1"), {WINDOW: [POWER]})
    other = in_new_process(
        """
        for opened in (Store.open, lambda d: Store.create(d, INFO, CELLS)):
            try:
                opened(Path(sys.argv[1]))
            except StoreError as error:
                print(error)
        with Store.view(Path(sys.argv[1])) as seen:
            print(len(seen.trials()), len(seen.traces("c1-t0")))
        """,
        str(directory),
    )
    assert other.returncode == 0, other.stderr
    refused_open, refused_create, seen = other.stdout.splitlines()
    assert "is in use by another joulebench process" in refused_open
    assert "is in use by another joulebench process" in refused_create
    assert seen == "1 1"
    store.add_trial(trial("c1", 1), {})
    assert len(store.trials()) == 2


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads as Linux does")
def test_reading_traces_leaves_no_thread_behind_that_a_process_could_end_on(directory: Path, store: Store) -> None:
    """A worker of pyarrow that let go of a Python object while the interpreter ended aborted the process."""
    store.add_trial(trial("c1"), {WINDOW: [POWER]})
    other = in_new_process(
        """
        import pyarrow.parquet
        before = os.listdir("/proc/self/task")
        with Store.view(Path(sys.argv[1])) as seen:
            print(len(seen.traces("c1-t0")), len(os.listdir("/proc/self/task")) - len(before))
        """,
        str(directory),
    )
    assert (other.returncode, other.stdout.split()) == (0, ["1", "0"]), other.stderr


def test_looking_does_not_stop_the_run_from_going_on(directory: Path, store: Store) -> None:
    store.add_trial(trial("c1", 0), {})
    with Store.view(directory) as seen:
        assert len(seen.trials()) == 1
        store.add_trial(trial("c1", 1), {})
        assert len(seen.trials()) == 2


def test_folder_with_other_files_is_refused_and_untouched(directory: Path) -> None:
    directory.mkdir()
    (directory / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreError, match=r"holds other files \(thesis\.tex\)"):
        Store.create(directory, INFO, CELLS)
    assert [p.name for p in directory.iterdir()] == ["thesis.tex"]


def test_folder_that_holds_a_run_is_not_started_again(directory: Path) -> None:
    with Store.create(directory, INFO, CELLS) as store:
        store.add_trial(trial("c1"), {})
    with pytest.raises(StoreError, match="already holds a run; go on with --resume") as caught:
        Store.create(directory, INFO, CELLS)
    with Store.open(directory) as store:
        assert len(store.trials()) == 1
    del caught  # until here it kept alive what the refused `create` held


def test_run_that_cannot_be_created_leaves_nothing_and_no_lock(directory: Path) -> None:
    twice = [cell("c1"), cell("c1")]
    with pytest.raises(StoreError, match="cannot create the run folder"):
        Store.create(directory, INFO, twice)
    assert not directory.exists()
    directory.mkdir()
    with pytest.raises(StoreError, match="cannot create the run folder") as caught:
        Store.create(directory, INFO, twice)
    assert list(directory.iterdir()) == []
    Store.create(directory, INFO, CELLS).close()
    del caught  # until here it kept alive what the failed `create` held


def test_folder_of_a_process_killed_while_creating_it_is_usable(directory: Path) -> None:
    directory.mkdir()
    died = in_new_process("store = Store._connect(Path(sys.argv[1]))\nos._exit(9)", str(directory))
    assert died.returncode == 9, died.stderr
    assert (directory / "run.sqlite").exists()
    assert not Store.holds_run(directory)
    with pytest.raises(StoreError, match="holds no run"):
        Store.view(directory)
    with Store.create(directory, INFO, CELLS) as store:
        assert store.info() == INFO


def test_folder_without_a_run_says_what_to_give(tmp_path: Path) -> None:
    for opened in (Store.open, Store.view):
        with pytest.raises(StoreError, match=r"holds no run.*give the folder that `joulebench run` wrote"):
            opened(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_on_the_way_into_a_transaction_rolls_back_and_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between entering and the body leaves a transaction suspended: it is collected after the store closed."""
    complaints: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda complaint: complaints.append(complaint.exc_value))
    store = Store.create(tmp_path / "run", INFO, CELLS)
    suspended = transaction(store._connection)
    suspended.__enter__().execute("DELETE FROM cell")
    store.close()
    del suspended
    gc.collect()
    assert complaints == []
    with Store.open(tmp_path / "run") as again:
        assert again.data().cells == tuple(CELLS)


def test_a_schema_number_that_was_changed_is_told_as_that(directory: Path) -> None:
    Store.create(directory, INFO, CELLS).close()
    with sqlite3.connect(directory / "run.sqlite") as db:
        db.execute("UPDATE meta SET value = '1' WHERE key = 'schema_version'")
    with pytest.raises(
        StoreError, match=r"says that its schema is 1, and holds what came with a later one .*number was"
    ):
        Store.open(directory)
