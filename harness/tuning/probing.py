"""Probes of a tuning session: a probe is a trial of the run's own machinery, kept in the session's store.

A search asks for an arm; the nth probe of an arm is its nth trial that may be used. So a session that was killed goes
on by asking again: what is in the store is answered from there, and the search, which looks at nothing else, walks the
same way. Where prefill and decoding are searched apart, one probe answers both, for a request has both phases.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from harness.matrix import CellPlan
from harness.runner import are_contended, took_more
from harness.tuning.race import Ask, Failed, Reading
from results.cells import CORES_NOT_KEPT, WRONG_ANSWERS, mark_words, usable
from results.metrics import busy_s, tokens_of
from results.records import EnergyReading, Method, Phase
from results.trials import Trial

MOST_IN_VAIN = 3
"""Probes of one arm in a row that cannot be used before the session is broken off, or the arm is left out."""
OF_THE_ARM = {WRONG_ANSWERS, CORES_NOT_KEPT}
"""Marks of which the arm is the cause, and not what happened on the device."""

Arm = TypeVar("Arm", bound=Hashable)
Asked = TypeVar("Asked", bound=Hashable, contravariant=True)
Result = TypeVar("Result")


LONGER_OR_QUIET = "ask for longer probes (--prompt, --decode), or end what else keeps the machine busy"
PUT_RIGHT = "put that right, and go on with --resume"


class SessionBrokenOffError(Exception):
    """The device or its surroundings do not let it be measured now. Nothing is lost."""


def contended_remedy(max_foreign_cpu_share: float) -> str:
    """The key belongs to the session's plan, so that with another value it is another session."""
    return (
        f"{took_more(max_foreign_cpu_share)}: end them, and go on with --resume; or accept that they disturb times and"
        " joules, raise that key (--set protocol.max_foreign_cpu_share=...), and begin anew with another --out"
    )


class Probe(NamedTuple):
    """What a phase of a probe came to. joules: as the meter has them, in its unit; None with the reason."""

    tokens: int
    seconds: float
    joules: float | None
    method: Method | None
    why_no_joules: str | None = None

    @property
    def reading(self) -> Reading:
        power = None if self.joules is None else self.joules / self.seconds
        return Reading(self.tokens / self.seconds, power)


Probed = Mapping[Phase, Probe]


class Prober(Protocol[Asked]):
    """Makes probes, or finds those that were made."""

    def probe(self, arm: Asked, nth: int) -> Probed | Failed:
        """The nth one of an arm, from 1. Raises `SessionBrokenOffError`."""
        ...

    def has(self, arm: Asked, nth: int) -> bool:
        """Whether it was made already."""
        ...


class Measures(Protocol):
    """What takes trials: `harness.runner.Runner`."""

    def trials_of(self, cell_id: str) -> Sequence[Trial]: ...
    def measure(self, cell_plan: CellPlan) -> Trial: ...


@dataclass
class TrialProber(Generic[Arm]):
    """Probes that are trials. An arm has a cell for each workload; its probe is one trial of each."""

    measures: Measures
    cells: Mapping[Arm, Sequence[CellPlan]]
    phases: Sequence[Phase]
    needs_joules: bool = True
    """A trial without joules of a phase cannot be used: a probe too short for its meter, or a source that stopped."""
    max_foreign_cpu_share: float = 1.0
    """Of the plan's protocol: a probe in which others took more is marked."""
    limit: Callable[[Sequence[Sequence[Trial]]], str | None] | None = None
    """Why an arm is kept out, by its first trial of each workload; None: it may stay."""
    heat_limit: Callable[[Sequence[Trial]], str | None] | None = None
    """The same at each probe: a device gets hotter."""
    kept_out: dict[Arm, str | None] = field(default_factory=dict)

    def has(self, arm: Arm, nth: int) -> bool:
        return all(self._is_there(cell_plan, nth) for cell_plan in self.cells[arm])

    def probe(self, arm: Arm, nth: int) -> Probed | Failed:
        trials = []
        for cell_plan in self.cells[arm]:
            found = self._trial(cell_plan, nth)
            if isinstance(found, Failed):
                return found
            trials.append(found)
        if self.limit is not None and arm not in self.kept_out:
            self.kept_out[arm] = self.limit([[trial] for trial in trials])
        if self.heat_limit is not None and self.kept_out.get(arm) is None:
            self.kept_out[arm] = self.heat_limit(trials)
        reason = self.kept_out.get(arm)
        if reason is not None:
            return Failed(f"kept out: {reason}")
        return {phase: probe_of(trials, phase) for phase in self.phases}

    def _is_there(self, cell_plan: CellPlan, nth: int) -> bool:
        trials = self.measures.trials_of(cell_plan.cell.cell_id)
        nth = 1 if cell_plan.is_modelled else nth
        return len(self._usable(trials)) >= nth or _own_failure(trials) is not None

    def _trial(self, cell_plan: CellPlan, nth: int) -> Trial | Failed:
        """The nth usable trial of a cell; others are measured again, for a few times. Of a modelled device every trial
        is the first one again."""
        cell_id = cell_plan.cell.cell_id
        if cell_plan.is_modelled:
            nth = 1
        in_vain: list[Trial] = []
        while True:
            trials = self.measures.trials_of(cell_id)
            found = self._usable(trials)
            # First, for a session that goes on asks again for what came before a failure.
            if len(found) >= nth:
                return found[nth - 1]
            failure = _own_failure(trials)
            if failure is not None:
                return failure
            if len(in_vain) >= MOST_IN_VAIN:
                remedy = contended_remedy(self.max_foreign_cpu_share) if are_contended(in_vain) else PUT_RIGHT
                raise SessionBrokenOffError(
                    f"{cell_plan.cell.label}: {len(in_vain)} probes in a row cannot be used"
                    f" ({self._why_not(in_vain[-1])}); {remedy}"
                )
            trial = self.measures.measure(cell_plan)
            if trial.failure is not None and trial.failure.by_device:
                raise SessionBrokenOffError(f"{trial.failure.error}; {PUT_RIGHT}")
            if self._why_not(trial) is not None:
                in_vain.append(trial)

    def _why_not(self, trial: Trial) -> str | None:
        return mark_words(trial) if trial.marks else self._lacks(trial)

    def _usable(self, trials: Sequence[Trial]) -> list[Trial]:
        return [trial for trial in usable(trials) if self._lacks(trial) is None]

    def _lacks(self, trial: Trial) -> str | None:
        """Why a trial has no joules that are needed."""
        if not self.needs_joules or trial.failure is not None:
            return None
        asked = [phase for phase in self.phases if tokens_of(trial, phase)]
        reasons = (probe_of([trial], phase).why_no_joules for phase in asked)
        return next(
            (f"no joules: {why}; {LONGER_OR_QUIET}" for why in reasons if why is not None),
            None,
        )


def _own_failure(trials: Sequence[Trial]) -> Failed | None:
    """Why an arm cannot be probed (any more). What was the device's fault says nothing of the arm."""
    own = (t.failure for t in trials if t.failure is not None and not t.failure.by_device)
    failed = next((Failed(failure.error) for failure in own), None)
    if failed is not None:
        return failed
    last = trials[-MOST_IN_VAIN:]
    if len(last) == MOST_IN_VAIN and all(OF_THE_ARM & set(trial.marks) for trial in last):
        return Failed(mark_words(last[-1]))
    return None


def probe_of(trials: Sequence[Trial], phase: Phase) -> Probe:
    """Tokens, seconds and joules of one phase over the workloads of an arm that have it: choices by log-likelihood
    decode nothing. Raises `SessionBrokenOffError` where none has: no probe of any arm would have."""
    own = [trial for trial in trials if tokens_of(trial, phase)]
    tokens = sum(tokens_of(trial, phase) for trial in own)
    seconds = sum(busy_s(trial, phase) for trial in own)
    if tokens <= 0 or seconds <= 0:
        raise SessionBrokenOffError(f"the workload has no {phase} tokens to be timed; take one that has some")
    readings = [_reading(trial, phase) for trial in own]
    method = next((r.method for r in readings if r is not None), None)
    amounts = [None if r is None else r.gauge_units if r.method == "relative gauge" else r.energy_j for r in readings]
    known = [amount for amount in amounts if amount is not None]
    if len(known) == len(own):
        return Probe(tokens, seconds, sum(known), method)
    lacking = next(r for r, amount in zip(readings, amounts, strict=True) if amount is None)
    why = "no meter was read" if lacking is None else lacking.reason or f"{lacking.meter} gave no energy"
    return Probe(tokens, seconds, None, method, why)


def _reading(trial: Trial, phase: Phase) -> EnergyReading | None:
    """Of the meter that comes first: always the same one, whatever another reads."""
    return next((r for r in trial.energy if r.component == "total" and r.phase == phase), None)


Search = Generator[Ask[Arm], Reading | Failed, Result]


def walk(
    searches: Mapping[Phase, Search[Arm, Result]],
    prober: Prober[Arm],
    told: Callable[[Phase, Ask[Arm], int, Probe | Failed], None],
) -> dict[Phase, Result]:
    """Drives searches to their ends, in turns. Each counts its own probes, and shares those that another has made.

    told: of each answer, with the number of the arm's probe. Raises `SessionBrokenOffError`.
    """
    outcomes: dict[Phase, Result] = {}
    asks: dict[Phase, Ask[Arm]] = {}
    counts: dict[tuple[Phase, Arm], int] = {}

    def step(phase: Phase, answer: Reading | Failed | None) -> None:
        search = searches[phase]
        try:
            asks[phase] = next(search) if answer is None else search.send(answer)
        except StopIteration as end:
            asks.pop(phase, None)
            outcomes[phase] = end.value

    for phase in searches:
        step(phase, None)
    while asks:
        for phase in _turns(asks, counts, prober):
            ask = asks[phase]
            nth = counts.get((phase, ask.arm), 0) + 1
            found = prober.probe(ask.arm, nth)
            counts[phase, ask.arm] = nth
            answer = found if isinstance(found, Failed) else found[phase]
            told(phase, ask, nth, answer)
            step(phase, answer if isinstance(answer, Failed) else answer.reading)
    return outcomes


def _turns(
    asks: Mapping[Phase, Ask[Arm]], counts: Mapping[tuple[Phase, Arm], int], prober: Prober[Arm]
) -> Iterator[Phase]:
    """Those whose next probe is there already; else the one that is behind. The others have their turn after it."""
    there = [p for p, ask in asks.items() if prober.has(ask.arm, counts.get((p, ask.arm), 0) + 1)]
    if there:
        yield from there
        return
    made = {phase: sum(n for (own, _), n in counts.items() if own == phase) for phase in asks}
    yield min(asks, key=lambda phase: made[phase])
