"""Rows of measurements that sentences of docs/engine.md and README.md follow from."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.benchmarks.measurement import Measurement, read_json

ROOT = Path(__file__).parents[1]
AVX512, HELD, AVX2 = "AVX-512 (Zen 5)", "AVX2 held (Zen 5)", "AVX2 (Zen 3)"
ZEN_4 = "AVX-512 (Zen 4)"
INTEL = "AVX-512 (Emerald Rapids)"


def words_of(name: str) -> str:
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def chosen(page: str, metric: str, peer: str, *conditions: str) -> list[Measurement]:
    """Rows with a ratio whose metric, peer and conditions have these words."""
    return [
        row
        for row in read_json(page)
        if row.ratio is not None
        and row.metric.startswith(metric)
        and peer in (row.peer_name or "")
        and all(f", {words}," in f", {row.conditions}," for words in conditions)
    ]


def ratios(rows: Iterable[Measurement], digits: int) -> str:
    found = [row.ratio for row in rows if row.ratio is not None]
    low, high = (f"{ratio:.{digits}f}" for ratio in (min(found), max(found)))
    return low if low == high else f"{low} to {high}"


def forms(
    names: Iterable[str], *conditions: str, metric: str = "prefill", peer: str = "large GEMM"
) -> list[Measurement]:
    return [row for name in names for row in chosen("engine-speed", metric, peer, name, *conditions)]
