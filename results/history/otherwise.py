"""Where arms of a history were set otherwise than in the run before, and where its runs rest on other things."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from results.history.points import RunPoint
from results.history.rests import changed_rests, known_rests
from results.history.settings import Settings, changed_settings


class Changed(NamedTuple):
    """arms: as a reader is told of them; none where it is what the run rests on. before: the last run that had them."""

    arms: tuple[str, ...]
    before: str
    words: str

    @property
    def sentence(self) -> str:
        """ "npumoe is set otherwise than in run007: arithmetic not set → int8"."""
        if not self.arms:
            return f"the run rests on other files, variables, clock rules or protocol than {self.before}: {self.words}"
        verb = "is" if len(self.arms) == 1 else "are"
        return f"{', '.join(self.arms)} {verb} set otherwise than in {self.before}: {self.words}"


def otherwise_than_before(runs: Sequence[RunPoint]) -> dict[str, list[Changed]]:
    """By run. runs: the oldest first. Two plans may set arms of one name otherwise, so each is held against itself. Of
    several devices or models an arm is told once where it changed alike, and so are arms that changed alike. What a
    run rests on is told of the run, once: that an arm uses a variable or the data of a workload nothing says. Where
    arms were last measured in different runs it is told against the latest of them."""
    place = {run.folder: n for n, run in enumerate(runs)}
    last: dict[tuple[str, ...], tuple[str, Settings]] = {}
    last_rests: dict[tuple[str, ...], tuple[str, Mapping[str, str]]] = {}
    by_run: dict[str, list[Changed]] = {}
    for run in runs:
        found: dict[tuple[str, str], dict[str, None]] = {}
        rests: dict[str, str] = {}
        for own in run.settings:
            key = run.plan, own.arm, own.model, own.device
            before, settings = last.get(key, (run.folder, own.settings))
            if words := changed_settings(settings, own.settings):
                found.setdefault((before, ", ".join(words)), {})[own.arm] = None
            last[key] = run.folder, own.settings
            if not run.rests:
                continue  # from before it was kept: the next is held against the last that has it
            before, rested = last_rests.get(key, (run.folder, run.rests))
            for word in changed_rests(rested, run.rests, own.model, own.device):
                rests[word] = max(before, rests.get(word, before), key=place.__getitem__)
            last_rests[key] = run.folder, known_rests(rested, run.rests)
        told = [Changed(tuple(arms), before, words) for (before, words), arms in found.items()]
        for before in dict.fromkeys(rests.values()):
            told.append(Changed((), before, ", ".join(word for word, latest in rests.items() if latest == before)))
        if told:
            by_run[run.folder] = told
    return by_run
