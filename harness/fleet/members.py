"""The devices of a fleet as the coordinator sees them: who is there, and whether it may measure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.fleet.messages import Description
from harness.fleet.state import DeviceIs
from harness.inputs import changes, told_changes
from harness.opening import check_same_machine
from results.runs import OF_WORKER, SHA256, Input, RunInfo
from results.store import StoreError

AGAIN_S = 10.0
"""After which a worker that was refused is asked again: a phone may be plugged in meanwhile."""


@dataclass
class Member:
    """One device. state: what it is doing, without the trials, which the queue knows."""

    device: str
    state: DeviceIs = "absent"
    description: Description | None = None
    key: str = ""
    """Under which its description is asked for."""
    words: str | None = None
    again_s: float = 0.0
    n_lost: int = 0


class Members:
    """All devices of the plan."""

    def __init__(self, devices: Iterable[str], directory: Path, info: RunInfo | None) -> None:
        """info: of the run that goes on; None of one that is not begun."""
        self._members = {device: Member(device) for device in devices}
        self.strangers: tuple[str, ...] = ()
        """Devices that workers offer, and that the plan does not name."""
        self._directory = directory
        self._info = info

    def __getitem__(self, device: str) -> Member:
        return self._members[device]

    def all(self) -> tuple[Member, ...]:
        return tuple(self._members.values())

    def begin(self, info: RunInfo) -> None:
        """From now on the run has what was described, and nothing else."""
        self._info = info

    def look(self, there: Mapping[str, int], now_s: float) -> list[Member]:
        """Takes in who is there. Returns those that are to be asked for a description."""
        asked = []
        self.strangers = tuple(sorted(device for device in there if device not in self._members))
        for member in self._members.values():
            n = there.get(member.device, 0)
            if n == 0:
                self.forget(member.device, None)
            elif n > 1:
                self.forget(member.device, f"{n} workers offer it; {_one_of_them(member.device)}")
                member.state = "offered twice"
            elif member.state in ("absent", "offered twice") or (member.state == "refused" and now_s >= member.again_s):
                asked.append(member)
        return asked

    def forget(self, device: str, words: str | None) -> None:
        """What was described no longer holds."""
        member = self._members[device]
        member.state, member.description, member.key, member.words = "absent", None, "", words

    def described(self, member: Member, description: Description, now_s: float) -> None:
        """Takes it, or refuses it and says why."""
        reasons = description.refused or tuple(self._unlike(member.device, description))
        member.key = ""
        if reasons:
            self.refuse(member.device, reasons, now_s)
            return
        member.state, member.description, member.words = "idle", description, None

    def refuse(self, device: str, reasons: Iterable[str], now_s: float) -> None:
        member = self._members[device]
        member.state, member.words, member.description = "refused", "; ".join(reasons), None
        member.again_s = now_s + AGAIN_S

    def _unlike(self, device: str, description: Description) -> list[str]:
        """Why its trials would not be of the same run, or would be another device's."""
        units = _units(description)
        for other in self._members.values():
            if other.device != device and other.description is not None and units & _units(other.description):
                return [f"{other.device} and {device} are one phone, reached in two ways; name it once in the plan"]
        if self._info is not None:
            try:
                check_same_machine(self._info, description.environments, self._directory)
            except StoreError as error:
                return [str(error)]
            if not self._info.inputs:
                return []
        now = _named(device, description.inputs)
        names = {i.name for i in now}
        if self._info is not None:
            own = OF_WORKER + device
            found = changes([i for i in self._info.inputs if i.name in names or i.name.endswith(own)], now)
            whose = "the run"
        else:
            now = [i for i in now if i.value.startswith(SHA256)]
            others = {i.name: i.value for i in self.inputs(but=device)}
            found = changes([Input(name=i.name, value=others.get(i.name, i.value)) for i in now], now)
            whose = "the other workers"
        return [f"its inputs are not those of {whose} ({told_changes(found)}); give it the same files"] if found else []

    def inputs(self, but: str | None = None) -> tuple[Input, ...]:
        """Of all that was described: files once, settings of each worker. but: a device whose worker is left out."""
        found: dict[str, str] = {}
        for member in self._members.values():
            if member.description is not None and member.device != but:
                found |= {i.name: i.value for i in _named(member.device, member.description.inputs)}
        return tuple(Input(name=name, value=value) for name, value in found.items())


def _one_of_them(device: str) -> str:
    if device == "host":
        return "a plan knows one computer as host: end all but one, and on the others `joulebench run` the plan"
    return "end all but one"


def _units(description: Description) -> set[str]:
    """Digests of the serial numbers of its phones."""
    return {one.unit for one in description.environments.values() if one.unit is not None}


def _named(device: str, inputs: Iterable[Input]) -> list[Input]:
    """Files are the same on all machines of a fleet; what a setting says is told of each."""
    own = OF_WORKER + device
    return [i if i.value.startswith(SHA256) else Input(name=f"{i.name}{own}", value=i.value) for i in inputs]
