"""Where a benchmark puts what it found: docs/measurements/NAME.json, and the page NAME.md rendered from it."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from devices.conditions import host_environment
from results.records import Record
from results.units import format_number

FOLDER = Path(__file__).parents[2] / "docs" / "measurements"


class Measurement(Record):
    """One figure beside its peer (another program, a stated value) and its target."""

    metric: str
    ours: float
    unit: str
    conditions: str
    peer: float | None = None
    peer_name: str | None = None
    ratio: float | None = None
    """ours / peer."""
    target: float | None = None
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
) -> Measurement:
    """A figure of this machine, now, by the command that is running."""
    environment = host_environment()
    module = Path(sys.argv[0]).stem
    return Measurement(
        metric=metric,
        ours=ours,
        unit=unit,
        conditions=conditions,
        peer=peer,
        peer_name=peer_name,
        ratio=ours / peer if peer else None,
        target=target,
        machine=f"{environment.cpu_model}, {environment.n_threads} threads, {environment.os.split()[0]}",
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        command=f"python -m tests.benchmarks.{module}",
    )


def write_json(name: str, found: Sequence[Measurement]) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    text = json.dumps([m.model_dump() for m in found], indent=1)
    (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def write_page(name: str, title: str, found: Sequence[Measurement], remarks: str) -> None:
    """The JSON, and the page made of nothing but it and the remarks."""
    write_json(name, found)
    lines = [
        f"# {title}",
        "",
        remarks,
        "",
        "| metric | ours | peer | ratio | target | conditions |",
        "|---|---|---|---|---|---|",
    ]
    for m in found:
        peer = "" if m.peer is None else f"{format_number(m.peer)} {m.unit} ({m.peer_name})"
        ratio = "" if m.ratio is None else format_number(m.ratio)
        target = "" if m.target is None else f"{format_number(m.target)} {m.unit}"
        lines.append(
            f"| {m.metric} | {format_number(m.ours)} {m.unit} | {peer} | {ratio} | {target} | {m.conditions} |"
        )
    first = found[0]
    lines += ["", f"{first.date}, {first.machine}. Made by `{first.command}`.", ""]
    (FOLDER / f"{name}.md").write_text("\n".join(lines), encoding="utf-8")
