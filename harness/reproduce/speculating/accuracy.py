"""Table 1 of 003: what its accuracies say of themselves. No checkpoint is at hand that could give them.

A mean of n right or wrong answers is one of 0/n .. n/n, and its standard error is sqrt(p (1 - p) / n): with that n, 68
of its 72 error bars come out digit by digit, and the other four are where the scan is not legible. With n - 1, as an
unbiased variance has it, fewer do.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from harness.reproduce.ledger import Claim, Ledger
from harness.reproduce.printed import Number, WithError

_OF_N = re.compile(r"(?P<arm>.+) (?P<task>[\w+]+)\((?:n=)?(?P<n>\d+)\)$")
_READ_AS = re.compile(r"error bar was read as (?P<read>\d\.\d+)")


class Accuracy(NamedTuple):
    """A row of Table 1. p, error: as printed. read: the error bar as it was first read off the scan."""

    claim: str
    arm: str
    task: str
    n: int
    p: Number
    error: Number
    read: str

    @property
    def n_right(self) -> int | None:
        """Right answers that give p as it is printed, the nearest; None where no whole number does."""
        near = round(self.p.value * self.n)
        return near if abs(near / self.n - self.p.value) <= self.p.half_digit else None

    @property
    def share(self) -> float:
        """p before it was rounded, as far as that can be told."""
        return self.p.value if self.n_right is None else self.n_right / self.n

    @property
    def standard_error(self) -> float:
        return math.sqrt(self.share * (1 - self.share) / self.n)

    @property
    def is_as_read(self) -> bool:
        """Whether the error bar that was read first is the formula's, in its own digits."""
        return self._is_read(self.standard_error)

    @property
    def is_unbiased(self) -> bool:
        """Whether it is that with n - 1 in the place of n."""
        return self._is_read(math.sqrt(self.share * (1 - self.share) / (self.n - 1)))

    def _is_read(self, error: float) -> bool:
        read = Number(self.read)
        return abs(error - read.value) <= read.half_digit


def accuracies(book: Ledger) -> list[Accuracy]:
    """All rows of Table 1 with an error bar."""
    found = []
    for claim in book.of_source("003"):
        match = _OF_N.fullmatch(claim.quantity)
        if match is None or not isinstance(claim.printed, WithError):
            continue
        printed = claim.printed
        read = _READ_AS.search(claim.corrected)
        found.append(
            Accuracy(
                claim.id, match["arm"], match["task"], int(match["n"]), printed.number, printed.error,
                read["read"] if read else printed.error.text,
            )
        )  # fmt: skip
    return found


def averages(book: Ledger) -> dict[str, float]:
    """Of each row "Average", by its id: the mean of its arm's accuracies as printed."""
    by_arm: dict[str, list[float]] = {}
    for row in accuracies(book):
        by_arm.setdefault(row.arm, []).append(row.p.value)
    found = {}
    for claim in book.of_source("003"):
        arm = arm_of_average(claim)
        if arm is not None:
            found[claim.id] = sum(by_arm[arm]) / len(by_arm[arm])
    return found


def arm_of_average(claim: Claim) -> str | None:
    arm, word, rest = claim.quantity.rpartition(" Average")
    return arm if word and not rest else None


def recovered(book: Ledger, task: str = "GSM8k", model: str = "Qwen3-30B-A3B") -> tuple[float, float]:
    """Of a task, what Hybrid-PF makes good of what Router-PF loses: points of accuracy, and % of the gap."""
    p = {row.arm: row.p.value for row in accuracies(book) if row.task == task}
    gained, lost = p[f"{model}+Hybrid-PF"] - p[f"{model}+Router-PF"], p[model] - p[f"{model}+Router-PF"]
    return 100 * gained, 100 * gained / lost
