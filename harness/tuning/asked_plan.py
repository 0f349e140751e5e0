"""What `joulebench tune` is asked for: its options and its plan, with all that is wrong in them told at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from harness.catalog import TECHNIQUES
from harness.device_specs import named_after_its_sheet, with_sheet_path
from harness.external.catalog import EXTERNAL
from harness.plan import PlanError, draft_plan, read_toml
from harness.preflight import preflight
from harness.problems import nearest_engine
from harness.run_parts import RunParts, data_root
from harness.sweep import PathError, set_value
from harness.tuning.aecs import AECS, PRESETS, AecsParameters
from harness.tuning.cores import TREE, WHOLE, check_search, choosable
from harness.tuning.engine_marks import engine_mark
from harness.tuning.presets import idle_constants, parameters_of
from harness.tuning.profile import TunedProfileError, kept_path, read_profile
from harness.tuning.race import Rules
from harness.tuning.space import CORE_KEYS, one_arm, quick_plan, with_axes
from harness.tuning.suggested import SMALL_SPACE, SUGGESTED, check_optuna
from harness.tuning.tuned_plans import is_tuned

NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
"""A profile's name stands in plans, in a shell and in a file's name."""
MOST_NAME = 64
WEIGHT_KEYS = {"quantise", "weights", "model_file"}
"""Keys of an engine that say which weights it holds: where they are searched, the chosen ones may be others."""
NO_TECHNIQUE = "engine[0].technique.name: "
ENGINE_NUMBER = re.compile(r"^engine\[\d+\]")

Raw = dict[str, Any]
Found = TypeVar("Found")


@dataclass(frozen=True)
class Asked:
    """The options of `joulebench tune`."""

    plan_path: Path | None
    device: str
    engine: str
    model: str
    prompt_tokens: int
    decode_tokens: int
    requests: int
    space: tuple[str, ...]
    objective: str
    slowdown: float
    search: str | None
    constants: tuple[str, ...]
    exhaustive: bool
    accuracy_floor: float | None
    weights_limit_bytes: int | None
    temperature_limit_c: float | None
    most_probes: int
    n_pairs: int
    seed: int
    name: str | None
    out: Path | None
    settings: tuple[str, ...]
    resume: bool


@dataclass(frozen=True)
class CheckedPlan:
    """base: the plan of one arm. swept: with the keys that are tuned; None: cores are. n_values: of each of them."""

    base: Raw
    device: str
    swept: Raw | None
    n_values: tuple[int, ...]
    search: str
    parameters: AecsParameters
    """Of a search of cores."""
    name: str


def checked_plan(asked: Asked, found_before: Sequence[str]) -> CheckedPlan:
    """Nothing was asked of the device yet. Raises `PlanError` with every problem, `found_before` first."""
    problems = list(found_before)
    base = _gathered(problems, lambda: _base_plan(asked))
    if base is not None:
        problems += one_arm(base)
    is_one_arm = base is not None and not one_arm(base)
    is_swept = bool(asked.space) or bool(base is not None and base.get("sweep"))
    if asked.name is not None and (NOT_IN_NAMES.search(asked.name) or len(asked.name) > MOST_NAME):
        problems.append(f"--name {asked.name[:80]}: letters, digits, '.', '_' and '-' alone, at most {MOST_NAME}")
    parameters = AECS
    if is_swept:
        search = WHOLE
        problems += [
            f"{option}: is for cores, and a space of keys was given; leave one of them out"
            for option in (*([f"--search {asked.search}"] if asked.search is not None else []), *_constants(asked))
        ]
    else:
        search = WHOLE if asked.exhaustive else asked.search or TREE
        parameters = _gathered(problems, lambda: _core_parameters(asked, search)) or AECS
    if base is None or not is_one_arm:
        raise PlanError(problems)
    if not is_swept:
        _gathered(problems, lambda: choosable(base["engine"][0]))
    n_before = len(problems)
    _gathered(problems, lambda: _check_base(base, whole=bool(problems)))
    swept = None
    n_values: tuple[int, ...] = ()
    if is_swept:
        sound = [axis for axis in asked.space if _gathered(problems, partial(with_axes, base, [axis])) is not None]
        if sound or not asked.space:
            swept = _gathered(problems, lambda: with_axes(base, sound))
    if swept is not None:
        n_values = tuple(len(values) for values in swept["sweep"].values())
        search = WHOLE if asked.exhaustive or prod(n_values) <= SMALL_SPACE else SUGGESTED
        if search == SUGGESTED:
            _gathered(problems, lambda: check_optuna(prod(n_values)))
        told = {ENGINE_NUMBER.sub("engine", problem) for problem in problems[n_before:]}
        own = draft_plan(swept, data_root()).problems
        problems += [problem for problem in own if ENGINE_NUMBER.sub("engine", problem) not in told]
    name = asked.name or _name_of(base, asked.objective)
    if swept is not None or not is_swept:
        searched = set(CORE_KEYS) if swept is None else {part for path in swept["sweep"] for part in path.split(".")}
        _gathered(problems, lambda: _refuse_name_of_another(name, base, asked.objective, searched))
    if problems:
        raise PlanError(_by_option(problems, asked))
    return CheckedPlan(base, str(base["device"][0].get("name")), swept, n_values, search, parameters, name)


def _by_option(problems: Sequence[str], asked: Asked) -> list[str]:
    """Each once; that no engine has such a name as it was asked, where no plan says it."""
    if asked.plan_path is None and asked.engine not in {*TECHNIQUES, *EXTERNAL}:
        near = nearest_engine(asked.engine, TECHNIQUES)
        told = f"--engine {asked.engine[:80]}: neither a technique nor another engine; {near}"
        problems = [told if line.startswith(NO_TECHNIQUE) else line for line in problems]
    return list(dict.fromkeys(problems))


def _constants(asked: Asked) -> list[str]:
    return [f"--constant {one[:40]}" for one in asked.constants]


def _gathered(problems: list[str], check: Callable[[], Found]) -> Found | None:
    """What a check returns; None where its problems were added."""
    try:
        return check()
    except PlanError as error:
        problems += error.problems
        return None


def _check_base(base: Raw, whole: bool) -> None:
    """Raises `PlanError` with every problem of the plan as it was planned, each once: not once a candidate, and before
    anything asks which cores the device has. whole: what it names is looked at, too; else only if it has a problem
    or no cell, for the plan of all candidates is looked at later."""
    draft = draft_plan(base, data_root())
    if not draft.problems and draft.plan.cells and not whole:
        return
    run_parts = RunParts(draft.plan.protocol)
    try:
        preflight(draft, run_parts)
    finally:
        run_parts.close()


def _core_parameters(asked: Asked, search: str) -> AecsParameters:
    """Raises `PlanError`."""
    check_search(search)
    if asked.exhaustive and asked.search not in (None, WHOLE):
        raise PlanError([f"--exhaustive: races every selection, and --search {asked.search} does not; take one"])
    if search in PRESETS and asked.objective != "energy":
        raise PlanError(
            [f"--search {search}: looks for the least energy; take --search tree for --objective {asked.objective}"]
        )
    parameters = parameters_of(search, asked.slowdown, asked.constants)
    if problems := idle_constants(parameters, asked.constants, asked.objective, search == WHOLE):
        raise PlanError(problems)
    return parameters


def _base_plan(asked: Asked) -> dict[str, Any]:
    """Raises `PlanError`."""
    if asked.plan_path is not None:
        raw = read_toml(asked.plan_path)
    else:
        own = {"runs": asked.engine} if asked.engine in EXTERNAL else {"technique": {"name": asked.engine}}
        engine = {"name": asked.engine, **own}
        raw = quick_plan(asked.device, engine, asked.model, asked.prompt_tokens, asked.decode_tokens, asked.requests)
    problems = []
    for assignment in asked.settings:
        try:
            set_value(raw, assignment)
        except PathError as error:
            problems.append(f"--set {assignment[:80]}: {error}")
    engines = raw.get("engine")
    if profile := next((one for one in (engines if isinstance(engines, list) else [engines]) if is_tuned(one)), None):
        problems.append(
            f"engine: {profile} is what a search found; write the arm that is to be tuned, or measure the profile"
            " again with --check"
        )
    elif not (isinstance(raw.get("engine"), list) and raw["engine"] and isinstance(raw["engine"][0], dict)):
        problems.append("engine: missing; add [[engine]]")
    if not (isinstance(raw.get("device"), list) and raw["device"] and isinstance(raw["device"][0], dict)):
        problems.append("device: missing; add [[device]]")
    if not isinstance(raw.get("model"), dict):
        problems.append("model: missing; add [model]")
    if problems:
        raise PlanError(problems)
    folder = asked.plan_path.parent if asked.plan_path else Path()
    # A profile is checked from anywhere, so that its plan has the whole path of a sheet.
    raw["device"][0] = with_sheet_path(named_after_its_sheet(raw["device"][0]), folder.absolute())
    return raw


def _name_of(base: dict[str, Any], objective: str) -> str:
    """Of device, model and engine, and of an objective that is not energy."""
    (engine,) = base["engine"]
    model = str(base["model"].get("source", "model"))
    last = model.rstrip("/").replace(":", "-").rpartition("/")[2] or "model"
    told = [str(base["device"][0].get("name")), last, engine_mark(engine, base["model"]).engine]
    name = "-".join(told if objective == Rules.objective else [*told, objective])
    return NOT_IN_NAMES.sub("-", name)[:MOST_NAME].strip("-.") or "tuned"


def _refuse_name_of_another(name: str, base: dict[str, Any], objective: str, searched: Set[str]) -> None:
    """Plans name profiles: one may only be replaced by its like. searched: keys of the engine that are chosen now.
    Raises `PlanError`."""
    path = kept_path(name)
    if not path.exists():
        return
    try:
        kept = read_profile(path)
    except TunedProfileError:
        return  # of an older joulebench, or damaged: nothing relies on it
    now = engine_mark(base["engine"][0], base["model"])
    pairs = {
        "device": (kept.fingerprint.device, base["device"][0].get("name")),
        "model": (kept.fingerprint.model, base["model"].get("source")),
        "engine": (kept.fingerprint.engine, now.engine),
        "objective": (kept.objective, objective),
    }
    if not searched & WEIGHT_KEYS:
        pairs["weights"] = (kept.fingerprint.weights, now.weights)
    unlike = [f"{key} {then}, and here {own}" for key, (then, own) in pairs.items() if then != own]
    if lost := [key for key in kept.settings if key not in searched]:
        unlike.append(f"it chose {', '.join(lost)}, and here that is not searched")
    if unlike:
        raise PlanError([f"--name {name}: is kept for another ({'; '.join(unlike)}); give this one a name of its own"])
