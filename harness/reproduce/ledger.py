"""What the sources claim: every row, its class, and the rows on which constants may be fitted.

Three files stand beside this module. `claims.csv` has the figures as printed; `classes.csv` says of each row, before
its figure is computed, how it will be judged; `calibration.toml` names the rows that a fit may read.
"""

from __future__ import annotations

import csv
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from harness.reproduce.orders import parse_order
from harness.reproduce.printed import Number, Printed, Range, parse_printed
from results.printable import printable

Class = Literal["exact", "predicted", "ordering", "consistent", "input", "not predictable", "contradicted"]
CLASSES: tuple[Class, ...] = get_args(Class)
MEANINGS: dict[Class, str] = {
    "exact": "follows from formulas, sizes or other figures of the source; equal when rounded as the source rounds",
    "predicted": "comes out of a model that was not fitted on it",
    "ordering": "its sign or order is tested, not its size",
    "consistent": "the model was fitted on it or on its like; never counted as a prediction",
    "input": "a setting or a measured figure that models start from",
    "not predictable": "something is missing that the source does not state",
    "contradicted": "other figures of its own source exclude it",
}
PRINT = "print"
"""The tolerance of rows that are equal when they are rounded as the source rounds."""
FITTED: tuple[Class, ...] = ("input", "consistent", "not predictable")
"""Classes that a row of a fit may have: none of them counts as found."""
FOLDER = Path(__file__).parent
CLAIM_KEYS = ("id", "source", "location", "quantity", "baseline", "value", "unit", "conditions", "corrected")
CLASS_KEYS = ("id", "class", "tolerance", "order", "reason", "declared", "changed")
_ID = re.compile(r"\d{3}-\d{3}")
_MAX_SHOWN = 80


class LedgerError(ValueError):
    """Files that are not whole: every problem, a line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


class NotForCalibrationError(LookupError):
    """A fit asked for a row that calibration.toml does not name."""


class Declared(NamedTuple):
    """Class and tolerance that a row had before its figure was known, where it has others now."""

    klass: Class
    tolerance: float

    def __str__(self) -> str:
        return f"{self.klass} {self.tolerance:g}" if self.tolerance else f"{self.klass} {PRINT}"


@dataclass(frozen=True)
class Claim:
    """One figure of a source. corrected: where the row differs from what was read off the source first, and why."""

    id: str
    source: str
    location: str
    quantity: str
    baseline: str
    value: str
    unit: str
    conditions: str
    corrected: str
    printed: Printed
    klass: Class
    tolerance: float | None
    """Relative; 0 where the print's own rounding is all that is allowed, None where no size is compared."""
    order: str
    """Of an ordering: what must hold (`orders`)."""
    reason: str
    """Why it has this class."""
    declared: Declared | None = None
    changed: str = ""
    """Why it has no longer the class that was declared."""


@dataclass(frozen=True)
class Fit:
    """Constants, and the rows on which they are fitted. origins: what sheets say of these constants, word by word."""

    constants: str
    claims: tuple[str, ...]
    origins: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ledger:
    claims: Mapping[str, Claim]
    fits: tuple[Fit, ...] = field(default=())

    def __iter__(self) -> Iterator[Claim]:
        return iter(self.claims.values())

    def of_source(self, source: str) -> list[Claim]:
        return [claim for claim in self if claim.source == source]

    @property
    def calibration_rows(self) -> frozenset[str]:
        return frozenset(claim for fit in self.fits for claim in fit.claims)

    def calibration(self, claim: str) -> float:
        """The only way in which a fit reads a figure of a source. Raises `NotForCalibrationError`."""
        if claim not in self.calibration_rows:
            raise NotForCalibrationError(f"{claim}: no row for fits; calibration.toml names those that are")
        return self.figure(claim)

    def calibration_text(self, claim: str) -> str:
        """As `calibration`, of a row whose value is a text."""
        if claim not in self.calibration_rows:
            raise NotForCalibrationError(f"{claim}: no row for fits; calibration.toml names those that are")
        return str(self.claims[claim].printed)

    def figure(self, claim: str) -> float:
        """A figure as printed, for arithmetic on a source's own figures and for drawing it; never for a fit.

        Raises `TypeError` of a row that is no single number.
        """
        return self.number(claim).value

    def number(self, claim: str) -> Number:
        """As `figure`, with the digits that are printed. Raises `TypeError` likewise."""
        printed = self.claims[claim].printed
        if not isinstance(printed, Number):
            raise TypeError(f"{claim}: {printed} is no single number")
        return printed

    def ends(self, claim: str) -> tuple[float, float]:
        """Least and most of a printed range. Raises `TypeError` of a row that is none."""
        printed = self.claims[claim].printed
        if not isinstance(printed, Range):
            raise TypeError(f"{claim}: {printed} is no range")
        return printed.low.value, printed.high.value

    def rows_of(self, origin: str) -> tuple[str, ...]:
        """The rows that a fitted figure of a sheet rests on, by what the sheet says of its origin."""
        named = [claim for fit in self.fits if origin in fit.origins for claim in fit.claims]
        return tuple(dict.fromkeys([*named, *_ID.findall(origin)]))


@cache
def ledger() -> Ledger:
    """Of the files that come with joulebench. Raises `LedgerError`."""
    return read_ledger(FOLDER)


def read_ledger(folder: Path) -> Ledger:
    """Raises `LedgerError` that lists all that is wrong with the three files."""
    problems: list[str] = []
    classes = {row["id"]: row for row in _rows(folder / "classes.csv", CLASS_KEYS, problems)}
    rows = {row["id"]: row for row in _rows(folder / "claims.csv", CLAIM_KEYS, problems)}
    claims = {}
    for id_, row in rows.items():
        if id_ not in classes:
            problems.append(f"classes.csv: {_shown(id_)} has no class; add a line")
            continue
        claim = _claim(row, classes[id_], problems)
        if claim is not None:
            claims[id_] = claim
    problems += [f"classes.csv: {_shown(id_)} is no claim; remove the line" for id_ in classes if id_ not in rows]
    fits = _fits(folder / "calibration.toml", problems)
    for fit in fits:
        for id_ in fit.claims:
            if id_ not in rows:
                problems.append(f"calibration.toml: {_shown(id_)} is no claim")
            elif id_ in claims and claims[id_].klass not in FITTED:
                problems.append(
                    f"calibration.toml: {id_} is {claims[id_].klass}, and a row that is fitted on counts as no such"
                    f" thing; make it one of {', '.join(FITTED)}, or leave it out of the fit"
                )
    if problems:
        raise LedgerError(problems)
    return Ledger(claims, tuple(fits))


def _rows(path: Path, keys: Sequence[str], problems: list[str]) -> list[dict[str, str]]:
    """Whole lines alone; each problem with its line."""
    try:
        text = path.read_text(encoding="utf-8")
        lines = list(csv.reader(text.splitlines(), strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        problems.append(f"{path.name}: cannot be read ({printable(str(error), _MAX_SHOWN)})")
        return []
    if not lines or tuple(lines[0]) != tuple(keys):
        problems.append(f"{path.name}: its first line must be {','.join(keys)}")
        return []
    found: dict[str, dict[str, str]] = {}
    for number, cells in enumerate(lines[1:], start=2):
        where = f"{path.name}, row {number}"
        if len(cells) != len(keys):
            problems.append(f"{where}: has {len(cells)} fields, and needs {len(keys)}")
            continue
        row = dict(zip(keys, cells, strict=True))
        if not _ID.fullmatch(row["id"]):
            problems.append(f"{where}: id {_shown(row['id'])} is not three digits, a dash and three digits")
        elif row["id"] in found:
            problems.append(f"{where}: {row['id']} stands there twice; remove one")
        else:
            found[row["id"]] = row
    return list(found.values())


def _claim(row: dict[str, str], own: dict[str, str], problems: list[str]) -> Claim | None:
    id_, before = row["id"], len(problems)
    if row["source"] != id_[:3]:
        problems.append(f"claims.csv: {id_} is said to be of source {_shown(row['source'])}; make it {id_[:3]}")
    printed: Printed | None = None
    try:
        printed = parse_printed(row["value"])
    except ValueError as error:
        problems.append(f"claims.csv: {id_}: {printable(str(error), 4 * _MAX_SHOWN)}")
    klass = next((known for known in CLASSES if known == own["class"]), None)
    if klass is None:
        problems.append(f"classes.csv: {id_}: nobody knows class {_shown(own['class'])}; take {', '.join(CLASSES)}")
    if not own["reason"]:
        problems.append(f"classes.csv: {id_} has no reason; say why it has its class")
    tolerance = _tolerance(own["tolerance"])
    has_size = klass not in ("ordering", "not predictable")
    if tolerance is None and (has_size or own["tolerance"]):
        problems.append(f"classes.csv: {id_}: tolerance {_shown(own['tolerance'])} must be {PRINT} or between 0 and 1")
    if klass == "exact" and tolerance:
        problems.append(f"classes.csv: {id_} is exact: its tolerance must be {PRINT}")
    try:
        parse_order(own["order"])
    except ValueError as error:
        problems.append(f"classes.csv: {id_}: {printable(str(error), 4 * _MAX_SHOWN)}")
    if klass is not None and (klass == "ordering") != bool(own["order"]):
        problems.append(f"classes.csv: {id_} is {klass}: an order belongs to each ordering, and to nothing else")
    declared = _declared(id_, own, problems)
    if len(problems) > before:
        return None
    assert printed is not None
    assert klass is not None
    return Claim(
        **row, printed=printed, klass=klass, tolerance=tolerance, order=own["order"], reason=own["reason"],
        declared=declared, changed=own["changed"],
    )  # fmt: skip


def _declared(id_: str, own: dict[str, str], problems: list[str]) -> Declared | None:
    """Such as "predicted 0.15"; a size is always compared."""
    if bool(own["declared"]) != bool(own["changed"]):
        problems.append(f"classes.csv: {id_}: declared and changed stand together; say what it was, and why it changed")
    if not own["declared"]:
        return None
    name, _, size = own["declared"].rpartition(" ")
    klass = next((known for known in CLASSES if known == name), None)
    tolerance = _tolerance(size)
    if klass is None or tolerance is None or klass in ("ordering", "not predictable"):
        problems.append(
            f"classes.csv: {id_}: declared {_shown(own['declared'])} must be a class whose size is compared and its"
            ' tolerance, such as "predicted 0.15"'
        )
        return None
    return Declared(klass, tolerance)


def _tolerance(text: str) -> float | None:
    if text == PRINT:
        return 0.0
    try:
        found = float(text)
    except ValueError:
        return None
    return found if 0 < found < 1 else None


def _fits(path: Path, problems: list[str]) -> list[Fit]:
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problems.append(f"{path.name}: cannot be read ({printable(str(error), _MAX_SHOWN)})")
        return []
    tables = raw.get("fit")
    if set(raw) != {"fit"} or not isinstance(tables, list):
        problems.append(f"{path.name}: holds tables [[fit]] and nothing else")
        return []
    found = []
    for number, table in enumerate(tables, start=1):
        where = f"{path.name}, fit {number}"
        if not isinstance(table, dict) or not {"constants", "claims"} <= set(table) <= {
            "constants",
            "claims",
            "origins",
        }:
            problems.append(f"{where}: has constants, claims and perhaps origins, and nothing else")
            continue
        lists = [table["claims"], table.get("origins", [])]
        if not isinstance(table["constants"], str) or not all(map(_is_texts, lists)) or not table["claims"]:
            problems.append(f"{where}: constants is a text; claims and origins are lists of texts, claims not empty")
            continue
        found.append(Fit(table["constants"], tuple(table["claims"]), tuple(lists[1])))
    return found


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _shown(text: str) -> str:
    return printable(repr(text), _MAX_SHOWN)


def selected(book: Ledger, words: Iterable[str]) -> list[str]:
    """Ids that the words name: a source (`003`), a claim (`000-204`), or several (`000-204..213`).

    Raises `LedgerError` with a line for each word that names nothing.
    """
    problems, found = [], dict[str, None]()
    sources = list(dict.fromkeys(claim.source for claim in book))
    for word in words:
        first, dots, last = word.partition("..")
        if word in sources:
            found |= dict.fromkeys(claim.id for claim in book.of_source(word))
            continue
        if last and len(last) < len(first):
            last = first[: -len(last)] + last
        ends = [first, last] if dots else [first, first]
        unknown = [end for end in ends if end not in book.claims]
        if unknown:
            what = "no such claim" if _ID.fullmatch(unknown[0]) else "no source and no claim"
            problems.append(
                f"{_shown(word)}: {what}; name a source ({', '.join(sources)}), a claim such as 000-204,"
                " or 000-204..213"
            )
            continue
        named = [id_ for id_ in book.claims if ends[0] <= id_ <= ends[1]]
        if not named:
            problems.append(f"{_shown(word)}: begins after its end; swap the two")
        found |= dict.fromkeys(named)
    if problems:
        raise LedgerError(problems)
    return list(found)
