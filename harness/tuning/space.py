"""What a tuning session chooses from, as the plan of an ordinary run: each candidate is an arm of it.

Two spaces: selections of cores (one arm a selection, both phases on it), and any keys of a plan with lists of values
(its sweep). Beside them stands the arm as it was planned, which the chosen one is compared with at the end.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic

from harness import sweep
from harness.matrix import CellPlan
from harness.plan import PlanError
from harness.schema import EngineSpec
from harness.tuning.probing import Arm
from results.records import Phase
from results.swept import parts_of

AS_PLANNED = "as planned"
MOST_ARMS = 2000
"""Of a space that is given by lists: each is an arm of the session's store."""
CORE_KEYS = ("cores", "threads")

Raw = dict[str, Any]


@dataclass(frozen=True)
class Space(Generic[Arm]):
    """cells: of each candidate, one a workload, in the plan's order. planned: of the arm as it was planned. keys: what
    a candidate has unlike the planned arm, as a plan writes it. replaced: keys of the planned arm that no candidate
    has, but for those in its own `keys`."""

    cells: Mapping[Arm, tuple[CellPlan, ...]]
    names: Mapping[Arm, str]
    keys: Mapping[Arm, Raw]
    planned: tuple[CellPlan, ...]
    replaced: tuple[str, ...] = ()

    def chosen_keys(self, chosen: Mapping[Phase, Arm]) -> Raw:
        """Of the chosen arms together: where phases were searched apart, each key is a table by phase."""
        if len(chosen) == 1 and "all" in chosen:
            return dict(self.keys[chosen["all"]])
        keys = dict.fromkeys(key for arm in chosen.values() for key in self.keys[arm])
        return {key: {phase: self.keys[arm][key] for phase, arm in chosen.items()} for key in keys}

    def chosen_arm(self, planned: Mapping[str, Any], keys: Mapping[str, Any]) -> Raw:
        """What was probed, as a plan writes it. keys: of the chosen."""
        return {**_without(self.replaced, planned), **keys}


def quick_plan(
    device: str, engine: Mapping[str, Any], model: str, prompt_tokens: int, decode_tokens: int, requests: int
) -> Raw:
    """A plan for who has none: requests of fixed lengths, of one arm. The first token is prefill's, so one more is
    asked than is decoded."""
    return {
        "schema": 1,
        "name": "tune",
        "model": {"source": model},
        "engine": [dict(engine)],
        "workload": [
            {
                "name": "fixed_lengths",
                "prompt_tokens": prompt_tokens,
                "new_tokens": decode_tokens + 1,
                "limit": requests,
            }
        ],
        "device": [{"name": device}],
        "protocol": {"idle_s": 0.0},
    }


def one_arm(raw: Raw) -> list[str]:
    """Why a plan cannot be tuned, all at once: it has one engine and one device, and what is tried is not in it yet."""
    problems = []
    for key in ("engine", "device"):
        found = raw.get(key)
        if isinstance(found, list) and len(found) > 1:
            names = ", ".join(str(one.get("name")) for one in found if isinstance(one, dict))
            problems.append(f"{key}: a session tunes one {key}, found {len(found)} ({names}); leave one in the plan")
    return problems


def with_selections(raw: Raw, selections: Mapping[str, Raw]) -> Raw:
    """The plan with an arm for each selection. selections: by name, the keys of the arm (`cores`, `threads`)."""
    plan = copy.deepcopy(raw)
    (base,) = plan["engine"]
    rest = _without(CORE_KEYS, base)
    plan["engine"] = [{**rest, **keys, "name": name} for name, keys in selections.items()]
    plan["engine"].append({**base, "name": AS_PLANNED})
    plan.pop("baseline", None)
    return plan


def with_axes(raw: Raw, axes: Sequence[str]) -> Raw:
    """The plan with the keys that are tried as its sweep. axes: `engine.prefill_chunk=[64, 128]`, one a key.

    Raises `PlanError` with every problem.
    """
    plan = copy.deepcopy(raw)
    (base,) = plan["engine"]
    name = str(base.get("name"))
    swept: Raw = dict(plan.get("sweep", {}))
    problems = []
    for axis in axes:
        path, equals, text = axis.partition("=")
        try:
            values = sweep.parse_value(text.strip()) if equals else None
        except sweep.PathError as error:
            problems.append(f"--space {axis[:80]}: {error}")
            continue
        if not isinstance(values, list) or not values:
            problems.append(
                f"--space {axis[:80]}: names no list of values; write --space engine.prefill_chunk=[64,128]"
            )
        else:
            swept[path.strip()] = values
    problems += [
        f"--space {path}: keys of the engine are tuned, and all others decide what is asked; write engine.KEY=[...]"
        for path in swept
        if path.partition(".")[0] != "engine"
    ]
    if not problems and not swept:
        problems.append("nothing to choose from: name keys and their values with --space, or in the plan's [sweep]")
    if problems:
        raise PlanError(problems)
    # A path of a sweep is cut at dots, so that an arm called llama.cpp goes by its place.
    prefix = "engine.0." if "." in name else f"engine.{name}."
    own = f"engine.{name}."
    keys = {path.removeprefix(own).removeprefix(prefix).removeprefix("engine."): v for path, v in swept.items()}
    plan["sweep"] = {prefix + key: v for key, v in keys.items()}
    plan["engine"].append({**base, "name": AS_PLANNED})
    plan.pop("baseline", None)
    return plan


def core_space(cells: Sequence[CellPlan], names: Mapping[Arm, str], keys: Mapping[Arm, Raw]) -> Space[Arm]:
    """names: of each selection's arm in the plan. keys: of each, those of the arm."""
    own = {arm: tuple(c for c in cells if c.engine.name == name) for arm, name in names.items()}
    planned = tuple(c for c in cells if c.engine.name == AS_PLANNED)
    return Space(own, dict(names), dict(keys), planned, replaced=CORE_KEYS)


def _without(keys: Sequence[str], engine: Mapping[str, Any]) -> Raw:
    return {key: value for key, value in engine.items() if key not in keys}


def swept_space(cells: Sequence[CellPlan]) -> Space[str]:
    """Every combination of the sweep, by what the sweep set."""
    found: dict[str, list[CellPlan]] = {}
    for cell_plan in cells:
        if cell_plan.engine.name != AS_PLANNED:
            found.setdefault(_without_name(cell_plan.cell.engine), []).append(cell_plan)
    planned = tuple(c for c in cells if c.engine.name == AS_PLANNED)
    before = _table(planned[0])
    keys = {arm: {k: v for k, v in _table(own[0]).items() if v != before.get(k)} for arm, own in found.items()}
    return Space({arm: tuple(own) for arm, own in found.items()}, {arm: arm for arm in found}, keys, planned)


def _table(cell_plan: CellPlan) -> Raw:
    """An arm as a plan writes it, but for its name."""
    spec = cell_plan.engine
    rest: Raw = {k: v for k, v in spec.model_dump(mode="json", exclude={"name"}).items() if v is not None}
    if isinstance(spec, EngineSpec):
        # Its name is the tag of a union, and may be a default of the record.
        own = spec.technique.model_dump(mode="json", exclude_defaults=True)
        rest["technique"] = {"name": spec.technique.technique, **own}
    return rest


def _without_name(label: str) -> str:
    """`prefill_chunk 64, threads 1` of `dropless[prefill_chunk=64,threads=1]`: all arms are of one engine."""
    swept = parts_of(label).values
    return swept.replace(",", ", ").replace("=", " ") if swept else label
