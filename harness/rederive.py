"""What `joulebench report --rederive` says: figures that came out otherwise than when the run was made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from results.derivation import is_priced_by
from results.records import MODEL_PREFIX
from results.runs import SHA256, SHOWN_DIGITS
from results.units import number_of, signed

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from devices.models.sheet import Sheet
    from harness.sheets import SheetNow
    from results.rederivation import Parts, Rederived
    from results.runs import Input, RunData
    from results.trials import Trial

MOST_TOLD = 40
"""Changes, and trials without traces, that a terminal gets."""


def rederived_run(run: RunData, given: Mapping[str, Path] | None = None) -> Rederived:
    """Modelled devices at the prices that their sheets have now; the run says so where they are others. given: sheets
    by device, in the place of its own."""
    from devices.base import DeviceError
    from devices.models.operations import operations_of
    from devices.models.priced_by import pricing_digest
    from devices.models.repricing import repriced
    from harness.sheets import sheets_now
    from results.derivation import PricedBy
    from results.rederivation import Again, rederived
    from results.trace_files import TraceFileError

    device_of = {cell.cell_id: cell.device for cell in run.cells}
    now = sheets_now(run, given)
    loaded: dict[str, Sheet] = {}

    def priced(trial: Trial, parts: Parts) -> Again:
        device = device_of[trial.cell_id]
        if not device.startswith(MODEL_PREFIX) or operations_of(parts) is None:
            return Again(trial, parts)
        if device not in now:
            raise TraceFileError("its operations cannot be priced: its sheet is no longer here")
        try:
            if device not in loaded:
                loaded[device] = now[device].load()
            again = repriced(trial, parts, loaded[device])
        except DeviceError as error:
            raise TraceFileError(f"its operations cannot be priced: {error}") from error
        return Again(*again, PricedBy(pricing_digest(), now[device].now_sha256))

    found = rederived(run, priced)
    return found._replace(run=_with_sheets_of_now(found.run, _others(now)))


def as_it_ran(run: RunData) -> RunData:
    """The run, which says where another sheet is here now than the one that priced it."""
    from harness.sheets import sheets_now

    remarks = (
        f"{one.device}: its sheet here (sha256 {_short(one.now_sha256)}) is not the one that priced this run"
        f" (sha256 {_short(one.then_sha256)}); `joulebench report DIR --rederive` prices it by the one here."
        for one in _others(sheets_now(run))
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


def _others(now: Mapping[str, SheetNow]) -> list[SheetNow]:
    """Those that are other files now than when the run was made."""
    return [one for one in now.values() if one.then_sha256 not in (None, one.now_sha256)]


def _with_sheets_of_now(run: RunData, now: Sequence[SheetNow]) -> RunData:
    """Among what decided the numbers, the sheet that priced them now, and the one of then by its own name."""
    others = {one.input_name: one for one in now}
    inputs: list[Input] = []
    for one in run.info.inputs:
        other = others.get(one.name)
        inputs.append(one if other is None else one.model_copy(update={"value": f"{SHA256}{other.now_sha256}"}))
        if other is not None:
            inputs.append(one.model_copy(update={"name": f"{one.name}, when the run was made"}))
    remarks = (
        f"{one.device}: --rederive priced these times and joules by the sheet that is here now (sha256"
        f" {_short(one.now_sha256)}); the run was made with another (sha256 {_short(one.then_sha256)}),"
        " by which `joulebench report DIR` writes them again."
        for one in others.values()
    )
    info = run.info.model_copy(update={"inputs": tuple(inputs)})
    return replace(run, info=info, remarks=(*run.remarks, *remarks))


def _short(sha256: str | None) -> str:
    return (sha256 or "")[:SHOWN_DIGITS]


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
            say(f"and {number_of(len(found.changes) - MOST_TOLD, 'more figure')}")
    of = f"{number_of(found.n_derived, 'trial')} derived again from their raw records"
    changed = f"{found.n_changed} of them changed" if found.n_changed else "nothing changed"
    say(f"{of}: {changed}" if found.n_derived else of)
    for line in found.kept[:MOST_TOLD]:
        say(f"not derived again, its stored figures stay: {line}")
    if len(found.kept) > MOST_TOLD:
        say(f"and {number_of(len(found.kept) - MOST_TOLD, 'more trial')} whose stored figures stay")


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
