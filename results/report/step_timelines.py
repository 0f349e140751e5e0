"""One decode step of each arm that copies experts, as a timeline: a lane for the thread that computes or waits, one for
the thread that copies. All arms of a workload and device stand on one scale."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from results.cells import usable
from results.copies import DecodeStep, layer_times, on_demand_s, prefetching_s, step_times
from results.report.arms import Arm
from results.runs import RunData
from results.units import format_number

LEFT_PX, LANES_PX, RIGHT_PX = 62, 620, 14
LANE_PX, GAP_PX, TITLE_PX, AXIS_PX = 18, 3, 17, 26
ARM_PX = TITLE_PX + 2 * LANE_PX + GAP_PX + 9
LABEL_PX = 14
"""Width from which a span has its layer's number in it."""
TICKS = 6


@dataclass(frozen=True)
class StepTimeline:
    """caption: of each arm, what the step comes to."""

    title: str
    captions: tuple[tuple[Arm, str], ...]
    svg: Markup


def step_timelines(run: RunData, arms: Mapping[str, Arm]) -> list[StepTimeline]:
    """Of each workload and device, where an arm copied experts while it decoded."""
    steps = _steps(run)
    found = []
    for place in dict.fromkeys((c.workload, c.device) for c in run.cells if c.cell_id in steps):
        cells = [c for c in run.cells if (c.workload, c.device) == place and c.cell_id in steps]
        shown = [(arms[c.cell_id], steps[c.cell_id]) for c in cells]
        title = " · ".join(place)
        captions = tuple((arm, _caption(step)) for arm, step in shown)
        found.append(StepTimeline(title, captions, _picture(title, shown)))
    return found


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


def _picture(title: str, shown: Sequence[tuple[Arm, DecodeStep]]) -> Markup:
    longest_s = max(max(step.duration_s, *(copy.end_s for copy in step.copies), 1e-9) for _, step in shown)
    bottom = ARM_PX * len(shown)
    parts = [part for i, (arm, step) in enumerate(shown) for part in _lanes(i * ARM_PX, arm, step, longest_s)]
    parts += _axis(bottom, longest_s)
    return Markup('<svg class="picture timeline" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        LEFT_PX + LANES_PX + RIGHT_PX,
        bottom + AXIS_PX,
        f"A decode step of {title}: {'; '.join(f'{arm.name}: {_caption(step)}' for arm, step in shown)}.",
        Markup("").join(parts),
    )


def _lanes(top: float, arm: Arm, step: DecodeStep, longest_s: float) -> Iterator[Markup]:
    px_of_s = LANES_PX / longest_s
    computing, copying = top + TITLE_PX, top + TITLE_PX + LANE_PX + GAP_PX
    yield _text(LEFT_PX, top + TITLE_PX - 5, arm.name, "start", "name")
    yield _text(LEFT_PX - 5, computing + LANE_PX - 5, "computes", "end")
    yield _text(LEFT_PX - 5, copying + LANE_PX - 5, "copies", "end")
    yield from _computing(computing, step, px_of_s)
    for wait in step.waits:
        words = f"waits for layer {wait.layer}: {_ms(wait.end_s - wait.begin_s)} ms"
        yield _span(wait.begin_s, wait.end_s, computing, px_of_s, "wait", words)
    for copy in step.copies:
        when = "ahead" if copy.is_ahead else "on demand"
        words = f"copies {copy.n_experts} of layer {copy.layer} {when}: {_ms(copy.end_s - copy.begin_s)} ms"
        words += f", {format_number(copy.n_bytes / 1e6)} MB"
        yield _span(copy.begin_s, copy.end_s, copying, px_of_s, f"copy{copy.layer % 2}", words, str(copy.layer))


def _computing(top: float, step: DecodeStep, px_of_s: float) -> Iterator[Markup]:
    """What lies between waits, layer by layer; after the last layer its head and the choice of the token."""
    begin_s = 0.0
    for layer in step.layers:
        words = f"computes layer {layer.layer}"
        for wait in (wait for wait in step.waits if wait.layer == layer.layer):
            yield _span(begin_s, wait.begin_s, top, px_of_s, f"layer{layer.layer % 2}", words, str(layer.layer))
            begin_s = wait.end_s
        yield _span(begin_s, layer.end_s, top, px_of_s, f"layer{layer.layer % 2}", words, str(layer.layer))
        begin_s = layer.end_s
    yield _span(begin_s, step.duration_s, top, px_of_s, "rest", "computes what follows the last layer with experts")


def _span(begin_s: float, end_s: float, top: float, px_of_s: float, kind: str, words: str, label: str = "") -> Markup:
    left, width = LEFT_PX + begin_s * px_of_s, max(0.0, end_s - begin_s) * px_of_s
    rect = Markup('<rect class="{}" x="{:.2f}" y="{:.1f}" width="{:.2f}" height="{}"><title>{}</title></rect>').format(
        kind, left, top, width, LANE_PX, words
    )
    if not label or width < LABEL_PX:
        return rect
    return rect + _text(left + width / 2, top + LANE_PX - 5, label, "middle", "in")


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
