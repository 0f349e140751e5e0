"""Hardware sheets of plans and of runs: what they are good for, those that users wrote, and which is here now."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from devices.base import DeviceError
from devices.models.sheet import OF_A_USER, Sheet, available_sheets, load_sheet, parse_sheet, sheet_sha256
from harness.device_specs import ModelledSpec
from results.records import MODEL_PREFIX
from results.runs import HARDWARE_SHEET, SHA256, Input, OwnSheet, RunData
from results.store import StoreError

if TYPE_CHECKING:
    from devices.models.sheet import SheetRef
    from harness.plan import Plan


def sheet_purposes(plan: Plan) -> Iterator[tuple[str, str]]:
    """(device, what its sheet is only for) of each modelled device whose sheet does not stand for its machine; devices
    as the cells name them, with what a sweep set."""
    for label, device in {c.cell.device: c.device for c in plan.cells}.items():
        if isinstance(device, ModelledSpec) and (only_for := load_sheet(device.sheet_ref).only_for) is not None:
            yield label, only_for


def unknown_sheet(name: str) -> str | None:
    """What is wrong with a name that is no sheet of ours and no file, with the remedy."""
    if name.endswith(".toml") or name in available_sheets():
        return None
    from harness.problems import nearest

    return f"no hardware sheet has this name; {nearest(name, available_sheets())}; {OF_A_USER}"


def sheet_input(device: ModelledSpec) -> str:
    """What its sheet is called among the inputs."""
    return f"{HARDWARE_SHEET}{device.name.removeprefix(MODEL_PREFIX)}"


def own_sheets(plan: Plan, inputs: Sequence[Input]) -> dict[str, OwnSheet]:
    """Those that users wrote, by device. Raises `StoreError` where a file is no longer the one of the inputs."""
    known = {one.name: one.value.removeprefix(SHA256) for one in inputs}
    found = {}
    for label, device in {cell.cell.device: cell.device for cell in plan.cells}.items():
        if not isinstance(device, ModelledSpec) or not isinstance(path := device.sheet_ref, Path):
            continue
        try:
            content = path.read_bytes()
        except OSError as error:
            raise StoreError(f"{path}: {error.strerror}; it was there when the plan was checked") from error
        if hashlib.sha256(content).hexdigest() != known[sheet_input(device)]:
            raise StoreError(f"{path}: was written to while the run was opened; run it again")
        found[label] = OwnSheet(path=str(path.absolute()), text=content.decode("utf-8-sig"))
    return found


class SheetNow(NamedTuple):
    """What prices a device of a stored run now. input_name: what its sheet is called among the run's inputs."""

    device: str
    input_name: str
    then_sha256: str | None
    now_sha256: str
    ref: SheetRef | None
    """None: the copy that the run keeps."""
    text: str = ""

    def load(self) -> Sheet:
        """Raises `DeviceError`."""
        return parse_sheet(self.text, _name_of(self.input_name)) if self.ref is None else load_sheet(self.ref)


def sheets_now(run: RunData, given: Mapping[str, Path] | None = None) -> dict[str, SheetNow]:
    """By modelled device of the run. given: sheets in the place of some. A user's sheet is the file it was read from,
    where that is still there, else the run's copy. A device whose sheet is no longer here has none."""
    then = {one.name: one.value.removeprefix(SHA256) for one in run.info.inputs}
    found = {}
    for device in dict.fromkeys(cell.device for cell in run.cells if cell.device.startswith(MODEL_PREFIX)):
        own = run.info.own_sheets.get(device)
        # Behind the name of a sheet of joulebench stands what a sweep set.
        whole = device.removeprefix(MODEL_PREFIX)
        name = whole.partition("[")[0] if own is None else Path(own.path).stem
        input_name = f"{HARDWARE_SHEET}{name}"
        here: SheetRef = (given or {}).get(device) or (name if own is None else Path(own.path))
        if (sha256 := _sha256(here)) is not None:
            found[device] = SheetNow(device, input_name, then.get(input_name), sha256, here)
        elif own is not None and (kept := then.get(input_name)) is not None:
            found[device] = SheetNow(device, input_name, kept, kept, None, own.text)
    return found


def given_sheets(run: RunData, assignments: Sequence[str]) -> dict[str, Path]:
    """Of `DEVICE=FILE`, by device. Raises `DeviceError` for one that cannot price."""
    known = list(dict.fromkeys(cell.device for cell in run.cells if cell.device.startswith(MODEL_PREFIX)))
    found = {}
    for assignment in assignments:
        # A swept device has an equals sign in its name.
        device = next((one for one in known if assignment.startswith(f"{one}=")), None)
        if device is None:
            told = ", ".join(known) or "none"
            raise DeviceError(f"--sheet {assignment[:200]}: names no modelled device of the run; it has {told}")
        path = Path(assignment.removeprefix(f"{device}="))
        load_sheet(path)
        found[device] = path
    return found


def _sha256(ref: SheetRef) -> str | None:
    if isinstance(ref, str) and ref not in available_sheets():
        return None
    try:
        return sheet_sha256(ref)
    except (OSError, ValueError):
        return None


def _name_of(input_name: str) -> str:
    return input_name.removeprefix(HARDWARE_SHEET)
