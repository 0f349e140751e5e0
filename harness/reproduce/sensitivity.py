"""Which constants of the hardware sheets a verdict hangs on: one at a time, a fifth less and a fifth more.

Each change is computed in a process of its own, from the sheet on: whatever a source's package keeps was made with it.
A sheet on which none of the asked rows hangs is left out: one computation with all of its constants changed tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from devices.base import DeviceError
from devices.models import in_place
from devices.models.sheet import load_sheet
from devices.models.variations import constants, varied
from engines.errors import EngineError
from harness.processes import processes
from harness.reproduce.ledger import ledger
from harness.reproduce.outcome import reproduce
from harness.reproduce.told import ours_text

FACTORS: Final = (0.8, 1.2)
N_PROCESSES: Final = 2


class Outcome(NamedTuple):
    """Of one claim. has_held: None where the row tests nothing."""

    ours: str
    words: str
    has_held: bool | None


class Change(NamedTuple):
    """One constant of one sheet. name: None where nothing is changed."""

    sheet: str
    constant: str
    factor: float


class Flip(NamedTuple):
    """A verdict that is another with that constant."""

    claim: str
    change: Change
    before: Outcome
    after: Outcome


class Varied(NamedTuple):
    """Of one source. moved: claims whose figure changed, by change. flips: those whose verdict did."""

    source: str
    changes: tuple[Change, ...]
    moved: Mapping[Change, int]
    flips: tuple[Flip, ...]
    failed: Mapping[Change, str]
    """Changes with which nothing could be computed, and why."""
    unused: tuple[str, ...] = ()
    """Sheets that were read and on which none of these claims hangs: they were not changed."""


def tested(source: str, claims: Sequence[str], say: Callable[[str], object]) -> Varied:
    """source: its id. claims: those of them that are looked at."""
    own = [claim for claim in claims if claim.startswith(f"{source}-")]
    with processes(N_PROCESSES, once=True) as first:
        before, asked = first.submit(_base, own).result()
    with processes(N_PROCESSES, once=True) as pool:
        hang = list(pool.map(_hangs_on, asked, [own] * len(asked), [before] * len(asked)))
    unused = tuple(name for name, hangs in zip(asked, hang, strict=True) if not hangs)
    for name in unused:
        say(f"{name}: no row hangs on it")
    changes = [
        Change(name, constant.name, factor)
        for name in asked
        if name not in unused
        for constant in constants(load_sheet(name))
        for factor in FACTORS
    ]
    moved: dict[Change, int] = {}
    flips: list[Flip] = []
    failed: dict[Change, str] = {}
    with processes(N_PROCESSES, once=True) as pool:
        waiting = [(change, pool.submit(changed_verdicts, change, own)) for change in changes]
        for change, done in waiting:
            after = done.result()
            say(f"{change.sheet}: {change.constant} times {change.factor:g}")
            if isinstance(after, str):
                failed[change] = after
                continue
            moved[change] = sum(before[claim].ours != after[claim].ours for claim in own)
            flips += [
                Flip(claim, change, before[claim], after[claim])
                for claim in own
                if before[claim].has_held != after[claim].has_held
            ]
    return Varied(source, tuple(changes), moved, tuple(flips), failed, unused)


def _base(claims: Sequence[str]) -> tuple[dict[str, Outcome], list[str]]:
    """(verdicts, the sheets that were asked for)."""
    found = _verdicts(claims)
    return found, sorted(in_place.asked)


def _hangs_on(name: str, claims: Sequence[str], before: Mapping[str, Outcome]) -> bool:
    """Whether any figure moves, or cannot be computed, where all constants of a sheet change: each by another factor,
    so that no ratio of two of them stays."""
    sheet = load_sheet(name)
    for number, constant in enumerate(constants(sheet)):
        sheet = varied(sheet, constant, 1.1 + 0.017 * number)
    in_place.changed[name] = sheet
    after = _outcomes(claims)
    return isinstance(after, str) or any(before[claim].ours != after[claim].ours for claim in claims)


def changed_verdicts(change: Change, claims: Sequence[str]) -> dict[str, Outcome] | str:
    """Verdicts, or why there are none."""
    sheet = load_sheet(change.sheet)
    constant = next(one for one in constants(sheet) if one.name == change.constant)
    in_place.changed[change.sheet] = varied(sheet, constant, change.factor)
    return _outcomes(claims)


def _outcomes(claims: Sequence[str]) -> dict[str, Outcome] | str:
    """Verdicts, or why there are none."""
    try:
        return _verdicts(claims)
    except (DeviceError, EngineError, ValueError) as error:
        return str(error)
    except LookupError as error:
        return f"a machine that the source's own would not be, nothing stands there for {error}"


def _verdicts(claims: Sequence[str]) -> dict[str, Outcome]:
    (found,) = reproduce(ledger(), claims, False, lambda line: None)
    return {
        row.claim.id: Outcome(
            "" if row.finding is None else ours_text(row.finding.ours), row.verdict.words, row.verdict.has_held
        )
        for row in found.rows
    }


COLUMNS = ("claim", "sheet", "constant", "factor", "ours", "verdict", "ours_changed", "verdict_changed")


def flip_records(found: Sequence[Varied]) -> Iterator[dict[str, Any]]:
    """For the CSV."""
    for one in found:
        for flip in one.flips:
            figures = (
                flip.claim, flip.change.sheet, flip.change.constant, flip.change.factor, flip.before.ours,
                flip.before.words, flip.after.ours, flip.after.words,
            )  # fmt: skip
            yield dict(zip(COLUMNS, figures, strict=True))


def constant_rows(one: Varied) -> list[dict[str, Any]]:
    """A line for each constant that flips a verdict: those of the most flips first."""
    rows = []
    for sheet, constant in dict.fromkeys((change.sheet, change.constant) for change in one.changes):
        changes = [change for change in one.changes if (change.sheet, change.constant) == (sheet, constant)]
        by_factor = {
            factor: [flip.claim for flip in one.flips if flip.change == Change(sheet, constant, factor)]
            for factor in FACTORS
        }
        if any(by_factor.values()):
            rows.append(
                {
                    "sheet": sheet,
                    "constant": constant,
                    "figures_moved": max(one.moved.get(change, 0) for change in changes),
                    "flips_a_fifth_less": ", ".join(by_factor[FACTORS[0]]),
                    "flips_a_fifth_more": ", ".join(by_factor[FACTORS[1]]),
                }
            )
    return sorted(rows, key=_n_flips, reverse=True)


def _n_flips(row: dict[str, Any]) -> int:
    return sum(len(row[key].split(",")) for key in ("flips_a_fifth_less", "flips_a_fifth_more") if row[key])
