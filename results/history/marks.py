"""Baselines: names for runs of a history, in a file beside them that people can read and edit.

    DIR/baselines.json    {"NAME": ["FOLDER", ...]}, folders as the history names them

Several runs of one name are runs of the same thing (A/A): how far they are apart is the noise floor.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from results.database import OWNER_ONLY
from results.history.index import DEPTH, History, HistoryError
from results.history.points import RunPoint
from results.report.files import replace_text

MARKS: Final = "baselines.json"
LOCK: Final = ".baselines.lock"
WAIT_S: Final = 10.0


def read_marks(directory: Path) -> dict[str, tuple[str, ...]]:
    """Raises `HistoryError`."""
    path = directory / MARKS
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise HistoryError(f"{path}: cannot be read ({error}); put it right, or remove it and mark again") from error
    if not isinstance(found, dict) or not all(
        isinstance(own, list) and own and all(isinstance(folder, str) for folder in own) for own in found.values()
    ):
        raise HistoryError(f'{path}: is not of the form {{"NAME": ["FOLDER"]}}; put it right, or remove it')
    return {name: tuple(own) for name, own in found.items()}


def mark(history: History, name: str, folders: Sequence[str], add: bool) -> tuple[str, ...]:
    """Gives runs a name; says which runs have it now. add: beside those that have it. Raises `HistoryError`, `OSError`
    where it cannot be written."""
    _check(name)
    with _held(history.directory):
        marks = read_marks(history.directory)
        own = tuple(dict.fromkeys([*(marks.get(name, ()) if add else ()), *folders]))
        _write(history.directory, marks | {name: own})
    return own


def unmark(directory: Path, name: str) -> None:
    """Raises `HistoryError`, `OSError`."""
    with _held(directory):
        marks = read_marks(directory)
        if name not in marks:
            raise HistoryError(f"{name}: no such baseline in {directory / MARKS}; {_known(marks, directory)}")
        _write(directory, {other: own for other, own in marks.items() if other != name})


@contextmanager
def _held(directory: Path) -> Iterator[None]:
    lock = FileLock(directory / LOCK, timeout=WAIT_S, mode=OWNER_ONLY)
    try:
        lock.acquire()
    except Timeout as error:
        raise HistoryError(
            f"{directory}: another process has held its baselines for {WAIT_S:g} s; try again"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _write(directory: Path, marks: Mapping[str, Sequence[str]]) -> None:
    replace_text(directory / MARKS, json.dumps(marks, indent=2, ensure_ascii=False) + "\n")


def _check(name: str) -> None:
    if not name.strip() or not name.isprintable() or len(name) > 100 or name.startswith("-"):
        raise HistoryError(f"{name[:100]!r}: no name for a baseline; take 1 to 100 printable characters")


def run_named(history: History, name: str) -> RunPoint:
    """By its folder below the history's, by a path, or by its run id. Raises `HistoryError`."""
    folder = _below(history, name)
    found = [run for run in history.runs if name == run.run_id or run.folder in (name, folder)]
    if len(found) == 1:
        return found[0]
    if found:
        told = ", ".join(run.folder for run in found)
        raise HistoryError(f"{name}: several runs are called so ({told}); name a folder")
    skipped = next((one for one in history.skipped if one.folder in (name, folder)), None)
    if skipped is not None:
        raise HistoryError(f"{name}: cannot be read ({skipped.why})")
    raise HistoryError(
        f"{name}: {history.directory} has no such run; `joulebench history {history.directory}` lists them"
    )


def _below(history: History, name: str) -> str | None:
    try:
        return str(Path(name).resolve().relative_to(history.directory.resolve()))
    except (ValueError, OSError):
        return None


def baseline_runs(history: History, name: str) -> list[RunPoint]:
    """Of a mark, or of one run that is named itself, the oldest first. Raises `HistoryError`."""
    marks = read_marks(history.directory)
    if name in marks:
        try:
            found = [run_named(history, folder) for folder in marks[name]]
        except HistoryError as error:
            raise HistoryError(f"baseline {name}: {error}; mark it again") from error
        return sorted(found, key=lambda run: (run.created_at, run.folder))
    try:
        return [run_named(history, name)]
    except HistoryError as error:
        raise HistoryError(
            f"--baseline {name}: no baseline and no run of {history.directory} is called so;"
            f" {_marked_above(history, name) or _known(marks, history.directory)}"
        ) from error


def _marked_above(history: History, name: str) -> str | None:
    """Where a folder above has a baseline of the name: that, and how to have it here. A folder's own baselines count
    alone, for those of one above may be of other runs."""
    inside = history.directory.resolve()
    for above in list(inside.parents)[:DEPTH]:
        try:
            own = read_marks(above).get(name, ())
        except HistoryError:
            continue
        if not own:
            continue
        shown = os.path.relpath(above)
        told = f"{shown} has a baseline {name}: give {shown} as the folder of runs"
        below = [path.relative_to(inside) for path in (above / folder for folder in own) if path.is_relative_to(inside)]
        if len(below) < len(own):
            return told
        command = ("joulebench", "baseline", "set", name, *map(str, below), "--history", str(history.directory))
        return f"{told}, or mark its runs here too: `{shlex.join(command)}`"
    return None


def _known(marks: Mapping[str, Sequence[str]], directory: Path) -> str:
    """And how to make one of that folder, which `joulebench baseline` takes by --history alone."""
    known = f"baselines: {', '.join(marks)}" if marks else "there are no baselines yet"
    return f"{known}; `joulebench baseline set NAME RUN --history {shlex.quote(str(directory))}` makes one"
