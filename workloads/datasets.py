"""Where items come from: the bundled sample, a local folder, the Hugging Face hub, or a generator.

A folder holds `<dataset>/<split>.jsonl` (or `.jsonl.gz`), one JSON object per line, in the schema of the hub's data
set. The sample has the same schema, is small and hand-written, and is for trying things out: tables say "sample".
Generated items have it too; they are made for the bundled model, by a function of the data set.
"""

from __future__ import annotations

import gzip
import json
import lzma
import random
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from workloads import files_read
from workloads.base import WorkloadError
from workloads.kept import once

Row = dict[str, Any]
SourceKind = Literal["sample", "folder", "hub", "generated"]

SAMPLES = Path(__file__).parent / "samples"
DAMAGED = (EOFError, UnicodeDecodeError, gzip.BadGzipFile, lzma.LZMAError, zlib.error)
"""What reading a text file, plain or packed, raises where its content is broken."""
MAKE_READABLE = "check that this user may read it, and the disk that it is on"


@dataclass(frozen=True)
class Dataset:
    """A data set: its name in folders, its address on the hub, and what a row must look like.

    `problem` looks at the values of a row that has all columns and says what is wrong with them, or None.
    """

    name: str
    hub_id: str
    columns: tuple[str, ...]
    """Those that are used, and kept; empty: all there are."""
    problem: Callable[[Row], str | None]
    hub_config: str | None = None
    hub_files: str | None = None
    """For a hub repository that is no prepared data set: the one file that is read, as split "train"."""
    hub_options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `datasets.load_dataset`."""
    generate: Callable[[str], Iterable[Row]] | None = None
    """The rows of a split, made up, the same at each call; None where there is no generator."""

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Data sets of one key have the same rows."""
        return (*(getattr(self, f.name) for f in fields(self) if f.name != "hub_options"), repr(self.hub_options))


@dataclass(frozen=True)
class DataSource:
    """One place to read splits from."""

    kind: SourceKind
    root: Path | None = None

    def label(self, dataset: Dataset) -> str:
        """What tables print as the source of the items."""
        return {"folder": str(self.root), "hub": f"hub:{dataset.hub_id}"}.get(self.kind, self.kind)

    def rows(self, dataset: Dataset, split: str) -> list[Row]:
        """All rows of a split, checked, cut down to the columns that are used; read once a run.

        Raises `WorkloadError`.
        """
        return once((self, dataset.key, split), lambda: self._rows(dataset, split))

    def _rows(self, dataset: Dataset, split: str) -> list[Row]:
        if self.kind == "hub":
            numbered = enumerate(_hub_rows(dataset, split), start=1)
            return _checked(dataset, f"{dataset.hub_id} ({split})", numbered)
        if self.kind == "generated":
            return _checked(dataset, f"generated {dataset.name} ({split})", enumerate(_generated(dataset, split), 1))
        path = self._path(dataset.name, split)
        return _checked(dataset, str(path), read_jsonl(path))

    def _path(self, dataset: str, split: str) -> Path:
        if self.root is None:
            path = SAMPLES / f"{dataset}_{split}.jsonl"
            if not path.is_file():
                raise WorkloadError(
                    f"{dataset}: no sample of its {split} split comes with the project; set JOULEBENCH_DATA to a "
                    f'folder with {dataset}/{split}.jsonl, or data = "hub"'
                )
            return path
        folder = self.root / dataset
        for suffix in (".jsonl", ".jsonl.gz"):
            if (path := folder / f"{split}{suffix}").is_file():
                return path
        found = ", ".join(sorted(p.name for p in folder.iterdir())) if folder.is_dir() else "no such folder"
        raise WorkloadError(
            f"{dataset}: no {split}.jsonl or {split}.jsonl.gz in {folder} (found: {found or 'nothing'}); "
            'put the split there, or set data = "sample" or data = "hub" (network or its cache)'
        )


def data_source(kind: SourceKind | None, data_root: Path | None) -> DataSource:
    """The source that a plan asks for. None: the folder where one is given, else the bundled sample."""
    kind = kind or ("folder" if data_root else "sample")
    if kind != "folder":
        return DataSource(kind)
    if data_root is None:
        raise WorkloadError('data = "folder", but no data folder was given; set JOULEBENCH_DATA, or data = "sample"')
    if not data_root.is_dir():
        what = "is no folder; name one" if data_root.exists() else "does not exist; create it"
        raise WorkloadError(f"data folder {data_root} {what}, or leave it out for the sample")
    return DataSource("folder", data_root)


def read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    """(line number from 1, value) of each line that is not blank. Raises `WorkloadError` on what is not JSON.

    A byte order mark, as editors on Windows write it, is left out.
    """
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    number = 0
    files_read.note(path)
    try:
        with opener(path, "rt", encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, parsed(line)
    except UnicodeEncodeError as error:
        raise WorkloadError(
            f"{path}:{number}: a text holds half a character ({error.object[error.start]!a}, a lone surrogate);"
            " write it whole, or leave the row out"
        ) from error
    except UnicodeDecodeError as error:
        raise WorkloadError(
            f"{path}: no text in UTF-8 after line {number} ({error}); save it as UTF-8, or end its name with .gz if"
            " it is packed"
        ) from error
    except DAMAGED as error:
        raise WorkloadError(f"{path}: unreadable after line {number} ({error}); fetch the file again") from error
    except (ValueError, RecursionError) as error:  # numbers of 5,000 digits and a hundred thousand brackets too
        raise WorkloadError(f"{path}:{number}: not JSON ({error}); one JSON object per line is expected") from error
    except OSError as error:
        raise WorkloadError(f"{path}: {error}; {MAKE_READABLE}") from error


def parsed(text: str) -> Any:
    """A value of JSON. Raises `ValueError`; `UnicodeEncodeError` where a text in it is none that is whole: neither a
    tokenizer nor a table takes it."""
    value = json.loads(text)
    if "\\ud" in text.lower():  # only an escape can say it
        json.dumps(value, ensure_ascii=False).encode()
    return value


def read_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """(number from 1, row) of a .jsonl, .jsonl.gz or .parquet file. Raises `WorkloadError`."""
    if path.suffix != ".parquet":
        yield from read_jsonl(path)
        return
    import pyarrow
    import pyarrow.parquet

    files_read.note(path)
    try:
        yield from enumerate(pyarrow.parquet.read_table(path).to_pylist(), start=1)
    except pyarrow.ArrowInvalid as error:
        raise WorkloadError(f"{path}: not Parquet ({error}); fetch the file again") from error
    except OSError as error:
        raise WorkloadError(f"{path}: {error}; {MAKE_READABLE}") from error


def find_file(option: str, name: str, data_root: Path | None) -> Path:
    """The file that an option of a plan names: paths start where joulebench is called, or in the data folder.

    Raises `WorkloadError`.
    """
    places = list(dict.fromkeys([Path(name), *([data_root / name] if data_root else [])]))
    try:
        found = next((place for place in places if place.is_file()), None)
    except OSError as error:  # a name that is too long, a folder above that is closed
        raise WorkloadError(f"{option}: no path of a file: {name[:80]} ({error.strerror}); name another") from error
    if found is None:
        raise WorkloadError(
            f"{option}: no file {' or '.join(map(str, places))}; name one that is there: paths start where joulebench "
            "is called, or in the data folder"
        )
    return found


def _hub_rows(dataset: Dataset, split: str) -> Sequence[Mapping[str, Any]]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    # The hub's own client: the package httpx, or with later versions of the hub's, httpx2.
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

    try:
        if dataset.hub_files:
            rows = load_dataset(dataset.hub_id, data_files=dataset.hub_files, split="train")
        else:
            rows = load_dataset(dataset.hub_id, dataset.hub_config, split=split, **dataset.hub_options)
    # RuntimeError: a repository with a loading script. DatasetsError: files that do not make up the set they claim to
    # be. HTTPError: a proxy's refusal, a broken answer; those of the connection itself are turned into OSError there.
    except (OSError, ValueError, RuntimeError, DatasetsError, httpx.HTTPError) as error:
        raise WorkloadError(
            f"{dataset.hub_id} ({split}) could not be read from the hub or its cache "
            f"({type(error).__name__}: {error}); check the connection and HF_HUB_OFFLINE, or name a local data folder"
        ) from error
    return rows  # type: ignore[no-any-return]


def _generated(dataset: Dataset, split: str) -> Iterable[Row]:
    if dataset.generate is None:
        raise WorkloadError(f'{dataset.name}: has no generator; set data = "folder" or data = "hub"')
    return dataset.generate(split)


def _checked(dataset: Dataset, where: str, numbered_rows: Iterator[tuple[int, Any]]) -> list[Row]:
    rows = []
    for number, row in numbered_rows:
        if not isinstance(row, Mapping):
            raise WorkloadError(f"{where}:{number}: {type(row).__name__} found; one JSON object per line is expected")
        if missing := [c for c in dataset.columns if c not in row]:
            raise WorkloadError(
                f"{where}:{number}: no column {', '.join(missing)} (found: {', '.join(row)}); "
                f"the schema of {dataset.hub_id} is expected"
            )
        kept = {column: row[column] for column in dataset.columns or row}
        if problem := dataset.problem(kept):
            raise WorkloadError(f"{where}:{number}: {problem}; the schema of {dataset.hub_id} is expected")
        rows.append(kept)
    if not rows:
        raise WorkloadError(f"{where}: empty; at least one {dataset.name} item is needed")
    return rows


def not_text(row: Row, columns: Iterable[str]) -> str | None:
    """The problem of the first of these columns that does not hold a text, or None."""
    return next((f"{c} must be text, found {row[c]!r:.80}" for c in columns if type(row[c]) is not str), None)


def choose(n_rows: int, limit: int | None, seed: int) -> list[int]:
    """Positions of a random subset, ascending; the same for the same seed. A smaller limit gives a subset of a larger.

    All rows where `limit` is None or larger than there are rows.
    """
    if limit is None or limit >= n_rows:
        return list(range(n_rows))
    order = list(range(n_rows))
    random.Random(seed).shuffle(order)
    return sorted(order[:limit])


def shortage(n_rows: int, limit: int | None, n_reserved: int = 0) -> tuple[str, ...]:
    """The note for a reader who asked for more items than there are. n_reserved: those that are never asked."""
    besides = f" beside the {n_reserved} for calibration" if n_reserved else ""
    return (f"{limit} items asked for, the data has {n_rows}{besides}",) if limit is not None and limit > n_rows else ()
