"""The folder that a command runs a plan into: which one, whether a run can begin or go on there, what is kept in it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from harness.terminal import EXIT_BAD_PLAN, fail, fail_store

if TYPE_CHECKING:
    from harness.plan import Plan

RESUMABLE = "finished {}s are kept, go on with --resume"
"""What an interrupt leaves of a run that began."""


def folder_of(out: Path | None, plan: Plan) -> Path:
    return out or Path("runs") / plan.name


def refuse_folder(out: Path | None, resume: bool, plan: Plan) -> None:
    """A folder in which no run can begin, or go on: before models are read, which may take minutes."""
    from harness.opening import check_folder
    from results.store import StoreError

    try:
        check_folder(folder_of(out, plan), resume)
    except StoreError as error:
        fail_store(error)


def refuse_no_path(out: Path | None) -> None:
    """Before a plan is checked, and not after."""
    try:
        _ = out is not None and out.exists()
    except OSError as error:
        fail(f"--out {str(out)[:80]}: no folder can be there ({error.strerror}); name another", EXIT_BAD_PLAN)


def kept_in(directory: Path | None, of: str = "trial") -> str:
    """What an interrupt leaves of a run."""
    from results.store import Store

    if directory is None or not Store.holds_run(directory):
        return f"no {of} was begun"
    return RESUMABLE.format(of)
