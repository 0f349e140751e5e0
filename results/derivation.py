"""The one road from raw records to joules: whatever a table, a page or the terminal says of a trial comes from here.

A trial's energies are derived when it ends and kept with it as a cache, beside the digest of the code that made them
(`derived_by`); they follow from its traces, its completions and its window alone, so they can be derived again
(`results.rederivation`). Joules of samples and requests are derived from the same traces when they are asked for.
Nothing else may integrate: a test reads the imports.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from results.charge import BatteryCharge
from results.cpu_time import with_cpu_joules
from results.energy import SMALL_SHARE, MeterEnergy, energy_between
from results.frozen_power import FrozenPower, frozen_power
from results.idle import idle_baseline
from results.in_step import uneven_w2
from results.intervals import Interval, joined, outside
from results.long_ticks import LongTick, long_ticks, told
from results.peak_power import p90_power
from results.records import PHASES, Completion, EnergyReading, IdleBaseline, Phase, PowerTrace
from results.rest import MAX_STILL_SIGMA, MAX_STILL_TIME, taken_instead
from results.slow_gauges import SlowGauge, slow_gauge
from results.trace_files import IDLE_AFTER, IDLE_BEFORE, WINDOW, raw_part

ARITHMETIC: Final = (
    "charge", "component_energy", "cpu_time", "cumulative", "derivation", "energy", "frozen_power", "idle", "in_step",
    "intervals", "jumps", "liveness", "living", "load_edges", "long_ticks", "peak_power", "regular", "renewal", "rest",
    "slow_gauges", "spikes", "time_means", "uncertainty",
)  # fmt: skip
"""Modules of this package that decide what readings come to."""
DIGITS: Final = 16
PRICING: Final = " pricing "
SHEET: Final = " sheet "
"""Between the digest of the code and those of what priced a modelled trial: code and sheet."""
SHARED: Final = "other requests ran at the same time: these joules cannot be told apart"
UNCERTAINTIES: Final = ("uncertainty_j", "net_uncertainty_j", "gauge_units_uncertainty")
_EDGE_S = 1e-6


class PricedBy(NamedTuple):
    """What turned a modelled trial's operations into seconds and joules. code: digest of it."""

    code: str
    sheet_sha256: str


class TrialEnergies(NamedTuple):
    """By meter: the whole window and each phase, above idle too, then each component of the window."""

    readings: tuple[EnergyReading, ...]
    idle: tuple[IdleBaseline, ...]


def energies_of(
    completions: Sequence[Completion], traces: Mapping[str, Sequence[PowerTrace]], window: Interval
) -> TrialEnergies:
    """All energies of a trial. traces: by part (`WINDOW`, `IDLE_BEFORE`, `IDLE_AFTER`, the raw ones of each).

    Raises `TraceFileError` where a raw part is damaged.
    """
    own, before, after = (with_cpu_joules(traces, part) for part in (WINDOW, IDLE_BEFORE, IDLE_AFTER))
    intervals = phase_intervals(completions, window)
    moved = [phase_intervals(one, window) for one in moved_edges(completions)]
    within = _stretches(completions, window)
    slow = SlowGauges(own, intervals)
    late = LongTicks(own, completions)
    frozen = FrozenSensors(own, before, after)
    readings: list[EnergyReading] = []
    baselines: list[IdleBaseline] = []
    for meter in dict.fromkeys(t.meter for t in own):
        idle = None
        if before or after:
            idle = idle_baseline(meter, before, after)
            baselines.append(idle)
        whole = MeterEnergy(own, meter, of_load=True)
        by_phase = [
            whole.between(
                intervals[phase], phase, idle, [m[phase] for m in moved], within if phase == "all" else intervals[phase]
            )
            for phase in PHASES
        ]
        charge = BatteryCharge(own, traces.get(raw_part(WINDOW), ()), meter)
        by_phase = [
            r if r.energy_j is None else r.model_copy(update={"charge_uah": charge.over_uah(intervals[r.phase])})
            for r in by_phase
        ]
        p90_w, why_none = p90_power(own, window, meter)
        p90 = {"p90_power_w": p90_w, "p90_power_reason": why_none}
        readings += [r.model_copy(update=p90) if r.phase == "all" else r for r in by_phase]
        components = [t.component for t in own if t.meter == meter]
        if len(components) > 1:
            all_moved = [one["all"] for one in moved]
            readings += [
                MeterEnergy(own, meter, c, of_load=True).between(
                    intervals["all"], "all", moved=all_moved, stretches=within
                )
                for c in components
            ]
    readings = [
        frozen.judged(
            late.widened(slow.widened(_unevenly_met(r, own, completions), intervals[r.phase]), intervals[r.phase]),
            intervals[r.phase],
        )
        for r in readings
    ]
    return TrialEnergies(tuple(readings), tuple(baselines))


class SlowGauges:
    """Gauges of a trial that follow the power slowly, as its phases show: what their joules may be off by."""

    def __init__(self, traces: Sequence[PowerTrace], intervals: Mapping[Phase, Sequence[Interval]]) -> None:
        phases = [intervals["prefill"], intervals["decode"]]
        found = [slow for trace in traces if (slow := slow_gauge(trace, phases)) is not None]
        self._found: list[tuple[SlowGauge, MeterEnergy]] = [
            (slow, MeterEnergy(traces, slow.trace.meter, slow.trace.component, of_load=True)) for slow in found
        ]

    def widened(self, reading: EnergyReading, spans: Sequence[Interval]) -> EnergyReading:
        """spans: of the reading."""
        is_total = reading.component == "total"
        off, told = 0.0, []
        for slow, energy in self._found:
            trace = slow.trace
            if trace.meter == reading.meter and (trace.additive if is_total else trace.component == reading.component):
                own = energy.between(spans, reading.phase)
                amount = own.gauge_units if own.energy_j is None else own.energy_j
                if amount is not None:
                    off += abs(amount - slow.energy_j(spans))
                    told.append(str(slow))
        if not told:
            return reading
        remark = "; ".join(filter(None, [reading.remark, *told]))
        return _less_certain(reading, off).model_copy(update={"remark": remark})


class LongTicks:
    """Charge counters of a trial that stood still while its requests ran: what they may have lost."""

    def __init__(self, traces: Sequence[PowerTrace], completions: Sequence[Completion]) -> None:
        busy, prompts = _spans(completions), [(c.start_s, c.prefill_end_s) for c in completions]
        self._found: list[tuple[PowerTrace, list[LongTick]]] = [
            (trace, found) for trace in traces if (found := long_ticks(trace, busy, prompts))
        ]

    def widened(self, reading: EnergyReading, spans: Sequence[Interval]) -> EnergyReading:
        """spans: of the reading. None of its joules where more may be lost than is a measurement's."""
        is_total = reading.component == "total"
        for trace, ticks in self._found:
            own = trace.additive if is_total else trace.component == reading.component
            inside = [tick for tick in ticks if tick.within(spans) > 0]
            if reading.energy_j is None or trace.meter != reading.meter or not own or not inside:
                continue
            # What stops a counter once stops it again: they err together.
            off_j = math.fsum(tick.hidden_j * tick.within(spans) for tick in inside) / math.sqrt(3)
            if off_j > MAX_STILL_SIGMA * reading.energy_j:
                return _without_joules(reading, f"{told(trace, inside, spans)} (measure again)")
            remark = "; ".join(filter(None, [reading.remark, told(trace, inside, spans)]))
            reading = _less_certain(reading, off_j).model_copy(update={"remark": remark})
        return reading


class FrozenSensors:
    """Sensors of power of a trial that stood still, as the idle times around its window tell."""

    def __init__(
        self, traces: Sequence[PowerTrace], before: Sequence[PowerTrace] = (), after: Sequence[PowerTrace] = ()
    ) -> None:
        self._traces = traces
        self._found: list[FrozenPower] = [
            found for trace in traces if (found := frozen_power(trace, before, after)) is not None
        ]

    def judged(self, reading: EnergyReading, spans: Sequence[Interval]) -> EnergyReading:
        """spans: of the reading. None of its joules where a sensor that counts in them surely stood still for long."""
        if reading.energy_j is None:
            return reading
        is_total = reading.component == "total"
        parts = [t for t in self._traces if t.meter == reading.meter]
        chosen = [t for t in parts if (t.additive if is_total else t.component == reading.component)]
        if is_total:
            chosen = [taken_instead(t, parts) or t for t in chosen]
        own = [found for found in self._found if any(found.trace is t for t in chosen)]
        for found in own:
            still_s = found.within_s(spans)
            shown_j = float(found.trace.values.mean()) * still_s
            is_notable = len(chosen) == 1 or shown_j > SMALL_SHARE * reading.energy_j
            if found.is_sure and is_notable and still_s > MAX_STILL_TIME * reading.duration_s:
                return _without_joules(reading, found.told)
        # Where other parts move, one that does not may have nothing to do.
        told = [f.told for f in own if (f.is_sure or len(own) == len(chosen)) and f.within_s(spans) > 0]
        return reading.model_copy(update={"remark": "; ".join(filter(None, [reading.remark, *told])) or None})


def _unevenly_met(
    reading: EnergyReading, traces: Sequence[PowerTrace], completions: Sequence[Completion]
) -> EnergyReading:
    """The uncertainty of a whole window holds that its meter met the requests at some of their moments more often than
    at others. What is set aside is no part of a request."""
    if reading.phase != "all":
        return reading
    is_total = reading.component == "total"
    own = [t for t in traces if t.meter == reading.meter]
    chosen = [t for t in own if (t.additive if is_total else t.component == reading.component)]
    off_w2 = uneven_w2(chosen, completions)
    if off_w2 == 0 or _set_aside(completions):
        return reading
    return _less_certain(reading, math.sqrt(off_w2) * reading.duration_s)


def _without_joules(reading: EnergyReading, reason: str) -> EnergyReading:
    kept = EnergyReading(
        phase=reading.phase, meter=reading.meter, component=reading.component, method=reading.method,
        duration_s=reading.duration_s, reason=reason,
    )  # fmt: skip
    has_p90 = reading.p90_power_w is not None or reading.p90_power_reason is not None
    return kept.model_copy(update={"p90_power_reason": f"P90 power: {reason}"}) if has_p90 else kept


def _less_certain(reading: EnergyReading, off: float) -> EnergyReading:
    """off: in the unit of its amount, one standard uncertainty more."""
    stated = {name: getattr(reading, name) for name in UNCERTAINTIES}
    return reading.model_copy(update={name: math.hypot(u, off) for name, u in stated.items() if u is not None})


def energy_of_spans(
    traces: Sequence[PowerTrace], spans: Sequence[Interval], meter: str, component: str = "total"
) -> EnergyReading:
    """Of disjoint stretches together, whatever they are: a window, a recording, a sample's requests."""
    return energy_between(traces, spans, "all", meter, component)


class RequestEnergies:
    """Gross joules of a trial's requests; `not_alone` says of which they cannot be told.

    Each costs the work of its own span: a window of hours may have thousands of them.
    """

    def __init__(
        self,
        traces: Sequence[PowerTrace],
        meter: str,
        completions: Sequence[Completion] = (),
        rests: tuple[Sequence[PowerTrace], Sequence[PowerTrace]] = ((), ()),
    ) -> None:
        """completions: all of the trial, which tell how slowly a gauge follows. rests: the traces of the idle times
        before and after it, which tell whether a sensor stood still."""
        self._energy = MeterEnergy(traces, meter, of_load=True)
        self._slow = SlowGauges(traces, phase_intervals(completions, (0.0, 0.0)))
        self._late = LongTicks(traces, completions)
        self._frozen = FrozenSensors(traces, *rests)

    def of(self, requests: Sequence[Completion]) -> EnergyReading:
        """Of some of them together."""
        spans = _spans(requests)
        moved = [_spans(one) for one in moved_edges(requests)]
        found = self._slow.widened(
            self._energy.between(spans, "all", moved=moved, stretches=_stretches(requests)), spans
        )
        return self._frozen.judged(self._late.widened(found, spans), spans)


def _spans(requests: Sequence[Completion]) -> list[Interval]:
    spans = [(c.start_s, c.end_s) for c in requests]
    aside = _set_aside(requests)
    return outside(joined(spans), aside) if aside else spans


def not_alone(completions: Sequence[Completion]) -> dict[str, str]:
    """By request: why its joules cannot be told from others'; only those during which another one ran."""
    found: dict[str, Completion] = {}
    longest: Completion | None = None
    for completion in sorted(completions, key=lambda c: c.start_s):
        if longest is not None and completion.start_s < longest.end_s - _EDGE_S:
            found |= {completion.request_id: completion, longest.request_id: longest}
        if longest is None or completion.end_s > longest.end_s:
            longest = completion
    begun = Counter(c.start_s for c in completions) if found else Counter()
    return {request_id: _why_not_alone(begun[one.start_s]) for request_id, one in found.items()}


def _why_not_alone(n_together: int) -> str:
    if n_together == 1:
        return SHARED
    return f"answered in a batch of {n_together}: its joules cannot be told from the others'"


def phase_intervals(completions: Sequence[Completion], window: Interval) -> dict[Phase, list[Interval]]:
    """When each phase ran. `all` is the whole window: the engine's own overhead and waiting for arrivals included, and
    not what was set aside: a program for each request loads the model each time.

    A batch reads all of its prompts before it decodes: a request whose prompt was read early waits for the others, and
    that time is prefill.
    """
    prefill = joined((c.start_s, c.prefill_end_s) for c in completions)
    decode = joined((c.prefill_end_s, c.token_times_s[-1]) for c in completions if c.n_generated >= 2)
    phases: dict[Phase, list[Interval]] = {"prefill": prefill, "decode": outside(decode, prefill), "all": [window]}
    aside = _set_aside(completions)
    return {phase: outside(spans, aside) for phase, spans in phases.items()} if aside else phases


def moved_edges(completions: Sequence[Completion]) -> list[list[Completion]]:
    """The requests as early, and as late, as they may have been answered: uniform, so sqrt(3) standard uncertainties.
    Empty where the edges of all are known, or none of them is known how well."""
    if not any(c.edges_uncertainty_s for c in completions):
        return []
    return [[_moved(c, sign * math.sqrt(3) * (c.edges_uncertainty_s or 0.0)) for c in completions] for sign in (-1, 1)]


def _moved(completion: Completion, by_s: float) -> Completion:
    """When the engine was asked, and had answered, is known: these edges of what is set aside stay."""
    aside = completion.set_aside_s
    asked_s = aside[0][0] if aside and aside[0][0] < completion.start_s else -math.inf
    answered_s = aside[-1][1] if aside and aside[-1][1] > completion.end_s else math.inf

    def at(time_s: float) -> float:
        return time_s if time_s in (asked_s, answered_s) else min(max(time_s + by_s, asked_s), answered_s)

    return completion.model_copy(
        update={
            "start_s": at(completion.start_s),
            "prefill_end_s": at(completion.prefill_end_s),
            "end_s": at(completion.end_s),
            "token_times_s": tuple(map(at, completion.token_times_s)),
            "set_aside_s": tuple((at(begin_s), at(end_s)) for begin_s, end_s in aside),
        }
    )


def _stretches(completions: Sequence[Completion], window: Interval | None = None) -> list[Interval]:
    """What phases cut a window into, pauses too; without one, the phases of the requests."""
    phases = [(c.start_s, c.prefill_end_s) for c in completions]
    phases += [(c.prefill_end_s, c.end_s) for c in completions if c.end_s > c.prefill_end_s]
    if window is None:
        return joined(phases)
    inside = {at_s for phase in phases for at_s in phase if window[0] < at_s < window[1]}
    return list(pairwise(sorted({*window, *inside})))


def _set_aside(completions: Sequence[Completion]) -> list[Interval]:
    return joined(stretch for c in completions for stretch in c.set_aside_s)


def remarks_on(readings: Sequence[EnergyReading]) -> tuple[str, ...]:
    """What stands behind a total besides its readings: a stretch that was filled in, a part that was at rest."""
    totals = [r for r in readings if r.phase == "all" and r.component == "total" and r.remark]
    return tuple(f"energy of {r.meter}: {r.remark}" for r in totals)


@cache
def arithmetic_digest() -> str:
    """Of the code between raw records and joules."""
    whole = hashlib.sha256()
    for module in ARITHMETIC:
        whole.update((Path(__file__).parent / f"{module}.py").read_bytes())
    return whole.hexdigest()[:DIGITS]


def derived_by(priced_by: PricedBy | None = None) -> str:
    """What decided a trial's joules besides its raw records: the digest of the code, and of the code and the hardware
    sheet that priced a modelled one. Figures that carry another word may have come out otherwise."""
    if priced_by is None:
        return arithmetic_digest()
    code, sheet_sha256 = priced_by
    return f"{arithmetic_digest()}{PRICING}{code[:DIGITS]}{SHEET}{sheet_sha256[:DIGITS]}"


def is_by_this_code(word: str | None) -> bool:
    """Of what `derived_by` said when a trial ran; None before it was kept."""
    return word is not None and word.partition(" ")[0] == arithmetic_digest()


def is_priced_by(word: str | None, code: str) -> bool:
    """Of what `derived_by` said of a modelled trial: whether this code priced it. Older runs do not say."""
    return word is not None and word.partition(PRICING)[2].partition(SHEET)[0] == code[:DIGITS]
