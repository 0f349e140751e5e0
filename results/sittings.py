"""Sittings of a run: what lies between two of them, and which trials were measured again in a later one.

A run that is gone on with (`--resume`) has another sitting, and so has a device of a fleet that was away for long.
Repeat i of two arms is a pair because they followed each other; measured in two sittings they did not, and what changed
meanwhile (heat, charge, other programs) is in their difference. One such pair among others scatters by what it is off,
so that the interval of all holds the truth. Of several that are off by the same it does not: then those of one sitting
alone are pairs. In a plan whose order is sequential none followed each other, which is told.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from results.records import Cell
from results.runs import RunData
from results.trials import Trial

SHOWN = 6
"""Repeats that are named one by one."""

MOST_APART = 1
"""Pairs of two sittings, over all workloads of a ratio, that its interval holds whatever they are off by."""
APART = "measured in different sittings, so that what changed meanwhile, as heat, is in the difference: no interval"

Sittings = Mapping[str, Mapping[int, int]]
"""By cell and repeat, of trials that came to times of their own."""


def sittings_of(trials: Iterable[Trial]) -> Sittings:
    """Modelled machines do not change, and rounds of endurance are no pairs."""
    found: defaultdict[str, dict[int, int]] = defaultdict(dict)
    for trial in trials:
        if trial.status == "ok" and trial.time_method == "measured" and trial.endurance is None:
            found[trial.cell_id][trial.repeat] = trial.sitting
    return found


def pairs_that_count(
    repeats: Sequence[Sequence[int]], own: Sequence[Mapping[int, int]], other: Sequence[Mapping[int, int]]
) -> list[Sequence[int]]:
    """By workload, of the repeats that two arms both have: those whose pairs tell the arms apart, and not the sittings.
    own, other: the sitting of each."""
    together = [[i for i in both if a.get(i) == b.get(i)] for both, a, b in zip(repeats, own, other, strict=True)]
    n_apart = sum(map(len, repeats)) - sum(map(len, together))
    return list(repeats) if n_apart <= MOST_APART else list(together)


def told_apart(cells: Iterable[Cell], sittings: Sittings) -> list[str]:
    """What a reader must know of arms that are compared across sittings, a sentence for each workload, device and
    model."""
    by_repeat: dict[tuple[str, str, str], defaultdict[int, set[int]]] = {}
    for cell in cells:
        of_both = by_repeat.setdefault((cell.workload, cell.device, cell.model), defaultdict(set))
        for repeat, sitting in sittings.get(cell.cell_id, {}).items():
            of_both[repeat].add(sitting)
    told, has_models = [], len({model for _, _, model in by_repeat}) > 1
    for (workload, device, model), found in by_repeat.items():
        apart = [repeat + 1 for repeat, own in sorted(found.items()) if len(own) > 1]
        if apart:
            named = ", ".join(map(str, apart[:SHOWN])) + (", ..." if len(apart) > SHOWN else "")
            of_model = f", {model}" if has_models else ""
            told.append(
                f"{workload} on {device}{of_model}: in {len(apart)} of {len(found)} repeats (trial {named}) the arms"
                " were not measured in one sitting, as the run was broken off or the device lost in between. What"
                " changed meanwhile, as heat, is in the difference of these pairs. Where two arms have more than one"
                " such pair, no interval of times or joules is over them."
            )
    return told


def told_in_turn(plan: Mapping[str, Any], cells: Iterable[Cell], sittings: Sittings) -> list[str]:
    """What a reader must know of arms that were measured one after the other: repeat i of two of them is no pair."""
    if (plan.get("protocol") or {}).get("order") != "sequential":
        return []
    arms = Counter((cell.workload, cell.device, cell.model) for cell in cells if cell.cell_id in sittings)
    if max(arms.values(), default=0) < 2:
        return []
    return [
        'protocol.order is "sequential": all repeats of an arm were measured before those of the next. What changed'
        " meanwhile, as heat, is in the differences of arms, and in no interval: arms that are alike may be told apart"
        " by it."
    ]


def sitting_notes(run: RunData) -> list[str]:
    sittings = sittings_of(run.trials)
    return told_apart(run.cells, sittings) + told_in_turn(run.info.plan, run.cells, sittings)


def told_replaced(cells: Iterable[Cell], replaced: Iterable[Trial]) -> tuple[str, ...]:
    """What a reader must know of trials that were measured again, a sentence a device."""
    device_of = {cell.cell_id: cell.device for cell in cells}
    places: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)
    for trial in replaced:
        places[device_of[trial.cell_id]].add((trial.cell_id, trial.repeat))
    return tuple(
        f"{len(own)} trial{'s' if len(own) != 1 else ''} of {device} failed because it, a meter or a server was lost."
        f" {'It was' if len(own) == 1 else 'They were'} measured again when the run was gone on with; what failed is in"
        " no count."
        for device, own in places.items()
    )
