"""Plans that name a tuned profile: `cores = "tuned"`, `cores = "tuned:NAME"`, and `engine = "tuned:NAME"`.

They are replaced by plain values before anything else reads the plan, so that cells, resume and report know what was
run and not where it came from. A profile of another device or model, or one that has expired, is a problem of the plan.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from harness.device_specs import ANDROID_PREFIX, IOS_PREFIX, named_after_its_sheet, with_sheet_path
from harness.plan_values import shown
from harness.tuning.engine_marks import engine_mark, on_any_cores
from harness.tuning.profile import (
    Fingerprint,
    TunedProfile,
    TunedProfileError,
    digest_of_model,
    digest_of_sheet,
    doubts,
    find_profile,
    fingerprint,
    is_refuted,
    kept_profiles,
    why_expired,
)
from results.environments import Environment

TUNED = "tuned"
HOST = "host"
UNKNOWN_ARM = {"name": TUNED, "technique": {"name": "dropless"}}

log = logging.getLogger(__name__)


class TunedFor(NamedTuple):
    """A profile that a plan has taken, and what it holds for."""

    name: str
    holds_for: Fingerprint


class Resolved(NamedTuple):
    """raw: without names of profiles. notes: what was taken from which. tuned_for: profiles of phones."""

    raw: dict[str, Any]
    problems: list[str]
    notes: list[str]
    tuned_for: tuple[TunedFor, ...] = ()


def is_tuned(value: object) -> bool:
    return isinstance(value, str) and (value == TUNED or value.startswith(f"{TUNED}:"))


def names_profiles(raw: dict[str, Any]) -> bool:
    return any(is_tuned(value) for _, value in _places(raw))


def resolved(raw: dict[str, Any], folder: Path) -> Resolved:
    """Never raises. What cannot be resolved is a problem, and left out of the plan. folder: where paths of hardware
    sheets start."""
    if not names_profiles(raw):
        return Resolved(raw, [], [])
    engines = raw["engine"]
    engines = [engines] if is_tuned(engines) else [dict(one) if isinstance(one, dict) else one for one in engines]
    devices = raw.get("device")
    at_home = [with_sheet_path(one, folder) for one in devices] if isinstance(devices, list) else devices
    plan, seen = {**raw, "engine": engines}, {**raw, "device": at_home}
    problems: list[str] = []
    notes: list[str] = []
    taken: dict[str, TunedFor] = {}
    names = {one.get("name") for one in engines if isinstance(one, dict)}
    for i, engine in enumerate(engines):
        path = f"engine[{i}]"
        try:
            if is_tuned(engine):
                profile = _profile(engine, seen, None)
                # Beside the arm that it was tuned from it goes by its own name.
                beside = {"name": profile.name} if profile.engine.get("name") in names else {}
                engines[i] = {**profile.engine, **beside}
                names.add(engines[i].get("name"))
            elif isinstance(engine, dict) and is_tuned(engine.get("cores")):
                path = f"{path}.cores"
                profile = _profile(engine["cores"], seen, engine)
                engine.pop("cores")
                engine |= _core_keys(profile, engine)
            else:
                continue
        except TunedProfileError as error:
            problems.append(f"{path}: {error}")
            if isinstance(engine, dict):
                engine.pop("cores", None)
                # Told once: that some arms need a number of threads is no second problem.
                engines[i] = on_any_cores(engine) if "threads" not in engine else engine
            else:
                engines[i] = None
            continue
        if is_phone(profile.fingerprint.device):
            taken[profile.sha256] = TunedFor(profile.name, profile.fingerprint)
        keys = ", ".join(f"{key} = {_words(value)}" for key, value in profile.settings.items()) or "as planned"
        if profile.searched_on is not None:
            keys += " (searched before the system or engine changed, and checked since)"
        asked = "" if profile.objective == "energy" else f" (for {profile.objective})"
        unsure = f"; not certain: {', '.join(doubts(profile))}" if doubts(profile) else ""
        notes.append(f"{path}: from the tuned profile {profile.name}{asked} of {profile.created_at}: {keys}{unsure}")
    # A problem is told once: an arm that could not be found stands in for itself, so that none seems to be missing.
    plan["engine"] = [UNKNOWN_ARM if engine is None else engine for engine in engines]
    return Resolved(plan, problems, notes, tuple(taken.values()))


def _places(raw: dict[str, Any]) -> Iterator[tuple[str, object]]:
    engines = raw.get("engine")
    if isinstance(engines, str):
        yield "engine", engines
    for engine in engines if isinstance(engines, list) else ():
        yield "engine", engine.get("cores") if isinstance(engine, dict) else engine


def chooses_cores(profile: TunedProfile) -> bool:
    return bool({"cores", "threads"} & profile.settings.keys())


def _core_keys(profile: TunedProfile, engine: dict[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in profile.settings.items() if key in ("cores", "threads")}
    if not found and {"cores", "threads"} & profile.engine.keys():
        found = {key: profile.engine[key] for key in ("cores", "threads") if key in profile.engine}
    if "threads" in engine and found:
        raise TunedProfileError(f"threads: the profile {profile.name} chooses them too; remove the line")
    if not found and profile.settings:
        raise TunedProfileError(
            f"the profile {profile.name} chose {', '.join(profile.settings)} and no cores; write engine ="
            f' "tuned:{profile.name}"'
        )
    return found


def _profile(value: str, plan: dict[str, Any], engine: dict[str, Any] | None) -> TunedProfile:
    """engine: the arm that takes its cores; None: it takes the whole arm of the profile.

    Raises `TunedProfileError` also where it does not hold here.
    """
    name = value.removeprefix(TUNED).removeprefix(":")
    if not name:
        if engine is None:
            raise TunedProfileError('name a profile: engine = "tuned:NAME"; cores = "tuned" finds the newest by itself')
        return _of_this_machine(fingerprint_of_plan(plan, engine))
    profile, _ = find_profile(name)
    changed = why_expired(profile.fingerprint, fingerprint_of_plan(plan, profile.engine if engine is None else engine))
    if changed:
        raise TunedProfileError(_expired(profile, changed))
    if is_refuted(profile):
        raise TunedProfileError(_refuted(profile))
    return profile


def _of_this_machine(now: Fingerprint) -> TunedProfile:
    """The newest of those that hold for what the plan has."""
    kept = [profile for profile, _ in kept_profiles() if chooses_cores(profile)]
    fitting = [profile for profile in kept if not why_expired(profile.fingerprint, now)]
    holding = [profile for profile in fitting if not is_refuted(profile)]
    if holding:
        return max(holding, key=lambda profile: profile.created_at)
    if fitting:
        raise TunedProfileError(_refuted(max(fitting, key=lambda profile: profile.created_at)))
    remedy = "`joulebench tune` makes one"
    if not kept:
        raise TunedProfileError(f"no tuned profile that chose cores is kept on this machine; {remedy}")
    near = min(kept, key=lambda profile: len(why_expired(profile.fingerprint, now)))
    raise TunedProfileError(_expired(near, why_expired(near.fingerprint, now)))


def _refuted(profile: TunedProfile) -> str:
    words = "" if profile.check is None else profile.check.words
    return f"the tuned profile {profile.name} does not hold: {words} `joulebench tune` searches anew"


def _expired(profile: TunedProfile, changed: list[str]) -> str:
    return _does_not_hold(profile.name, changed)


def _does_not_hold(name: str, changed: list[str]) -> str:
    remedy = f"`joulebench tune --check {name}` measures again and renews it"
    if {line.split(" ", 1)[0] for line in changed} & {"device", "model", "machine", "cpu", "engine", "weights"}:
        remedy = "`joulebench tune` makes one for this"
    return f"the tuned profile {name} does not hold here ({'; '.join(changed)}); {remedy}"


def fingerprint_of_plan(plan: dict[str, Any], engine: dict[str, Any]) -> Fingerprint:
    """Of this machine, the model that a plan names, and one engine of it. Raises `TunedProfileError` where it names no
    one device."""
    from devices.conditions import host_environment
    from engines.road import build

    devices, model = plan.get("device"), plan.get("model")
    own = [one for one in devices if isinstance(one, dict)] if isinstance(devices, list) else []
    names = [named_after_its_sheet(one).get("name") for one in own]
    if len(names) != 1 or not isinstance(names[0], str):
        raise TunedProfileError(f"a profile is of one device, and the plan has {len(names)}; write the cores instead")
    source = model.get("source") if isinstance(model, dict) else None
    if not isinstance(source, str):
        raise TunedProfileError(f"a profile is of one model, and the plan has {shown(source)}; write the cores instead")
    here = host_environment()
    # A phone is looked at when it is opened, and not to check a plan.
    environment = here.model_copy(update={"build": build()}) if names[0] == HOST else None
    assert isinstance(model, dict)
    digest = digest_of_model(source, log.info)
    sheet = digest_of_sheet(own[0])
    return fingerprint(names[0], here, environment, source, digest, engine_mark(engine, model), sheet)


def is_phone(device: str) -> bool:
    return device.startswith((ANDROID_PREFIX, IOS_PREFIX))


def seen_open(known: Fingerprint, own: Environment) -> Fingerprint:
    """With what only a phone that is open tells."""
    return known.model_copy(
        update={"machine": own.machine, "cpu_model": own.cpu_model, "n_threads": own.n_threads, "os": own.os}
    )


def why_another_phone(tuned_for: Iterable[TunedFor], own: Environment) -> list[str]:
    """Of each profile that does not hold for the phone that was opened: `adb:` is whichever is there, and an address
    may be another's tomorrow."""
    changes = ((one.name, why_expired(one.holds_for, seen_open(one.holds_for, own))) for one in tuned_for)
    return [_does_not_hold(name, changed) for name, changed in changes if changed]


def _words(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{inner} for {phase}" for phase, inner in value.items() if inner is not None)
    return str(value)
