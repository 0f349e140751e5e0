"""NPUMoE (000): what we find for each of its claims, and its tables and figures drawn again."""

from __future__ import annotations

from collections.abc import Iterable

from harness.reproduce.findings import Finding
from harness.reproduce.redrawn import SourceTable


def findings() -> Iterable[Finding]:
    from harness.reproduce.npumoe import prefill_rows, table_rows

    yield from table_rows.findings()
    yield from prefill_rows.findings()


def tables() -> Iterable[SourceTable]:
    return ()
