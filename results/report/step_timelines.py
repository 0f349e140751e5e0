"""One decode step of each arm as a timeline: of an engine that copies experts, a lane for the thread that computes or
waits and one for the thread that copies; of a modelled machine, a lane for each unit and link that worked. All arms of
a workload and device stand on one scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from markupsafe import Markup

from results.cells import trials_of, usable
from results.copies import DecodeStep, layer_times, on_demand_s, prefetching_s, step_times
from results.ran_operations import stored_operations
from results.report.arms import Arm
from results.report.operation_tables import percent
from results.runs import RunData
from results.trace_files import TraceFileError
from results.tracks import Slice, Timelines, Track, decode_step_tracks, operation_tracks, step_spans
from results.units import format_bytes, format_number, format_quantity

LEFT_PX, LANES_PX, RIGHT_PX = 62, 620, 14
LANE_PX, GAP_PX, TITLE_PX, AXIS_PX = 18, 3, 17, 26
BELOW_PX = 9
MOST_ARMS = 12
"""Of one picture."""
LABEL_PX = 14
"""Width from which a span has its layer's number in it."""
LETTER_PX = 6
"""Of each more than two in it."""
MERGED_PX = 0.2
"""Slices of one name that lie nearer are drawn as one."""
TICKS = 6
MOST_ROWS = 60
"""Of a lane, in numbers."""


class StepRow(NamedTuple):
    """What a lane did under one name: how often, when for the first time, and how long together."""

    lane: str
    what: str
    n: str
    first_ms: str
    lasting_ms: str
    share: str
    moved: str


@dataclass(frozen=True)
class StepTimeline:
    """caption: of each arm, what the step comes to. numbers: of each arm, what is drawn."""

    title: str
    captions: tuple[tuple[Arm, str], ...]
    svg: Markup
    numbers: tuple[tuple[Arm, tuple[StepRow, ...]], ...]


def step_timelines(run: RunData, arms: Mapping[str, Arm]) -> list[StepTimeline]:
    """Of each workload and device, where an arm copied experts while it decoded, or where a machine was modelled."""
    steps = {cell: (_measured(step), _caption(step)) for cell, step in _steps(run).items()} | _modelled_steps(run)
    found = []
    for place in dict.fromkeys((c.workload, c.device) for c in run.cells if c.cell_id in steps):
        cells = [c for c in run.cells if (c.workload, c.device) == place and c.cell_id in steps][:MOST_ARMS]
        shown = [(arms[c.cell_id], *steps[c.cell_id]) for c in cells]
        title = " · ".join(place)
        captions = tuple((arm, caption) for arm, _, caption in shown)
        numbers = tuple((arm, tuple(_rows(step))) for arm, step, _ in shown)
        found.append(StepTimeline(title, captions, _picture(title, shown), numbers))
    return found


def _rows(step: Timelines) -> Iterator[StepRow]:
    """In the order in which each lane began them; what is beyond `MOST_ROWS` of a lane, together."""
    for track in step.tracks:
        by_name: dict[str, list[Slice]] = {}
        for one in track.slices:
            by_name.setdefault(one.name, []).append(one)
        names = list(by_name)
        kept = names if len(names) <= MOST_ROWS else names[: MOST_ROWS - 1]
        for name in kept:
            yield _row(track.name, name, by_name[name], step)
        if len(names) > len(kept):
            rest = [one for name in names[len(kept) :] for one in by_name[name]]
            yield _row(track.name, f"{len(names) - len(kept)} more names", rest, step)


def _row(lane: str, what: str, slices: Sequence[Slice], step: Timelines) -> StepRow:
    lasting_s = sum(one.end_s - one.begin_s for one in slices)
    whole_s = step.end_s - step.begin_s
    moved = sum(float(one.details.get("bytes") or one.details.get("moved_bytes") or 0) for one in slices)
    return StepRow(
        lane,
        what,
        str(len(slices)),
        _ms(slices[0].begin_s - step.begin_s),
        _ms(lasting_s),
        percent(lasting_s / whole_s) if whole_s > 0 else "",
        format_bytes(round(moved)) if moved else "",
    )


def _measured(step: DecodeStep) -> Timelines:
    end_s = max(step.duration_s, *(copy.end_s for copy in step.copies), 0.0)
    return Timelines(0.0, end_s, decode_step_tracks(step))


def _modelled_steps(run: RunData) -> dict[str, tuple[Timelines, str]]:
    """By cell: of the tokens of its first window, the step of middle length; the prompt where nothing was decoded."""
    trials, found = trials_of(run), {}
    for cell in run.cells:
        own = next((t for t in usable(trials[cell.cell_id]) if t.time_method == "modelled" and t.completions), None)
        if own is None:
            continue
        try:
            stored = stored_operations(run.load_parts(own.trial_id))
        except TraceFileError as error:
            run.lost_traces[own.trial_id] = str(error)
            continue
        if stored is None:
            continue
        decoded = [span for one in own.completions for span in step_spans(one)[1:]]
        spans = decoded or [step_spans(one)[0] for one in own.completions]
        begin_s, end_s = sorted(spans, key=lambda span: span[1] - span[0])[len(spans) // 2]
        step = Timelines(begin_s, end_s, operation_tracks(stored, begin_s, end_s)).between(begin_s, end_s)
        of = "" if decoded else "a prompt, as nothing was decoded: "
        found[cell.cell_id] = (step, of + _modelled_caption(step))
    return found


def _modelled_caption(step: Timelines) -> str:
    """How long, and how long each unit and link worked."""
    told = (
        f"{track.name} {format_quantity(sum(one.end_s - one.begin_s for one in track.slices), 's')}"
        for track in step.tracks
    )
    return f"{format_quantity(step.end_s - step.begin_s, 's')} modelled: {', '.join(told)}"


def _steps(run: RunData) -> dict[str, DecodeStep]:
    """By cell: of the steps that its usable trials kept, the one of middle length."""
    kept: dict[str, list[DecodeStep]] = {}
    for trial in usable(run.trials):
        if trial.decode_steps:
            kept.setdefault(trial.cell_id, []).extend(trial.decode_steps)
    return {cell: sorted(own, key=lambda step: step.duration_s)[len(own) // 2] for cell, own in kept.items()}


def _caption(step: DecodeStep) -> str:
    waits = [(wait.begin_s, wait.end_s) for wait in step.waits]
    times = step_times(step.duration_s, waits, [(copy.begin_s, copy.end_s) for copy in step.copies])
    layers = layer_times(step)
    rest_s = step.duration_s - (step.layers[-1].end_s if step.layers else 0.0)
    told = (
        f"{_ms(times.timed_s)} ms: computing {_ms(times.timed_s - times.waited_s)}, waiting {_ms(times.waited_s)};"
        f" copying {_ms(times.copied_s)}, of which {_ms(times.hidden_s)} while computing"
    )
    if not layers:
        return told
    return (
        f"{told}. The same computing and copying would take {_ms(on_demand_s(layers) + rest_s)} ms in turn and"
        f" {_ms(prefetching_s(layers) + rest_s)} ms fully overlapped, each layer with the copies of the next"
    )


def _ms(seconds: float) -> str:
    return format_number(1000 * seconds)


# --- the picture -----------------------------------------------------------------------------------------------------


def _picture(title: str, shown: Sequence[tuple[Arm, Timelines, str]]) -> Markup:
    longest_s = max(*(step.end_s - step.begin_s for _, step, _ in shown), 1e-9)
    top, parts = 0.0, list[Markup]()
    for arm, step, _ in shown:
        parts.append(_text(LEFT_PX, top + TITLE_PX - 5, arm.name, "start", "name"))
        top += TITLE_PX
        for track in step.tracks:
            parts += _lane(top, track, step.begin_s, LANES_PX / longest_s)
            top += LANE_PX + GAP_PX
        top += BELOW_PX - GAP_PX
    parts = [*_axis(top, longest_s), *parts]
    return Markup('<svg class="picture timeline" viewBox="0 0 {} {:.0f}" role="img" aria-label="{}">{}</svg>').format(
        LEFT_PX + LANES_PX + RIGHT_PX,
        top + AXIS_PX,
        f"A decode step of {title}: {'; '.join(f'{arm.name}: {caption}' for arm, _, caption in shown)}.",
        Markup("").join(parts),
    )


def _lane(top: float, track: Track, begin_s: float, px_of_s: float) -> Iterator[Markup]:
    yield _text(LEFT_PX - 5, top + LANE_PX - 5, track.name, "end")
    for n, one in _joined(track.slices, MERGED_PX / px_of_s):
        yield _span(one, n, begin_s, top, px_of_s)


def _joined(slices: Sequence[Slice], gap_s: float) -> Iterator[tuple[int, Slice]]:
    """How many, and as one: slices of one name that nothing visible parts."""
    n, open_slice = 0, None
    for one in slices:
        if open_slice is not None and one.name == open_slice.name and one.begin_s - open_slice.end_s <= gap_s:
            n, open_slice = n + 1, replace(open_slice, end_s=one.end_s)
            continue
        if open_slice is not None:
            yield n, open_slice
        n, open_slice = 1, one
    if open_slice is not None:
        yield n, open_slice


def _span(one: Slice, n: int, zero_s: float, top: float, px_of_s: float) -> Markup:
    left, width = LEFT_PX + (one.begin_s - zero_s) * px_of_s, (one.end_s - one.begin_s) * px_of_s
    times = f"{n} x " if n > 1 else ""
    words = f"{times}{one.name}: {format_quantity(one.end_s - one.begin_s, 's')}"
    if n == 1 and (n_bytes := one.details.get("bytes")):
        words += f", {format_number(float(n_bytes) / 1e6)} MB"
    rect = Markup('<rect class="{}" x="{:.2f}" y="{:.1f}" width="{:.2f}" height="{}"><title>{}</title></rect>').format(
        one.kind, left, top, max(0.0, width), LANE_PX, words
    )
    if not one.label or width < LABEL_PX + LETTER_PX * (len(one.label) - 2):
        return rect
    return rect + _text(left + width / 2, top + LANE_PX - 5, one.label, "middle", "in")


def _axis(top: float, longest_s: float) -> Iterator[Markup]:
    step_ms = _tick(1000 * longest_s / TICKS)
    n = int(1000 * longest_s / step_ms)
    for i in range(n + 1):
        x = LEFT_PX + i * step_ms / 1000 * LANES_PX / longest_s
        yield Markup('<path class="grid" d="M{0:.1f},0V{1:.1f}"/>').format(x, top)
        yield _text(x, top + 12, format_number(i * step_ms), "middle")
    yield _text(LEFT_PX + LANES_PX, top + 23, "ms of the step", "end")


def _tick(least: float) -> float:
    """1, 2 or 5 times a power of ten."""
    power = 10.0 ** len(str(int(least))) / 10 if least >= 1 else 1.0
    while power > least:
        power /= 10
    return next(power * n for n in (1, 2, 5, 10) if power * n >= least)


def _text(x: float, y: float, words: str, anchor: str, kind: str = "") -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(kind, x, y, anchor, words)
