"""Where Core ML would put each operation of each graph of a converted folder, as a CSV. Needs a Mac.

python -m tests.mac.placement PACKAGES placement.csv
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from engines.coreml.macos import MacPredictor
from engines.coreml.manifest import read_manifest
from engines.errors import EngineError
from results.report.csv import csv_text
from results.report.files import replace_text


def rows(folder: Path) -> Iterator[dict[str, Any]]:
    """One a function; what fails is a row with its reason."""
    predictor = MacPredictor(folder)
    for package in read_manifest(folder).packages:
        for function in package.functions:
            row: dict[str, Any] = {"package": package.path, "function": function.name, "ane": None, "cpu": None}
            row |= {"gpu": None, "cost_on_ane": None, "reason": None}
            try:
                found = predictor.placement(package, function.name, "cpu_and_ne")
            except EngineError as error:
                yield row | {"reason": str(error)}
                continue
            if found is None:
                yield row | {"reason": "Core ML tells no placement"}
            else:
                counted = {unit: len(names) for unit, names in found.operations.items()}
                yield row | counted | {"cost_on_ane": found.cost_on_ane}


def main() -> None:
    folder, out = map(Path, sys.argv[1:])
    replace_text(out, csv_text(pd.DataFrame(list(rows(folder)))))


if __name__ == "__main__":
    main()
