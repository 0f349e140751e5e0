"""A run as a data set for others: Parquet files, and a card that says what they are and how they were measured.

DIR/README.md          the card: front matter of a dataset card, then prose
DIR/NAME.parquet       each table of the run, as its CSV has it
DIR/traces.parquet     every reading of every meter, one a row
"""

from __future__ import annotations

import json
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pandas as pd

from results.cells import usable
from results.report.csv import frames_of_run
from results.report.files import flush, for_owner, replace_text
from results.report.html import machine_rows, method_sentences, warnings_of
from results.report.plan_text import toml_text
from results.run_frames import RunFrames
from results.runs import RunData, shown_value
from results.trace_files import TraceFileError
from results.units import number_of

if TYPE_CHECKING:
    import pyarrow as pa

CARD = "README.md"
TRACES = "traces"
TAGS = "tags: [joulebench, energy, latency, benchmark]"
WHAT = {
    "arms": "the arms as times of the baseline, by device and workload",
    "latency": "TTFT, TPOT, ITL, E2E and token/s, a row for each cell, metric and method",
    "energy": "joules and watts likewise",
    "accuracy": "scores likewise",
    "accuracy_energy": "accuracy of each arm beside its joules, against the reference",
    "experts": "layers of experts, and how unevenly they were chosen",
    "overlaps": "whether what one text chooses tells of another",
    "heat": "how often each expert was chosen",
    "operations": "what modelled windows were spent on",
    "resources": "how busy units and links of modelled machines were",
    "samples": "what was asked, what was right, what each arm answered",
    "trials": "one row a trial, failed ones too",
    "requests": "one row a request",
    "summary": "one row a cell: means and intervals",
    "asked_tables": "the tables that the plan asks for",
    "placement": "the graphs that ran: by trial, graph and unit, the operations that Core ML places there",
    "endurance": "rounds of a workload that ran until time, heat or the battery ended it",
    "endurance_steps": "steps of speed and watts within them",
    TRACES: "every reading of every meter: `time_s` on the run's clock, `value` in W (power, held) or J (counter); raw:"
    " what these were derived from, as its `component` says",
}


class Exported(NamedTuple):
    path: Path
    n_rows: int
    columns: tuple[str, ...]


def foreign_files(directory: Path) -> list[str]:
    """Names of what no export wrote there, nor left when it was killed, but for Parquet files. Raises `OSError`."""
    halves = {*_halves(directory)}
    others = (p for p in directory.iterdir() if p.suffix != ".parquet" and p not in halves)
    return sorted(p.name for p in others if not _is_card(p))


def _is_card(path: Path) -> bool:
    return path.name == CARD and TAGS in path.read_text(encoding="utf-8", errors="replace").splitlines()


def export(run: RunData, directory: Path, with_traces: bool = True) -> list[Path]:
    """Writes tables and card. They take their names when all are whole: where one cannot be written, an earlier export
    stays as it was. Tables of it that this one does not have go: beside the new card they would pass for this run's.
    The earlier card goes first and the new one comes last: no card stands beside tables that are not its own, after a
    kill or a loss of power in between either. Raises `OSError`."""
    directory.mkdir(parents=True, exist_ok=True)
    derived = RunFrames(run)
    card = directory / CARD
    found = []
    try:
        for name, content in frames_of_run(run, derived).items():
            parts = [content] if isinstance(content, pd.DataFrame) else content
            found.append(_written(directory / f"{name}.parquet", iter(parts)))
        if with_traces:
            found.append(_written(directory / f"{TRACES}.parquet", _traces(run)))
        replace_text(_half(card), card_text(run, derived, found))
        # A card was always its owner's alone at first, and tables once were not: where it still is, nobody gave rights.
        if card.exists() and stat.S_IMODE(card.stat().st_mode) & ~0o600:
            for path in (*(one.path for one in found), card):
                if path.exists():
                    shutil.copymode(path, _half(path))
        card.unlink(missing_ok=True)
        for name in WHAT.keys() - {one.path.stem for one in found}:
            (directory / f"{name}.parquet").unlink(missing_ok=True)
        flush(directory)
        for one in found:
            _half(one.path).replace(one.path)
        flush(directory)
        _half(card).replace(card)
        flush(directory)
    finally:
        for path in _halves(directory):
            path.unlink(missing_ok=True)
    return [card, *(one.path for one in found)]


def _half(path: Path) -> Path:
    """Where a table or the card lies until all are whole."""
    return path.with_suffix(".tmp")


def _halves(directory: Path) -> list[Path]:
    """All that an export may leave there when it is killed; of the card, which is renamed onto its half, two."""
    half_card = _half(directory / CARD)
    return [half_card, *directory.glob(f".{half_card.name}.*"), *(_half(directory / name) for name in WHAT)]


def _written(path: Path, parts: Iterator[pd.DataFrame]) -> Exported:
    """All parts into one file, with the types of the first; text is text where a part has none. Not yet by its name."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    first = next(parts)
    schema = _schema(first)
    n_rows = 0
    with open(_half(path), "wb", opener=for_owner) as file, pq.ParquetWriter(file, schema) as writer:
        for frame in _chain(first, parts):
            writer.write_table(pa.Table.from_pandas(frame, schema=schema, preserve_index=False))
            n_rows += len(frame)
    flush(_half(path))
    return Exported(path, n_rows, tuple(schema.names))


def _chain(first: pd.DataFrame, rest: Iterable[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    yield first
    yield from rest


def _schema(frame: pd.DataFrame) -> pa.Schema:
    import pyarrow as pa

    kinds = []
    for name, dtype in frame.dtypes.items():
        if pd.api.types.is_bool_dtype(dtype):
            kind = pa.bool_()
        elif pd.api.types.is_integer_dtype(dtype):
            kind = pa.int64()
        else:
            kind = pa.float64() if pd.api.types.is_numeric_dtype(dtype) else pa.string()
        kinds.append((str(name), kind))
    return pa.schema(kinds)


def _traces(run: RunData) -> Iterator[pd.DataFrame]:
    """One frame a trial. A trial whose file is damaged has none, and the card says so."""
    columns = {"cell": str, "repeat": int, "trial": str, "part": str, "meter": str, "component": str, "kind": str}
    yield pd.DataFrame(columns=[*columns, "method", "time_s", "value"]).astype(
        {"repeat": "int64", "time_s": "float64", "value": "float64"}
    )
    for trial in run.trials:
        try:
            parts = run.load_parts(trial.trial_id)
        except TraceFileError as error:
            run.lost_traces[trial.trial_id] = str(error)
            continue
        for part, traces in parts.items():
            for trace in traces:
                yield pd.DataFrame(
                    {
                        "cell": trial.cell_id,
                        "repeat": trial.repeat,
                        "trial": trial.trial_id,
                        "part": part,
                        "meter": trace.meter,
                        "component": trace.component,
                        "kind": trace.kind,
                        "method": trace.method,
                        "time_s": trace.times_s,
                        "value": trace.values,
                    }
                )


# --- the card ---------------------------------------------------------------------------------------------------------


def card_text(run: RunData, derived: RunFrames, tables: Sequence[Exported]) -> str:
    """In the form of a dataset card: YAML between two rules, then Markdown."""
    info = run.info
    lines = [
        "---",
        f"pretty_name: {json.dumps(info.name)}",
        TAGS,
        "configs:",
    ]
    for one in tables:
        lines += [f"- config_name: {one.path.stem}", f"  data_files: {one.path.name}"]
    n_ok = len(usable(run.trials))
    n_marked = sum(t.status == "ok" for t in run.trials) - n_ok
    marked = f" and {n_marked} marked" if n_marked else ""
    lines += [
        "---",
        "",
        f"# {escaped(info.name)}",
        "",
        f"What joulebench measured in run `{info.run_id}`, begun {info.created_at}:"
        f" {number_of(len(run.cells), 'cell')}, {number_of(len(run.trials), 'trial')}, {n_ok} of them ok{marked}."
        " A cell is an engine with its technique, a workload and a device; a trial is one repeat of a cell."
        " Speed, joules and accuracy of a trial are of the same requests.",
        "",
        "## How it was measured",
        "",
        *(f"- {escaped(device)}: {escaped(words)}" for device, words in method_sentences(run, derived.tidy)),
        "",
        "`method` (or a column that ends in `_method`) says of each figure how it came to be: `measured`, `counter`,"
        " `integrated power`, `battery gauge`, `relative gauge`, `replayed`, `modelled`, `derived` or `missing`. They"
        " are never mixed in one row. A missing figure is null, beside its `reason`. It is never 0.",
        "",
        *(f"- {escaped(words)}" for words in warnings_of(run)),
        "",
        "## Units",
        "",
        "Of a column with its unit in its name: `_s` seconds, `_ms` milliseconds, `_j` joules, `_w` watts, `_bytes`"
        " bytes, `_percent` percent. A `_share` of 0.5 is half. Of tables with a row a metric: the column `unit`."
        " `ci_low` and `ci_high` are the ends of the 95 % interval of the mean over trials.",
        "",
        "## Tables",
        "",
        "| file | rows | what |",
        "|---|---|---|",
        *(f"| {one.path.name} | {one.n_rows} | {WHAT[one.path.stem]} |" for one in tables),
        "",
    ]
    for one in tables:
        lines += [f"- `{one.path.name}`: {', '.join(f'`{c}`' for c in one.columns)}"]
    lines += ["", "`cell` and `repeat` join the tables.", "", "## Environment", ""]
    for device, environment in info.environments.items():
        lines += [f"### {escaped(device)}", ""]
        lines += [f"- {escaped(key)}: {escaped(value)}" for key, value in machine_rows(environment)]
        packages = ", ".join(f"{name} {version}" for name, version in environment.packages.items())
        lines += [f"- packages: {escaped(packages)}", ""]
    lines += [
        "## Inputs",
        "",
        *(f"- {escaped(one.name)}: {escaped(shown_value(one.value))}" for one in info.inputs),
        "",
    ]
    lines += ["## Plan", "", *fenced(toml_text(info.plan), "toml"), ""]
    return "\n".join(lines)


def escaped(text: str) -> str:
    """Text as Markdown shows it, in one line: nothing of it is markup."""
    return re.sub(r"([\\`*_{}\[\]<>#|~!&])", r"\\\1", " ".join(text.split()))


def fenced(text: str, language: str) -> list[str]:
    """A block of code that nothing in the text ends."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [fence + language, text.rstrip("\n"), fence]
