"""What a run rests on besides the settings of its arms: weights, sheets, recordings, data, variables, its protocol.

A file is told by its digest, wherever it lies. An arm of one name and one model stays one line of a history when a file
below it is replaced, so whoever compares two runs says where that was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from results.history.settings import ABSENT, Settings, changed_settings
from results.runs import HARDWARE_SHEET, OF_MODEL, OF_PROFILE, OWN_CODE, SHA256, RunInfo

if TYPE_CHECKING:
    from results.history.points import RunPoint

PROTOCOL: Final = "protocol."
NOT_OF_A_FIGURE: Final = ("repeats", "stop")
"""Of the protocol: how often was measured, which stands with each figure."""
DIGITS: Final = 12


def rests_of(info: RunInfo) -> dict[str, str]:
    """Empty in runs from before it was kept. joulebench's own code is told by its version."""
    if not info.inputs:
        return {}
    found = {one.name: one.value for one in info.inputs if one.name != OWN_CODE}
    protocol = info.plan.get("protocol")
    if isinstance(protocol, Mapping):
        found |= {f"{PROTOCOL}{key}": str(value) for key, value in protocol.items() if key not in NOT_OF_A_FIGURE}
    return found


def changed_rests(first: Mapping[str, str], second: Mapping[str, str], model: str, device: str) -> list[str]:
    """ "model.safetensors of model m sha256 1f0e → sha256 77ab", each, of what an arm of this model and device rests
    on. A file that only lies elsewhere is the same."""
    if not first or not second:
        return []
    one, other = (dict(_of_arm(rests, model, device)) for rests in (first, second))
    moved = {value for value in one.values() if value.startswith(SHA256)} & set(other.values())
    return [
        f"{name} {_told(before)} → {_told(after)}"
        for name in sorted(one.keys() | other.keys())
        if (before := one.get(name)) != (after := other.get(name))
        and not (before in moved and after is None)
        and not (after in moved and before is None)
    ]


def _of_arm(rests: Mapping[str, str], model: str, device: str) -> Iterator[tuple[str, str]]:
    """Without what other models and machines of the run rest on."""
    sources = {name.partition(OF_MODEL)[2] for name in rests if OF_MODEL in name}
    own = {source for source in sources if model == source or model.startswith(f"{source} ")}
    for name, value in rests.items():
        if OF_MODEL in name and own and name.partition(OF_MODEL)[2] not in own:
            continue
        if name.startswith(HARDWARE_SHEET) and name.removeprefix(HARDWARE_SHEET) not in device:
            continue
        if OF_PROFILE in name:
            continue  # its digest is a setting of its arm
        yield name, value


def _told(value: str | None) -> str:
    if value is None:
        return ABSENT
    return f"sha256 {value.removeprefix(SHA256)[:DIGITS]}" if value.startswith(SHA256) else value


class Changed(NamedTuple):
    """arms: as a reader is told of them. before: the last run that had them."""

    arms: tuple[str, ...]
    before: str
    words: str

    @property
    def sentence(self) -> str:
        """ "npumoe is set otherwise than in run007: arithmetic not set → int8"."""
        verb = "is" if len(self.arms) == 1 else "are"
        return f"{', '.join(self.arms)} {verb} set otherwise than in {self.before}: {self.words}"


def otherwise_than_before(runs: Sequence[RunPoint]) -> dict[str, list[Changed]]:
    """By run. runs: the oldest first. Two plans may set arms of one name otherwise, so each is held against itself. Of
    several devices or models an arm is told once where it changed alike, and so are arms that changed alike."""
    last: dict[tuple[str, ...], tuple[str, Settings, Mapping[str, str]]] = {}
    by_run: dict[str, list[Changed]] = {}
    for run in runs:
        found: dict[tuple[str, str], dict[str, None]] = {}
        for own in run.settings:
            key = run.plan, own.arm, own.model, own.device
            before, settings, rests = last.get(key, (run.folder, own.settings, run.rests))
            words = changed_settings(settings, own.settings)
            words += changed_rests(rests, run.rests, own.model, own.device)
            if words:
                found.setdefault((before, ", ".join(words)), {})[own.arm] = None
            last[key] = run.folder, own.settings, run.rests
        if found:
            by_run[run.folder] = [Changed(tuple(arms), before, words) for (before, words), arms in found.items()]
    return by_run
