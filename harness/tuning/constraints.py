"""What keeps a candidate out of a search, whatever it costs: it answers worse, its weights are too large, or the device
gets too hot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from results.cells import answering
from results.compare import Difference, UnlikeError, compare_scores
from results.trials import Trial
from results.units import format_bytes, format_share


def too_heavy(trials: Sequence[Trial], limit_bytes: int | None) -> str | None:
    """By the weights as the engine holds them: the process's own peak would hold other candidates' too."""
    if limit_bytes is None:
        return None
    found = [trial.weight_bytes for trial in trials if trial.weight_bytes is not None]
    if not found:
        return f"the engine does not tell the size of its weights, and the limit is {format_bytes(limit_bytes)}"
    most = max(found)
    return (
        None if most <= limit_bytes else f"weights of {format_bytes(most)}, over the limit {format_bytes(limit_bytes)}"
    )


def too_hot(trials: Sequence[Trial], limit_c: float) -> str | None:
    """By the hottest state that was seen in a probe, of each workload."""
    found = [state.temperature_c for trial in trials for state in trial.conditions if state.temperature_c is not None]
    if not found:
        return f"the device tells no temperature, and the limit is {limit_c:g} degC"
    return f"the device was at {max(found):.1f} degC, over the limit {limit_c:g} degC" if max(found) > limit_c else None


def too_wrong(trials: Sequence[Trial], reference: Sequence[Trial], floor: float) -> str | None:
    """Why a candidate may answer one workload worse than the planned arm by more than `floor`, a share of all answers.

    Paired by samples: the whole 95 % interval of the difference has to lie above -floor, unless every answer is the
    same. A few samples prove little, and a candidate that is not proven is kept out. None: it may stay. Scores that are
    not right or wrong have no share, and are left alone.
    """
    own, others = _scores(trials), _scores(reference)
    shares = [m for m in sorted(own.keys() & others.keys()) if _is_binary(own[m], others[m])]
    if not shares:
        return "no sample of it is right or wrong, and of the planned arm there are some"
    for metric in shares:
        try:
            found = compare_scores(others[metric], own[metric], is_binary=True)
        except UnlikeError as error:
            return f"{metric}: not comparable with the planned arm ({error})"
        if found.n_changed and (found.low is None or found.low < -floor):
            return (
                f"{metric} {_told(found)} against the planned arm, and at most -{format_share(floor, '.2f')} is allowed"
            )
    return None


def is_right_or_wrong(trials: Sequence[Trial]) -> bool:
    """Whether any sample is scored so: a workload of lengths alone has no accuracy to fall."""
    return any(_is_binary(own) for own in _scores(trials).values())


def _told(found: Difference) -> str:
    mean, ends = format_share(found.mean, "+.2f"), (found.low, found.high)
    known = [format_share(end, "+.2f") for end in ends if end is not None]
    if len(known) < len(ends):
        return f"{mean} over {found.n} samples without an interval"
    return f"{mean} [{', '.join(known)}] over {found.n} samples"


def _scores(trials: Iterable[Trial]) -> dict[str, dict[str, list[float]]]:
    """By metric and sample: the score in each trial, of metrics where more is better."""
    found: dict[str, dict[str, list[float]]] = {}
    for trial in answering(trials):
        for score in trial.scores:
            if score.sample_id is not None and score.higher_is_better:
                found.setdefault(score.metric, {}).setdefault(score.sample_id, []).append(score.value)
    return found


def _is_binary(*scores: dict[str, list[float]]) -> bool:
    return all(value in (0.0, 1.0) for own in scores for values in own.values() for value in values)
