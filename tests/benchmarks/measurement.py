"""Where a benchmark puts what it found: docs/measurements/NAME.json, and the page NAME.md rendered from it."""

from __future__ import annotations

import datetime
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from devices.conditions import host_environment
from results.records import Record
from results.units import format_number
from tests.benchmarks.timing import Figure

FOLDER = Path(__file__).parents[2] / "docs" / "measurements"


class Measurement(Record):
    """One figure beside its peer (another program, a stated value) and its target."""

    metric: str
    ours: float
    unit: str
    conditions: str
    """What was asked for: the same conditions measured again replace the figure."""
    peer: float | None = None
    peer_name: str | None = None
    ratio: float | None = None
    """ours / peer."""
    target: float | None = None
    note: str | None = None
    """How it went this time: turns, disturbances, what was left out and why."""
    machine: str
    date: str
    command: str


def measured(
    metric: str,
    ours: float,
    unit: str,
    conditions: str,
    peer: float | None = None,
    peer_name: str | None = None,
    target: float | None = None,
    note: str | None = None,
) -> Measurement:
    """A figure of this machine, now, by the command that is running."""
    environment = host_environment()
    return Measurement(
        metric=metric,
        ours=ours,
        unit=unit,
        conditions=conditions,
        peer=peer,
        peer_name=peer_name,
        ratio=ours / peer if peer else None,
        target=target,
        note=note,
        machine=f"{environment.cpu_model}, {environment.n_threads} threads, {environment.os.split()[0]}{_kernels()}",
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        command=command_line(sys.argv),
    )


def _kernels() -> str:
    """What the engine computes with, where the benchmark has one."""
    if "engines.reference" not in sys.modules:
        return ""
    from engines.road import build

    built = build()
    return f", kernels for {built.instruction_set}" if built.road == "kernels" else ", torch without kernels"


def beside(
    metric: str,
    unit: str,
    conditions: str,
    ours: Figure,
    peer: Figure,
    peer_name: str,
    target_ratio: float | None,
    notes: Sequence[str] = (),
) -> Measurement:
    """Medians of turns. One that a neighbour disturbed is told and gives no ratio: it would compare disturbances."""
    note = "; ".join([f"ours {ours.turns}, peer {peer.turns}", *notes])
    target = None if target_ratio is None else target_ratio * peer.median
    row = measured(metric, ours.median, unit, conditions, peer.median, peer_name, target, note)
    return row if ours.is_quiet and peer.is_quiet else row.model_copy(update={"ratio": None, "target": None})


def command_line(argv: Sequence[str]) -> str:
    """What to type to run the benchmark of this argv again; folders of this machine stand by their last name.

    `python -m` puts the module's file first in argv.
    """
    own = [Path(one).name if Path(one).is_absolute() else one for one in argv[1:]]
    return shlex.join(["python", "-m", f"tests.benchmarks.{Path(argv[0]).stem}", *own])


def merged(kept: Sequence[Measurement], found: Sequence[Measurement]) -> list[Measurement]:
    """What was found, and of the figures before it those of other conditions.

    All rows of a condition go together: a ratio is only honest between figures of one run.
    """
    again = {m.conditions for m in found}
    return [*(m for m in kept if m.conditions not in again), *found]


def was_quiet(kept: Sequence[Measurement], found: Sequence[Measurement]) -> bool:
    """Whether rows without a ratio, which a neighbour disturbed, would replace rows that all have one."""
    again = {m.conditions for m in found}
    before = [m for m in kept if m.conditions in again]
    return any(_is_disturbed(m) for m in found) and bool(before) and not any(_is_disturbed(m) for m in before)


def _is_disturbed(m: Measurement) -> bool:
    return m.peer is not None and m.ratio is None


def beside_other_machines(name: str, found: Sequence[Measurement], folder: Path = FOLDER) -> list[Measurement]:
    """What was found here, and after it what the page has of other machines."""
    here = {m.machine for m in found}
    return [*found, *(m for m in read_json(name, folder) if m.machine not in here)]


def read_json(name: str, folder: Path = FOLDER) -> list[Measurement]:
    """The figures of the runs before; none where the page was never written."""
    path = folder / f"{name}.json"
    if not path.is_file():
        return []
    return [Measurement.model_validate(row) for row in json.loads(path.read_text(encoding="utf-8"))]


def all_threads() -> int:
    """What torch and our kernels compute with. A page tells one number of all its rows, of many runs, so that none may
    be of fewer: raises `SystemExit` where OMP_NUM_THREADS is set, as it is for our tests."""
    import torch

    if "OMP_NUM_THREADS" in os.environ:
        raise SystemExit("OMP_NUM_THREADS is set; unset it: rows of other days have all threads of their machine")
    return torch.get_num_threads()


def write_json(name: str, found: Sequence[Measurement], folder: Path = FOLDER) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps([m.model_dump() for m in found], indent=1)
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def write_page(name: str, title: str, found: Sequence[Measurement], remarks: str, folder: Path = FOLDER) -> None:
    """The JSON, and the page made of nothing but it and the remarks."""
    write_json(name, found, folder)
    (folder / f"{name}.md").write_text(page(title, found, remarks), encoding="utf-8")


def page(title: str, found: Sequence[Measurement], remarks: str) -> str:
    """Markdown. Where rows come from several runs, each row says which one made it."""
    runs = list(dict.fromkeys(_provenance(m) for m in found))
    header = ["metric", "ours", "peer", "ratio", "target", "conditions"]
    if len(runs) > 1:
        header.append("run")
    lines = [f"# {title}", "", remarks, "", _row(header), "|" + "---|" * len(header)]
    for m in found:
        cells = [
            m.metric,
            f"{format_number(m.ours)} {m.unit}",
            "" if m.peer is None else f"{format_number(m.peer)} {m.unit} ({m.peer_name})",
            "" if m.ratio is None else format_number(m.ratio),
            "" if m.target is None else f"{format_number(m.target)} {m.unit}",
            m.conditions if m.note is None else f"{m.conditions}; {m.note}",
        ]
        if len(runs) > 1:
            cells.append(str(1 + runs.index(_provenance(m))))
        lines.append(_row(cells))
    if len(runs) == 1:
        lines += ["", runs[0], ""]
    else:
        lines += ["", "Runs:", "", *(f"{number}. {run}" for number, run in enumerate(runs, 1)), ""]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _provenance(m: Measurement) -> str:
    return f"{m.date}, {m.machine}. Made by `{m.command}`."
