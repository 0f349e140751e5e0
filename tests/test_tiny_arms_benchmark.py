"""The page about the bundled model's arms says what the run's tables say, in the same units."""

from __future__ import annotations

from typing import Any

import pandas as pd

from tests.benchmarks import tiny_arms
from tests.benchmarks.measurement import measured


def row(engine: str, workload: str, quantity: str, value: float, **more: Any) -> dict[str, Any]:
    return {"engine": engine, "workload": workload, "quantity": quantity, "value": value, "p": None} | more


def table() -> pd.DataFrame:
    rows = []
    for engine, accuracy, p in (("dropless", 0.9, None), ("tiers", 0.5, 0.001)):
        for workload, (metric, _) in tiny_arms.SCORES.items():
            test = {"n_changed": 8, "n_pairs": 20, "test": "McNemar, exact"}
            rows.append(row(engine, workload, metric, accuracy, standard_error=0.1, p=p, **test))
            rows += [row(engine, workload, "drop_rate", 4.0), row(engine, workload, "pad_rate", 50.0)]
        rows += [row(engine, "fidelity", "drop_rate", 90.0), row(engine, "fidelity", "kl_nats", 0.25)]
        rows += [row(engine, "fidelity", "perplexity", 3.5), row(engine, "fidelity", "same_top1", 0.75)]
    return pd.DataFrame(rows).astype({"n_changed": "Int64", "n_pairs": "Int64"})


def test_rates_are_percent_already_and_shares_become_percent() -> None:
    cells = [cell.strip() for cell in tiny_arms.arms_table(table()).splitlines()[2].split("|")[1:-1]]
    # What the texts of `fidelity` drop is not among the tasks' mean.
    assert cells == ["dropless", "4.00", "50.0", *["90.0 ± 10.0"] * 4, "3.50", "0.250", "75.0"]


def test_what_a_paired_test_tells_from_the_reference_is_bold() -> None:
    cells = [cell.strip() for cell in tiny_arms.arms_table(table()).splitlines()[3].split("|")[1:-1]]
    assert cells[3:7] == ["**50.0 ± 10.0**"] * 4
    rows = tiny_arms.arm_rows(table())
    assert [m.note for m in rows if m.conditions == "tiers"] == [
        "standard error 10.0 %, 8 of 20 samples changed, McNemar, exact p = 0.001"
    ] * 4
    assert {m.peer for m in rows} == {90.0}


def test_a_matrix_has_a_row_and_a_column_for_each_name() -> None:
    found = [measured("overlap", i, "", f"{a}, {b}") for i, (a, b) in enumerate(("xx", "xy", "yx", "yy"))]
    lines = tiny_arms.matrix(found, "from").splitlines()
    assert lines[0] == "| from | x | y |"
    assert lines[2:] == ["| x | 0 | 1.00 |", "| y | 2.00 | 3.00 |"]
