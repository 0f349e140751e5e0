"""What `joulebench report --rederive` says: figures that came out otherwise than when the run was made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.device_specs import MODEL_PREFIX
from results.derivation import is_priced_by
from results.runs import HARDWARE_SHEET, SHA256
from results.same_requests import SHOWN_DIGITS
from results.units import signed

if TYPE_CHECKING:
    from rich.console import Console

    from results.rederivation import Parts, Rederived
    from results.runs import Input, RunData
    from results.trials import Trial

MOST_TOLD = 40
"""Changes, and trials without traces, that a terminal gets."""


class OtherSheet(NamedTuple):
    """A hardware sheet that is another file now than when the run was made."""

    device: str
    input_name: str
    then_sha256: str
    now_sha256: str


def rederived_run(run: RunData) -> Rederived:
    """Modelled devices at the prices that their sheets have now; the run says so where they are others."""
    from devices.base import DeviceError
    from devices.models.operations import operations_of
    from devices.models.priced_by import priced_by
    from devices.models.repricing import repriced
    from devices.models.sheet import load_sheet
    from results.rederivation import Again, rederived
    from results.trace_files import TraceFileError

    device_of = {cell.cell_id: cell.device for cell in run.cells}

    def priced(trial: Trial, parts: Parts) -> Again:
        device = device_of[trial.cell_id]
        if not device.startswith(MODEL_PREFIX) or operations_of(parts) is None:
            return Again(trial, parts)
        name = device.removeprefix(MODEL_PREFIX)
        try:
            return Again(*repriced(trial, parts, load_sheet(name)), priced_by(name))
        except DeviceError as error:
            raise TraceFileError(f"its operations cannot be priced: {error}") from error

    found = rederived(run, priced)
    return found._replace(run=_with_sheets_of_now(found.run))


def as_it_ran(run: RunData) -> RunData:
    """The run, which says where another sheet is here now than the one that priced it."""
    remarks = (
        f"{one.device}: its sheet here (sha256 {one.now_sha256[:SHOWN_DIGITS]}) is not the one that priced this run"
        f" (sha256 {one.then_sha256[:SHOWN_DIGITS]}); `joulebench report DIR --rederive` prices it by the one here."
        for one in other_sheets(run)
    )
    return replace(run, remarks=(*run.remarks, *remarks, *_other_code_remarks(run)))


def _other_code_remarks(run: RunData) -> Iterator[str]:
    """Of trials that other code than this priced: a sheet's figures are half of a price."""
    from devices.models.priced_by import pricing_digest

    device_of = {cell.cell_id: cell.device for cell in run.cells}
    words: dict[str, list[bool]] = {}
    for trial in run.trials:
        device = device_of[trial.cell_id]
        if device.startswith(MODEL_PREFIX) and trial.energy:
            words.setdefault(device, []).append(is_priced_by(trial.derived_by, pricing_digest()))
    for device, own in words.items():
        if not all(own):
            yield (
                f"{device}: {own.count(False)} of {len(own)} trials were priced by another version of joulebench;"
                " `joulebench report DIR --rederive` prices them by this one."
            )


def other_sheets(run: RunData) -> list[OtherSheet]:
    """Of the run's modelled devices; a sheet that is no longer here is none."""
    from devices.models.sheet import available_sheets, sheet_sha256

    then = {one.name: one.value.removeprefix(SHA256) for one in run.info.inputs}
    found = []
    for device in dict.fromkeys(cell.device for cell in run.cells if cell.device.startswith(MODEL_PREFIX)):
        name = device.removeprefix(MODEL_PREFIX)
        known = then.get(f"{HARDWARE_SHEET}{name}")
        now = sheet_sha256(name) if name in available_sheets() else known
        if known is not None and now is not None and known != now:
            found.append(OtherSheet(device, f"{HARDWARE_SHEET}{name}", known, now))
    return found


def _with_sheets_of_now(run: RunData) -> RunData:
    """Among what decided the numbers, the sheet that priced them now, and the one of then by its own name."""
    others = {one.input_name: one for one in other_sheets(run)}
    inputs: list[Input] = []
    for one in run.info.inputs:
        other = others.get(one.name)
        inputs.append(one if other is None else one.model_copy(update={"value": f"{SHA256}{other.now_sha256}"}))
        if other is not None:
            inputs.append(one.model_copy(update={"name": f"{one.name}, when the run was made"}))
    remarks = (
        f"{one.device}: --rederive priced these times and joules by the sheet that is here now (sha256"
        f" {one.now_sha256[:SHOWN_DIGITS]}); the run was made with another (sha256 {one.then_sha256[:SHOWN_DIGITS]}),"
        " by which `joulebench report DIR` writes them again."
        for one in others.values()
    )
    info = run.info.model_copy(update={"inputs": tuple(inputs)})
    return replace(run, info=info, remarks=(*run.remarks, *remarks))


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
    changed = f"{found.n_changed} of them changed" if found.n_changed else "nothing changed"
    say(f"{of}: {changed}" if found.n_derived else of)
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
