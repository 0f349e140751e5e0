"""What every command prints with: the console, rows as a table or JSON, the error that ends it, and its exit codes."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from harness.interrupts import words_and_code
from results.printable import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PIPE_WIDTH = 160
WIDEST_CELL = 10_000
LEAST_WIDTH = 30
"""Of tables: in less rich prints columns without a letter, and the terminal folds their lines itself."""
LOG_FORMAT = "%(levelname)s %(name)s: %(message)s"
EXIT_BAD_PLAN, EXIT_MODELLED_ONLY, EXIT_DEVICE_NOT_READY, EXIT_SOME_FAILED, EXIT_NONE_USABLE = 2, 3, 4, 5, 6
EXIT_NOT_WRITTEN = 7
EXIT_ALTERED = 8
EXIT_UNFORESEEN = 1
MOST_WORDS = 300
"""Of an error that nobody foresaw."""

NO_ROOM = ("failed to map segment", "can't start new thread", "Cannot allocate memory", "can't allocate memory")
"""What the loader, Python, the kernel and torch say under a limit."""
NO_TEMPORARY = "No usable temporary directory found"
"""Python's words where none can be written: the disk is full."""

WHOLE_WORD = 20
"""Characters: longer ones (paths) are cut where not all have room."""
BETWEEN_COLUMNS = 3
VERDICT = "verdict"
"""The column that stays whole however narrow the terminal is."""
NAMES = ("arm", "workload", "device", "figure")
"""Columns that say what a verdict is of."""
ROOMY_COLUMNS = 100
"""Width of a terminal from which on columns stand two blanks apart, and not one."""

FILE_KINDS = (".csv", ".gz", ".html", ".json", ".jsonl", ".parquet", ".safetensors", ".sqlite", ".toml", ".zip")
"""Endings of files that are not replaced by one of another kind."""

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def console_of(stderr: bool = False) -> Console:
    from rich.console import Console

    # Names of runs, arms and devices are text: of `run:b:` Rich would make a picture.
    made = partial(Console, stderr=stderr, emoji=False)
    found = made()
    # A file or a pipe has no width of its own: wide enough that no table folds its words. Some programs say COLUMNS=0.
    if not (found.is_terminal or "COLUMNS" in os.environ) or found.width < 1:
        return made(width=PIPE_WIDTH)
    return found if found.width >= LEAST_WIDTH else made(width=LEAST_WIDTH)


UNITS = {"j": "J", "w": "W"}
"""Of names of columns, as people write them."""


def print_rows(rows: list[dict[str, Any]], as_json: bool, title: str) -> None:
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    console = console_of()
    table = Table(title=Text(printable(title)), box=box.SIMPLE_HEAD, title_justify="left")
    columns = list(rows[0]) if rows else []
    cells = [["" if value is None else printable(str(value)) for value in row.values()] for row in rows]
    titles = [" ".join(UNITS.get(word, word) for word in key.split("_")) for key in columns]
    numeric = [all(isinstance(row[key], int | float) for row in rows) for key in columns]
    fill(table, titles, cells, numeric, console.width - BETWEEN_COLUMNS * len(columns) - 1)
    console.print(table)


def print_verdicts(titles: Sequence[str], rows: Sequence[Sequence[str]], numbers: Collection[str]) -> None:
    """A table of many columns, closer together. What a row is of shares one column where words have no room else.

    numbers: titles of columns that stand right.
    """
    from rich import box
    from rich.table import Table

    console = console_of()
    between = 2 if console.width >= ROOMY_COLUMNS else 1
    texts = [[title, *map(printable, own)] for title, *own in zip(titles, *rows, strict=True)]
    room = console.width - between * (len(titles) - 1) - 2
    if sum(map(_longest_word, texts)) > room:
        names = [own for own in texts if own[0] in NAMES]
        first = texts.index(names[0])
        texts = [own for own in texts if own[0] not in NAMES]
        texts.insert(first, ["\n".join(lines) for lines in zip(*names, strict=True)])
        room += between * (len(names) - 1)
    heads, *cells = zip(*texts, strict=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, between - 1, 0, 0))
    fill(table, heads, cells, [head in numbers for head in heads], room)
    console.print(table)


def fill(
    table: Table, titles: Sequence[str], rows: Sequence[Sequence[str]], is_number: Sequence[bool], room: int
) -> None:
    """Columns and rows, so that words are whole where all have room."""
    from rich.text import Text

    widths = _widths([[title, *own] for title, *own in zip(titles, *rows, strict=True)], room)
    for title, is_right, width in zip(titles, is_number, widths, strict=True):
        justify: Literal["left", "right"] = "right" if is_right else "left"
        # Rich cuts what does not wrap in a column of a given width.
        stays_whole = title == VERDICT and width is None
        table.add_column(title, justify=justify, overflow="fold", width=width, no_wrap=stays_whole)
    for row in rows:
        table.add_row(*map(Text, row))


def _widths(texts: Sequence[Sequence[str]], room: int) -> list[int | None]:
    """Of columns with these texts, so that words are whole; None where these have no room, or all need no more."""
    from rich.cells import cell_len

    whole = [max(map(cell_len, own), default=0) for own in texts]
    words = [_longest_word(own) for own in texts]
    if sum(words) > room:
        words = [min(WHOLE_WORD, word) for word in words]
    if sum(whole) <= room or sum(words) > room:
        return [None] * len(texts)

    def widths(most: int) -> list[int]:
        return [max(word, min(line, most)) for word, line in zip(words, whole, strict=True)]

    return list(widths(max(most for most in range(room + 1) if sum(widths(most)) <= room)))


def _longest_word(texts: Sequence[str]) -> int:
    from rich.cells import cell_len

    return max((cell_len(word) for text in texts for word in text.split()), default=0)


def table_of_arms(title: str, console: Console) -> Table:
    """A small table whose first column is for names of arms."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(title, style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1 if console.width >= ROOMY_COLUMNS else 0, 0, 0),
    )
    table.add_column("arm", overflow="fold", min_width=10)
    return table


def print_whole(table: Table, console: Console) -> None:
    """Without a figure cut: a narrower terminal folds the lines, where Rich would leave the last columns out."""
    from rich.measure import Measurement

    # How wide a cell must be is told up to the width that is there.
    options = console.options.update(max_width=WIDEST_CELL)
    for column in table.columns:
        if column.overflow == "fold":
            continue
        sizes = [Measurement.get(console, options, cell) for cell in (column.header, *column.cells)]
        needed = max(size.maximum if column.no_wrap else size.minimum for size in sizes)
        column.min_width = max(column.min_width or 0, needed)
    needed = Measurement.get(console, options, table).minimum
    if needed > console.width:
        table.width = needed
    console.print(table, crop=False)


def rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def fail(message: str, code: int) -> NoReturn:
    typer.echo(f"error: {printable(message)}", err=True)
    raise typer.Exit(code)


def fail_each(problems: Iterable[object], code: int) -> NoReturn:
    """A line for each."""
    for problem in problems:
        typer.echo(f"error: {printable(str(problem))}", err=True)
    raise typer.Exit(code)


def warn_of_crowded(n_threads: int | None) -> None:
    """Of a command whose --threads are more than the cores that it may use."""
    if n_threads is None:
        return
    from harness.rank_problems import crowded_words

    if (told := crowded_words("--threads", n_threads)) is not None:
        typer.echo(f"warning: {told}", err=True)


def check_out(folder: Path) -> None:
    """Ends a command whose --out cannot be written, before it computes for minutes."""
    from results.database import StoreError
    from results.report.files import check_folder
    from results.run_folders import check_is_folder

    try:
        check_is_folder(folder)
        check_folder(folder)
    except StoreError as error:
        fail(f"--out {error}", EXIT_BAD_PLAN)
    except OSError as error:
        fail_unwritten(folder, error)


def check_file(option: str, path: Path | None, kind: str) -> None:
    """Ends a command whose output, a file of this kind (".csv"), would replace a plan or the store of a run."""
    if path is not None and path.suffix.lower() in {*FILE_KINDS} - {kind} and path.is_file():
        fail(f"{option} {path}: is there, and its name is of no {kind} file; name another file", EXIT_BAD_PLAN)


def fail_store(error: Exception) -> NoReturn:
    """Of a run's folder: one that is the wrong one is mended in the command, a disk or its permissions are not."""
    from results.database import UnwrittenError

    fail(str(error), EXIT_NOT_WRITTEN if isinstance(error, UnwrittenError) else EXIT_BAD_PLAN)


def write_first(folder: Path | None, write: Callable[[Path], Iterable[Path]]) -> Callable[[], None]:
    """Files, where a folder was named, before what was found is printed: a reader may leave (`| head`, `| less`). Call
    what comes back behind that: it tells the files, or ends the command with why they could not be written."""
    if folder is None:
        return lambda: None
    try:
        written = list(write(folder))
    except OSError as error:
        return partial(fail_unwritten, folder, error)

    def tell() -> None:
        for path in written:
            typer.echo(f"{printable(str(path))}: written", err=True)

    return tell


def fail_unwritten(folder: Path, error: OSError) -> NoReturn:
    fail(f"--out {folder}: cannot be written ({error.strerror or error}); name another folder", EXIT_NOT_WRITTEN)


def end_interrupted(interrupt: KeyboardInterrupt, what_stays: str) -> NoReturn:
    words, code = words_and_code(interrupt)
    fail(f"{words}; {what_stays}", code)


def end_unforeseen(error: Exception) -> NoReturn:
    """In one line, or as it was raised under --verbose: a fault of this program is none that its user can read."""
    if logging.getLogger().isEnabledFor(logging.INFO):
        raise error
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    kind = type(error).__name__
    words = " ".join(str(error).split())[:MOST_WORDS]
    if isinstance(error, FileNotFoundError) and NO_TEMPORARY in words:
        typer.echo(f"error: {printable(words)}: make room in one of them, or set TMPDIR to another folder", err=True)
        raise SystemExit(EXIT_UNFORESEEN)
    if isinstance(error, PermissionError) and error.filename is not None:
        typer.echo(f"error: {printable(words)}: it is closed to this user; chmod opens it, or name another", err=True)
        raise SystemExit(EXIT_BAD_PLAN)
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        told = printable(str(error.filename))[:80]
        typer.echo(f"error: {told}: the name of a file or folder is too long; name another", err=True)
        raise SystemExit(EXIT_BAD_PLAN)
    if (memory := _lack_of_memory(error)) is not None:
        typer.echo(f"error: {kind}{words and ': '}{printable(words)}; {memory}", err=True)
        raise SystemExit(EXIT_UNFORESEEN)
    where = "" if last is None else f" ({os.path.basename(last.tb_frame.f_code.co_filename)}, line {last.tb_lineno})"
    typer.echo(
        f"error: {kind}: {printable(words)}{where}; nobody foresaw this: `joulebench --verbose ...`"
        " shows the whole, please report it",
        err=True,
    )
    raise SystemExit(EXIT_UNFORESEEN)


def _lack_of_memory(error: Exception) -> str | None:
    """What to do, where this process got no more memory. A library that meets a limit seldom calls it by its name."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and (isinstance(error, MemoryError) or any(w in str(error) for w in NO_ROOM)):
        return f"this process may take {limit // 1024} KiB of memory (ulimit -v): raise that"
    if isinstance(error, MemoryError):
        return "no memory is left: end other programs, or take a smaller model or fewer requests at once"
    return None


def quiet_libraries() -> None:
    """Their progress bars and advice would tear our display apart. Read when they are imported, so it comes first."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


class PrintableLog(logging.Formatter):
    """What devices say reaches the log, too."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return "\n".join(map(printable, super().formatException(ei).splitlines()))


def log_to_terminal(level: int, form: str = LOG_FORMAT) -> None:
    logging.basicConfig(level=level)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(PrintableLog(form))
    if level > logging.INFO:
        # It warns of every vendor's library that is absent, which `devices` says in its own words.
        logging.getLogger("zeus").setLevel(logging.ERROR)
        # A first start compiles, and says so.
        logging.getLogger("engines.kernels.library").setLevel(logging.INFO)
