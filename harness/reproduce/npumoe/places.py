"""Where the figures of NPUMoE (000) stand in the ledger: its tables by row and column, as numbers of claims."""

from __future__ import annotations

SOURCE = "000"

TABLE_3 = ("BoolQ", "HellaSwag", "RULER niah_single_2", "RULER niah_multikey_1")
TABLE_3_COLUMNS = ("dropped %", "padded %", "accuracy in FP16 %", "accuracy of ours %", "change %")
TABLE_4 = ("router", "gather", "padding", "expert FFN", "scatter", "residual", "whole block")
"""Operations under the names that a priced step gives them."""
ARMS = ("coreml-cpu", "coreml-naive", "anemll", "npumoe")
"""Columns of Table 4, as presets."""
BASELINES = ARMS[:3]
TABLE_5 = (
    (1, 0), (1, 32), (1, 64), (1, 128), (4, 32), (4, 64), (8, 32), (8, 64), (8, 96), (8, 128), (8, 192), (8, 256),
)  # fmt: skip
"""(G experts a graph, C rows of each); (1, 0) is the row of enumerated shapes, 1 to 512."""
TABLE_5_COLUMNS = ("graphs", "parallel ms", "parallel mJ", "serial ms", "serial mJ")
MODES = ("ours", "coreml", "anemll")
"""Rows of Tables 6 and 7."""
TABLE_6_COLUMNS = ("wall s", "experts s", "attention s", "speedup")
TABLE_7_COLUMNS = ("energy J", "CPU J", "ANE J", "comm J", "efficiency")
METRICS = ("runtime", "energy", "power")
"""Rows of Tables 8 and 9: of the GPU, of the NPU, and their ratio."""


def claim(number: int) -> str:
    """The id of a claim of this source."""
    return f"{SOURCE}-{number:03}"


def table_3(dataset: int, column: str) -> str:
    return claim(88 + 5 * dataset + TABLE_3_COLUMNS.index(column))


def table_4(operation: str, arm: str) -> str:
    return claim(112 + 4 * TABLE_4.index(operation) + ARMS.index(arm))


def table_5(config: tuple[int, int], column: str) -> str:
    return claim(144 + 5 * TABLE_5.index(config) + TABLE_5_COLUMNS.index(column))


def table_6(mode: str, column: str) -> str:
    return claim(234 + 4 * MODES.index(mode) + TABLE_6_COLUMNS.index(column))


def table_7(mode: str, column: str) -> str:
    return claim(246 + 5 * MODES.index(mode) + TABLE_7_COLUMNS.index(column))


def table_8(metric: str, column: int) -> str:
    """column: 0 of the GPU, 1 of the NPU, 2 their ratio."""
    return claim(261 + 3 * METRICS.index(metric) + column)


def table_9(metric: str, column: int) -> str:
    return claim(270 + 3 * METRICS.index(metric) + column)
