"""Rows of trials that a lost device failed: each gives its place to the one that is measured for it, and is kept.

trial      what stands: at most one of a (cell, repeat)
replaced   lost trials that gave their place, each with its number in the order in which trials were finished
"""

from __future__ import annotations

import sqlite3

from results.sealed_rows import COLUMNS, insert, rows
from results.trials import Trial


def give_place(db: sqlite3.Connection, cell_id: str, repeat: int) -> None:
    """Where a lost trial stands, the next one may. Others stay. Raises `BrokenSealError`."""
    query = "SELECT trial_id FROM trial WHERE cell_id = ? AND repeat = ? AND status = 'failed'"
    for (trial_id,) in db.execute(query, (cell_id, repeat)).fetchall():
        for row in list(rows(db, "trial", "trial_id", True, trial_id)):  # another seal would hide a flipped bit
            if Trial.model_validate_json(row["record"]).is_lost:
                insert(db, "replaced", [row[column] for column in COLUMNS["replaced"]])
                db.execute("DELETE FROM trial WHERE trial_id = ?", (trial_id,))


def finished_places(db: sqlite3.Connection) -> set[tuple[str, int]]:
    """(cell_id, repeat) of the trials that stand and are not lost."""
    failed = db.execute("SELECT cell_id, repeat, record FROM trial WHERE status = 'failed'")
    lost = {(cell_id, repeat) for cell_id, repeat, record in failed if Trial.model_validate_json(record).is_lost}
    return {(c, r) for c, r in db.execute("SELECT cell_id, repeat FROM trial")} - lost


def last_order(db: sqlite3.Connection) -> int:
    """The number of the trial that was finished last; 0 where none was."""
    both = "SELECT finished_order FROM trial UNION ALL SELECT finished_order FROM replaced"
    return int(db.execute(f"SELECT coalesce(max(finished_order), 0) FROM ({both})").fetchone()[0])
