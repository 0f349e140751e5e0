"""A worker's last finished trial, kept on its machine until the coordinator has it for certain.

A coordinator may be away when a trial ends, and the worker be killed while it sends it. The coordinator asks for such a
trial again, and is given the one that was measured. A device is asked for another trial only once the one before is in
the run, so that one file for each run and device is enough.
"""

from __future__ import annotations

import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from harness.fleet.messages import Answer, MessageError, Task, packed, unpacked

FOLDER = "fleet"
LONGEST_NAME = 200
NEW = ".new"
"""Of a file that is not written to its end."""

log = logging.getLogger(__name__)


class KeptTrial:
    """Of one run on one device."""

    def __init__(self, state_folder: Path, run_id: str, device: str) -> None:
        name = quote(f"{run_id} {device}", safe="")[-LONGEST_NAME:]
        self._folder = state_folder / FOLDER / name

    def keep(self, task: Task, content: bytes) -> None:
        """Its answer, in the place of the one before. A disk that is full costs no trial: it is sent none the less."""
        path = self._path(task.cell_id, task.repeat)
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for before in self._folder.iterdir():
                before.unlink(missing_ok=True)
            new = path.with_suffix(NEW)
            with new.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            new.replace(path)
        except OSError as error:
            with suppress(OSError):
                path.with_suffix(NEW).unlink()  # of a disk that is full
            log.warning("%s cannot be written (%s): a trial is lost if nobody takes it now", path, error.strerror)

    def again(self, task: Task, process_id: str) -> bytes | None:
        """An answer with the trial that is asked for, where it was measured before."""
        path = self._path(task.cell_id, task.repeat)
        try:
            answer, traces = unpacked(Answer, path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, MessageError) as error:
            log.warning("%s cannot be read (%s): the trial is measured again", path, error)
            return None
        if answer.trial is None or (answer.trial.cell_id, answer.trial.repeat) != (task.cell_id, task.repeat):
            return None
        if answer.trial.is_lost:  # that is why it is asked for again
            return None
        return packed(answer.model_copy(update={"lease_id": task.lease_id, "process_id": process_id}), traces)

    def path(self) -> Path | None:
        """Of the file, where there is one."""
        with suppress(OSError):
            return next((path for path in self._folder.iterdir() if path.suffix != NEW), None)
        return None

    def forget(self) -> None:
        """The run has all of its trials."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, cell_id: str, repeat: int) -> Path:
        return self._folder / f"{quote(cell_id, safe='')}-{repeat}.answer"
