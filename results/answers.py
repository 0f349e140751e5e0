"""What each arm answered to each sample, right or wrong, and what that cost.

An answer may take several requests (a choice each): tokens and seconds are summed, joules integrated over all of them.
Figures are means over the usable trials of the arm. The joules of an answer are those of the first meter between the
edges of its requests, gross; where the meter cannot tell so short a time, or other requests ran in it, a reason stands
there. Their uncertainty is one standard uncertainty of a single trial: the gain of a meter does not average out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import pandas as pd

from results.binary_scores import binary_metrics
from results.cells import model_name, technique_name, trials_of, usable
from results.derivation import RequestEnergies
from results.metrics import NO_METER, no_number, time_method
from results.packed import column_of
from results.records import Cell, Completion, Method, Sample
from results.request_columns import lasting, n_generated, scores_told, shared_time
from results.runs import RunData
from results.trial_traces import TrialTraces, traces_of
from results.trials import Trial

NOT_KEPT = "(not kept: the run is from before samples were stored)"


@dataclass(frozen=True)
class Answer:
    """One arm's answer to one sample. e2e_s: of all its requests together; None where no trial tells it in numbers."""

    cell: Cell
    said: str
    varies: bool
    """Whether repeats answered differently; then `said` is the first repeat's."""
    scores: Mapping[str, float]
    prompt_tokens: int
    generated_tokens: int
    e2e_s: float | None
    time_method: Method
    energy_j: float | None
    energy_uncertainty_j: float | None
    energy_method: Method
    energy_meter: str | None
    energy_reason: str | None
    n_trials: int


@dataclass(frozen=True)
class Answered:
    """A sample with the answers of the arms that were asked it, on one device."""

    workload: str
    device: str
    sample: Sample
    answers: tuple[Answer, ...]
    binary: frozenset[str]
    """Scores of the workload that say right or wrong (`results.binary_scores`)."""

    @property
    def verdicts_differ(self) -> float:
        """Share of pairs of arms whose first scores differ; 0 where nothing is scored.

        Of right or wrong: by how much their shares of repeats that were right differ, so that 4 of 5 is no whole loss.
        """
        first = [next(iter(a.scores.items()), None) for a in self.answers]
        if first and all(found is not None and found[0] in self.binary for found in first):
            pairs = list(combinations([found[1] for found in first if found is not None], 2))
            return math.fsum(abs(a - b) for a, b in pairs) / len(pairs) if pairs else 0.0
        return _differing([found and found[1] for found in first])

    @property
    def answers_differ(self) -> float:
        """Share of pairs of arms that do not say the same, white space at the ends aside."""
        return _differing([a.said.strip() for a in self.answers])

    @property
    def energy_j(self) -> float | None:
        """Of the dearest arm, among those whose joules came to be in one way; None where no arm has any."""
        known = [a.energy_j for a in self.answers if a.energy_j is not None]
        return max(known, default=None)

    @property
    def e2e_s(self) -> float:
        return max((a.e2e_s for a in self.answers if a.e2e_s is not None), default=0.0)


def answered_samples(run: RunData) -> list[Answered]:
    """By workload and device, in the order in which they were asked."""
    trials = {cell_id: usable(own) for cell_id, own in trials_of(run).items()}
    binary = binary_metrics(run)
    found: list[Answered] = []
    for workload, device in dict.fromkeys((c.workload, c.device) for c in run.cells):
        cells = [c for c in run.cells if (c.workload, c.device) == (workload, device)]
        texts = {s.sample_id: s for c in reversed(cells) for s in run.samples.get((workload, c.model), ())}
        by_sample: dict[str, list[Answer]] = {}
        for cell in cells:
            for sample_id, answer in _answers(run, cell, trials[cell.cell_id], texts):
                by_sample.setdefault(sample_id, []).append(answer)
        found += [
            Answered(
                workload,
                device,
                texts.get(i, Sample(sample_id=i, question=NOT_KEPT)),
                tuple(answers),
                binary[workload],
            )
            for i, answers in by_sample.items()
        ]
    return found


def answer_table(run: RunData, answered: Sequence[Answered]) -> pd.DataFrame:
    """One row per sample and arm: all that the report's browser shows a part of, uncut."""
    rows = [_row(run, one, answer) for one in answered for answer in one.answers]
    scores = list(dict.fromkeys(key for row in rows for key in row if key.startswith("score_")))
    frame = pd.DataFrame(rows, columns=[*_COLUMNS, *scores])
    text = ("expected", "choices", "energy_meter", "energy_reason")
    for column in text:
        frame[column] = frame[column].astype(object).where(frame[column].notna(), None)
    numbers = ("e2e_s", "energy_j", "energy_uncertainty_j", "verdicts_differ", "answers_differ", *scores)
    return frame.astype(dict.fromkeys(numbers, "float64"))


_COLUMNS = (
    "run_id", "cell", "workload", "device", "engine", "technique", "model", "sample_id", "question", "expected",
    "choices", "said", "said_varies", "prompt_tokens", "generated_tokens", "n_trials", "time_method", "e2e_s",
    "energy_method", "energy_meter", "energy_j", "energy_uncertainty_j", "energy_reason", "verdicts_differ",
    "answers_differ",
)  # fmt: skip


def _row(run: RunData, one: Answered, answer: Answer) -> dict[str, Any]:
    cell, sample = answer.cell, one.sample
    return {
        "run_id": run.info.run_id,
        "cell": cell.cell_id,
        "workload": one.workload,
        "device": one.device,
        "engine": cell.engine,
        "technique": technique_name(cell),
        "model": model_name(cell),
        "sample_id": sample.sample_id,
        "question": sample.question,
        "expected": sample.expected,
        "choices": json.dumps(sample.choices, ensure_ascii=False) if sample.choices else None,
        "said": answer.said,
        "said_varies": answer.varies,
        "prompt_tokens": answer.prompt_tokens,
        "generated_tokens": answer.generated_tokens,
        "n_trials": answer.n_trials,
        "time_method": answer.time_method,
        "e2e_s": answer.e2e_s,
        "energy_method": answer.energy_method,
        "energy_meter": answer.energy_meter,
        "energy_j": answer.energy_j,
        "energy_uncertainty_j": answer.energy_uncertainty_j,
        "energy_reason": answer.energy_reason,
        "verdicts_differ": one.verdicts_differ,
        "answers_differ": one.answers_differ,
    } | {f"score_{metric}": value for metric, value in answer.scores.items()}


def _differing(values: Sequence[object]) -> float:
    pairs = list(combinations(values, 2))
    return sum(a != b for a, b in pairs) / len(pairs) if pairs else 0.0


# --- one arm ---------------------------------------------------------------------------------------------------------


class _Joules(NamedTuple):
    """Of one answer. reason: why there are none."""

    value: float | None
    uncertainty: float | None
    method: Method
    meter: str | None
    reason: str | None


class _Once(NamedTuple):
    """A sample in one trial. e2e_s: of all its requests together."""

    said: str
    prompt_tokens: int
    generated_tokens: int
    e2e_s: float
    scores: Mapping[str, float]
    joules: _Joules


def _answers(
    run: RunData, cell: Cell, trials: Sequence[Trial], texts: Mapping[str, Sample]
) -> Iterator[tuple[str, Answer]]:
    by_sample: dict[str, list[_Once]] = {}
    for trial in trials:
        for sample_id, once in _of_trial(run, trial, texts):
            by_sample.setdefault(sample_id, []).append(once)
    for sample_id, seen in by_sample.items():
        yield sample_id, _mean_answer(cell, time_method(trials[0].time_method, trials[0].completions, "all"), seen)


def _of_trial(run: RunData, trial: Trial, texts: Mapping[str, Sample]) -> Iterator[tuple[str, _Once]]:
    measured = traces_of(run, trial)
    meter, done = measured.meter, trial.completions
    energies = RequestEnergies(measured.traces, meter, done, measured.rests) if meter is not None else None
    names = ("request_id", "text", "loglikelihood", "n_prompt_tokens")
    request_ids, said, likelihoods, n_prompt = (column_of(done, name) for name in names)
    n_said, e2e_s = n_generated(done), lasting(done, "all")
    requests: dict[str, list[int]] = {}
    for place, sample_id in enumerate(column_of(done, "sample_id")):
        requests.setdefault(sample_id, []).append(place)
    scores: dict[str, dict[str, float]] = {}
    for sample_id, metric, value in scores_told(trial.scores):
        if sample_id is not None:
            scores.setdefault(sample_id, {})[metric] = value
    shared = shared_time(done)
    for sample_id, own in requests.items():
        why_shared = next((shared[i] for i in (request_ids[n] for n in own) if i in shared), None) if shared else None
        once = _Once(
            said=_said([said[n] for n in own], [likelihoods[n] for n in own], texts.get(sample_id)),
            prompt_tokens=sum(n_prompt[n] for n in own),
            generated_tokens=sum(n_said[n] for n in own),
            e2e_s=math.fsum(e2e_s[n] for n in own),
            scores=scores.get(sample_id, {}),
            joules=_joules(done, own, energies, measured, why_shared),
        )
        yield sample_id, once


def _mean_answer(cell: Cell, time_method: Method, seen: Sequence[_Once]) -> Answer:
    metrics = dict.fromkeys(metric for once in seen for metric in once.scores)
    known = [(j.value, j.uncertainty, j.method) for once in seen if (j := once.joules).value is not None]
    stated = [u for _, u, _ in known if u is not None]
    without = [once.joules.reason for once in seen if once.joules.value is None]
    reason = without[0] if without else None
    if known and without:
        reason = f"of {len(known)} of {len(seen)} trials; in the others: {reason}"
    first, seconds = seen[0], [once.e2e_s for once in seen if math.isfinite(once.e2e_s)]
    return Answer(
        cell=cell,
        said=first.said,
        varies=len({once.said for once in seen}) > 1,
        scores={m: _mean([once.scores[m] for once in seen if m in once.scores]) for m in metrics},
        prompt_tokens=first.prompt_tokens,
        generated_tokens=first.generated_tokens,
        e2e_s=_mean(seconds) if seconds else None,
        time_method=time_method,
        energy_j=_mean([j for j, _, _ in known]) if known else None,
        energy_uncertainty_j=math.sqrt(_mean([u * u for u in stated]))
        if stated and len(stated) == len(known)
        else None,
        energy_method=known[0][2] if known else "missing",
        energy_meter=first.joules.meter,
        energy_reason=reason,
        n_trials=len(seen),
    )


def _said(texts: Sequence[str], known: Sequence[float | None], sample: Sample | None) -> str:
    """The text, or the choice that was likelier than all others; the likelihood of a text is no answer.

    Of each request: what was answered, and how likely what was asked for is.
    """
    if known[0] is None:
        return "\n".join(texts)
    likelihoods = [-math.inf if one is None else one for one in known]
    if len(likelihoods) == 1:
        return f"log-likelihood {likelihoods[0]:.4g}"
    if sample is not None and not sample.choices:
        return f"log-likelihood {math.fsum(likelihoods):.4g}, in {len(likelihoods)} windows"
    choices = sample.choices if sample is not None else ()
    # Mutual information asks each choice a second time, without its question.
    asked = likelihoods[: len(choices) or None]
    best = asked.index(max(asked))
    return choices[best] if best < len(choices) else f"choice {best + 1} of {len(likelihoods)}"


def _joules(
    requests: Sequence[Completion],
    own: Sequence[int],
    energies: RequestEnergies | None,
    measured: TrialTraces,
    why_shared: str | None,
) -> _Joules:
    """own: which of the requests."""
    meter = measured.meter
    if energies is None or why_shared or measured.lost:
        return _Joules(None, None, "missing", meter, NO_METER if meter is None else why_shared or measured.lost)
    found = energies.of([requests[n] for n in own])
    if found.energy_j is not None and not math.isfinite(found.energy_j):
        return _Joules(None, None, "missing", meter, no_number("energy", found.energy_j))
    return _Joules(found.energy_j, found.uncertainty_j, found.method, meter, found.reason)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
