"""What computed the tokens of each arm, in words, and where arms or repeats differ in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from results.cells import trials_of
from results.environments import BUILD_DIGITS, TORCH_ALONE, Build, Road
from results.graph_placement import placement_words
from results.printable import with_colon
from results.records import Cell, Phase
from results.runs import RunData
from results.trials import Trial


def in_list(name: str) -> str:
    """The name of an arm beside others: one that would run into the next stands in quotes."""
    return f"“{name}”" if "," in name or ";" in name else name


def road_words(road: Road) -> str:
    """ "kernels, AVX-512, build f73b2221ada7, 2 threads, prefill grouped, decoding fused"."""
    return ", ".join(_parts(road, with_one=False))


def _parts(road: Road, with_chosen: bool = True, with_one: bool = True) -> list[str]:
    """with_chosen: also what a plan chooses, arithmetic and threads. with_one: also that it was one process, which a
    reader must be told beside a road of several."""
    parts = [road.arithmetic if road.device == "cpu" else f"{road.arithmetic} on {road.device}"]
    parts += [road.instruction_set] if road.instruction_set else []
    parts += [road.dtype] if road.dtype and road.dtype != "float32" and with_chosen else []
    parts += [f"{width} arithmetic"] if with_chosen and (width := arithmetic_width(road)) else []
    parts += [f"build {road.build}"] if road.build else []
    parts += _thread_words(road) if with_chosen else []
    parts += [] if road.answers_are_seen else ["answers not seen"]
    if road.n_processes > 1 or with_one:
        parts += [f"{road.n_processes} processes, {road.links}" if road.n_processes > 1 else "one process"]
    parts += [f"prefill {road.prefill}"] if road.prefill else []
    return [*parts, f"decoding {road.decoding}"] if road.decoding else parts


def arithmetic_width(road: Road) -> str | None:
    """ "fp32", or what inputs of products were rounded to, and those of attention and its cache where they were rounded
    to something else. None: of another engine, or told by `dtype`."""
    if not of_ours(road) or road.dtype != "float32":
        return None
    products = road.rounded_to if road.rounds_inputs else "fp32"
    of_attention = road.attention_rounded_to
    # Beside products in bf16 so is attention, as a rule; beside those in int8 it is not.
    is_told = of_attention is not None and (of_attention != products or products == "int8")
    others = [f"attention {of_attention}"] if is_told else []
    others += [f"cache {road.cache_rounded_to}"] if road.cache_rounded_to is not None else []
    return f"{products} ({' and '.join(others)})" if others else products


def _thread_words(road: Road) -> list[str]:
    """ "prefill on cores 0-3 with 4 threads", "decoding on cores 0-1 with 2 threads"; or of both "2 threads"."""
    phases = [(name, t) for name, t in (("prefill", road.prefill_threads), ("decoding", road.decoding_threads)) if t]
    asked = " asked for and not told" if road.threads_are_asked else ""
    if not phases:
        return [_counted(road.n_threads) + asked]
    on_cores = {name: f" on cores {t.cores}" if t.cores else "" for name, t in phases}
    return [f"{name}{on_cores[name]} with {_counted(t.n_threads)}{asked}" for name, t in phases]


def _counted(n_threads: int) -> str:
    return f"{n_threads} thread{'s' if n_threads != 1 else ''}"


def lost_cores(road: Road) -> tuple[str, ...]:
    """Where threads that computed might leave the cores that a plan asked for: a sentence for each phase."""
    return tuple(
        f"cores: {name} asked for {t.cores}, and its threads were found on {' and '.join(t.found) or 'none'}"
        for name, t in (("prefill", road.prefill_threads), ("decoding", road.decoding_threads))
        if t is not None and not t.is_kept
    )


def build_words(build: Build) -> str:
    """For a list of what a machine is: "kernels for AVX-512, build f73b2221ada7 (g++ 12.2.0; -O3 ...)"."""
    if build.road == "torch":
        return f"{_torch_words(build)} (no kernels: {build.reason})"
    digits = (build.sha256 or "")[:BUILD_DIGITS]
    return (
        f"kernels for {build.instruction_set}, build {digits} ({build.compiler}; {build.flags});"
        f" torch {build.torch_instruction_set}"
    )


def _torch_words(build: Build) -> str:
    return f"torch alone, {build.torch_instruction_set}"


def roads_of(trials: Sequence[Trial]) -> tuple[str, ...]:
    """Each road of a cell's trials once; more than one means that its mean is over unlike things."""
    return tuple(road_words(road) for road in _distinct(trials))


def comparable_roads(trials: Sequence[Trial], phase: Phase = "all") -> frozenset[str]:
    """What two arms must have in common for their times and joules to compare techniques, or those of one phase of
    their requests. Threads and the width of the arithmetic are not in it: a plan chooses them. Empty where a model
    gives the times."""
    other = {"prefill": "decoding ", "decode": "prefill "}.get(phase)
    parts = (_parts(road, with_chosen=False) for road in _distinct(_timed(trials)) if of_ours(road))
    return frozenset(", ".join(p for p in own if other is None or not p.startswith(other)) for own in parts)


def unlike_roads(own: frozenset[str], others: frozenset[str], name: str) -> str | None:
    """How an arm and another, of this name, were computed in unlike ways; None where they were not, or where that
    decides nothing. Both as of `comparable_roads`."""
    if own == others or not own or not others:
        return None
    shared = set.intersection(*(set(road.split(", ")) for road in own | others))
    ways = [
        " or ".join(", ".join(p for p in road.split(", ") if p not in shared) for road in sorted(roads))
        for roads in (own, others)
    ]
    # Without the arm's own name: of many that were computed so it is said once.
    return f"computed in another way ({ways[0] or 'nothing of its own'}; {name}: {ways[1] or 'nothing of its own'})"


def of_ours(road: Road) -> bool:
    """Whether joulebench's own engine computed. Another engine is compared whole: its road is what the arm is about."""
    return road.arithmetic in ("kernels", "torch")


def _timed(trials: Sequence[Trial]) -> list[Trial]:
    """Those whose seconds a clock gave: seconds of a model are the same on every road."""
    return [t for t in trials if t.time_method == "measured"]


def _distinct(trials: Sequence[Trial]) -> list[Road]:
    return list(dict.fromkeys(t.road for t in trials if t.road is not None))


def arithmetic_notes(run: RunData) -> list[str]:
    """What the tokens of each device were computed by; of a GPU and of other engines alone, where no build of ours
    matters, as their trials say."""
    trials, devices = trials_of(run), dict[str, list[str]]()
    for device, environment in run.info.environments.items():
        roads = _distinct([t for cell in run.cells if cell.device == device for t in trials[cell.cell_id]])
        build = environment.build if not roads or any(of_ours(road) for road in roads) else None
        # A figure of products in bytes is not to pass for one of fp32, on a page where every arm computes so too.
        widths = ", ".join(sorted({width for road in roads if (width := arithmetic_width(road))}))
        if build is None:
            words = [road_words(road) for road in roads]
        else:
            # `road_notes` tells why there are no kernels.
            own = _torch_words(build) if build.road == "torch" else build_words(build)
            words = [own + (f"; {widths} arithmetic" if widths else "")]
        if words:
            devices.setdefault(" / ".join(words), []).append(device)
    return [f"{with_colon(', '.join(names))} computed by {words}." for words, names in devices.items()]


def road_notes(run: RunData) -> list[str]:
    """By device what computed, and what a reader must know of arms that stand side by side on unlike roads."""
    notes = [
        f"{device}: the engine ran on torch alone, {TORCH_ALONE}: {environment.build.reason}."
        for device, environment in run.info.environments.items()
        if environment.build is not None and environment.build.road == "torch"
    ]
    trials = trials_of(run)
    for (workload, device), cells in _compared(run.cells).items():
        names = [cell.engine for cell in cells]
        roads = {
            cell.engine if names.count(cell.engine) == 1 else cell.label: _distinct(_timed(trials[cell.cell_id]))
            for cell in cells
        }
        notes += _unlike(f"{workload} · {device}", roads)
    return notes


def placement_notes(run: RunData) -> list[str]:
    """By arm where Core ML placed the graphs that its trials ran; one line for trials that were placed alike."""
    trials = trials_of(run)
    told = {
        cell.label: dict.fromkeys(placement_words(t.placement) for t in trials[cell.cell_id] if t.placement)
        for cell in run.cells
    }
    return [f"{in_list(label)}: Core ML placed {words}." for label, own in told.items() for words in own]


def _unlike(where: str, roads: Mapping[str, Sequence[Road]]) -> list[str]:
    """Says of each road what not all of them have."""
    arms_by_road: dict[Road, list[str]] = {}
    for arm, of_arm in roads.items():
        for road in of_arm:
            arms_by_road.setdefault(road, []).append(arm)
    mixed = [arm for arm, of_arm in roads.items() if len(of_arm) > 1]
    if len(arms_by_road) < 2:
        return []
    shared = set.intersection(*(set(_parts(road)) for road in arms_by_road))
    own = {road: [part for part in _parts(road) if part not in shared] for road in arms_by_road}
    told = "; ".join(
        f"{', '.join(map(in_list, arms))}: {', '.join(own[road]) or 'not so'}" for road, arms in arms_by_road.items()
    )
    if mixed:
        return [
            f"{where}: the repeats of {', '.join(map(in_list, mixed))} were computed in unlike ways ({told});"
            " trust no mean of them."
        ]
    return [f"{where}: the arms differ in how they were computed too, not in their techniques alone ({told})."]


def _compared(cells: Sequence[Cell]) -> dict[tuple[str, str], list[Cell]]:
    found: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        found.setdefault((cell.workload, cell.device), []).append(cell)
    return found
