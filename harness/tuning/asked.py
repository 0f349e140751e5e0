"""A session from what its user asked for: the plan, the space, the searches; afterwards the check and the profile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, cast

from devices.base import DeviceError
from devices.conditions import host_environment
from harness.matrix import CellPlan
from harness.opening import DeviceNotReadyError, check_folder
from harness.plan import Plan, PlanError, draft_plan
from harness.preflight import preflight
from harness.run_parts import RunParts, data_root
from harness.runner import Progress
from harness.tuning.asked_plan import Asked, CheckedPlan, checked_plan
from harness.tuning.checking import CHECK_FOLDER, CHECK_REPORT, NoPairsError, check_plan, run_check
from harness.tuning.cores import WHOLE, choosable, core_candidates, core_searches, races_all
from harness.tuning.engine_marks import engine_mark
from harness.tuning.presets import check_clocks, idle_constants, told
from harness.tuning.probing import Search, SessionBrokenOffError
from harness.tuning.profile import (
    CandidateEvidence,
    Fingerprint,
    PhaseEvidence,
    TunedProfile,
    TunedProfileError,
    digest_of_model,
    digest_of_sheet,
    find_profile,
    fingerprint,
    kept_path,
    read_profile,
    why_expired,
    write_profile,
)
from harness.tuning.race import Estimate, Objective, RaceResult, Rules, measured_j, race
from harness.tuning.session import NOT_SCORED, PhaseFound, SessionFound, TuneOptions, device_lock, run_session
from harness.tuning.space import Space, core_space, swept_space, with_selections
from harness.tuning.suggested import suggested_race
from harness.tuning.tuned_plans import HOST, fingerprint_of_plan, is_phone, seen_open
from results.records import Phase
from results.store import Store

ALL, APART = cast("tuple[Phase, ...]", ("all",)), cast("tuple[Phase, ...]", ("prefill", "decode"))
NOTHING_DECODED = (
    "workload: no request of the plan decodes a token, and cores are searched for decoding too; add a workload that"
    " does, or tune keys with --space"
)
LASTING = ("device", "machine", "cpu model", "model")
"""What a check cannot renew: another device or model needs a search of its own."""


@dataclass(frozen=True)
class Session:
    """Ready to run. base: the plan of one arm that it came from."""

    asked: Asked
    base: dict[str, Any]
    plan: Plan
    space: Space[Any]
    options: TuneOptions
    name: str
    folder: Path
    run_parts: RunParts
    searches: Mapping[Phase, Search[Any, RaceResult[Any]]]
    say: Callable[[str], None]

    def run(self, progress: Any) -> SessionFound[Any]:
        """progress: `harness.tuning.display.ProbeLines`. Raises what `run_session` raises."""
        self.run_parts.on_wait, self.run_parts.on_note = progress.waiting, self.say
        told = partial(progress.told, self.space.names.__getitem__)
        return run_session(
            self.plan, self.space, self.options, self.folder, self.asked.resume, self.run_parts, progress,
            self.searches, told,
        )  # fmt: skip


@contextmanager
def begin(asked: Asked, problems: Sequence[str], say: Callable[[str], None]) -> Iterator[Session]:
    """Reads and checks everything; nothing is written. The device is this process's alone until the context ends.

    problems: of the options, found before. Raises `PlanError` with all problems, `DeviceNotReadyError`, `StoreError`.
    """
    checked = checked_plan(asked, problems)
    folder = asked.out or Path("runs") / f"tune-{checked.name}"
    check_folder(folder, asked.resume)
    with device_lock(checked.device):
        yield from _begun(checked, asked, folder, say)


def _begun(checked: CheckedPlan, asked: Asked, folder: Path, say: Callable[[str], None]) -> Iterator[Session]:
    """As `begin`, of a plan that was read."""
    base, search, parameters = checked.base, checked.search, checked.parameters
    is_swept = checked.swept is not None
    candidates, is_whole = None, True
    if checked.swept is not None:
        raw = checked.swept
    else:
        can = choosable(base["engine"][0])
        is_whole = not can.is_by_phase
        candidates = core_candidates(checked.device, can.key)
        check_clocks(candidates.clusters, parameters)
        all_raced = races_all(search, len(candidates.names))
        if problems := idle_constants(parameters, asked.constants, asked.objective, all_raced):
            raise PlanError(problems)
        raw = with_selections(base, {name: candidates.keys[arm] for arm, name in candidates.names.items()})
    draft = draft_plan(raw, data_root())
    run_parts = RunParts(draft.plan.protocol)
    try:
        plan = preflight(draft, run_parts)
        options = TuneOptions(
            objective=cast("Objective", asked.objective),
            slowdown=asked.slowdown,
            search=search,
            constants={} if is_swept else told(parameters),
            is_even=asked.exhaustive,
            phases=ALL if is_whole else APART,
            seed=asked.seed,
            most_probes=asked.most_probes,
            accuracy_floor=asked.accuracy_floor,
            weights_limit_bytes=asked.weights_limit_bytes,
            temperature_limit_c=asked.temperature_limit_c,
        )
        rules = Rules(
            objective=options.objective,
            slowdown=options.slowdown,
            most_probes=options.most_probes,
            is_even=options.is_even,
        )
        space: Space[Any]
        searches: Mapping[Phase, Search[Any, RaceResult[Any]]]
        if candidates is None:
            space = swept_space(plan.cells)
            searches = _swept_searches(space, checked.n_values, options, rules)
        else:
            space = core_space(plan.cells, candidates.names, candidates.keys)
            searches = core_searches(candidates, options, rules, parameters)
        if asked.accuracy_floor is not None and not any(run_parts.workload(one).scored for one in space.planned):
            raise PlanError([NOT_SCORED])
        asks = (request for one in space.planned for request in run_parts.requests(one))
        # The first token of an answer is prefill's.
        if "decode" in options.phases and all(request.max_new_tokens < 2 for request in asks):
            raise PlanError([NOTHING_DECODED])
        if asked.resume and asked.n_pairs:
            _same_pairs(folder / CHECK_FOLDER, asked.n_pairs, checked.name)
        yield Session(asked, base, plan, space, options, checked.name, folder, run_parts, searches, say)
    finally:
        run_parts.close()


def _same_pairs(folder: Path, n_pairs: int, name: str) -> None:
    """The pairs of a check are of one run. Raises `PlanError` where it was begun with another number, `StoreError`."""
    if not Store.holds_run(folder):
        return
    with Store.view(folder) as store:
        then = store.info().plan["protocol"]["repeats"]
    if then != n_pairs:
        raise PlanError(
            [
                f"--pairs {n_pairs}: {folder} was begun with {then}; give --pairs {then}, or --pairs 0 and then"
                f" `joulebench tune --check {name} --pairs {n_pairs}`"
            ]
        )


def _swept_searches(
    space: Space[str], values: Sequence[int], options: TuneOptions, rules: Rules
) -> Mapping[Phase, Search[str, RaceResult[str]]]:
    """Small spaces whole; in large ones Optuna says what to probe. values: how many each key has."""
    judge = None if options.objective == "latency" else measured_j
    arms = tuple(space.cells)
    if options.search == WHOLE:
        return {phase: race(arms, rules, judge, options.seed) for phase in options.phases}
    if len(arms) != prod(values):
        raise PlanError(
            [f"{prod(values) - len(arms)} of {prod(values)} combinations make no cell of a plan; name fewer"]
        )
    return {phase: suggested_race(arms, values, rules, judge, options.seed) for phase in options.phases}


def conclude(session: Session, found: SessionFound[Any], progress: Progress) -> TunedProfile:
    """Measures the chosen beside the planned arm, and puts the profile together. Raises as `run_check`."""
    keys = found.space.chosen_keys({one.phase: one.result.chosen for one in found.phases})
    (planned,) = session.base["engine"]
    tuned = found.space.chosen_arm(planned, keys)
    raw = check_plan(session.base, planned, tuned, max(1, session.asked.n_pairs))
    check = None
    if session.asked.n_pairs:
        try:
            check = run_check(
                raw, session.folder / CHECK_FOLDER, session.run_parts, progress, found.options.phases,
                found.options.slowdown, found.options.objective,
            )  # fmt: skip
        except NoPairsError as error:
            raise SessionBrokenOffError(
                f"{error}; `--resume --pairs 0` keeps the choice, and `joulebench tune --check {session.name}` then"
                " measures it"
            ) from error
    device, source = session.plan.cells[0].device, session.plan.cells[0].model.source
    environment = session.run_parts.environment(session.plan.cells[0])
    mark = engine_mark(tuned, session.base["model"])
    digest = digest_of_model(source, session.say)
    marked = fingerprint(
        device.name, host_environment(), environment, source, digest, mark, digest_of_sheet(raw["device"][0])
    )
    if device.name != HOST and not device.is_phone:
        marked = marked.model_copy(update={"os": None, "kernels_sha256": None})  # a sheet has neither
    return TunedProfile(
        name=session.name,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        fingerprint=marked,
        objective=found.options.objective,
        slowdown=found.options.slowdown,
        engine=tuned,
        settings=keys,
        plan=raw,
        evidence=tuple(_evidence(found, one) for one in found.phases),
        check=check,
    )


def _evidence(session: SessionFound[Any], found: PhaseFound[Any]) -> PhaseEvidence:
    from harness.tuning.display import sentence

    result, names = found.result, session.space.names
    return PhaseEvidence(
        phase=found.phase,
        chosen=names[result.chosen],
        fastest=names[result.fastest],
        is_separated=result.is_separated and not session.is_by_replayed_joules(found),
        n_probes=result.n_probes,
        floor_tokens_per_s=result.floor_tokens_per_s,
        energy_unit=session.cost_unit(found),
        energy_method="modelled" if session.options.alpha else found.method,
        words=sentence(session, found),
        candidates=tuple(
            CandidateEvidence(
                name=names[one.arm],
                state=one.state,
                n_probes=one.n_probes,
                tokens_per_s=_triple(one.speed_tokens_per_s),
                energy_per_token=_triple(one.cost),
                reason=one.reason,
            )
            for one in result.standings
        ),
    )


def _triple(estimate: Estimate | None) -> tuple[float, float | None, float | None] | None:
    return None if estimate is None else (estimate.value, estimate.low, estimate.high)


def check_again(named: str, n_pairs: int, out: Path | None, progress: Any) -> tuple[TunedProfile, list[Path], Path]:
    """(the profile with its new check, the files that were renewed, the folder of the check).

    The verdict is kept; what holds is renewed for the system and engine of now. Raises `TunedProfileError` for another
    device or model, and `OSError`.
    """
    profile, path = find_profile(named)
    now = fingerprint_of_plan(profile.plan, profile.engine)
    _refuse_another(profile, now)
    raw = {**profile.plan, "protocol": {**profile.plan.get("protocol", {}), "repeats": n_pairs}}
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    folder = out or Path("runs") / f"check-{profile.name}-{stamp}"
    if (folder / CHECK_REPORT).exists():
        raise TunedProfileError(
            f"--out {folder}: holds a check that is over, and this one has to measure again; name another folder"
        )
    draft = draft_plan(raw, data_root())
    run_parts = RunParts(draft.plan.protocol)
    phases = tuple(one.phase for one in profile.evidence)
    try:
        run_parts.on_wait = progress.waiting
        if is_phone(now.device):
            now = _of_open_phone(profile, now, draft.sound().cells[0], run_parts)
        if changed := why_expired(profile.fingerprint, now):
            progress.expired(changed)
        with device_lock(now.device):
            found = run_check(raw, folder, run_parts, progress, phases, profile.slowdown, profile.objective)
    finally:
        run_parts.close()
    renewed = profile.model_copy(update={"check": found})
    if found.verdict == "holds":
        known = {key: value for key, value in now.model_dump().items() if value is not None}
        fresh = profile.fingerprint.model_copy(update=known)
        before = profile.searched_on or (profile.fingerprint if why_expired(profile.fingerprint, fresh) else None)
        renewed = renewed.model_copy(update={"fingerprint": fresh, "searched_on": before})
    # A verdict against it is kept too, so that no plan relies on it any more.
    kept = kept_path(profile.name)
    targets = (path,) if _is_of_another_search(kept, profile) else (path, kept)
    return renewed, [write_profile(renewed, each) for each in dict.fromkeys(targets)], folder


def _is_of_another_search(kept: Path, profile: TunedProfile) -> bool:
    """Whether plans that name a profile find the choice of another search, such as a later one of that name."""
    try:
        found = read_profile(kept)
    except TunedProfileError:
        return False  # none is kept, or none that a plan could take
    return (found.created_at, found.engine) != (profile.created_at, profile.engine)


def _of_open_phone(profile: TunedProfile, known: Fingerprint, cell_plan: CellPlan, run_parts: RunParts) -> Fingerprint:
    """Raises `TunedProfileError` for another phone, `DeviceNotReadyError`."""
    try:
        now = seen_open(known, run_parts.environment(cell_plan))
    except DeviceError as error:
        raise DeviceNotReadyError(str(error)) from error
    _refuse_another(profile, now)
    return now


def _refuse_another(profile: TunedProfile, now: Fingerprint) -> None:
    """Raises `TunedProfileError` for another device or model."""
    lasting = [line for line in why_expired(profile.fingerprint, now) if line.startswith(LASTING)]
    if lasting:
        raise TunedProfileError(
            f"the tuned profile {profile.name} is of something else ({'; '.join(lasting)}); `joulebench tune` makes one"
        )
