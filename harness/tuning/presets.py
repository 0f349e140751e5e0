"""Source 002's own searches as searches of a session, and their constants as `--constant KEY=VALUE` has them."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any, get_args

from devices.models.core_clusters import CoreCluster, CoreKind, Selection
from harness.plan import PlanError
from harness.problems import nearest
from harness.sweep import PathError, parse_value
from harness.tuning.aecs import AECS, PRESETS, AecsParameters, SearchResult, asking, heuristic_energy_j
from harness.tuning.core_race import steps_of
from harness.tuning.power_heuristic import PowerHeuristic, ThreadHeuristic
from harness.tuning.race import Answer, Ask, Estimate, Failed, RaceResult, Reading, Standing, State
from harness.tuning.selections import Tree

KINDS: tuple[CoreKind, ...] = get_args(CoreKind)
OF_RACES = ("alpha", "tree", "least_gain")
"""Of `AecsParameters` what a race with repeated probes has too, beside the heuristic's constants."""
WORDS: dict[str, tuple[str, ...]] = {
    "tree": get_args(Tree),
    "order": ("tree", "estimated power"),
    "floor_from": ("stage 1", "stage 1 and last"),
}
COUNTS = ("first_cores", "most_first_probes", "most_candidates")
SHARES = ("alpha", "least_gain", "ends_at")
WATTS = ("w_per_ghz2", "idle_factor", "static_w", *(f"scale_{kind}" for kind in KINDS))
THREAD_WATTS = ("w_per_thread", "static_w")


def parameters_of(search: str, slowdown: float, constants: Sequence[str]) -> AecsParameters:
    """Of a preset, or of a race (alpha 0, where no constant says otherwise). Raises `PlanError` with every problem."""
    base = replace(PRESETS.get(search, replace(AECS, alpha=0.0)), slowdown=slowdown)
    if search not in PRESETS and any(text.strip().startswith("w_per_thread") for text in constants):
        base = replace(base, heuristic=ThreadHeuristic())
    own = (*COUNTS, *SHARES, *WORDS) if search in PRESETS else OF_RACES
    watts = THREAD_WATTS if isinstance(base.heuristic, ThreadHeuristic) else WATTS
    found: dict[str, Any] = {}
    problems: list[str] = []
    for text in constants:
        key, equals, given = (part.strip() for part in text.partition("="))
        try:
            value = parse_value(given) if equals else None
        except PathError as error:
            problems.append(f"--constant {text[:80]}: {error}")
            continue
        if key not in (*own, *watts):
            problems.append(f"--constant {text[:80]}: --search {search} has none; {nearest(key, (*own, *watts))}")
        elif why := _why_not(key, value):
            problems.append(f"--constant {text[:80]}: {why}")
        else:
            found[key] = value
    if problems:
        raise PlanError(problems)
    try:
        return replace(
            base,
            heuristic=_heuristic(base, {key: found.pop(key) for key in tuple(found) if key in watts}),
            **found,
        )
    except ValueError as error:
        raise PlanError([f"--constant: {error}"]) from error


def idle_constants(parameters: AecsParameters, constants: Sequence[str], objective: str, races_all: bool) -> list[str]:
    """Of constants that were read, a problem for each that nothing looks at. races_all: no tree is walked."""
    watts_are_read = parameters.alpha > 0.0 or parameters.order == "estimated power"
    problems = []
    for text in constants:
        key, why = text.partition("=")[0].strip(), None
        if objective == "latency" and key in ("alpha", *WATTS, *THREAD_WATTS):
            why = "--objective latency looks at speed alone"
        elif races_all and key in ("tree", "least_gain"):
            why = "every selection is raced, and no tree is walked"
        elif key in (*WATTS, *THREAD_WATTS) and not watts_are_read:
            why = "alpha is 0, so that energy is what was measured; give --constant alpha=0.25, or 1 without a meter"
        if why is not None:
            problems.append(f"--constant {text[:80]}: has no effect: {why}")
    return problems


def _why_not(key: str, value: object) -> str | None:
    if key in WORDS:
        return None if value in WORDS[key] else f"takes one of {', '.join(WORDS[key])}"
    if isinstance(value, bool) or not isinstance(value, int if key in COUNTS else int | float):
        return "takes a whole number" if key in COUNTS else "takes a number, such as 0.25"
    if key in SHARES and not 0 <= value <= 1:
        return "lies between 0 and 1"
    return None if 0 <= value < 1e6 else "is 0 or more, and below a million"


def _heuristic(base: AecsParameters, found: dict[str, float]) -> PowerHeuristic | ThreadHeuristic:
    if isinstance(base.heuristic, ThreadHeuristic):
        return replace(base.heuristic, **found)
    assert isinstance(base.heuristic, PowerHeuristic)
    scales: dict[CoreKind, float] = {kind: found.pop(f"scale_{kind}", base.heuristic.scales[kind]) for kind in KINDS}
    return replace(base.heuristic, scales=scales, **found)


def told(parameters: AecsParameters) -> dict[str, Any]:
    """All constants, as a session keeps them."""
    rest = {key: getattr(parameters, key) for key in (*SHARES, *COUNTS, *WORDS)}
    heuristic = parameters.heuristic
    if isinstance(heuristic, ThreadHeuristic):
        return rest | {key: getattr(heuristic, key) for key in THREAD_WATTS}
    assert isinstance(heuristic, PowerHeuristic)
    scales = {f"scale_{kind}": heuristic.scales[kind] for kind in KINDS}
    return rest | {key: getattr(heuristic, key) for key in ("w_per_ghz2", "idle_factor", "static_w")} | scales


def check_clocks(clusters: Sequence[CoreCluster], parameters: AecsParameters) -> None:
    """Raises `PlanError` where the heuristic cannot tell the power of these cores."""
    if parameters.alpha == 0.0 and parameters.order == "tree":
        return
    try:
        parameters.heuristic.watts(clusters, tuple(cluster.n_cores for cluster in clusters))
    except ValueError as error:
        raise PlanError(
            [
                f"--search: {error}; take --search ios or --constant w_per_thread=1.8, which count threads, or"
                " --constant alpha=0 beside a meter"
            ]
        ) from error


def probed_once(
    clusters: Sequence[CoreCluster], parameters: AecsParameters
) -> Generator[Ask[Selection], Answer, RaceResult[Selection]]:
    """`aecs.asking` with a race's result, without an interval anywhere. Raises ValueError as `asking`."""
    search = asking(clusters, parameters)
    readings: dict[Selection, list[Reading]] = {}
    failed: dict[Selection, str] = {}
    answer: Answer | None = None
    while True:
        try:
            ask = next(search) if answer is None else search.send(answer)
        except StopIteration as end:
            return _result(clusters, parameters, end.value, readings, failed)
        answer = yield ask
        if isinstance(answer, Failed):
            failed[ask.arm] = answer.reason
        else:
            readings.setdefault(ask.arm, []).append(answer)


def _result(
    clusters: Sequence[CoreCluster],
    parameters: AecsParameters,
    found: SearchResult,
    readings: dict[Selection, list[Reading]],
    failed: dict[Selection, str],
) -> RaceResult[Selection]:
    """Of the last reading of each, by which it was judged. What failed later has none that counts."""
    n_probes = sum(map(len, readings.values())) + len(failed)
    readings = {arm: own for arm, own in readings.items() if arm not in failed}
    speed = {arm: own[-1].speed_tokens_per_s for arm, own in readings.items()}
    cost = {arm: heuristic_energy_j(clusters, arm, own[-1], parameters) for arm, own in readings.items()}
    candidates = {each.selection for each in found.probed}

    def state(arm: Selection) -> State:
        if arm == found.chosen:
            return "chosen"
        if arm not in candidates:
            return "not raced"
        return "too slow" if speed[arm] < found.floor_tokens_per_s else "costlier"

    order = sorted(readings, key=lambda arm: cost[arm])
    standings = [
        Standing(
            arm,
            state(arm),
            len(readings[arm]),
            Estimate(speed[arm], None, None),
            Estimate(cost[arm], None, None),
            Estimate(cost[arm] / cost[found.chosen], None, None),
            Estimate(speed[arm] / speed[found.fastest], None, None),
        )
        for arm in order
    ]
    front: list[Selection] = []
    for arm in order:
        if all(speed[arm] > speed[other] for other in front):
            front.append(arm)
    walked = tuple(arm for arm, _ in found.first_probes)
    return RaceResult(
        chosen=found.chosen,
        is_separated=False,
        fastest=found.fastest,
        front=tuple(front),
        on_edge=(),
        standings=(*standings, *(Standing(arm, "failed", 0, reason=why) for arm, why in failed.items())),
        floor_tokens_per_s=found.floor_tokens_per_s,
        speed_noise=None,
        cost_noise=None,
        n_probes=n_probes,
        n_rounds=1,
        drawn_in=0,
        steps=steps_of(clusters, walked, (found.root,), parameters.tree),
    )
