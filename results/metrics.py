"""What one trial says about each metric: a number with its method, or the reason why there is none.

A trial's latency is the mean over its requests (`itl`: over its gaps); the single values go along in `pooled`, for
tail percentiles. Throughput is tokens over the time in which at least one request was in that phase, so that batched
requests are not counted twice; a batch decodes once all its prompts are read. Energy per token divides the phase's
joules by the phase's tokens:

    prefill   tokens pushed through prefill; those that the engine kept from the request before are not among them
    decode    generated tokens later than the first (prefill emits the first, and those that came with it in one chunk)
    all       both, and the generated tokens that prefill emitted

So J/token and token/s speak of tokens that were computed. What prefix reuse saves shows in TTFT, E2E and the window's
joules; its J/token may even rise, as the tokens left to compute attend to as long a past.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from itertools import chain
from typing import NamedTuple

from results.counters import COUNTERS
from results.intervals import covered_s, joined, outside
from results.packed import column_of
from results.records import PHASES, Completion, EnergyReading, Method, Phase
from results.request_columns import RequestColumns, are_due, edges_s, n_generated, shared_time
from results.trials import Trial

NO_GENERATION = "no request generated a token (log-likelihoods end with prefill)"
ONE_TOKEN = "no request generated two tokens or more"
AT_ONCE = "all tokens of an answer came together: nothing was seen of the time between them"
NO_STAMPS = "the engine stamps no single token"
NO_METER = "no meter was read in this trial"
RELATIVE_UNITS = {
    "J": "gauge unit",
    "J/token": "gauge unit/token",
    "J/response": "gauge unit/response",
    "W": "gauge unit/s",
}
"""A relative gauge counts in units of its own; they never stand under joules."""


class Observation(NamedTuple):
    """One metric of one trial. `phase` is empty where a metric has none; `meter` where it is not energy.

    A tuple: a large run makes hundreds of thousands, and a frozen dataclass takes three times as long to make.
    """

    metric: str
    phase: Phase | None
    unit: str
    method: Method
    value: float | None
    reason: str | None = None
    meter: str | None = None
    pooled: tuple[float, ...] = ()


LATENCY_METRICS: tuple[tuple[str, Phase, str], ...] = (
    ("ttft", "prefill", "s"),
    ("tpot", "decode", "s"),
    ("itl", "decode", "s"),
    ("e2e", "all", "s"),
    ("throughput", "prefill", "token/s"),
    ("throughput", "decode", "token/s"),
)
ENERGY_METRICS: tuple[tuple[str, str], ...] = (
    ("energy_per_token", "J/token"),
    ("net_energy_per_token", "J/token"),
    ("average_power", "W"),
    ("energy", "J"),
    ("energy_per_response", "J/response"),
    ("power_p90", "W"),
    ("energy_uncertainty", "%"),
)
CHARGE_METRIC = ("charge_per_token", "uAh/token")
"""Beside the energy of a battery gauge whose voltage was kept; others have no such rows."""
LOAD_METRICS: tuple[tuple[str, Phase | None, str], ...] = (
    ("queueing", None, "s"),
    ("ttft_from_arrival", "prefill", "s"),
    ("e2e_from_arrival", "all", "s"),
    ("utilisation", None, "%"),
)
"""Of workloads whose requests arrive by themselves; others have no such rows."""
FROM_ARRIVAL = {"ttft": "ttft_from_arrival", "e2e": "e2e_from_arrival"}
"""What counts instead where there are such rows: by the engine's own times who keeps requests waiting is faster."""
SIZE_METRICS: tuple[tuple[str, str], ...] = (
    ("parameters", "parameters"),
    ("weight_bytes", "B"),
    ("peak_memory", "B"),
)
TECHNIQUE_METRICS = tuple((counter.metric, counter.unit) for counter in COUNTERS)


def unseen(reason: str) -> list[Observation]:
    """Every latency, energy and technique metric, without a value: what a cell says that has no usable trial."""
    rows = [Observation(metric, phase, unit, "missing", None, reason) for metric, phase, unit in LATENCY_METRICS]
    rows += [Observation(metric, p, unit, "missing", None, reason) for metric, unit in ENERGY_METRICS for p in PHASES]
    return rows + _unseen_counters(reason, "missing")


def in_numbers(read: Callable[[Trial], list[Observation]]) -> Callable[[Trial], list[Observation]]:
    """A value that is no number (an engine or a meter told NaN) is missing, with that as the reason."""

    @wraps(read)
    def known(trial: Trial) -> list[Observation]:
        return [
            o
            if o.value is None or math.isfinite(o.value)
            else o._replace(value=None, reason=no_number(o.metric, o.value), pooled=())
            for o in read(trial)
        ]

    return known


@in_numbers
def latency_observations(trial: Trial) -> list[Observation]:
    done = trial.completions
    columns = RequestColumns(done)
    no_gap = AT_ONCE if any(n > 1 for n in n_generated(done)) else ONE_TOKEN
    pooled: dict[str, tuple[Sequence[float], str]] = {
        "ttft": ([s for s in columns.ttft_s if s is not None], NO_GENERATION),
        "tpot": ([s for s in columns.tpot_s if s is not None], no_gap),
        "itl": (columns.itl_s, NO_STAMPS if any(column_of(done, "is_spread")) else no_gap),
        "e2e": (columns.e2e_s, "no request was completed"),
    }
    rows = []
    some_derived = any(column_of(done, "derived"))
    for metric, phase, unit in LATENCY_METRICS:
        method: Method = trial.time_method
        if some_derived:
            method = time_method(method, done, phase, of_first_token=metric == "ttft")
        if metric == "throughput":
            value, reason = _throughput(trial, phase)
            rows.append(Observation(metric, phase, unit, method, value, reason))
            continue
        values, why_none = pooled[metric]
        mean = math.fsum(values) / len(values) if values else None
        reason = None if values else why_none
        rows.append(Observation(metric, phase, unit, method, mean, reason, pooled=tuple(values)))
    return rows


def time_method(clock: Method, completions: Sequence[Completion], phase: Phase, of_first_token: bool = False) -> Method:
    """How the seconds of a phase came to be, or those until the first token. clock: of the trial."""
    parts: dict[Phase, set[str]] = {"prefill": {"prefill"}, "decode": {"decode"}, "all": {"prefill", "decode"}}
    asked = parts[phase] | ({"first token"} if of_first_token else set())
    return "derived" if any(asked & {*derived} for derived in column_of(completions, "derived") if derived) else clock


def time_words(whole: str, first_token: str) -> str:
    """How the seconds of whole requests came to be, and those of their first tokens where that is another way."""
    return whole if first_token in (whole, "missing") else f"{whole}, first token {first_token}"


@in_numbers
def load_observations(trial: Trial) -> list[Observation]:
    """Under load: the wait before the engine takes a request, TTFT and E2E with that wait, and the share of the window
    in which the engine worked. Empty where requests do not arrive by themselves."""
    if not are_due(trial.completions) or trial.window_start_s is None or trial.window_end_s is None:
        return []
    done = trial.completions
    busy_s = covered_s((c.start_s, c.end_s) for c in done)
    window_s = trial.window_end_s - trial.window_start_s
    pooled: dict[str, Sequence[float]] = {
        "queueing": [c.queueing_s for c in done if c.queueing_s is not None],
        "ttft_from_arrival": [c.ttft_from_arrival_s for c in done if c.ttft_from_arrival_s is not None],
        "e2e_from_arrival": [c.e2e_from_arrival_s for c in done if c.e2e_from_arrival_s is not None],
    }
    means = {metric: math.fsum(values) / len(values) if values else None for metric, values in pooled.items()}
    means["utilisation"] = 100 * busy_s / window_s if window_s else None
    reasons = {"ttft_from_arrival": NO_GENERATION, "utilisation": "the window took no time on this clock"}
    return [
        Observation(
            metric,
            phase,
            unit,
            time_method(trial.time_method, done, phase or "all", of_first_token=metric == "ttft_from_arrival"),
            means[metric],
            reasons[metric] if means[metric] is None else None,
            pooled=tuple(pooled.get(metric, ())),
        )
        for metric, phase, unit in LOAD_METRICS
    ]


@in_numbers
def energy_observations(trial: Trial) -> list[Observation]:
    """Rows of each meter's total. Components of a meter are in the store; they are parts of the total."""
    totals = [r for r in trial.energy if r.component == "total"]
    if not totals:
        return [o._replace(reason=NO_METER) for o in unseen(NO_METER) if o.metric in dict(ENERGY_METRICS)]
    rows = [observation for reading in totals for observation in _of_reading(reading, trial)]
    read = {(r.meter, r.phase) for r in totals}
    unread = ((meter, p) for meter in dict.fromkeys(r.meter for r in totals) for p in PHASES if (meter, p) not in read)
    for meter, phase in unread:
        why = f"{meter} was not read for the {phase} phase"
        rows += [Observation(metric, phase, unit, "missing", None, why, meter) for metric, unit in ENERGY_METRICS]
    return rows


def accuracy_observations(trial: Trial) -> list[Observation]:
    """The task's own aggregates, each with its closed-form standard error as a row of its own."""
    rows = []
    for score in trial.scores:
        if score.sample_id is not None:
            continue
        value, why = (score.value, None) if math.isfinite(score.value) else (None, no_number(score.metric, score.value))
        rows.append(Observation(score.metric, None, "1", "measured", value, why))
        stderr = score.stderr if score.stderr is not None and math.isfinite(score.stderr) else None
        no_stderr = None if stderr is not None else f"no closed-form standard error of {score.metric}"
        rows.append(Observation(f"{score.metric}_stderr", None, "1", "measured", stderr, no_stderr))
    return rows


def no_number(metric: str, value: float) -> str:
    """Why a figure is none. Of a score: where every answer of a sample has a probability of 0, tasks divide 0 by 0."""
    return f"{metric} came out as {value}, which is no number to go by"


@in_numbers
def technique_observations(trial: Trial) -> list[Observation]:
    counters = trial.counters
    if counters is None:
        return _unseen_counters("the engine reports no counters", "measured")
    rows = []
    for counter in COUNTERS:
        value = counter.read(counters)
        if value is not None or not counter.is_optional:
            reason = counter.reason if value is None else None
            rows.append(Observation(counter.metric, None, counter.unit, "measured", value, reason))
    return rows


def _unseen_counters(reason: str, method: Method) -> list[Observation]:
    return [Observation(c.metric, None, c.unit, method, None, reason) for c in COUNTERS if not c.is_optional]


def size_observations(trial: Trial) -> list[Observation]:
    """How large the model is as its engine holds it (derived), and the process's peak memory (measured)."""
    elsewhere = "the engine does not hold the weights: they are elsewhere, or another model's are priced"
    unread = trial.peak_memory_remark or "peak memory: not recorded"
    found: dict[str, tuple[Method, float | None, str]] = {
        "parameters": ("derived", trial.n_parameters, elsewhere),
        "weight_bytes": ("derived", trial.weight_bytes, elsewhere),
        "peak_memory": ("measured", trial.peak_memory_bytes, unread),
    }
    rows = []
    for metric, unit in SIZE_METRICS:
        method, value, reason = found[metric]
        rows.append(Observation(metric, None, unit, method, value, reason if value is None else None))
    return rows


def tokens_of(trial: Trial, phase: Phase) -> int:
    if phase == "all":
        return trial.prefill_tokens + sum(n_generated(trial.completions))
    return trial.prefill_tokens if phase == "prefill" else trial.decode_tokens


def _of_reading(reading: EnergyReading, trial: Trial) -> Iterator[Observation]:
    n_tokens = tokens_of(trial, reading.phase)
    relative = reading.method == "relative gauge"
    amount = reading.gauge_units if relative else reading.energy_j
    uncertainty = reading.gauge_units_uncertainty if relative else reading.uncertainty_j
    no_energy = None if amount is not None else reading.reason or f"{reading.meter} gave no energy"
    no_net = no_energy or (None if reading.net_energy_j is not None else reading.reason or "no idle baseline")
    no_tokens = None if n_tokens else f"no {reading.phase} tokens in this trial"
    uncertainty_percent = 100 * uncertainty / abs(amount) if amount and uncertainty is not None else None
    # In the order of ENERGY_METRICS.
    values = (
        (_over(amount, n_tokens), no_tokens or no_energy),
        (_over(reading.net_energy_j, n_tokens), no_tokens or no_net),
        (_over(amount, reading.duration_s), no_energy or "the phase has no duration"),
        (amount, no_energy),
        (_over(amount, len(trial.completions)), no_energy or "no request was answered"),
        (reading.p90_power_w, reading.p90_power_reason or _no_p90(reading.phase)),
        (uncertainty_percent, no_energy or "the meter states no uncertainty"),
    )
    phase, method, meter = reading.phase, reading.method, reading.meter
    for (metric, unit), (value, reason) in zip(ENERGY_METRICS, values, strict=True):
        shown_unit = RELATIVE_UNITS.get(unit, unit) if relative else unit
        yield Observation(metric, phase, shown_unit, method, value, reason if value is None else None, meter)
    if reading.charge_uah is not None:
        metric, unit = CHARGE_METRIC
        yield Observation(metric, phase, unit, method, _over(reading.charge_uah, n_tokens), no_tokens, meter)


def _no_p90(phase: Phase) -> str:
    return "P90 power: not recorded" if phase == "all" else "P90 power is that of the whole window"


def _over(amount: float | None, per: float) -> float | None:
    return None if amount is None or per == 0 else amount / per


def busy_s(trial: Trial, phase: Phase) -> float:
    """Time in which at least one request was in that phase, without what was set aside. A request of a batch whose
    prompt was read early waits for the others, and that time is prefill: as of its joules (`results.derivation`)."""
    done = trial.completions
    spans: Iterable[tuple[float, float]] = zip(*edges_s(done, phase), strict=True)
    if phase == "decode" and shared_time(done):
        spans = outside(joined(spans), joined(zip(*edges_s(done, "prefill"), strict=True)))
    aside = joined(chain.from_iterable(column_of(trial.completions, "set_aside_s")))
    return covered_s(outside(joined(spans), aside) if aside else spans)


def _throughput(trial: Trial, phase: Phase) -> tuple[float | None, str | None]:
    n_tokens = tokens_of(trial, phase)
    seconds = busy_s(trial, phase)
    if n_tokens == 0 or seconds == 0:
        return None, f"no {phase} tokens in this trial" if n_tokens == 0 else f"{phase} took no time on this clock"
    return n_tokens / seconds, None
