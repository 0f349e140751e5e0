"""Whether files that decide numbers are still what they were: those of a run when it took their digests.

Weights stay views of their mapped file, and another arm may load them hours later: a file that is replaced or written
to meanwhile gives one run the answers of two models. So each is looked at before and after every trial.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from results.file_state import FileState, file_state, sha256_of_file
from results.store import StoreError

MOST_TOLD = 3


@dataclass
class _Watched:
    """sha256: None where it is in no digest of the run; then every other state is a change."""

    name: str
    state: FileState
    sha256: str | None = None


class InputWatch:
    """The files of one run, or of one calibration."""

    def __init__(self) -> None:
        self._files: dict[Path, _Watched] = {}

    def add(self, name: str, path: Path, state: FileState, sha256: str | None = None) -> None:
        """state: before the file was read, or its digest taken."""
        self._files[path] = _Watched(name, state, sha256)

    def add_read_later(self, data_files: Mapping[Path, FileState]) -> None:
        """Files that items were read from, those known already among them."""
        for path, state in data_files.items():
            self._files.setdefault(path, _Watched(f"data file {path}", state))

    def changes(self) -> list[str]:
        """In words; empty where all is as it was."""
        found = ((one.name, _change(path, one)) for path, one in self._files.items())
        return [f"{name} {how}" for name, how in found if how is not None]

    def refuse_changes(self, directory: Path) -> None:
        """Raises `StoreError`."""
        changed = self.changes()
        if changed:
            more = f"; and {len(changed) - MOST_TOLD} more" if len(changed) > MOST_TOLD else ""
            raise StoreError(
                f"{directory}: {'; '.join(changed[:MOST_TOLD])}{more} since the run looked at it first; no trial is"
                " kept of what came after, finished ones are: put back what was there and go on with --resume, or start"
                " anew with another --out"
            )


def _change(path: Path, watched: _Watched) -> str | None:
    try:
        now = file_state(path)
        if now == watched.state:
            return None
        then = watched.state
        touched_alone = now._replace(inode_changed_ns=then.inode_changed_ns) == then
        if touched_alone and sha256_of_file(path) == watched.sha256:
            watched.state = now  # a mode, or a backup's hard link
            return None
    except OSError as error:
        return f"can no longer be read ({error.strerror})"
    if (now.device, now.inode) != (then.device, then.inode):
        return "was replaced by another file"
    if now.n_bytes != then.n_bytes:
        return f"was written to ({then.n_bytes} -> {now.n_bytes} bytes)"
    return "was written to"
