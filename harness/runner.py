"""Runs the matrix: order, repeats, retries, resume. A finished trial is in the store before the next one starts."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple
from typing import Protocol as TypingProtocol

from harness.attempts import Attempts, TrialProgress
from harness.matrix import CellPlan
from harness.plan import Plan
from harness.run_parts import RunParts
from harness.schema import MAX_REPEATS
from harness.session import Traces
from harness.stopping import Endurance, StoppingRule, lost_and_needed, rule_of_cell, standing
from results.cells import CLOCK_LIMITS_CHANGED, CONTENDED, THROTTLED
from results.requests import requests_sha256, whole_requests
from results.store import Store, StoreError
from results.trials import EnduranceRound, Trial
from results.units import format_share


class Progress(TrialProgress, TypingProtocol):
    """Told what happens; the command line shows it."""

    def begin(self, n_trials: int, n_done: int) -> None: ...
    def trial_finished(self, cell: str, trial: Trial) -> None: ...
    def cell_finished(self, cell: str, n_trials_left_out: int) -> None: ...
    def trials_added(self, n: int) -> None: ...
    def warned(self, line: str) -> None: ...


class RunOutcome(NamedTuple):
    """n_marked: of those that are ok, how many are in no mean of times and joules, and `marks` why. n_without_room:
    those that came to "N.S.", "oom", "not supported" or "out of memory", which is a result."""

    n_ok: int
    n_failed: int
    n_marked: int = 0
    marks: tuple[str, ...] = ()
    n_without_room: int = 0
    n_lost: int = 0
    """Of those that failed: that `--resume` measures again."""
    n_spare: int = 0
    """Of those that failed: that a lost device took, and that the stopping rule does not need."""


EARLY_TRIALS = 2
"""After so many of which none can be used a person is told."""


class Runner:
    """One pass over the plan's matrix into one store."""

    def __init__(self, plan: Plan, store: Store, run_parts: RunParts, progress: Progress) -> None:
        self._plan = plan
        self._store = store
        self._parts = run_parts
        self._progress = progress
        self._trials: dict[str, list[Trial]] = defaultdict(list)
        for trial in store.trials():
            self._trials[trial.cell_id].append(trial)
        self._attempts = Attempts(plan.protocol, run_parts, progress, store.samples())
        self._stored_samples = set(self._attempts.samples)
        self._is_warned = False
        self._sitting = store.next_sitting()

    def run(self) -> RunOutcome:
        """Runs what is missing. KeyboardInterrupt passes through: finished trials are in the store by then."""
        self.check()
        to_come = {c.cell.cell_id: self._to_come(c) for c in self._plan.cells}
        done = sum(len(standing(self._trials[c.cell.cell_id])) for c in self._plan.cells)
        n_trials = done + sum(map(len, to_come.values()))
        self._store.note_unfinished(n_trials)
        self._progress.begin(n_trials, done)
        for cell_plan in self._plan.cells:
            if isinstance(rule := rule_of(self._plan, cell_plan), Endurance):
                self._run_series(cell_plan, rule)
        for cell_plan, repeat in trial_order(self._plan):
            rest = to_come[cell_plan.cell.cell_id]
            if repeat not in rest:
                continue
            self._warn_of_neighbours()
            self._run_one(cell_plan, repeat)
            rest.remove(repeat)
            if rest and self._is_enough(cell_plan):
                self._progress.cell_finished(cell_plan.cell.label, len(rest))
                rest.clear()
        self._store.note_unfinished(None)
        return run_outcome(self._plan, [t for own in self._trials.values() for t in own])

    def _to_come(self, cell_plan: CellPlan) -> set[int]:
        """Repeats that the cell may still ask for. Those that a device took from an earlier sitting are among them."""
        if isinstance(rule := rule_of(self._plan, cell_plan), Endurance) or self._is_enough(cell_plan):
            return set()
        there = {trial.repeat for trial in standing(self._trials[cell_plan.cell.cell_id])}
        return set(range(rule.max_repeats)) - there

    def _is_enough(self, cell_plan: CellPlan) -> bool:
        return rule_of(self._plan, cell_plan).enough(standing(self._trials[cell_plan.cell.cell_id]))

    def _run_series(self, cell_plan: CellPlan, rule: Endurance) -> None:
        """Rounds without a pause, until something says stop. Those of a series that was broken off are kept; the device
        has cooled since, so that nothing is joined to them, and a new series begins."""
        have = self._trials[cell_plan.cell.cell_id]
        if rule.enough(have):
            return
        series = 1 + max((t.endurance.series for t in have if t.endurance is not None), default=-1)
        begun_s: float | None = None
        first = self._plan.protocol.model_copy(update={"idle_s": 0.0, "contention_retries": 0})
        later = first.model_copy(update={"warmup": 0})
        ended_by = None
        while ended_by is None:
            self._progress.trials_added(1)
            self._refuse_changed_inputs()
            repeat = 1 + max((trial.repeat for trial in have), default=-1)
            protocol = first if begun_s is None else later
            trial, traces = self._attempts.trial(cell_plan, repeat, protocol, gated=begun_s is None)
            begun_s = begun_s if begun_s is not None else trial.window_start_s or 0.0
            ended_by = rule.why_ended(trial, begun_s, cell_plan.device.is_phone)
            if ended_by is None and repeat + 1 >= MAX_REPEATS:
                ended_by = f"rounds: {MAX_REPEATS}, the most; make them longer"
            # That it slows down is what is asked here, and taints nothing.
            marks = tuple(mark for mark in trial.marks if mark not in (THROTTLED, CLOCK_LIMITS_CHANGED))
            place = EnduranceRound(series=series, ended_by=ended_by)
            self._keep(cell_plan, trial.model_copy(update={"endurance": place, "marks": marks}), traces)
        self._cool_down(cell_plan, have[-1])

    def _warn_of_neighbours(self) -> None:
        """Once, while trials are to come: so far the run has come to nothing, and may end so."""
        line = None
        if not self._is_warned:
            trials = [t for own in self._trials.values() for t in own]
            line = no_figure_so_far(trials, self._plan.protocol.max_foreign_cpu_share)
        if line is not None:
            self._is_warned = True
            self._progress.warned(line)

    def check(self) -> None:
        """That what is asked is what the finished trials were asked. Raises `StoreError`."""
        self._check_requests()
        self._check_samples()

    def trials_of(self, cell_id: str) -> tuple[Trial, ...]:
        """Those that are finished, by their repeat."""
        return tuple(sorted(self._trials[cell_id], key=lambda trial: trial.repeat))

    def measure(self, cell_plan: CellPlan) -> Trial:
        """One more trial of a cell, for whoever chooses the order: kept when this returns."""
        have = self._trials[cell_plan.cell.cell_id]
        self._warn_of_neighbours()
        self._run_one(cell_plan, 1 + max((trial.repeat for trial in have), default=-1))
        return have[-1]

    def _check_requests(self) -> None:
        """Repeats of a cell ask what its finished trials were asked. Raises `StoreError` where data has changed."""
        for cell_plan in self._plan.cells:
            trials = self._trials.get(cell_plan.cell.cell_id, ())
            then = next((t for t in trials if t.status == "ok" and t.requests_sha256), None)
            if then is None:
                continue
            now = self._parts.requests(cell_plan)
            asked = [c.request_id for c in then.completions] == [r.request_id for r in now]
            if asked and any(r.follows for r in now):
                end_token_ids = self._parts.facts(cell_plan.model.source).tokenizer.eos_token_ids
                now = whole_requests(now, then.completions, end_token_ids)
            if not asked or requests_sha256(now) != then.requests_sha256:
                raise StoreError(
                    f"{self._store.directory}: the finished trials of {cell_plan.cell.label} were asked other requests "
                    f"(sha256 {str(then.requests_sha256)[:12]}) than this plan asks now; resume with the data of then, "
                    "or start anew with another --out"
                )

    def _check_samples(self) -> None:
        """The right answers are those of then: they may change where the questions do not. Raises `StoreError`."""
        asked = {(c.cell.workload, c.cell.model): c for c in self._plan.cells}
        for key in asked.keys() & self._stored_samples:
            now, then = self._parts.samples(asked[key]), self._attempts.samples[key]
            other = [n.sample_id for n, t in zip_longest(now, then) if n != t and n is not None]
            if now != then:
                raise StoreError(
                    f"{self._store.directory}: {len(other)} of {len(then)} samples of {key[0]} ({', '.join(other[:3])})"
                    " have another text or right answer than when the run began; resume with the data of then, or start"
                    " anew with another --out"
                )

    def _run_one(self, cell_plan: CellPlan, repeat: int) -> None:
        self._refuse_changed_inputs()
        trial, traces = self._attempts.trial(cell_plan, repeat)
        have = self._trials[cell_plan.cell.cell_id]
        have[:] = [before for before in have if before.repeat != repeat]  # a lost one, whose place this takes
        self._keep(cell_plan, trial, traces)
        self._cool_down(cell_plan, trial)

    def _keep(self, cell_plan: CellPlan, trial: Trial, traces: Traces) -> None:
        self._refuse_changed_inputs()
        samples = self._attempts.samples
        for workload, model in samples.keys() - self._stored_samples:
            self._store.add_samples(workload, model, samples[workload, model])
        self._stored_samples = set(samples)
        trial = trial.model_copy(update={"sitting": self._sitting})
        self._store.add_trial(trial, traces)
        self._trials[cell_plan.cell.cell_id].append(trial)
        self._progress.trial_finished(cell_plan.cell.label, trial)

    def _cool_down(self, cell_plan: CellPlan, trial: Trial) -> None:
        if trial.status == "ok":
            self._attempts.cool_down(cell_plan)

    def _refuse_changed_inputs(self) -> None:
        """Before a trial, and before it is kept: its arm may have loaded, or mapped, what is no longer what it was."""
        watch = self._parts.watch
        watch.add_read_later(self._parts.data_files)
        watch.refuse_changes(self._store.directory)


def outcome_of(trials: Sequence[Trial]) -> RunOutcome:
    """What all trials of a run came to."""
    ok = [t for t in trials if t.status == "ok"]
    marks = tuple(dict.fromkeys(mark for t in ok for mark in t.marks))
    n_failed = sum(t.has_failed for t in trials)
    n_without_room = len(trials) - len(ok) - n_failed
    return RunOutcome(len(ok), n_failed, sum(bool(t.marks) for t in ok), marks, n_without_room)


def run_outcome(plan: Plan, trials: Sequence[Trial]) -> RunOutcome:
    """With how many of those that a lost device took a resume measures again: not where the others of the cell
    suffice."""
    own: dict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        own[trial.cell_id].append(trial)
    n_lost = sum(lost_and_needed(rule_of(plan, c), own[c.cell.cell_id]) for c in plan.cells)
    return outcome_of(trials)._replace(n_lost=n_lost, n_spare=sum(t.is_lost for t in trials) - n_lost)


def no_figure_so_far(trials: Sequence[Trial], max_foreign_cpu_share: float) -> str | None:
    """What to do where other processes disturbed every trial that came to figures; None where one can be used, or few
    are there."""
    outcome = outcome_of(trials)
    if outcome.n_ok < EARLY_TRIALS or outcome.n_marked < outcome.n_ok or outcome.marks != (CONTENDED,):
        return None
    most = max(t.foreign_cpu_share or 0.0 for t in trials)
    return (
        f"no figure can be used so far: in all {outcome.n_ok} trials {took_more(max_foreign_cpu_share)} (up to"
        f" {format_share(most)}). End them now; or stop this run (Ctrl-C), raise that key, and begin anew with"
        " another --out"
    )


def took_more(max_foreign_cpu_share: float) -> str:
    """What contended trials have in common, with the key that decides it."""
    return f"other processes took more than protocol.max_foreign_cpu_share = {max_foreign_cpu_share:g} of the CPU"


def are_contended(trials: Sequence[Trial]) -> bool:
    """Whether other processes alone are why none of these can be used."""
    return bool(trials) and all(trial.marks == (CONTENDED,) for trial in trials)


def rule_of(plan: Plan, cell_plan: CellPlan) -> StoppingRule:
    return rule_of_cell(plan.protocol, cell_plan.is_modelled)


def trial_order(plan: Plan) -> Iterator[tuple[CellPlan, int]]:
    """Every (cell, repeat) that the plan may ask for, in the protocol's order."""
    rounds = max(rule_of(plan, c).max_repeats for c in plan.cells)
    shuffler = random.Random(plan.protocol.seed)
    if plan.protocol.order == "sequential":
        for cell_plan in plan.cells:
            for repeat in range(rule_of(plan, cell_plan).max_repeats):
                yield cell_plan, repeat
        return
    for repeat in range(rounds):
        cells = [c for c in plan.cells if repeat < rule_of(plan, c).max_repeats]
        if plan.protocol.order == "shuffled":
            shuffler.shuffle(cells)
        elif repeat % 2:
            cells.reverse()
        for cell_plan in cells:
            yield cell_plan, repeat
