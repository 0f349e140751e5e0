"""A tuning session: the searches over a space, walked with probes that are trials of an ordinary run folder.

The folder is the run's: its store is the journal, one committed trial a probe, with what decides the figures (machine,
software, files, plan) beside it. A session that was killed goes on from it, and one whose surroundings have changed is
refused as any run is. After the searches the chosen arm is measured beside the planned one, in a folder of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal

from pydantic import Field

from devices.base import DeviceError
from devices.device_lock import DeviceLock
from harness.opening import DeviceNotReadyError, open_run
from harness.plan import Plan
from harness.run_parts import RunParts
from harness.runner import Progress, Runner
from harness.state import state_folder
from harness.tuning.aecs import PRESETS
from harness.tuning.probing import Arm, Probe, Search, SessionBrokenOffError, TrialProber, walk
from harness.tuning.race import AllFailedError, Ask, Failed, Objective, RaceResult
from harness.tuning.space import Space
from results.cells import usable
from results.records import Method, Phase, Record
from results.run_notes import run_notes
from results.store import Store, StoreError
from results.trials import Trial
from results.units import format_share

OPTIONS_KEY = "tune"
"""Beside the plan's own keys, in the run that a session is."""
GAUGE_UNIT = "gauge unit/token"
NOT_SCORED = (
    "--accuracy-floor: no sample of the workload is right or wrong; leave the floor out, or ask a workload that is"
    " scored so"
)

log = logging.getLogger(__name__)


class TuneOptions(Record):
    """What a session is asked for. Part of its identity: a resume with others is refused."""

    objective: Objective = "energy"
    slowdown: float = 0.08
    search: str = "exhaustive"
    """ "tree" of source 002, of cores; a preset of `aecs`; "exhaustive"; "suggested" by Optuna."""
    constants: dict[str, Any] = Field(default_factory=dict)
    """Of a search of cores, all of them."""
    is_even: bool = False
    """Every candidate in every round to the end."""
    phases: tuple[Phase, ...] = ("prefill", "decode")
    seed: int = 0
    most_probes: int = 600
    """Of each search."""
    accuracy_floor: float | None = None
    """The most that the accuracy may fall, as a share of all answers."""
    weights_limit_bytes: int | None = None
    temperature_limit_c: float | None = None

    @property
    def alpha(self) -> float:
        """The heuristic's share of the energy that candidates are judged by."""
        return float(self.constants.get("alpha", 0.0)) if self.objective != "latency" else 0.0

    @property
    def is_once(self) -> bool:
        """Whether each candidate is probed once, as source 002 does."""
        return self.search in PRESETS

    @property
    def needs_joules(self) -> bool:
        return self.objective != "latency" and self.alpha < 1.0


@dataclass(frozen=True)
class SearchProbe(Generic[Arm]):
    """What one probe of a phase found, as its search asked for it. nth: of its arm."""

    ask: Ask[Arm]
    nth: int
    found: Probe | Failed


@dataclass(frozen=True)
class PhaseFound(Generic[Arm]):
    """One search's end."""

    phase: Phase
    result: RaceResult[Arm]
    probes: tuple[SearchProbe[Arm], ...]

    @property
    def method(self) -> Method | None:
        """Of the joules. None: no meter."""
        return next((p.found.method for p in self.probes if isinstance(p.found, Probe) and p.found.method), None)

    @property
    def energy_unit(self) -> str | None:
        """As the meter has it. `SessionFound.cost_unit` is of what candidates were judged by."""
        return None if self.method is None else GAUGE_UNIT if self.method == "relative gauge" else "J/token"


@dataclass(frozen=True)
class SessionFound(Generic[Arm]):
    space: Space[Arm]
    options: TuneOptions
    phases: tuple[PhaseFound[Arm], ...]
    time_method: Literal["measured", "modelled"]
    disturbances: tuple[str, ...]
    """What else had the machine meanwhile, in sentences."""

    def cost_unit(self, found: PhaseFound[Arm]) -> str | None:
        """Of the energy that candidates were judged by, of a token. A heuristic tells joules, whatever a meter does."""
        return "J/token" if self.options.alpha == 1.0 else found.energy_unit

    def is_by_replayed_joules(self, found: PhaseFound[Arm]) -> bool:
        """A recording does not know which arm runs: nothing that follows from it is certain."""
        return found.method == "replayed" and self.options.needs_joules

    def cost_method(self, found: PhaseFound[Arm]) -> str | None:
        """Of the energy that candidates were judged by. None: no meter, and no heuristic; or it was not asked."""
        alpha = self.options.alpha
        if self.options.objective == "latency":
            return None
        if alpha == 1.0:
            return "modelled by the heuristic alone"
        if alpha == 0.0 or found.method is None:
            return found.method
        return f"{found.method}, and {format_share(alpha, '.6g')} the heuristic's"


@contextmanager
def device_lock(device: str) -> Iterator[None]:
    """Held from the first probe to the last pair of the check. Raises `DeviceNotReadyError` where another process has
    the device."""
    lock = DeviceLock(state_folder(), device)
    try:
        lock.take()
    except DeviceError as error:
        raise DeviceNotReadyError(str(error)) from error
    try:
        yield
    finally:
        lock.release()


def run_session(
    plan: Plan,
    space: Space[Arm],
    options: TuneOptions,
    directory: Path,
    resume: bool,
    run_parts: RunParts,
    progress: Progress,
    searches: Mapping[Phase, Search[Arm, RaceResult[Arm]]],
    told: Callable[[Phase, Ask[Arm], int, Probe | Failed], None],
) -> SessionFound[Arm]:
    """Walks all searches, which have not begun, to their ends.

    Raises `StoreError`, `DeviceNotReadyError`, `SessionBrokenOffError`; KeyboardInterrupt passes through. Every
    finished probe is in the store by then.
    """
    asked = replace(plan, raw={**plan.raw, OPTIONS_KEY: options.model_dump(mode="json")})
    with ExitStack() as closing:
        store = closing.enter_context(open_run(asked, directory, resume, run_parts))
        _check_options(store, options)
        runner = Runner(asked, store, run_parts, progress)
        runner.check()
        limit = plan.protocol.max_foreign_cpu_share
        prober = TrialProber(runner, space.cells, options.phases, options.needs_joules, limit)
        prober.limit = _limit(space, options, prober)
        prober.heat_limit = _heat_limit(options.temperature_limit_c)
        probes: dict[Phase, list[SearchProbe[Arm]]] = {phase: [] for phase in options.phases}

        def noted(phase: Phase, ask: Ask[Arm], nth: int, found: Probe | Failed) -> None:
            probes[phase].append(SearchProbe(ask, nth, found))
            told(phase, ask, nth, found)

        try:
            results = walk(searches, prober, noted)
        except AllFailedError as error:
            raise SessionBrokenOffError(error.words(space.names)) from error
        except ValueError as error:
            raise SessionBrokenOffError(str(error)) from error
        disturbed = tuple(run_notes(store.data()))
    found = tuple(PhaseFound(phase, results[phase], tuple(probes[phase])) for phase in options.phases)
    modelled = all(cell_plan.is_modelled for cell_plan in plan.cells)
    return SessionFound(space, options, found, "modelled" if modelled else "measured", disturbed)


def _check_options(store: Store, options: TuneOptions) -> None:
    """Raises `StoreError` where the folder holds another session, or a run that is none."""
    then = store.info().plan.get(OPTIONS_KEY)
    now = options.model_dump(mode="json")
    if not isinstance(then, dict):
        raise StoreError(f"{store.directory} holds a run and no tuning session; name another folder with --out")
    changed = [f"{key} {then.get(key)} -> {value}" for key, value in now.items() if then.get(key) != value]
    if changed:
        raise StoreError(
            f"{store.directory} was begun with other options ({'; '.join(changed)}); resume with those of then, or name"
            " another folder with --out"
        )


def _heat_limit(limit_c: float | None) -> Callable[[Sequence[Trial]], str | None] | None:
    if limit_c is None:
        return None
    from harness.tuning.constraints import too_hot

    return lambda trials: too_hot(trials, limit_c)


def _limit(
    space: Space[Arm], options: TuneOptions, prober: TrialProber[Arm]
) -> Callable[[Sequence[Sequence[Trial]]], str | None] | None:
    """What an arm's first probe is held against: the size of weights, and answers beside the planned arm's."""
    floor, most_bytes = options.accuracy_floor, options.weights_limit_bytes
    if floor is None and most_bytes is None:
        return None
    from harness.tuning.constraints import is_right_or_wrong, too_heavy, too_wrong

    reference: list[Trial] = []
    if floor is not None:
        share = prober.max_foreign_cpu_share
        planned = TrialProber(prober.measures, {0: space.planned}, prober.phases, False, share)
        if isinstance(failure := planned.probe(0, 1), Failed):
            raise SessionBrokenOffError(f"the planned arm, which accuracy is compared with, failed: {failure.reason}")
        reference = [usable(prober.measures.trials_of(c.cell.cell_id))[0] for c in space.planned]
        if not is_right_or_wrong(reference):
            raise SessionBrokenOffError(NOT_SCORED)

    def limit(trials: Sequence[Sequence[Trial]]) -> str | None:
        reasons = [too_heavy(own, most_bytes) for own in trials]
        if floor is not None:
            pairs = zip(trials, reference, strict=True)
            reasons += [too_wrong(own, [other], floor) for own, other in pairs if is_right_or_wrong([other])]
        return next(filter(None, reasons), None)

    return limit
