"""What is said of a run beside its tables: what trials noted, what changed between them, who disturbed it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from results.cells import CLOCK_LIMITS_CHANGED, CONTENDED, by_device, shared_cpu, usable
from results.clock_limits import rules_seen
from results.rest import POWER_BESIDE
from results.runs import RunData
from results.swept import parts_of
from results.trials import Trial
from results.units import format_share

COUNT = re.compile(r"\b([0-9]+) of ([0-9]+)\b")
"""What a note counts, and of how many."""
ONE_PART = "one part"
"""What a meter's joules are of, where it sees no more."""


def run_notes(run: RunData) -> list[str]:
    """Sentences, each once."""
    said = dict.fromkeys(f"left out: {cell}." for cell in run.info.left_out)
    said |= dict.fromkeys(_absent_baseline(run))
    said |= dict.fromkeys(_of_trials(run))
    said |= dict.fromkeys(_changed_rules(run))
    said |= dict.fromkeys(_changed_parts(run))
    shared = shared_cpu(run.trials)
    if shared is not None:
        marked = sum(CONTENDED in t.marks for t in run.trials)
        left_out = f" ({marked} marked, and in no mean of these: the limit is protocol.max_foreign_cpu_share)"
        said[f"{shared.words()}{left_out if marked else ''}."] = None
    thrown_away = [share for t in run.trials for share in t.contention_shares]
    if thrown_away:
        said[
            f"{len(thrown_away)} window{'s were' if len(thrown_away) > 1 else ' was'} thrown away and taken again:"
            f" other processes took up to {format_share(max(thrown_away))} of the CPU."
        ] = None
    doubted = [t.disagreements[0] for t in run.trials if t.disagreements]
    if doubted:
        said[
            f"in {len(doubted)} of {len(run.trials)} trials two readings of the same joules disagree: {doubted[0]}."
        ] = None
    return list(said)


def _of_trials(run: RunData) -> Iterator[str]:
    """Of trials, by workload; with the arms where not every arm of the workload says so."""
    cell_of = {cell.cell_id: cell for cell in run.cells}
    in_order = dict.fromkeys(cell.engine for cell in run.cells)
    arms_of: defaultdict[str, set[str]] = defaultdict(set)
    saying: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for trial in run.trials:
        cell = cell_of[trial.cell_id]
        arms_of[cell.workload].add(cell.engine)
        for note in trial.notes:
            saying[cell.workload, note].add(cell.engine)
    alike: defaultdict[tuple[str, str, frozenset[str]], list[str]] = defaultdict(list)
    for (workload, note), arms in saying.items():
        alike[workload, COUNT.sub("", note), frozenset(arms)].append(note)
    for (workload, _, own), notes in alike.items():
        whose = "" if own == arms_of[workload] else f"{', '.join(arm for arm in in_order if arm in own)} · "
        yield f"{whose}{workload}: {_in_one(notes)}."


def _in_one(notes: Sequence[str]) -> str:
    """Of notes of several trials that differ in what they count: "6 to 12 of 20 tokens"."""
    counts = zip(*(COUNT.findall(note) for note in notes), strict=True)
    told = iter([" of ".join(map(_range, zip(*one, strict=True))) for one in counts])
    return COUNT.sub(lambda _: next(told), notes[0])


def _range(numbers: Sequence[str]) -> str:
    least, most = min(numbers, key=int), max(numbers, key=int)
    return least if least == most else f"{least} to {most}"


def _absent_baseline(run: RunData) -> Iterator[str]:
    """Of a plan that names as its baseline an arm that went onto no device: another one stands in its place."""
    named = run.info.plan.get("baseline")
    there = {name for cell in run.cells for name in (cell.engine, parts_of(cell.engine).name)}
    if isinstance(named, str) and named not in there:
        yield f"the plan's baseline, {named}, has no cell in this run: arms are told as times another."


def parts_seen(trials: Iterable[Trial]) -> dict[str, list[str]]:
    """By meter: of which parts its joules are, in words, each set of them once. A meter adds up those that it finds as
    it is opened: after a restart some may not be readable. What is computed knows what ran, and recordings no device.
    """
    found: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for trial in trials:
        of_meter: defaultdict[str, set[str]] = defaultdict(set)
        for reading in trial.energy:
            if reading.phase == "all" and reading.method in ("counter", "integrated power"):
                of_meter[reading.meter].add(reading.component.removesuffix(POWER_BESIDE))
        for meter, parts in of_meter.items():
            # A part that is alone is kept as the total.
            named = sorted(parts - {"total"})
            found[meter][", ".join(named) if len(named) > 1 else ONE_PART] = None
    return {meter: list(sets) for meter, sets in found.items()}


def _changed_parts(run: RunData) -> Iterator[str]:
    for device, trials in by_device(run).items():
        for meter, sets in parts_seen(usable(trials)).items():
            if len(sets) > 1:
                yield (
                    f"{device}: joules of {meter} are of other parts in some trials than in others"
                    f" ({'; then '.join(sets)}): their means are of neither, and differences of arms may be of that."
                )


def _changed_rules(run: RunData) -> Iterator[str]:
    """Of devices whose owner set other limits between two trials that count. Those of a series tell it by the minute
    (`results.report.endurance_words`)."""
    for device, trials in by_device(run).items():
        apart = [trial for trial in usable(trials) if trial.endurance is None]
        for rules in rules_seen(state for trial in apart for state in trial.conditions).values():
            if len(rules) > 1:
                yield (
                    f"{device}: {CLOCK_LIMITS_CHANGED} between trials ({', then '.join(rules)}): means are of both, and"
                    " differences of arms may be theirs."
                )
