"""What `joulebench report --rederive` says: figures that came out otherwise than when the run was made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.schema import MODEL_PREFIX
from results.units import signed

if TYPE_CHECKING:
    from rich.console import Console

    from results.rederivation import Parts, Rederived
    from results.runs import RunData
    from results.trials import Trial

MOST_TOLD = 40
"""Changes, and trials without traces, that a terminal gets."""


def rederived_run(run: RunData) -> Rederived:
    """Modelled devices at the prices that their sheets have now."""
    from devices.base import DeviceError
    from devices.models.operations import operations_of
    from devices.models.repricing import repriced
    from devices.models.sheet import load_sheet
    from results.rederivation import rederived
    from results.trace_files import TraceFileError

    device_of = {cell.cell_id: cell.device for cell in run.cells}

    def priced(trial: Trial, parts: Parts) -> tuple[Trial, Parts]:
        device = device_of[trial.cell_id]
        if not device.startswith(MODEL_PREFIX) or operations_of(parts) is None:
            return trial, parts
        try:
            return repriced(trial, parts, load_sheet(device.removeprefix(MODEL_PREFIX)))
        except DeviceError as error:
            raise TraceFileError(f"its operations cannot be priced: {error}") from error

    return rederived(run, priced)


def print_rederived(found: Rederived, console: Console) -> None:
    """Cell, metric, stored, now; trials whose stored figures stay."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False)

    if found.changes:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for title in ("cell", "metric"):
            table.add_column(title, overflow="fold")
        for title in ("stored", "now", "change"):
            table.add_column(title, justify="right")
        for change in found.changes[:MOST_TOLD]:
            figures = (_figure(change.stored, change.unit), _figure(change.now, change.unit))
            table.add_row(Text(change.cell), Text(change.metric), *figures, _difference(change.stored, change.now))
        console.print(table)
        if len(found.changes) > MOST_TOLD:
            say(f"and {len(found.changes) - MOST_TOLD} more figures")
    of = f"{found.n_derived} trials derived again from their raw records"
    say(f"{of}: {f'{found.n_changed} of them changed' if found.n_changed else 'nothing changed'}")
    for line in found.kept[:MOST_TOLD]:
        say(f"not derived again, its stored figures stay: {line}")
    if len(found.kept) > MOST_TOLD:
        say(f"and {len(found.kept) - MOST_TOLD} more trials whose stored figures stay")


def as_record(found: Rederived) -> dict[str, Any]:
    """For `--json`: every change, whole."""
    return {
        "derived": found.n_derived,
        "changed": found.n_changed,
        "changes": [change._asdict() for change in found.changes],
        "kept": list(found.kept),
    }


def _figure(value: float | None, unit: str) -> str:
    return "none" if value is None else f"{value:.6g} {unit}"


def _difference(stored: float | None, now: float | None) -> str:
    return "" if not stored or now is None else f"{signed(f'{100 * (now / stored - 1):.3g}')} %"
