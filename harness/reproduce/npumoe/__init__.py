"""NPUMoE (000): what we find for each of its claims, and its tables and figures drawn again."""

from __future__ import annotations

from collections.abc import Iterable

from harness.reproduce.findings import Finding
from harness.reproduce.npumoe import drawn_figures, drawn_tables, rows_of_prefill, rows_of_tables
from harness.reproduce.redrawn import SourceTable


def findings() -> Iterable[Finding]:
    yield from rows_of_tables.findings()
    yield from rows_of_prefill.findings()


def tables() -> Iterable[SourceTable]:
    yield from drawn_tables.tables()
    yield from drawn_figures.figures()
