"""What ran when in a trial's window, on one clock: requests by phase; units and links of a modelled machine, or the
threads that compute and copy of a measured one; and power.

Pictures and trace files are made of it. A track has one thing at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from results.copies import DecodeStep
from results.cpu_time import with_cpu_joules
from results.intervals import outside
from results.ran_operations import StoredOperations, joules_of_operations, stored_operations
from results.records import Completion, PowerTrace
from results.resources import resource_place, shown_resource
from results.trace_files import WINDOW

REQUESTS, UNITS, LINKS, THREADS = "requests", "units", "links", "threads"
Detail = str | int | float
_TOLD = ("launches", "flops", "weight_bytes", "moved_bytes")
SAME_POWER = 1e-9
"""Relative difference below which two stretches have the same watts: sums of floats differ so much."""


@dataclass(frozen=True)
class Slice:
    """kind: what a picture draws it as. label: for within it."""

    begin_s: float
    end_s: float
    name: str
    kind: str
    label: str = ""
    details: Mapping[str, Detail] = field(default_factory=dict)


@dataclass(frozen=True)
class Track:
    """slices: one after another."""

    group: str
    name: str
    slices: Sequence[Slice]


@dataclass(frozen=True)
class Power:
    """values[i], in watts or in units of a relative gauge, hold from times_s[i] on."""

    name: str
    unit: str
    times_s: NDArray[np.float64]
    values: NDArray[np.float64]


@dataclass(frozen=True)
class Timelines:
    begin_s: float
    end_s: float
    tracks: Sequence[Track]
    power: Sequence[Power] = ()

    def between(self, begin_s: float, end_s: float) -> Timelines:
        """What of it lies there; what reaches beyond is cut."""
        tracks = [replace(track, slices=list(_cut(track.slices, begin_s, end_s))) for track in self.tracks]
        power = [_power_between(one, begin_s, end_s) for one in self.power]
        return Timelines(begin_s, end_s, [t for t in tracks if t.slices], [p for p in power if len(p.times_s)])


def timelines(
    window: tuple[float, float],
    parts: Mapping[str, Sequence[PowerTrace]],
    completions: Sequence[Completion] = (),
    decode_steps: Sequence[DecodeStep] = (),
) -> Timelines:
    """Of a trial's window, or of any operations that were kept as a trial keeps them. Raises `TraceFileError`."""
    stored = stored_operations(parts)
    tracks = [*_request_tracks(completions), *(_step_tracks(completions, decode_steps) if decode_steps else ())]
    if stored is not None:
        tracks += operation_tracks(stored, *window)
    power = [one for trace in with_cpu_joules(parts, WINDOW) if (one := _power(trace)) is not None]
    return Timelines(*window, tracks, power).between(*window)


def step_spans(completion: Completion) -> list[tuple[float, float]]:
    """Its prompt, then each token after the first."""
    ends_s = completion.token_times_s or (completion.prefill_end_s,)
    return list(zip([completion.start_s, *ends_s[:-1]], ends_s, strict=True))


def _cut(slices: Iterable[Slice], begin_s: float, end_s: float) -> Iterator[Slice]:
    for one in slices:
        if one.end_s > begin_s and one.begin_s < end_s:
            yield replace(one, begin_s=max(one.begin_s, begin_s), end_s=min(one.end_s, end_s))


def _apart(slices: Iterable[Slice]) -> Iterator[Slice]:
    """Stamps of two clocks may touch: none begins before the one before it has ended."""
    free_s = -np.inf
    for one in sorted(slices, key=lambda one: one.begin_s):
        if one.end_s > free_s:
            yield replace(one, begin_s=max(one.begin_s, float(free_s)))
            free_s = one.end_s


# --- requests ---------------------------------------------------------------------------------------------------------


def _request_tracks(completions: Sequence[Completion]) -> list[Track]:
    """Requests that overlap stand in lanes beside each other."""
    lanes: list[list[Slice]] = []
    for i, one in sorted(enumerate(completions), key=lambda item: item[1].start_s):
        own = list(_phases(i, one))
        lane = next((lane for lane in lanes if lane[-1].end_s <= own[0].begin_s), None)
        if lane is None:
            lanes.append(own)
        else:
            lane += own
    return [Track(REQUESTS, f"lane {i}" if len(lanes) > 1 else "requests", lane) for i, lane in enumerate(lanes, 1)]


def _phases(i: int, one: Completion) -> Iterator[Slice]:
    details: dict[str, Detail] = {"request": i + 1, "sample": one.sample_id, "prompt tokens": one.n_prompt_tokens}
    yield Slice(one.start_s, one.prefill_end_s, f"prefill {i + 1}", "layer0", details=details)
    if one.n_generated > 1:
        after = details | {"tokens": one.n_generated}
        for begin_s, end_s in outside([(one.prefill_end_s, one.token_times_s[-1])], one.set_aside_s):
            yield Slice(begin_s, end_s, f"decode {i + 1}", "layer1", details=after)


# --- threads of a measured engine -------------------------------------------------------------------------------------


def decode_step_tracks(step: DecodeStep, begin_s: float = 0.0) -> list[Track]:
    """What computes, or waits; and what copies."""
    return [
        Track(THREADS, "computes", list(_computing(step, begin_s))),
        Track(THREADS, "copies", list(_copying(step, begin_s))),
    ]


def _step_tracks(completions: Sequence[Completion], steps: Sequence[DecodeStep]) -> list[Track]:
    """Steps are kept from the window's beginning on; each ends when its tokens are known."""
    ends_s = sorted({at_s for one in completions for at_s in one.token_times_s[1:]})
    found: dict[str, list[Slice]] = {}
    for end_s, step in zip(ends_s, steps, strict=False):
        for track in decode_step_tracks(step, end_s - step.duration_s):
            found.setdefault(track.name, []).extend(track.slices)
    return [Track(THREADS, name, list(_apart(slices))) for name, slices in found.items()]


def _computing(step: DecodeStep, zero_s: float) -> Iterator[Slice]:
    """What lies between waits, layer by layer; after the last layer its head and the choice of the token."""
    begin_s = 0.0

    def told(until_s: float, layer: int) -> Slice:
        label, kind = str(layer), f"layer{layer % 2}"
        return Slice(zero_s + begin_s, zero_s + until_s, f"computes layer {layer}", kind, label, {"layer": layer})

    for layer in step.layers:
        for wait in (wait for wait in step.waits if wait.layer == layer.layer):
            yield told(wait.begin_s, layer.layer)
            name = f"waits for layer {wait.layer}"
            yield Slice(zero_s + wait.begin_s, zero_s + wait.end_s, name, "wait", details={"layer": wait.layer})
            begin_s = wait.end_s
        yield told(layer.end_s, layer.layer)
        begin_s = layer.end_s
    rest = "computes what follows the last layer with experts"
    yield Slice(zero_s + begin_s, zero_s + step.duration_s, rest, "rest")


def _copying(step: DecodeStep, zero_s: float) -> Iterator[Slice]:
    for copy in step.copies:
        name = f"copies {copy.n_experts} of layer {copy.layer} {'ahead' if copy.is_ahead else 'on demand'}"
        details: dict[str, Detail] = {"layer": copy.layer, "experts": copy.n_experts, "bytes": copy.n_bytes}
        kind, label = f"copy{copy.layer % 2}", str(copy.layer)
        yield Slice(zero_s + copy.begin_s, zero_s + copy.end_s, name, kind, label, details)


# --- units and links of a modelled machine ----------------------------------------------------------------------------


def operation_tracks(stored: StoredOperations, begin_s: float, end_s: float) -> list[Track]:
    """Of what reaches between the two times: units first, each with its launches where they are queued, then links.

    A window has up to a million operations, and a picture shows a thousand of them: only these are made.
    """
    joules = joules_of_operations(stored, shared=False)
    resource_P = np.array([resource for _, resource in stored.names])[stored.places]
    are_links = {stored.names[i][1] for i, is_transfer in enumerate(stored.is_transfer) if is_transfer}
    begins_s, ends_s = stored.launched_s
    is_launched = ends_s > begins_s
    tracks = []
    for one in sorted(dict.fromkeys(resource_P.tolist()), key=resource_place):
        is_link, is_own = one in are_links, resource_P == one
        own = np.flatnonzero(is_own)
        names = [stored.names[place][0] for place in stored.places[own].tolist()]
        # Neighbours of other names are told apart.
        changes = [0, *(name != before for before, name in pairwise(names))]
        kinds = np.cumsum(changes) % 2
        slices = []
        for i, starts_s, stops_s in _apart_between(stored.starts_s[own], stored.ends_s[own], begin_s, end_s):
            at = own[i]
            details = _details(stored.listed[stored.places[at]], float(joules[at]), float(stored.waited_s[at]))
            kind = f"{'copy' if is_link else 'layer'}{kinds[i]}"
            slices.append(Slice(starts_s, stops_s, names[i], kind, names[i], details))
        tracks.append(Track(LINKS if is_link else UNITS, shown_resource(one), slices))
        launched = np.flatnonzero(is_own & is_launched)
        launches = []
        # Before or while the unit works on something else: the host launches ahead of it.
        for i, starts_s, stops_s in _apart_between(begins_s[launched], ends_s[launched], begin_s, end_s):
            name, _ = stored.names[stored.places[launched[i]]]
            launches.append(Slice(starts_s, stops_s, f"launches {name}", "rest", name))
        if launches:
            tracks.append(Track(UNITS, f"launches on {shown_resource(one)}", launches))
    return tracks


def _apart_between(
    begins_s: NDArray[np.float64], ends_s: NDArray[np.float64], begin_s: float, end_s: float
) -> Iterator[tuple[int, float, float]]:
    """As `_apart`, of stretches that reach between the two times: which, and from when to when."""
    order = np.argsort(begins_s, kind="stable")
    stops_s = ends_s[order]
    free_s = np.concatenate([[-np.inf], np.fmax.accumulate(stops_s)])[:-1]
    starts_s = np.maximum(begins_s[order], free_s)
    kept = (stops_s > free_s) & (stops_s > begin_s) & (starts_s < end_s)
    yield from zip(order[kept].tolist(), starts_s[kept].tolist(), stops_s[kept].tolist(), strict=True)


def _details(listed: Mapping[str, object], joules: float, waited_s: float) -> dict[str, Detail]:
    found: dict[str, Detail] = {}
    for key in _TOLD:
        value = listed.get(key)
        if isinstance(value, int | float) and value:
            found[key] = value
    if np.isfinite(joules):
        found["joules"] = joules
    if waited_s > 0:
        found["waited_s"] = waited_s
    return found


# --- power ------------------------------------------------------------------------------------------------------------


def _power(trace: PowerTrace) -> Power | None:
    """None of raw readings, and of those that say nothing."""
    times_s, values = trace.times_s, trace.values
    if trace.kind == "raw" or len(times_s) < 2 or np.isnan(values).all():
        return None
    unit = "W" if trace.method != "relative gauge" else "gauge units a second"
    name = f"{trace.meter} {trace.component}"
    if trace.kind in ("power", "held"):
        return Power(name, unit, times_s, values)
    steps_j = np.diff(values)
    if trace.wrap_at_j is not None:
        steps_j = np.where(steps_j < 0, steps_j + trace.wrap_at_j, steps_j)
    steps_s = np.diff(times_s)
    has_length = steps_s > 0
    watts = steps_j[has_length] / steps_s[has_length]
    begins_s = times_s[:-1][has_length]
    if not len(watts):
        return None
    is_new = np.concatenate([[True], np.abs(np.diff(watts)) > SAME_POWER * np.maximum(np.abs(watts[1:]), 1.0)])
    return Power(name, unit, begins_s[is_new], watts[is_new])


def _power_between(power: Power, begin_s: float, end_s: float) -> Power:
    """What holds at the beginning begins there."""
    is_known = np.isfinite(power.values)
    times_s, values = power.times_s[is_known], power.values[is_known]
    first = max(int(np.searchsorted(times_s, begin_s, side="right")) - 1, 0)
    last = int(np.searchsorted(times_s, end_s))
    return replace(power, times_s=np.maximum(times_s[first:last], begin_s), values=values[first:last])
