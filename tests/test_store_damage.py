"""A run folder that was damaged, emptied or half copied: a clear error, and nothing finished is removed."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from results import tables
from results.database import DATABASE, StoreError
from results.history.comparison import Side, compare, told_of
from results.report.csv import write_csv
from results.report.html import html_text
from results.run_frames import RunFrames
from results.sealed_rows import seal_all
from results.store import Store
from results.trace_files import WINDOW, TraceFileError, read_marks, read_parts
from results.trial_tables import request_frames
from tests.run_builders import cell, power_trace, reading, trial
from tests.store_checks import CELLS, INFO, POWER

N_TRIALS = 40
LOST = "the trial's trace file is damaged, absent or another trial's; its joules as a whole stand"


def stored(directory: Path, n: int = 2, traced: bool = True) -> Path:
    """A closed run with n trials of one cell, each with energy and a trace of one request."""
    with Store.create(directory, INFO, CELLS) as store:
        for repeat in range(n):
            one = trial("c1", repeat, energy=(reading(meter=POWER.meter, method=POWER.method),))
            store.add_trial(one, {WINDOW: [POWER]} if traced else {})
    return directory


def everything(directory: Path) -> list[Path]:
    return sorted(p for p in directory.rglob("*") if not p.name.endswith(("-shm", "-wal", ".lock")))


# --- the database ----------------------------------------------------------------------------------------------------


def overwritten(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content) and None


def first_page_cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:3000])


def half(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def garbage_inside(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4096:] = random.Random(0).randbytes(len(content) - 4096)
    path.write_bytes(content)


def changed(statement: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with closing(sqlite3.connect(path)) as db:
            db.executescript(statement)

    return change


DAMAGE: dict[str, Callable[[Path], None]] = {
    "text": overwritten(b"this is no database" * 100),
    "zeros": overwritten(bytes(20000)),
    "first page cut": first_page_cut,
    "half written": half,
    "garbage inside": garbage_inside,
    "no schema version": changed("DELETE FROM meta"),
    "schema version is no number": changed("UPDATE meta SET value = 'four'"),
    "schema version 0": changed("UPDATE meta SET value = '0'"),
    "schema version beyond all": changed("UPDATE meta SET value = '" + "9" * 5000 + "'"),
    "a seal is gone": changed("UPDATE trial SET seal = ''"),
    "no meta": changed("DROP TABLE meta"),
    "no trials": changed("DROP TABLE trial"),
    "run is no record": changed("UPDATE run SET record = '{}'"),
    "trial is no record": changed("UPDATE trial SET record = 'half a rec'"),
    "trial of no cell": changed("DELETE FROM cell"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_database_is_named_with_a_remedy(directory: Path, damage: str) -> None:
    stored(directory, N_TRIALS)
    DAMAGE[damage](directory / DATABASE)
    before = everything(directory)

    def read(opened: Callable[[Path], Store]) -> None:
        with opened(directory) as store:
            store.finished()
            store.data()

    for opened in (Store.view, Store.open):
        with pytest.raises(StoreError, match=r"run\.sqlite .*(damaged|another program)") as caught:
            read(opened)
        assert "holds no run" not in str(caught.value)
    assert everything(directory) == before


def test_a_field_of_a_newer_version_is_no_damage(directory: Path) -> None:
    """It stands in a row that is as its writer sealed it."""
    stored(directory)
    with closing(sqlite3.connect(directory / DATABASE)) as db:
        db.execute("UPDATE trial SET record = json_set(record, '$.aura', 7)")
        seal_all(db)
        db.commit()
    with (
        Store.view(directory) as store,
        pytest.raises(StoreError, match=r"was written by a newer joulebench \(aura is not known here\); update"),
    ):
        store.data()


def one_bit_flipped(path: Path, before: bytes) -> None:
    """In the first byte of the first place where some text stands."""
    content = bytearray(path.read_bytes())
    content[content.index(before)] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("hit", "at"),
    [
        ("a key's name", b'energy_j":'),
        ("a digit of a figure", b"123.25"),
        ("an id", b"c1-t0"),
        ("a label", b"c1 label"),
    ],
)
def test_one_flipped_bit_is_told_as_damage(directory: Path, hit: str, at: bytes) -> None:
    """A record that is still a record: only its seal can tell. It is no newer joulebench that wrote "dnergy_j"."""
    labelled = [one.model_copy(update={"label": f"{one.cell_id} label"}) for one in CELLS]
    with Store.create(directory, INFO, labelled) as store:
        store.add_trial(trial("c1", energy=(reading().model_copy(update={"energy_j": 123.25}),)), {WINDOW: [POWER]})
    one_bit_flipped(directory / DATABASE, at)
    with pytest.raises(StoreError, match=r"run\.sqlite cannot be used") as caught, Store.view(directory) as store:
        store.data()
    assert "is it damaged" in str(caught.value), hit
    assert "newer" not in str(caught.value)


def test_a_page_that_says_that_it_holds_fewer_rows_is_told_as_damage(directory: Path) -> None:
    """SQLite reads such a page without a word, and trials are missing (https://sqlite.org/fileformat.html, 1.6)."""
    stored(directory, N_TRIALS)
    path = directory / DATABASE
    content = bytearray(path.read_bytes())
    table_leaf, at = 13, 3  # the kind of a page that holds rows; where its number of rows stands, in two bytes
    pages = [p for p in range(4096, len(content), 4096) if content[p] == table_leaf]
    told = 0
    for page in pages:
        n_rows = int.from_bytes(content[page + at : page + at + 2], "big")
        changed_page = bytearray(content)
        changed_page[page + at : page + at + 2] = max(0, n_rows - 1).to_bytes(2, "big")
        path.write_bytes(changed_page)
        try:
            with Store.view(directory) as store:
                assert len(store.data().trials) == N_TRIALS
        except StoreError as error:
            told += "is it damaged" in str(error)
    assert told >= 3  # those of meta, run and trial


def before_seals(directory: Path) -> None:
    """As version 5 of the store left it."""
    with closing(sqlite3.connect(directory / DATABASE)) as db:
        for table in ("run", "cell", "trial", "heat", "sample"):
            db.execute(f"ALTER TABLE {table} DROP COLUMN seal")
        db.execute("ALTER TABLE trial DROP COLUMN traces_sha256")
        db.execute("DROP TABLE replaced")
        db.execute("UPDATE meta SET value = '5'")
        db.commit()


def test_a_run_from_before_seals_is_read_and_sealed_once_it_is_gone_on_with(directory: Path) -> None:
    stored(directory)
    with Store.view(directory) as store:
        new = store.data()
    before_seals(directory)
    for opened in (Store.view, Store.open, Store.view):
        with opened(directory) as store:
            old = store.data()
            assert (old.info, old.cells, old.trials) == (new.info, new.cells, new.trials)
            assert len(old.load_traces("c1-t0")) == 1
    one_bit_flipped(directory / DATABASE, b"example")
    with Store.view(directory) as store, pytest.raises(StoreError, match="is not what was written there"):
        store.data()


def test_an_unknown_field_in_a_run_of_an_older_version_is_damage(directory: Path) -> None:
    stored(directory)
    before_seals(directory)
    changed("UPDATE trial SET record = replace(record, 'energy_j', 'dnergy_j')")(directory / DATABASE)
    with Store.view(directory) as store, pytest.raises(StoreError, match="is it damaged"):
        store.data()


def test_any_page_that_holds_rows_may_be_damaged(directory: Path, tmp_path: Path) -> None:
    """A stretch of 64 bytes among the rows of each page, one at a time (https://sqlite.org/fileformat.html, 1.6)."""
    stored(directory, N_TRIALS, traced=False)
    content = (directory / DATABASE).read_bytes()
    chance = random.Random(20261122)
    table_leaf, n_rows_at, rows_at = 13, 3, 5
    damaged = []
    for page in range(4096, len(content), 4096):
        n_rows, first = (int.from_bytes(content[page + i : page + i + 2], "big") for i in (n_rows_at, rows_at))
        if content[page] != table_leaf or not n_rows:
            continue
        at = page + chance.randint(min(first, 4096 - 64), 4096 - 64)
        copy = tmp_path / f"copy{page}"
        shutil.copytree(directory, copy)
        (copy / DATABASE).write_bytes(content[:at] + chance.randbytes(64) + content[at + 64 :])
        damaged.append(copy)
        for opened in (Store.view, Store.open):
            with pytest.raises(StoreError, match=DATABASE), opened(copy) as store:
                store.data()
    assert len(damaged) >= 5


def test_a_database_of_another_program_is_left_alone(directory: Path) -> None:
    directory.mkdir()
    changed("CREATE TABLE bookmark (id INTEGER); INSERT INTO bookmark VALUES (7)")(directory / DATABASE)
    with pytest.raises(StoreError, match="holds no run"):
        Store.open(directory)
    with pytest.raises(StoreError, match="a database of another program"):
        Store.create(directory, INFO, CELLS)
    with closing(sqlite3.connect(directory / DATABASE)) as db:
        assert db.execute("SELECT name FROM sqlite_master").fetchall() == [("bookmark",)]


# --- what was lost beside it -----------------------------------------------------------------------------------------


def test_each_trial_is_in_the_main_file_once_it_is_finished(directory: Path, tmp_path: Path) -> None:
    """A copy of run.sqlite alone, taken while the run goes on, holds every finished trial."""
    with Store.create(directory, INFO, CELLS) as store:
        for repeat in range(3):
            store.add_trial(trial("c1", repeat), {WINDOW: [POWER]})
            shutil.copy(directory / DATABASE, tmp_path / f"copy{repeat}.sqlite")
            with closing(sqlite3.connect(tmp_path / f"copy{repeat}.sqlite")) as db:
                assert db.execute("SELECT count(*) FROM trial").fetchone() == (repeat + 1,)


def test_a_reader_that_looks_on_does_not_keep_trials_out_of_the_main_file_for_long(directory: Path) -> None:
    with Store.create(directory, INFO, CELLS) as store:
        with Store.view(directory) as looking:
            looking._connection.execute("BEGIN")
            assert looking.trials() == ()
            store.add_trial(trial("c1", 0), {})
        store.add_trial(trial("c1", 1), {})
        shutil.copy(directory / DATABASE, directory / "copy.sqlite")
    with closing(sqlite3.connect(directory / "copy.sqlite")) as db:
        assert db.execute("SELECT count(*) FROM trial").fetchone() == (2,)


def test_traces_without_their_rows_are_kept_and_told(directory: Path) -> None:
    """As after the -wal of an older version was not copied along: the traces of many trials, and no row of them."""
    stored(directory, 3)
    changed("DELETE FROM trial")(directory / DATABASE)
    before = everything(directory)
    with pytest.raises(StoreError, match=r"holds 3 trace files of trials that run\.sqlite does not hold .*-wal lost"):
        Store.open(directory)
    assert everything(directory) == before


def test_finished_trials_whose_rows_are_gone_are_told_and_what_is_left_of_them_is_kept(directory: Path) -> None:
    """As after `sqlite3 run.sqlite .recover`, which leaves out what it cannot read."""
    stored(directory, 5)
    changed("DELETE FROM trial WHERE finished_order = 4")(directory / DATABASE)
    lost = directory / "traces" / "c1-t3.parquet"
    with Store.view(directory) as store:
        run = store.data()
    told = f"finished trials that are gone from {DATABASE}: 1 (in order of time number 4)"
    assert told in html_text(run, RunFrames(run))
    side = Side("runs/a", told_of(run))
    assert any(told in note for note in compare(side, side, frozenset(), 0.0).notes)
    with Store.open(directory) as store:
        assert lost.is_file()
        lost.unlink()
        store.add_trial(trial("c1", 3), {})
        assert told in store.data().remarks[0]


def test_what_is_left_of_gone_trials_does_not_keep_a_run_from_going_on_after_kills(directory: Path) -> None:
    """Beside what a kill leaves it was a second trace without a row, and `--resume` refused the run from then on."""
    stored(directory, 5)
    changed("DELETE FROM trial WHERE finished_order = 4")(directory / DATABASE)
    left = [directory / "traces" / f"{name}.parquet" for name in ("c1-t3", "killed", "killed-again")]
    for path in left[1:]:
        shutil.copy(left[0], path)
        with Store.open(directory) as store:
            assert len(store.trials()) == 4
    assert all(path.is_file() for path in left)


@pytest.mark.parametrize("how", ["emptied", "removed"])
def test_a_store_without_a_run_beside_traces_says_so(directory: Path, how: str) -> None:
    stored(directory)
    if how == "emptied":
        changed("DELETE FROM trial; DELETE FROM cell; DELETE FROM run")(directory / DATABASE)
    else:
        (directory / DATABASE).unlink()
    before = everything(directory)
    for opened in (Store.open, Store.view, lambda d: Store.create(d, INFO, CELLS)):
        with pytest.raises(StoreError, match=r"holds 2 trace files of trials that run\.sqlite does not hold"):
            opened(directory)
    assert everything(directory) == before


# --- traces ----------------------------------------------------------------------------------------------------------


def test_a_damaged_trace_costs_its_requests_their_joules_and_nothing_else(directory: Path, tmp_path: Path) -> None:
    watts = power_trace(3.0, 10.0, "nvml", "integrated power")
    with Store.create(directory, INFO, CELLS) as store:
        for repeat in range(3):
            store.add_trial(trial("c1", repeat, energy=(reading(),)), {WINDOW: [watts]})
    with Store.view(directory) as store:
        whole = tables.energy(store.data())
    (directory / "traces" / "c1-t0.parquet").write_bytes(b"PAR1 half")
    with Store.view(directory) as store:
        derived = RunFrames(store.data())
        write_csv(derived.run, tmp_path, derived)
        page = html_text(derived.run, derived)
    assert "the traces of 1 of 3 trials are lost" in page
    assert "c1-t0.parquet is damaged" in page
    (single,) = request_frames(derived.run)
    single = single.set_index("repeat")
    assert single.loc[0, "energy_reason"] == LOST
    assert single.loc[0, "energy_method"] == "missing"
    assert single.loc[1, "energy_method"] == "integrated power"
    assert tables.energy(derived.run).equals(whole)


def test_brackets_without_end_in_a_trace_file_are_damage(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path, nested = tmp_path / "t.parquet", b"[" * 99_999
    table = pa.table({"trace": [0], "time_s": [0.0], "value": [1.0]})
    pq.write_table(table.replace_schema_metadata({b"joulebench": nested, b"joulebench marks": nested}), path)
    for read in (read_parts, read_marks):
        with pytest.raises(TraceFileError, match="is damaged"):
            read(path)


def test_traces_of_another_trial_are_not_taken_for_a_trials_own(directory: Path) -> None:
    """Each file is whole; what was measured in one trial must not stand in the row of another."""
    with Store.create(directory, INFO, CELLS) as store:
        for repeat, watts in enumerate((3.0, 7.0)):
            power = power_trace(watts, 10.0, "nvml", "integrated power")
            store.add_trial(trial("c1", repeat, energy=(reading(),)), {WINDOW: [power]})
    first, second = sorted((directory / "traces").iterdir())
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    with Store.view(directory) as store:
        derived = RunFrames(store.data())
        with pytest.raises(TraceFileError, match=r"c1-t0\.parquet is damaged, or that of another trial"):
            store.traces("c1-t0")
    (requests,) = request_frames(derived.run)
    assert set(requests["energy_method"]) == {"missing"}
    assert "the traces of 2 of 2 trials are lost" in html_text(derived.run, derived)


def test_a_trace_file_that_is_gone_is_lost_and_not_one_that_never_was(directory: Path) -> None:
    stored(directory)
    (directory / "traces" / "c1-t0.parquet").unlink()
    with Store.view(directory) as store:
        derived = RunFrames(store.data())
    (requests,) = request_frames(derived.run)
    assert requests.set_index("repeat").loc[0, "energy_reason"] == LOST
    assert "the traces of 1 of 2 trials are lost" in html_text(derived.run, derived)


# --- who may read it -------------------------------------------------------------------------------------------------


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_store_and_tables_are_for_their_owner_alone(directory: Path) -> None:
    before = os.umask(0)
    try:
        with Store.create(directory, INFO, CELLS) as store:
            store.add_trial(trial("c1"), {WINDOW: [POWER]})
            beside = [mode(p) for p in directory.glob(f"{DATABASE}*")]
            write_csv(store.data(), directory)
    finally:
        os.umask(before)
    assert beside == [0o600] * 3
    assert {p.name: oct(mode(p)) for p in directory.iterdir() if p.is_file()} == {
        p.name: "0o600" for p in directory.iterdir() if p.is_file()
    }
    assert mode(directory / "traces") == 0o700


def test_a_mode_that_the_owner_gave_stays(directory: Path) -> None:
    stored(directory)
    with Store.view(directory) as store:
        write_csv(store.data(), directory)
        (directory / "trials.csv").chmod(0o644)
        write_csv(store.data(), directory)
    (directory / DATABASE).chmod(0o640)
    Store.open(directory).close()
    assert (mode(directory / "trials.csv"), mode(directory / "summary.csv")) == (0o644, 0o600)
    assert mode(directory / DATABASE) == 0o640


# --- order -----------------------------------------------------------------------------------------------------------


def test_the_order_of_trials_is_found_by_an_index(directory: Path) -> None:
    with Store.create(directory, INFO, [cell("c1")]), closing(sqlite3.connect(directory / DATABASE)) as db:
        for query in (
            "SELECT record FROM trial ORDER BY finished_order",
            "SELECT coalesce(max(finished_order), 0) + 1 FROM trial",
        ):
            plan = " ".join(str(row[3]) for row in db.execute(f"EXPLAIN QUERY PLAN {query}"))
            assert "trial_finished" in plan
            assert "TEMP B-TREE" not in plan
